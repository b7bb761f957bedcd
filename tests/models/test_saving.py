"""What is saved comes back bit by bit, in any dtype, through every door of transformers."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from triadic.models import TriadicConfig, TriadicForCausalLM, TriadicModel

FP32 = ("A_log", "dt_bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(kind, make_model, tokens, tmp_path, dtype):
    make_model(kind).save_pretrained(tmp_path / "first")
    model = TriadicForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype).eval()
    exact = dict(make_model(kind).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith(FP32) else dtype), name
        assert torch.equal(parameter, exact[name].to(parameter.dtype)), name
    model.save_pretrained(tmp_path / "second")
    stored = load_file(tmp_path / "second" / "model.safetensors")
    for again in (
        TriadicForCausalLM.from_pretrained(tmp_path / "second", dtype="auto"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "second", dtype=dtype),
    ):
        for name, parameter in again.named_parameters():
            assert parameter.dtype == (torch.float32 if name.endswith(FP32) else dtype), name
            assert torch.equal(parameter, dict(model.named_parameters())[name]), name
            assert torch.equal(parameter, stored[name]), name
        with torch.no_grad():
            assert torch.equal(again.eval()(tokens(2, 7)).logits, model(tokens(2, 7)).logits)


def test_weights_drawn_in_bfloat16_keep_float32_gates(make_config):
    model = AutoModelForCausalLM.from_config(make_config("hybrid"), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith(FP32) else torch.bfloat16), name


def test_names_and_shapes_of_tensors(make_model):
    """The file format of a layer of each kind; renaming a tensor would orphan every checkpoint."""
    model = make_model("hybrid")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    layer = {name.split("layers.0.")[1]: shape for name, shape in shapes.items() if "layers.0." in name}
    assert layer == {
        "input_layernorm.weight": (32,),
        "mixer.A_log": (12,),  # 4 value heads x 3 slices, flat: no weight decay
        "mixer.dt_bias": (12,),
        "mixer.conv1d.weight": (92, 4),
        "mixer.g_proj.bias": (48,),
        "mixer.g_proj.weight": (48, 6),
        "mixer.in_proj_gates.weight": (12 + 4 + 6, 32),
        "mixer.in_proj_qkv.weight": (16 + 16 + 48 + 6 + 6, 32),
        "mixer.o_norm.weight": (12,),
        "mixer.o_proj.weight": (32, 48),
        "mlp.down_proj.weight": (32, 48),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "post_attention_layernorm.weight": (32,),
    }
    softmax = {name.split("layers.1.mixer.")[1]: shape for name, shape in shapes.items() if "layers.1.mixer" in name}
    assert softmax == {
        "k_norm.weight": (8,),
        "k_proj.weight": (16, 32),
        "o_proj.weight": (32, 32),
        "q_norm.weight": (8,),
        "q_proj.weight": (32, 32),
        "v_proj.weight": (16, 32),
    }
    assert {name for name in shapes if "layers" not in name} == {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    }


def test_e1_has_no_second_projections(make_model):
    weights = make_model("gdn", second_key_dim=1).state_dict()
    assert weights["model.layers.0.mixer.in_proj_qkv.weight"].shape[0] == 16 + 16 + 24


def test_auto_classes(make_model, tmp_path):
    make_model("gdn").save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is TriadicConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is TriadicForCausalLM
    assert type(AutoModel.from_pretrained(tmp_path)) is TriadicModel


def test_tied_embeddings(make_model, tokens, tmp_path):
    model = make_model("gdn", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = TriadicForCausalLM.from_pretrained(tmp_path).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


def test_a_larger_vocabulary(make_model, tokens, close):
    """After resize_token_embeddings the model still computes its loss in chunks."""
    model, ids = make_model("gdn"), tokens(1, 6)
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(70)
    with torch.no_grad():
        close(model(ids).logits[..., :61], before, 1e-6)
        expected = model(ids, labels=ids).loss
        close(model.train()(ids, labels=ids).loss, expected, 1e-6)


def test_a_large_checkpoint_in_shards(make_model, tokens, tmp_path):
    model = make_model("hybrid")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        again = TriadicForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(again(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


def test_config_file_is_the_models(make_model, tmp_path):
    model = make_model("hybrid")
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "triadic"
    assert fields["architectures"] == ["TriadicForCausalLM"]
    assert fields["second_key_dim"] == 3
    assert fields["position_embedding"] == "none"


def test_importing_needs_no_gpu_and_no_triton():
    """`import triadic` in a process where triton cannot be imported and no device is visible, then one step."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, triadic\n"
        "from transformers import AutoModelForCausalLM\n"
        "config = triadic.TriadicConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,\n"
        "    num_attention_heads=2, second_key_dim=2)\n"
        "model = AutoModelForCausalLM.from_config(config).train()\n"
        "ids = torch.ones(1, 4, dtype=torch.long)\n"
        "model(ids, labels=ids).loss.backward()\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('trained')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "trained", done.stderr
