"""Several writes a token against Gated DeltaProduct's own form: products of Householder matrices in float64.

Caching, padding, packing and saving are tested with the other kinds (conftest.py).
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from triadic.models import TriadicConfig, count_parameters, flops_per_token, state_bytes
from triadic.models.layout import Layout
from triadic.models.upcycling import upcycle

CONFIGS = Path(__file__).parents[2] / "configs" / "model"


def unit(x):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def by_products(c, w, u):
    """One sequence u [T, D] through the layer with weights w: S <- prod_j (I - b_j kk_j kk_j^T) diag(alpha) S + writes,
    where S [E K, V] is a head's whole state and kk = k' (x) k.
    """
    H, HV, K, V, E, n = (
        c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim,
        c.second_key_dim, c.num_householder,
    )  # fmt: skip
    x = u @ w["in_proj_qkv.weight"].T
    taps = w["conv1d.weight"]  # [channels, W]
    past = F.pad(x, (0, 0, taps.shape[1] - 1, 0))
    x = sum(past[i : i + len(x)] * taps[:, i] for i in range(taps.shape[1]))
    second = H * E if E > 1 else 0
    q, k, v, q2, k2 = x.split([H * K, n * H * K, n * HV * V, second, n * second], dim=-1)
    q, k = unit(F.silu(q).view(-1, H, K)), unit(F.silu(k).view(-1, H, n, K))
    v = F.silu(v).view(-1, HV, n, V)
    q2, k2 = (unit(F.softplus(t)) for t in (q2.reshape(-1, H, E), k2.reshape(-1, H, n, E))) if second else (None, None)
    a, b, low = (u @ w["in_proj_gates.weight"].T).split([HV * E, n * HV, c.output_gate_rank], dim=-1)
    alpha = torch.exp(-w["A_log"].exp() * F.softplus(a + w["dt_bias"])).view(-1, HV, E)
    beta = (torch.sigmoid(b) * (2 if c.allow_neg_eigval else 1)).view(-1, HV, n)
    outputs = u.new_zeros(len(u), HV, V)
    for h in range(HV):
        key_head, state = h // (HV // H), u.new_zeros(E * K, V)
        for t in range(len(u)):
            transition, written = torch.diag(alpha[t, h].repeat_interleave(K)), u.new_zeros(E * K, V)
            for j in range(n):
                kk = k[t, key_head, j]
                kk = torch.kron(k2[t, key_head, j], kk) if second else kk
                erase = torch.eye(E * K, dtype=u.dtype) - beta[t, h, j] * torch.outer(kk, kk)
                transition = erase @ transition
                written = erase @ written + beta[t, h, j] * torch.outer(kk, v[t, h, j])
            state = transition @ state + written
            qq = torch.kron(q2[t, key_head], q[t, key_head]) if second else q[t, key_head]
            outputs[t, h] = qq @ state * K**-0.5
    o = outputs / torch.sqrt(outputs.square().mean(-1, keepdim=True) + c.rms_norm_eps) * w["o_norm.weight"]
    gate = torch.sigmoid(low @ w["g_proj.weight"].T + w["g_proj.bias"])
    return (o.flatten(1) * gate) @ w["o_proj.weight"].T


CASES = [
    {"num_householder": 2, "allow_neg_eigval": True},
    {"num_householder": 3, "linear_num_value_heads": 4},
    {"num_householder": 2, "second_key_dim": 1, "allow_neg_eigval": True},
]


@pytest.mark.parametrize("changes", CASES, ids=["E=3", "three writes, grouped values", "E=1"])
def test_the_layer_is_a_product_of_householder_matrices(changes, make_model):
    model = make_model("gdn", **changes).double()
    mixer = model.model.layers[0].mixer
    u = torch.randn(70, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = by_products(model.config, dict(mixer.named_parameters()), u)
    with torch.no_grad():
        actual, _ = mixer(u[None], Layout())
    torch.testing.assert_close(actual[0], expected, rtol=1e-9, atol=1e-9)


def test_two_writes_cost_twice_the_recurrence_and_no_state(make_model):
    model = make_model("gdn", num_householder=2, allow_neg_eigval=True)
    single = make_model("gdn", num_householder=1, allow_neg_eigval=True)
    for made, writes in ((model, 2), (single, 1)):
        assert made.model.layers[0].mixer.gates(torch.randn(1, 3, 32))[1].numel() == 3 * 2 * writes
    assert count_parameters(model.config)[0] > count_parameters(single.config)[0]
    assert state_bytes(model.config, 100) == state_bytes(single.config, 100)
    linear = flops_per_token(model.config, 64) - 6 * count_parameters(model.config)[1]
    assert linear == 2 * (flops_per_token(single.config, 64) - 6 * count_parameters(single.config)[1])


def test_upcycled_exactly_and_learns(make_model, tokens):
    model, x = make_model("gdn", num_householder=2, second_key_dim=1), tokens(2, 64)
    wide = upcycle(model, 4, start="exact")
    with torch.no_grad():
        torch.testing.assert_close(wide(x).logits, model(x).logits, rtol=1e-3, atol=1e-3)
    wide = upcycle(model, 4).train()
    optimizer, losses = torch.optim.AdamW(wide.parameters(), lr=3e-3), []
    for _ in range(12):
        losses.append(wide(x, labels=x).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3


def test_the_preset_has_the_size_of_its_neighbours():
    config = TriadicConfig.from_pretrained(CONFIGS / "triadic_deltaproduct_400m_e8.json")
    assert (config.num_householder, config.allow_neg_eigval) == (2, True)
    assert round(count_parameters(config)[0] / 1e6, 1) == 385.8  # triadic_gdn_400m_e8: 385.4
    assert round(state_bytes(config, 1024) / 1e6, 1) == 50.3


def test_without_the_delta_rule_it_is_refused(make_config):
    with pytest.raises(ValueError, match="num_householder is 2, but linear_mixer is 'sgla'"):
        make_config("sgla", num_householder=2)
    with pytest.raises(ValueError, match="num_householder is 0 but must be at least 1"):
        make_config("gdn", num_householder=0)
