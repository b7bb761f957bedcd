"""Upcycled models against the function and the weights they come from."""

import pytest
import torch

from triadic.models import layers
from triadic.models.upcycling import upcycle

LINEAR = ("gdn", "sgla", "hybrid")


def logits(model, tokens):
    with torch.no_grad():
        return model.double()(tokens, use_cache=False).logits


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture
def no_norm_eps(monkeypatch):
    """L2 norms without the 1e-6 under the root, which alone keeps an exact start from being exact."""
    monkeypatch.setattr(layers, "L2_NORM_EPS", 0.0)


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("slices", [2, 8])
def test_exact_start_from_one_slice_computes_the_old_function(kind, slices, make_model, tokens, no_norm_eps):
    model = make_model(kind, second_key_dim=1)
    wide = upcycle(model, slices, start="exact")
    assert wide.config.second_key_dim == slices
    x = tokens(2, 150)
    torch.testing.assert_close(logits(wide, x), logits(model, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", LINEAR)
def test_exact_start_from_three_slices_computes_the_old_function(kind, make_model, tokens, no_norm_eps):
    model = make_model(kind, second_key_dim=3)
    x = tokens(2, 150)
    torch.testing.assert_close(
        logits(upcycle(model, 6, start="exact"), x), logits(model, x), rtol=1e-10, atol=1e-10
    )  # fmt: skip


def test_exact_start_differs_by_the_norm_eps_alone(make_model, tokens):
    """softplus(0)^2 E = 3.8 at E=8, so that eps lowers q'k' by 2.6e-7, which the delta rule sees."""
    model = make_model("gdn", second_key_dim=1)
    x = tokens(2, 150)
    assert relative(logits(upcycle(model, 8, start="exact"), x), logits(model, x)) < 3e-6


def test_paper_start_stays_near_the_old_function(make_model, tokens):
    """N(0, 0.02) behind a convolution of U(+-0.5): small second-key logits, hence a small change, but a change."""
    model = make_model("gdn", second_key_dim=1)
    model.config.initializer_range = 0.02  # of the fresh rows
    x = tokens(2, 150)
    change = relative(logits(upcycle(model, 8), x), logits(model, x))
    assert 1e-4 < change < 3e-2


@pytest.mark.parametrize(("slices", "wanted"), [(1, 4), (2, 4)])
@pytest.mark.parametrize("start", ["normal", "exact"])
@pytest.mark.parametrize("kind", ["gdn", "hybrid"])
def test_weights_are_kept_and_gates_copied(kind, start, slices, wanted, make_model):
    model = make_model(kind, second_key_dim=slices)
    wide = upcycle(model, wanted, start=start)
    heads, values, copies = 2, model.config.linear_num_value_heads, wanted // slices
    kept = sum(model.model.layers[0].mixer.qkv_sizes[:3])
    old, new = model.state_dict(), wide.state_dict()
    assert old.keys() == new.keys()
    for name, weight in old.items():
        if name.endswith(("A_log", "dt_bias")):
            grown = new[name].view(values, slices, copies)
            assert torch.equal(grown, weight.view(values, slices, 1).expand_as(grown)), name
        elif name.endswith("in_proj_gates.weight"):
            decays = values * slices
            grown = new[name][: decays * copies].view(values, slices, copies, -1)
            assert torch.equal(grown, weight[:decays].view(values, slices, 1, -1).expand_as(grown)), name
            assert torch.equal(new[name][decays * copies :], weight[decays:]), name
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            assert torch.equal(new[name][:kept], weight[:kept]), name
            assert len(new[name]) == kept + 2 * heads * wanted
            if slices > 1:  # the first copy of each slice is the old one
                grown = new[name][kept:].view(2 * heads * slices, copies, -1)
                assert torch.equal(grown[:, 0], weight[kept:]), name
        else:
            assert torch.equal(new[name], weight), name
    assert model.config.second_key_dim == slices


def test_slices_part_in_training_from_the_normal_start_only(make_model, tokens):
    """Copies that are equal in everything receive equal gradients; the paper's start tells them apart."""

    def gate_gradients(wide):
        x = tokens(2, 40)
        wide.train()(x, labels=x).loss.backward()
        return wide.model.layers[0].mixer.A_log.grad.view(2, 2, 2)  # [HV, slices, copies]

    model = make_model("gdn", second_key_dim=2)
    same, parted = (gate_gradients(upcycle(model, 4, start=start)) for start in ("exact", "normal"))
    torch.testing.assert_close(same[..., 0], same[..., 1], rtol=1e-4, atol=1e-7)
    assert (parted[..., 0] - parted[..., 1]).abs().min() > 1e-2 * parted.abs().max()


def test_upcycled_model_learns_and_its_slices_part(make_model, tokens):
    wide = upcycle(make_model("gdn", second_key_dim=1), 4, start="exact").train()
    x = tokens(4, 64)
    optimizer = torch.optim.AdamW(wide.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = wide(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    gates = wide.model.layers[0].mixer.A_log.detach().view(2, 4)
    assert (gates.max(1).values - gates.min(1).values > 5e-4).all()


def test_the_global_generator_is_left_alone_and_the_seed_counts(make_model):
    model = make_model("gdn", second_key_dim=1)
    before = torch.get_rng_state()
    first, again, other = (upcycle(model, 2, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.layers.0.mixer.in_proj_qkv.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_bf16_weights_keep_their_dtypes(make_model):
    model = make_model("gdn", second_key_dim=1).to(torch.bfloat16)
    for layer in model.model.layers:  # as transformers loads it
        layer.mixer.A_log.data = layer.mixer.A_log.data.float()
    wide = upcycle(model, 2)
    assert {n: p.dtype for n, p in wide.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "changes", "arguments", "message"),
    [
        (
            "gdn",
            {"second_key_dim": 3},
            {"second_key_dim": 4},
            "second_key_dim 4 is no larger multiple of the model's 3",
        ),
        ("gdn", {"second_key_dim": 2}, {"second_key_dim": 2}, "give 4, 6, or so on"),
        ("transformer", {"second_key_dim": 1}, {"second_key_dim": 2}, "no linear-attention layer"),
        ("gdn", {"second_key_dim": 8, "tie_second_key": True}, {"second_key_dim": 16}, "tie_second_key"),
        ("gdn", {"second_key_dim": 1, "linear_qk_norm": False}, {"second_key_dim": 2}, "linear_qk_norm"),
        ("gdn", {"second_key_dim": 1}, {"second_key_dim": 2, "start": "zero"}, "'normal', 'exact'"),
        (
            "gdn",
            {"second_key_dim": 1, "second_key_activation": "silu"},
            {"second_key_dim": 2, "start": "exact"},
            "positive at zero",
        ),
    ],
)
def test_what_cannot_be_widened_is_refused(kind, changes, arguments, message, make_model):
    with pytest.raises(ValueError, match=message):
        upcycle(make_model(kind, **changes), **arguments)
