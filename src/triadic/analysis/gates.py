"""Forget and write gates over a text: how fast each slice fades, how strongly a token writes.

The half-life of a slice is ln 2 / mean(-g), with g its log decay at each token: over many tokens the state fades by
exp(sum of g), so this is the number of tokens after which half is left. The slices of a head are ranked, fastest first,
and a rank's figure is the median over all heads of all layers (paper, Figure 5).
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triadic.models.mixers import TriadicLinearAttention

BINS = 40  # of the distribution of beta


@dataclasses.dataclass
class LayerGates:
    """Sums over the tokens seen by one linear-attention layer."""

    layer: int
    tokens: int = 0
    decay: Tensor | None = None  # [HV, E] summed log decays, float64; None: the layer has no decay gate
    strength: Tensor | None = None  # summed beta; None: no write gate, every write has strength 1
    histogram: Tensor | None = None  # [BINS] counts of beta over [0, top]
    top: float = 1.0

    def add(self, mixer: TriadicLinearAttention, hidden_states: Tensor) -> None:
        """Count the gates of hidden states [B, T, D], what the mixer reads."""
        decay, beta, _ = mixer.gates(hidden_states)  # [B, T, HV, E] or [B, T, HV]; [B, T, HV] or [B, T, HV, n]
        self.tokens += hidden_states.shape[0] * hidden_states.shape[1]
        if decay is not None:
            total = decay.double().sum((0, 1)).cpu()  # [HV, E] or [HV]
            total = total[:, None] if total.ndim == 1 else total
            self.decay = total if self.decay is None else self.decay + total
        if beta is not None:
            self.top = 2.0 if mixer.config.allow_neg_eigval else 1.0
            counts = torch.histc(beta.float(), BINS, 0.0, self.top).double().cpu()
            total = beta.double().flatten(2).mean(-1).sum().cpu()
            self.strength = total if self.strength is None else self.strength + total
            self.histogram = counts if self.histogram is None else self.histogram + counts


def linear_mixers(model: PreTrainedModel) -> dict[int, TriadicLinearAttention]:
    """The linear-attention layers of this package in a model, its own or in the place of others, by layer."""
    return {m.layer_idx: m for m in model.base_model.modules() if isinstance(m, TriadicLinearAttention)}


@torch.no_grad()
def observe_gates(model: PreTrainedModel, windows: Iterable[Tensor]) -> list[LayerGates]:
    """Run `model` over windows of token ids [B, T] and sum up the gates of each linear-attention layer.

    Raises ValueError if the model has no such layer.
    """
    mixers = linear_mixers(model)
    if not mixers:
        raise ValueError("the model has no linear-attention layer of this package, so it has no gates to look at")
    seen = {i: LayerGates(i) for i in mixers}

    def count(mixer, args, named):
        seen[mixer.layer_idx].add(mixer, args[0] if args else named["hidden_states"])

    hooks = [mixer.register_forward_pre_hook(count, with_kwargs=True) for mixer in mixers.values()]
    try:
        for window in windows:
            model.base_model(input_ids=window, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return list(seen.values())


def half_lives(gates: list[LayerGates]) -> list[dict[str, Any]]:
    """Rows of half-lives in tokens: the median by rank within a head with its quartiles, and by layer and rank.

    Empty if the layers have no decay gate. A slice that never fades has the half-life inf.
    """
    by_layer = {g.layer: _ranked(g) for g in gates if g.decay is not None}  # [HV, E], each row rising
    if not by_layer:
        return []
    everywhere = torch.cat(list(by_layer.values()))  # [heads of all layers, E]
    rows = []
    for rank in range(everywhere.shape[1]):
        low, middle, high = torch.quantile(everywhere[:, rank], torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
        rows.append({"metric": "half_life", "rank": rank + 1, "value": middle, "quartiles": [low, high]})
    for layer, ranked in by_layer.items():
        for rank, column in enumerate(ranked.T.tolist(), 1):
            rows.append(
                {"metric": "half_life_by_layer", "layer": layer, "rank": rank, "value": statistics.median(column)}
            )
    return rows


def _ranked(gates: LayerGates) -> Tensor:
    return (math.log(2) / (-gates.decay / gates.tokens)).sort(dim=1).values


def write_strengths(gates: list[LayerGates]) -> list[dict[str, Any]]:
    """Rows of beta: its mean, its density in bins (value per unit of beta, at the bin's centre), its mean by layer.

    Empty if the layers have no write gate.
    """
    gates = [g for g in gates if g.strength is not None]
    if not gates:
        return []
    means = [float(g.strength / g.tokens) for g in gates]
    rows = [{"metric": "beta_mean", "value": statistics.fmean(means)}]
    counts = torch.stack([g.histogram for g in gates]).sum(0)
    width = gates[0].top / BINS
    density = (counts / counts.sum() / width).tolist()
    rows += [{"metric": "beta_histogram", "beta": (i + 0.5) * width, "value": value} for i, value in enumerate(density)]
    rows += [{"metric": "beta_by_layer", "layer": g.layer, "value": mean} for g, mean in zip(gates, means, strict=True)]
    return rows
