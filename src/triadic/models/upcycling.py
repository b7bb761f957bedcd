"""Upcycling: a trained model with E slices becomes one with more, keeping every weight (paper, section on upcycling).

From E = 1, each linear-attention layer copies its decay gate (projection row, A, bias) to every slice and gets second
projections. start="normal", the paper's: they begin as in a new model, so the function changes a little and slices
differ from the first step. start="exact": they begin at zero behind a fresh convolution, so that q' = k' = 1 / sqrt(E)
in every slice and sum_e q'_e k'_e = 1: the old function, to the 1e-6 in the L2 norm's root.

From E > 1 to r E, each slice becomes r copies of itself, gate and second projections alike; the norm divides q' and k'
by sqrt(r), which is the old function again. "exact" stops there, and then copies receive equal gradients and never
part; "normal" adds N(0, initializer_range) to the second projections of all copies but the first.
"""

import copy
import dataclasses
from typing import Literal

import torch
from transformers import PreTrainedModel

from .mixers import ACTIVATIONS, TriadicLinearAttention

Start = Literal["normal", "exact"]
STARTS = ("normal", "exact")


@dataclasses.dataclass(frozen=True)
class Widening:
    """How one layer's rows grow: `copies` of each slice's gate, and of each second projection if there were any."""

    copies: int
    gates: bool
    second: bool
    start: Start
    noise: float


@torch.no_grad()
def upcycle(model: PreTrainedModel, second_key_dim: int, *, start: Start = "normal", seed: int = 0) -> PreTrainedModel:
    """A new model with `second_key_dim` slices that begins as `model` (left unchanged): same class, dtype; on the CPU.

    Args:
        second_key_dim: a multiple of the model's, larger than it.
        start: "normal" (the paper's) or "exact", see the top of this file.
        seed: of the new weights; the global generator is left alone.

    Raises:
        ValueError: an E that is no larger multiple, a model without linear-attention layers, with tied second keys or
            without L2 norm, or, for the exact start from E = 1, an activation that is not positive at zero.
    """
    mixers = {name: module for name, module in model.named_modules() if isinstance(module, TriadicLinearAttention)}
    settings = next((mixer.config for mixer in mixers.values()), model.config)  # the model's own, or those in place
    for message in _obstacles(settings, second_key_dim, start):
        raise ValueError(message)
    config = copy.deepcopy(model.config)
    config.second_key_dim = second_key_dim
    plan = Widening(
        copies=second_key_dim // settings.second_key_dim,
        gates=settings.decay_gate == "slice",
        second=settings.has_second_projections,
        start=start,
        noise=settings.initializer_range,
    )
    rules = {f"{name}.{row}": (mixer, rule) for name, mixer in mixers.items() for row, rule in RULES.items()}
    old = model.state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide = type(model)(config)  # its fresh weights stay where nothing replaces them
        for name, parameter in wide.named_parameters():
            parameter.data = parameter.data.to(old[name].dtype)
        for name, new in wide.state_dict().items():  # shares memory with the parameters
            mixer, rule = rules.get(name, (None, _keep))
            rule(mixer, old[name].cpu(), new, plan)
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.train(model.training)


def _obstacles(config, second_key_dim, start):
    """Yield a sentence for everything that forbids this widening."""
    if start not in STARTS:
        yield f"start is {start!r} but must be one of {', '.join(map(repr, STARTS))}."
    if "linear_attention" not in config.layer_types:
        yield "the model has no linear-attention layer, so it has no state to enlarge."
    if config.tie_second_key:
        yield "the model ties its second key to the first (tie_second_key), so E cannot grow without the key."
    if not config.linear_qk_norm:
        yield "the model has no L2 norm on keys (linear_qk_norm), without which copies of a slice change the function."
    if second_key_dim <= config.second_key_dim or second_key_dim % config.second_key_dim:
        yield (
            f"second_key_dim {second_key_dim} is no larger multiple of the model's {config.second_key_dim}: "
            f"give {2 * config.second_key_dim}, {3 * config.second_key_dim}, or so on."
        )
    at_zero = ACTIVATIONS[config.second_key_activation](torch.zeros(()))
    if start == "exact" and config.second_key_dim == 1 and at_zero <= 0:
        yield (
            f"the exact start needs a second_key_activation that is positive at zero (softplus, sigmoid), not "
            f"{config.second_key_activation!r}."
        )


def _keep(mixer, old, new, plan):
    new.copy_(old)


def _widen_keys(mixer, old, new, plan):
    """Rows of in_proj_qkv: q, k, v stay; second projections are fresh, zero, or copied with noise."""
    _widen_second(mixer, old, new, plan)
    if plan.second and plan.start == "normal":
        rows = new[sum(mixer.qkv_sizes[:3]) :].view(-1, plan.copies, new.shape[1])  # [2 H E, r, D]
        rows[:, 1:] += torch.randn_like(rows[:, 1:]) * plan.noise
    elif not plan.second and plan.start == "exact":
        new[sum(mixer.qkv_sizes[:3]) :] = 0


def _widen_second(mixer, old, new, plan):
    """Rows of q, k, v stay; those of q' and k', if there are any, are copied, else what `new` holds remains."""
    kept = sum(mixer.qkv_sizes[:3])
    new[:kept] = old[:kept]
    if plan.second:
        new[kept:] = old[kept:].repeat_interleave(plan.copies, dim=0)


def _widen_gates(mixer, old, new, plan):
    """Rows of in_proj_gates: decay of each slice copied, the rest as it is."""
    decays = mixer.gate_sizes[0]
    new[: len(new) - len(old) + decays] = _copies(old[:decays], plan)
    new[len(new) - len(old) + decays :] = old[decays:]


def _widen_decay(mixer, old, new, plan):
    new.copy_(_copies(old, plan))


def _copies(gates, plan):
    """Gates in the order [HV, E], each repeated for its slice's copies (a gate for each head stays single)."""
    return gates.repeat_interleave(plan.copies if plan.gates else 1, dim=0)


RULES = {  # of a mixer's parameters; every other weight of the model is copied
    "in_proj_qkv.weight": _widen_keys,
    "conv1d.weight": _widen_second,
    "in_proj_gates.weight": _widen_gates,
    "A_log": _widen_decay,
    "dt_bias": _widen_decay,
}


__all__ = ["STARTS", "Widening", "upcycle"]
