"""Snapshots: copies, chosen rows and saved caches continue a text as its whole does."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from triadic.models import cache as caches
from triadic.models import configuration_triadic, snapshots
from triadic.models.cache import CACHE_NAME, RECURRENT, new_cache
from triadic.models.mixers import MIXERS
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


def test_an_added_recurrent_mixer_is_saved_and_loaded(make_model, tokens, close, tmp_path, monkeypatch):
    """The steps of CONTRIBUTING.md: a line in each of the tables."""
    monkeypatch.setitem(MIXERS, "conv", MIXERS["linear_attention"])
    monkeypatch.setattr(configuration_triadic, "LAYER_TYPES", ("conv", "full_attention"))
    for module in (caches, snapshots):
        monkeypatch.setattr(module, "RECURRENT", (*RECURRENT, "conv"))
    model, ids = make_model("gdn", layer_types=["conv", "full_attention"]), tokens(2, LENGTH)
    cache = new_cache(model.config)
    logits(model, ids[:, :SPLIT], cache)
    save_cache(cache, tmp_path / "text.safetensors")
    loaded = load_cache(tmp_path / "text.safetensors", model.config)
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


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("length", [4, 6, 7])
def test_nothing_new_to_read(model, tokens, length, static):
    """transformers would read the text once more."""
    cache, ids = StaticCache(model.config, max_cache_len=20) if static else new_cache(model.config), tokens(2, 7)
    logits(model, ids, cache)
    with pytest.raises(ValueError, match=f"the cache has read 7 tokens, and the text has {length}"):
        model.generate(ids[:, :length], max_new_tokens=2, **{CACHE_NAME: cache})


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
    with pytest.raises(ValueError, match=r"holds \[2, 3, 8, 12, 3\], but the model's are \[2, 4, 8, 12, 3\]"):
        load_cache(path, make_config("gdn", second_key_dim=4))
    with pytest.raises(ValueError, match=r"holds \[2, 3, 8, 12, 3\], but the model's are \[2, 3, 8, 12, 0\]"):
        load_cache(path, make_config("gdn", linear_conv_kernel_dim=0))
    for rows in ([True, False], [0.5], [[0]]):
        with pytest.raises(ValueError, match=r"rows is .*; give a sequence of integers"):
            select_rows(cache, rows)
    with pytest.raises(ValueError, match="but must be a transformers Cache"):
        copy_cache(None)


def test_files_that_are_no_cache(make_model, tokens, tmp_path):
    model, path = make_model("hybrid"), tmp_path / "text.safetensors"
    cache = StaticCache(model.config, max_cache_len=4)
    logits(model, tokens(2, 3), cache)
    save_cache(cache, path)
    whole = path.read_bytes()
    for content in (b"some text, but no tensors", whole[:-100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a cache"):
            load_cache(path, model.config)
    with pytest.raises(ValueError, match="cannot be read as a cache"):
        load_cache(tmp_path / "nothing", model.config)
    for device in ("nowhere", *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(ValueError, match=f"device {device} cannot be used here; give that of the model"):
            load_cache(path, model.config, device=device)
    save_file({"0.conv": torch.zeros(1)}, path, metadata={"layer_types": " ".join(model.config.layer_types)})
    with pytest.raises(ValueError, match="lacks tensors of a cache"):
        load_cache(path, model.config)
    cache.reset()
    with pytest.raises(ValueError, match="the cache is empty"):
        save_cache(cache, path)


@pytest.mark.parametrize(
    ("written", "read"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float64")]
)
def test_loaded_for_a_model_of_another_dtype(written, read, make_model, tokens, tmp_path):
    """Keys, values and convolution inputs follow the model, states its config; it reads on."""
    ids, path = tokens(2, LENGTH), tmp_path / "text.safetensors"
    models = [make_model("hybrid").to(getattr(torch, name)) for name in (written, read)]
    cache = new_cache(models[0].config)
    logits(models[0], ids[:, :SPLIT], cache)
    save_cache(cache, path)
    loaded = load_cache(path, models[1].config, dtype=getattr(torch, read))
    linear, softmax = (next(x for x in loaded.layers if hasattr(x, "state_dtype") == state) for state in (True, False))
    expected = {torch.float64: torch.float64}.get(models[1].dtype, torch.float32)
    assert linear.recurrent_states[0].dtype == expected
    assert {linear.conv_states[0].dtype, softmax.keys.dtype, softmax.values.dtype} == {models[1].dtype}
    for mine, theirs in zip(loaded.layers, cache.layers, strict=True):
        if mine is linear:
            assert torch.equal(mine.recurrent_states[0], theirs.recurrent_states[0].to(expected))
    assert logits(models[1], ids[:, SPLIT:], loaded).isfinite().all()


def test_states_follow_the_config_that_loads_them(make_model, make_config, tokens, tmp_path):
    ids, path = tokens(2, LENGTH), tmp_path / "text.safetensors"
    for written, read in (("bfloat16", "float32"), ("float32", "bfloat16")):
        model = make_model("gdn", linear_state_dtype=written)
        cache = new_cache(model.config)
        logits(model, ids, cache)
        save_cache(cache, path)
        loaded = load_cache(path, make_config("gdn", linear_state_dtype=read))
        assert {layer.recurrent_states[0].dtype for layer in loaded.layers} == {getattr(torch, read)}


def test_a_prompt_is_not_kept(make_model, tokens):
    """A snapshot has the size of its tensors, whatever the length of the text."""
    model = make_model("gdn")
    cache = new_cache(model.config)
    logits(model, tokens(2, 200), cache)
    for layer in (*cache.layers, *copy_cache(cache).layers):
        for tensor in (layer.conv_states[0], layer.recurrent_states[0]):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
