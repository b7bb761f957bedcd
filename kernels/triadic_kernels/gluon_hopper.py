"""Back end "gluon_hopper": the six kernels of triton_chunk.py, all but the first in Gluon for compute capability 9.0.

Tiles are loaded whole, so a token that is not finite (q, k, v or gradient) reaches the last chunk of the document
packed before its own, or of the sequence before in a batch of lengths that 64 does not divide, and all that follows
from that chunk (its final state and gradients), through zero times infinity; finite tokens never do.
"""

import torch

from . import gluon_forward, gluon_mask_gradients, gluon_masks, gluon_reverse, gluon_state_gradients, triton_chunk
from .chunks import CHUNK as C
from .gluon_compat import descriptor
from .launch import bound, processors
from .triton_chunk import count, padded

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
    if p.B * p.T == 0:
        return "takes at least one token"
    if p.E not in TILES:
        return f"takes {', '.join(map(str, TILES))} slices, not E={p.E}"
    return None


def constants(p):
    return dict(H=p.H, HV=p.HV, E=p.E, K=D, C=C)


def tiles(p):
    BV, M, warps = TILES[p.E]
    return dict(V=D, BV=BV, M=M, num_warps=warps, **constants(p))


@bound(gluon_masks.masks_kernel)
def masks(p):
    cap = dict(maxnreg=168) if p.HV == p.H else {}  # for three programs on a multiprocessor
    return dict(EP=padded(p.E), DELTA=p.delta_rule, num_warps=4, **cap, **constants(p))


@bound(gluon_forward.forward_kernel)
def forward_recurrence(p, keep, shared):
    return dict(KEEP=keep, SHARED=shared, WANTED=p.output_final, **tiles(p))


@bound(gluon_reverse.reverse_kernel)
def reverse_recurrence(p, shared):
    return dict(SHARED=shared, WANTED=p.has_initial, **tiles(p))


@bound(gluon_state_gradients.state_gradients_kernel)
def partial_gradients(p):
    return dict(NS=2, REGISTERS=160, num_warps=4, **constants(p))


@bound(gluon_mask_gradients.mask_gradients_kernel)
def mask_gradients(p, decay_blocks):
    return dict(
        EP=padded(p.E), NDB=decay_blocks, DELTA=p.delta_rule, GATE=p.gate or "none", num_warps=4, **constants(p)
    )  # fmt: skip


def of_keys(p):
    """How TMA descriptors see q, k and their gradients: a chunk's tokens of one head at a time."""
    return (p.B * p.T, p.H * D), [C, D]


def of_values(p, columns=D):
    """The same for v, o, y and their gradients, so many columns of a head at a time."""
    return (p.B * p.T, p.HV * D), [C, columns]


def of_states(p, NC):
    """The same for h and dh in kernels 3 and 4."""
    BV, M, _ = TILES[p.E]
    return (p.HV * NC * p.E, D, D), [M // BV, BV, D]


def table_descriptors(p, t, NC):
    """TMA descriptors of tp [2C, C], of the read tables [2E, C] and of the write table [E, C] of a chunk."""
    n = p.HV * NC
    tab = t.tab, (n * 3 * p.E, C)
    return (
        descriptor(t.tp, (n * 2 * C, C), [2 * C, C]),
        descriptor(*tab, [2 * p.E, C], bits=32),
        descriptor(*tab, [p.E, C], bits=32),
    )


def fill_masks(p, q, k, t):
    NC, keys = count(p), of_keys(p)
    masks(p, q.device)(
        (NC * p.H, 1, 1), descriptor(q, *keys), descriptor(k, *keys),
        descriptor(t.tp, (p.HV * NC * 2 * C, C), [2 * C, C]),
        t.gc, t.q2t, t.k2t, t.bt, t.chunks, p.scale, NC,
    )  # fmt: skip


def zero_state(p, device):
    """One state [E, K, V] of zeros: kernels 3 and 4 keep fewer registers if they load what they start from."""
    return torch.zeros(p.E, D, D, dtype=torch.float32, device=device)


def recur(p, q, k, v, t, state, o, y, h):
    NC, keep, BV = count(p), h is not None, TILES[p.E][0]
    shared = state is None
    state = zero_state(p, q.device) if shared else state
    keys, values = of_keys(p), of_values(p, BV)
    d_o = descriptor(o, *values)
    forward_recurrence(p, q.device, keep, shared)(
        (p.N * p.HV * (D // BV), 1, 1),
        descriptor(k, *keys), descriptor(q, *keys), descriptor(v, *values), *table_descriptors(p, t, NC), d_o,
        descriptor(h, *of_states(p, NC)) if keep else d_o, descriptor(y, *values) if keep else d_o,
        t.dec, t.chunks, t.sequences, t.order, state, o, y if keep else o, NC,
    )  # fmt: skip


def reverse(p, q, k, do, t, dstate, dw, dh):
    NC, BV = count(p), TILES[p.E][0]
    shared = dstate is None
    dstate = zero_state(p, q.device) if shared else dstate
    keys, values = of_keys(p), of_values(p, BV)
    reverse_recurrence(p, q.device, shared)(
        (p.N * p.HV * (D // BV), 1, 1),
        descriptor(k, *keys), descriptor(q, *keys), descriptor(do, *values), *table_descriptors(p, t, NC),
        descriptor(dw, *values), descriptor(dh, *of_states(p, NC)),
        t.dec, t.chunks, t.sequences, t.order, dstate, dw, NC,
    )  # fmt: skip


def state_gradients(p, q, k, do, y, dw, h, dh, t):
    NC = count(p)
    dq, dkr, dkw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    dtab, ddec = t.tab.new_empty(1, t.tab.numel()), t.dec.new_empty(2, t.dec.numel())
    keys, values, states = of_keys(p), of_values(p), ((p.HV * NC * p.E * D, D), [D, D])
    partial_gradients(p, q.device)(
        (min(NC * p.H, processors(q.device.index or 0)), 1, 1),
        descriptor(q, *keys), descriptor(k, *keys), descriptor(do, *values), descriptor(y, *values),
        descriptor(dw, *values), descriptor(h, *states), descriptor(dh, *states),
        t.tab, t.chunks, dq, dkr, dkw, dtab, ddec, NC,
    )  # fmt: skip
    return dq, dkr, dkw, dtab, ddec


def finish(p, q, k, y, do, dw, t, parts, out):
    NC = count(p)
    dqs, dkr, dkw, dtab, ddec = parts
    keys, values = of_keys(p), of_values(p)
    mask_gradients(p, q.device, ddec.shape[0])(
        (NC * p.H, 1, 1),
        descriptor(q, *keys), descriptor(k, *keys), descriptor(y, *values), descriptor(do, *values),
        descriptor(dw, *values), *(descriptor(x, *keys) for x in (dqs, dkr, dkw, out.dq, out.dk)),
        t.q2t, t.k2t, t.bt, t.gc, dtab, ddec, t.chunks, *out, p.scale, NC,
    )  # fmt: skip


saved_like = triton_chunk.saved_like


def forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep):
    return triton_chunk.run_forward(fill_masks, recur, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep)


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    return triton_chunk.run_backward(
        reverse, state_gradients, finish, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht
    )
