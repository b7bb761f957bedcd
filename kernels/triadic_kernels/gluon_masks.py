"""Kernel 2 in Gluon for Hopper (wgmma, TMA): K = 128, bfloat16; the mathematics and letters of masks.py.

One program per (chunk, key head). R and R' are summed slice by slice in the registers of Q K^T and K K^T, with the
exponent held at 0 above the diagonal, where these are zero. The inverse is that of the diagonal
blocks of 16, one for each warp in registers, then of the whole by a series in blocks that ends after four terms. The
factors of all its products are bfloat16 pairs (the number, and what rounding left of it): three products each, exact to
about 2^-16 of the factors. (With keys all alike and beta near 2 the powers cancel, and 1e-2 of it may be lost.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from .gluon_compat import barrier, new_barrier, reinterpret, tma_load, tma_store, to_bf16, to_f32


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
def put(x, pair):
    """The split of x, also stored to pair [2, C, C] in shared memory."""
    high, low = split(x)
    pair.index(0).store(high)
    pair.index(1).store(low)
    return high, low


@gluon.jit
def product(high, low, pair, zero, operand: gl.constexpr):
    """(high + low) pair, float32 [C, C]."""
    high = gl.convert_layout(high, operand, assert_trivial=True)
    low = gl.convert_layout(low, operand, assert_trivial=True)
    x = mma(high, pair.index(0), zero, use_acc=False, is_async=True)
    x = mma(high, pair.index(1), x, is_async=True)
    x = mma(low, pair.index(0), x, is_async=True)
    return mma_wait(0, deps=[x])


@gluon.jit
def block_product(a, b_t, zero):
    """(high + low) b for the blocks [C/16, 16, 16] of two block-diagonal matrices, in each warp's registers; a and the
    transpose of b as pairs in the layout of the result.
    """
    layout: gl.constexpr = zero.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    high = gl.convert_layout(a[0], left, assert_trivial=True)
    low = gl.convert_layout(a[1], left, assert_trivial=True)
    b_high = gl.convert_layout(b_t[0].permute([0, 2, 1]), right, assert_trivial=True)
    b_low = gl.convert_layout(b_t[1].permute([0, 2, 1]), right, assert_trivial=True)
    return mma_v2(low, b_high, mma_v2(high, b_low, mma_v2(high, b_high, zero)))


@gluon.jit
def block_inverse(l, r, s, C: gl.constexpr):
    """(I + L)^-1 for the diagonal blocks of 16 of a strictly lower L [C, C], zero elsewhere.

    One block for each warp: every product is made with its transpose, which is what the next one takes as its second
    factor. A Neumann series in blocks of 8 (L^8 = 0), then a merge.
    """
    NB: gl.constexpr = C // 16
    whole: gl.constexpr = l.type.layout
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1, 1], instr_shape=[1, 16, 8]
    )
    same = (r // 16 == s // 16).reshape([NB, 16, NB, 16])
    x = gl.sum(gl.where(same, l.reshape([NB, 16, NB, 16]), 0.0), 2)
    x = gl.convert_layout(x, layout, assert_trivial=True)
    x_t = gl.convert_layout(x.permute([0, 2, 1]), layout)
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    j = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)
    inside = i // 8 == j // 8
    eye = gl.where(i == j, 1.0, 0.0)
    zero = gl.zeros([NB, 16, 16], gl.float32, layout=layout)
    l_8 = gl.where(inside, x, 0.0)
    l_8t = gl.where(inside, x_t, 0.0)
    off_t = split(gl.where(inside, 0.0, x_t))
    a = split(l_8)
    a_t = split(l_8t)
    x = block_product(a, a_t, zero)
    x_t = block_product(a_t, a, zero)
    a_2 = split(x)
    a_2t = split(x_t)
    x = eye - l_8 + x - block_product(a, a_2t, zero)
    x_t = eye - l_8t + x_t - block_product(a_t, a_2, zero)
    a_4 = split(block_product(a_2, a_2t, zero))
    a_4t = split(block_product(a_2t, a_2, zero))
    x = x + block_product(split(x), a_4t, zero)
    x_t = x_t + block_product(split(x_t), a_4, zero)
    x = x - block_product(split(block_product(split(x), off_t, zero)), split(x_t), zero)
    four: gl.constexpr = l.reshape([NB, 16, NB, 16]).type.layout
    x = gl.convert_layout(x, gl.SliceLayout(2, four), assert_trivial=True)
    x = gl.where(same, gl.expand_dims(x, 2), 0.0).reshape([C, C])
    return gl.convert_layout(x, whole, assert_trivial=True)


@gluon.jit
def unit_lower_inverse(l, r, s, a_s, c_s, d_s, zero, operand: gl.constexpr, C: gl.constexpr):
    """(I + L)^-1 for a strictly lower L [C, C]; a_s, c_s, d_s [2, C, C] is shared memory, all of which every warp has
    finished with when it returns.
    """
    put(gl.where(r // 16 != s // 16, l, 0.0), d_s)
    x = block_inverse(l, r, s, C)
    high, low = put(x, a_s)
    ready()
    # I + L = D (I + N) with N = D^-1 L_off nilpotent in blocks: N^4 = 0, (I + N)^-1 = (I - N)(I + N^2)
    high, low = put(product(high, low, d_s, zero, operand), c_s)
    ready()
    high_2, low_2 = split(product(high, low, c_s, zero, operand))
    x = x + product(high_2, low_2, a_s, zero, operand)
    put(x, d_s)
    ready()
    x = x - product(high, low, d_s, zero, operand)
    barrier()
    return x


@gluon.jit
def slice_products(qk, kk, gc_s, k2_s, q2_s, bk_s, steps, DELTA: gl.constexpr, layout: gl.constexpr):
    """Q K^T * R' diag(beta) and K K^T * R diag(beta) [C, C]."""
    p = gl.zeros_like(qk)
    l = gl.zeros_like(qk)
    for e in range(steps):
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
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    table: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [NW, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    i_c = gl.program_id(0) // H  # heads of a chunk side by side: they share rows of memory
    i_h = gl.program_id(0) % H
    row0 = gl.load(p_ch + i_c * 3 + 1)
    rows = gl.load(p_ch + i_c * 3 + 2)
    if rows == 0:
        return
    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    tp_s = gl.allocate_shared_memory(gl.bfloat16, [2 * C, C], d_tp.layout)
    a_s = reinterpret(q_s, gl.bfloat16, [2, C, C], tile)
    c_s = reinterpret(k_s, gl.bfloat16, [2, C, C], tile)
    d_s = reinterpret(tp_s, gl.bfloat16, [2, C, C], tile)
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
        steps = E
        if E == 1:
            steps = 1 + (rows >> 30)  # 1, but a loop to the compiler, which else needs many more registers
        p, l = slice_products(qk, kk, gc_s, k2_s, q2_s, bk_s, steps, DELTA, layout)
        inverse = gl.where(r == s, 1.0, 0.0)
        if DELTA:
            inverse = unit_lower_inverse(l, r, s, a_s, c_s, d_s, zero, operand, C)
        inverse = to_bf16(gl.where((r < rows) & (s < rows), inverse, 0.0))
        tp_s.slice(0, C, 0).store(inverse)
        ready()
        pt = mma(gl.convert_layout(to_bf16(p), operand, assert_trivial=True), tp_s.slice(0, C, 0), zero,
                 use_acc=False, is_async=True)  # fmt: skip
        tp_s.slice(C, C, 0).store(to_bf16(mma_wait(0, deps=[pt])))
        ready()
        tma_store(d_tp, [(i_c * HV + i_h * (HV // H) + j) * 2 * C, 0], tp_s)
    tma.store_wait(0)
