"""Back end "triton": the chunkwise algorithm as six kernels in plain Triton, for every CUDA device, K, V and E.

    1 gates -> 2 masks -> 3 forward | 4 reverse -> 5 state gradients -> 6 mask gradients

Either way begins with a small one that fills the chunk tables (chunks.py).

`run_forward` and `run_backward` take kernels 2 to 6 as functions, so that another back end can bring its own for
these and share the rest.
"""

from typing import NamedTuple

import torch

from . import chunks
from .backward import reverse_kernel, state_gradients_kernel
from .chunks import CHUNK as C
from .forward import forward_kernel
from .launch import aligned, bound, current, launch, unsupported  # noqa: F401 - the last is the back end's
from .mask_gradients import mask_gradients_kernel
from .masks import gates_kernel, masks_kernel


class Tables(NamedTuple):
    """What kernels 1 and 2 leave; shapes in masks.py and chunks.py, those between order and tp flat. Kernels 3 to 5 do
    without gc, q2t, k2t and bt.
    """

    chunks: torch.Tensor
    sequences: torch.Tensor
    order: torch.Tensor
    gc: torch.Tensor | None
    q2t: torch.Tensor | None
    k2t: torch.Tensor | None
    bt: torch.Tensor | None
    tab: torch.Tensor
    dec: torch.Tensor
    tp: torch.Tensor


def padded(E: int) -> int:
    """E as a power of two, at least 4."""
    return max(4, 1 << (E - 1).bit_length())


def shapes(p):
    """Sizes that all kernels share, as keyword arguments."""
    return dict(H=p.H, HV=p.HV, E=p.E, C=C)


def count(p) -> int:
    return chunks.count(p.B, p.T, p.N, p.varlen)


@bound(gates_kernel)
def gates(p, states):
    return dict(
        EP=padded(p.E), HAS_Q2=p.has_q2, GATE=p.gate or "none", HAS_BETA=p.has_beta, DELTA=p.delta_rule, STATES=states,
        **shapes(p), **launch(p).gates,
    )  # fmt: skip


@bound(masks_kernel)
def masks(p):
    return dict(EP=padded(p.E), K=p.K, DELTA=p.delta_rule, **shapes(p), **launch(p).masks)


@bound(forward_kernel)
def forward_recurrence(p, keep):
    return dict(K=p.K, V=p.V, DELTA=p.delta_rule, KEEP=keep, **shapes(p), **launch(p).recurrence)


@bound(reverse_kernel)
def reverse_recurrence(p):
    return dict(K=p.K, V=p.V, DELTA=p.delta_rule, **shapes(p), **launch(p).recurrence)


@bound(state_gradients_kernel)
def partial_gradients(p):
    return dict(K=p.K, V=p.V, DELTA=p.delta_rule, **shapes(p), **launch(p).state_gradients)


@bound(mask_gradients_kernel)
def mask_gradients(p, key_blocks, decay_blocks):
    return dict(
        EP=padded(p.E), K=p.K, V=p.V, NKB=key_blocks, NDB=decay_blocks, DELTA=p.delta_rule, GATE=p.gate or "none",
        **shapes(p), **launch(p).mask_gradients,
    )  # fmt: skip


def keeps_gates(p) -> bool:
    """Whether gc, q2t, k2t and bt are kept for kernel 6. From 8 slices on they are made again there (0.05 ms for 4 x
    8192 tokens of 16 heads, against 50 MiB): kernel 5, which comes before, is where memory peaks.
    """
    return p.E < 8


def gate_sizes(p) -> tuple[int, int, int, int]:
    """Elements of gc, q2t, k2t and bt, which lie one behind another in one buffer."""
    values, keys, EP = p.HV * count(p), p.H * count(p), padded(p.E)
    return values * EP * C, keys * EP * C, keys * EP * C, values * C


def state_sizes(p) -> tuple[int, int]:
    """Elements of tab and dec, the same."""
    rows = p.HV * count(p) * p.E
    return rows * 3 * C, rows


def tables_like(sizes, device) -> torch.Tensor:
    """Uninitialised buffer of `gate_sizes` or of `state_sizes`."""
    return torch.empty(sum(sizes), dtype=torch.float32, device=device)


def masks_like(p, device) -> torch.Tensor:
    """Uninitialised tp."""
    return torch.empty(count(p), p.HV, 2, C, C, dtype=p.dtype, device=device)


def kept_like(p, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised y [B, T, HV, V], the tokens' residuals, and h [NC, HV, E, V, K], the state at the start of each
    chunk.
    """
    y = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=device)
    return y, torch.empty(count(p), p.HV, p.E, p.V, p.K, dtype=p.dtype, device=device)


def tables(p, of_chunks, of_gates, of_states, tp) -> Tables:
    """Names for the parts of the buffers."""
    gate_tables = (None,) * 4 if of_gates is None else of_gates.split_with_sizes(gate_sizes(p))
    return Tables(*of_chunks, *gate_tables, *of_states.split_with_sizes(state_sizes(p)), tp)


def fill_gates(p, q2, k2, g, beta, t, states=True):
    """Kernel 1: fills gc, q2t, k2t, bt, and with `states` tab and dec."""
    NC = count(p)
    gates(p, t.tab.device, states)(
        (NC * p.HV, 1, 1), q2, k2, g, beta, t.chunks, *((t.tab, t.dec) if states else (None, None)),
        t.gc, t.q2t, t.k2t, t.bt, p.scale, NC,
    )  # fmt: skip


def fill_masks(p, q, k, t):
    """Kernel 2: fills t.tp."""
    NC = count(p)
    masks(p, q.device)((NC, p.H, 1), q, k, t.gc, t.q2t, t.k2t, t.bt, t.chunks, t.tp, p.scale, NC)


def recur(p, q, k, v, t, state, o, y, h):
    """Kernel 3: fills o, and y and h where they are given; state [N, HV, E, K, V] goes from initial to final in place,
    None where there is none and none is wanted.
    """
    state = zero_state(p, q.device) if state is None else state
    if y is not None and not p.delta_rule:
        y.copy_(v)
    forward_recurrence(p, q.device, h is not None)(
        (p.N * p.HV * (p.V // launch(p).recurrence["BV"]), 1, 1),
        q, k, v, t.tp, t.tab, t.dec, t.chunks, t.sequences, t.order, state, o, y, h, count(p),
    )  # fmt: skip


def reverse(p, q, k, do, t, dstate, dw, dh):
    """Kernel 4: fills dw and dh; dstate goes from the gradient of the final state to that of the initial one in
    place, None as in `recur`.
    """
    dstate = zero_state(p, q.device) if dstate is None else dstate
    reverse_recurrence(p, q.device)(
        (p.N * p.HV * (p.V // launch(p).recurrence["BV"]), 1, 1),
        q, k, do, t.tp, t.tab, t.dec, t.chunks, t.sequences, t.order, dstate, dw, dh, count(p),
    )  # fmt: skip


def state_gradients(p, q, k, do, y, dw, h, dh, t):
    """Kernel 5: partial (dq, dk read, dk write [B, T, H, K], row sums [NB, NC, HV, 3, E, C], <S, dS'> [NB, NC, HV,
    E]).
    """
    NC, NB = count(p), p.K // launch(p).state_gradients["BK"]
    dq, dkr, dkw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    dtab, ddec = t.tab.new_empty(NB, t.tab.numel()), t.dec.new_empty(NB, t.dec.numel())
    partial_gradients(p, q.device)((NC, p.H, NB), q, k, do, y, dw, h, dh, t.tab, t.chunks, dq, dkr, dkw, dtab, ddec, NC)
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
    NC = count(p)
    dqs, dkr, dkw, dtab, ddec = parts
    mask_gradients(p, q.device, dtab.shape[0], ddec.shape[0])(
        (NC, p.H, 1), q, k, y, do, dw, t.q2t, t.k2t, t.bt, t.gc, dtab, ddec, t.chunks, dqs, dkr, dkw,
        *out, p.scale, NC,
    )  # fmt: skip


def zero_state(p, device) -> torch.Tensor:
    return torch.zeros(p.N, p.HV, p.E, p.K, p.V, dtype=torch.float32, device=device)


def state_from(p, given, wanted, device):
    """A state [N, HV, E, K, V] that a recurrence may change: a copy of the one given, else zeros if what it becomes is
    wanted, else None.
    """
    if given is not None:
        return given.clone()
    return zero_state(p, device) if wanted else None


def run_forward(fill_masks, recur, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep):
    q, k, v, q2, k2, g, beta = map(aligned, (q, k, v, q2, k2, g, beta))
    of_gates, of_states = (tables_like(sizes(p), q.device) for sizes in (gate_sizes, state_sizes))
    tp = masks_like(p, q.device)
    y, h = kept_like(p, q.device) if keep else (None, None)
    with current(q.device):
        t = tables(p, chunks.tables(p.B, p.T, cu_seqlens, q.device), of_gates, of_states, tp)
        fill_gates(p, q2, k2, g, beta, t)
        fill_masks(p, q, k, t)
        state = state_from(p, h0, p.output_final, q.device)
        o = torch.empty_like(v)
        recur(p, q, k, v, t, state, o, y, h)
    if not keep:
        return o, state if p.output_final else None, []
    saved = [of_states, tp, y, h, *([of_gates] if keeps_gates(p) else ())]
    return o, state if p.output_final else None, saved


def run_backward(reverse, state_gradients, finish, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    q, k, do = map(aligned, (q, k, do))
    of_states, tp, y, h, *rest = map(aligned, saved)
    of_gates = rest[0] if keeps_gates(p) else None
    with current(q.device):
        t = tables(p, chunks.tables(p.B, p.T, cu_seqlens, q.device), of_gates, of_states, tp)
        dstate = state_from(p, dht, p.has_initial, q.device)
        dw, dh = torch.empty_like(v), torch.empty_like(h)
        reverse(p, q, k, do, t, dstate, dw, dh)
        dh0 = None if h0 is None else dstate
        del dstate  # megabytes that the peak below need not carry
        parts = state_gradients(p, q, k, do, y, dw, h, dh, t)
        del h, dh
        if of_gates is None:
            t = tables(p, t[:3], tables_like(gate_sizes(p), q.device), of_states, tp)
            fill_gates(p, *map(aligned, (q2, k2, g, beta)), t, states=False)
        out = gradients_like(p, q, k, g, t)
        finish(p, q, k, y, do, dw, t, parts, out)
    slices = (None if q2 is None else out.dq2), (None if k2 is None else out.dk2)
    return out.dq, out.dk, dw, *slices, out.dg, (None if beta is None else out.dbeta), dh0


def saved_like(p, q, cu_seqlens):
    of_gates, of_states = (tables_like(sizes(p), q.device) for sizes in (gate_sizes, state_sizes))
    kept = [of_states, masks_like(p, q.device), *kept_like(p, q.device)]
    return [*kept, of_gates] if keeps_gates(p) else kept


def forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep):
    return run_forward(fill_masks, recur, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep)


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    return run_backward(reverse, state_gradients, finish, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht)
