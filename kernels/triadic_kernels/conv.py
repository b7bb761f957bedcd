"""Causal depthwise short convolution over packed sequences, with cached state.

Legend: B batch, T time, D channels, W kernel width, N sequences (B, or the number of packed documents).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import has_tangent
from .packing import check_cu_seqlens, check_cu_seqlens_metadata
from .transforms import active

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "softplus": F.softplus, "sigmoid": torch.sigmoid, "relu": F.relu}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y[t, d] = activation(sum_w weight[d, w] * x[t - (W - 1) + w, d]), every sequence from its own start.

    Args:
        x: [B, T, D], any floating dtype; sums and activation are computed in float32 or better and rounded once.
        weight: [D, W], the last column meets the current token.
        activation: None, "silu", "softplus", "sigmoid" or "relu".
        initial_state: the W - 1 inputs before the first, oldest first, [N, D, W - 1]; None: zeros.
        output_final_state: also return the last W - 1 inputs of every sequence (the initial state where a sequence
            is shorter), so that segments can be chained; gradients flow through it.
        cu_seqlens: [N + 1] int32 or int64 boundaries of documents packed along T (B must be 1).
        check: also check the contents of cu_seqlens when it is not on the CPU, where they are always checked.

    Returns:
        y [B, T, D] and the final state [N, D, W - 1] or None, both in the dtype of x.

    Raises:
        ValueError: wrong shapes, dtypes, devices, boundaries or activation.
    """
    _check_arguments(x, weight, activation, initial_state, cu_seqlens, check)
    (B, T, D), W = x.shape, weight.shape[1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    past = x.new_zeros(N, W - 1, D) if initial_state is None else initial_state.to(x.dtype).mT
    if cu_seqlens is None:
        stream = torch.cat([past, x], 1)
        y, final = _sum_of_taps(stream, weight), stream[:, T:]
        if output_final_state and T > W:  # a view of the whole stream would keep it
            final = final.clone()
    else:
        # Each document behind its own past; what would be the outputs at the places of pasts is never picked.
        bounds, tail = cu_seqlens.long(), torch.arange(W - 1, device=x.device)
        first = bounds + torch.arange(N + 1, device=x.device) * (W - 1)  # [N + 1] where each past starts
        token = torch.arange(T, device=x.device)
        place = token + torch.searchsorted(bounds, token, right=True) * (W - 1)  # [T]
        head, last = ((row[:, None] + tail).flatten() for row in (first[:-1], first[1:] - (W - 1)))  # [N * (W - 1)]
        stream = x.new_empty(T + N * (W - 1), D).index_copy(0, place, x[0]).index_copy(0, head, past.flatten(0, 1))
        y = _sum_of_taps(stream[None], weight).index_select(1, place - (W - 1))
        final = stream.index_select(0, last).view(N, W - 1, D)
    y = ACTIVATIONS[activation](y).to(x.dtype)
    return y, final.mT if output_final_state else None


def _sum_of_taps(x: Tensor, weight: Tensor) -> Tensor:
    """`_Taps`, or where torch.func transforms or forward mode follow it, the sum that they can differentiate."""
    if not active() and not has_tangent((x, weight)):
        return _Taps.apply(x, weight)
    taps = _taps(x, weight)
    T = x.shape[1] - len(taps) + 1
    return sum(x[:, w : w + T] * tap for w, tap in enumerate(taps))


class _Taps(torch.autograd.Function):
    """y[:, t] = sum_w x[:, t + w] weight[:, w]: [B, W - 1 + T, D] -> [B, T, D] in float32 or better, a pass a tap.

    Faster than F.conv1d on a CPU, which wants [B, D, T], and than autograd of the sum, which pads every tap's gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = _taps(x, weight)  # [W, D]
        T = x.shape[1] - len(taps) + 1
        y = x[:, :T] * taps[0]
        for w in range(1, len(taps)):
            y.addcmul_(x[:, w : w + T], taps[w])
        return y.detach()  # compiled by torch 2.11, a tensor that was changed in place would lose its gradient

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        taps, T = _taps(x, weight), dy.shape[1]
        dx, dtaps = torch.zeros_like(x, dtype=taps.dtype), torch.empty_like(taps)
        for w in range(len(taps)):
            dx[:, w : w + T].addcmul_(dy, taps[w])
            dtaps[w] = (x[:, w : w + T] * dy).sum((0, 1))
        return dx.to(x.dtype), dtaps.t().to(weight.dtype)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """The weight as [W, D] in the dtype of the sums: float32 or better."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return weight.t().to(dtype).contiguous()


def _check_arguments(x, weight, activation, initial_state, cu_seqlens, check) -> None:
    if x.ndim != 3:
        raise ValueError(f"x has shape {list(x.shape)}; pass [B, T, D].")
    B, T, D = x.shape
    if weight.ndim != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {list(weight.shape)}; pass [D, W], here [{D}, W].")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; choose one of {list(ACTIVATIONS)}.")
    if cu_seqlens is not None:
        check_cu_seqlens_metadata(cu_seqlens, B, x.device)
        if (check or cu_seqlens.device.type == "cpu") and not torch.compiler.is_compiling():
            check_cu_seqlens(cu_seqlens, T)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (N, D, weight.shape[1] - 1)
    if initial_state is not None and initial_state.shape != state:
        raise ValueError(
            f"initial_state has shape {list(initial_state.shape)}; pass [N, D, W - 1], here {list(state)}."
        )
    for name, other in (("x", x), ("weight", weight), ("initial_state", initial_state)):
        if other is not None and not other.is_floating_point():
            raise ValueError(f"{name} has dtype {other.dtype}; pass a floating dtype.")
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device}, but x is on {x.device}; move it there.")
