"""AdamW and its learning rate, as in the paper: matrices decay, vectors do not; warm-up, cosine to a fraction."""

import math

import torch
from torch import nn

from triadic.training.config import OptimizerSettings, TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of optimizer step `step`, counted from 0; a pure function, so that resuming needs no state.

    The n-th step (n = step + 1) has peak * n / warmup_steps up to n = warmup_steps, then half a cosine that reaches
    peak * min_lr_fraction at n = decay_steps and stays there.
    """
    n, warmup, end = step + 1, config.schedule.warmup_steps, config.decay_steps
    peak, floor = config.optimizer.learning_rate, config.schedule.min_lr_fraction
    if n < warmup:
        return peak * n / warmup
    if n >= end:
        return peak * floor
    progress = (n - warmup) / (end - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def decayed(parameter: nn.Parameter) -> bool:
    """Tensors of two or more dimensions decay. Under ZeRO-3 a parameter looks flat; `ds_shape` is its true shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for the optimizer, with `names` beside `params`: first the decayed tensors, then the others."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = []
    for decays in (True, False):
        members = [(name, parameter) for name, parameter in named if decayed(parameter) == decays]
        groups.append(
            {
                "names": [name for name, _ in members],
                "params": [parameter for _, parameter in members],
                "weight_decay": weight_decay if decays else 0.0,
            }
        )
    return groups


def build_optimizer(model: nn.Module, options: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW over `parameter_groups`; the loop sets the learning rate of every step."""
    return torch.optim.AdamW(
        parameter_groups(model, options.weight_decay),
        lr=options.learning_rate,
        betas=tuple(options.betas),
        eps=options.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
