"""Kernel 6 in Gluon for Hopper (wgmma, TMA): K = V = 128, bfloat16; the mathematics of mask_gradients.py.

One program per (chunk, key head). M, N, Z' and Z stay in registers as the accumulators of their products, and every
slice adds to all its sums in that layout: G_e itself is formed for each pair of tokens, with its exponent held at 0
above the diagonal, where the four are zero. The tables lie in shared memory, as rows and as columns. What is written
to the slices' sums takes the memory of Y, and M R' and N R after that; the parts of kernel 5 take that of dO and dW.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from .gluon_compat import barrier, new_barrier, reinterpret, store_tail, tma_load, tma_store, to_bf16


@gluon.jit
def pack(high, low):
    """Two float32 tensors as bfloat16 in the halves of one int32 tensor."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def slice_sums(mn, zq, z, p, g, gc_s, k2_s, q2_s, bk_s, sums_s, columns_s,
               E: gl.constexpr, C: gl.constexpr, DELTA: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """M * R' and N * R added to p and g [C, C]; per slice, the sums over the rows of Z' and Z to sums_s [2E, 1, C],
    and over the columns, one row for each warp, to columns_s [E, C/16, C].
    """
    for e in range(E):
        row = gc_s.index(e).permute([1, 0]).load(layout)  # [C, 1]
        decay = gl.exp2(gl.minimum(row - gc_s.index(e).load(layout), 0.0))
        write = decay * bk_s.index(e).load(layout)
        q2 = q2_s.index(e).permute([1, 0]).load(layout)
        sums_s.index(e).permute([1, 0]).store(gl.expand_dims(gl.sum(zq * write, 1), 1))
        columns = zq * q2
        p = p + ((mn & -65536).to(gl.float32, bitcast=True) * write) * q2
        if DELTA:
            k2 = k2_s.index(e).permute([1, 0]).load(layout)
            sums_s.index(E + e).permute([1, 0]).store(gl.expand_dims(gl.sum(z * write, 1), 1))
            columns = columns + z * k2
            g = g + ((mn << 16).to(gl.float32, bitcast=True) * write) * k2
        columns_s.index(e).store(gl.sum((columns * decay).reshape([C // 16, 16, C]), 1))
    return p, g


@gluon.jit
def store_by_token(p, x, row, stride, rows, E: gl.constexpr, C: gl.constexpr):
    """x [E, C] to the E consecutive numbers at each of the rows row, row + stride, ..., of which `rows` are there."""
    layout: gl.constexpr = gl.BlockedLayout([E, 1], [1, 32], [1, gl.num_warps()], [0, 1])
    e = gl.arange(0, E, layout=gl.SliceLayout(1, layout))
    t = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    offsets = ((row + t * stride) * E)[None, :] + e[:, None]
    gl.store(p + offsets, gl.convert_layout(x, layout), mask=(t < rows)[None, :] & (e >= 0)[:, None])


@gluon.jit
def gate_gradients(
    sums_s, columns_s, gc_s, k2_s, q2_s, bk_s, p_bt, p_last, p_dtab, p_ddec, p_dbeta, p_dg, t, e, row, rows, scale,
    chunks_all, HV: gl.constexpr, E: gl.constexpr, C: gl.constexpr, NDB: gl.constexpr, GATE: gl.constexpr,
    DELTA: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As in mask_gradients.py, with the slices in rows: returns dq2 and dk2 [E, C], stores dbeta and dg."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    warps: gl.constexpr = gl.BlockedLayout([1, C // 16, 2], [1, 1, 32], [gl.num_warps(), 1, 1], [2, 1, 0])
    o = e[:, None] * C + t[None, :]
    m = (t < rows)[None, :] & (e >= 0)[:, None]
    sums = reinterpret(sums_s, gl.float32, [2 * E, C], plain)
    gc = reinterpret(gc_s, gl.float32, [E, C], plain).load(layout)  # rather than held in registers until here
    k2 = reinterpret(k2_s, gl.float32, [E, C], plain).load(layout)
    q2 = reinterpret(q2_s, gl.float32, [E, C], plain).load(layout)
    bk = reinterpret(bk_s, gl.float32, [E, C], plain).load(layout)
    beta = gl.load(p_bt + t)
    columns = gl.convert_layout(gl.sum(columns_s.load(warps), 1), layout)
    last = gl.load(p_last + e * C)
    decay = gl.exp2(gc)
    dq2 = sums.slice(0, E, 0).load(layout) + scale * decay * gl.load(p_dtab + o, mask=m, other=0.0)
    dk2 = gl.zeros([E, C], gl.float32, layout=layout)
    if DELTA:
        dk2 = sums.slice(E, E, 0).load(layout) - decay * gl.load(p_dtab + E * C + o, mask=m, other=0.0)
    from_state = gl.exp2(last[:, None] - gc) * gl.load(p_dtab + 2 * E * C + o, mask=m, other=0.0)
    w = columns + from_state
    gl.store(p_dbeta + row + t * HV, gl.sum(k2 * w, 0), mask=t < rows)
    bw = beta[None, :] * w
    if GATE != "none":
        end = gl.load(p_ddec + e)
        for i in gl.static_range(1, NDB):
            end = end + gl.load(p_ddec + i * chunks_all * E + e)
        end = gl.exp2(last) * end + gl.sum(bk * from_state, 1)
        dg = gl.associative_scan(q2 * dq2 + k2 * (dk2 - bw), 1, plus, reverse=True) + end[:, None]
        if GATE == "slice":
            store_by_token(p_dg, dg, row, HV, rows, E, C)
        else:
            gl.store(p_dg + row + t * HV, gl.sum(dg, 0), mask=t < rows)
    return dq2, dk2 + bw


@gluon.jit
def store_rows(d, p, x, x_s, row0, rows, column, stride, C: gl.constexpr, K: gl.constexpr, layout: gl.constexpr):
    """x [C, K] to rows of a matrix through x_s, or the first `rows` of a short chunk directly."""
    if rows == C:
        x_s.store(to_bf16(x))
        fence_async_shared()
        barrier()
        tma_store(d, [row0.to(gl.int32), column], x_s)
    else:
        store_tail(p, x, rows, row0, stride, column, layout, C, K)


@gluon.jit(do_not_specialize=["NC"])
def mask_gradients_kernel(
    d_q, d_k, d_y, d_do, d_dw, d_dqs, d_dkr, d_dkw, d_dq, d_dk, p_q2t, p_k2t, p_bt, p_gc, p_dtab, p_ddec, p_ch,
    p_dq, p_dk, p_dq2, p_dk2, p_dbeta, p_dg, scale, NC,
    H: gl.constexpr, HV: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, C: gl.constexpr, K: gl.constexpr,
    NDB: gl.constexpr, DELTA: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    NW: gl.constexpr = gl.num_warps()
    G: gl.constexpr = HV // H
    mma_c: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, C, 16])
    mma_k: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_k, 2)
    table: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [NW, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    i_c = gl.program_id(0) // H  # heads of a chunk side by side: they share rows of memory
    i_h = gl.program_id(0) % H
    first = gl.load(p_ch + i_c * 3 + 1)
    rows = gl.load(p_ch + i_c * 3 + 2)
    if rows == 0:
        return
    row0 = first.to(gl.int64)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    y_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    dw_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    gc_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    k2_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    q2_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    bk_s = gl.allocate_shared_memory(gl.float32, [E, 1, C], plain)
    sums_s = gl.allocate_shared_memory(gl.float32, [2 * E, 1, C], plain)
    columns_s = reinterpret(y_s, gl.float32, [E, C // 16, C], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    columns_e = reinterpret(y_s, gl.float32, [E, C // 16, C], plain)
    p_s = reinterpret(y_s, gl.bfloat16, [2, C, C], tile)
    bar_v = new_barrier(1)
    bar_k = new_barrier(1)
    bar_parts = new_barrier(1)
    bar_last = new_barrier(1)
    fence_async_shared()
    barrier()
    mbarrier.expect(bar_k, 2 * C * K * 2)
    tma_load(d_q, [first, i_h * K], bar_k, q_s)
    tma_load(d_k, [first, i_h * K], bar_k, k_s)
    t = gl.arange(0, C, layout=gl.SliceLayout(0, table))
    e = gl.arange(0, E, layout=gl.SliceLayout(1, table))
    o = e[:, None] * C + t[None, :]
    i_kc = i_c.to(gl.int64) * H + i_h
    r = gl.arange(0, C, layout=gl.SliceLayout(1, mma_c))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, mma_c))[None, :]
    zero = gl.zeros([C, C], gl.float32, layout=mma_c)
    p = zero
    g = zero
    dq2 = gl.zeros([E, C], gl.float32, layout=table)
    dk2 = dq2
    for j in range(G):
        i_hv = i_h * G + j
        i_hc = i_c.to(gl.int64) * HV + i_hv
        mbarrier.expect(bar_v, (3 if DELTA else 2) * C * K * 2)
        tma_load(d_do, [first, i_hv * K], bar_v, do_s)
        tma_load(d_y, [first, i_hv * K], bar_v, y_s)
        if DELTA:
            tma_load(d_dw, [first, i_hv * K], bar_v, dw_s)
        gc = gl.load(p_gc + i_hc * (EP * C) + o)
        k2 = gl.load(p_k2t + i_kc * (EP * C) + o)
        q2 = gl.load(p_q2t + i_kc * (EP * C) + o)
        beta = gl.load(p_bt + i_hc * C + t)
        reinterpret(gc_s, gl.float32, [E, C], plain).store(gc)
        reinterpret(k2_s, gl.float32, [E, C], plain).store(k2)
        reinterpret(q2_s, gl.float32, [E, C], plain).store(q2)
        reinterpret(bk_s, gl.float32, [E, C], plain).store(k2 * beta[None, :])
        # ---- M, N, Z' and Z
        mbarrier.wait(bar_v, j & 1)
        m = mma(do_s, y_s.permute([1, 0]), zero, use_acc=False, is_async=True)
        n = zero
        kk = zero
        if DELTA:
            n = mma(dw_s, y_s.permute([1, 0]), zero, use_acc=False, is_async=True)
        mbarrier.wait(bar_k, 0)
        qk = mma(q_s, k_s.permute([1, 0]), zero, use_acc=False, is_async=True)
        if DELTA:
            kk = mma(k_s, k_s.permute([1, 0]), zero, use_acc=False, is_async=True)
            m, n, qk, kk = mma_wait(0, deps=[m, n, qk, kk])
        else:
            m, qk = mma_wait(0, deps=[m, qk])
        # rows beyond a short chunk are the next document's: its numbers may not be finite
        m = gl.where((r >= s) & (r < rows), scale * m, 0.0)
        n = gl.where((r > s) & (r < rows), -n, 0.0)
        barrier()
        if j == G - 1:  # the parts of kernel 5 arrive while the slices are summed
            mbarrier.expect(bar_parts, (2 if DELTA else 1) * C * K * 2)
            tma_load(d_dqs, [first, i_h * K], bar_parts, do_s)
            if DELTA:
                tma_load(d_dkr, [first, i_h * K], bar_parts, dw_s)
        p, g = slice_sums(
            pack(m, n), m * qk, n * kk, p, g, gc_s, k2_s, q2_s, bk_s, sums_s, columns_e, E, C, DELTA, mma_c
        )
        barrier()
        dq2_j, dk2_j = gate_gradients(
            sums_s, columns_s, gc_s, k2_s, q2_s, bk_s, p_bt + i_hc * C, p_gc + i_hc * (EP * C) + C - 1,
            p_dtab + i_hc * (3 * E * C), p_ddec + i_hc * E, p_dbeta, p_dg, t, e, row0 * HV + i_hv, rows, scale,
            HV * NC.to(gl.int64), HV, E, C, NDB, GATE, DELTA, table,
        )  # fmt: skip
        dq2 = dq2 + dq2_j
        dk2 = dk2 + dk2_j
        fence_async_shared()
        barrier()
    store_by_token(p_dq2, dq2, row0 * H + i_h, H, rows, E, C)
    store_by_token(p_dk2, dk2, row0 * H + i_h, H, rows, E, C)
    # ---- dq = dqs + P K,  dk = dkr + dkw + P^T Q + (G + G^T) K
    p = to_bf16(p)
    p_s.index(0).store(p)
    if DELTA:
        p_s.index(1).store(to_bf16(g))
    mbarrier.wait(bar_parts, 0)
    dq = do_s.load(mma_k).to(gl.float32)
    dk = gl.zeros([C, K], gl.float32, layout=mma_k)
    if DELTA:
        dk = dw_s.load(mma_k).to(gl.float32)
    fence_async_shared()
    barrier()
    mbarrier.expect(bar_last, C * K * 2)
    tma_load(d_dkw, [first, i_h * K], bar_last, dw_s)
    dq = mma(gl.convert_layout(p, left, assert_trivial=True), k_s, dq, is_async=True)
    dk = mma(p_s.index(0).permute([1, 0]), q_s, dk, is_async=True)
    if DELTA:
        dk = mma(p_s.index(1), k_s, dk, is_async=True)
        dk = mma(p_s.index(1).permute([1, 0]), k_s, dk, is_async=True)
        dq = mma_wait(3, deps=[dq])
    else:
        dq = mma_wait(1, deps=[dq])
    store_rows(d_dq, p_dq, dq, do_s, row0, rows, i_h * K, H * K, C, K, mma_k)
    dk = mma_wait(0, deps=[dk])
    mbarrier.wait(bar_last, 0)
    dk = dk + dw_s.load(mma_k).to(gl.float32)
    barrier()
    store_rows(d_dk, p_dk, dk, dw_s, row0, rows, i_h * K, H * K, C, K, mma_k)
    tma.store_wait(0)
