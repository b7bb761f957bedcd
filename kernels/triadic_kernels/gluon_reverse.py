# ruff: noqa: RUF005 - Gluon compiles tuple sums, not unpacking
"""Kernel 4 in Gluon for Hopper (wgmma, TMA): K = V = 128, bfloat16.

The mathematics of backward.py, the tiles of gluon_forward.py. Per chunk, from the last: dY = sum over slices of K dS';
dW = PT^T dO + A'^T dY; the update by Q^T, while dW is being formed, and by K^T.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from .gluon_compat import (
    barrier,
    decayed,
    load_decay,
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
    to_bf16_again,
    wait_all,
    wait_with_state,
)


@gluon.jit
def load_gradients(d_do, d_tp, d_read, bar, do_s, tp_s, read_s, row, column, i_hc, pred,
                   E: gl.constexpr, C: gl.constexpr, BV: gl.constexpr):  # fmt: skip
    mbarrier.expect(bar, C * BV * 2 + 2 * C * C * 2 + 2 * E * C * 4, pred=pred)
    tma_load(d_do, [row, column], bar, do_s, pred=pred)
    tma_load(d_tp, [i_hc * 2 * C, 0], bar, tp_s, pred=pred)
    tma_load(d_read, [i_hc * 3 * E, 0], bar, read_s, pred=pred)


@gluon.jit
def read_states(S, k_t, table, bar, phase, NG: gl.constexpr, EG: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
                mma_c: gl.constexpr, operand: gl.constexpr):  # fmt: skip
    """Sum over tiles of table * (S k^T), [M, C] float32, and S; k_t [K, C] in shared memory."""
    zero = gl.zeros([EG * BV, C], gl.float32, layout=mma_c)
    total = zero
    for g in gl.static_range(NG):
        s = gl.convert_layout(to_bf16(S[g]), operand, assert_trivial=True)
        x = mma(s, k_t, zero, use_acc=False, is_async=True)
        if g == 0:
            mbarrier.wait(bar, phase)
        if g + 1 < NG:
            x, S = wait_with_state(x, S, g + 1)
        else:
            x = mma_wait(0, deps=[x])
        x = scale_rows(x, table.slice(g * EG, EG, 0), EG, BV, C)
        if g == 0:
            total = x
        else:
            total = total + x
    return total, S


@gluon.jit(do_not_specialize=["NC"])
def reverse_kernel(
    d_k, d_q, d_do, d_tp, d_read, d_write, d_dw, d_dh, p_dec, p_ch, p_seq, p_order, p_dstate, p_dw, NC,
    H: gl.constexpr, HV: gl.constexpr, E: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BV: gl.constexpr, M: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Grid and tiles as in gluon_forward; stores the state's gradient at every chunk's end, and dW."""
    NW: gl.constexpr = gl.num_warps()
    EG: gl.constexpr = M // BV
    NG: gl.constexpr = E // EG
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
    i_hc = i_hv * NC + chunk0 + chunks - 1
    column = i_hv * V + i_v * BV

    stash = gl.allocate_shared_memory(gl.bfloat16, [NG, M, K], tile)
    x_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, M, C], tile)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], d_k.layout)
    q_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, K], d_q.layout)
    do_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BV], d_do.layout)
    tp_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * C, C], d_tp.layout)
    read_s = gl.allocate_shared_memory(gl.float32, [2 * E, C], d_read.layout)
    write_s = gl.allocate_shared_memory(gl.float32, [E, C], d_write.layout)
    bar_k = new_barriers(2, 1)
    bar_q = new_barrier(1)
    bar_do = new_barrier(1)
    bar_write = new_barrier(1)
    repeat = slice_selector(left_c, M, BV)
    fence_async_shared()
    barrier()
    zero_c = gl.zeros([M, C], gl.float32, layout=mma_c)
    zero_v = gl.zeros([C, BV], gl.float32, layout=mma_v)
    p_dstate += (i_n * HV + i_hv).to(gl.int64) * (E * K * V)
    S = ()
    for g in gl.static_range(NG):
        S = S + (gl.load(p_dstate + g * (EG * K * V) + state_offsets(mma_k, i_v, M, BV, K, V)),)

    mbarrier.expect(bar_k.index(0), C * K * 2)
    tma_load(d_k, [row0, i_h * K], bar_k.index(0), k_s.index(0))
    mbarrier.expect(bar_write, E * C * 4)
    tma_load(d_write, [i_hc * 3 * E + 2 * E, 0], bar_write, write_s)
    load_gradients(
        d_do, d_tp, d_read, bar_do, do_buffer.index(0), tp_buffer.index(0), read_s, row0, column, i_hc, True, E, C, BV
    )
    mbarrier.expect(bar_q, C * K * 2)
    tma_load(d_q, [row0, i_h * K], bar_q, q_buffer.index(0))
    for n in range(chunks):
        phase = n & 1
        z = n >> 30
        x_s = x_buffer.index(z)
        q = q_buffer.index(z)
        do = do_buffer.index(z)
        tp = tp_buffer.index(z)
        dw_s = reinterpret(x_s, gl.bfloat16, [C, BV], v_layout)
        k = k_s.index(n % 2)
        decays = ()
        for g in gl.static_range(NG):
            decays = decays + (load_decay(p_dec + (i_hc - n) * E + g * EG, S[g], EG, BV, K),)
        # ---- the state's gradient at the chunk's end
        tma.store_wait(0)
        barrier()
        for g in gl.static_range(NG):
            stash.index(g + z).store(to_bf16_again(S[g]))
        fence_async_shared()
        barrier()
        for g in gl.static_range(NG):
            tma_store(d_dh, [(i_hc - n) * E + g * EG, i_v * BV, 0],
                      reinterpret(stash.index(g + z), gl.bfloat16, [EG, BV, K], h_layout))  # fmt: skip
        # ---- K dS', scaled by the table
        mbarrier.wait(bar_k.index(n % 2), (n // 2) & 1)
        x, S = read_states(S, k.permute([1, 0]), write_s, bar_write, phase, NG, EG, BV, C, mma_c, left_c)
        x_s.store(to_bf16(x))
        fence_async_shared()
        mbarrier.wait(bar_do, phase)
        barrier()
        more = n + 1 < chunks
        # ---- dO, and dY = sum over slices, each repeated for each slice
        dor = mma(repeat, do.permute([1, 0]), zero_c, use_acc=False, is_async=True)
        dy = zero_c
        for e in gl.static_range(EG):
            if e == 0:
                dy = mma(repeat, x_s.slice(e * BV, BV, 0), zero_c, use_acc=False, is_async=True)
            else:
                dy = mma(repeat, x_s.slice(e * BV, BV, 0), dy, is_async=True)
        mbarrier.expect(bar_k.index(1 - n % 2), C * K * 2, pred=more)
        tma_load(d_k, [row0 - (n + 1) * C, i_h * K], bar_k.index(1 - n % 2), k_s.index(1 - n % 2), pred=more)
        mbarrier.expect(bar_write, E * C * 4, pred=more)
        tma_load(d_write, [(i_hc - n - 1) * 3 * E + 2 * E, 0], bar_write, write_s, pred=more)
        Sd = ()
        for g in gl.static_range(NG):
            Sd = Sd + (decayed(S[g], decays[g], EG, BV, K),)
        dor, dy = mma_wait(0, deps=[dor, dy])
        dob = to_bf16(dor)
        dyb = to_bf16(dy)
        # ---- dW in registers
        dw = mma(gl.convert_layout(dob, left_c, assert_trivial=True), tp.slice(C, C, 0), zero_c,
                 use_acc=False, is_async=True)  # fmt: skip
        dw = mma(gl.convert_layout(dyb, left_c, assert_trivial=True), tp.slice(0, C, 0), dw, is_async=True)
        barrier()
        x_s.store(dyb)
        fence_async_shared()
        # ---- update by Q^T while dW is being formed
        mbarrier.wait(bar_q, phase)
        Sn = ()
        for g in gl.static_range(NG):
            u = to_bf16(scale_rows(dob.to(gl.float32), read_s.slice(E + g * EG, EG, 0), EG, BV, C))
            Sn = Sn + (mma(gl.convert_layout(u, left_k, assert_trivial=True), q, Sd[g], is_async=True),)
        dw = mma_wait(NG, deps=[dw])
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
        load_gradients(
            d_do, d_tp, d_read, bar_do, do, tp, read_s, row0 - (n + 1) * C, column, i_hc - n - 1, more, E, C, BV
        )
        mbarrier.expect(bar_q, C * K * 2, pred=more)
        tma_load(d_q, [row0 - (n + 1) * C, i_h * K], bar_q, q, pred=more)
    tma.store_wait(0)
    for g in gl.static_range(NG):
        gl.store(p_dstate + g * (EG * K * V) + state_offsets(mma_k, i_v + (chunks >> 30), M, BV, K, V), S[g])
