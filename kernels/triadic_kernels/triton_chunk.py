"""Back end "triton": the chunkwise algorithm as six kernels in plain Triton, for every CUDA device, K, V and E.

    1 gates -> 2 masks -> 3 forward | 4 reverse -> 5 state gradients -> 6 mask gradients

`run_forward` and `run_backward` take kernels 3, 4 and 5 as functions, so that another back end can bring its own for
these and share the rest.
"""

from typing import NamedTuple

import torch
import triton

from . import chunks
from .backward import reverse_kernel, state_gradients_kernel
from .chunks import CHUNK as C
from .forward import forward_kernel
from .launch import launch
from .mask_gradients import mask_gradients_kernel
from .masks import gates_kernel, masks_kernel

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)  # Triton's interpreter runs on the CPU


class Tables(NamedTuple):
    """What kernels 1 and 2 leave; shapes in masks.py and chunks.py."""

    chunks: torch.Tensor
    sequences: torch.Tensor
    order: torch.Tensor
    gc: torch.Tensor
    q2t: torch.Tensor
    k2t: torch.Tensor
    bt: torch.Tensor
    tab: torch.Tensor
    dec: torch.Tensor
    tp: torch.Tensor


def unsupported(p) -> str | None:
    if p.device_type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, the tensors are on {p.device_type}"
    if p.device_type == "cuda" and p.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, this device has {p.capability[0]}.{p.capability[1]}"
    if p.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32, not {p.dtype}"
    if p.K not in HEAD_DIMS or p.V not in HEAD_DIMS:
        return f"takes head dims {HEAD_DIMS}, not K={p.K}, V={p.V}"
    if p.E > 32:
        return f"takes at most 32 slices, not E={p.E}"
    return None


def padded(E: int) -> int:
    return max(4, triton.next_power_of_2(E))


def shapes(p):
    """Sizes that all kernels share, as keyword arguments."""
    return dict(H=p.H, HV=p.HV, E=p.E, C=C)


def tables_like(p, device) -> Tables:
    """Uninitialised tables of the problem."""
    NC, EP = chunks.count(p.B, p.T, p.N, p.varlen), padded(p.E)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    return Tables(
        chunks=empty(NC, 3, dtype=torch.int32),
        sequences=empty(p.N, 2, dtype=torch.int32),
        order=empty(p.N, dtype=torch.int32),
        gc=empty(p.HV, NC, EP, C),
        q2t=empty(p.H, NC, EP, C),
        k2t=empty(p.H, NC, EP, C),
        bt=empty(p.HV, NC, C),
        tab=empty(p.HV, NC, 3, p.E, C),
        dec=empty(p.HV, NC, p.E),
        tp=empty(p.HV, NC, 2, C, C, dtype=p.dtype),
    )


def kept_like(p, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised y [B, T, HV, V], the tokens' residuals, and h [HV, NC, E, V, K], the state at the start of each
    chunk.
    """
    NC = chunks.count(p.B, p.T, p.N, p.varlen)
    y = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=device)
    return y, torch.empty(p.HV, NC, p.E, p.V, p.K, dtype=p.dtype, device=device)


def prepare(masks, p, q, k, q2, k2, g, beta, cu_seqlens) -> Tables:
    """Kernels 1 and 2."""
    NC = chunks.count(p.B, p.T, p.N, p.varlen)
    ch, sequences, order = chunks.tables(p.B, p.T, cu_seqlens, q.device)
    t = tables_like(p, q.device)._replace(chunks=ch, sequences=sequences, order=order)
    gates_kernel[(NC, p.HV)](
        q2, k2, g, beta, t.chunks, t.tab, t.dec, t.gc, t.q2t, t.k2t, t.bt, p.scale, NC,
        EP=padded(p.E), HAS_Q2=p.has_q2, GATE=p.gate or "none", HAS_BETA=p.has_beta,
        DELTA=p.delta_rule, **shapes(p), **launch(p).gates,
    )  # fmt: skip
    masks(p, q, k, t)
    return t


def masks(p, q, k, t):
    """Kernel 2: fills t.tp."""
    NC = t.chunks.shape[0]
    masks_kernel[(NC, p.H)](
        q, k, t.gc, t.q2t, t.k2t, t.bt, t.chunks, t.tp, p.scale, NC,
        EP=padded(p.E), K=p.K, DELTA=p.delta_rule, **shapes(p), **launch(p).masks,
    )  # fmt: skip


def recur(p, q, k, v, t, state, o, y, h):
    """Kernel 3: fills o, and y and h where they are given; state [N, HV, E, K, V] goes from initial to final in
    place.
    """
    NC, s = t.chunks.shape[0], launch(p)
    forward_kernel[(p.N * p.HV * (p.V // s.recurrence["BV"]),)](
        q, k, v, t.tp, t.tab, t.dec, t.chunks, t.sequences, t.order, state, o, y, h, NC,
        K=p.K, V=p.V, DELTA=p.delta_rule, KEEP=h is not None, **shapes(p), **s.recurrence,
    )  # fmt: skip


def reverse(p, q, k, do, t, dstate, dw, dh):
    """Kernel 4: fills dw and dh; dstate goes from the gradient of the final state to that of the initial one in
    place.
    """
    NC, s = t.chunks.shape[0], launch(p)
    reverse_kernel[(p.N * p.HV * (p.V // s.recurrence["BV"]),)](
        q, k, do, t.tp, t.tab, t.dec, t.chunks, t.sequences, t.order, dstate, dw, dh, NC,
        K=p.K, V=p.V, DELTA=p.delta_rule, **shapes(p), **s.recurrence,
    )  # fmt: skip


def state_gradients(p, q, k, do, y, dw, h, dh, t):
    """Kernel 5: partial (dq, dk read, dk write [B, T, H, K], row sums [NB, HV, NC, 3, E, C], <S, dS'> [NB, HV, NC,
    E]).
    """
    NC, s = t.chunks.shape[0], launch(p)
    NB = p.K // s.state_gradients["BK"]
    dq, dkr, dkw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    dtab, ddec = t.tab.new_empty(NB, *t.tab.shape), t.dec.new_empty(NB, *t.dec.shape)
    state_gradients_kernel[(NC, p.H, NB)](
        q, k, do, y, dw, h, dh, t.tab, t.chunks, dq, dkr, dkw, dtab, ddec, NC,
        K=p.K, V=p.V, DELTA=p.delta_rule, **shapes(p), **s.state_gradients,
    )  # fmt: skip
    return dq, dkr, dkw, dtab, ddec


class Gradients(NamedTuple):
    """What kernel 6 fills; the last four are float32, dg is None without decay."""

    dq: torch.Tensor
    dk: torch.Tensor
    dq2: torch.Tensor
    dk2: torch.Tensor
    dbeta: torch.Tensor
    dg: torch.Tensor | None


def gradients_like(p, q, k, g, t) -> Gradients:
    """Uninitialised outputs of kernel 6."""
    slices = p.B, p.T, p.H, p.E
    return Gradients(
        dq=torch.empty_like(q),
        dk=torch.empty_like(k),
        dq2=t.tab.new_empty(slices),
        dk2=t.tab.new_empty(slices),
        dbeta=t.tab.new_empty(p.B, p.T, p.HV),
        dg=None if g is None else t.tab.new_empty(g.shape),
    )


def finish(p, q, k, y, do, dw, t, parts, out):
    """Kernel 6: fills out, a Gradients."""
    NC, s = t.chunks.shape[0], launch(p)
    dqs, dkr, dkw, dtab, ddec = parts
    mask_gradients_kernel[(NC, p.H)](
        q, k, y, do, dw, t.q2t, t.k2t, t.bt, t.gc, dtab, ddec, t.chunks, dqs, dkr, dkw,
        *out, p.scale, NC,
        EP=padded(p.E), K=p.K, V=p.V, NKB=dtab.shape[0], NDB=ddec.shape[0],
        DELTA=p.delta_rule, GATE=p.gate or "none",
        **shapes(p), **s.mask_gradients,
    )  # fmt: skip


def run_forward(masks, recur, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep):
    t = prepare(masks, p, q, k, q2, k2, g, beta, cu_seqlens)
    y, h = kept_like(p, q.device) if keep else (None, None)
    if not p.delta_rule and keep:
        y = v.clone()
    state = q.new_zeros(p.N, p.HV, p.E, p.K, p.V, dtype=torch.float32)
    if h0 is not None:
        state.copy_(h0)
    o = torch.empty_like(v)
    recur(p, q, k, v, t, state, o, y, h)
    if not keep:
        return o, state if p.output_final else None, []
    if not p.varlen:  # these chunk tables are cached: the caller owns what it gets
        t = t._replace(chunks=t.chunks.clone(), sequences=t.sequences.clone(), order=t.order.clone())
    return o, state if p.output_final else None, [*t, y, h]


def run_backward(reverse, state_gradients, finish, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    *t, y, h = saved
    t, do = Tables(*t), do.contiguous()
    dstate = q.new_zeros(p.N, p.HV, p.E, p.K, p.V, dtype=torch.float32)
    if dht is not None:
        dstate.copy_(dht)
    dw, dh = torch.empty_like(v), torch.empty_like(h)
    reverse(p, q, k, do, t, dstate, dw, dh)
    dh0 = None if h0 is None else dstate
    del dstate  # megabytes that the peak below need not carry
    parts = state_gradients(p, q, k, do, y, dw, h, dh, t)
    del h, dh
    out = gradients_like(p, q, k, g, t)
    finish(p, q, k, y, do, dw, t, parts, out)

    def like(x, dx):
        return None if x is None else dx.to(x.dtype)

    slices = like(q2, out.dq2), like(k2, out.dk2), like(g, out.dg), like(beta, out.dbeta)
    return out.dq, out.dk, dw, *slices, dh0


def saved_like(p, q, cu_seqlens):
    return [*tables_like(p, q.device), *kept_like(p, q.device)]


def forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep):
    return run_forward(masks, recur, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep)


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    return run_backward(reverse, state_gradients, finish, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht)
