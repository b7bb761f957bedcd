"""Initial weights as the paper gives them, per tensor, in any dtype."""

import math

import pytest
import torch
from torch import nn
from transformers import initialization as init

from triadic.models import TriadicConfig, TriadicForCausalLM
from triadic.models.mixers import MIXERS, TriadicAttention


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = TriadicConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        second_key_dim=8,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        pad_token_id=0,
    )
    return TriadicForCausalLM(config)


def test_every_tensor(model):
    seen = set()
    for name, parameter in model.named_parameters():
        values, last = parameter.detach().double(), name.split(".")[-2]
        if "norm" in last:
            assert torch.equal(values, torch.ones_like(values)), name
            seen.add("norm")
        elif name.endswith("bias") and "dt_bias" not in name:
            assert not values.any(), name
            seen.add("bias")
        elif last == "conv1d":
            assert values.abs().max() <= 0.5
            assert values.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.05)  # of U(-1/2, 1/2)
            seen.add("conv")
        elif parameter.ndim == 2:
            assert values.mean().abs() < 4 * 0.02 / math.sqrt(values.numel()), name
            assert values.std().item() == pytest.approx(0.02, rel=4 / math.sqrt(2 * values.numel())), name
            seen.add("matrix")
        else:
            seen.add(name.split(".")[-1])
    assert seen == {"norm", "bias", "conv", "matrix", "A_log", "dt_bias"}
    assert model.model.embed_tokens.weight[0].any()  # the padding row is drawn like the others


def test_a_new_mixer_draws_its_own_parameters(monkeypatch, make_config):
    """Nothing else would: they are torch.empty until then."""

    class Scaled(TriadicAttention):
        def __init__(self, config, layer_idx):
            super().__init__(config, layer_idx)
            self.scale = nn.Parameter(torch.empty(5))

        def reset_parameters(self):
            init.constant_(self.scale, 0.75)

    monkeypatch.setitem(MIXERS, "full_attention", Scaled)
    for layer in TriadicForCausalLM(make_config("transformer")).model.layers:
        assert layer.mixer.scale.tolist() == [0.75] * 5


def kolmogorov(values, cdf):
    """Largest distance between the empirical and the given distribution."""
    values = values.sort().values
    expected = cdf(values)
    steps = torch.arange(1, len(values) + 1) / len(values)
    return torch.maximum((steps - expected).abs(), (steps - 1 / len(values) - expected).abs()).max()


def test_decay_ranges(model):
    mixers = [layer.mixer for layer in model.model.layers[:3]]
    assert all(mixer.A_log.shape == mixer.dt_bias.shape == (16 * 8,) for mixer in mixers)
    rates = torch.cat([mixer.A_log.detach() for mixer in mixers]).exp()
    dt = torch.nn.functional.softplus(torch.cat([mixer.dt_bias.detach() for mixer in mixers]).double())
    limit = 1.95 / math.sqrt(len(rates))  # passed by chance in all but 0.1 % of seeds
    assert kolmogorov(rates, lambda x: x / 16) < limit
    assert kolmogorov(dt, lambda x: (x.log() - math.log(1e-3)) / math.log(100)) < limit
    assert rates.max() <= 16
    assert dt.min() > 0.999e-3
    assert dt.max() < 0.1001


def test_finite_under_bfloat16_for_many_seeds(make_config):
    config = make_config(second_key_dim=16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for seed in range(100):
            torch.manual_seed(seed)
            model = TriadicForCausalLM(config)
            assert model.lm_head.weight.dtype == torch.bfloat16
            for layer in model.model.layers:
                for parameter in (layer.mixer.A_log, layer.mixer.dt_bias):
                    assert parameter.dtype == torch.float32
                    assert parameter.isfinite().all()
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize(("draw", "rate", "dt"), [(0.0, 16.0, 1e-3), (0.5, 8.0, 1e-2), (1 - 2**-24, 2**-20, 1e-1)])
def test_ends_of_the_ranges(make_config, monkeypatch, draw, rate, dt):
    """No draw leaves a dead head (the logarithm of an exact 0), and softplus of the bias is the step itself."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **kwargs: torch.full(shape, draw, **kwargs))
    for layer in TriadicForCausalLM(make_config()).model.layers:
        torch.testing.assert_close(layer.mixer.A_log.exp(), torch.full((6,), rate))
        torch.testing.assert_close(torch.nn.functional.softplus(layer.mixer.dt_bias), torch.full((6,), dt))


def test_seed_decides(make_config):
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in TriadicForCausalLM(make_config()).parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
