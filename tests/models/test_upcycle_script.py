"""scripts/upcycle.py on a checkpoint folder."""

import runpy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

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


def test_what_cannot_be_widened_ends_in_one_sentence(run, checkpoint, tmp_path):
    with pytest.raises(SystemExit, match="error: second_key_dim 1 is no larger multiple"):
        run(checkpoint, tmp_path / "new", "--second_key_dim", 1)
    assert not (tmp_path / "new").exists()


def test_targets_that_cannot_be_used(run, checkpoint, tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*Not a directory"):
        run(checkpoint, checkpoint / "config.json" / "new", "--second_key_dim", 4)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "upcycled.json").write_text("{")
    with pytest.raises(SystemExit, match="torn exists and is not of this command"):
        run(checkpoint, tmp_path / "torn", "--second_key_dim", 4)
    with pytest.raises(SystemExit, match=r"config\.json; give a Hugging Face folder"):
        run(checkpoint / "config.json", tmp_path / "new", "--second_key_dim", 4)
