# ruff: noqa: RUF005 - Gluon compiles tuple sums, not unpacking
"""Kernel 4 in Gluon for Hopper (wgmma, TMA): K = V = 128, bfloat16.

The mathematics of backward.py, the tiles of gluon_forward.py and what shapes its code. Per chunk, from the last: dY =
sum over slices of K dS'; dW = PT^T dO + A'^T dY; the update by Q^T, while dW is being formed, and by K^T.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from .gluon_compat import (
    barrier,
    decayed,
    load_decays,
    new_barrier,
    new_barriers,
    reinterpret,
    scale_rows,
    slice_selector,
    state_offsets,
    store_tail,
    tma_load,
    tma_store,
    to_bf16,
    wait_all,
    wait_with_state,
)


@gluon.jit
def load_tile(d, bar, x_s, row, column, pred, BYTES: gl.constexpr):
    mbarrier.expect(bar, BYTES, pred=pred)
    tma_load(d, [row, column], bar, x_s, pred=pred)


@gluon.jit
def load_masks(d_tp, d_read, d_do, bar, tp_s, read_s, do_s, i_hc, row, column, pred,
               WITH_DO: gl.constexpr, E: gl.constexpr, C: gl.constexpr, BV: gl.constexpr):  # fmt: skip
    mbarrier.expect(bar, 2 * C * C * 2 + 2 * E * C * 4 + (C * BV * 2 if WITH_DO else 0), pred=pred)
    if WITH_DO:
        tma_load(d_do, [row, column], bar, do_s, pred=pred)
    tma_load(d_tp, [i_hc * 2 * C, 0], bar, tp_s, pred=pred)
    tma_load(d_read, [i_hc * 3 * E, 0], bar, read_s, pred=pred)


@gluon.jit(do_not_specialize=["NC"])
def reverse_kernel(
    d_k, d_q, d_do, d_tp, d_read, d_write, d_dw, d_dh, p_dec, p_ch, p_seq, p_order, p_dstate, p_dw, NC,
    H: gl.constexpr, HV: gl.constexpr, E: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BV: gl.constexpr, M: gl.constexpr, C: gl.constexpr, SHARED: gl.constexpr, WANTED: gl.constexpr,
):  # fmt: skip
    """Grid, tiles and states as in gluon_forward; stores the state's gradient at every chunk's end, and dW."""
    NW: gl.constexpr = gl.num_warps()
    EG: gl.constexpr = M // BV
    NG: gl.constexpr = E // EG
    PARTS: gl.constexpr = (
        NG if M == 64 else 1
    )  # of K dS' that are added by a product with a 0/1 matrix, not in registers
    mma_c: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, C, 16])
    mma_k: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, K, 16])
    mma_v: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BV, 16])
    left_c: gl.constexpr = gl.DotOperandLayout(0, mma_c, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, mma_k, 2)
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    h_layout: gl.constexpr = d_dh.layout
    v_layout: gl.constexpr = d_do.layout
    i_v = gl.program_id(0) % (V // BV)
    i_hv = gl.program_id(0) // (V // BV) % HV
    i_n = gl.load(p_order + gl.program_id(0) // (V // BV * HV))
    i_h = i_hv // (HV // H)
    chunk0 = gl.load(p_seq + i_n * 2)
    chunks = gl.load(p_seq + i_n * 2 + 1)
    if chunks == 0:
        return
    row0 = gl.load(p_ch + chunk0 * 3 + 1) + (chunks - 1) * C  # of the last chunk
    last_rows = gl.load(p_ch + (chunk0 + chunks - 1) * 3 + 2)
    i_hc = (chunk0 + chunks - 1) * HV + i_hv
    column = i_hv * V + i_v * BV

    stash = gl.allocate_shared_memory(gl.bfloat16, [NG, M, K], tile)
    x_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, M, C], tile)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], d_k.layout)
    q_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, K], d_q.layout)
    ND: gl.constexpr = 3 - NG  # buffers of dO: two where there is room
    do_buffer = gl.allocate_shared_memory(gl.bfloat16, [ND, C, BV], d_do.layout)
    tp_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * C, C], d_tp.layout)
    read_s = gl.allocate_shared_memory(gl.float32, [2 * E, C], d_read.layout)
    write_s = gl.allocate_shared_memory(gl.float32, [E, C], d_write.layout)
    bar_k = new_barriers(2, 1)
    bar_q = new_barrier(1)
    bar_do = new_barriers(ND, 1)
    bar_masks = new_barrier(1)
    bar_write = new_barrier(1)
    repeat = slice_selector(left_c, M, BV)
    fence_async_shared()
    barrier()
    zero_c = gl.zeros([M, C], gl.float32, layout=mma_c)
    zero_v = gl.zeros([C, BV], gl.float32, layout=mma_v)
    if not SHARED:
        p_dstate += (i_n * HV + i_hv).to(gl.int64) * (E * K * V)
    S = ()
    for g in gl.static_range(NG):
        S = S + (gl.load(p_dstate + g * (EG * K * V) + state_offsets(mma_k, i_v, M, BV, K, V)),)

    load_tile(d_k, bar_k.index(0), k_s.index(0), row0, i_h * K, True, C * K * 2)
    load_tile(d_write, bar_write, write_s, i_hc * 3 * E + 2 * E, 0, True, E * C * 4)
    if ND == 2:
        load_tile(d_do, bar_do.index(0), do_buffer.index(0), row0, column, True, C * BV * 2)
    load_masks(
        d_tp, d_read, d_do, bar_masks, tp_buffer.index(0), read_s, do_buffer.index(0), i_hc, row0, column, True,
        ND == 1, E, C, BV,
    )  # fmt: skip
    load_tile(d_q, bar_q, q_buffer.index(0), row0, i_h * K, True, C * K * 2)
    for n in range(chunks):
        phase = n & 1
        z = n >> 30
        x_s = x_buffer.index(z)
        xs = (x_s,)
        if PARTS == 2:  # the second where the next k will be
            xs = xs + (reinterpret(k_s.index(1 - n % 2), gl.bfloat16, [K // M, M, C], tile).index(0),)
        q = q_buffer.index(z)
        do = do_buffer.index(n % ND + z)
        tp = tp_buffer.index(z)
        dw_s = reinterpret(x_s, gl.bfloat16, [C, BV], v_layout)
        k = k_s.index(n % 2)
        decays = load_decays(p_dec + (i_hc - n * HV) * E, S, NG, EG, BV, K)
        # ---- K dS', scaled by the table; the state's gradient at the chunk's end goes to memory
        mbarrier.wait(bar_k.index(n % 2), (n // 2) & 1)
        total = zero_c
        for g in gl.static_range(NG):
            ds = to_bf16(S[g])
            x = mma(gl.convert_layout(ds, left_c, assert_trivial=True), k.permute([1, 0]), zero_c,
                    use_acc=False, is_async=True)  # fmt: skip
            if g == 0:  # all earlier stores have left shared memory
                tma.store_wait(0)
                barrier()
            stash.index(g + z).store(ds)
            if g == NG - 1:
                fence_async_shared()
                barrier()
                for i in gl.static_range(NG):
                    tma_store(d_dh, [(i_hc - n * HV) * E + i * EG, i_v * BV, 0],
                              reinterpret(stash.index(i + z), gl.bfloat16, [EG, BV, K], h_layout))  # fmt: skip
            if g == 0:
                mbarrier.wait(bar_write, phase)
            if g + 1 < NG:
                x, S = wait_with_state(x, S, g + 1)
            else:
                x = mma_wait(0, deps=[x])
            x = scale_rows(x, write_s.slice(g * EG, EG, 0), EG, BV, C)
            if PARTS == 2:
                xs[g].store(to_bf16(x))
            else:
                total = x if g == 0 else total + x
        if PARTS == 1:
            x_s.store(to_bf16(total))
        fence_async_shared()
        if ND == 2:
            mbarrier.wait(bar_do.index(n % 2), (n // 2) & 1)
        else:
            mbarrier.wait(bar_masks, phase)
        barrier()
        more = n + 1 < chunks
        next_row = row0 - (n + 1) * C
        # ---- dO, and dY = sum over slices, each repeated for each slice
        if NG == 2:
            repeat = slice_selector(left_c, M, BV, z)
        dor = mma(repeat, do.permute([1, 0]), zero_c, use_acc=False, is_async=True)
        dy = zero_c
        for i in gl.static_range(PARTS):
            for e in gl.static_range(EG):
                dy = mma(repeat, xs[i].slice(e * BV, BV, 0), dy, use_acc=i + e > 0, is_async=True)
        if PARTS == 1:
            load_tile(d_k, bar_k.index(1 - n % 2), k_s.index(1 - n % 2), next_row, i_h * K, more, C * K * 2)
        load_tile(d_write, bar_write, write_s, (i_hc - (n + 1) * HV) * 3 * E + 2 * E, 0, more, E * C * 4)
        if ND == 2:
            next_do = do_buffer.index(1 - n % 2)
            load_tile(d_do, bar_do.index(1 - n % 2), next_do, next_row, column, more, C * BV * 2)
        Sd = ()
        for g in gl.static_range(NG):
            Sd = Sd + (decayed(S[g], decays[g], EG, BV, K),)
        dor, dy = mma_wait(0, deps=[dor, dy])
        dob = to_bf16(dor)
        dyb = to_bf16(dy)
        # ---- dW in registers
        if ND == 2:
            mbarrier.wait(bar_masks, phase)
        dw = mma(gl.convert_layout(dob, left_c, assert_trivial=True), tp.slice(C, C, 0), zero_c,
                 use_acc=False, is_async=True)  # fmt: skip
        dw = mma(gl.convert_layout(dyb, left_c, assert_trivial=True), tp.slice(0, C, 0), dw, is_async=True)
        barrier()
        if PARTS == 2:
            load_tile(d_k, bar_k.index(1 - n % 2), k_s.index(1 - n % 2), next_row, i_h * K, more, C * K * 2)
        x_s.store(dyb)
        fence_async_shared()
        # ---- update by Q^T while dW is being formed
        mbarrier.wait(bar_q, phase)
        Sn = ()
        for g in gl.static_range(NG):
            u = to_bf16(scale_rows(dob.to(gl.float32), read_s.slice(E + g * EG, EG, 0), EG, BV, C))
            Sn = Sn + (mma(gl.convert_layout(u, left_k, assert_trivial=True), q, Sd[g], is_async=True),)
            if g == 0:
                dw = mma_wait(1, deps=[dw])
        barrier()
        # ---- dW again, as rows to store, and the update by K^T
        out = mma(tp.slice(C, C, 0).permute([1, 0]), do, zero_v, use_acc=False, is_async=True)
        out = mma(tp.slice(0, C, 0).permute([1, 0]), x_s.slice(0, BV, 0).permute([1, 0]), out, is_async=True)
        Sm = ()
        for g in gl.static_range(NG):
            u = to_bf16(scale_rows(dw, read_s.slice(g * EG, EG, 0), EG, BV, C))
            Sm = Sm + (mma(gl.convert_layout(u, left_k, assert_trivial=True), k, Sn[g], is_async=True),)
        out = mma_wait(NG, deps=[out])
        barrier()
        tail = (n == 0) & (last_rows < C)
        if tail:
            store_tail(p_dw, out, last_rows, row0 - n * C, HV * V, column, mma_v, C, BV)
        dw_s.store(to_bf16(out))
        S = wait_all(Sm, NG)
        fence_async_shared()
        barrier()
        if tail == 0:
            tma_store(d_dw, [row0 - n * C, column], dw_s)
        load_masks(
            d_tp, d_read, d_do, bar_masks, tp, read_s, do, i_hc - (n + 1) * HV, next_row, column, more, ND == 1, E, C,
            BV,
        )  # fmt: skip
        load_tile(d_q, bar_q, q, next_row, i_h * K, more, C * K * 2)
    tma.store_wait(0)
    if WANTED:
        for g in gl.static_range(NG):
            gl.store(p_dstate + g * (EG * K * V) + state_offsets(mma_k, i_v + (chunks >> 30), M, BV, K, V), S[g])
