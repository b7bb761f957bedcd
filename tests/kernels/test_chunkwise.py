"""The chunkwise form and its closed-form backward against autograd of the token recurrence, in float64."""

import pytest
import torch
from triadic_kernels import chunk_triadic, recurrent_triadic

GATES = ["slice", "head", None]
PACKED = [0, 1, 3, 3, 36, 36, 101, 165, 166]  # documents of 1, 2, 0, 33, 0, 65, 64 and 1 tokens


def both(inputs, gradients, **options):
    return gradients(chunk_triadic, inputs, **options), gradients(recurrent_triadic, inputs, **options)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("E", [1, 2, 3, 8])
def test_equals_token_recurrence(E, gate, T, inputs, gradients, close, tolerance):
    x = inputs(B=2, T=T, H=1, HV=2, K=5, V=7, E=E, gate=gate, strongest=50.0, states=2)
    close(*both(x, gradients), tolerance[torch.float64])


@pytest.mark.parametrize("T", [1, 65, 130])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("E", [None, 1, 3])
def test_without_delta_rule(E, gate, T, inputs, gradients, close, tolerance):
    x = inputs(B=2, T=T, H=2, HV=4, K=7, V=5, E=E, gate=gate, strongest=50.0, states=2)
    close(*both(x, gradients, delta_rule=False), tolerance[torch.float64])


@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("E", [1, 2, 3, 8])
def test_packed(E, delta_rule, inputs, gradients, close, tolerance):
    x = inputs(T=PACKED[-1], H=1, HV=2, K=5, V=7, E=E, strongest=50.0, states=len(PACKED) - 1)
    cu_seqlens = torch.tensor(PACKED, dtype=torch.int32)
    close(*both(x, gradients, delta_rule=delta_rule, cu_seqlens=cu_seqlens, scale=1.3), tolerance[torch.float64])


@pytest.mark.parametrize("delta_rule", [True, False])
def test_documents_longer_than_what_is_kept_at_once(delta_rule, inputs, gradients, close, tolerance):
    """The backward computes most states again, starting from some that were kept."""
    x = inputs(T=1410, H=1, HV=2, K=5, V=7, E=2, strongest=50.0, states=3)
    cu_seqlens = torch.tensor([0, 100, 700, 1410])
    close(*both(x, gradients, delta_rule=delta_rule, cu_seqlens=cu_seqlens), tolerance[torch.float64])


@pytest.mark.parametrize("beta", [True, False])
def test_without_initial_state(beta, inputs, gradients, close, tolerance):
    x = inputs(B=3, T=70, beta=beta)
    close(*both(x, gradients), tolerance[torch.float64])


def test_negative_eigenvalues(inputs, gradients, close, tolerance):
    """beta up to 2 and keys used more than once: the triangular systems are far from the identity."""
    x = inputs(T=130, K=3, E=2, strongest=0.01)
    x["beta"] = (2 * x["beta"]).detach().requires_grad_()
    close(*both(x, gradients), tolerance[torch.float64])


@pytest.mark.parametrize("wanted", ["o", "ht"])
def test_only_one_output_is_used(wanted, inputs, relative, tolerance):
    x = inputs(B=2, T=40, states=2)

    def gradient(op):
        outputs = dict(zip(("o", "ht"), op(**x, output_final_state=True), strict=True))
        return torch.autograd.grad(outputs[wanted].square().sum(), [x["k"], x["g"], x["initial_state"]])

    for result, expected in zip(gradient(chunk_triadic), gradient(recurrent_triadic), strict=True):
        assert relative(result, expected) < tolerance[torch.float64]


def test_only_the_initial_state_needs_a_gradient(inputs, relative, tolerance):
    x = {name: y.detach() for name, y in inputs(T=70, states=1).items()}
    results = []
    for op in (chunk_triadic, recurrent_triadic):
        state = x["initial_state"].clone().requires_grad_()
        op(**{**x, "initial_state": state})[0].square().sum().backward()
        results.append(state.grad)
    assert relative(*results) < tolerance[torch.float64]


def test_no_gradient_means_nothing_is_kept(inputs, relative, tolerance):
    x = inputs(T=70, states=1)
    o, ht = chunk_triadic(**x, output_final_state=True)
    with torch.no_grad():
        plain, state = chunk_triadic(**x, output_final_state=True)
    assert plain.grad_fn is None
    assert state.grad_fn is None
    assert torch.equal(o, plain)
    assert torch.equal(ht, state)
    assert chunk_triadic(**x)[1] is None
