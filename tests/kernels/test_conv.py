"""The short convolution against F.conv1d and a loop written from the definition."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from triadic_kernels import causal_conv1d

BOUNDS = [0, 1, 3, 3, 12, 14]  # documents of 1, 2, 0, 9 and 2 tokens
ACTIVATIONS = {"silu": F.silu, "softplus": F.softplus, "sigmoid": torch.sigmoid, "relu": F.relu, None: lambda x: x}


def tensors(B=1, T=14, D=3, W=4, N=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (B, T, D), "weight": (D, W)} | ({} if N is None else {"initial_state": (N, D, W - 1)})
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def loop(x, weight, initial_state=None, output_final_state=True, cu_seqlens=None, activation=None):
    """The definition, token by token."""
    D, W = weight.shape
    rows = [(b, 0, x.shape[1]) for b in range(len(x))]
    if cu_seqlens is not None:
        rows = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    y, final = torch.zeros_like(x), []
    for n, (b, start, end) in enumerate(rows):
        past = torch.zeros(W - 1, D).to(x) if initial_state is None else initial_state[n].T
        seen = torch.cat([past, x[b, start:end]])
        for t in range(end - start):
            y[b, start + t] = ACTIVATIONS[activation]((seen[t : t + W] * weight.T).sum(0))
        final.append(seen[len(seen) - (W - 1) :].T)
    return y, torch.stack(final)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_conv1d(activation, gradients, close, tolerance):
    x = tensors(B=2, T=14)

    def expected(x, weight, output_final_state):
        y = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=3).mT
        return ACTIVATIONS[activation](y), x.mT[..., -3:]

    close(gradients(causal_conv1d, x, activation=activation), gradients(expected, x), tolerance[torch.float64])


@pytest.mark.parametrize("W", [1, 2, 4, 7])
@pytest.mark.parametrize("T", [1, 2, 3, 9])
@pytest.mark.parametrize("states", [True, False])
def test_equals_the_definition(T, W, states, gradients, close, tolerance):
    """Also sequences shorter than the kernel, whose final state still holds a part of the initial one."""
    x = tensors(B=2, T=T, W=W, N=2 if states else None)
    close(gradients(causal_conv1d, x), gradients(loop, x), tolerance[torch.float64])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("W", [1, 3, 4])
def test_packed(W, states, dtype, gradients, close, tolerance):
    x = tensors(W=W, N=len(BOUNDS) - 1 if states else None)
    options = dict(cu_seqlens=torch.tensor(BOUNDS, dtype=dtype), activation="silu")
    close(gradients(causal_conv1d, x, **options), gradients(loop, x, **options), tolerance[torch.float64])


@pytest.mark.parametrize("bounds", [[0, 1, 2, 3, 9], [0, 4, 9], [0, 0, 9]])
def test_chained_segments(bounds, gradients, close, tolerance):
    x = tensors(B=2, T=9, N=2)

    def chained(x, weight, initial_state, output_final_state):
        y, state = [], initial_state
        for start, end in pairwise(bounds):
            part, state = causal_conv1d(x[:, start:end], weight, initial_state=state, output_final_state=True)
            y.append(part)
        return torch.cat(y, 1), state

    close(gradients(chained, x), gradients(causal_conv1d, x), tolerance[torch.float64])


def test_documents_cannot_poison_one_another():
    x = tensors(N=5)
    cu_seqlens = torch.tensor(BOUNDS)
    results = []
    for poison in (0.0, float("nan")):
        dirty = {name: y.detach().clone().requires_grad_() for name, y in x.items()}
        with torch.no_grad():
            dirty["x"][:, 3:12] += poison
            dirty["initial_state"][3] += poison
        y, final = causal_conv1d(**dirty, output_final_state=True, cu_seqlens=cu_seqlens)
        (dx,) = torch.autograd.grad(y[:, 12:].sum() + y[:, :3].sum(), dirty["x"])
        results.append((y, final, dx))
    (y, final, dx), (dirty_y, dirty_final, dirty_dx) = results
    assert dirty_y[:, 3:12].isnan().all()
    others = torch.tensor([0, 1, 2, 12, 13])
    assert torch.equal(dirty_y[:, others], y[:, others])
    assert torch.equal(dirty_final[[0, 1, 2, 4]], final[[0, 1, 2, 4]])
    assert torch.equal(dirty_dx[:, others], dx[:, others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    x = tensors(B=2, T=200, D=8, dtype=dtype)
    y, final = causal_conv1d(**x, activation="silu", output_final_state=True)
    assert y.dtype == final.dtype == dtype
    exact = {name: tensor.float() for name, tensor in x.items()}
    assert torch.equal(y, causal_conv1d(**exact, activation="silu")[0].to(dtype))


def test_autocast_changes_nothing():
    x = tensors(B=2, dtype=torch.float32)
    expected = causal_conv1d(**x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(causal_conv1d(**x)[0], expected)


def test_gradcheck():
    x = tensors(T=5, D=2, W=3, N=2)

    def flat(x, weight, initial_state):
        options = dict(activation="softplus", output_final_state=True, cu_seqlens=torch.tensor([0, 1, 5]))
        return causal_conv1d(x, weight, initial_state=initial_state, **options)

    assert torch.autograd.gradcheck(flat, tuple(x.values()))
    assert torch.autograd.gradgradcheck(flat, tuple(x.values()))


def test_compiles_without_breaks(gradients, close, tolerance):
    """Gradients too, which torch 2.11 drops where a custom function returns what it has changed in place."""
    x = tensors(N=2)
    cu_seqlens = torch.tensor([0, 5, 14])

    def layer(**inputs):
        return causal_conv1d(**inputs, activation="silu", cu_seqlens=cu_seqlens)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(gradients(compiled, x), gradients(layer, x), tolerance[torch.float64])


def test_no_state_is_returned_unless_asked():
    assert causal_conv1d(**tensors())[1] is None
