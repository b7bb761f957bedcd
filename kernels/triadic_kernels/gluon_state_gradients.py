"""Kernel 5 in Gluon for Hopper, warp-specialised: K = V = 128, bfloat16; the mathematics of backward.py.

One program per multiprocessor takes (chunk, key head) after (chunk, key head), the value heads of the group inside.
Three warpgroups each form one of dO S^T, dW S^T and Y dS'^T slice by slice, in two halves of the key columns. A fourth
partition of one warp keeps what comes next on its way by TMA: the halves of the states in a ring, dO, dW and Y in two
buffers, and q and k, which a chunk's first products can do without, in one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from .gluon_compat import barrier, new_barrier, new_barriers, tma_load, to_f32


@gluon.jit
def half_product(states, other, half: gl.constexpr, V: gl.constexpr, K2: gl.constexpr, layout: gl.constexpr):
    """<S, dS'> over half of the value rows and half of the key columns."""
    V2: gl.constexpr = V // 2
    total = gl.zeros([16, K2], gl.float32, layout=layout)
    for i in gl.static_range(V2 // 16):
        a = to_f32(states.slice(half * V2 + i * 16, 16, 0).load(layout))
        total = total + a * to_f32(other.slice(half * V2 + i * 16, 16, 0).load(layout))
    return gl.sum(gl.sum(total, 1), 0)


@gluon.jit
def consumer(
    which: gl.constexpr, a_full, a_empty, x_full, x_empty, full, empty, a_s, x_s, state_s, other_s, p_tab, p_dtab,
    p_ddec, p_out, p_ch, NC, H: gl.constexpr, G: gl.constexpr, E: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    NS: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """out = sum_e table_e * (a S_e^T), dtab_e = rowsum(x * (a S_e^T))."""
    K2: gl.constexpr = K // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, K2, 16])
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    t = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, K2, layout=gl.SliceLayout(0, layout))
    zero = gl.zeros([C, K2], gl.float32, layout=layout)
    i = 0  # halves of states,
    m = 0  # value heads and
    n = 0  # chunks that have passed through shared memory
    for item in range(gl.program_id(0), NC * H, gl.num_programs(0)):
        i_c = item // H
        i_h = item % H
        row0 = gl.load(p_ch + i_c * 3 + 1)
        rows = gl.load(p_ch + i_c * 3 + 2)
        left = zero
        right = zero
        for j in range(gl.where(rows > 0, G, 0)):  # nothing to do beyond the last chunk
            i_hc = gl.cast(i_c * (H * G) + i_h * G + j, gl.int64)
            mbarrier.wait(a_full.index(m % 2), (m // 2) & 1)
            a = a_s.index(m % 2)
            for e in range(E):
                offset = i_hc * (3 * E * C) + e * C
                table = gl.load(p_tab + offset + t)
                state_products = 0.0
                r = gl.zeros([C], gl.float32, layout=gl.SliceLayout(1, layout))
                for half in gl.static_range(2):
                    mbarrier.wait(full.index(i % NS), (i // NS) & 1)
                    states = state_s.index(i % NS)
                    w = mma(a, states, zero, use_acc=False, is_async=True)
                    if which < 2:
                        state_products += half_product(states, other_s.index(i % NS), which, K, K2, plain)
                    w = mma_wait(0, deps=[w])
                    barrier()
                    mbarrier.arrive(empty.index(i % NS), count=1)
                    i += 1
                    if half == 0:
                        mbarrier.wait(x_full, n & 1)
                        left = left + w * table[:, None]
                    else:
                        right = right + w * table[:, None]
                    r = r + gl.sum(w * to_f32(x_s.slice(half * K2, K2, 1).load(layout)), 1)
                gl.store(p_dtab + offset + t, r)
                if which < 2:
                    gl.store(p_ddec + i_hc * E + e, state_products)
            mbarrier.arrive(a_empty.index(m % 2), count=1)  # every warp has passed the last barrier
            m += 1
        if rows > 0:
            barrier()
            mbarrier.arrive(x_empty, count=1)
            n += 1
        p = p_out + ((row0 + t).to(gl.int64) * (H * K) + i_h * K)[:, None] + d[None, :]
        mask = (t < rows)[:, None] & (d >= 0)[None, :]
        gl.store(p, left.to(gl.bfloat16), mask=mask)
        gl.store(p + K2, right.to(gl.bfloat16), mask=mask)


@gluon.jit
def producer(
    a_full, a_empty, x_full, x_empty, full, empty, q_s, k_s, do_s, y_s, dw_s, h_s, dh_s, d_q, d_k, d_do, d_y, d_dw,
    d_h, d_dh, p_ch, NC, H: gl.constexpr, G: gl.constexpr, E: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    NS: gl.constexpr,
):  # fmt: skip
    K2: gl.constexpr = K // 2
    i = 0
    m = 0
    n = 0
    for item in range(gl.program_id(0), NC * H, gl.num_programs(0)):
        i_c = item // H
        i_h = item % H
        row0 = gl.load(p_ch + i_c * 3 + 1)
        rows = gl.load(p_ch + i_c * 3 + 2)
        for j in range(gl.where(rows > 0, G, 0)):
            i_hv = i_h * G + j
            mbarrier.wait(a_empty.index(m % 2), ((m // 2) & 1) ^ 1)  # at once the first time
            mbarrier.expect(a_full.index(m % 2), 3 * C * K * 2)
            tma_load(d_do, [row0, i_hv * K], a_full.index(m % 2), do_s.index(m % 2))
            tma_load(d_dw, [row0, i_hv * K], a_full.index(m % 2), dw_s.index(m % 2))
            tma_load(d_y, [row0, i_hv * K], a_full.index(m % 2), y_s.index(m % 2))
            m += 1
            for e in range(E):
                i_state = ((i_c * (H * G) + i_hv) * E + e) * K
                for half in gl.static_range(2):
                    stage = i % NS
                    mbarrier.wait(empty.index(stage), ((i // NS) & 1) ^ 1)
                    mbarrier.expect(full.index(stage), 2 * K * K2 * 2)
                    tma_load(d_h, [i_state, half * K2], full.index(stage), h_s.index(stage))
                    tma_load(d_dh, [i_state, half * K2], full.index(stage), dh_s.index(stage))
                    i += 1
                if (j == 0) & (e == 0):  # only now, since the last chunk is done with q and k at its very end
                    mbarrier.wait(x_empty, (n & 1) ^ 1)
                    mbarrier.expect(x_full, 2 * C * K * 2)
                    tma_load(d_q, [row0, i_h * K], x_full, q_s)
                    tma_load(d_k, [row0, i_h * K], x_full, k_s)
                    n += 1


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
    do_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], d_q.layout)
    dw_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], d_q.layout)
    y_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], d_q.layout)
    h_s = gl.allocate_shared_memory(gl.bfloat16, [NS, K, K // 2], d_h.layout)
    dh_s = gl.allocate_shared_memory(gl.bfloat16, [NS, K, K // 2], d_h.layout)
    a_full = new_barriers(2, 1)
    a_empty = new_barriers(2, 3)
    x_full = new_barrier(1)
    x_empty = new_barrier(3)
    full = new_barriers(NS, 1)
    empty = new_barriers(NS, 3)
    fence_async_shared()
    barrier()
    second = HV * NC.to(gl.int64) * E  # of the two parts of ddec
    gl.warp_specialize(
        [
            (consumer, (0, a_full, a_empty, x_full, x_empty, full, empty, do_s, q_s, h_s, dh_s, p_tab + E * C, p_dtab,
                        p_ddec, p_dq, p_ch, NC, H, G, E, K, C, NS, NW)),
            (consumer, (1, a_full, a_empty, x_full, x_empty, full, empty, dw_s, k_s, h_s, dh_s, p_tab, p_dtab + E * C,
                        p_ddec + second, p_dkr, p_ch, NC, H, G, E, K, C, NS, NW)),
            (consumer, (2, a_full, a_empty, x_full, x_empty, full, empty, y_s, k_s, dh_s, h_s, p_tab + 2 * E * C,
                        p_dtab + 2 * E * C, p_ddec, p_dkw, p_ch, NC, H, G, E, K, C, NS, NW)),
            (producer, (a_full, a_empty, x_full, x_empty, full, empty, q_s, k_s, do_s, y_s, dw_s, h_s, dh_s, d_q, d_k,
                        d_do, d_y, d_dw, d_h, d_dh, p_ch, NC, H, G, E, K, C, NS)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )  # fmt: skip
