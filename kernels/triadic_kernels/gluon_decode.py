# ruff: noqa: RUF005 - Gluon compiles tuple sums, not unpacking
"""Back end "gluon_hopper" of `recurrent_triadic` for one token: K = V = 128, compute capability 9.0.

The mathematics and letters of decode.py. One program per multiprocessor takes tile after tile of a state, all E x K
rows of BV value columns, 64 KiB: TMA brings the next two while one is computed in registers, goes back to the shared
memory it came from, and from there to memory. So loads and stores never wait for one another.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from . import decode
from .gluon_compat import barrier, descriptor, new_barriers, tma_load, tma_store
from .gluon_hopper import processors
from .launch import aligned, bound, current

D = 128  # K and V
TILE_BYTES = 64 << 10
STAGES = 3


@gluon.jit
def load_tile(d_h0, full, tiles, stage, item, pred, BV: gl.constexpr, V: gl.constexpr, NB: gl.constexpr,
              R: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """A tile, in boxes of R rows."""
    bar = full.index(stage)
    mbarrier.expect(bar, NB * R * BV * BYTES, pred=pred)
    for b in gl.static_range(NB):
        row = (item // (V // BV) * NB + b) * R
        tma_load(d_h0, [row, item % (V // BV) * BV], bar, tiles.index(stage * NB + b), pred=pred)


@gluon.jit(do_not_specialize=["items"])
def recurrent_kernel(
    d_h0, d_ht, q, k, v, q2, k2, g, beta, o, scale, items,
    H: gl.constexpr, HV: gl.constexpr, E: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    R: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
    HAS_Q2: gl.constexpr, GATE: gl.constexpr, HAS_BETA: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    NW: gl.constexpr = gl.num_warps()
    NB: gl.constexpr = E * K // R
    VEC: gl.constexpr = 16 // BYTES
    LANES: gl.constexpr = BV // VEC  # along a row
    layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // LANES, LANES], [NW, 1], [1, 0])
    dtype: gl.constexpr = gl.float32 if BYTES == 4 else gl.bfloat16
    tiles = gl.allocate_shared_memory(dtype, [STAGES * NB, R, BV], d_h0.layout)
    full = new_barriers(STAGES, 1)
    fence_async_shared()
    barrier()
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for i in gl.static_range(STAGES - 1):
        early = first + i * step
        load_tile(d_h0, full, tiles, i, early, early < items, BV, V, NB, R, BYTES)
    r = gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, BV, layout=gl.SliceLayout(0, layout))
    n = 0
    for item in range(first, items, step):
        stage = n % STAGES
        i_v = item % (V // BV)
        i_nh = item // (V // BV)
        i_nk = i_nh // HV * H + i_nh % HV // (HV // H)
        # ---- what the rows are multiplied by, before the tile has come
        b_k = gl.load(k + i_nk * K + r % K).to(gl.float32)
        b_q = gl.load(q + i_nk * K + r % K).to(gl.float32) * scale
        b_v = gl.load(v + i_nh * V + i_v * BV + c).to(gl.float32)
        decays = ()
        writes = ()
        reads = ()
        for b in gl.static_range(NB):
            e = b * (R // K) + r // K
            if HAS_Q2:
                writes = writes + (b_k * gl.load(k2 + i_nk * E + e),)
                reads = reads + (b_q * gl.load(q2 + i_nk * E + e),)
            else:
                writes = writes + (b_k,)
                reads = reads + (b_q,)
            if GATE == "slice":
                decays = decays + (gl.exp(gl.load(g + i_nh * E + e)),)
            elif GATE == "head":
                decays = decays + (gl.exp(gl.load(g + i_nh + r * 0)),)
        if HAS_BETA:
            b_beta = gl.load(beta + i_nh)
        # ---- the state: decayed, read with k, written, read with q
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        total = gl.zeros([R, BV], gl.float32, layout=layout)
        S = ()
        for b in gl.static_range(NB):
            s = tiles.index(stage * NB + b).load(layout).to(gl.float32)
            if GATE != "none":
                s = s * gl.expand_dims(decays[b], 1)
            if DELTA:
                total = total + s * gl.expand_dims(writes[b], 1)
            S = S + (s,)
        if DELTA:
            b_v = b_v - gl.sum(total, 0)
        if HAS_BETA:
            b_v = b_v * b_beta
        total = gl.zeros([R, BV], gl.float32, layout=layout)
        for b in gl.static_range(NB):
            s = S[b] + gl.expand_dims(writes[b], 1) * gl.expand_dims(b_v, 0)
            tiles.index(stage * NB + b).store(s.to(dtype))
            total = total + s * gl.expand_dims(reads[b], 1)
        fence_async_shared()
        barrier()
        for b in gl.static_range(NB):
            tma_store(d_ht, [(i_nh * NB + b) * R, i_v * BV], tiles.index(stage * NB + b))
        # ---- the place of the tile before this one, whose stores have left it, is for the next but one
        tma.store_wait(NB)
        barrier()
        later = item + (STAGES - 1) * step
        load_tile(d_h0, full, tiles, (n + STAGES - 1) % STAGES, later, later < items, BV, V, NB, R, BYTES)
        gl.store(o + i_nh * V + i_v * BV + c, gl.sum(total, 0))
        n += 1  # noqa: SIM113 - Gluon knows no enumerate
    tma.store_wait(0)


def columns(E: int, state_bytes: int) -> int:
    return min(D, TILE_BYTES // (E * D * state_bytes))


def unsupported(p) -> str | None:
    if p.device_type != "cuda" or p.capability != (9, 0):
        return "needs a CUDA device of compute capability 9.0"
    if p.T != 1 or p.varlen:
        return "takes one token of every sequence of a batch"
    if (p.K, p.V) != (D, D):
        return f"takes head dims K = V = {D}, not K={p.K}, V={p.V}"
    if p.E not in (1, 2, 4, 8):
        return f"takes 1, 2, 4, 8 slices, not E={p.E}"
    if not p.has_initial:
        return "takes a state to begin with"
    return decode.unsupported(p)


@bound(recurrent_kernel)
def step(p, state_bytes: int):
    return dict(
        H=p.H, HV=p.HV, E=p.E, K=D, V=D, BV=columns(p.E, state_bytes), R=min(256, p.E * D), STAGES=STAGES,
        BYTES=state_bytes, HAS_Q2=p.has_q2, GATE=p.gate or "none", HAS_BETA=p.has_beta, DELTA=p.delta_rule, num_warps=8,
    )  # fmt: skip


def recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, ht=None):
    """(o, ht). The final state goes to `ht`, which may be h0, or to a new tensor if p.output_final."""
    if h0.dtype not in (torch.float32, torch.bfloat16) or (ht is None and not p.output_final):
        return decode.recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, ht)
    if ht is not None and aligned(ht) is not ht:
        o, state = recurrent(p._replace(output_final=True), q, k, v, q2, k2, g, beta, h0, cu_seqlens)
        return o, ht.copy_(state)
    o = torch.empty_like(v)
    ht = torch.empty_like(h0) if ht is None else ht
    q, k, v, q2, k2, g, beta, h0 = map(aligned, (q, k, v, q2, k2, g, beta, h0))
    BV, rows = columns(p.E, h0.itemsize), (p.B * p.HV * p.E * D, D)
    box = [min(256, p.E * D), BV]
    items = p.B * p.HV * (D // BV)
    with current(q.device):
        step(p, q.device, h0.itemsize)(
            (min(items, processors(q.device.index or 0)), 1, 1),
            descriptor(h0, rows, box, 8 * h0.itemsize), descriptor(ht, rows, box, 8 * h0.itemsize),
            q, k, v, q2, k2, g, beta, o, p.scale, items,
        )  # fmt: skip
    return o, ht
