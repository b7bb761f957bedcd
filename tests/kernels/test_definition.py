"""The token recurrence against its definition written out again, other known forms, and finite differences."""

import pytest
import torch
from triadic_kernels import chunk_triadic, recurrent_triadic

BOTH = pytest.mark.parametrize("op", [recurrent_triadic, chunk_triadic])


def written_out(q, k, v, q2, k2, g, beta, S, delta_rule, scale):
    """One head of one sequence, slice by slice: q, k [T, K], v [T, V], q2, k2, g [T, E], beta [T], S: E matrices."""
    S, o = list(S), []
    for t in range(len(q)):
        S = [g[t, e].exp() * S[e] for e in range(len(S))]
        r = v[t]
        if delta_rule:
            r = r - sum(k2[t, e] * S[e].T @ k[t] for e in range(len(S)))
        S = [S[e] + beta[t] * k2[t, e] * torch.outer(k[t], r) for e in range(len(S))]
        o.append(scale * sum(q2[t, e] * S[e].T @ q[t] for e in range(len(S))))
    return torch.stack(o), torch.stack(S)


@BOTH
@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("gate", ["slice", "head"])
def test_equals_the_definition_written_out(op, delta_rule, gate, inputs, close, tolerance):
    x = inputs(B=2, T=9, H=2, HV=6, E=3, gate=gate, states=2)
    o, ht = op(**x, delta_rule=delta_rule, scale=0.7, output_final_state=True)
    g = x["g"] if gate == "slice" else x["g"][..., None].expand(2, 9, 6, 3)
    for b in range(2):
        for hv in range(6):
            h = hv // 3
            rows = [x[name][b, :, h] for name in ("q", "k")] + [x["v"][b, :, hv], x["q2"][b, :, h], x["k2"][b, :, h]]
            expected, state = written_out(
                *rows, g[b, :, hv], x["beta"][b, :, hv], x["initial_state"][b, hv], delta_rule, 0.7
            )
            results, reference = {"o": o[b, :, hv], "ht": ht[b, hv]}, {"o": expected, "ht": state}
            close(results, reference, tolerance[torch.float64])


@BOTH
def test_one_slice_is_the_gated_delta_rule(op, inputs, close, tolerance):
    """S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t / sqrt(K), S of [V, K]."""
    x = inputs(T=70, H=1, HV=1, E=None, gate="head", states=1)
    o, ht = op(**x, output_final_state=True)
    q, k, v, g, beta = (x[name][0, :, 0] for name in ("q", "k", "v", "g", "beta"))
    S, expected = x["initial_state"][0, 0, 0].T, []
    for t in range(70):
        S = g[t].exp() * S @ (torch.eye(5).double() - beta[t] * torch.outer(k[t], k[t])) + beta[t] * torch.outer(
            v[t], k[t]
        )
        expected.append(S @ q[t] / 5**0.5)
    close({"o": o[0, :, 0], "ht": ht[0, 0, 0]}, {"o": torch.stack(expected), "ht": S.T}, tolerance[torch.float64])


@BOTH
def test_without_delta_rule_is_masked_attention(op, inputs, close, tolerance):
    """o = (Q K^T * sum_e q2_e k2_e^T * exp(gc_e - gc_e^T), lower triangle) diag(beta) V."""
    x = inputs(T=70, H=1, HV=1, E=3, strongest=1.0)
    o, _ = op(**x, delta_rule=False, scale=1.0)
    q, k, v, q2, k2, g, beta = (x[name][0, :, 0] for name in ("q", "k", "v", "q2", "k2", "g", "beta"))
    gc = g.cumsum(0)
    weights = torch.einsum("re,se,rse->rs", q2, k2, (gc[:, None] - gc).exp())
    expected = (q @ k.T * weights).tril() @ (beta[:, None] * v)
    close({"o": o[0, :, 0]}, {"o": expected}, tolerance[torch.float64])


@BOTH
def test_slices_with_one_gate_are_one_joint_key(op, inputs, close, tolerance):
    """With a decay per head, E slices of [K, V] are one slice with keys k2 (x) k of size E K."""
    x = inputs(B=2, T=40, H=2, HV=4, K=5, E=3, gate="head", states=2)
    joint = {**x, "q2": None, "k2": None, "initial_state": x["initial_state"].view(2, 4, 1, 15, 7)}
    joint["q"] = torch.einsum("bthe,bthk->bthek", x["q2"], x["q"]).flatten(3)
    joint["k"] = torch.einsum("bthe,bthk->bthek", x["k2"], x["k"]).flatten(3)
    o, ht = op(**x, scale=0.5, output_final_state=True)
    expected, state = op(**joint, scale=0.5, output_final_state=True)
    close({"o": o, "ht": ht}, {"o": expected, "ht": state.view(ht.shape)}, tolerance[torch.float64])


@BOTH
def test_what_is_left_out_equals_what_it_stands_for(op, inputs, gradients, close, tolerance):
    x = inputs(B=2, T=40, H=2, HV=2, E=None, gate=None, beta=False)
    spelt_out = {
        **x,
        "q2": torch.ones(2, 40, 2, 1).double(),
        "k2": torch.ones(2, 40, 2, 1).double(),
        "g": torch.zeros(2, 40, 2, 1).double(),
        "beta": torch.ones(2, 40, 2).double(),
        "initial_state": torch.zeros(2, 2, 1, 5, 7).double(),
    }
    spelt_out = {name: y.requires_grad_() for name, y in spelt_out.items()}
    expected = gradients(op, spelt_out, scale=5**-0.5)
    results = gradients(op, x)
    close(results, {name: expected[name] for name in results}, tolerance[torch.float64])


@BOTH
def test_l2norm_inside_equals_outside(op, inputs, gradients, close, tolerance):
    x = inputs(T=40)
    x["q"], x["k"] = ((3 * x[name]).detach().requires_grad_() for name in ("q", "k"))

    def outside(q, k, **rest):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        return op(q=q, k=k, **rest)

    close(gradients(op, x, use_qk_l2norm_in_kernel=True), gradients(outside, x), tolerance[torch.float64])


@pytest.mark.parametrize("delta_rule", [True, False])
def test_token_recurrence_passes_gradcheck_twice(delta_rule, inputs):
    x = inputs(T=3, H=1, HV=2, K=2, V=3, E=2, states=1)

    def flat(*tensors):
        arguments = dict(zip(x, tensors, strict=True))
        return recurrent_triadic(**arguments, delta_rule=delta_rule, output_final_state=True)

    assert torch.autograd.gradcheck(flat, tuple(x.values()))
    assert torch.autograd.gradgradcheck(flat, tuple(x.values()))


def test_second_derivative_of_the_chunkwise_form_is_refused(inputs):
    x = inputs(T=3)
    o, _ = chunk_triadic(**x)
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; recurrent_triadic"):
        dq.sum().backward()
