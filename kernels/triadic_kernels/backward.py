"""Kernels 4 and 5: the reverse recurrence, and the state part of all gradients, plain Triton, any K, V and E.

MATH.md, backward; letters as in masks.py; dS' is the gradient of the state at the end of the chunk, dS at its start.
Kernel 4:  dY = sum_e diag(beta c_e) K dS'_e        dW = dV = PT^T dO + A'^T dY
           dS_e = exp(gc_e[C]) dS'_e + Q^T diag(b_e) dO - K^T diag(a_e) dW
Kernel 5:  dq = sum_e diag(b_e) dO S_e^T            dk = -sum_e diag(a_e) dW S_e^T + sum_e diag(beta c_e) Y dS'_e^T
           and the row sums of the same products against q and k, which kernel 6 turns into gradients of q2, k2, g.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["NC"])
def reverse_kernel(
    p_q, p_k, p_do, p_tp, p_tab, p_dec, p_ch, p_seq, p_order, p_dstate, p_dw, p_dh, NC,
    H: tl.constexpr, HV: tl.constexpr, E: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid and in-place state as in forward_kernel; p_dstate holds the gradient of the final state and ends as that of
    the initial state.
    """
    i_v = tl.program_id(0) % (V // BV)
    i_hv = tl.program_id(0) // (V // BV) % HV
    i_n = tl.load(p_order + tl.program_id(0) // (V // BV * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    chunk0, chunks = tl.load(p_seq + i_n * 2).to(tl.int64), tl.load(p_seq + i_n * 2 + 1)
    dtype: tl.constexpr = p_do.dtype.element_ty
    o_t, o_k, o_v, o_s = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    p_dstate += (i_n * HV + i_hv) * (E * K * V) + o_k[:, None] * V + o_v[None, :]
    for i in range(chunks):
        i_c = chunk0 + (chunks - 1 - i)
        i_hc = i_c * HV + i_hv
        row, valid = tl.load(p_ch + i_c * 3 + 1).to(tl.int64) + o_t, tl.load(p_ch + i_c * 3 + 2)
        m_t = (o_t < valid)[:, None]
        p_t = p_tab + i_hc * (3 * E * C) + o_t
        p_x = (row * HV + i_hv)[:, None] * V + o_v[None, :]
        b_do = tl.load(p_do + p_x, mask=m_t, other=0.0)  # [C, BV]
        b_dy = tl.zeros([C, BV], tl.float32)
        for i_k in range(0, K, BK):
            p_qk = (row * H + i_h)[:, None] * K + i_k + o_k[None, :]
            b_k = tl.load(p_k + p_qk, mask=m_t, other=0.0)  # [C, BK]
            for e in range(E):
                b_ds = tl.load(p_dstate + e * (K * V) + i_k * V).to(dtype)  # [BK, BV]
                tl.store(p_dh + (i_hc * E + e) * (K * V) + (i_k + o_k)[:, None] + o_v[None, :] * K, b_ds)
                b_dy += tl.load(p_t + (2 * E + e) * C)[:, None] * tl.dot(b_k, b_ds, input_precision=PREC)
        p_m = p_tp + i_hc * (2 * C * C) + o_t[:, None] + o_s[None, :] * C  # transposed
        b_dw = tl.dot(tl.load(p_m + C * C), b_do, input_precision=PREC)
        if DELTA:
            b_dw = tl.dot(tl.load(p_m), b_dy.to(dtype), b_dw, input_precision=PREC)
        else:
            b_dw += b_dy
        tl.store(p_dw + p_x, b_dw.to(dtype), mask=m_t)
        tl.debug_barrier()  # the state is about to change under loads that other threads may still do
        for i_k in range(0, K, BK):
            p_t_ = (row * H + i_h)[None, :] * K + (i_k + o_k)[:, None]
            b_qt = tl.load(p_q + p_t_, mask=(o_t < valid)[None, :], other=0.0)  # [BK, C]
            if DELTA:
                b_kt = tl.load(p_k + p_t_, mask=(o_t < valid)[None, :], other=0.0)
            for e in range(E):
                p_s = p_dstate + e * (K * V) + i_k * V
                b_ds = tl.load(p_s) * tl.load(p_dec + i_hc * E + e)
                b_x = (tl.load(p_t + (E + e) * C)[:, None] * b_do.to(tl.float32)).to(dtype)
                b_ds = tl.dot(b_qt, b_x, b_ds, input_precision=PREC)
                if DELTA:
                    b_x = (tl.load(p_t + e * C)[:, None] * b_dw).to(dtype)
                    b_ds = tl.dot(b_kt, b_x, b_ds, input_precision=PREC)
                tl.store(p_s, b_ds)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["NC"])
def state_gradients_kernel(
    p_q, p_k, p_do, p_y, p_dw, p_h, p_dh, p_tab, p_ch, p_dq, p_dkr, p_dkw, p_dtab, p_ddec, NC,
    H: tl.constexpr, HV: tl.constexpr, E: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, key head, block of BK key columns); the value heads of the group are looped inside.

    dq, dkr (read), dkw (write) [R, H, K]; dtab [K/BK, NC, HV, 3, E, C] row sums of q * (dO S^T), k * (dW S^T), k * (Y
    dS'^T) over this block of columns,
    without the gates; ddec [K/BK, NC, HV, E] = <S, dS'> over this block.
    """
    i_c, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row0, valid = tl.load(p_ch + i_c * 3 + 1).to(tl.int64), tl.load(p_ch + i_c * 3 + 2)
    if valid == 0:
        return
    o_t, o_k, o_v = tl.arange(0, C), i_b * BK + tl.arange(0, BK), tl.arange(0, BV)
    m_t = (o_t < valid)[:, None]
    row = row0 + o_t
    p_qk = (row * H + i_h)[:, None] * K + o_k[None, :]
    b_q = tl.load(p_q + p_qk, mask=m_t, other=0.0).to(tl.float32)  # [C, BK]
    b_k = tl.load(p_k + p_qk, mask=m_t, other=0.0).to(tl.float32)
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dkr = tl.zeros([C, BK], tl.float32)
    b_dkw = tl.zeros([C, BK], tl.float32)
    for j in range(HV // H):
        i_hv = i_h * (HV // H) + j
        i_hc = i_c.to(tl.int64) * HV + i_hv
        p_t = p_tab + i_hc * (3 * E * C) + o_t
        p_r = p_dtab + (i_b * HV * NC + i_hc) * (3 * E * C) + o_t
        for e in range(E):
            b_x = tl.zeros([C, BK], tl.float32)
            b_r = tl.zeros([C, BK], tl.float32)
            b_w = tl.zeros([C, BK], tl.float32)
            b_hd = tl.zeros([BV, BK], tl.float32)
            for i_v in range(0, V, BV):
                p_s = (i_hc * E + e) * (K * V) + (i_v + o_v)[:, None] * K + o_k[None, :]
                p_x = (row * HV + i_hv)[:, None] * V + i_v + o_v[None, :]
                b_h, b_dh = tl.load(p_h + p_s), tl.load(p_dh + p_s)  # [BV, BK]
                b_x = tl.dot(tl.load(p_do + p_x, mask=m_t, other=0.0), b_h, b_x, input_precision=PREC)
                b_w = tl.dot(tl.load(p_y + p_x, mask=m_t, other=0.0), b_dh, b_w, input_precision=PREC)
                if DELTA:
                    b_r = tl.dot(tl.load(p_dw + p_x, mask=m_t, other=0.0), b_h, b_r, input_precision=PREC)
                b_hd += b_h.to(tl.float32) * b_dh.to(tl.float32)
            b_dq += tl.load(p_t + (E + e) * C)[:, None] * b_x
            b_dkw += tl.load(p_t + (2 * E + e) * C)[:, None] * b_w
            tl.store(p_r + e * C, tl.sum(b_q * b_x, 1))
            tl.store(p_r + (2 * E + e) * C, tl.sum(b_k * b_w, 1))
            if DELTA:
                b_dkr += tl.load(p_t + e * C)[:, None] * b_r
                tl.store(p_r + (E + e) * C, tl.sum(b_k * b_r, 1))
            tl.store(p_ddec + (i_b * HV * NC + i_hc) * E + e, tl.sum(tl.sum(b_hd, 1), 0))
    tl.store(p_dq + p_qk, b_dq.to(p_dq.dtype.element_ty), mask=m_t)
    tl.store(p_dkw + p_qk, b_dkw.to(p_dkw.dtype.element_ty), mask=m_t)
    if DELTA:
        tl.store(p_dkr + p_qk, b_dkr.to(p_dkr.dtype.element_ty), mask=m_t)
