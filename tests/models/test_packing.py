"""Packed documents never meet: logits and gradients equal those of each document alone."""

import pytest
import torch
from transformers import StaticCache

from triadic.models.cache import CACHE_NAME

LENGTHS = [1, 2, 7, 1, 4, 9]
BOUNDS = torch.tensor([0, 1, 3, 10, 11, 15, 24], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
WAYS = {
    "cu_seqlens": {"cu_seq_lens_q": BOUNDS},
    "cu_seqlens int64": {"cu_seq_lens_q": BOUNDS.long()},
    "cu_seqlens with its companions": {
        "cu_seq_lens_q": BOUNDS,
        "cu_seq_lens_k": BOUNDS,
        "max_length_q": 9,
        "max_length_k": 9,
        "position_ids": POSITIONS,
    },
    "cu_seqlens under a mask of ones": {"cu_seq_lens_q": BOUNDS, "attention_mask": torch.ones(1, 24)},
    "cu_seqlens with empty documents": {"cu_seq_lens_q": torch.tensor([0, 0, 1, 3, 10, 10, 10, 11, 15, 24, 24])},
    "position_ids": {"position_ids": POSITIONS},
    "position_ids under a mask of ones": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 24)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits(kind, make_model, tokens, way, implementation, close):
    model, ids = make_model(kind, attn_implementation=implementation), tokens(1, 24)
    with torch.no_grad():
        packed = model(ids, **WAYS[way]).logits
        alone = torch.cat([model(doc, use_cache=False).logits for doc in ids.split(LENGTHS, dim=1)], dim=1)
        unpacked = model(ids).logits
    close(packed, alone)
    assert (unpacked - alone).abs().max() > 0.1  # the documents would have met


def test_gradients(kind, make_model, tokens, close):
    model, ids = make_model(kind), tokens(1, 24)
    goal = torch.randn(1, 24, 61, generator=torch.Generator().manual_seed(3))

    def gradients(*calls):
        model.zero_grad()
        logits = torch.cat([model(doc, **kwargs).logits for doc, kwargs in calls], dim=1)
        (logits * goal).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients(*((doc, {"use_cache": False}) for doc in ids.split(LENGTHS, dim=1)))
    for way in ("cu_seqlens", "cu_seqlens with empty documents", "position_ids"):
        for name, gradient in gradients((ids, WAYS[way])).items():
            close(gradient / expected[name].abs().max(), expected[name] / expected[name].abs().max())


def test_several_packed_rows(kind, make_model, tokens, close):
    """position_ids may restart in every row of a batch; rows are documents of their own too."""
    model, ids = make_model(kind), tokens(2, 24)
    positions = torch.stack([POSITIONS[0], torch.cat([torch.arange(20), torch.arange(4)])])
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        for row, lengths in enumerate((LENGTHS, [20, 4])):
            docs = ids[row : row + 1].split(lengths, dim=1)
            close(packed[row], torch.cat([model(doc, use_cache=False).logits for doc in docs], dim=1)[0])


def test_hidden_states_keep_the_rows(kind, make_model, tokens, close):
    model, ids = make_model(kind), tokens(2, 24)
    with torch.no_grad():
        packed = model(ids, position_ids=POSITIONS, output_hidden_states=True).hidden_states
        alone = [model(row[None], position_ids=POSITIONS, output_hidden_states=True).hidden_states for row in ids]
    for layer, rows in zip(packed, zip(*alone, strict=True), strict=True):
        close(layer, torch.cat(rows))


def test_positions_that_only_go_up_are_one_document(kind, make_model, tokens, close):
    model, ids = make_model(kind), tokens(2, 8)
    with torch.no_grad():
        expected = model(ids).logits
        close(model(ids, position_ids=torch.arange(8)[None]).logits, expected, 1e-6)
        close(model(ids, position_ids=torch.arange(8)[None] + 100).logits, expected)  # RoPE sees distances alone


def test_rotary_positions_restart_with_every_document(make_model, tokens, close):
    """A model that could see absolute positions would answer the second copy of a document differently."""
    model, doc = make_model("transformer"), tokens(1, 6)
    ids, bounds = torch.cat([tokens(1, 5, seed=8), doc, doc], dim=1), torch.tensor([0, 5, 11, 17])
    with torch.no_grad():
        logits = model(ids, cu_seq_lens_q=bounds).logits
    close(logits[:, 5:11], logits[:, 11:], 1e-5)
    seen = []
    attention = model.model.layers[0].mixer
    attention.register_forward_pre_hook(lambda module, args: seen.append(args[3][0]))  # the cosines
    with torch.no_grad():
        model(ids, cu_seq_lens_q=bounds)
    assert torch.equal(seen[0][:, 5:11], seen[0][:, 11:])
    assert not torch.equal(seen[0][:, 0], seen[0][:, 1])


def test_packed_attention_never_sees_two_documents(make_model, tokens, monkeypatch):
    """Every score matrix of a packed row is a document's own; none has the size of the row."""
    sizes = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, *args, **kwargs):
        sizes.append((q.shape[-2], k.shape[-2]))
        assert kwargs.get("attn_mask") is None
        return attend(q, k, v, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        make_model("transformer")(tokens(1, 24), cu_seq_lens_q=BOUNDS)
    assert sizes == [(n, n) for n in LENGTHS] * 2


def test_a_packed_batch_asks_for_no_cache(kind, make_model, tokens):
    model, ids = make_model(kind), tokens(1, 24)
    with torch.no_grad():
        outputs = model(ids, cu_seq_lens_q=BOUNDS)
        assert outputs.get("cache") is None
        assert outputs.get("past_key_values") is None


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("way", ["cu_seqlens", "position_ids"])
def test_packed_prompts_fill_a_cache(make_model, tokens, close, way, static):
    """A row a prompt, which then goes on as each alone would."""
    model, ids, more = make_model("gdn"), tokens(1, 24), tokens(len(LENGTHS), 2, seed=5)
    cache = StaticCache(model.config, max_cache_len=30) if static else None
    with torch.no_grad():
        cache = model(ids, use_cache=True, **WAYS[way], **{CACHE_NAME: cache})[CACHE_NAME]
        follow = model(more, use_cache=True, **{CACHE_NAME: cache}).logits
        for row, prompt in enumerate(ids.split(LENGTHS, dim=1)):
            whole = model(torch.cat([prompt, more[row : row + 1]], dim=1)).logits
            close(follow[row], whole[0, -2:])


def test_refused_caches_of_packed_prompts(make_model, tokens):
    ids = tokens(1, 24)
    with pytest.raises(ValueError, match="packed documents cannot fill the cache of softmax layers"):
        make_model("hybrid")(ids, use_cache=True, cu_seq_lens_q=BOUNDS)
    model = make_model("gdn")
    with torch.no_grad():
        cache = model(ids, use_cache=True)[CACHE_NAME]
    with pytest.raises(ValueError, match="packed documents cannot continue those of a filled cache"):
        model(ids, use_cache=True, cu_seq_lens_q=BOUNDS, **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="packed documents cannot continue those of a filled cache"):
        model(ids, use_cache=True, position_ids=POSITIONS, **{CACHE_NAME: cache})


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ([1, 12, 24], "rise from 0 to the 24 tokens"),
        ([0, 12, 23], "rise from 0 to the 24 tokens"),
        ([0, 13, 12, 24], "rise from 0"),
    ],
)
def test_bad_bounds(kind, make_model, tokens, bounds, named):
    with pytest.raises(ValueError, match=named):
        make_model(kind)(tokens(1, 24), cu_seq_lens_q=torch.tensor(bounds))


def test_contradicting_arguments(make_model, tokens):
    model = make_model("gdn")
    with pytest.raises(ValueError, match="the batch has 2"):
        model(tokens(2, 24), cu_seq_lens_q=BOUNDS)
    mask = torch.ones(1, 24)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="exclude each other"):
        model(tokens(1, 24), cu_seq_lens_q=BOUNDS, attention_mask=mask)
    with pytest.raises(ValueError, match="restart inside a padded row"):
        model(tokens(1, 24), position_ids=POSITIONS, attention_mask=mask)


def test_flattening_collator(make_model, tokens, close):
    """What transformers' own packing collator makes trains without another word."""
    from transformers import DataCollatorWithFlattening

    model, docs = make_model("hybrid"), [tokens(n, seed=n) for n in (3, 5)]
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": doc.tolist()} for doc in docs])
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        close(packed, torch.cat([model(doc[None]).logits for doc in docs], dim=1))
