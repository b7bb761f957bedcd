"""What prepare writes, against a plain-Python reading of the same texts; what it refuses."""

import gzip
import json

import datasets
import numpy as np
import pytest

from triadic.data import DataConfig, open_store, prepare
from triadic.data.parts import encode, token_dtype
from triadic.settings import from_dict


def stream(path) -> list[int]:
    store = open_store(path)
    return store.tokens(0, store.num_tokens).tolist()


def flat(documents) -> list[int]:
    return [token for document in documents for token in document]


def test_stream_is_documents_in_order_with_the_head_held_out(prepared, plain, tokenizer, texts):
    documents = plain.tokens(tokenizer, texts)
    assert stream(prepared / "validation") == flat(documents[:8])
    assert stream(prepared / "train") == flat(documents[8:])


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_every_kind_of_file_gives_the_same_stream(kind, prepared, tmp_path, configure):
    output = prepare(configure(tmp_path / "out", kind, validation={"documents": 8}))
    for split in ("train", "validation"):
        assert stream(output / split) == stream(prepared / split)


def test_compressed_json_lines_and_a_copy_in_the_datasets_cache(corpus, prepared, tmp_path, configure, monkeypatch):
    import gzip

    for path in (corpus / "jsonl").iterdir():
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    files = [str(tmp_path / "*.jsonl.gz")]
    output = prepare(configure(tmp_path / "out", files=files, validation={"documents": 8}))
    assert stream(output / "train") == stream(prepared / "train")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    copied = prepare(configure(tmp_path / "copied", files=files, validation={"documents": 8}, streaming=False))
    assert stream(copied / "train") == stream(prepared / "train")


def test_text_files_are_shuffled_completely_by_the_seed(plain, tokenizer, texts, tmp_path, configure):
    output = prepare(configure(tmp_path / "out", "txt", shuffle=True, shuffle_seed=5, validation={"documents": 7}))
    documents = plain.tokens(tokenizer, texts)
    order = plain.permutation(len(texts), 5)
    assert stream(output / "validation") == flat(documents[i] for i in order[:7])
    assert stream(output / "train") == flat(documents[i] for i in order[7:])
    names = open_store(output / "train").document_ids()
    assert [name.rsplit("/", 1)[1] for name in names] == [f"{i:02d}.txt" for i in order[7:]]


def test_stream_is_shuffled_by_files_and_through_a_buffer(plain, tokenizer, texts, tmp_path, configure):
    """With room for every row: the files in a seeded order, then all rows in one."""
    output = prepare(configure(tmp_path / "out", "parquet", shuffle=True, shuffle_seed=4))
    files = [20 * number + i for number in plain.permutation(3, 4) for i in range(20)]
    expected = [f"doc-{files[i]:02d}" for i in plain.permutation(60, 4)]
    assert open_store(output / "train").document_ids() == expected


def test_small_buffer_gives_every_document_once(plain, tokenizer, texts, tmp_path, configure):
    output = prepare(configure(tmp_path / "out", shuffle=True, shuffle_buffer=10))
    ids = open_store(output / "train").document_ids()
    assert sorted(ids) == [f"doc-{i:02d}" for i in range(60)]
    assert ids != sorted(ids)
    documents = plain.tokens(tokenizer, texts)
    assert stream(output / "train") == flat(documents[int(name[4:])] for name in ids)


def test_validation_by_tokens_and_training_budget_cut_between_documents(plain, tokenizer, texts, tmp_path, configure):
    documents = plain.tokens(tokenizer, texts)
    output = prepare(configure(tmp_path / "out", validation={"tokens": 900}, max_tokens=2500))
    held = next(n for n in range(60) if sum(map(len, documents[:n])) >= 900)
    end = next(n for n in range(held, 60) if sum(map(len, documents[held:n])) >= 2500)
    assert stream(output / "validation") == flat(documents[:held])
    assert stream(output / "train") == flat(documents[held:end])
    assert end < 60


def test_filters(plain, tokenizer, texts, tmp_path, configure):
    output = prepare(configure(tmp_path / "out", where={"language": ["en"]}, min_characters=60))
    kept = [i for i in range(60) if i % 3 == 0 and len(texts[i]) >= 60]
    documents = plain.tokens(tokenizer, texts)
    assert stream(output / "train") == flat(documents[i] for i in kept)
    assert open_store(output / "train").document_ids() == [f"doc-{i:02d}" for i in kept]


def test_reserve_keeps_the_head_out_of_training_and_lists_it(plain, tokenizer, texts, tmp_path, configure):
    """The PG19 rule: everything up to the 12th long document is reserved; validation is taken from the reserve."""
    reserve, holdout = {"documents": 12, "min_characters": 100}, {"documents": 3, "min_characters": 1000}
    output = prepare(configure(tmp_path / "out", reserve=reserve, validation=holdout))
    long = [i for i in range(60) if len(texts[i]) >= 100]
    reserved = range(long[11] + 1)
    held = [i for i in reserved if len(texts[i]) >= 1000][:3]
    documents = plain.tokens(tokenizer, texts)
    assert stream(output / "train") == flat(documents[len(reserved) :])
    assert stream(output / "validation") == flat(documents[i] for i in held)
    manifest = [json.loads(line) for line in (output / "reserved.jsonl").read_text().splitlines()]
    assert [entry["id"] for entry in manifest] == [f"doc-{i:02d}" for i in reserved]
    assert [entry["characters"] for entry in manifest] == [len(texts[i]) for i in reserved]
    assert [i for i, entry in enumerate(manifest) if entry["split"] == "validation"] == held


def test_validation_is_never_taken_from_behind_the_reserve(tmp_path, configure, texts):
    reserve = {"documents": 12, "min_characters": 100}
    assert sum(len(text) >= 1000 for text in texts) >= 12
    with pytest.raises(ValueError, match=r"only \d documents .* 12 were asked for"):
        prepare(configure(tmp_path / "out", reserve=reserve, validation={"documents": 12, "min_characters": 1000}))


def test_a_trained_tokenizer_sees_training_documents_only(tmp_path, corpus):
    """A word that only held-out documents contain must not become an entry."""
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text("zebra crossing " * 50 if i < 10 else "plain sentence " * 50)
    tree = {"output": str(tmp_path / "out"), "workers": 1, "tokenizer": {"train": {"vocab_size": 300}}}
    tree["source"] = {"files": [str(tmp_path / "*.txt")], "validation": {"documents": 10}}
    output = prepare(from_dict(DataConfig, tree))
    entries = json.loads((output / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert "Ġsentence" in entries
    assert not any("zeb" in entry for entry in entries)


def test_datasets_opens_the_store(prepared, plain, tokenizer, texts):
    loaded = datasets.load_from_disk(str(prepared / "train"))
    assert loaded["input_ids"][:] == plain.tokens(tokenizer, texts)[8:]
    assert loaded.features["input_ids"].feature.dtype == "uint16"
    assert loaded["id"][0] == "doc-08"


def test_workers_change_no_byte(tmp_path, configure, plain, prepared):
    again = prepare(configure(tmp_path / "out", workers=3, validation={"documents": 8}))
    assert plain.files(again) == plain.files(prepared)


@pytest.mark.parametrize(("documents", "warned"), [(1, False), (3, True)])
def test_holding_out_most_of_the_text_is_remarked_on(documents, warned, tmp_path, configure, caplog):
    (tmp_path / "text").mkdir()
    for i in range(4):
        (tmp_path / "text" / f"{i}.txt").write_text("a state of the union, " * 20)
    files = {"files": [str(tmp_path / "text" / "*.txt")], "text_column": "text", "id_column": None}
    prepare(configure(tmp_path / "out", **files, validation={"documents": documents}))
    assert ("more text is held out" in caplog.text) == warned


def test_finished_output_is_recognised_without_its_source(prepared, tmp_path, configure, plain, caplog):
    import shutil

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("only one document")
    config = configure(tmp_path / "out", files=[str(tmp_path / "text" / "*.txt")], text_column="text", id_column=None)
    output = prepare(config)
    before = plain.files(output)
    shutil.rmtree(tmp_path / "text")
    with caplog.at_level("INFO", "triadic.data"):
        prepare(config)
    assert "already prepared" in caplog.text
    assert plain.files(output) == before


def test_output_of_another_configuration_is_refused_and_kept(prepared, configure, plain):
    before = plain.files(prepared)
    with pytest.raises(ValueError, match=r"source\.validation\.documents was 8, now 9"):
        prepare(configure(prepared, validation={"documents": 9}))
    with pytest.raises(ValueError, match=r"part_characters was 4000, now 5000"):
        prepare(configure(prepared, part_characters=5000, validation={"documents": 8}))
    assert plain.files(prepared) == before


def test_folder_of_something_else_is_refused_and_kept(tmp_path, configure, plain):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds something else"):
        prepare(configure(tmp_path))
    assert plain.files(tmp_path) == {"thesis.tex": b"precious"}


def test_changed_files_are_refused_while_unfinished(tmp_path, configure, monkeypatch):
    (tmp_path / "a.txt").write_text("one " * 100)
    (tmp_path / "b.txt").write_text("two " * 100)
    config = configure(
        tmp_path / "out", files=[str(tmp_path / "*.txt")], text_column="text", id_column=None, part_characters=100
    )
    with monkeypatch.context() as patch:
        patch.setattr("triadic.data.preparation.assemble", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(config)
    (tmp_path / "b.txt").write_text("three")
    with pytest.raises(ValueError, match="source files changed"):
        prepare(config)


def test_two_at_once_are_refused(tmp_path, configure):
    from triadic.data.files import locked

    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"), pytest.raises(ValueError, match="being prepared by another process"):
        prepare(configure(tmp_path / "out"))


BAD = {
    "no file": (dict(files=["/nowhere/*.txt"]), "nothing to read: no file of the local files /nowhere"),
    "no text column": (dict(text_column="text"), r"no column 'text'; its columns are key, body, language"),
    "no id column": (dict(id_column="url"), r"no column 'url'; its columns are"),
    "no filter column": (dict(where={"lang": ["en"]}), r"no column 'lang'"),
    "nothing passes": (dict(where={"language": ["de"]}), r"no document of at least 1 characters.*passes source.where"),
    "all too short": (dict(min_characters=10**6), "no document of at least 1000000 characters"),
    "column of numbers": (dict(text_column="language", where={"key": ["x"]}), "no document"),
    "package": (dict(package="no-such-package", files=["*.txt"]), "pip install no-such-package"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_source_is_one_sentence_and_writes_nothing(name, tmp_path, configure):
    source, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        prepare(configure(tmp_path / "out", **source))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_bad_tokenizer_writes_nothing_that_blocks_a_mended_configuration(tmp_path, configure, tokenizer_folder):
    config = configure(tmp_path / "out")
    tree = {"output": config.output, "tokenizer": {"pretrained": str(tmp_path / "nowhere")}}
    tree["source"] = {"files": config.source.files, "text_column": "body"}
    with pytest.raises(ValueError, match=r"tokenizer\.pretrained: no tokenizer can be loaded from .*nowhere"):
        prepare(from_dict(DataConfig, tree))
    assert open_store(prepare(config) / "train").num_documents == 60


def test_empty_and_damaged_files_numbers_and_other_encodings(tmp_path, configure):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "numbers.jsonl").write_text('{"body": 1, "key": "a"}\n')
    (tmp_path / "damaged.jsonl").write_text('{"body": "a", "key": "b"}\n{"body": "a')
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"nothing to read.*empty\.jsonl"):
        prepare(configure(tmp_path / "out", files=[str(tmp_path / "empty.jsonl")]))
    with pytest.raises(ValueError, match="holds int, not text"):
        prepare(configure(tmp_path / "out", files=[str(tmp_path / "numbers.jsonl")]))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        prepare(configure(tmp_path / "out", files=[str(tmp_path / "latin.txt")], id_column=None, text_column="text"))
    with pytest.raises(ValueError, match=r"damaged\.jsonl cannot be (opened|read)"):
        prepare(configure(tmp_path / "out", files=[str(tmp_path / "damaged.jsonl")]))
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"body": "a", "key": "b"}\n' * 9)[:-8])
    with pytest.raises(ValueError, match=r"torn\.jsonl\.gz cannot be (opened|read)"):
        prepare(configure(tmp_path / "out", files=[str(tmp_path / "torn.jsonl.gz")]))
    (tmp_path / "latin.jsonl").write_bytes('{"body": "a", "key": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl cannot be (opened|read)"):
        prepare(configure(tmp_path / "out", files=[str(tmp_path / "latin.jsonl")]))
    with pytest.raises(ValueError, match=r"latin\.txt/out cannot be made: Not a directory"):
        prepare(configure(tmp_path / "latin.txt" / "out"))
    with pytest.raises(ValueError, match=r"one kind of .*matches \.jsonl, \.txt"):
        prepare(configure(tmp_path / "out", files=[str(tmp_path / "*")]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (dict(validation={"documents": 100}), "left for training"),
        (dict(validation={"documents": 59, "min_characters": 200}), r"only \d+ documents .* 59 were asked for"),
        (dict(validation={"tokens": 10**7}), "left for training"),
        (dict(reserve={"documents": 1000}), "left for training"),
    ],
)
def test_splits_that_cannot_be_filled_block_no_mended_configuration(source, message, tmp_path, configure):
    with pytest.raises(ValueError, match=message):
        prepare(configure(tmp_path / "out", **source))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    prepare(configure(tmp_path / "out", validation={"documents": 1}))


def test_id_outside_the_vocabulary(tokenizer):
    with pytest.raises(ValueError, match=r"gave id \d+, outside its vocabulary of 100"):
        encode(tokenizer.backend_tokenizer, ["écrivent"], 1, 2, vocab_size=100)


def test_token_width_follows_the_vocabulary(tokenizer):
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32
    values, lengths = encode(tokenizer.backend_tokenizer, ["a b", ""], 70_000, 2, vocab_size=70_001)
    assert values.dtype == np.uint32
    assert values[0] == 70_000
    assert lengths.tolist() == [len(values) - 2, 2]


def test_dataset_by_name_with_patterns(corpus, prepared, plain, tokenizer, texts, tmp_path, configure):
    """A hub id goes the way that a dataset's folder goes: load_dataset with patterns of its files, streamed."""
    source = {"dataset": str(corpus), "files": [], "data_files": ["parquet/*.parquet"]}
    output = prepare(configure(tmp_path / "out", validation={"documents": 8}, **source))
    assert stream(output / "train") == stream(prepared / "train")
    documents = plain.tokens(tokenizer, texts)
    some = prepare(configure(tmp_path / "some", **source | {"data_files": ["jsonl/[12].jsonl"]}))
    assert stream(some / "train") == flat(documents[20:])
    with pytest.raises(ValueError, match=r"the dataset .* cannot be opened"):
        prepare(configure(tmp_path / "none", **source | {"data_files": ["none/*.jsonl"]}))
