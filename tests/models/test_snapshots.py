"""Snapshots: copies, chosen rows and saved caches continue a text as its whole does."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from triadic.models.cache import CACHE_NAME, new_cache
from triadic.models.snapshots import copy_cache, load_cache, save_cache, select_rows

LENGTH, SPLIT = 9, 5


@torch.no_grad()
def logits(model, ids, cache):
    return model(ids, use_cache=True, **{CACHE_NAME: cache}).logits


@pytest.fixture
def model(kind, make_model):
    return make_model(kind)


def test_copies_are_independent(model, tokens, close):
    ids, other = tokens(2, LENGTH), tokens(2, 4, seed=9)
    cache = new_cache(model.config)
    logits(model, ids[:, :SPLIT], cache)
    kept = copy_cache(cache)
    logits(model, other, cache)
    whole = logits(model, ids, new_cache(model.config))
    close(logits(model, ids[:, SPLIT:], kept), whole[:, SPLIT:])


def test_a_text_read_with_gradients_on(model, tokens, close):
    """As whoever forgets torch.no_grad() reads it."""
    ids = tokens(2, LENGTH)
    cache = new_cache(model.config)
    model(ids[:, :SPLIT], use_cache=True, **{CACHE_NAME: cache})
    whole = logits(model, ids, new_cache(model.config))
    for copied in (copy_cache(cache), select_rows(cache, [0, 1])):
        close(logits(model, ids[:, SPLIT:], copied), whole[:, SPLIT:])


def test_rows_of_a_batch(model, tokens, close):
    """Row 1 twice, then row 0: three continuations; the cache itself stays as it is."""
    ids, more = tokens(2, SPLIT), tokens(3, 3, seed=4)
    cache = new_cache(model.config)
    logits(model, ids, cache)
    chosen = logits(model, more, select_rows(cache, [1, 1, 0]))
    alone = logits(model, torch.cat([ids[[1, 1, 0]], more], dim=1), new_cache(model.config))
    close(chosen, alone[:, SPLIT:])
    close(logits(model, more[:2], cache), logits(model, torch.cat([ids, more[:2]], 1), None)[:, SPLIT:])


@pytest.mark.parametrize("static", [False, True])
def test_saved_and_loaded(model, tokens, close, tmp_path, static):
    ids = tokens(2, LENGTH)
    cache = StaticCache(model.config, max_cache_len=20) if static else new_cache(model.config)
    logits(model, ids[:, :SPLIT], cache)
    save_cache(cache, tmp_path / "text.safetensors")
    loaded = load_cache(tmp_path / "text.safetensors", model.config)
    assert loaded.get_seq_length() == SPLIT
    close(logits(model, ids[:, SPLIT:], loaded), logits(model, ids, None)[:, SPLIT:])


def test_generation_from_a_document(make_model, tokens):
    """One document, three questions of it: the text of reading both anew."""
    model, document = make_model("hybrid"), tokens(1, 7)
    cache = new_cache(model.config)
    logits(model, document, cache)
    for seed in range(3):
        ids = torch.cat([document, tokens(1, 3, seed=seed)], dim=1)
        settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(
            model.generate(ids, **{CACHE_NAME: copy_cache(cache)}, **settings), model.generate(ids, **settings)
        )


def test_refusals(make_model, make_config, tokens, tmp_path):
    model, path = make_model("gdn"), tmp_path / "text.safetensors"
    with pytest.raises(ValueError, match="the cache is empty; save it after the model has read something"):
        save_cache(DynamicCache(), path)
    cache = new_cache(model.config)
    logits(model, tokens(2, 3), cache)
    with pytest.raises(ValueError, match="rows has 0 to 2, but the cache has 2 rows, from 0 on"):
        select_rows(cache, [0, 2])
    with pytest.raises(ValueError, match="the cache is a StaticCache, whose batch is fixed"):
        select_rows(StaticCache(model.config, max_cache_len=4), [0])
    save_cache(cache, path)
    with pytest.raises(ValueError, match=r"holds a cache of layers .*, but the model has .*full_attention"):
        load_cache(path, make_config("hybrid"))
    with pytest.raises(ValueError, match=r"holds states \[2, 3, 8, 12\], but the model's are \[2, 4, 8, 12\]"):
        load_cache(path, make_config("gdn", second_key_dim=4))
