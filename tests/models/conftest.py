"""Tiny models of every kind, with weights large enough for each of them to matter."""

import pytest
import torch

from triadic.models import TriadicConfig, TriadicForCausalLM

LINEAR, FULL = "linear_attention", "full_attention"
KINDS = {
    "gdn": {"layer_types": [LINEAR, LINEAR]},
    "sgla": {"layer_types": [LINEAR, LINEAR], "linear_mixer": "sgla", "decay_gate": "head", "write_gate": False},
    "hybrid": {"layer_types": [LINEAR, FULL, LINEAR], "position_embedding": "none", "linear_num_value_heads": 4},
    "deltaproduct": {"layer_types": [LINEAR, LINEAR], "num_householder": 2, "allow_neg_eigval": True},
    "softmax_first": {"layer_types": [FULL, LINEAR]},
    "transformer": {"layer_types": [FULL, FULL]},
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "initializer_range": 0.25,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "second_key_dim": 3,
    "output_gate_rank": 6,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _config(kind="gdn", **changes):
    fields = {**BASE, **KINDS[kind], **changes}
    return TriadicConfig(**fields, num_hidden_layers=len(fields["layer_types"]))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make_config():
    return _config


@pytest.fixture
def make_model():
    def make(kind="gdn", seed=0, **changes):
        torch.manual_seed(seed)
        model = TriadicForCausalLM(_config(kind, **changes)).eval()
        with torch.no_grad():  # norms away from 1, biases away from 0
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 and "A_log" not in name and "dt_bias" not in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if "dt_bias" in name:
                    parameter.add_(3.0)  # decays that are felt within a few tokens
        return model

    return make


@pytest.fixture
def tokens():
    def draw(*shape, seed=1):
        return torch.randint(2, BASE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture
def cache_tensors():
    """What a cache remembers of row `row`: per layer its states, or the keys and values of the real tokens."""

    def read(outputs, row=0, real=None):
        cache = outputs["cache"] if "cache" in outputs else outputs["past_key_values"]
        found = []
        for layer in cache.layers:
            if layer.keys is not None:
                keep = slice(None) if real is None else real
                found += [layer.keys[row][:, keep], layer.values[row][:, keep]]
            else:
                states = (layer.conv_states[0], layer.recurrent_states[0])
                found += [state[row] for state in states if state is not None]
        return found

    return read


@pytest.fixture
def close():
    def check(actual, expected, tolerance=1e-4):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    return check
