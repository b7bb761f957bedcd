"""The model on a CUDA device: variable-length softmax, flex attention, compiled packed training, generation."""

import pytest
import torch

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
    """bfloat16: torch's varlen_attn or a compiled block mask, against one float32 document at a time."""
    ids = tokens(1, 448).cuda()
    exact = make_model(kind, **SIZES).cuda().train()
    loss, expected = gradients(exact, ids, LENGTHS)
    model = make_model(kind, attn_implementation=implementation, **SIZES).cuda().train()
    with torch.autocast("cuda", torch.bfloat16):
        packed, actual = gradients(model, ids, 448, cu_seq_lens_q=bounds(), max_length_q=longest)
    assert packed == pytest.approx(loss, rel=0.01)
    similar(actual, expected, 0.1)


def test_packed_float32_is_exact(make_model, tokens):
    ids, model = tokens(1, 448).cuda(), make_model("hybrid", **SIZES).cuda().train()
    loss, expected = gradients(model, ids, LENGTHS)
    packed, actual = gradients(model, ids, 448, cu_seq_lens_q=bounds())
    assert packed == pytest.approx(loss, rel=1e-4)
    similar(actual, expected, 1e-3)


def test_compiled_packed_training(make_model, tokens):
    """One graph of a packed hybrid under autocast equals eager."""
    ids, model = tokens(1, 448).cuda(), make_model("hybrid", **SIZES).cuda().train()
    arguments = {"cu_seq_lens_q": bounds(), "max_length_q": 257}
    with torch.autocast("cuda", torch.bfloat16):
        loss, expected = gradients(model, ids, 448, **arguments)
        compiled, actual = gradients(torch.compile(model, fullgraph=True), ids, 448, **arguments)
    assert compiled == pytest.approx(loss, rel=0.01)
    similar({name.removeprefix("_orig_mod."): g for name, g in actual.items()}, expected, 0.05)


@pytest.mark.parametrize("kind", ["gdn", "sgla", "hybrid", "transformer"])
def test_generation(make_model, tokens, kind):
    model, ids = make_model(kind).cuda(), tokens(2, 70).cuda()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
