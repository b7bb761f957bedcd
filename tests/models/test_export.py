"""An exported folder loads by trust_remote_code in a process that has never heard of this package."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from triadic.models import export as exporting
from triadic.models.export import export

ROOT = Path(__file__).parents[2]
STRANGER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triadic", "triadic_kernels", "triton"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Absent())
import re
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM

folder, ids, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.load(ids)
with torch.no_grad():
    logits = model(ids).logits
    packed = model(ids[:1], cu_seq_lens_q=torch.tensor([0, 4, ids.shape[1]])).logits
text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
model.train()(ids, labels=ids).loss.backward()
card = re.search("```python\\n(.*?)```", (Path(folder) / "README.md").read_text(), re.DOTALL)[1]
exec(card.replace(f'"{Path(folder).name}"', repr(folder)))  # the card's own lines, which print a text
torch.save({"logits": logits, "packed": packed, "text": text, "module": type(model).__module__}, out)
"""


def make_tokenizer(size):
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}
    words |= {f"w{i}": i for i in range(6, size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture
def checkpoint(make_model, tmp_path):
    def save(kind="hybrid", vocabulary=61):
        model = make_model(kind)
        model.save_pretrained(tmp_path / "checkpoint")
        make_tokenizer(vocabulary).save_pretrained(tmp_path / "checkpoint")
        return model, tmp_path / "checkpoint"

    return save


@pytest.mark.parametrize("kind", ["gdn", "hybrid"])
def test_a_stranger_gets_the_same_logits(checkpoint, tokens, tmp_path, kind, close):
    model, folder = checkpoint(kind)
    export(folder, tmp_path / "exported")
    ids = tokens(2, 9)
    torch.save(ids, tmp_path / "ids.pt")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, tmp_path / "exported", tmp_path / "ids.pt", tmp_path / "out.pt"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "custom code" not in done.stdout + done.stderr  # nobody is asked whether to trust it
    found = torch.load(tmp_path / "out.pt")
    assert found["module"].startswith("transformers_modules")
    with torch.no_grad():
        assert torch.equal(found["logits"], model(ids).logits)
        assert torch.equal(found["packed"], model(ids[:1], cu_seq_lens_q=torch.tensor([0, 4, 9])).logits)
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    assert torch.equal(found["text"], text)


def test_beside_the_installed_package(checkpoint, tokens, tmp_path):
    """Where the package is installed both doors work in one process, and the copied code uses the installed kernels."""
    from transformers import AutoModelForCausalLM

    model, folder = checkpoint("gdn")
    export(folder, tmp_path / "exported")
    with torch.no_grad():
        for remote in (False, True):
            again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=remote).eval()
            assert torch.equal(again(tokens(1, 6)).logits, model(tokens(1, 6)).logits)


def test_contents(checkpoint, tmp_path):
    _, folder = checkpoint()
    export(folder, tmp_path / "exported", dtype="bfloat16")
    out = tmp_path / "exported"
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 0)
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["dtype"] == "bfloat16"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_triadic.TriadicForCausalLM"
    assert AutoTokenizer.from_pretrained(out)("a b").input_ids == [4, 5]
    card = (out / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert "1 full attention, 2 linear attention" in card
    assert not list(out.glob("*.bin"))
    assert list(out.glob("*.safetensors"))
    for file in out.glob("*.py"):
        compile(file.read_text(), file.name, "exec")
        assert not any(line.startswith(("from triadic", "import triadic")) for line in file.read_text().splitlines())


@pytest.mark.parametrize("source", ["README", "card"])
def test_examples_print_the_text_without_special_tokens(source, checkpoint, tmp_path, monkeypatch, capsys):
    _, folder = checkpoint("gdn")
    tokenizer = make_tokenizer(61)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    export(folder, tmp_path / "runs" / "demo" / "final")
    text = (ROOT / "README.md" if source == "README" else tmp_path / "runs/demo/final/README.md").read_text()
    lines = re.search("```python\n(.*?)```", text, re.DOTALL)[1]
    exec(lines.replace('"final", trust_remote_code=True', '"runs/demo/final"'))
    printed = capsys.readouterr().out
    assert "w" in printed
    assert "<" not in printed


def test_the_code_files_are_complete():
    """Every relative import of an exported file is of an exported file."""
    names = {*exporting.MODEL_FILES, *exporting.KERNEL_FILES}
    for name in exporting.MODEL_FILES:
        source = exporting.standalone((ROOT / "src" / "triadic" / "models" / f"{name}.py").read_text())
        assert set(re.findall(r"^\s*from \.(\w+) import", source, re.MULTILINE)) <= names
    for name in exporting.KERNEL_FILES:
        source = (ROOT / "kernels" / "triadic_kernels" / f"{name}.py").read_text()
        assert set(re.findall(r"^\s*from \.(\w+) import", source, re.MULTILINE)) <= names


def test_a_filled_folder_is_left_alone(checkpoint, tmp_path):
    _, folder = checkpoint()
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        export(folder, tmp_path / "exported")
    assert [path.name for path in (tmp_path / "exported").iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_nothing_half_written(checkpoint, tmp_path, monkeypatch):
    _, folder = checkpoint()

    def full(path):
        raise OSError(28, "No space left on device")

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "add_auto_map", full)
        for name in ("exported", "empty"):
            with pytest.raises(ValueError, match=f"{name} cannot be written: .*No space left on device"):
                export(folder, tmp_path / name)
    assert not (tmp_path / "exported").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    export(folder, tmp_path / "empty")


def test_weights_that_do_not_fill_the_model(checkpoint, tmp_path):
    _, folder = checkpoint("gdn")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config; missing: model\.layers\.2\.\S+, \S+, \S+ and \d+ more$"):
        export(folder, tmp_path / "exported")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint cannot be loaded: "):
        export(folder, tmp_path / "exported")
    with pytest.raises(ValueError, match=r"config\.json is a file; give the folder of the model"):
        export(folder / "config.json", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_another_models_tokenizer(checkpoint, tmp_path):
    _, folder = checkpoint(vocabulary=70)
    with pytest.raises(ValueError, match="the tokenizer has 70 entries but the model's vocabulary 61"):
        export(folder, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_script(checkpoint, tmp_path, monkeypatch):
    _, folder = checkpoint()

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "scripts" / "export.py"), run_name="__main__")

    run(folder, tmp_path / "out")
    assert (tmp_path / "out" / "modeling_triadic.py").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(folder)  # a run folder, as every script takes it
    run(tmp_path / "run", tmp_path / "from_run")
    assert (tmp_path / "from_run" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match=r"error: .* is not an empty folder"):
        run(folder, tmp_path / "out")
    with pytest.raises(SystemExit, match=r"error: .*nowhere"):
        run(tmp_path / "nowhere", tmp_path / "other")
