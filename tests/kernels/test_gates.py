"""Decays of every strength: nothing overflows, nothing cancels, nothing drifts."""

import pytest
import torch
from triadic_kernels import chunk_triadic, recurrent_triadic

OPS = pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic])


def in_float64(inputs):
    return {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strong_gates(op, dtype, inputs, gradients, close, tolerance):
    """g from 0 to -50 per token over 512 tokens."""
    x = inputs(T=512, H=1, HV=2, E=3, strongest=50.0, states=1, dtype=dtype)
    close(gradients(op, x), gradients(recurrent_triadic, in_float64(x)), tolerance[dtype])


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strongest", [1e4, float("inf")])
def test_erasing_gates_beside_weak_ones(op, strongest, dtype, inputs, gradients, close, tolerance):
    """A token that erases the state must not cost the tokens after it their precision (sums of g near -1e5 would)."""
    x = inputs(T=512, H=1, HV=2, E=3, strongest=0.1, states=1, dtype=dtype)
    erase = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(1)) < 0.1
    x["g"] = x["g"].detach().masked_fill(erase, -strongest).requires_grad_()
    close(gradients(op, x), gradients(recurrent_triadic, in_float64(x)), tolerance[dtype])


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_token_erases(op, dtype, inputs, gradients):
    """o_t is what token t wrote itself, and no gradient reaches a gate."""
    x = inputs(T=100, H=1, HV=1, E=3, dtype=dtype)
    x["g"] = torch.full_like(x["g"], -1e4).requires_grad_()
    results = gradients(op, x, scale=1.0)
    own = (x["q"] * x["k"]).sum(-1) * (x["q2"] * x["k2"]).sum(-1) * x["beta"]
    torch.testing.assert_close(results["o"], own[..., None] * x["v"])
    assert results["dg"].abs().max() == 0
    assert all(y.isfinite().all() for y in results.values())


def test_gradient_of_a_strong_gate_is_not_rounding_noise(inputs, gradients):
    """Where the state is erased no gradient is left, though the tokens around exchange much."""
    x = inputs(T=100, H=1, HV=1, E=2, strongest=0.01, dtype=torch.float32)
    g = x["g"].detach().clone()
    g[:, 50] = -60.0
    x["g"] = g.requires_grad_()
    dg = gradients(chunk_triadic, x)["dg"]
    assert dg[:, 50].abs().max() < 1e-6 * dg.abs().max()


def test_no_decay_does_not_drift(inputs, relative, tolerance):
    """g = 0 over 4096 tokens, float32 against float64."""
    x = inputs(T=4096, H=1, HV=1, K=16, V=16, E=2, strongest=0.0, states=1, dtype=torch.float32)
    assert x["g"].abs().max() == 0
    with torch.no_grad():
        expected, state = recurrent_triadic(**in_float64(x), output_final_state=True)
        o, ht = chunk_triadic(**x, output_final_state=True)
    assert relative(o, expected) < tolerance[torch.float32]
    assert relative(ht, state) < tolerance[torch.float32]


def test_weak_decay_is_not_rounded_away(inputs, relative, tolerance):
    """exp(-1e-8) is 1 in float32, yet over 4096 tokens of weak decay the state must shrink as it should."""
    x = inputs(T=4096, H=1, HV=1, K=4, V=4, E=1, gate="head", states=1, dtype=torch.float32)
    x["g"] = torch.full_like(x["g"], -1e-8)
    x["v"] = torch.zeros_like(x["v"])
    with torch.no_grad():
        _, ht = chunk_triadic(**x, delta_rule=False, output_final_state=True)
    lost = 1 - (ht.double() / x["initial_state"].double()).mean()
    assert lost.item() == pytest.approx(4096e-8, rel=0.2)
