"""Small corpora, a small tokenizer, and plain-Python definitions to hold the data package against."""

import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from triadic.data import DataConfig, prepare
from triadic.data.config import TrainTokenizer
from triadic.data.tokenizer import train
from triadic.settings import from_dict

WORDS = ["a", "state", "of", "the", "union,", "year", "by", "its", "people", "écrivent", "数学", "<s>", "</s>", "🙂\n"]


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of very different lengths, with special tokens written out in them."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.choice([1, 5, 40, 300]))) for _ in range(count)]


def plain_permutation(n: int, *key: int) -> list[int]:
    """splitmix64 and a sort, written with Python's integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seed = 0
    for word in key:
        seed = mix((seed + word + 0x9E3779B97F4A7C15) & mask)
    keys = [mix((seed + (i + 1) * 0x9E3779B97F4A7C15) & mask) for i in range(n)]
    return sorted(range(n), key=keys.__getitem__)


def plain_tokens(tokenizer, texts: list[str]) -> list[list[int]]:
    """BOS + ids + EOS of each text; special tokens written out in a text are text."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    backend.encode_special_tokens = False
    return [[tokenizer.bos_token_id, *document, tokenizer.eos_token_id] for document in ids]


def read_files(folder) -> dict[str, bytes]:
    """Every file below `folder` with its bytes, but for the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="session")
def plain():
    """The plain-Python definitions, for test files (which cannot import this one)."""
    from types import SimpleNamespace

    return SimpleNamespace(texts=make_texts, permutation=plain_permutation, tokens=plain_tokens, files=read_files)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(60, seed=1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts):
    """The same 60 documents as txt/, jsonl/ and parquet/ (the latter two in three files, with id and language)."""
    folder = tmp_path_factory.mktemp("corpus")
    for kind in ("txt", "jsonl", "parquet"):
        (folder / kind).mkdir()
    rows = [{"key": f"doc-{i:02d}", "body": text, "language": "fr" if i % 3 else "en"} for i, text in enumerate(texts)]
    for i, text in enumerate(texts):
        (folder / "txt" / f"{i:02d}.txt").write_bytes(text.encode())
    for number in range(3):
        chunk = rows[20 * number : 20 * number + 20]
        lines = "".join(json.dumps(row) + "\n" for row in chunk)
        (folder / "jsonl" / f"{number}.jsonl").write_text(lines)
        pa.parquet.write_table(pa.Table.from_pylist(chunk), folder / "parquet" / f"{number}.parquet", row_group_size=7)
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    return train(TrainTokenizer(vocab_size=300), make_texts(50, seed=2))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def configure(corpus, tokenizer_folder):
    """Builds a DataConfig over one kind of the corpus; keywords other than output go into `source`."""

    def build(output, kind: str = "jsonl", workers: int = 1, part_characters: int = 4000, **source) -> DataConfig:
        tree = {"files": [str(corpus / kind / "*")]}
        if kind != "txt":
            tree |= {"text_column": "body", "id_column": "key"}
        settings = {"output": str(output), "workers": workers, "part_characters": part_characters}
        tokenizer = {"pretrained": str(tokenizer_folder)}
        return from_dict(DataConfig, settings | {"tokenizer": tokenizer, "source": tree | source})

    return build


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, configure):
    """A finished output: the corpus in order, eight documents held out."""
    return prepare(configure(tmp_path_factory.mktemp("prepared") / "out", validation={"documents": 8}))
