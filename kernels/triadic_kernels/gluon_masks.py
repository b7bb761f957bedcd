"""Kernel 2 in Gluon for Hopper (wgmma, TMA): K = 128, bfloat16; the mathematics and letters of masks.py.

One program per (chunk, key head). R and R' are summed slice by slice in the registers of Q K^T and K K^T, with the
exponent held at 0 above the diagonal, where these are zero. The inverse is found in blocks of 16 by substitution in
float32, then merged twice by products whose factors are bfloat16 pairs (the number, and what rounding left of it):
three products each, exact to about 2^-16 of the factors. (With keys all alike and beta near 2 it is good to 4e-4.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from .gluon_compat import barrier, new_barrier, reinterpret, tile_layout, tma_load, tma_store, to_bf16, to_f32

ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
NARROW, WIDE = (gl.constexpr(tile_layout(columns, 16, 2)) for columns in (16, 32))


@gluon.constexpr_function
def accumulator(N):
    """Registers of a product of N columns, four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])


@gluon.jit
def ready():
    """What all threads stored to shared memory may be read by wgmma and TMA."""
    fence_async_shared()
    barrier()


@gluon.jit
def split(x):
    """x as a bfloat16 number and what rounding left of it."""
    high = to_bf16(x)
    return high, to_bf16(x - to_f32(high))


@gluon.jit
def put(high, low, tiles, i: gl.constexpr):
    """A pair, stored to two of the tiles [N, C, columns] in shared memory."""
    tiles.index(i).store(high)
    tiles.index(i + 1).store(low)


@gluon.jit
def product(high, low, tiles, i: gl.constexpr):
    """(high + low) times the first K rows of pair i, float32 [C, N]; high and low [C, K] are in registers."""
    C: gl.constexpr = high.shape[0]
    K: gl.constexpr = high.shape[1]
    N: gl.constexpr = tiles.shape[2]
    result: gl.constexpr = accumulator(N)
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    high = gl.convert_layout(high, operand, assert_trivial=True)
    low = gl.convert_layout(low, operand, assert_trivial=True)
    zero = gl.zeros([C, N], gl.float32, layout=result)
    first = tiles.index(i).slice(0, K, 0)
    x = mma(high, first, zero, use_acc=False, is_async=True)
    x = mma(high, tiles.index(i + 1).slice(0, K, 0), x, is_async=True)
    x = mma(low, first, x, is_async=True)
    return mma_wait(0, deps=[x])


@gluon.jit
def column_block(x, chosen, N: gl.constexpr):
    """The block of N columns of x [C, C] that `chosen` [C, C] leaves of each row: [C, N]."""
    C: gl.constexpr = x.shape[0]
    x = gl.sum(gl.where(chosen, x, 0.0).reshape([C, C // N, N]), 1)
    return gl.convert_layout(x, accumulator(N), assert_trivial=True)


@gluon.jit
def in_columns(x, chosen):
    """x [C, N] in the block of N columns that `chosen` [C, C] names for each row, zero elsewhere: [C, C]."""
    C: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    zero = gl.zeros([C, C], x.dtype, layout=accumulator(C))
    parted = zero.reshape([C, C // N, N])
    parts: gl.constexpr = gl.SliceLayout(1, parted.type.layout)
    x, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(x, parts, assert_trivial=True), 1), parted)
    return gl.where(chosen, gl.convert_layout(x.reshape([C, C]), zero.type.layout, assert_trivial=True), zero)


@gluon.jit
def inverse_16(blocks, f_s, columns: gl.constexpr):
    """The inverses of I + each of the strictly lower blocks [C, 16], float32 [C, 16].

    Forward substitution, a thread for each column of a block; f_s float32 [16, C / 16, 16] is shared memory.
    """
    C: gl.constexpr = blocks.shape[0]
    NB: gl.constexpr = C // 16
    cubes = blocks.reshape([NB, 16, 16])  # [block, i, j]
    cube: gl.constexpr = cubes.type.layout
    f_s.store(cubes.permute([1, 0, 2]))
    barrier()
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, columns)))[None, None, :]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, columns)))[None, :, None]
    x = gl.where(i == c, 1.0, 0.0) + gl.zeros([NB, 16, 16], gl.float32, layout=columns)  # [block, column, i]
    for n in gl.static_range(1, 16):
        row = f_s.slice(n, 1, 0).permute([1, 0, 2]).load(columns)  # [block, 1, j]
        y = gl.sum(gl.sum((row * x).reshape([NB, 16, 4, 4]), 3), 2)  # [block, column], four sums at a time
        y = gl.convert_layout(y, gl.SliceLayout(2, columns), assert_trivial=True)
        x = gl.where(i == n, x - gl.expand_dims(y, 2), x)
    barrier()  # every warp has read the rows
    f_s.store(x.permute([2, 0, 1]))
    barrier()
    x = f_s.permute([1, 0, 2]).load(cube).reshape([C, 16])
    return gl.convert_layout(x, accumulator(16), assert_trivial=True)


@gluon.jit
def unit_lower_inverse(l, r, s, narrow, wide, f_s, columns: gl.constexpr):
    """(I + L)^-1 for a strictly lower L [C, C]: blocks of 16 by substitution, then of 32 and of 64, where the inverse
    of [[A, 0], [M, B]] is [[A^-1, 0], [-B^-1 M A^-1, B^-1]].

    Shared memory for what wgmma reads: narrow [8, C, 16] and wide [4, C, C / 2]; f_s float32 [16, C / 16, 16]. Between
    two uses of the same memory every warp passes a barrier.
    """
    C: gl.constexpr = l.shape[0]
    inside = r // 16 == s // 16
    left_16 = (r // 32 == s // 32) & (r // 16 > s // 16)
    left_32 = r // 32 > s // 32
    high, low = split(column_block(l, left_16, 16))
    put(high, low, narrow, 4)
    high, low = split(column_block(l, left_32, C // 2))
    put(high, low, wide, 2)
    x = inverse_16(column_block(l, inside, 16), f_s, columns)
    high, low = split(x)
    put(high, low, narrow, 6)
    ready()
    high, low = split(product(in_columns(high, inside), in_columns(low, inside), narrow, 4))
    y = product(in_columns(high, left_16), in_columns(low, left_16), narrow, 6)
    x = in_columns(x, inside) - in_columns(y, left_16)  # in blocks of 32
    high, low = split(x)
    put(column_block(high, s < C // 2, C // 2), column_block(low, s < C // 2, C // 2), wide, 0)
    high, low = split(product(high, low, wide, 2))
    ready()
    return x - in_columns(product(high, low, wide, 0), left_32)


@gluon.jit
def slice_products(qk, kk, gc_s, k2_s, q2_s, bk_s, E: gl.constexpr, DELTA: gl.constexpr, layout: gl.constexpr):
    """Q K^T * R' diag(beta) and K K^T * R diag(beta) [C, C]."""
    p = gl.zeros_like(qk)
    l = gl.zeros_like(qk)
    for e in range(E):
        row = gc_s.index(e).permute([1, 0]).load(layout)  # [C, 1]
        decay = gl.exp2(gl.minimum(row - gc_s.index(e).load(layout), 0.0))
        write = decay * bk_s.index(e).load(layout)
        p = p + qk * write * q2_s.index(e).permute([1, 0]).load(layout)
        if DELTA:
            l = l + kk * write * k2_s.index(e).permute([1, 0]).load(layout)
    return p, l


@gluon.jit(do_not_specialize=["NC"])
def masks_kernel(
    d_q, d_k, d_tp, p_gc, p_q2t, p_k2t, p_bt, p_ch, scale, NC,
    H: gl.constexpr, HV: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, C: gl.constexpr, K: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    NW: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = accumulator(C)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    columns: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [NW, 1, 1], [2, 1, 0])
    table: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [NW, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    i_c = gl.program_id(0) // H
    i_h = gl.program_id(0) % H
    row0 = gl.load(p_ch + i_c * 3 + 1)
    rows = gl.load(p_ch + i_c * 3 + 2)
    if rows == 0:
        return
    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    tp_s = gl.allocate_shared_memory(gl.bfloat16, [2 * C, C], d_tp.layout)
    narrow = reinterpret(q_s, gl.bfloat16, [8, C, 16], NARROW)
    f_s = reinterpret(q_s, gl.float32, [64, C // 16, 16], ROWS).slice(0, 16, 0)
    wide = reinterpret(k_s, gl.bfloat16, [4, C, C // 2], WIDE)
    gc_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    k2_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    q2_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    bk_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    bar = new_barrier(1)
    ready()
    mbarrier.expect(bar, 2 * C * K * 2)
    tma_load(d_q, [row0, i_h * K], bar, q_s)
    tma_load(d_k, [row0, i_h * K], bar, k_s)
    t = gl.arange(0, C, layout=gl.SliceLayout(0, table))
    o = gl.arange(0, E, layout=gl.SliceLayout(1, table))[:, None] * C + t[None, :]
    i_kc = i_c.to(gl.int64) * H + i_h
    k2 = gl.load(p_k2t + i_kc * (EP * C) + o)
    reinterpret(k2_s, gl.float32, [E, C], plain).store(k2)
    reinterpret(q2_s, gl.float32, [E, C], plain).store(gl.load(p_q2t + i_kc * (EP * C) + o))
    r = gl.arange(0, C, layout=gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, layout))[None, :]
    zero = gl.zeros([C, C], gl.float32, layout=layout)
    mbarrier.wait(bar, 0)
    qk = mma(q_s, k_s.permute([1, 0]), zero, use_acc=False, is_async=True)
    kk = zero
    if DELTA:
        kk = mma(k_s, k_s.permute([1, 0]), zero, use_acc=False, is_async=True)
    qk, kk = mma_wait(0, deps=[qk, kk])
    qk = gl.where((r >= s) & (r < rows), scale * qk, 0.0)
    kk = gl.where((r > s) & (r < rows), kk, 0.0)
    for j in range(HV // H):
        i_hc = i_c.to(gl.int64) * HV + i_h * (HV // H) + j
        reinterpret(gc_s, gl.float32, [E, C], plain).store(gl.load(p_gc + i_hc * (EP * C) + o))
        reinterpret(bk_s, gl.float32, [E, C], plain).store(k2 * gl.load(p_bt + i_hc * C + t)[None, :])
        tma.store_wait(0)
        barrier()  # and every warp has read q and k
        p, l = slice_products(qk, kk, gc_s, k2_s, q2_s, bk_s, E, DELTA, layout)
        p = to_bf16(p)
        inverse = gl.where(r == s, 1.0, 0.0)
        if DELTA:
            inverse = unit_lower_inverse(l, r, s, narrow, wide, f_s, columns)
        inverse = to_bf16(gl.where((r < rows) & (s < rows), inverse, 0.0))
        tp_s.slice(0, C, 0).store(inverse)
        ready()
        pt = mma(gl.convert_layout(p, operand, assert_trivial=True), tp_s.slice(0, C, 0), zero,
                 use_acc=False, is_async=True)  # fmt: skip
        tp_s.slice(C, C, 0).store(to_bf16(mma_wait(0, deps=[pt])))
        ready()
        tma_store(d_tp, [(i_c * HV + i_h * (HV // H) + j) * 2 * C, 0], tp_s)
    tma.store_wait(0)
