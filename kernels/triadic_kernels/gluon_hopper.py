"""Back end "gluon_hopper": the six kernels of triton_chunk.py, all but the first in Gluon for compute capability 9.0.

Tiles are loaded whole, so a token that is not finite (q, k, v or gradient) reaches the last chunk of the document
packed before its own, through zero times infinity; finite tokens never do.
"""

from functools import lru_cache

import torch
import triton

from . import gluon_forward, gluon_mask_gradients, gluon_masks, gluon_reverse, gluon_state_gradients, triton_chunk
from .chunks import CHUNK as C
from .gluon_compat import descriptor

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


def table_descriptors(p, t):
    """TMA descriptors of tp [2C, C], of the read tables [2E, C] and of the write table [E, C] of a chunk."""
    rows = p.HV * t.chunks.shape[0]
    tab = t.tab, (rows * 3 * p.E, C)
    return (
        descriptor(t.tp, (rows * 2 * C, C), [2 * C, C]),
        descriptor(*tab, [2 * p.E, C], bits=32),
        descriptor(*tab, [p.E, C], bits=32),
    )


def masks(p, q, k, t):
    NC, R = t.chunks.shape[0], p.B * p.T
    gluon_masks.masks_kernel[(NC, p.H)](
        descriptor(q, (R, p.H * D), [C, D]), descriptor(k, (R, p.H * D), [C, D]),
        descriptor(t.tp, (p.HV * NC * 2 * C, C), [2 * C, C]), t.gc, t.q2t, t.k2t, t.bt, t.chunks, p.scale, NC,
        H=p.H, HV=p.HV, E=p.E, EP=triton_chunk.padded(p.E), C=C, K=D, DELTA=p.delta_rule, num_warps=4,
    )  # fmt: skip


def recur(p, q, k, v, t, state, o, y, h):
    NC = t.chunks.shape[0]
    BV, M, warps = TILES[p.E]
    R = p.B * p.T

    def keys(x):
        return descriptor(x, (R, p.H * D), [C, D])

    def values(x):
        return descriptor(x, (R, p.HV * D), [C, BV])

    keep = h is not None
    d_o = values(o)
    d_h = descriptor(h, (p.HV * NC * p.E, D, D), [M // BV, BV, D]) if keep else d_o
    gluon_forward.forward_kernel[(p.N * p.HV * (D // BV),)](
        keys(k), keys(q), values(v), *table_descriptors(p, t), d_o, d_h, values(y) if keep else d_o,
        t.dec, t.chunks, t.sequences, t.order, state, o, y if keep else o, NC,
        H=p.H, HV=p.HV, E=p.E, K=D, V=D, BV=BV, M=M, C=C, KEEP=keep, num_warps=warps,
    )  # fmt: skip


def reverse(p, q, k, do, t, dstate, dw, dh):
    NC = t.chunks.shape[0]
    BV, M, warps = TILES[p.E]
    R = p.B * p.T

    def keys(x):
        return descriptor(x, (R, p.H * D), [C, D])

    def values(x):
        return descriptor(x, (R, p.HV * D), [C, BV])

    d_dh = descriptor(dh, (p.HV * NC * p.E, D, D), [M // BV, BV, D])
    gluon_reverse.reverse_kernel[(p.N * p.HV * (D // BV),)](
        keys(k), keys(q), values(do), *table_descriptors(p, t), values(dw), d_dh,
        t.dec, t.chunks, t.sequences, t.order, dstate, dw, NC,
        H=p.H, HV=p.HV, E=p.E, K=D, V=D, BV=BV, M=M, C=C, num_warps=warps,
    )  # fmt: skip


@lru_cache
def processors(device_index: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device_index)["multiprocessor_count"]


def state_gradients(p, q, k, do, y, dw, h, dh, t):
    NC, R = t.chunks.shape[0], p.B * p.T
    dq, dkr, dkw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    dtab, ddec = t.tab.new_empty(1, *t.tab.shape), t.dec.new_empty(2, *t.dec.shape)

    def rows(x, heads):
        return descriptor(x, (R, heads * D), [C, D])

    def states(x):
        return descriptor(x, (p.HV * NC * p.E * D, D), [D, D])

    gluon_state_gradients.state_gradients_kernel[(min(NC * p.H, processors(q.device.index or 0)),)](
        rows(q, p.H), rows(k, p.H), rows(do, p.HV), rows(y, p.HV), rows(dw, p.HV), states(h), states(dh),
        t.tab, t.chunks, dq, dkr, dkw, dtab, ddec, NC,
        H=p.H, HV=p.HV, E=p.E, K=D, C=C, NS=2, REGISTERS=160, num_warps=4,
    )  # fmt: skip
    return dq, dkr, dkw, dtab, ddec


def finish(p, q, k, y, do, dw, t, parts, out):
    NC, R = t.chunks.shape[0], p.B * p.T
    dqs, dkr, dkw, dtab, ddec = parts

    def keys(x):
        return descriptor(x, (R, p.H * D), [C, D])

    def values(x):
        return descriptor(x, (R, p.HV * D), [C, D])

    gluon_mask_gradients.mask_gradients_kernel[(NC, p.H)](
        keys(q), keys(k), values(y), values(do), values(dw), keys(dqs), keys(dkr), keys(dkw), keys(out.dq),
        keys(out.dk),
        t.q2t, t.k2t, t.bt, t.gc, dtab, ddec, t.chunks, *out, p.scale, NC,
        H=p.H, HV=p.HV, E=p.E, EP=triton_chunk.padded(p.E), C=C, K=D, NDB=ddec.shape[0],
        DELTA=p.delta_rule, GATE=p.gate or "none", num_warps=4,
    )  # fmt: skip


saved_like = triton_chunk.saved_like


def forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep):
    return triton_chunk.run_forward(masks, recur, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep)


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    return triton_chunk.run_backward(
        reverse, state_gradients, finish, p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht
    )
