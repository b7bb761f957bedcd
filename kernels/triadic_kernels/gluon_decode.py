# ruff: noqa: RUF005 - Gluon compiles tuple sums, not unpacking
"""Back end "gluon_hopper" of `recurrent_triadic`: one token of every sequence, for compute capability 9.0.

The mathematics and the letters of decode.py. A tile is all E x K rows of BV columns of a state, 64 KiB. One program
per multiprocessor takes tile after tile: TMA brings the next two while one is in registers, from where it goes back to
its place in shared memory and, by TMA again, to memory. So loads and stores never wait for one another. On an H200, 16
heads, from 16 sequences on, a state moves at 0.86 to 0.92 of a copy's speed in float32 (decode.py: 0.80 to 0.86) and at
0.69 to 0.84 in bfloat16 (0.62 to 0.68); of one sequence at 0.57 (0.56) and 0.30 (0.33). Below E = 8 decode.py was
mostly the faster one.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from . import decode
from .gluon_compat import barrier, descriptor, new_barriers, tma_load, tma_store
from .launch import aligned, bound, current, processors

D = 128  # K and V
ROWS = 256  # of a tile that one TMA moves: the most it can
STAGES = 3  # tiles in shared memory; two were slower from 16 sequences on
# (E, bytes of a state entry) -> columns and warps of a program, measured fastest on an H200. A thread of four warps
# holds 128 numbers of a float32 tile; of a bfloat16 tile they would be 256, more than its registers.
TILES = {(8, 4): (16, 4), (8, 2): (32, 8)}


@gluon.jit
def load_tile(d_h0, full, tiles, stage, item, pred, V: gl.constexpr, BOXES: gl.constexpr, BYTES: gl.constexpr):
    """The tile of an item, in boxes of R rows, into its stage."""
    R: gl.constexpr = d_h0.block_shape[0]
    BV: gl.constexpr = d_h0.block_shape[1]
    bar = full.index(stage)
    mbarrier.expect(bar, BOXES * R * BV * BYTES, pred=pred)
    for b in gl.static_range(BOXES):
        row = (item // (V // BV) * BOXES + b) * R
        tma_load(d_h0, [row, item % (V // BV) * BV], bar, tiles.index(stage * BOXES + b), pred=pred)


@gluon.jit(do_not_specialize=["items"])
def recurrent_kernel(
    d_h0,  # [B * HV * E * K, V] in boxes [R, BV]
    d_ht,  # the same; may be h0
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, HV, V]
    q2,  # [B, H, E] float32
    k2,  # [B, H, E] float32
    g,  # [B, HV, E] or [B, HV] float32
    beta,  # [B, HV] float32
    o,  # [B, HV, V]
    scale,
    items,  # B * HV * (V / BV)
    H: gl.constexpr,
    HV: gl.constexpr,
    E: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    BYTES: gl.constexpr,
    GATE: gl.constexpr,
    HAS_BETA: gl.constexpr,
    DELTA: gl.constexpr,
):
    R: gl.constexpr = d_h0.block_shape[0]
    BV: gl.constexpr = d_h0.block_shape[1]
    BOXES: gl.constexpr = E * K // R
    LANES: gl.constexpr = BV * BYTES // 16  # along a row, 16 bytes each
    dtype: gl.constexpr = gl.float32 if BYTES == 4 else gl.bfloat16
    layout: gl.constexpr = gl.BlockedLayout([1, 16 // BYTES], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    tiles = gl.allocate_shared_memory(dtype, [STAGES * BOXES, R, BV], d_h0.layout)
    full = new_barriers(STAGES, 1)
    fence_async_shared()
    barrier()
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for i in gl.static_range(STAGES - 1):
        early = first + i * step
        load_tile(d_h0, full, tiles, i, early, early < items, V, BOXES, BYTES)
    r = gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, BV, layout=gl.SliceLayout(0, layout))
    n = 0
    for item in range(first, items, step):
        stage = n % STAGES
        i_nh = item // (V // BV)
        i_nk = i_nh // HV * H + i_nh % HV // (HV // H)
        i_v = item % (V // BV)
        # ---- what rows are multiplied by, before the tile is there
        b_k = gl.load(k + i_nk * K + r % K).to(gl.float32)
        b_q = gl.load(q + i_nk * K + r % K).to(gl.float32) * scale
        b_v = gl.load(v + i_nh * V + i_v * BV + c).to(gl.float32)
        decays = ()
        writes = ()
        reads = ()
        for b in gl.static_range(BOXES):
            e = b * (R // K) + r // K
            writes = writes + (b_k * gl.load(k2 + i_nk * E + e),)
            reads = reads + (b_q * gl.load(q2 + i_nk * E + e),)
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
        for b in gl.static_range(BOXES):
            s = tiles.index(stage * BOXES + b).load(layout).to(gl.float32)
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
        for b in gl.static_range(BOXES):
            s = S[b] + gl.expand_dims(writes[b], 1) * gl.expand_dims(b_v, 0)
            tiles.index(stage * BOXES + b).store(s.to(dtype))
            total = total + s * gl.expand_dims(reads[b], 1)
        fence_async_shared()
        barrier()
        for b in gl.static_range(BOXES):
            tma_store(d_ht, [(i_nh * BOXES + b) * R, i_v * BV], tiles.index(stage * BOXES + b))
        # ---- the stores of the tile before this one have left its stage, which is for the last of those to come
        tma.store_wait(BOXES)
        barrier()
        later = item + (STAGES - 1) * step
        load_tile(d_h0, full, tiles, (n + STAGES - 1) % STAGES, later, later < items, V, BOXES, BYTES)
        gl.store(o + i_nh * V + i_v * BV + c, gl.sum(total, 0))
        n += 1  # noqa: SIM113 - Gluon knows no enumerate
    tma.store_wait(0)


def unsupported(p) -> str | None:
    if p.device_type != "cuda" or p.capability != (9, 0):
        return "needs a CUDA device of compute capability 9.0"
    if p.T != 1 or p.varlen or p.B == 0:
        return "takes one token of each sequence of a batch, neither more tokens nor packed ones"
    if (p.K, p.V) != (D, D):
        return f"takes head dims K = V = {D}, not K={p.K}, V={p.V}"
    if p.state is None or not p.output_final:
        return "takes an initial state and gives the final one; pass initial_state and output_final_state=True"
    reason = decode.unsupported(p)
    if reason is None and (p.E, p.state.itemsize) not in TILES:
        return f"takes {', '.join(str(E) for E in sorted({E for E, _ in TILES}))} slices, not E={p.E}"
    return reason


@bound(recurrent_kernel)
def step(p):
    _, warps = TILES[p.E, p.state.itemsize]
    return dict(
        H=p.H, HV=p.HV, E=p.E, K=D, V=D, STAGES=STAGES, BYTES=p.state.itemsize, GATE=p.gate or "none",
        HAS_BETA=p.has_beta, DELTA=p.delta_rule, num_warps=warps,
    )  # fmt: skip


def recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, ht=None):
    """(o, ht). The final state goes to `ht`, which may be h0, or to a new tensor."""
    if ht is not None and aligned(ht) is not ht:
        o, state = recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens)
        return o, ht.copy_(state)
    o = torch.empty_like(v)
    ht = torch.empty_like(h0) if ht is None else ht
    q, k, v, q2, k2, g, beta, h0 = map(aligned, (q, k, v, q2, k2, g, beta, h0))
    columns, _ = TILES[p.E, p.state.itemsize]
    states = (p.B * p.HV * p.E * D, D), [ROWS, columns], 8 * p.state.itemsize
    items = p.B * p.HV * (D // columns)
    with current(q.device):
        step(p, q.device)(
            (min(items, processors(q.device.index or 0)), 1, 1), descriptor(h0, *states), descriptor(ht, *states),
            q, k, v, q2, k2, g, beta, o, p.scale, items,
        )  # fmt: skip
    return o, ht
