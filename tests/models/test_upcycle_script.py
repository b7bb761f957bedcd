"""scripts/upcycle.py on a checkpoint folder."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "upcycle.py")


@pytest.fixture
def checkpoint(make_model, tmp_path):
    make_model("gdn", second_key_dim=1).save_pretrained(tmp_path / "old")
    words = {f"w{i}": i for i in range(61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w3"
    ).save_pretrained(tmp_path / "old")
    return tmp_path / "old"


@pytest.fixture
def run(monkeypatch):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["upcycle.py", *map(str, arguments)])
        runpy.run_path(SCRIPT, run_name="__main__")

    return call


def test_the_folder_holds_model_and_tokenizer(run, checkpoint, tmp_path, tokens, capsys):
    target = tmp_path / "new"
    run(checkpoint, target, "--second_key_dim", 4, "--start", "exact")
    assert "E = 4" in capsys.readouterr().out
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in (checkpoint, target))
    assert new.config.second_key_dim == 4
    x = tokens(1, 30)
    torch.testing.assert_close(new(x).logits, old(x).logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(target).get_vocab() == AutoTokenizer.from_pretrained(checkpoint).get_vocab()


def test_the_same_command_twice_is_one_folder_and_another_is_refused(run, checkpoint, tmp_path, capsys):
    target = tmp_path / "new"
    run(checkpoint, target, "--second_key_dim", 4)
    written = (target / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(SystemExit) as end:
        run(checkpoint, target, "--second_key_dim", 4)
    assert not end.value.code
    assert "already there" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="exists and is not of this command"):
        run(checkpoint, target, "--second_key_dim", 8)
    assert (target / "model.safetensors").stat().st_mtime_ns == written


@pytest.fixture
def public(checkpoint, tmp_path):
    """Folders of public classes beside the checkpoint's tokenizer: a Qwen3.5, and fla's GatedDeltaNet by its files."""

    def make(kind):
        folder = tmp_path / kind
        shutil.copytree(checkpoint, folder)
        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        if kind == "qwen3_5_text":
            linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
            AutoModelForCausalLM.from_config(
                AutoConfig.for_model(
                    kind, **sizes, **linear, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"]
                )
            ).save_pretrained(folder)
            return folder
        square = {f"attn.{name}_proj.weight": (32, 32) for name in "qkvgo"}
        gates = {"attn.a_proj.weight": (4, 32), "attn.b_proj.weight": (4, 32), "attn.A_log": (4,), "attn.dt_bias": (4,)}
        others = {f"attn.{name}_conv1d.weight": (32, 1, 4) for name in "qkv"} | {"attn.o_norm.weight": (8,)}
        others |= {"attn_norm.weight": (32,), "mlp_norm.weight": (32,), "mlp.down_proj.weight": (32, 48)}
        others |= {"mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32)}
        shapes = {f"model.layers.{i}.{n}": s for i in range(2) for n, s in (square | gates | others).items()}
        shapes |= {"model.embeddings.weight": (61, 32), "model.norm.weight": (32,), "lm_head.weight": (61, 32)}
        save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
        config = sizes | {"model_type": kind, "num_heads": 4, "expand_v": 1.0}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gated_deltanet"])
def test_public_checkpoints_are_converted_on_the_way(kind, run, public, tmp_path, tokens):
    source = public(kind)
    run(source, tmp_path / "same", "--second_key_dim", 1)
    run(source, tmp_path / "wide", "--second_key_dim", 4, "--start", "exact")
    run(tmp_path / "same", tmp_path / "later", "--second_key_dim", 4, "--start", "exact")
    same, wide, later = (AutoModelForCausalLM.from_pretrained(tmp_path / n).eval() for n in ("same", "wide", "later"))
    assert (same.config.second_key_dim, wide.config.second_key_dim) == (1, 4)
    x = tokens(1, 30)
    torch.testing.assert_close(wide(x).logits, same(x).logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(later(x).logits, wide(x).logits)
    if kind == "qwen3_5_text":
        expected = AutoModelForCausalLM.from_pretrained(source).eval()(x).logits
        torch.testing.assert_close(same(x).logits, expected, rtol=1e-5, atol=1e-5)
    run(source, tmp_path / "half", "--second_key_dim", 2, "--dtype", "bfloat16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert {p.dtype for n, p in half.named_parameters() if n.endswith(("A_log", "dt_bias"))} == {torch.float32}


def test_other_classes_are_refused(run, checkpoint, tmp_path):
    (checkpoint / "config.json").write_text('{"model_type": "mamba2"}')
    with pytest.raises(
        SystemExit, match=r"error: .* holds a model of type 'mamba2'; those that are read are gated_deltanet"
    ):
        run(checkpoint, tmp_path / "new", "--second_key_dim", 4)


def test_what_cannot_be_widened_ends_in_one_sentence(run, checkpoint, tmp_path):
    with pytest.raises(SystemExit, match="error: second_key_dim 1 is no larger multiple"):
        run(checkpoint, tmp_path / "new", "--second_key_dim", 1)
    assert not (tmp_path / "new").exists()


def test_targets_that_cannot_be_used(run, checkpoint, tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*Not a directory"):
        run(checkpoint, checkpoint / "config.json" / "new", "--second_key_dim", 4)
    (tmp_path / "torn").mkdir()
    for torn in (b"{", b"\xff"):
        (tmp_path / "torn" / "upcycled.json").write_bytes(torn)
        with pytest.raises(SystemExit, match="torn exists and is not of this command"):
            run(checkpoint, tmp_path / "torn", "--second_key_dim", 4)
    with pytest.raises(SystemExit, match=r"config\.json; give a Hugging Face folder"):
        run(checkpoint / "config.json", tmp_path / "new", "--second_key_dim", 4)


def test_a_full_disk_leaves_nothing_half_written(run, checkpoint, tmp_path, monkeypatch):
    def full(self, folder, **_):
        (folder / "config.json").write_text("{}")
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(SystemExit, match=r"^error: .*/new cannot be written: No space left on device$"):
            run(checkpoint, tmp_path / "new", "--second_key_dim", 4)
    assert not (tmp_path / "new").exists()
    run(checkpoint, tmp_path / "new", "--second_key_dim", 4)
