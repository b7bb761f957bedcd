"""Mixtures: whole documents up to each share of the tokens, shuffled once, read like any store."""

import itertools
import json
import pickle

import datasets
import numpy as np
import pytest

from triadic.data import DataConfig, MixtureStore, Windows, open_store, prepare
from triadic.settings import from_dict

SHARES = {"news": 0.5, "books": 0.1, "papers": 0.4}


@pytest.fixture(scope="module")
def stores(tmp_path_factory, plain, tokenizer_folder):
    """Three stores of 400 documents each; a document's words name its store."""
    folder = tmp_path_factory.mktemp("parts")
    draw = np.random.default_rng(0)
    for name in SHARES:
        lines = [json.dumps({"text": f"{name} {i} " + "word " * int(draw.integers(5, 60))}) for i in range(400)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        tree = {"output": str(folder / name), "workers": 1, "tokenizer": {"pretrained": str(tokenizer_folder)}}
        prepare(from_dict(DataConfig, tree | {"source": {"files": [str(folder / f"{name}.jsonl")]}}))
    return folder


@pytest.fixture
def mix(stores, tokenizer_folder):
    def build(output, tokens=30_000, shares=SHARES, seed=0, **parts):
        trees = {name: {"share": share, "store": str(stores / name / "train")} for name, share in shares.items()}
        trees = {name: parts.get(name, tree) for name, tree in trees.items()}
        tree = {"output": str(output), "workers": 1, "tokenizer": {"pretrained": str(tokenizer_folder)}}
        return prepare(from_dict(DataConfig, tree | {"mixture": {"tokens": tokens, "seed": seed, "parts": trees}}))

    return build


def documents(store) -> list[tuple[int, ...]]:
    offsets = store.offsets()
    return [tuple(store.tokens(a, b).tolist()) for a, b in itertools.pairwise(offsets)]


def test_shares_and_whole_documents(stores, mix, tmp_path):
    mixed = open_store(mix(tmp_path / "out") / "train")
    assert isinstance(mixed, MixtureStore)
    owners = {doc: name for name in SHARES for doc in documents(open_store(stores / name / "train"))}
    found = documents(mixed)
    assert len(set(found)) == len(found) == mixed.num_documents
    tokens = dict.fromkeys(SHARES, 0)
    for document in found:
        tokens[owners[document]] += len(document)
    assert abs(mixed.num_tokens - 30_000) < 150
    for name, share in SHARES.items():
        assert abs(tokens[name] / mixed.num_tokens - share) < 0.005


def test_order_is_the_definition(stores, mix, tmp_path, plain):
    """Per part a seeded order up to the budget (the last one if that is nearer), then one seeded shuffle of all."""
    chosen = []
    for number, (name, share) in enumerate(SHARES.items()):
        own, total = documents(open_store(stores / name / "train")), 0
        for i in plain.permutation(len(own), 0, number, 0):
            if abs(total + len(own[i]) - share * 30_000) > abs(total - share * 30_000):
                break
            chosen.append(own[i])
            total += len(own[i])
    expected = [chosen[i] for i in plain.permutation(len(chosen), 0, len(SHARES))]
    assert documents(open_store(mix(tmp_path / "out") / "train")) == expected


def test_reads_like_a_store(mix, tmp_path):
    mixed = open_store(mix(tmp_path / "out") / "train")
    flat = np.array([token for document in documents(mixed) for token in document])
    starts = mixed.offsets()[:-1]
    draw = np.random.default_rng(0)
    for start, stop in [(0, 0), (0, len(flat)), *np.sort(draw.integers(0, len(flat) + 1, (200, 2)))]:
        assert np.array_equal(mixed.tokens(start, stop), flat[start:stop])
        assert np.array_equal(mixed.starts(start, stop), starts[(starts >= start) & (starts < stop)])
    windows = Windows(pickle.loads(pickle.dumps(mixed)), 100, seed=0)
    at = int(windows.order(0)[3]) * 101
    assert windows[3]["input_ids"].tolist() == flat[at : at + 100].tolist()
    mixed.verify()


def test_another_seed_is_another_mixture_and_the_same_seed_the_same(mix, tmp_path, plain):
    first, again, other = (open_store(mix(tmp_path / n, seed=s) / "train") for n, s in [("a", 0), ("b", 0), ("c", 1)])
    assert documents(first) == documents(again)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert documents(first) != documents(other)


def test_datasets_opens_the_index(mix, tmp_path):
    mixed = open_store(mix(tmp_path / "out") / "train")
    index = datasets.load_from_disk(str(mixed.path))
    assert sum(index["length"][:]) == mixed.num_tokens
    assert set(index["source"][:]) == {0, 1, 2}


def test_sources_are_prepared_up_to_their_share(stores, mix, tmp_path, plain):
    source = {"files": [str(stores / "books.jsonl")]}
    output = mix(tmp_path / "out", books={"share": 0.1, "source": source})
    own = open_store(output / "sources" / "books" / "train")
    assert 3000 <= own.num_tokens < 3200
    mixed = open_store(output / "train")
    assert mixed.parts[1]["store"] == "../sources/books/train"
    with pytest.raises(ValueError, match=r"mixture\.seed was .*; its sources are finished .* store: .*/books/train$"):
        mix(tmp_path / "out", books={"share": 0.1, "source": source}, seed=99)
    again = mix(tmp_path / "out", books={"share": 0.1, "source": source})
    assert open_store(again / "train").fingerprint == mixed.fingerprint
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="no complete token store"):
        MixtureStore(tmp_path / "out" / "train")
    assert (moved / "train" / "store.json").is_file()


def test_exhausted_part_is_refused_or_repeated(stores, mix, tmp_path, caplog):
    shares = {"news": 0.5, "books": 0.5}
    tokens = 3 * open_store(stores / "books" / "train").num_tokens  # a pass and a half of the books
    message = (
        r"the part news holds [\d,]+ tokens, its share of the mixture is [\d,]+;.*mixture\.parts\.news\.repeat=true"
    )
    with pytest.raises(ValueError, match=message):
        mix(tmp_path / "out", tokens, shares)
    repeated = {name: {"share": 0.5, "store": str(stores / name / "train"), "repeat": True} for name in shares}
    with caplog.at_level("INFO", "triadic.data"):
        mixed = open_store(mix(tmp_path / "out", tokens, shares, **repeated) / "train")
    assert "books: all 400 documents are used, starting over (pass 2)" in caplog.text
    assert abs(mixed.num_tokens - tokens) < 150
    found = documents(mixed)
    times = {found.count(document) for document in documents(open_store(stores / "books" / "train"))}
    assert times == {1, 2}


def test_documents_too_long_for_the_shares(mix, tmp_path):
    with pytest.raises(ValueError, match=r"instead of [15]0\.00 %; raise mixture\.tokens"):
        mix(tmp_path / "out", tokens=300)
    with pytest.raises(ValueError, match=r"no whole document fits a mixture of 1 tokens; raise mixture\.tokens"):
        mix(tmp_path / "out", tokens=1)


def test_parts_of_another_tokenizer(stores, mix, tmp_path, plain, corpus):
    tree = {"output": str(tmp_path / "other"), "workers": 1, "tokenizer": {"train": {"vocab_size": 300}}}
    tree["source"] = {"files": [str(corpus / "txt" / "*")]}
    prepare(from_dict(DataConfig, tree))
    with pytest.raises(ValueError, match=r"the part books .* was made with another tokenizer"):
        mix(tmp_path / "out", books={"share": 0.1, "store": str(tmp_path / "other" / "train")})


def test_changed_part_and_damaged_index(stores, mix, tmp_path):
    import shutil

    shutil.copytree(stores / "books", tmp_path / "books")
    output = mix(tmp_path / "out", books={"share": 0.1, "store": str(tmp_path / "books" / "train")})
    path = tmp_path / "books" / "train" / "store.json"
    path.write_text(path.read_text().replace(open_store(path.parent).fingerprint, "0" * 64))
    with pytest.raises(ValueError, match="is not the one that the mixture"):
        open_store(output / "train")
    whole = mix(tmp_path / "whole")
    index = next((whole / "train").glob("*.arrow"))
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is damaged"):
        open_store(whole / "train")
