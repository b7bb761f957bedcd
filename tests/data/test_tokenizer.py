"""Trained and pretrained tokenizers: exact round trip, special tokens, what evaluation gets, the hash."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from triadic.data import tokenizer_hash
from triadic.data.config import TokenizerConfig, TrainTokenizer
from triadic.data.tokenizer import encoder, load_pretrained, train, vocab_size

STRINGS = [
    "",
    " ",
    "\n\n\t  x",
    "naïve 数学 🙂",
    "<s> and </s>",
    "don't  stop ",
    "a\r\nb",
    "\u0000 \ufffd",
    "0123456789",
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder with a word-level tokenizer that has an end-of-text token and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    backend = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, "state": 2, "union": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


def test_loads_offline_with_special_tokens(tokenizer_folder):
    loaded = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert vocab_size(loaded) == len(loaded) == 300


@pytest.mark.parametrize("text", STRINGS)
def test_round_trip_is_exact(text, tokenizer_folder, tokenizer, plain):
    loaded = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]) == text
    document = plain.tokens(tokenizer, [text])[0]
    assert loaded.decode(document[1:-1]) == text


def test_special_tokens_written_in_a_document_stay_text(tokenizer_folder, tokenizer):
    ids = encoder(str(tokenizer_folder / "tokenizer.json"), tokenizer_hash(tokenizer)).encode("<s>x</s>").ids[1:]
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode(ids) == "<s>x</s>"


def test_calling_the_saved_tokenizer_gives_one_bos(tokenizer_folder):
    loaded = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids = loaded("state")["input_ids"]
    assert ids[0] == loaded.bos_token_id
    assert loaded.bos_token_id not in ids[1:]
    assert ids[1:] == loaded("state", add_special_tokens=False)["input_ids"]


def test_training_is_deterministic_and_limited(plain):
    texts = plain.texts(50, seed=2)
    assert tokenizer_hash(train(TrainTokenizer(300), texts)) == tokenizer_hash(train(TrainTokenizer(300), texts))
    short = train(TrainTokenizer(300, max_characters=20), texts)
    assert tokenizer_hash(short) == tokenizer_hash(train(TrainTokenizer(300), ["".join(texts)[:20]]))


def test_small_text_gives_a_smaller_vocabulary_and_says_so(caplog):
    with caplog.at_level("INFO", "triadic.data"):
        made = train(TrainTokenizer(5000), ["state of the union"])
    assert vocab_size(made) < 300
    assert "of the 5000 vocabulary entries" in caplog.text


def test_hash_tells_what_matters(tokenizer, tokenizer_folder, tmp_path):
    loaded = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizer_hash(loaded) == tokenizer_hash(tokenizer_folder) == tokenizer_hash(tokenizer)
    loaded.padding_side, loaded.model_max_length, loaded.pad_token = "left", 77, loaded.eos_token
    loaded(["a", "b c d e f"], padding=True, truncation=True, max_length=3)
    loaded.save_pretrained(tmp_path)
    assert tokenizer_hash(loaded) == tokenizer_hash(tmp_path) == tokenizer_hash(tokenizer)
    loaded.eos_token = "<pad>"
    assert tokenizer_hash(loaded) != tokenizer_hash(tokenizer)
    merges = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    merges["model"]["merges"] = merges["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(merges))
    assert tokenizer_hash(tmp_path) != tokenizer_hash(tokenizer)


def test_missing_special_tokens_become_end_of_text(bare):
    loaded = load_pretrained(TokenizerConfig(pretrained=str(bare)))
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<end>",) * 3
    assert vocab_size(loaded) == 4


def test_special_tokens_can_be_named_but_not_invented(bare):
    loaded = load_pretrained(TokenizerConfig(pretrained=str(bare), bos_token="<unk>"))
    assert (loaded.bos_token, loaded.eos_token) == ("<unk>", "<end>")
    with pytest.raises(ValueError, match=r"tokenizer\.pad_token='<pad>' is no entry of the vocabulary"):
        load_pretrained(TokenizerConfig(pretrained=str(bare), pad_token="<pad>"))


def test_tokenizer_without_end_of_text(bare, tmp_path):
    PreTrainedTokenizerFast(tokenizer_file=str(bare / "tokenizer.json")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no end-of-text token; name one of its entries"):
        load_pretrained(TokenizerConfig(pretrained=str(tmp_path)))


def test_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer can be loaded from"):
        tokenizer_hash(tmp_path / "nowhere")
