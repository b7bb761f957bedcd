"""Every shipped file loads; the embedded corpus is what the configuration says; errors of the command line."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from triadic.data import DataConfig, open_store, prepare
from triadic.settings import SettingsError, load, to_dict

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs" / "data").glob("*.yaml"))


def test_the_expected_files_are_there():
    assert {path.stem for path in SHIPPED} >= {"sotu", "fineweb_edu", "pg19", "extend64k", "local_files"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_loads(path):
    assert load(DataConfig, path).output == f"data/{path.stem.removesuffix('_files')}"


def test_paper_figures():
    """Budgets cover steps * tokens a step, with T + 1 tokens a window; the mixture has the paper's shares."""
    pretraining = load(DataConfig, ROOT / "configs/data/fineweb_edu.yaml").source
    assert pretraining.validation.tokens == 3e8
    assert pretraining.max_tokens > 38_100 * 524_288 * 4097 / 4096
    books = load(DataConfig, ROOT / "configs/data/pg19.yaml").source
    assert (books.shuffle_seed, books.shuffle_buffer) == (0, 10_000)
    assert (books.reserve.documents, books.reserve.min_characters) == (12_200, 90_000)
    mixture = load(DataConfig, ROOT / "configs/data/extend64k.yaml").mixture
    shares = {name: part.share for name, part in mixture.parts.items()}
    papers = [shares[f"pdfs_{size}"] for size in ("32k_to_64k", "8k_to_16k", "16k_to_32k")]
    assert (mixture.tokens, shares["fineweb_edu"], shares["pg19"]) == (2.1e9, 0.5, 0.1)
    assert np.allclose(papers, 0.4 * np.array([0.539, 0.254, 0.207]))


BAD = [
    ("source.text_colum=x", r"unknown key source\.text_colum; did you mean source\.text_column"),
    ("workers=many", r"workers must be a whole number"),
    ("workers=0", "workers must be at least 1"),
    ("part_characters=0", "part_characters must lie in"),
    ("tokenizer.pretrained=x", "exactly one of train .* and pretrained"),
    ("tokenizer.train=null", "exactly one of train .* and pretrained"),
    ("tokenizer.train.vocab_size=100", "vocab_size must be at least 259"),
    ("source=null", "exactly one of source and mixture"),
    ("source.dataset=x", "exactly one of dataset .* and files"),
    ("source.files=[]", "exactly one of dataset .* and files"),
    ("source.data_files=[x]", r"data_files selects files of a hub dataset"),
    ("source.max_tokens=0", r"max_tokens must be positive"),
    ("source.shuffle_buffer=0", r"shuffle_buffer must be at least 1"),
    ("source.min_characters=0", r"min_characters must be at least 1"),
    ("source.validation.tokens=5", "documents or tokens, not both"),
    ("source.validation={tokens: 5}", r"tokenizer\.train needs source\.validation\.documents"),
    ("source.validation={min_characters: 5}", r"validation\.min_characters goes with"),
    ("source.validation.documents=-1", "cannot be negative"),
    ("source.reserve={documents: -1}", r"reserve\.documents and reserve\.min_characters cannot be negative"),
    ("source={files: [x], reserve: {documents: 2}, validation: {tokens: 5}}", "needs validation by documents"),
]
BAD_MIXTURES = [
    ("mixture.tokens=0", r"mixture\.tokens must be positive"),
    ("mixture.parts.pg19.share=0.2", r"must add up to 1, these add up to 1\.1"),
    ("mixture.parts.pg19.share=0", r"must lie in \(0, 1\], not 0"),
    ("mixture={tokens: 9, parts: {../evil: {share: 1, store: x}}}", r"part's name must be letters.*not '\.\./evil'"),
    ("mixture={tokens: 9, parts: {'': {share: 1, store: x}}}", "part's name must be letters.*not ''"),
    ("mixture={tokens: 9, parts: {3: {share: 1, store: x}}}", r"a key of mixture\.parts must be text"),
    ("mixture.parts.pg19.source={files: [x]}", "exactly one of store .* and source"),
    ("tokenizer={train: {vocab_size: 500}}", r"needs tokenizer\.pretrained"),
]
CASES = [("sotu", *case) for case in BAD] + [("extend64k", *case) for case in BAD_MIXTURES]


@pytest.mark.parametrize(("name", "override", "message"), CASES)
def test_bad_setting_is_one_sentence(name, override, message):
    with pytest.raises(SettingsError, match=message) as caught:
        load(DataConfig, ROOT / f"configs/data/{name}.yaml", [override])
    assert "\n" not in str(caught.value)


def test_embedded_corpus(tmp_path):
    """The default: whole addresses held out, enough of them long for perplexity by position."""
    output = prepare(load(DataConfig, ROOT / "configs/data/sotu.yaml", [f"output={tmp_path / 'out'}"]))
    train, validation = open_store(output / "train"), open_store(output / "validation")
    assert train.vocab_size == 4096
    assert train.num_documents + validation.num_documents == 249
    assert not set(train.document_ids()) & set(validation.document_ids())
    lengths = np.diff(validation.offsets())
    assert (lengths > 8192).sum() >= 10
    assert 0.1 < validation.num_tokens / (train.num_tokens + validation.num_tokens) < 0.2


def test_command_line_says_one_sentence_and_fails(tmp_path):
    command = [sys.executable, ROOT / "scripts/prepare_data.py", "--config", ROOT / "configs/data/sotu.yaml"]
    outcome = subprocess.run(
        [*command, f"output={tmp_path / 'out'}", "source.package=no-such-package"], capture_output=True, text=True
    )
    assert outcome.returncode == 1
    assert outcome.stderr.strip().splitlines()[-1].startswith("prepare_data: the package 'no-such-package'")
    assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_settings_survive_the_job_file(tmp_path, configure):
    import json

    config = configure(tmp_path / "out", validation={"documents": 1})
    prepare(config)
    stored = json.loads((tmp_path / "out" / "job.json").read_text())["config"]
    assert stored["source"] == to_dict(config)["source"]
    assert "workers" not in stored
