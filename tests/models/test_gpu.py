"""The model on a CUDA device: variable-length softmax, flex attention, compiled packed training, generation."""

import pytest
import torch
from transformers import StaticCache

from triadic.models import losses
from triadic.models.cache import CACHE_NAME
from triadic.models.losses import LanguageModelHead

pytestmark = pytest.mark.gpu
LENGTHS = [1, 130, 60, 257]
SIZES = {"hidden_size": 128, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 64}


def bounds():
    return torch.tensor([0, *LENGTHS], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def gradients(model, ids, pieces, **kwargs):
    """Loss and gradients, summed over the given pieces of the row."""
    model.zero_grad()
    loss = sum(model(doc, shift_labels=doc, num_items_in_batch=448, **kwargs).loss for doc in ids.split(pieces, dim=1))
    loss.backward()
    return loss.item(), {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def similar(actual, expected, error):
    for name in expected:
        assert (actual[name] - expected[name]).norm() <= error * expected[name].norm(), name


@pytest.mark.parametrize("kind", ["transformer", "hybrid"])
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("longest", [257, None])
def test_packed_softmax(make_model, tokens, kind, implementation, longest):
    """bfloat16: torch's varlen_attn or a compiled block mask, against one float32 document at a time; the gradients are
    as close as bfloat16 brings one document at a time.
    """
    ids = tokens(1, 448).cuda()
    exact = make_model(kind, **SIZES).cuda().train()
    loss, expected = gradients(exact, ids, LENGTHS)
    model = make_model(kind, attn_implementation=implementation, **SIZES).cuda().train()
    with torch.autocast("cuda", torch.bfloat16):
        _, alone = gradients(model, ids, LENGTHS)
        packed, actual = gradients(model, ids, 448, cu_seq_lens_q=bounds(), max_length_q=longest)
    assert packed == pytest.approx(loss, rel=0.01)
    for name, g in expected.items():
        assert (actual[name] - g).norm() <= 1.5 * (alone[name] - g).norm(), name


def test_packed_float32_is_exact(make_model, tokens):
    ids, model = tokens(1, 448).cuda(), make_model("hybrid", **SIZES).cuda().train()
    loss, expected = gradients(model, ids, LENGTHS)
    packed, actual = gradients(model, ids, 448, cu_seq_lens_q=bounds())
    assert packed == pytest.approx(loss, rel=1e-4)
    similar(actual, expected, 1e-3)


def test_compiled_packed_training(make_model, tokens):
    """One graph of a packed hybrid under autocast: as close to float32 as eager, whose roundings it does not share (two
    ways to round differ by as much as each differs from float32, here a tenth).
    """
    ids, model = tokens(1, 448).cuda(), make_model("hybrid", **SIZES).cuda().train()
    arguments = {"cu_seq_lens_q": bounds(), "max_length_q": 257}
    _, exact = gradients(model, ids, 448, **arguments)
    with torch.autocast("cuda", torch.bfloat16):
        loss, eager = gradients(model, ids, 448, **arguments)
        compiled, actual = gradients(torch.compile(model, fullgraph=True), ids, 448, **arguments)
    assert compiled == pytest.approx(loss, rel=0.01)
    for name, g in exact.items():
        assert (actual[f"_orig_mod.{name}"] - g).norm() <= 1.5 * (eager[name] - g).norm(), name


@pytest.mark.parametrize(("vocabulary", "error"), [(61, 1.5e-3), (4096, 8e-4)])
def test_loss_over_a_head(monkeypatch, vocabulary, error):
    """bfloat16 logits, several chunks, the last one shorter: the loss and both gradients against float64; the weight's,
    whose chunks are summed up in float32, is closer than a bfloat16 sum could be.
    """
    monkeypatch.setattr(losses, "CHUNK_BYTES", 2 * vocabulary * 256)
    hidden, head = torch.randn(700, 64, device="cuda").bfloat16(), LanguageModelHead(64, vocabulary, bias=False).cuda()
    head.weight.data = torch.randn(vocabulary, 64, device="cuda").div(8).bfloat16().float()
    labels = torch.randint(vocabulary, (700,), device="cuda").where(torch.arange(700, device="cuda") % 9 > 0, -100)
    x, w = (t.detach().double().requires_grad_() for t in (hidden, head.weight))
    expected = torch.nn.functional.cross_entropy(x @ w.T, labels, reduction="sum")
    expected.backward()
    hidden = hidden.float().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        loss = head(hidden, labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    similar({"hidden": hidden.grad.double()}, {"hidden": x.grad}, 4e-3)
    similar({"weight": head.weight.grad.double()}, {"weight": w.grad}, error)


@pytest.mark.parametrize("slices", [3, 4])  # a power of two: keys and values in one pass
def test_compiled_float32_equals_eager(make_model, tokens, slices):
    ids, model = tokens(1, 448).cuda(), make_model("gdn", second_key_dim=slices, **SIZES).cuda().train()
    loss, expected = gradients(model, ids, 448, cu_seq_lens_q=bounds())
    compiled, actual = gradients(torch.compile(model, fullgraph=True), ids, 448, cu_seq_lens_q=bounds())
    assert compiled == pytest.approx(loss, rel=1e-4)
    similar({name.removeprefix("_orig_mod."): g for name, g in actual.items()}, expected, 1e-3)


@pytest.mark.parametrize("kind", ["gdn", "sgla", "hybrid", "transformer"])
def test_generation(make_model, tokens, kind):
    model, ids = make_model(kind).cuda(), tokens(2, 70).cuda()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


@pytest.mark.parametrize("kind", ["gdn", "sgla", "hybrid"])
def test_compiled_generation(make_model, tokens, kind):
    """A static cache: generate() compiles the step and replays it as a CUDA graph; padded rows, the same text twice."""
    model, ids = make_model(kind, **SIZES).cuda(), tokens(3, 20).cuda()
    ids[0, :7] = 0
    settings = {"attention_mask": (ids != 0).long(), "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **settings)
    for _ in range(2):
        assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gdn", "sgla", "hybrid"])
def test_splits_and_padding(make_model, tokens, kind):
    """float32: prompts read up to any place, then token by token, and padded ones say what one whole forward says."""
    model, ids = make_model(kind, **SIZES).cuda(), tokens(2, 70).cuda()
    whole = model(ids).logits
    for split in (1, 3, 63, 64, 65, 69):
        read = model(ids[:, :split], use_cache=True)
        logits, cache = [read.logits], {CACHE_NAME: read[CACHE_NAME]}
        for t in range(split, min(split + 4, 70)):
            logits.append(model(ids[:, t : t + 1], use_cache=True, **cache).logits)
        logits = torch.cat(logits, dim=1)
        similar({split: logits}, {split: whole[:, : logits.shape[1]]}, 1e-4)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    similar({"row": padded[0, 9:]}, {"row": model(ids[:1, 9:]).logits[0]}, 1e-4)
    similar({"row": padded[1]}, {"row": whole[1]}, 1e-4)


@torch.no_grad()
def test_long_decoding_stays_exact(make_model, tokens):
    """4,096 steps, one token each: the state that one pass of the chunk form leaves (float32)."""
    model, ids = make_model("gdn", layer_types=["linear_attention"], **SIZES).cuda(), tokens(1, 4096).cuda()
    whole = model(ids, use_cache=True)
    cache = StaticCache(model.config, max_cache_len=4096)
    model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache})
    for t in range(1, 4096):
        model(ids[:, t : t + 1], use_cache=True, position_ids=torch.tensor([[t]], device="cuda"), **{CACHE_NAME: cache})
    state, expected = (c.layers[0].recurrent_states[0] for c in (cache, whole[CACHE_NAME]))
    assert (state - expected).norm() < 1e-4 * expected.norm()
