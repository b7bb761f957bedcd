"""Text from a model: streamed, seeded, and its words counted against a corpus."""

import itertools

import pytest
import torch

from triadic.data import open_store
from triadic.evaluation import sampling
from triadic.evaluation.loading import load_checkpoint


@pytest.fixture(scope="module")
def loaded(triadic_hf):
    return load_checkpoint(str(triadic_hf))


def test_greedy_text_is_what_generate_gives(loaded):
    pieces = []
    made = sampling.complete(
        loaded.model, loaded.tokenizer, "kalo mi", max_new_tokens=12, temperature=0, on_text=pieces.append
    )
    ids = torch.tensor([loaded.tokenizer("kalo mi").input_ids])
    out = loaded.model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert made.text == loaded.tokenizer.decode(out, skip_special_tokens=True)
    assert "".join(pieces) == made.text
    assert len(pieces) > 1
    assert made.tokens == len(out)
    assert made.tokens_per_s > 0


def test_sampling_follows_the_seed(loaded):
    def write(seed):
        return sampling.complete(loaded.model, loaded.tokenizer, "", max_new_tokens=16, seed=seed).text

    assert write(1) == write(1)
    assert write(1) != write(2)


def test_temperature_top_p_and_top_k_reach_the_model(loaded):
    """A tiny nucleus, or one token to choose from, leaves the likeliest only."""
    settings = {"prompt": "ka", "max_new_tokens": 8}
    greedy = sampling.complete(loaded.model, loaded.tokenizer, temperature=0, **settings).text
    assert sampling.complete(loaded.model, loaded.tokenizer, top_p=1e-6, seed=5, **settings).text == greedy
    assert (
        sampling.complete(loaded.model, loaded.tokenizer, top_k=1, temperature=5.0, seed=5, **settings).text == greedy
    )
    assert sampling.complete(loaded.model, loaded.tokenizer, temperature=1e-4, seed=5, **settings).text == greedy
    assert sampling.complete(loaded.model, loaded.tokenizer, temperature=5.0, seed=5, **settings).text != greedy


def test_an_empty_prompt_needs_a_bos(loaded, triadic_hf):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(triadic_hf)
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match="the prompt is empty"):
        sampling.complete(loaded.model, tokenizer, "")


def test_words_by_hand():
    text = "The Union's strength\u2014 it isn't 42 or x2y: don\u2019t, THE unio"
    assert sampling.words(text) == ["the", "union's", "strength", "it", "isn't", "or", "x", "y", "don't", "the"]
    assert sampling.words("whole words.") == ["whole", "words"]
    assert sampling.words("42") == []
    corpus = {"the", "union's", "it", "or", "don't"}
    assert sampling.count_words(text, corpus) == (6, 10)


def test_words_of_a_store(data, texts, tokenizer):
    store = open_store(data / "train")
    known = sampling.corpus_words(store, tokenizer)
    by_hand = set()
    for start, stop in itertools.pairwise([*store.starts(0, store.num_tokens), store.num_tokens]):
        text = tokenizer.decode(store.tokens(start, stop).tolist(), skip_special_tokens=True)
        by_hand |= {word.strip(".,?").lower() for word in text.split()}
    assert known == by_hand
    assert {"grass", "memorize"} < known


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1.0}, r"^temperature must be >= 0, not -1.0$"),
        ({"temperature": float("nan")}, r"^temperature must be >= 0, not nan$"),
        ({"top_p": 0.0}, r"^top_p must be in \(0, 1\], not 0.0$"),
        ({"top_p": 2.0}, r"^top_p must be in \(0, 1\], not 2.0$"),
        ({"top_k": -1}, r"^top_k must be >= 0, not -1$"),
    ],
)
def test_values_that_cannot_be_sampled_with(loaded, wrong, said):
    with pytest.raises(ValueError, match=said):
        sampling.complete(loaded.model, loaded.tokenizer, "ka", max_new_tokens=2, **wrong)
