"""The configuration: what it derives, what it refuses and in which words, what it writes."""

import json

import pytest
from transformers import AutoConfig

from triadic.models import TriadicConfig
from triadic.models.cache import RECURRENT
from triadic.models.configuration_triadic import LAYER_TYPES
from triadic.models.mixers import MIXERS

FULL, LINEAR = "full_attention", "linear_attention"

# changes -> what the one sentence must name
REFUSED = {
    "misspelt": ({"second_key_dimm": 8}, ("'second_key_dimm'", "'second_key_dim'")),
    "misspelt layers": ({"layers_types": [LINEAR]}, ("'layers_types'", "'layer_types'")),
    "unknown": ({"window": 8}, ("'window'", "nearest")),
    "wrong type": ({"hidden_size": "1024"}, ("hidden_size", "int")),
    "wrong type of list": ({"layer_types": LINEAR}, ("layer_types",)),
    "float": ({"second_key_dim": 2.5}, ("second_key_dim", "2.5")),
    "E": ({"second_key_dim": 0}, ("second_key_dim is 0", "at least 1")),
    "heads": ({"num_attention_heads": 0}, ("num_attention_heads is 0",)),
    "hidden against heads": (
        {"hidden_size": 100, "layer_types": [FULL], "num_hidden_layers": 1},
        ("hidden_size 100", "num_attention_heads 8"),
    ),
    "hidden against linear heads": ({"hidden_size": 100}, ("hidden_size 100", "linear_num_key_heads 8")),
    "number of layers": ({"layer_types": [LINEAR] * 3}, ("3 entries", "num_hidden_layers is 24")),
    "layer type": ({"layer_types": ["mamba2"] * 24}, ("'mamba2'", LINEAR, FULL)),
    "another layer type": ({"layer_types": ["sliding_attention"] * 24}, ("'sliding_attention'",)),
    "tied keys": ({"tie_second_key": True, "second_key_dim": 8}, ("tie_second_key", "8 and 128")),
    "value heads": ({"linear_num_value_heads": 12}, ("linear_num_value_heads 12", "linear_num_key_heads 8")),
    "key/value heads": (
        {"num_key_value_heads": 3, "layer_types": [FULL] * 24},
        ("num_attention_heads 8", "num_key_value_heads 3"),
    ),
    "odd head for RoPE": ({"head_dim": 33, "layer_types": [FULL] * 24}, ("head_dim is 33", "even")),
    "rope type": (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}, "layer_types": [FULL] * 24},
        ("'spiral'", "default"),
    ),
    "rope key": (
        {"rope_parameters": {"rope_thet": 5e5}, "layer_types": [FULL] * 24},
        ("'rope_thet'", "nearest is 'rope_theta'"),
    ),
    "rope base": (
        {"rope_parameters": {"rope_theta": -1.0}, "layer_types": [FULL] * 24},
        ("rope_theta is -1.0",),
    ),
    "rope base of text": (
        {"rope_parameters": {"rope_theta": "1e4"}, "layer_types": [FULL] * 24},
        ("rope_theta is '1e4'",),
    ),
    "rope factor": ({"rope_parameters": {"rope_type": "yarn"}, "layer_types": [FULL] * 24}, ("Missing", "'factor'")),
    "norm": ({"rms_norm_eps": 0.0}, ("rms_norm_eps 0.0 must lie above 0",)),
    "initial weights": ({"initializer_range": -0.02}, ("initializer_range -0.02 must lie at or above 0",)),
    "dropout": ({"attention_dropout": 1.0}, ("attention_dropout 1.0 must lie in [0, 1)",)),
    "length": ({"max_position_embeddings": 0}, ("max_position_embeddings is 0",)),
    "mixer": ({"linear_mixer": "mamba"}, ("linear_mixer is 'mamba'", "'gdn', 'sgla'")),
    "decay gate": ({"decay_gate": "token"}, ("decay_gate is 'token'", "'slice', 'head', 'none'")),
    "activation": ({"second_key_activation": "exp"}, ("second_key_activation is 'exp'", "'softplus'")),
    "output gate": ({"output_gate_activation": "tanh"}, ("output_gate_activation is 'tanh'",)),
    "output gate rank": ({"output_gate_rank": 0}, ("output_gate_rank is 0", "null")),
    "convolution": ({"linear_conv_kernel_dim": -1}, ("linear_conv_kernel_dim is -1",)),
    "positions": ({"position_embedding": "alibi"}, ("position_embedding is 'alibi'",)),
}


def test_layer_types_are_those_that_have_a_mixer():
    assert set(LAYER_TYPES) == set(MIXERS) >= set(RECURRENT)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case):
    changes, named = REFUSED[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is examined below
        TriadicConfig(**changes)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in named), message


def test_a_misspelt_key_in_a_file_is_refused(tmp_path):
    fields = TriadicConfig().to_dict() | {"linear_mixr": "gdn"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="'linear_mixr'; the nearest is 'linear_mixer'"):
        TriadicConfig.from_pretrained(tmp_path)


def test_what_transformers_writes_is_read_back(tmp_path):
    config = TriadicConfig(
        second_key_dim=8, architectures=["TriadicForCausalLM"], dtype="bfloat16", attn_implementation="eager"
    )
    config.auto_map = {"AutoConfig": "configuration_triadic.TriadicConfig"}
    config.save_pretrained(tmp_path)
    again = TriadicConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert AutoConfig.from_pretrained(tmp_path).second_key_dim == 8
    assert TriadicConfig(**config.to_dict()).to_dict() == config.to_dict()
    assert TriadicConfig(temperature=0.5, max_length=9).vocab_size == 32000  # generation settings of old files


def test_derived_sizes():
    config = TriadicConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    assert config.layer_types == [LINEAR] * 3
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (4, 4)
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (16, 16)


def test_no_positions_means_no_rope_parameters(tmp_path):
    """transformers fills rope_parameters=None with a base; NoPE is said by position_embedding and survives saving."""
    config = TriadicConfig(position_embedding="none")
    assert config.rope_parameters is None
    config.save_pretrained(tmp_path)
    assert TriadicConfig.from_pretrained(tmp_path).rope_parameters is None
    assert TriadicConfig().rope_parameters["rope_theta"] == 10000.0


def test_second_projections_exist_only_where_second_keys_can_differ_from_one():
    assert TriadicConfig(second_key_dim=2).has_second_projections
    assert not TriadicConfig(second_key_dim=1).has_second_projections
    assert TriadicConfig(second_key_dim=1, linear_qk_norm=False).has_second_projections
    assert not TriadicConfig(second_key_dim=128, tie_second_key=True).has_second_projections
