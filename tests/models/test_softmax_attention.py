"""The softmax layer against its definition, with RoPE and without positions, on every back end a CPU has."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from triadic.models.attention import attend, document_block_mask, in_one_call
from triadic.models.layers import rotary_cos_sin
from triadic.models.layout import Layout


def by_hand(mixer, u, positions):
    """One row u [T, D] in float64: softmax over the past, a query head and a token at a time."""
    c, w = mixer.config, {name: value.detach().double() for name, value in mixer.state_dict().items()}
    D, u = c.head_dim, u.double()

    def heads(name):
        return (u @ w[f"{name}_proj.weight"].T).view(len(u), -1, D)

    def prepare(x, name):
        if c.qk_norm:
            x = x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w[f"{name}_norm.weight"]
        if c.position_embedding == "rope":
            rate = torch.tensor([c.rope_parameters["rope_theta"] ** (-2 * i / D) for i in range(D // 2)]).double()
            angle = positions[:, None, None].double() * rate
            turn = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
            x = torch.cat([turn.real, turn.imag], dim=-1)
        return x

    q, k, v = prepare(heads("q"), "q"), prepare(heads("k"), "k"), heads("v")
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        shared = h // (q.shape[1] // k.shape[1])
        for t in range(len(u)):
            weights = torch.softmax(k[: t + 1, shared] @ q[t, h] / math.sqrt(D), dim=0)
            out[t, h] = weights @ v[: t + 1, shared]
    return out.flatten(1) @ w["o_proj.weight"].T


CASES = {
    "rope": {},
    "nope": {"position_embedding": "none"},
    "no qk norm": {"qk_norm": False},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    "one key/value head": {"num_key_value_heads": 1, "head_dim": 16},
    "epsilon": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layer_equals_its_definition(make_model, case, implementation, close):
    model = make_model("transformer", attn_implementation=implementation, **CASES[case])
    captured = []
    mixer = model.model.layers[1].mixer
    mixer.register_forward_hook(lambda module, args, output: captured.append((args[0], output[0])))
    ids = torch.randint(2, 61, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(ids, position_ids=torch.arange(9)[None] + 3)
    u, out = captured[0]
    close(out[0], by_hand(mixer, u[0], torch.arange(9) + 3).float(), 2e-5)


def test_dropout_is_never_ignored(caplog):
    """torch's varlen_attn takes no dropout: packed documents with it go one by one, and a warning says so once."""
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert in_one_call(on_gpu, 0.0)
    assert not caplog.records
    assert not in_one_call(on_gpu, 0.1)
    assert not in_one_call(on_gpu, 0.1)
    assert [record.getMessage()[:18] for record in caplog.records] == ["attention_dropout:"]
    assert not in_one_call(SimpleNamespace(is_cuda=True, dtype=torch.float32), 0.0)
    assert not in_one_call(torch.zeros(1, dtype=torch.bfloat16), 0.0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("additive", [False, True])
def test_one_token_reads_keys_once(make_model, kv_heads, additive, close, monkeypatch):
    """A step of decoding under a mask with holes, against the definition in float64; no key is repeated for sdpa."""
    mixer = make_model("transformer", num_key_value_heads=kv_heads, head_dim=16).eval().model.layers[0].mixer
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    make = torch.Generator().manual_seed(4)
    q = torch.randn(3, 1, 4, 16, generator=make).transpose(1, 2)
    k, v = (torch.randn(3, kv_heads, 11, 16, generator=make) for _ in range(2))
    mask = torch.rand(3, 1, 1, 11, generator=make) < 0.6
    mask[..., 7] = True
    given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
    out, weights = attend(mixer, q, k, v, given, Layout())
    assert weights is None
    assert out.shape == (3, 1, 4, 16)
    for b, h in ((b, h) for b in range(3) for h in range(4)):
        some, shared = mask[b, 0, 0], h // (4 // kv_heads)
        p = torch.softmax(k[b, shared, some].double() @ q[b, h, 0].double() / 4, dim=0)
        close(out[b, 0, h], (p @ v[b, shared, some].double()).float(), 1e-6)


def test_rotary_positions_of_long_contexts(make_config):
    """Angles at position 65,535 in float32, against float64."""
    config = make_config("transformer", rope_parameters={"rope_type": "default", "rope_theta": 2e6})
    cos, sin = rotary_cos_sin(config, torch.tensor([[65535]]))
    angle = 65535 * 2e6 ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    torch.testing.assert_close(cos[0, 0].double(), angle.cos().repeat(2), rtol=0, atol=0.01)
    torch.testing.assert_close(sin[0, 0].double(), angle.sin().repeat(2), rtol=0, atol=0.01)


def test_rope_types_of_transformers(make_config):
    """Scaled RoPE comes from transformers: linear scaling by 4 turns a quarter as fast."""
    plain = make_config("transformer")
    scaled = make_config("transformer", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    for actual, expected in zip(
        rotary_cos_sin(scaled, torch.tensor([[12]])), rotary_cos_sin(plain, torch.tensor([[3]])), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def last_logits(model, ids):
    with torch.no_grad():
        return model(ids).logits[0, -1]


def test_without_positions_the_past_has_no_order(make_model, tokens):
    """One NoPE layer: permuting past tokens leaves the last output as it was; with RoPE it does not."""
    ids = tokens(1, 10)
    shuffled = torch.cat([ids[:, torch.tensor([4, 2, 0, 8, 6, 1, 3, 7, 5])], ids[:, 9:]], dim=1)
    one_layer = {"layer_types": ["full_attention"]}
    nope = make_model("transformer", position_embedding="none", **one_layer)
    torch.testing.assert_close(last_logits(nope, shuffled), last_logits(nope, ids), rtol=1e-5, atol=1e-5)
    rope = make_model("transformer", **one_layer)
    assert (last_logits(rope, shuffled) - last_logits(rope, ids)).abs().max() > 0.1


@pytest.mark.parametrize("bounds", [[0, 300], [0, 1, 127, 128, 129, 300], [0, 130, 256, 300], [0, 0, 40, 40, 300]])
def test_block_mask_of_documents(bounds):
    """Tile by tile flex attention's mask covers exactly the causal pairs inside documents."""
    length, cu_seqlens = bounds[-1], torch.tensor(bounds, dtype=torch.int32)
    mask = document_block_mask(cu_seqlens, length)
    document = torch.searchsorted(cu_seqlens, torch.arange(length), right=True)
    allowed = (document[:, None] == document[None]) & torch.ones(length, length).tril().bool()
    index = torch.arange(length)
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index[None]), allowed)
    tiles = (length + 127) // 128
    used = torch.zeros(tiles, tiles, dtype=torch.bool)
    for row in range(tiles):
        used[row, mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].long()] = True
    padded = torch.nn.functional.pad(allowed, (0, tiles * 128 - length, 0, tiles * 128 - length))
    needed = padded.view(tiles, 128, tiles, 128).any(3).any(1)
    assert torch.equal(used, needed)


def test_flex_attention_on_a_packed_row(make_model, tokens, close):
    """The model's flex path, through torch's uncompiled flex_attention, equals one document at a time."""
    lengths, ids = [1, 150, 49], tokens(1, 200)
    expected = make_model("transformer")
    model = make_model("transformer", attn_implementation="flex_attention")
    import transformers.integrations.flex_attention as integration

    compiled = integration.compile_friendly_flex_attention

    def uncompiled(query, key, value, training=False, **kwargs):
        return flex_attention(query, key, value, **kwargs)

    integration.compile_friendly_flex_attention = uncompiled
    try:
        with torch.no_grad():
            packed = model(ids, cu_seq_lens_q=torch.tensor([0, 1, 151, 200])).logits
            alone = torch.cat([expected(doc, use_cache=False).logits for doc in ids.split(lengths, dim=1)], dim=1)
    finally:
        integration.compile_friendly_flex_attention = compiled
    close(packed, alone)


def test_attention_weights_are_returned(make_model, tokens):
    """Eager attention's weights: rows sum to one, nothing from the future; linear layers have none."""
    model = make_model("hybrid", attn_implementation="eager")
    with torch.no_grad():
        outputs = model(tokens(1, 6), output_attentions=True, output_hidden_states=True)
    assert len(outputs.attentions) == 1
    weights = outputs.attentions[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 6))
    assert not weights.triu(1).any()
    assert len(outputs.hidden_states) == 4


def test_flash_attention_is_given_the_bounds(make_model):
    """With a flash implementation the packed row goes to its variable-length kernel, bounds and longest with it."""
    from transformers import AttentionInterface

    from triadic.models.attention import attend

    received = {}

    def fake(module, q, k, v, mask, **kwargs):
        received.update(kwargs, mask=mask)
        return q.transpose(1, 2), None

    mixer = make_model("transformer").model.layers[0].mixer
    AttentionInterface.register("flash_attention_fake", fake)
    mixer.config._attn_implementation = "flash_attention_fake"
    q, bounds = torch.randn(1, 4, 6, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    for longest in (4, None):  # given, or found
        attend(mixer, q, q[:, :2], q[:, :2], None, Layout(bounds, longest))
        assert received["mask"] is None
        assert received["cu_seq_lens_q"] is received["cu_seq_lens_k"] is bounds
        assert received["max_length_q"] == received["max_length_k"] == 4
        received.clear()
