"""The public operations but for `recurrent.py`: checked arguments, then one torch.library op forward and one backward.

Legend: B batch, T time, H key heads, HV value heads (value head h uses key head h // (HV / H)), K and V key and value
sizes, E second-key size, N sequences (B, or the number of packed documents).
"""

import contextlib
import re
from functools import partial

import torch
from torch import Tensor

from .checks import check_arguments, check_values
from .dispatch import (
    CHUNK,
    RECURRENT,
    dense,
    has_tangent,
    load,
    plain,
    problem,
    report,
    run,
    select,
    surroundings,
)
from .reference import l2norm
from .segments import check_segment_size, in_segments
from .transforms import active, mapped_by_autograd, transformable

# A copy of this file in another package (a model's remote code) registers its ops under a name of its own.
NAMESPACE = re.sub(r"\W", "_", __package__ or "triadic_kernels")
NO_TANGENT = "chunk_triadic has no forward-mode derivative; recurrent_triadic has one."

load("reference")  # the torch back end, part of every installation: compiled graphs must find it loaded


def chunk_triadic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q2: Tensor | None = None,
    k2: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    delta_rule: bool = True,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    segment_size: int | None = None,
    backend: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Triadic linear attention, chunk by chunk: for training and prefill. Equals `recurrent_triadic`.

    For every token t, slice e and value head:

        S_e <- exp(g_te) S_e
        r    = v_t - sum_e k2_te S_e^T k_t     (delta_rule; else r = v_t)
        S_e <- S_e + beta_t k2_te k_t r^T
        o_t  = scale * sum_e q2_te S_e^T q_t

    (Sieberling et al., Triadic Linear Attention, arXiv 2609.36529; E = 1 is Gated DeltaNet, or scalar-gated linear
    attention without the delta rule.)

    Args:
        q, k: [B, T, H, K], float64, float32, bfloat16 or float16.
        v: [B, T, HV, V], the dtype of q; HV a multiple of H.
        q2, k2: second query and key [B, T, H, E]; both None: E = 1 and ones.
        g: natural log of the decay, <= 0 (-inf erases), [B, T, HV, E], or [B, T, HV] for all slices; None: no decay.
        beta: write strength [B, T, HV]; None: ones.
        delta_rule: subtract what the state already answers to k (Gated DeltaNet); False: plain accumulation (sGLA).
        scale: factor on the output; None: K ** -0.5.
        initial_state: [N, HV, E, K, V]; None: zeros. Gradients flow to it and from the final state, so that segments of
            a sequence can be chained.
        output_final_state: also return the state after the last token of every sequence.
        cu_seqlens: [N + 1] int32 or int64 boundaries of documents packed along T (B must be 1); documents may be empty
            and never influence one another. Read again in the backward.
        use_qk_l2norm_in_kernel: first scale q and k to unit length, x / sqrt(sum x^2 + 1e-6).
        segment_size: tokens (best a multiple of 64) after which the backward starts anew: it computes the states inside
            a segment again instead of keeping those of the whole sequence, the largest part of the memory it needs, for
            the time of one more forward. None: keep them.
        backend: "auto" takes the first able one of `dispatch.CHUNK`; a named one runs or raises.
        check: also check values (g <= 0, the contents of cu_seqlens) on tensors that are not on the CPU, which stalls
            the device; on the CPU they are always checked.

    torch.func follows it in reverse mode (grad, vjp, jacrev) and in vmap, which calls it once for each element: its
    inputs are batches already.

    q2, k2, g, beta and initial_state are float32 (float64 when q is float64), under autocast too. bfloat16 and float16
    inputs are computed with float32 accumulation and state.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, E, K, V] in float32 (float64) or None.

    Raises:
        ValueError: wrong shapes, dtypes, devices or values, or a back end that cannot run.
        NotImplementedError: forward-mode or second derivatives, which `recurrent_triadic` has; segment_size within
            transforms of torch.func.
    """
    check_arguments(q, k, v, q2, k2, g, beta, initial_state, cu_seqlens)
    transformed = active()
    if not transformed and has_tangent((q, k, v, q2, k2, g, beta, initial_state)):
        raise NotImplementedError(NO_TANGENT)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if segment_size is not None:
        check_segment_size(segment_size)
        if transformed and segment_size < q.shape[1]:
            raise NotImplementedError(
                f"segment_size is {segment_size} under a transform of torch.func, where nothing can be computed again; "
                "leave it out."
            )
        if segment_size < q.shape[1] and _needs_grad(q, k, v, q2, k2, g, beta, initial_state):
            if plain((q, k, v, q2, k2, g, beta, initial_state, cu_seqlens)):
                check_values(g, cu_seqlens, q.shape[1], check)
                check = False
            options = dict(
                delta_rule=delta_rule, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                backend=backend, check=check,
            )  # fmt: skip
            return in_segments(
                partial(chunk_triadic, **options), segment_size,
                dict(q=q, k=k, v=v, q2=q2, k2=k2, g=g, beta=beta), initial_state, cu_seqlens, output_final_state,
            )  # fmt: skip
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    tensors = [None if x is None else x.contiguous() for x in (q, k, v, q2, k2, g, beta, initial_state, cu_seqlens)]
    keep = transformed or _needs_grad(*tensors)
    direct = plain(tensors)
    options = (scale, delta_rule, output_final_state, keep, backend, check, "" if direct else surroundings())
    if not direct:
        outputs = (Transformed.apply if transformed else _op("chunk_forward"))(*tensors, *options)
    else:
        outputs = ChunkTriadic.apply(*tensors, *options) if keep else _forward(*tensors, *options)
    return outputs[0], outputs[1] if output_final_state else None


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q2: Tensor | None = None,
    k2: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    delta_rule: bool = True,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    segment_size: int | None = None,
    backend: str = "auto",
    check: bool = False,
    recurrent: bool = False,
    inplace_state: bool = False,
) -> str:
    """Which back end `chunk_triadic` with backend="auto" would run, and why not the others: a line for each.

    recurrent: say it of `recurrent_triadic`, which alone takes inplace_state.

    Raises:
        ValueError: wrong shapes, dtypes or devices.
    """
    half = (torch.bfloat16,) if recurrent else ()
    check_arguments(q, k, v, q2, k2, g, beta, initial_state, cu_seqlens, state_dtypes=half)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = (q, k, v, q2, k2, g, beta, initial_state)
    p = problem(
        q, k, v, q2, g, beta, initial_state, cu_seqlens,
        scale=scale, delta_rule=delta_rule, output_final=output_final_state or inplace_state,
        needs_grad=_needs_grad(*tensors) or active() or has_tangent(tensors),
    )  # fmt: skip
    return report(p, RECURRENT if recurrent else CHUNK)


def _needs_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _full_precision(device_type: str):
    """Keep autocast from lowering the precision of the products inside."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _op(name: str):
    return getattr(getattr(torch.ops, NAMESPACE), name)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2: Tensor | None,
    k2: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    delta_rule: bool,
    output_final: bool,
    keep: bool,
    backend: str,
    check: bool,
    surroundings: str,
) -> list[Tensor]:
    """o, then the final state if asked for, then what the back end keeps for its backward. `surroundings` is for the
    keys of compilers' caches alone.
    """
    check_values(g, cu_seqlens, q.shape[1], check)
    p = problem(q, k, v, q2, g, beta, h0, cu_seqlens, scale=scale, delta_rule=delta_rule, output_final=output_final)
    with _full_precision(p.device_type):
        o, ht, saved = run(backend, p, "forward", q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep)
    return [o, *([ht] if output_final else []), *saved]


def _forward_like(q, k, v, q2, k2, g, beta, h0, cu_seqlens, scale, delta_rule, output_final, keep, backend, *_):
    p = problem(q, k, v, q2, g, beta, h0, cu_seqlens, scale=scale, delta_rule=delta_rule, output_final=output_final)
    state = torch.float64 if q.dtype == torch.float64 else torch.float32
    ht = [q.new_empty((p.N, p.HV, p.E, p.K, p.V), dtype=state)] if output_final else []
    saved = select(backend, p).saved_like(p, q, cu_seqlens) if keep else []
    return [v.new_empty(v.shape), *ht, *saved]


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2: Tensor | None,
    k2: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    do: Tensor,
    dht: Tensor | None,
    scale: float,
    delta_rule: bool,
    output_final: bool,
    backend: str,
) -> list[Tensor]:
    """Gradients of those of q, k, v, q2, k2, g, beta, h0 that are given."""
    p = problem(q, k, v, q2, g, beta, h0, cu_seqlens, scale=scale, delta_rule=delta_rule, output_final=output_final)
    with _full_precision(p.device_type):
        gradients = run(backend, p, "backward", q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht)
    return [x for x in gradients if x is not None]


def _backward_like(q, k, v, q2, k2, g, beta, h0, *_):
    return [x.new_empty(x.shape) for x in (q, k, v, q2, k2, g, beta, h0) if x is not None]


def _keep_for_backward(ctx, inputs, output):
    tensors, (scale, delta_rule, output_final, _, backend) = inputs[:9], inputs[9:14]
    saved = output[1 + output_final :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*tensors, *saved)
    ctx.options = (scale, delta_rule, output_final, backend)


def _differentiate(ctx, gradients):
    if mapped_by_autograd(gradients):
        raise NotImplementedError(
            "chunk_triadic was given batched gradients (is_grads_batched=True or vectorize=True), not followed here; "
            "take torch.func.vjp and torch.func.vmap, or torch.func.jacrev."
        )
    kept = ctx.saved_tensors  # read once: non-reentrant activation checkpointing unpacks a tensor only once
    tensors, saved = kept[:9], list(kept[9:])
    do = torch.zeros_like(tensors[2]) if gradients[0] is None else gradients[0].contiguous()
    dht = gradients[1].contiguous() if ctx.options[2] and gradients[1] is not None else None
    arguments = (*tensors, saved, do, dht, *ctx.options)
    if active():
        given = iter(TransformedBackward.apply(len(saved), *saved, *tensors, do, dht, *ctx.options))
    elif plain((do, dht, *kept)) and not torch.is_grad_enabled():
        given = iter(_backward(*arguments))
    else:
        given = iter(_op("chunk_backward")(*arguments))
    return *(None if x is None else next(given) for x in tensors[:8]), *[None] * 8


class ChunkTriadic(torch.autograd.Function):
    """What autograd records when the op is called without torch.library: the same forward, the same backward."""

    @staticmethod
    def forward(ctx, *arguments):
        outputs = _forward(*arguments)
        _keep_for_backward(ctx, arguments, outputs)
        results = outputs[: 1 + arguments[11]]  # output_final
        return tuple(x.clone() if x._is_view() else x for x in results)  # a view could not be changed in place

    @staticmethod
    def backward(ctx, *gradients):
        return _differentiate(ctx, gradients)


def _no_second_derivative(ctx, gradients):
    raise NotImplementedError("chunk_triadic has no second derivative; recurrent_triadic can be differentiated twice.")


def _backward_of(count, *arguments):
    """chunk_backward, its list of tensors ahead of the others."""
    saved, tensors, rest = arguments[:count], arguments[count : count + 9], arguments[count + 9 :]
    return _op("chunk_backward")(*tensors, list(saved), *rest)


Transformed = transformable(
    lambda *arguments: _op("chunk_forward")(*arguments), _keep_for_backward, _differentiate, NO_TANGENT
)
TransformedBackward = transformable(_backward_of, lambda *_: None, _no_second_derivative, NO_TANGENT)

_chunk_forward = torch.library.custom_op(f"{NAMESPACE}::chunk_forward", dense(_forward), mutates_args=())
_chunk_forward.register_fake(_forward_like)
_chunk_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)
_chunk_backward = torch.library.custom_op(f"{NAMESPACE}::chunk_backward", dense(_backward), mutates_args=())
_chunk_backward.register_fake(_backward_like)
_chunk_backward.register_autograd(_no_second_derivative)
