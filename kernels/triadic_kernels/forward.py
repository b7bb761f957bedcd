"""Kernel 3: the recurrence over chunks, plain Triton, any K, V and E (MATH.md, chunkwise form; letters as in masks.py).

    W = V - sum_e diag(a_e) K S_e                   Y = A' W
    O = sum_e diag(b_e) Q S_e + PT W                S_e <- exp(gc_e[C]) S_e + K^T diag(beta c_e) Y

The state of a program, [E, K, BV] float32, lives in the final-state tensor itself: it starts there as the initial
state and is updated in place, so states of any size fit, it stays in the caches while a sequence runs, and a sequence
without tokens needs no special case.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["NC"])
def forward_kernel(
    p_q, p_k, p_v, p_tp, p_tab, p_dec, p_ch, p_seq, p_order, p_state, p_o, p_y, p_h, NC,
    H: tl.constexpr, HV: tl.constexpr, E: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, longest first; value head; tile of BV value columns)."""
    i_v = tl.program_id(0) % (V // BV)
    i_hv = tl.program_id(0) // (V // BV) % HV
    i_n = tl.load(p_order + tl.program_id(0) // (V // BV * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    chunk0, chunks = tl.load(p_seq + i_n * 2).to(tl.int64), tl.load(p_seq + i_n * 2 + 1)
    dtype: tl.constexpr = p_v.dtype.element_ty
    o_t, o_k, o_v, o_s = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    p_state += (i_n * HV + i_hv) * (E * K * V) + o_k[:, None] * V + o_v[None, :]
    for i in range(chunks):
        i_c = chunk0 + i
        i_hc = i_c * HV + i_hv
        row, valid = tl.load(p_ch + i_c * 3 + 1).to(tl.int64) + o_t, tl.load(p_ch + i_c * 3 + 2)
        m_t = (o_t < valid)[:, None]
        p_t = p_tab + i_hc * (3 * E * C) + o_t
        p_x = (row * HV + i_hv)[:, None] * V + o_v[None, :]
        b_w = tl.load(p_v + p_x, mask=m_t, other=0.0).to(tl.float32)  # [C, BV]
        b_o = tl.zeros([C, BV], tl.float32)
        for i_k in range(0, K, BK):
            p_qk = (row * H + i_h)[:, None] * K + i_k + o_k[None, :]
            b_q = tl.load(p_q + p_qk, mask=m_t, other=0.0)  # [C, BK]
            if DELTA:
                b_k = tl.load(p_k + p_qk, mask=m_t, other=0.0)
            for e in range(E):
                b_s = tl.load(p_state + e * (K * V) + i_k * V).to(dtype)  # [BK, BV]
                if KEEP:
                    tl.store(p_h + (i_hc * E + e) * (K * V) + (i_k + o_k)[:, None] + o_v[None, :] * K, b_s)
                b_o += tl.load(p_t + (E + e) * C)[:, None] * tl.dot(b_q, b_s, input_precision=PREC)
                if DELTA:
                    b_w += tl.load(p_t + e * C)[:, None] * tl.dot(b_k, b_s, input_precision=PREC)
        p_m = p_tp + i_hc * (2 * C * C) + o_t[:, None] * C + o_s[None, :]
        b_w = b_w.to(dtype)
        b_o = tl.dot(tl.load(p_m + C * C), b_w, b_o, input_precision=PREC)
        tl.store(p_o + p_x, b_o.to(dtype), mask=m_t)
        if DELTA:
            b_y = tl.dot(tl.load(p_m), b_w, input_precision=PREC)
            if KEEP:
                tl.store(p_y + p_x, b_y.to(dtype), mask=m_t)
        else:
            b_y = b_w.to(tl.float32)
        tl.debug_barrier()  # the state is about to change under loads that other threads may still do
        for i_k in range(0, K, BK):
            p_kt = p_k + (row * H + i_h)[None, :] * K + (i_k + o_k)[:, None]
            b_kt = tl.load(p_kt, mask=(o_t < valid)[None, :], other=0.0)  # [BK, C]
            for e in range(E):
                p_s = p_state + e * (K * V) + i_k * V
                b_u = (tl.load(p_t + (2 * E + e) * C)[:, None] * b_y).to(dtype)
                b_s = tl.load(p_s) * tl.load(p_dec + i_hc * E + e)
                tl.store(p_s, tl.dot(b_kt, b_u, b_s, input_precision=PREC))
        tl.debug_barrier()
