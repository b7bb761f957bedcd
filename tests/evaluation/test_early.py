"""What cannot be measured to its end is refused before anything is: of each part, what its later steps would meet."""

import importlib
import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from triadic import settings
from triadic.evaluation import config, evaluate, haystack, perplexity


@pytest.fixture
def refused(data, tmp_path, monkeypatch):
    """Evaluates perplexity, which must not be measured, and then the sections that are given; what is said."""
    monkeypatch.setattr(perplexity, "measure", lambda *_: pytest.fail("measured"))
    stores = {split: str(data / split) for split in ("train", "validation")}

    def evaluated(checkpoint, **sections):
        first = {"window": 16, "buckets": [0, 16], "unigram": False} | sections.pop("perplexity", {})
        suite = {"name": "early", "data": stores, "perplexity": first} | sections
        with pytest.raises(ValueError, match=" ") as error:
            evaluate(str(checkpoint), settings.from_dict(config.SuiteConfig, suite), tmp_path / "out")
        return str(error.value)

    return evaluated


@pytest.fixture(scope="module")
def bare(llama, tmp_path_factory):
    """The llama with a tokenizer that has no special tokens: (checkpoint, held-out text)."""
    folder = tmp_path_factory.mktemp("bare")
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    (folder / "held-out.txt").write_text("ka lo mi ter su no " * 30)
    return folder, {"validation": str(folder / "held-out.txt")}


def test_special_tokens_that_a_part_needs(refused, bare, local, pages, recall_files, own):
    folder, text = bare
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is None
    zeroshot = {"metrics": {"copa": "acc"}, "folder": str(local)}
    said = refused(folder, data=text, zeroshot=zeroshot, model={"add_bos": True})
    assert "asks for a BOS, but the tokenizer of" in said
    for part in (
        {"recall": {"folder": str(recall_files), "context_length": 200}},
        {"ruler": {"lengths": [512], "haystack": str(own)}},
    ):
        assert "has no EOS, which ends a generated text" in refused(folder, data=text, **part)
    assert "has no BOS or EOS for a document to begin with" in refused(folder, data=text, wikitext={"path": str(pages)})


def test_texts_longer_than_the_model_takes(refused, llama, local, recall_row, tmp_path):
    (tmp_path / "copa.jsonl").write_bytes((local / "copa.jsonl").read_bytes())
    (tmp_path / "lambada_openai.jsonl").write_text(json.dumps({"text": "ka lo mi ter " * 8}))
    zeroshot = {"metrics": {"copa": "acc", "lambada_openai": "acc"}, "folder": str(tmp_path)}
    said = refused(llama, model={"max_length": 20}, zeroshot=zeroshot)
    assert said.startswith("document 0 of lambada_openai takes")
    assert said.endswith(
        "at most 20; raise model.max_length if the model can extrapolate, or drop lambada_openai from zeroshot.metrics"
    )
    asked = recall_row("nq", 0) | {"question": "ka lo mi ter " * 20}
    (tmp_path / "nq.jsonl").write_text("\n".join(json.dumps(row) for row in (recall_row("nq", 1), asked)))
    part = {"tasks": ["nq"], "folder": str(tmp_path), "context_length": 210}
    said = refused(llama, model={"max_length": 220}, recall=part)
    assert said.startswith("document 1 of recall_nq takes")
    assert "at most 220" in said
    assert said.endswith("lower recall.context_length")
    sample = {"prompts": ["", "ka lo"], "max_new_tokens": 30}
    assert "sample.max_new_tokens is 30 behind prompts" in refused(llama, model={"max_length": 30}, sample=sample)


def test_samples_of_needles_that_cannot_be_made(refused, llama, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("The grass is green. " * 10)
    part = {"lengths": [512, 1024], "samples": 1, "tasks": ["niah_single_1", "niah_single_2"]}
    part |= {"haystack": str(tmp_path / "short.txt")}
    load = importlib.import_module

    def lacking(module):
        if "ruler" not in module or "triadic" in module:
            return load(module)
        raise ImportError(f"{module} cannot be imported") from ModuleNotFoundError(name="wonderwords")

    with monkeypatch.context() as without:
        without.setattr(importlib, "import_module", lacking)
        haystack.generator.cache_clear()
        said = refused(llama, ruler=part)
        assert said.startswith("RULER's samples need wonderwords, which is not installed: pip install")
    assert refused(llama, ruler=part).startswith("sample 0 of niah_single_2 has")
    (tmp_path / "out" / "samples" / "niah_single_1-1024.jsonl").write_text("{")
    assert "is damaged; remove it, and its samples" in refused(llama, ruler=part)


def test_a_baseline_that_cannot_be_loaded(refused, llama, triadic_hf, tmp_path):
    """Its config and tokenizer are the llama's, its weights are not."""
    for file in llama.iterdir():
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "other" / "model.safetensors").write_bytes((triadic_hf / "model.safetensors").read_bytes())
    said = refused(llama, perplexity={"baseline": str(tmp_path / "other")})
    assert "do not fit the model's config; missing" in said
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "nope"}))
    assert "other cannot be loaded: " in refused(llama, perplexity={"baseline": str(tmp_path / "other")})


def test_more_positions_than_a_model_has_learned(refused, tokenizer, pages, tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=16, n_layer=1, n_head=1)).save_pretrained(
        tmp_path / "gpt"
    )
    tokenizer.save_pretrained(tmp_path / "gpt")
    said = refused(tmp_path / "gpt", model={"max_length": 4096}, wikitext={"path": str(pages)})
    assert "model.max_length is 4096, but" in said
    assert "has learned 64 positions and knows no others" in said
