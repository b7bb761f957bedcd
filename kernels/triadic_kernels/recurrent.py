"""`recurrent_triadic`: checked arguments, then plain autograd of the torch back end or one torch.library op.

Legend: B batch, T time, H key heads, HV value heads, K and V key and value sizes, E second-key size, N sequences.
"""

import torch
from torch import Tensor

from .checks import check_arguments, check_values
from .dispatch import RECURRENT, dense, has_tangent, plain, problem, run, select
from .op import NAMESPACE, _full_precision, _op
from .reference import l2norm
from .transforms import active, everything


def recurrent_triadic(
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
    inplace_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    backend: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Triadic linear attention, token by token: for decoding. Arguments, results and errors of `chunk_triadic`, and:

    Args:
        initial_state: may also be bfloat16, half the memory; the final state then has that dtype too. The arithmetic
            is float32, and the state is rounded once a call.
        inplace_state: write the final state into `initial_state` (contiguous), which is then the final state returned:
            for a cache at a fixed address. Not where gradients are wanted.
        backend: "auto" takes the first able one of `dispatch.RECURRENT`; a named one runs or raises.

    With the torch back end, which alone runs where gradients are wanted or torch.func transforms the call, it is
    differentiable any number of times, in forward mode too; that one reads cu_seqlens on the host.
    """
    check_arguments(q, k, v, q2, k2, g, beta, initial_state, cu_seqlens, state_dtypes=(torch.bfloat16,))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = (q, k, v, q2, k2, g, beta, initial_state, cu_seqlens)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    transformed = active()
    needs_grad = needs_grad or transformed or has_tangent(tensors)
    if inplace_state:
        if transformed:
            raise ValueError("inplace_state=True overwrites a state, which torch.func does not follow; leave it out.")
        _check_inplace(initial_state, needs_grad)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if not needs_grad:
        tensors = [None if x is None else x.contiguous() for x in (q, k, *tensors[2:])]
        options = (scale, delta_rule, output_final_state or inplace_state, backend, check)
        name, function = ("recurrent_step_", _step_inplace) if inplace_state else ("recurrent_step", _step)
        outputs = function(*tensors, *options) if plain(tensors) else _op(name)(*tensors, *options)
        if inplace_state:
            torch.autograd.graph.increment_version(initial_state)  # autograd must notice what a kernel overwrote
            return outputs, initial_state
        return outputs[0], outputs[1] if output_final_state else None
    if transformed and cu_seqlens is not None:
        cu_seqlens = everything(cu_seqlens)
        if cu_seqlens.ndim > 1:
            raise ValueError("cu_seqlens differs between elements of torch.func.vmap; call recurrent_triadic for each.")
    if not torch.compiler.is_compiling():
        check_values(everything(g), cu_seqlens, q.shape[1], check)
    p = problem(
        q, k, v, q2, g, beta, initial_state, cu_seqlens,
        scale=scale, delta_rule=delta_rule, output_final=output_final_state, needs_grad=True,
    )  # fmt: skip
    with _full_precision(q.device.type):
        return select(backend, p, RECURRENT).recurrent(p, q, k, v, q2, k2, g, beta, initial_state, cu_seqlens)


def _check_inplace(initial_state: Tensor | None, needs_grad: bool) -> None:
    """Raise ValueError unless the initial state can be overwritten."""
    if initial_state is None or not initial_state.is_contiguous():
        what = "missing" if initial_state is None else "not contiguous"
        raise ValueError(f"inplace_state=True, but initial_state is {what}; pass a contiguous state to overwrite.")
    if needs_grad:
        raise ValueError("inplace_state=True would overwrite what autograd needs; use torch.no_grad() or leave it out.")


def _recurrent(q, k, v, q2, k2, g, beta, h0, cu_seqlens, scale, delta_rule, output_final, backend, check, ht=None):
    check_values(g, cu_seqlens, q.shape[1], check)
    p = problem(q, k, v, q2, g, beta, h0, cu_seqlens, scale=scale, delta_rule=delta_rule, output_final=output_final)
    with _full_precision(p.device_type):
        return run(backend, p, "recurrent", q, k, v, q2, k2, g, beta, h0, cu_seqlens, ht, table=RECURRENT)


def _step(
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
    backend: str,
    check: bool,
) -> list[Tensor]:
    """o, then the final state if asked for; without gradients."""
    o, ht = _recurrent(
        q, k, v, q2, k2, g, beta, h0, cu_seqlens, scale, delta_rule, output_final, backend, check
    )  # fmt: skip
    return [o, ht] if output_final else [o]


def _step_like(q, k, v, q2, k2, g, beta, h0, cu_seqlens, scale, delta_rule, output_final, backend, check):
    B, N = q.shape[0], None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (B if N is None else N, v.shape[2], 1 if q2 is None else q2.shape[-1], q.shape[-1], v.shape[-1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [v.new_empty(v.shape), *([q.new_empty(shape, dtype=dtype if h0 is None else h0.dtype)] * output_final)]


def _step_inplace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2: Tensor | None,
    k2: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    delta_rule: bool,
    output_final: bool,
    backend: str,
    check: bool,
) -> Tensor:
    """o; the state goes from initial to final."""
    return _recurrent(
        q, k, v, q2, k2, g, beta, state, cu_seqlens, scale, delta_rule, True, backend, check, ht=state
    )[0]  # fmt: skip


_recurrent_step = torch.library.custom_op(f"{NAMESPACE}::recurrent_step", dense(_step), mutates_args=())
_recurrent_step.register_fake(_step_like)
_recurrent_step_ = torch.library.custom_op(
    f"{NAMESPACE}::recurrent_step_", dense(_step_inplace, overwritten=7), mutates_args=("state",)
)
_recurrent_step_.register_fake(lambda q, k, v, *_: v.new_empty(v.shape))
