"""Packed documents: the chunk table, equality with separate calls, and isolation."""

from itertools import pairwise

import pytest
import torch
from triadic_kernels import chunk_triadic, recurrent_triadic
from triadic_kernels.packing import chunk_bound, chunk_table, from_chunks, to_chunks

OPS = pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic])
BOUNDS = [0, 1, 3, 3, 70, 134, 140]  # documents of 1, 2, 0, 67, 64 and 6 tokens
PER_TOKEN = ("q", "k", "v", "q2", "k2", "g", "beta")


def separately(op, bounds):
    """The op called once for each document."""

    def run(initial_state, output_final_state, **inputs):
        o, ht = [], []
        for n, (start, end) in enumerate(pairwise(bounds)):
            document = {name: inputs[name][:, start:end] for name in PER_TOKEN}
            part, state = op(**document, initial_state=initial_state[n : n + 1], output_final_state=True)
            o.append(part)
            ht.append(state)
        return torch.cat(o, 1), torch.cat(ht)

    return run


@pytest.mark.parametrize("lengths", [[5], [0], [4, 4, 4], [1, 9, 0, 4, 8, 5], [0, 0, 3]])
def test_chunk_table(lengths):
    table = chunk_table(lengths, 4, torch.device("cpu"))
    assert sum(table.steps) == len(table.token)
    assert sum(table.steps) <= chunk_bound(1, sum(lengths), len(lengths), 4)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    row = 0
    for step, count in enumerate(table.steps):
        for n in table.order[:count].tolist():
            here = range(starts[n] + 4 * step, min(starts[n] + 4 * step + 4, starts[n] + lengths[n]))
            assert len(here) > 0
            assert table.token[row, : len(here)].tolist() == list(here)
            assert table.slot[list(here)].tolist() == list(range(4 * row, 4 * row + len(here)))
            row += 1
    assert row == len(table.token)
    tokens = torch.arange(1.0, 1 + 2 * sum(lengths)).view(-1, 2, 1)
    chunks = to_chunks(tokens, table, 4)  # two heads become four
    assert chunks.sum() == 2 * tokens.sum(), "padding is zero and every head is repeated"
    assert torch.equal(from_chunks(chunks, table, 4), tokens.repeat_interleave(2, 1))


def test_chunks_of_a_batch_are_counted_exactly():
    for length in (0, 1, 4, 5):
        assert chunk_bound(3, length, None, 4) == len(chunk_table([length] * 3, 4, torch.device("cpu")).token)


@OPS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_equals_separate(op, dtype, inputs, gradients, close, tolerance):
    x = inputs(T=140, states=6, strongest=50.0)
    packed = gradients(op, x, cu_seqlens=torch.tensor(BOUNDS, dtype=dtype))
    close(packed, gradients(separately(op, BOUNDS), x), tolerance[torch.float64])


@OPS
def test_a_batch_is_documents_of_one_length(op, inputs, gradients, close, tolerance):
    x = inputs(B=3, T=50, states=3)

    def packed(initial_state, output_final_state, **rest):
        rest = {name: y.flatten(0, 1)[None] for name, y in rest.items()}
        cu_seqlens = torch.tensor([0, 50, 100, 150])
        o, ht = op(**rest, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens)
        return o.view(3, 50, 4, 7), ht

    close(gradients(packed, x), gradients(op, x), tolerance[torch.float64])


@OPS
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_documents_cannot_poison_one_another(op, poison, inputs, gradients):
    """Whatever stands in one document, values and gradients of the others stay the same to the bit."""
    x = inputs(T=140, states=6)
    cu_seqlens = torch.tensor(BOUNDS)
    clean = gradients(op, x, cu_seqlens=cu_seqlens)
    dirty = {name: y.detach().clone() for name, y in x.items()}
    for name in ("q", "k", "v", "q2", "k2", "beta"):
        dirty[name][:, 70:134] = poison
    dirty["initial_state"][4] = poison
    dirty = gradients(op, {name: y.requires_grad_() for name, y in dirty.items()}, cu_seqlens=cu_seqlens)
    assert dirty["o"][:, 70:134].isnan().any()
    for name, y in dirty.items():
        per_state = name in ("ht", "dinitial_state")
        others = [0, 1, 2, 3, 5] if per_state else [*range(70), *range(134, 140)]
        dim = 0 if per_state else 1
        picked = torch.tensor(others)
        assert torch.equal(y.index_select(dim, picked), clean[name].index_select(dim, picked)), name


@OPS
def test_all_documents_empty(op, inputs):
    x = inputs(T=0, states=2)
    o, ht = op(**x, cu_seqlens=torch.tensor([0, 0, 0]), output_final_state=True)
    assert o.shape == (1, 0, 4, 7)
    assert torch.equal(ht, x["initial_state"])
    weight = torch.randn_like(ht)
    (dh0,) = torch.autograd.grad(ht, x["initial_state"], weight)
    assert torch.equal(dh0, weight)


COMPILED = torch.compile(chunk_triadic, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("op", [chunk_triadic, COMPILED], ids=["direct", "compiled"])
def test_bounds_that_change_before_the_backward(op, inputs, close, tolerance):
    """Kernels read them again, so autograd must refuse; segments keep bounds of their own."""
    x, bounds = inputs(T=10), [torch.tensor([0, 3, 10]), torch.tensor([0, 5, 10])]
    wanted = torch.autograd.grad(chunk_triadic(**x, cu_seqlens=bounds[0])[0].square().sum(), x["k"])

    def changed(**options):
        cu_seqlens = bounds[0].clone()
        o, _ = op(**x, cu_seqlens=cu_seqlens, **options)
        cu_seqlens.copy_(bounds[1])
        return torch.autograd.grad(o.square().sum(), x["k"])

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed()
    close(dict(dk=changed(segment_size=4)[0]), dict(dk=wanted[0]), tolerance[torch.float64])


@pytest.mark.parametrize("op", [chunk_triadic, COMPILED], ids=["direct", "compiled"])
def test_bounds_that_take_turns(op, inputs, close, tolerance):
    """Forward, forward, backward, backward, of documents of one number in one number of tokens."""
    x, bounds = inputs(T=70), [torch.tensor([0, 3, 70]), torch.tensor([0, 69, 70])]

    def derivatives(op):
        outputs = [op(**x, cu_seqlens=cu_seqlens)[0].square().sum() for cu_seqlens in bounds]
        return {str(i): torch.autograd.grad(o, x["k"])[0] for i, o in enumerate(outputs)}

    close(derivatives(op), derivatives(recurrent_triadic), tolerance[torch.float64])
