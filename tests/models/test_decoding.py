"""A cache never changes what a model says: every split, padding on either side, any number of tokens at a time."""

import copy
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import DynamicCache, StaticCache

from triadic.models.cache import CACHE_NAME, StaticRecurrentLayer

LENGTH = 11


@torch.no_grad()
def run(model, ids, cache=None, **kwargs):
    outputs = model(ids, past_key_values=cache, use_cache=True, **kwargs)
    return outputs, outputs["cache"] if "cache" in outputs else outputs["past_key_values"]


def feed(model, ids, sizes):
    """Logits of `ids` fed in pieces of the given sizes, and the last output."""
    logits, cache = [], None
    for piece in ids.split(sizes, dim=1):
        outputs, cache = run(model, piece, cache)
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1), outputs


@pytest.fixture
def model(kind, make_model):
    return make_model(kind)


def test_without_a_cache_nothing_changes(model, tokens, close):
    ids = tokens(2, LENGTH)
    full, _ = run(model, ids)
    with torch.no_grad():
        close(model(ids, use_cache=False).logits, full.logits, 1e-6)


def test_prefill_and_decode_at_every_split(model, tokens, cache_tensors, close):
    ids = tokens(2, LENGTH)
    full, _ = run(model, ids)
    for split in range(1, LENGTH):
        logits, outputs = feed(model, ids, [split] + [1] * (LENGTH - split))
        close(logits, full.logits)
        for row in range(2):
            for actual, expected in zip(cache_tensors(outputs, row), cache_tensors(full, row), strict=True):
                close(actual, expected)


@pytest.mark.parametrize("sizes", [[4, 4, 3], [1, 2, 8], [8, 1, 2], [2, 1, 7, 1], [1] * LENGTH])
def test_several_tokens_at_a_time(model, tokens, sizes, cache_tensors, close):
    ids = tokens(2, LENGTH)
    full, _ = run(model, ids)
    logits, outputs = feed(model, ids, sizes)
    close(logits, full.logits)
    for actual, expected in zip(cache_tensors(outputs), cache_tensors(full), strict=True):
        close(actual, expected)


def padded(rows, width, side):
    """Rows of unequal length as one batch: ids, attention mask, positions of the real tokens per row."""
    ids, mask, real = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width), []
    for i, row in enumerate(rows):
        places = torch.arange(len(row)) + (width - len(row) if side == "left" else 0)
        ids[i, places], mask[i, places] = row, 1.0
        real.append(places)
    return ids, mask.long(), real


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [[7], [1], [7, 11, 2], [11, 11, 3]])
def test_padding_is_never_seen(model, tokens, side, lengths, cache_tensors, close):
    """Prefill with padding, then two tokens, then one: logits and caches of each row equal those of the row alone."""
    rows = [tokens(n, seed=n + i) for i, n in enumerate(lengths)]
    more, last = tokens(len(rows), 2, seed=50), tokens(len(rows), 1, seed=51)
    ids, mask, real = padded(rows, LENGTH + 2, side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch, cache = run(model, ids, attention_mask=mask, position_ids=positions)
    follow = [batch]
    for new in (more, last):
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        positions = mask.cumsum(-1)[:, -new.shape[1] :] - 1
        outputs, cache = run(model, new, cache, attention_mask=mask, position_ids=positions)
        follow.append(outputs)
    for i, row in enumerate(rows):
        alone, alone_cache = run(model, row[None])
        close(batch.logits[i, real[i]], alone.logits[0])
        for step, new in enumerate((more, last), start=1):
            alone, alone_cache = run(model, new[i : i + 1], alone_cache)
            close(follow[step].logits[i], alone.logits[0])
        seen = mask[i].nonzero()[:, 0]
        for actual, expected in zip(cache_tensors(outputs, i, seen), cache_tensors(alone), strict=True):
            close(actual, expected)


def test_padded_prefill_leaves_the_rows_own_cache(model, tokens, cache_tensors, close):
    rows = [tokens(n, seed=n) for n in (2, 5, 9)]
    for side in ("left", "right"):
        ids, mask, real = padded(rows, 9, side)
        outputs, _ = run(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        for i, row in enumerate(rows):
            alone, _ = run(model, row[None])
            for actual, expected in zip(cache_tensors(outputs, i, real[i]), cache_tensors(alone), strict=True):
                close(actual, expected)


def test_a_finished_row_stays_as_it_is(make_model, tokens, cache_tensors):
    """A row whose new token is padding keeps its state bit by bit, one token or several at a time."""
    model = make_model("gdn")
    outputs, cache = run(model, tokens(2, 5))
    before = copy.deepcopy(cache_tensors(outputs, 0))
    other = copy.deepcopy(cache_tensors(outputs, 1))
    for width in (1, 3):
        mask = torch.ones(2, cache.get_seq_length() + width, dtype=torch.long)
        mask[0, 5:] = 0
        outputs, cache = run(model, tokens(2, width), cache, attention_mask=mask)
        assert all(map(torch.equal, cache_tensors(outputs, 0), before))
        assert not any(map(torch.equal, cache_tensors(outputs, 1), other))


def test_a_mask_of_ones_changes_nothing(model, tokens):
    ids = tokens(2, LENGTH)
    plain, _ = run(model, ids)
    masked, _ = run(model, ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(plain.logits, masked.logits)


def test_length_is_counted(model, tokens):
    _, cache = run(model, tokens(2, 5))
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == 5
    assert all(layer.get_seq_length() == 5 for layer in cache.layers)
    run(model, tokens(2, 1), cache)
    run(model, tokens(2, 3), cache)
    assert cache.get_seq_length() == 9
    assert cache.get_mask_sizes(2, 0) == (11, 0)
    assert all(layer.get_seq_length() == 9 for layer in cache.layers)


def test_any_dynamic_cache_will_do(model, tokens, close):
    """The user's own DynamicCache, made with or without a config, is filled in place."""
    ids = tokens(2, LENGTH)
    full, _ = run(model, ids)
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        _, same = run(model, ids[:, :6], cache)
        assert same is cache
        assert cache.get_seq_length() == 6
        outputs, _ = run(model, ids[:, 6:], cache)
        close(outputs.logits, full.logits[:, 6:])


def test_a_reset_cache_is_an_empty_one(make_model, tokens, close):
    model, ids = make_model("gdn"), tokens(2, LENGTH)
    full, cache = run(model, ids)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.layers[0].read() == (None, None)
    assert cache.layers[0].recurrent_states[0] is None  # and its memory is free
    outputs, _ = run(model, ids, cache)
    assert torch.equal(outputs.logits, full.logits)


def test_both_names_of_the_cache(make_model, tokens, close):
    model, ids = make_model("hybrid"), tokens(1, LENGTH)
    full, _ = run(model, ids)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], cache=cache, use_cache=True)
        close(model(ids[:, 4:], past_key_values=cache).logits, full.logits[:, 4:])
    with pytest.raises(ValueError, match="two names of one argument"):
        model(ids, cache=cache, past_key_values=cache)


def test_a_copied_cache_is_a_snapshot(make_model, tokens, close):
    """Prefix caching: two continuations of one prefilled prompt do not disturb each other."""
    model, ids = make_model("hybrid"), tokens(1, LENGTH)
    _, cache = run(model, ids[:, :5])
    kept = copy.deepcopy(cache)
    run(model, tokens(1, 4, seed=9), cache)
    full, _ = run(model, ids)
    outputs, _ = run(model, ids[:, 5:], kept)
    close(outputs.logits, full.logits[:, 5:])


def test_state_is_float32_in_a_bfloat16_model(make_model, tokens, cache_tensors):
    model = make_model("gdn").to(torch.bfloat16)
    outputs, cache = run(model, tokens(2, 5))
    outputs, _ = run(model, tokens(2, 1), cache)
    assert outputs.logits.dtype == torch.bfloat16
    assert {layer.recurrent_states[0].dtype for layer in cache.layers} == {torch.float32}


def test_rows_repeat_and_select(make_model, tokens, close):
    model = make_model("hybrid")
    _, cache = run(model, tokens(2, 6))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    outputs, _ = run(model, tokens(2, 2, seed=4), cache)
    _, swapped = run(model, tokens(2, 6).flip(0))
    expected, _ = run(model, tokens(2, 2, seed=4), swapped)
    close(outputs.logits, expected.logits, 1e-5)


def step_inputs(model, ids, end, cache):
    """What generate() gives the model for the token before `end`."""
    return model.prepare_inputs_for_generation(
        ids[:, :end],
        next_sequence_length=1,
        attention_mask=torch.ones(len(ids), end, dtype=torch.long),
        position_ids=torch.full((len(ids), 1), end - 1),
        use_cache=True,
        **{CACHE_NAME: cache},
    )


@torch.no_grad()
def test_compiled_steps_in_a_static_cache(model, tokens, close):
    """One graph without breaks for every token, in the same memory, with the logits of a whole forward."""
    ids, graphs = tokens(2, LENGTH), []

    def addresses(cache):
        states = [layer for layer in cache.layers if isinstance(layer, StaticRecurrentLayer)]
        tensors = [x for layer in states for x in (layer.recurrent_states[0], layer.conv_states[0])]
        return [x.data_ptr() for x in tensors if x is not None]  # not every mixer has a convolution

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    cache = StaticCache(model.config, max_cache_len=LENGTH + 2)
    logits = [run(model, ids[:, :4], cache)[0].logits]
    before, step = addresses(cache), torch.compile(model, fullgraph=True, backend=record)
    logits += [step(**step_inputs(model, ids, end, cache)).logits for end in range(5, LENGTH + 1)]
    close(torch.cat(logits, dim=1), run(model, ids)[0].logits)
    assert len(graphs) == 1
    assert addresses(cache) == before
    assert int(cache.get_seq_length()) == LENGTH


@pytest.mark.slow
@torch.no_grad()
def test_inductor_overwrites_the_state(make_model, tokens, monkeypatch, tmp_path):
    """The compiled step hands the cache's own tensor to the op: no copy of the state exists."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, ids = make_model("gdn", layer_types=["linear_attention"]), tokens(2, LENGTH)
    cache = StaticCache(model.config, max_cache_len=LENGTH)
    run(model, ids[:, :4], cache)
    arguments = step_inputs(model, ids, 5, cache)
    _, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), **arguments)
    shape = tuple(cache.layers[0].recurrent_states[0].shape)
    assert re.search(r"recurrent_step_\.default\((buf\d+, ){7}(arg\d+_1), None", code), "not the input itself"
    assert not re.search(rf"empty_strided_\w+\({re.escape(str(shape))}", code), "a buffer as large as the state"


@pytest.mark.parametrize("static", [False, True])
def test_bfloat16_states(make_model, tokens, static):
    """Half the memory: the states are bfloat16 at every step, and the text hardly changes."""
    model, ids = make_model("gdn", linear_state_dtype="bfloat16"), tokens(2, LENGTH)
    cache = StaticCache(model.config, max_cache_len=LENGTH) if static else None
    outputs, cache = run(model, ids[:, :4], cache)
    logits = [outputs.logits]
    for piece in ids[:, 4:].split([1, 2, 4], dim=1):
        assert {layer.recurrent_states[0].dtype for layer in cache.layers} == {torch.bfloat16}
        outputs, cache = run(model, piece, cache)
        logits.append(outputs.logits)
    exact = run(make_model("gdn"), ids)[0].logits
    error = (torch.cat(logits, dim=1) - exact).norm() / exact.norm()
    assert 1e-6 < error < 2e-2


def test_refusals(make_model, tokens):
    model, ids = make_model("gdn"), tokens(1, 6)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="tuple but must be a transformers Cache"):
        model(ids, past_key_values=())
    with pytest.raises(ValueError, match="attention_mask has 4 columns for 6 tokens"):
        model(ids, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="attention_mask has 2 rows for a batch of 1"):
        model(ids, attention_mask=torch.ones(2, 6))
    foreign = DynamicCache()
    for layer in range(len(model.model.layers)):
        foreign.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), layer)
    with pytest.raises(ValueError, match="layer 0 of the cache holds another model's DynamicLayer"):
        model(ids, past_key_values=foreign)
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions, but linear"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6).tril().bool())
    with pytest.raises(ValueError, match="a recurrent state cannot forget its last tokens"):
        run(model, ids)[1].crop(-2)


@pytest.mark.parametrize("static", [False, True])
def test_wrong_caches(make_model, tokens, static):
    def filled(*kind, **changes):
        model = make_model(*kind, **changes)
        cache = StaticCache(model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
        return run(model, tokens(2, 4), cache)[1]

    gdn, softmax, ids = make_model("gdn"), make_model("transformer"), tokens(2, 1)
    one, more = (dict(layer_types=["linear_attention"] * n) for n in (1, 5))
    count = gdn.config.num_hidden_layers
    for model, cache, message in (
        (gdn, filled("gdn", **more), f"the cache has 5 layers, but the model has {count}"),
        (gdn, filled("gdn", **one), f"the cache has 1 layers, but the model has {count}"),
        (gdn, filled("gdn", linear_conv_kernel_dim=0), "layer 0 of the cache holds"),
        (gdn, filled("gdn", second_key_dim=4), "layer 0 of the cache holds"),
        (softmax, filled("gdn"), "layer 0 of the cache holds another model's"),
        (softmax, filled("transformer", head_dim=6), "layer 0 of the cache holds"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, ids, cache)
    for length in (1, 12):
        with pytest.raises(ValueError, match="the cache holds 2 rows, but the batch has 3"):
            run(gdn, tokens(3, length), filled("gdn"))


def test_a_static_cache_where_gradients_are_on(model, tokens, close):
    ids = tokens(2, LENGTH)
    cache = StaticCache(model.config, max_cache_len=LENGTH)
    logits = [model(piece, past_key_values=cache, use_cache=True).logits for piece in ids.split([4, 1, 6], dim=1)]
    close(torch.cat(logits, dim=1), run(model, ids)[0].logits)


def test_embeddings_instead_of_ids(make_model, tokens):
    model, ids = make_model("gdn"), tokens(2, 6)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)


def test_outputs_as_a_tuple(make_model, tokens):
    model, ids = make_model("hybrid"), tokens(1, 6)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(model(ids, return_dict=False)[0], expected)
        model.config.return_dict = False
        assert torch.equal(model(ids)[0], expected)
        assert torch.equal(model(ids, return_dict=True).logits, expected)


def test_logits_to_keep(make_model, tokens):
    model, ids = make_model("gdn"), tokens(2, 6)
    with torch.no_grad():
        full = model(ids).logits
        assert torch.equal(model(ids, logits_to_keep=2).logits, full[:, -2:])
        assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, full[:, [0, 3]])
