"""Effective rank of the recurrent state after so many tokens: how much of its room is in use.

A head's state [E, K, V] is unfolded to a matrix along one dimension, and its singular values s give
exp(-sum p log p) with p = s / sum s (Roy and Vetterli, 2007): n for n equal ones, 1 for one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triadic.analysis.gates import linear_mixers
from triadic.models.cache import CACHE_NAME, new_cache

UNFOLDINGS = {  # name -> state [..., E, K, V] as matrices
    "EK x V": lambda state: state.flatten(-3, -2),
    "K x EV": lambda state: state.transpose(-3, -2).flatten(-2),
    "E x KV": lambda state: state.flatten(-2),
}


def effective_rank(matrices: Tensor) -> Tensor:
    """Effective rank of [..., m, n] matrices, float64 [...] on the CPU; 0 for a matrix of zeros."""
    values = _singular_values(matrices)
    total = values.sum(-1, keepdim=True)
    shares = values / torch.where(total == 0, 1, total)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    return torch.where(total[..., 0] == 0, 0.0, entropy.exp())


def _singular_values(matrices: Tensor) -> Tensor:
    """[..., min(m, n)] of [..., m, n], float64 on the CPU; those that float32 cannot tell from 0 are 0.

    As roots of the eigenvalues of A A^T: thousands of decompositions are faster on a CPU than one by one on a GPU.
    """
    short = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    short = short.double()
    squares = torch.linalg.eigvalsh((short @ short.mT).cpu())
    least = squares[..., -1:] * squares.shape[-1] * torch.finfo(torch.float64).eps
    return torch.where(squares > least, squares, 0.0).sqrt()


@torch.no_grad()
def state_ranks(model: PreTrainedModel, windows: Iterable[Tensor], positions: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the mean effective rank of all heads' states after each of the `positions`, overall and by layer.

    windows: token ids [B, T], T at least the last position. Raises ValueError for shorter windows, positions that do
    not rise, and models without linear-attention layers.
    """
    linear = list(linear_mixers(model))
    if not linear:
        raise ValueError("the model has no linear-attention layer of this package, so it has no such state")
    if list(positions) != sorted(set(positions)) or positions[0] < 1:
        raise ValueError(f"positions must rise from at least 1, not {list(positions)}")
    found: dict[tuple[str, int, int], list[Tensor]] = {}
    for window in windows:
        if window.shape[1] < positions[-1]:
            raise ValueError(f"a window of {window.shape[1]} tokens is shorter than the position {positions[-1]}")
        cache, start = new_cache(model.config), 0
        for position in positions:
            model.base_model(input_ids=window[:, start:position], use_cache=True, **{CACHE_NAME: cache})
            start = position
            for layer in linear:
                state = cache.layers[layer].read()[1]  # [B, HV, E, K, V]
                for name, unfold in UNFOLDINGS.items():
                    found.setdefault((name, position, layer), []).append(effective_rank(unfold(state)))
    rows = []
    for name in UNFOLDINGS:
        for position in positions:
            means = {layer: float(torch.cat(found[name, position, layer]).mean()) for layer in linear}
            row = {"unfolding": name, "position": position}
            rows.append({"metric": "state_rank", **row, "value": sum(means.values()) / len(means)})
            rows += [{"metric": "state_rank_by_layer", **row, "layer": i, "value": mean} for i, mean in means.items()]
    return rows
