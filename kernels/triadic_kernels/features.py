"""Keys, queries and values in one pass over their projections: convolution, activation, unit length of every head.

A GPU reads [B, T, C] once and writes each part once, where the single operations would pass over it a dozen times. Runs
on Triton alone (`conv_triton.py`); elsewhere `causal_conv1d` and plain torch do the same.

Legend: B batch, T time, C channels, W kernel width, N packed documents.
"""

import torch
from torch import Tensor

from .dispatch import dense, load
from .op import NAMESPACE
from .packing import check_cu_seqlens, check_cu_seqlens_metadata
from .transforms import active, transformable

ACTIVATIONS = ("silu", "softplus", "sigmoid", "none")


@torch.compiler.assume_constant_result
def refusal(device_type: str, dtype: torch.dtype, groups: tuple[int, ...], width: int) -> str | None:
    """Why `conv_features` cannot take an x of this kind with heads of these sizes, a kernel of this width; None if it
    can.
    """
    kernels = load("conv_triton")
    if isinstance(kernels, str):
        return kernels
    if device_type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or newer"
    return kernels.unsupported(device_type, dtype, groups, width)


def conv_features(
    x: Tensor,
    weight: Tensor,
    sizes: list[int],
    groups: list[int],
    activations: list[str],
    wide: list[bool],
    cu_seqlens: Tensor | None = None,
) -> list[Tensor]:
    """For each part of the channels: y = unit(activation(sum_w weight[:, w] x[t - (W - 1) + w])), by document.

    Args:
        x: [B, T, C] bfloat16, float16 or float32; everything inside is computed in float32 and rounded once.
        weight: [C, W], the last column meets the current token.
        sizes: channels of each part, C together.
        groups: size of a part's heads, which are scaled to unit length, y / sqrt(sum y^2 + 1e-6); 0: none is.
        activations: of each part, "silu", "softplus", "sigmoid" or "none".
        wide: whether a part is float32 (else the dtype of x).
        cu_seqlens: [N + 1] int32 or int64 boundaries of documents packed along T (B must be 1).

    Returns:
        a tensor [B, T, size] for each part.

    Raises:
        ValueError: wrong shapes, or what no kernel takes (see `refusal`).
    """
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or sum(sizes) != x.shape[2]:
        raise ValueError(
            f"x has shape {list(x.shape)}, weight {list(weight.shape)} and parts {list(sizes)}; pass [B, T, C], [C, W] "
            "and sizes that sum to C."
        )
    if not len(sizes) == len(groups) == len(activations) == len(wide):
        raise ValueError(f"{len(sizes)} parts need as many groups, activations and flags of width.")
    for size, group, activation in zip(sizes, groups, activations, strict=True):
        if activation not in ACTIVATIONS or (group and size % group):
            raise ValueError(
                f"a part of {size} channels with heads of {group} and activation {activation!r} is not possible; heads "
                f"must divide it, activations are {', '.join(ACTIVATIONS)}."
            )
    if cu_seqlens is not None:
        check_cu_seqlens_metadata(cu_seqlens, x.shape[0], x.device)
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            check_cu_seqlens(cu_seqlens, x.shape[1])
    reason = refusal(x.device.type, x.dtype, tuple(groups), weight.shape[1])
    if reason is not None:
        raise ValueError(f"conv_features cannot run this call: {reason}; take causal_conv1d and plain torch.")
    call = Transformed.apply if active() else _features
    return [*call(x.contiguous(), weight.contiguous(), cu_seqlens, sizes, groups, ",".join(activations), wide)]


@torch.library.custom_op(f"{NAMESPACE}::conv_features", mutates_args=())
@dense
def _features(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    sizes: list[int],
    groups: list[int],
    activations: str,
    wide: list[bool],
) -> list[Tensor]:
    dtypes = [torch.float32 if full else x.dtype for full in wide]
    return load("conv_triton").forward(x, weight, cu_seqlens, sizes, groups, activations.split(","), dtypes)


@_features.register_fake
def _(x, weight, cu_seqlens, sizes, groups, activations, wide):
    dtypes = [torch.float32 if full else x.dtype for full in wide]
    return [x.new_empty(*x.shape[:2], size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


@torch.library.custom_op(f"{NAMESPACE}::conv_features_backward", mutates_args=())
@dense
def _gradients(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    dys: list[Tensor],
    sizes: list[int],
    groups: list[int],
    activations: str,
) -> tuple[Tensor, Tensor]:
    return load("conv_triton").backward(x, weight, cu_seqlens, dys, sizes, groups, activations.split(","))


@_gradients.register_fake
def _(x, weight, cu_seqlens, dys, sizes, groups, activations):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.options, ctx.wide = inputs[3:6], inputs[6]


def _differentiate(ctx, dys):
    x, weight, cu_seqlens = ctx.saved_tensors
    dys = [
        x.new_zeros(*x.shape[:2], size, dtype=torch.float32 if full else x.dtype) if dy is None else dy
        for dy, size, full in zip(dys, ctx.options[0], ctx.wide, strict=True)
    ]
    if active():
        gradients = TransformedBackward.apply(x, weight, cu_seqlens, *ctx.options, *dys)
    else:
        gradients = _gradients(x, weight, cu_seqlens, dys, *ctx.options)
    return *gradients, None, None, None, None, None


def _backward_of(x, weight, cu_seqlens, sizes, groups, activations, *dys):
    return _gradients(x, weight, cu_seqlens, list(dys), sizes, groups, activations)


def _no_second_derivative(ctx, gradients):
    raise NotImplementedError("conv_features has no second derivative; take causal_conv1d and plain torch.")


NO_TANGENT = "conv_features has no forward-mode derivative; take causal_conv1d and plain torch."
Transformed = transformable(_features, _keep, _differentiate, NO_TANGENT)
TransformedBackward = transformable(_backward_of, lambda *_: None, _no_second_derivative, NO_TANGENT)

_gradients.register_autograd(_no_second_derivative)
_features.register_autograd(_differentiate, setup_context=_keep)
