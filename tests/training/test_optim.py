import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from triadic.models import TriadicForCausalLM
from triadic.training.optim import build_optimizer, decayed, learning_rate, parameter_groups, set_learning_rate


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 3e-7),  # 1/1000 of the peak
        (499, 1.5e-4),
        (999, 3e-4),  # the peak, at the 1000th step
        (19549, 1.65e-4),  # half-way between the 1000th and the 38,100th: mean of peak and floor
        (38099, 3e-5),
        (50000, 3e-5),
    ],
)
def test_the_papers_schedule(configure, step, rate):
    overrides = ("optimizer.learning_rate=3e-4", "schedule.warmup_steps=1000", "run.steps=38100")
    assert math.isclose(learning_rate(step, configure(*overrides)), rate, rel_tol=1e-12)


def test_the_schedule_without_warm_up_and_with_a_length_of_its_own(configure):
    config = configure("schedule.warmup_steps=0", "schedule.decay_steps=4", "optimizer.learning_rate=1.0")
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * n / 4)) for n in (1, 2, 3, 4)] + [0.1, 0.1]
    assert [learning_rate(step, config) for step in range(6)] == pytest.approx(expected, rel=1e-12)


MLP = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
LINEAR = ["in_proj_qkv.weight", "conv1d.weight", "in_proj_gates.weight", "g_proj.weight", "o_proj.weight"]
SOFTMAX = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
DECAYED = {"linear": [f"mixer.{name}" for name in LINEAR] + MLP, "softmax": [f"mixer.{name}" for name in SOFTMAX] + MLP}
PLAIN = {
    "linear": [f"mixer.{name}" for name in ("A_log", "dt_bias", "g_proj.bias", "o_norm.weight")] + NORMS,
    "softmax": [f"mixer.{name}" for name in ("q_norm.weight", "k_norm.weight")] + NORMS,
}


@pytest.mark.parametrize(("file", "layers"), [("gdn.json", ["linear"] * 2), ("hybrid.json", ["linear", "softmax"])])
def test_weight_decay_groups_are_these_names(world, file, layers):
    model = TriadicForCausalLM(AutoConfig.from_pretrained(world / file))
    named = dict(model.named_parameters())
    expected = {0.1: ["model.embed_tokens.weight", "lm_head.weight"], 0.0: ["model.norm.weight"]}
    for i, kind in enumerate(layers):
        expected[0.1] += [f"model.layers.{i}.{name}" for name in DECAYED[kind]]
        expected[0.0] += [f"model.layers.{i}.{name}" for name in PLAIN[kind]]
    groups = parameter_groups(model, weight_decay=0.1)
    assert {group["weight_decay"]: sorted(group["names"]) for group in groups} == {
        decay: sorted(names) for decay, names in expected.items()
    }
    for group in groups:
        assert all(named[name] is tensor for name, tensor in zip(group["names"], group["params"], strict=True))


def test_a_zero3_parameter_decays_by_its_true_shape():
    flat = nn.Parameter(torch.zeros(6))
    assert not decayed(flat)
    flat.ds_shape = torch.Size([2, 3])
    assert decayed(flat)


def test_adamw_is_the_papers(configure):
    """One step by hand: betas 0.9, 0.95, eps 1e-10, decoupled decay of the matrix only."""
    config = configure("optimizer.learning_rate=0.5", "optimizer.weight_decay=0.1")
    layer = nn.Linear(2, 1)
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = build_optimizer(layer, config.optimizer)
    set_learning_rate(optimizer, 0.25)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, -2e-10]]), torch.tensor([1.0])
    optimizer.step()
    # at the first step both bias-corrected moments are the gradient and its square: update = g / (|g| + eps)
    direction = torch.tensor([[3.0 / (3.0 + 1e-10), -2.0 / 3.0]])
    torch.testing.assert_close(layer.weight.detach(), before[0] * (1 - 0.25 * 0.1) - 0.25 * direction)
    torch.testing.assert_close(layer.bias.detach(), before[1] - 0.25)
