# ruff: noqa: RUF005 - Gluon compiles tuple sums, not unpacking
"""Kernel 3 in Gluon for Hopper (wgmma, TMA): K = V = 128, bfloat16; the mathematics of forward.py, letters of masks.py.

The transposed state stays in float32 registers: a wgmma tile of M rows holds EG = M / BV slices of BV value columns, M
rows by K columns; NG = E / EG tiles. Per chunk: the state, rounded, times K^T and Q^T; slices added by a product with a
0/1 matrix, which also adds V; Y in registers and O, independent of one another; the update by K^T.

What shapes the code: all single buffers are indexed by n >> 30 (always 0), or LLVM hoists their wgmma descriptors out
of the loop and spills; copies share mbarriers (k | q | read table | v, tp, write table), since each TMA issue costs a
barrier; the final state's offsets go through chunks >> 30, or they stay in registers from the start; the state is
loaded even where it is zero if the loop stores it, and not stored unless wanted, which spills fewer registers there.
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
    to_bf16_again,
    wait_all,
    wait_with_state,
)


@gluon.jit
def load_inputs(d_q, d_v, bar, q_s, v_s, row, column_k, column_v, pred,
                C: gl.constexpr, BV: gl.constexpr, K: gl.constexpr):  # fmt: skip
    """What the first half of a chunk reads, beside k and the read table."""
    mbarrier.expect(bar, C * K * 2 + C * BV * 2, pred=pred)
    tma_load(d_q, [row, column_k], bar, q_s, pred=pred)
    tma_load(d_v, [row, column_v], bar, v_s, pred=pred)


@gluon.jit
def load_masks(d_tp, d_write, bar, tp_s, write_s, i_hc, pred, E: gl.constexpr, C: gl.constexpr):
    """What the second half reads."""
    mbarrier.expect(bar, 2 * C * C * 2 + E * C * 4, pred=pred)
    tma_load(d_tp, [i_hc * 2 * C, 0], bar, tp_s, pred=pred)
    tma_load(d_write, [i_hc * 3 * E + 2 * E, 0], bar, write_s, pred=pred)


@gluon.jit
def stash_state(s, stash, d_h, i_state, column, FREE: gl.constexpr, EG: gl.constexpr, BV: gl.constexpr,
                K: gl.constexpr, h_layout: gl.constexpr):  # fmt: skip
    """Send a tile of the rounded state on its way to memory, once all earlier stores have left shared memory, or at
    once into a stash that is FREE.
    """
    if not FREE:
        tma.store_wait(0)
        barrier()
    stash.store(s)
    fence_async_shared()
    barrier()
    tma_store(d_h, [i_state, column, 0], reinterpret(stash, gl.bfloat16, [EG, BV, K], h_layout))


@gluon.jit
def read_both(S, k_t, q_t, read_s, bar_inputs, bar_read, phase, stash, z, d_h, i_state, column,
              KEEP: gl.constexpr, E: gl.constexpr, BV: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
              mma_c: gl.constexpr, operand: gl.constexpr, h_layout: gl.constexpr):  # fmt: skip
    """One tile: table * (S k^T) [M, C] float32, and S q^T, still on its way."""
    zero = gl.zeros([E * BV, C], gl.float32, layout=mma_c)
    s = to_bf16(S[0])
    x = mma(gl.convert_layout(s, operand, assert_trivial=True), k_t, zero, use_acc=False, is_async=True)
    mbarrier.wait(bar_inputs, phase)
    y = mma(gl.convert_layout(s, operand, assert_trivial=True), q_t, zero, use_acc=False, is_async=True)
    if KEEP:  # while the products run
        stash_state(s, stash.index(z), d_h, i_state, column, False, E, BV, K, h_layout)
    mbarrier.wait(bar_read, phase)
    x = mma_wait(1, deps=[x])
    return scale_rows(x, read_s.slice(0, E, 0), E, BV, C), y


@gluon.jit
def read_states(S, x_t, table, bar, phase, first: gl.constexpr, stash, z, d_h, i_state, column, KEEP: gl.constexpr,
                FIRST: gl.constexpr, NS: gl.constexpr, NG: gl.constexpr, EG: gl.constexpr, BV: gl.constexpr,
                K: gl.constexpr, C: gl.constexpr, mma_c: gl.constexpr, operand: gl.constexpr,
                h_layout: gl.constexpr):  # fmt: skip
    """Sum over tiles of table * (S x^T), [M, C] float32, and S; x_t [K, C] in shared memory.

    FIRST: the first of two read-outs of the same states, which also stores the first tile; the second stores the
    second.
    """
    M: gl.constexpr = EG * BV
    zero = gl.zeros([M, C], gl.float32, layout=mma_c)
    total = zero
    for g in gl.static_range(NG):
        if FIRST:
            s = to_bf16(S[g])
        else:
            s = to_bf16_again(S[g])
        x = mma(gl.convert_layout(s, operand, assert_trivial=True), x_t, zero, use_acc=False, is_async=True)
        if KEEP and (g == 0) == FIRST:  # while the product runs
            free: gl.constexpr = NS == 2 and g > 0
            stash_state(s, stash.index(g % NS + z), d_h, i_state + g * EG, column, free, EG, BV, K, h_layout)
        if FIRST and g == 0:
            mbarrier.wait(bar, phase)
        if g + 1 < NG:
            x, S = wait_with_state(x, S, g + 1)
        elif FIRST:
            x, S = wait_with_state(x, S, 0)
        else:
            x = mma_wait(0, deps=[x])
        x = scale_rows(x, table.slice(first + g * EG, EG, 0), EG, BV, C)
        if g == 0:
            total = x
        else:
            total = total + x
    return total, S


@gluon.jit(do_not_specialize=["NC"])
def forward_kernel(
    d_k, d_q, d_v, d_tp, d_read, d_write, d_o, d_h, d_y, p_dec, p_ch, p_seq, p_order, p_state, p_o, p_y, NC,
    H: gl.constexpr, HV: gl.constexpr, E: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BV: gl.constexpr, M: gl.constexpr, C: gl.constexpr, KEEP: gl.constexpr,
    SHARED: gl.constexpr, WANTED: gl.constexpr,
):  # fmt: skip
    """One program per (sequence, longest first; value head; tile of BV value columns); the state in place, if it is
    WANTED. SHARED: one initial state [E, K, V] for all, not to be written.
    """
    NW: gl.constexpr = gl.num_warps()
    EG: gl.constexpr = M // BV
    NG: gl.constexpr = E // EG
    NS: gl.constexpr = 2 if NG == 2 and M > 64 else 1  # tiles of the state on their way to memory
    # measured: where q and v are asked for half a chunk ahead, and decays only when they are needed
    EARLY: gl.constexpr = NG == 1 or (KEEP and NS == 1)
    LATE: gl.constexpr = NG == 2 and KEEP
    mma_c: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, C, 16])
    mma_k: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, K, 16])
    mma_v: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BV, 16])
    left_c: gl.constexpr = gl.DotOperandLayout(0, mma_c, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, mma_k, 2)
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    h_layout: gl.constexpr = d_h.layout
    v_layout: gl.constexpr = d_v.layout
    i_v = gl.program_id(0) % (V // BV)
    i_hv = gl.program_id(0) // (V // BV) % HV
    i_n = gl.load(p_order + gl.program_id(0) // (V // BV * HV))
    i_h = i_hv // (HV // H)
    chunk0 = gl.load(p_seq + i_n * 2)
    chunks = gl.load(p_seq + i_n * 2 + 1)
    if chunks == 0:
        return
    row0 = gl.load(p_ch + chunk0 * 3 + 1)
    last_rows = gl.load(p_ch + (chunk0 + chunks - 1) * 3 + 2)
    i_hc = chunk0 * HV + i_hv
    column = i_hv * V + i_v * BV

    x_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, M, C], tile)
    y_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, M, C], tile)
    stash_buffer = gl.allocate_shared_memory(gl.bfloat16, [NS, M if KEEP else 8, K], tile)
    select_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, M, BV], d_v.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [C, BV], d_v.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], d_k.layout)
    q_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, K], d_q.layout)
    v_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BV], d_v.layout)
    tp_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * C, C], d_tp.layout)
    read_s = gl.allocate_shared_memory(gl.float32, [2 * E, C], d_read.layout)
    write_s = gl.allocate_shared_memory(gl.float32, [E, C], d_write.layout)
    bar_k = new_barriers(2, 1)
    bar_inputs = new_barrier(1)
    bar_read = new_barrier(1)
    bar_masks = new_barrier(1)
    repeat = slice_selector(left_c, M, BV)
    select_buffer.index(0).store(slice_selector(mma_v, M, BV))
    fence_async_shared()
    barrier()
    zero_c = gl.zeros([M, C], gl.float32, layout=mma_c)
    zero_v = gl.zeros([C, BV], gl.float32, layout=mma_v)
    if not SHARED:
        p_state += (i_n * HV + i_hv).to(gl.int64) * (E * K * V)
    S = ()
    for g in gl.static_range(NG):
        if SHARED and not KEEP:
            S = S + (gl.zeros([M, K], gl.float32, layout=mma_k),)
        else:
            S = S + (gl.load(p_state + g * (EG * K * V) + state_offsets(mma_k, i_v, M, BV, K, V)),)

    mbarrier.expect(bar_k.index(0), C * K * 2)
    tma_load(d_k, [row0, i_h * K], bar_k.index(0), k_s.index(0))
    mbarrier.expect(bar_read, 2 * E * C * 4)
    tma_load(d_read, [i_hc * 3 * E, 0], bar_read, read_s)
    load_inputs(d_q, d_v, bar_inputs, q_buffer.index(0), v_buffer.index(0), row0, i_h * K, column, True, C, BV, K)
    load_masks(d_tp, d_write, bar_masks, tp_buffer.index(0), write_s, i_hc, True, E, C)
    for n in range(chunks):
        phase = n & 1
        z = n >> 30
        x_s = x_buffer.index(z)
        yr_s = y_buffer.index(z)
        select = select_buffer.index(z)
        q = q_buffer.index(z)
        v = v_buffer.index(z)
        tp = tp_buffer.index(z)
        y_s = reinterpret(x_s, gl.bfloat16, [C, BV], v_layout)  # once x is read
        if EARLY:
            w_s = x_s  # once x is read
        else:
            w_s = reinterpret(q, gl.bfloat16, [M, C], tile)  # once q is read
        k = k_s.index(n % 2)
        if not LATE:
            decays = load_decays(p_dec + (i_hc + n * HV) * E, S, NG, EG, BV, K)
        # ---- read-outs -K S and Q S, scaled by the tables
        mbarrier.wait(bar_k.index(n % 2), (n // 2) & 1)
        if NG == 1:
            x, y = read_both(
                S, k.permute([1, 0]), q.permute([1, 0]), read_s, bar_inputs, bar_read, phase, stash_buffer, z, d_h,
                (i_hc + n * HV) * E, i_v * BV, KEEP, E, BV, K, C, mma_c, left_c, h_layout,
            )  # fmt: skip
            x_s.store(to_bf16(x))
        else:
            x, S = read_states(
                S, k.permute([1, 0]), read_s, bar_read, phase, 0, stash_buffer, z, d_h, (i_hc + n * HV) * E, i_v * BV,
                KEEP, True, NS, NG, EG, BV, K, C, mma_c, left_c, h_layout,
            )  # fmt: skip
            x_s.store(to_bf16(x))
            mbarrier.wait(bar_inputs, phase)
            y, S = read_states(
                S, q.permute([1, 0]), read_s, bar_read, phase, E, stash_buffer, z, d_h, (i_hc + n * HV) * E, i_v * BV,
                KEEP, False, NS, NG, EG, BV, K, C, mma_c, left_c, h_layout,
            )  # fmt: skip
            yr_s.store(to_bf16(y))
        fence_async_shared()
        barrier()
        if LATE:
            decays = load_decays(p_dec + (i_hc + n * HV) * E, S, NG, EG, BV, K)
        more = n + 1 < chunks
        # ---- W = V + sum over slices of x, repeated for each slice
        w = mma(repeat, v.permute([1, 0]), zero_c, use_acc=False, is_async=True)
        for e in gl.static_range(EG):
            w = mma(repeat, x_s.slice(e * BV, BV, 0), w, is_async=True)
        if NG == 1:
            y = mma_wait(1 + EG, deps=[y])
            yr_s.store(to_bf16(scale_rows(y, read_s.slice(E, E, 0), E, BV, C)))
        mbarrier.expect(bar_k.index(1 - n % 2), C * K * 2, pred=more)
        tma_load(d_k, [row0 + (n + 1) * C, i_h * K], bar_k.index(1 - n % 2), k_s.index(1 - n % 2), pred=more)
        Sd = ()
        for g in gl.static_range(NG):
            Sd = Sd + (decayed(S[g], decays[g], EG, BV, K),)
        w = mma_wait(0, deps=[w])
        wb = to_bf16(w)
        # ---- Y = A' W and O = Q S + PT W
        mbarrier.wait(bar_masks, phase)
        y = mma(gl.convert_layout(wb, left_c, assert_trivial=True), tp.slice(0, C, 0).permute([1, 0]), zero_c,
                use_acc=False, is_async=True)  # fmt: skip
        if EARLY:
            barrier()  # every warp has read q, v and x
            load_inputs(d_q, d_v, bar_inputs, q, v, row0 + (n + 1) * C, i_h * K, column, more, C, BV, K)
        w_s.store(wb)
        fence_async_shared()
        if not KEEP:
            tma.store_wait(0)
        barrier()
        o = mma(yr_s.permute([1, 0]), select, zero_v, use_acc=False, is_async=True)
        o = mma(tp.slice(C, C, 0), w_s.slice(0, BV, 0).permute([1, 0]), o, is_async=True)
        mbarrier.expect(bar_read, 2 * E * C * 4, pred=more)
        tma_load(d_read, [(i_hc + (n + 1) * HV) * 3 * E, 0], bar_read, read_s, pred=more)
        y = mma_wait(2, deps=[y])
        # ---- state update
        Sn = ()
        for g in gl.static_range(NG):
            u = to_bf16(scale_rows(y, write_s.slice(g * EG, EG, 0), EG, BV, C))
            Sn = Sn + (mma(gl.convert_layout(u, left_k, assert_trivial=True), k, Sd[g], is_async=True),)
        o = mma_wait(NG, deps=[o])
        o_s.store(to_bf16(o))
        if KEEP:
            yt = mma(tp.slice(0, C, 0), w_s.slice(0, BV, 0).permute([1, 0]), zero_v, use_acc=False, is_async=True)
            yt = mma_wait(0, deps=[yt])
            if EARLY:
                barrier()  # every warp has read w
            y_s.store(to_bf16(yt))
        S = wait_all(Sn, NG)
        fence_async_shared()
        barrier()
        if more | (last_rows == C):  # a TMA store writes all rows: those of a short last chunk wait for the loop's end
            tma_store(d_o, [row0 + n * C, column], o_s)
            if KEEP:
                tma_store(d_y, [row0 + n * C, column], y_s)
        if not EARLY:
            load_inputs(d_q, d_v, bar_inputs, q, v, row0 + (n + 1) * C, i_h * K, column, more, C, BV, K)
        load_masks(d_tp, d_write, bar_masks, tp, write_s, i_hc + (n + 1) * HV, more, E, C)
    tma.store_wait(0)
    if last_rows < C:
        row = row0 + (chunks - 1) * C
        store_tail(p_o, o_s.load(mma_v), last_rows, row, HV * V, column, mma_v, C, BV)
        if KEEP:
            y_last = reinterpret(x_buffer.index(0), gl.bfloat16, [C, BV], v_layout)
            store_tail(p_y, y_last.load(mma_v), last_rows, row, HV * V, column, mma_v, C, BV)
    if WANTED:
        for g in gl.static_range(NG):
            gl.store(p_state + g * (EG * K * V) + state_offsets(mma_k, i_v + (chunks >> 30), M, BV, K, V), S[g])
