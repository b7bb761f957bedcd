"""Kernel 5 in Gluon for Hopper, warp-specialised: K = V = 128, bfloat16; the mathematics of backward.py.

One program per multiprocessor takes (chunk, key head) after (chunk, key head), the value heads of the group inside.
Three warpgroups each form one of dO S^T, dW S^T and Y dS'^T slice by slice, and a fourth partition of one warp keeps
the states of the next slices coming by TMA, those of the next chunk too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from .gluon_compat import barrier, new_barrier, new_barriers, tma_load, to_f32


@gluon.jit
def half_product(states, other, half: gl.constexpr, K: gl.constexpr, layout: gl.constexpr):
    """<S, dS'> over half of the value rows."""
    V2: gl.constexpr = K // 2
    total = gl.zeros([16, K], gl.float32, layout=layout)
    for i in gl.static_range(V2 // 16):
        a = to_f32(states.slice(half * V2 + i * 16, 16, 0).load(layout))
        total = total + a * to_f32(other.slice(half * V2 + i * 16, 16, 0).load(layout))
    return gl.sum(gl.sum(total, 1), 0)


@gluon.jit
def consumer(
    which: gl.constexpr, operands, released, full, empty, a_s, x_s, state_s, other_s, p_tab, p_dtab, p_ddec, p_out,
    p_ch, NC, H: gl.constexpr, G: gl.constexpr, E: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    NS: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """out = sum_e table_e * (a S_e^T), dtab_e = rowsum(x * (a S_e^T)), in two halves of the key columns."""
    K2: gl.constexpr = K // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, K2, 16])
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    t = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    zero = gl.zeros([C, K2], gl.float32, layout=layout)
    i = 0  # slices and
    j = 0  # value heads that have passed through shared memory
    for item in range(gl.program_id(0), NC * H, gl.num_programs(0)):
        i_c = item // H
        i_h = item % H
        row0 = gl.load(p_ch + i_c * 3 + 1)
        rows = gl.load(p_ch + i_c * 3 + 2)
        left = zero
        right = zero
        for step in range(gl.where(rows > 0, G * E, 0)):  # nothing to do beyond the last chunk
            e = step % E
            i_hc = i_c * (H * G) + i_h * G + step // E
            offset = gl.cast(i_hc, gl.int64) * (3 * E * C) + e * C
            if e == 0:
                mbarrier.wait(operands[which], j & 1)
                if which == 2:  # the third reads K too
                    mbarrier.wait(operands[1], j & 1)
                j += 1
            table = gl.load(p_tab + offset + t)
            mbarrier.wait(full.index(i % NS), (i // NS) & 1)
            states = state_s.index(i % NS)
            w = mma(a_s, states.slice(0, K2, 1), zero, use_acc=False, is_async=True)
            if which < 2:
                state_products = half_product(states, other_s.index(i % NS), which, K, plain)
                gl.store(p_ddec + gl.cast(i_hc, gl.int64) * E + e, state_products)
            w = mma_wait(0, deps=[w])
            r = gl.sum(w * to_f32(x_s.slice(0, K2, 1).load(layout)), 1)
            left = left + w * table[:, None]
            w = mma(a_s, states.slice(K2, K2, 1), zero, use_acc=False, is_async=True)
            w = mma_wait(0, deps=[w])
            barrier()
            mbarrier.arrive(empty.index(i % NS), count=1)
            i += 1
            r = r + gl.sum(w * to_f32(x_s.slice(K2, K2, 1).load(layout)), 1)
            right = right + w * table[:, None]
            gl.store(p_dtab + offset + t, r)
            if e == E - 1:
                barrier()
                mbarrier.arrive(released[which], count=1)
                if which == 2:  # the third reads K too
                    mbarrier.arrive(released[1], count=1)
        out: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [NW, 1], [1, 0])
        t_out = gl.arange(0, C, layout=gl.SliceLayout(1, out))
        d_out = gl.arange(0, K2, layout=gl.SliceLayout(0, out))
        p = p_out + ((row0 + t_out).to(gl.int64) * (H * K) + i_h * K)[:, None] + d_out[None, :]
        mask = (t_out < rows)[:, None] & (d_out >= 0)[None, :]
        gl.store(p, gl.convert_layout(left.to(gl.bfloat16), out), mask=mask)
        gl.store(p + K2, gl.convert_layout(right.to(gl.bfloat16), out), mask=mask)


@gluon.jit
def load_states(d_h, d_dh, full, empty, h_s, dh_s, i_state, i, K: gl.constexpr, NS: gl.constexpr):
    mbarrier.wait(empty.index(i % NS), ((i // NS) & 1) ^ 1)
    mbarrier.expect(full.index(i % NS), 2 * K * K * 2)
    tma_load(d_h, [i_state, 0], full.index(i % NS), h_s.index(i % NS))
    tma_load(d_dh, [i_state, 0], full.index(i % NS), dh_s.index(i % NS))


@gluon.jit
def producer(
    operands, released, full, empty, q_s, k_s, do_s, y_s, dw_s, h_s, dh_s, d_q, d_k, d_do, d_y, d_dw, d_h, d_dh, p_ch,
    NC, H: gl.constexpr, G: gl.constexpr, E: gl.constexpr, K: gl.constexpr, C: gl.constexpr, NS: gl.constexpr,
):  # fmt: skip
    """The states of a value head's first slice are on their way before its operands, for which one warpgroup after the
    other makes room.
    """
    i = 0
    j = 0
    for item in range(gl.program_id(0), NC * H, gl.num_programs(0)):
        i_c = item // H
        i_h = item % H
        row0 = gl.load(p_ch + i_c * 3 + 1)
        rows = gl.load(p_ch + i_c * 3 + 2)
        for step in range(gl.where(rows > 0, G * E, 0)):
            i_hv = i_h * G + step // E
            i_state = ((i_c * (H * G) + i_hv) * E + step % E) * K
            load_states(d_h, d_dh, full, empty, h_s, dh_s, i_state, i, K, NS)
            if step % E == 0:
                phase = (j & 1) ^ 1  # of an empty buffer: no wait the first time
                j += 1
                mbarrier.wait(released[2], phase)
                mbarrier.expect(operands[2], C * K * 2)
                tma_load(d_y, [row0, i_hv * K], operands[2], y_s)
                mbarrier.wait(released[1], phase)
                mbarrier.expect(operands[1], 2 * C * K * 2)
                tma_load(d_k, [row0, i_h * K], operands[1], k_s)
                tma_load(d_dw, [row0, i_hv * K], operands[1], dw_s)
                mbarrier.wait(released[0], phase)
                mbarrier.expect(operands[0], 2 * C * K * 2)
                tma_load(d_do, [row0, i_hv * K], operands[0], do_s)
                tma_load(d_q, [row0, i_h * K], operands[0], q_s)
            i += 1


@gluon.jit(do_not_specialize=["NC"])
def state_gradients_kernel(
    d_q, d_k, d_do, d_y, d_dw, d_h, d_dh, p_tab, p_ch, p_dq, p_dkr, p_dkw, p_dtab, p_ddec, NC,
    H: gl.constexpr, HV: gl.constexpr, E: gl.constexpr, K: gl.constexpr, C: gl.constexpr, NS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Outputs as in backward.state_gradients_kernel, dtab in one part, ddec in two (halves of the value rows)."""
    NW: gl.constexpr = gl.num_warps()
    G: gl.constexpr = HV // H
    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    y_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    dw_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], d_q.layout)
    h_s = gl.allocate_shared_memory(gl.bfloat16, [NS, K, K], d_h.layout)
    dh_s = gl.allocate_shared_memory(gl.bfloat16, [NS, K, K], d_h.layout)
    # one for each warpgroup: dO and Q; dW and K, which the third reads too; Y
    operands = (new_barrier(1), new_barrier(1), new_barrier(1))
    released = (new_barrier(1), new_barrier(2), new_barrier(1))
    full = new_barriers(NS, 1)
    empty = new_barriers(NS, 3)
    fence_async_shared()
    barrier()
    second = HV * NC.to(gl.int64) * E  # of the two parts of ddec
    gl.warp_specialize(
        [
            (consumer, (0, operands, released, full, empty, do_s, q_s, h_s, dh_s, p_tab + E * C, p_dtab, p_ddec,
                        p_dq, p_ch, NC, H, G, E, K, C, NS, NW)),
            (consumer, (1, operands, released, full, empty, dw_s, k_s, h_s, dh_s, p_tab, p_dtab + E * C,
                        p_ddec + second, p_dkr, p_ch, NC, H, G, E, K, C, NS, NW)),
            (consumer, (2, operands, released, full, empty, y_s, k_s, dh_s, h_s, p_tab + 2 * E * C, p_dtab + 2 * E * C,
                        p_ddec, p_dkw, p_ch, NC, H, G, E, K, C, NS, NW)),
            (producer, (operands, released, full, empty, q_s, k_s, do_s, y_s, dw_s, h_s, dh_s, d_q, d_k, d_do, d_y,
                        d_dw, d_h, d_dh, p_ch, NC, H, G, E, K, C, NS)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )  # fmt: skip
