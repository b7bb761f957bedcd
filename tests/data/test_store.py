"""Reading a store: every range against the plain stream, without copies; damage is noticed."""

import json
import pickle

import numpy as np
import pytest

from triadic.data import TokenStore, check_tokenizer, open_store, tokenizer_hash
from triadic.data.config import TrainTokenizer
from triadic.data.store import write_meta, write_tokens
from triadic.data.tokenizer import train


@pytest.fixture(scope="module")
def documents(plain, tokenizer, texts):
    return plain.tokens(tokenizer, texts)[8:]


@pytest.fixture
def copy(prepared, tmp_path):
    import shutil

    return shutil.copytree(prepared / "train", tmp_path / "train")


def test_every_range_and_every_start(prepared, documents):
    store = TokenStore(prepared / "train")
    whole = np.array([token for document in documents for token in document])
    starts = np.cumsum([0] + [len(document) for document in documents])
    assert store.num_tokens == len(whole)
    assert store.num_documents == len(documents)
    assert len(store._files) > 3
    assert store.offsets().tolist() == starts.tolist()
    draw = np.random.default_rng(0)
    ranges = [(0, 0), (0, len(whole)), (len(whole), len(whole)), *np.sort(draw.integers(0, len(whole) + 1, (300, 2)))]
    edges = [int(edge) for edge in store._edges]
    ranges += [(edge, min(edge + 1, len(whole))) for edge in edges] + [(max(edge - 1, 0), edge) for edge in edges]
    for start, stop in ranges:
        assert np.array_equal(store.tokens(start, stop), whole[start:stop])
        inside = starts[:-1][(starts[:-1] >= start) & (starts[:-1] < stop)]
        assert store.starts(start, stop).tolist() == inside.tolist()


def test_reading_within_a_file_copies_nothing(prepared):
    store = TokenStore(prepared / "train")
    view, again = store.tokens(10, 60), store.tokens(10, 60)
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert view.ctypes.data == again.ctypes.data


def test_a_range_outside_is_refused(prepared):
    store = TokenStore(prepared / "train")
    for start, stop in [(-1, 3), (5, 4), (0, store.num_tokens + 1)]:
        with pytest.raises(ValueError, match="lie outside the store's"):
            store.tokens(start, stop)


def test_store_travels_to_loader_processes(prepared):
    store = open_store(prepared / "train")
    store.tokens(0, 5)
    twin = pickle.loads(pickle.dumps(store))
    assert np.array_equal(twin.tokens(3, 50), store.tokens(3, 50))
    assert twin.fingerprint == store.fingerprint


def test_vocabularies_beyond_sixteen_bits(tmp_path):
    values = np.array([70_000, 5, 131_000, 1, 70_000, 2], dtype=np.uint32)
    write_tokens(tmp_path / "data-00000-of-00001.arrow", values, [4, 2], None)
    size = (tmp_path / "data-00000-of-00001.arrow").stat().st_size
    file = {"name": "data-00000-of-00001.arrow", "bytes": size, "sha256": "", "tokens": 6, "documents": 2}
    meta = {"kind": "tokens", "fingerprint": "f" * 64, "dtype": "uint32", "num_tokens": 6, "num_documents": 2}
    meta |= {"vocab_size": 131_072, "tokenizer_hash": "h", "bos": 70_000, "eos": 1, "files": [file]}
    write_meta(tmp_path, meta, {"input_ids": "list:uint32"})
    store = open_store(tmp_path)
    assert store.tokens(1, 5).tolist() == [5, 131_000, 1, 70_000]
    assert store.starts(0, 6).tolist() == [0, 4]
    assert store.document_ids() is None


def test_missing_store(tmp_path):
    with pytest.raises(ValueError, match=r"no complete token store .*prepare_data"):
        open_store(tmp_path / "nowhere")


def test_truncated_file(copy):
    path = next(copy.glob("data-00001*"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"data-00001.* is damaged: it has [\d,]+ bytes instead of"):
        open_store(copy)


def test_missing_file(copy):
    next(copy.glob("data-00001*")).unlink()
    with pytest.raises(ValueError, match=r"data-00001.* is damaged: it is missing"):
        open_store(copy)


def test_garbage_of_the_right_size(copy):
    path = next(copy.glob("data-00000*"))
    path.write_bytes(b"\0" * path.stat().st_size)
    store = open_store(copy)
    with pytest.raises(ValueError, match="is damaged"):
        store.tokens(0, 10)


def test_one_changed_bit_is_found_by_verify(copy):
    open_store(copy).verify()
    path = next(copy.glob("data-00000*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="its content is not what was written"):
        open_store(copy).verify()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "tokens"}'])
def test_damaged_description(copy, content):
    (copy / "store.json").write_text(content)
    with pytest.raises(ValueError, match=r"store\.json is damaged"):
        open_store(copy)


@pytest.mark.parametrize(
    "wrong",
    [{"num_tokens": 10**9}, {"num_documents": 0}, {"vocab_size": "1"}, {"dtype": "int8"}, {"files": []}, {"kind": "x"}],
    ids=str,
)
def test_a_description_that_does_not_add_up(copy, wrong):
    written = json.loads((copy / "store.json").read_text())
    (copy / "store.json").write_text(json.dumps(written | wrong))
    with pytest.raises(ValueError, match=r"store\.json is damaged"):
        open_store(copy)


def test_store_of_another_tokenizer(prepared, tokenizer, tokenizer_folder, plain):
    store = open_store(prepared / "train")
    check_tokenizer(store, tokenizer)
    check_tokenizer(store, tokenizer_folder)
    check_tokenizer(store, prepared / "tokenizer")
    other = train(TrainTokenizer(vocab_size=300), plain.texts(50, seed=9))
    assert tokenizer_hash(other) != store.tokenizer_hash
    with pytest.raises(ValueError, match=r"made with another tokenizer .*prepare the data with the model's tokenizer"):
        check_tokenizer(store, other)
