"""Half-lives and write strengths against closed forms: constant gates, and gates written out token by token."""

import math

import pytest
import torch

from triadic.analysis import half_lives, observe_gates, write_strengths

LN2 = math.log(2)


def make_constant(model, rates, strength_logit):
    """Gates that do not see the token: log decay -rates (same for all heads), beta = sigmoid(strength_logit)."""
    for layer in model.model.layers:
        mixer = layer.mixer
        with torch.no_grad():
            mixer.in_proj_gates.weight.zero_()
            mixer.A_log.zero_()
            # softplus(bias) = rate
            mixer.dt_bias.copy_(torch.log(torch.expm1(torch.tensor(rates).repeat(2))))
            mixer.gates = lambda x, gates=mixer.gates, b=strength_logit: (
                gates(x)[0],
                torch.sigmoid(torch.full((*x.shape[:2], 2), b)),
                gates(x)[2],
            )
    return model


def test_constant_gates_have_the_half_life_ln2_over_g(make_model, tokens):
    rates = [0.5, 3.0, 0.002, 0.04]
    gates = observe_gates(make_constant(make_model(), rates, 0.4), [tokens(2, 30), tokens(1, 17)])
    rows = half_lives(gates)
    medians = [row["value"] for row in rows if row["metric"] == "half_life"]
    assert medians == pytest.approx([LN2 / rate for rate in sorted(rates, reverse=True)], rel=1e-4)
    assert [row["rank"] for row in rows if row["metric"] == "half_life"] == [1, 2, 3, 4]
    assert all(row["quartiles"] == pytest.approx([row["value"]] * 2) for row in rows if "quartiles" in row)
    layers = [(row["layer"], row["rank"]) for row in rows if row["metric"] == "half_life_by_layer"]
    assert layers == [(layer, rank) for layer in (0, 1) for rank in (1, 2, 3, 4)]


def test_constant_strength_fills_one_bin(make_model, tokens):
    rows = write_strengths(observe_gates(make_constant(make_model(), [1.0] * 4, 0.4), [tokens(2, 30)]))
    beta = 1 / (1 + math.exp(-0.4))
    assert rows[0] == {"metric": "beta_mean", "value": pytest.approx(beta)}
    histogram = {row["beta"]: row["value"] for row in rows if row["metric"] == "beta_histogram"}
    full = [center for center, density in histogram.items() if density]
    assert full == [pytest.approx(beta, abs=0.0125)]
    assert histogram[full[0]] == pytest.approx(40.0)  # one bin of width 1/40 holds everything


@pytest.mark.parametrize("gate", ["slice", "head"])
def test_gates_are_those_of_the_layers_inputs(gate, make_model, tokens):
    """The formula written out on hidden states that transformers records."""
    model, ids = make_model(decay_gate=gate), tokens(1, 40)
    mixer = model.model.layers[1].mixer
    slices = 4 if gate == "slice" else 1
    with torch.no_grad():
        before = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states[1]
        u = model.model.layers[1].input_layernorm(before)[0].double()  # [T, D]
        rows = mixer.in_proj_gates.weight.double()
        x = u @ rows[: 2 * slices].T + mixer.dt_bias.double()
        decay = -mixer.A_log.double().exp() * torch.log1p(x.exp())  # [T, HV E]
        beta = torch.sigmoid(u @ rows[2 * slices : 2 * slices + 2].T)
    found = observe_gates(model, [ids[:, :25], ids[:, :40]])  # the first 25 tokens count twice
    mean = (decay.sum(0) + decay[:25].sum(0)) / 65
    expected = (LN2 / -mean).view(2, slices).sort(1).values.median(0).values
    by_layer = [r["value"] for r in half_lives(found) if r["metric"] == "half_life_by_layer" and r["layer"] == 1]
    heads = (LN2 / -mean).view(2, slices).sort(1).values
    assert by_layer == pytest.approx(heads.mean(0).tolist(), rel=1e-4)  # the median of two heads is their mean
    assert len(expected) == slices
    strengths = [r["value"] for r in write_strengths(found) if r["metric"] == "beta_by_layer" and r["layer"] == 1]
    assert strengths == pytest.approx([float((beta.sum() + beta[:25].sum()) / 130)], rel=1e-4)


def test_every_write_of_a_token_counts(make_model, tokens):
    model, ids = make_model(num_householder=2), tokens(1, 20)
    seen, mixer = [], model.model.layers[1].mixer
    mixer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    rows = write_strengths(observe_gates(model, [ids]))
    rows = {row["layer"]: row["value"] for row in rows if row["metric"] == "beta_by_layer"}
    with torch.no_grad():
        write = mixer.in_proj_gates(seen[0])[0, :, -mixer.gate_sizes[1] - mixer.gate_sizes[2] :][
            :, : mixer.gate_sizes[1]
        ]
    assert mixer.gate_sizes[1] == 2 * model.config.linear_num_value_heads
    assert rows[1] == pytest.approx(torch.sigmoid(write).mean().item(), rel=1e-5)


def test_density_integrates_to_one(make_model, tokens):
    rows = write_strengths(observe_gates(make_model(allow_neg_eigval=True), [tokens(2, 64)]))
    histogram = [(row["beta"], row["value"]) for row in rows if row["metric"] == "beta_histogram"]
    width = histogram[1][0] - histogram[0][0]
    assert sum(value for _, value in histogram) * width == pytest.approx(1.0)
    assert histogram[-1][0] == pytest.approx(2.0 - width / 2)


def test_models_without_gates(make_model, tokens):
    bare = observe_gates(make_model(decay_gate="none", write_gate=False), [tokens(1, 8)])
    assert half_lives(bare) == []
    assert write_strengths(bare) == []
    with pytest.raises(ValueError, match="no linear-attention layer"):
        observe_gates(make_model(layer_types=["full_attention"] * 2), [tokens(1, 8)])


def test_no_hook_stays_behind(make_model, tokens):
    model = make_model()
    with pytest.raises(IndexError):
        observe_gates(model, [torch.full((1, 4), 1000)])
    assert not any(layer.mixer._forward_pre_hooks for layer in model.model.layers)
