"""Back end "gluon_hopper": the six kernels of triton_chunk.py, with 3, 4 and 5 in Gluon for compute capability 9.0.

Tiles are loaded whole, so a token that is not finite (q, k, v or gradient) reaches the last chunk of the document
packed
before its own, through zero times infinity; finite tokens never do.
"""

import torch

from . import gluon_forward, gluon_reverse, gluon_state_gradients, triton_chunk
from .chunks import CHUNK as C
from .gluon_compat import descriptor
from .launch import bound
from .triton_chunk import count

# E -> columns of V per program, rows of a wgmma tile, warps: measured fastest on an H200
TILES = {1: (64, 64, 4), 2: (32, 64, 4), 4: (16, 64, 4), 8: (16, 64, 4), 16: (16, 128, 8)}
D = 128  # K and V


def unsupported(p) -> str | None:
    if p.device_type != "cuda" or p.capability != (9, 0):
        return "needs a CUDA device of compute capability 9.0"
    if p.dtype != torch.bfloat16:
        return f"takes bfloat16, not {p.dtype}"
    if (p.K, p.V) != (D, D):
        return f"takes head dims K = V = {D}, not K={p.K}, V={p.V}"
    if p.E not in TILES:
        return f"takes {', '.join(map(str, TILES))} slices, not E={p.E}"
    return None


def constants(p):
    return dict(H=p.H, HV=p.HV, E=p.E, K=D, C=C)


def tiles(p):
    BV, M, warps = TILES[p.E]
    return dict(V=D, BV=BV, M=M, num_warps=warps, **constants(p))


@bound(gluon_forward.forward_kernel)
def forward_recurrence(p, keep):
    return dict(KEEP=keep, **tiles(p))


@bound(gluon_reverse.reverse_kernel)
def reverse_recurrence(p):
    return tiles(p)


@bound(gluon_state_gradients.state_gradients_kernel)
def partial_gradients(p):
    return dict(NS=2, REGISTERS=160, num_warps=4, **constants(p))


def rows(x, p, heads, columns=D):
    """TMA descriptor of q, k, v, ...: a chunk's tokens, so many columns of one head."""
    return descriptor(x, (p.B * p.T, heads * D), [C, columns])


def table_descriptors(p, t, NC):
    """TMA descriptors of tp [2C, C], of the read tables [2E, C] and of the write table [E, C] of a chunk."""
    n = p.HV * NC
    tab = t.tab, (n * 3 * p.E, C)
    return (
        descriptor(t.tp, (n * 2 * C, C), [2 * C, C]),
        descriptor(*tab, [2 * p.E, C], bits=32),
        descriptor(*tab, [p.E, C], bits=32),
    )


def recur(p, q, k, v, t, state, o, y, h):
    NC, keep = count(p), h is not None
    BV, M, _ = TILES[p.E]
    d_o = rows(o, p, p.HV, BV)
    d_h = descriptor(h, (p.HV * NC * p.E, D, D), [M // BV, BV, D]) if keep else d_o
    forward_recurrence(p, q.device, keep)(
        (p.N * p.HV * (D // BV), 1, 1),
        rows(k, p, p.H), rows(q, p, p.H), rows(v, p, p.HV, BV), *table_descriptors(p, t, NC), d_o, d_h,
        rows(y, p, p.HV, BV) if keep else d_o, t.dec, t.chunks, t.sequences, t.order, state, o, y if keep else o, NC,
    )  # fmt: skip


def reverse(p, q, k, do, t, dstate, dw, dh):
    NC = count(p)
    BV, M, _ = TILES[p.E]
    reverse_recurrence(p, q.device)(
        (p.N * p.HV * (D // BV), 1, 1),
        rows(k, p, p.H), rows(q, p, p.H), rows(do, p, p.HV, BV), *table_descriptors(p, t, NC), rows(dw, p, p.HV, BV),
        descriptor(dh, (p.HV * NC * p.E, D, D), [M // BV, BV, D]),
        t.dec, t.chunks, t.sequences, t.order, dstate, dw, NC,
    )  # fmt: skip


def state_gradients(p, q, k, do, y, dw, h, dh, t):
    NC = count(p)
    dq, dkr, dkw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    dtab, ddec = t.tab.new_empty(1, t.tab.numel()), t.dec.new_empty(2, t.dec.numel())
    states = (p.HV * NC * p.E * D, D), [D, D]
    partial_gradients(p, q.device)(
        (NC, p.H, 1),
        rows(q, p, p.H), rows(k, p, p.H), rows(do, p, p.HV), rows(y, p, p.HV), rows(dw, p, p.HV),
        descriptor(h, *states), descriptor(dh, *states), t.tab, t.chunks, dq, dkr, dkw, dtab, ddec, NC,
    )  # fmt: skip
    return dq, dkr, dkw, dtab, ddec


saved_like = triton_chunk.saved_like


def forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep):
    return triton_chunk.run_forward(recur, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep)


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    return triton_chunk.run_backward(
        reverse, state_gradients, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht
    )
