"""Kernel 6: gradients through the masks, and the final gradients of q, k, q2, k2, g and beta (MATH.md, backward).

Letters and tables as in masks.py; x_q, x_r, x_w are the row sums of kernel 5, and with Y the residuals
    N = -tril(dW Y^T, -1)      M = scale tril(dO Y^T)      Z = N * K K^T      Z' = M * Q K^T
    dk2read_e = -e^gc x_r + rowsum_s(Z G_e (beta k2)_s)      dq2_e = scale e^gc x_q + rowsum_s(Z' G_e (beta k2)_s)
    w_e       = e^(gc[C]-gc) x_w + colsum_r(Z G_e k2_r) + colsum_r(Z' G_e q2_r)
    dk2 = dk2read + beta w      dbeta = sum_e k2 w      dgc = q2 dq2 + k2 (dk2read - beta w)
    dg = reverse cumsum(dgc) + e^gc[C] <S, dS'> + sum_r beta k2 e^(gc[C]-gc) x_w
    dq += (M * R') K            dk += (M * R')^T Q + (N * R + (N * R)^T) K
where R and R' carry diag(beta) and sums run over the value heads of the group.

Off-diagonal blocks use the factors of masks.decay_factors. No product takes a transposed product as its first operand
(miscompiled for Hopper by Triton 3.4 to 3.7.0): the transposed products are formed as X^T G, with X^T loaded
transposed, and turned round once at the end.
"""

import triton
import triton.language as tl

from .masks import block_diagonal, decay_factors, diagonal_blocks


@triton.jit
def products(
    p_q, p_k, p_y, p_do, p_dw, row_k, row_v, m_t, scale,
    K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    DELTA: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """M, N, Z', Z [C, C], the head dims reduced in blocks of BD so that operand tiles pass through shared memory.
    row_k, row_v [C].
    """
    o_t, o_d = tl.arange(0, C), tl.arange(0, BD)
    b_m = tl.zeros([C, C], tl.float32)
    b_n = tl.zeros([C, C], tl.float32)
    b_qk = tl.zeros([C, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    for i_d in tl.range(0, V, BD, num_stages=STAGES):
        p_x = row_v[:, None] * V + i_d + o_d[None, :]
        b_yt = tl.load(p_y + row_v[None, :] * V + (i_d + o_d)[:, None], mask=m_t[None, :], other=0.0)
        b_m = tl.dot(tl.load(p_do + p_x, mask=m_t[:, None], other=0.0), b_yt, b_m, input_precision=PREC)
        if DELTA:
            b_n = tl.dot(tl.load(p_dw + p_x, mask=m_t[:, None], other=0.0), b_yt, b_n, input_precision=PREC)
    for i_d in tl.range(0, K, BD, num_stages=STAGES):
        p_x = row_k[:, None] * K + i_d + o_d[None, :]
        b_kt = tl.load(p_k + row_k[None, :] * K + (i_d + o_d)[:, None], mask=m_t[None, :], other=0.0)
        b_qk = tl.dot(tl.load(p_q + p_x, mask=m_t[:, None], other=0.0), b_kt, b_qk, input_precision=PREC)
        if DELTA:
            b_kk = tl.dot(tl.load(p_k + p_x, mask=m_t[:, None], other=0.0), b_kt, b_kk, input_precision=PREC)
    b_m = tl.where(o_t[:, None] >= o_t[None, :], scale * b_m, 0.0)
    b_n = tl.where(o_t[:, None] > o_t[None, :], -b_n, 0.0)
    return b_m, b_n, b_m * b_qk, b_n * b_kk


@triton.jit
def column_sums(
    b_zq, b_z, p_gc, p_q2t, p_k2t, EP: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr
):
    """Off-diagonal blocks of colsum_r(Z' G_e q2_r) + colsum_r(Z G_e k2_r), [C, EP].

    The factor is built transposed from memory, padded to 64 rows (with fewer, Triton leaves wgmma and replicates the
    operand in every warp).
    """
    NB: tl.constexpr = C // 16
    X: tl.constexpr = NB * EP
    XT: tl.constexpr = X if X > 64 else 64
    o_t, o_y = tl.arange(0, C), tl.arange(0, XT)
    i_b, i_e = (o_y // EP) % NB, o_y % EP
    b_m = tl.load(p_gc + i_e * C + i_b * 16 + 15)
    o = i_e[:, None] * C + o_t[None, :]
    b_gc = tl.load(p_gc + o)
    b_left = tl.exp2(tl.where((o_t // 16)[None, :] > i_b[:, None], b_gc - b_m[:, None], float("-inf")))
    b_x = tl.dot(tl.load(p_q2t + o) * b_left, b_zq, input_precision=PREC)
    if DELTA:
        b_x = tl.dot(tl.load(p_k2t + o) * b_left, b_z, b_x, input_precision=PREC)
    inside = ((o_t // 16)[None, :] == i_b[:, None]) & (o_y < X)[:, None]
    b_x = tl.where(inside, b_x * tl.exp2(tl.minimum(b_m[:, None] - b_gc, 0.0)), 0.0)
    return tl.trans(tl.sum(tl.reshape(b_x, [XT // EP, EP, C]), 0))


@triton.jit
def diagonal_sums(
    b_q2, b_k2, b_w, b_zq, b_z, p_gc, p_q2t, p_k2t, p_bt, same_block,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Adds the diagonal 16 x 16 blocks to dq2, dk2read and w [C, EP]; also returns R diag(beta) and R' diag(beta)
    there, [C/16, 16, 16].
    """
    NB: tl.constexpr = C // 16
    o_i, o_e = tl.arange(0, 16), tl.arange(0, EP)
    o_r = tl.arange(0, NB)[:, None] * 16 + o_i[None, :]
    lower = (o_i[:, None] >= o_i[None, :])[None, :, :]
    b_zqd = diagonal_blocks(b_zq, same_block, C)
    b_zd = diagonal_blocks(b_z, same_block, C)
    b_r = tl.zeros([NB, 16, 16], tl.float32)
    b_rq = tl.zeros([NB, 16, 16], tl.float32)
    b_beta = tl.load(p_bt + o_r)
    for e in range(E):
        b_gc, b_kr, b_qr = tl.load(p_gc + e * C + o_r), tl.load(p_k2t + e * C + o_r), tl.load(p_q2t + e * C + o_r)
        b_x = tl.exp2(tl.where(lower, b_gc[:, :, None] - b_gc[:, None, :], float("-inf")))
        b_xk = b_x * (b_kr * b_beta)[:, None, :]
        b_rq += b_xk * b_qr[:, :, None]
        b_cols = b_zqd * b_x * b_qr[:, :, None]
        this = (o_e == e)[None, :]
        b_q2 += tl.where(this, tl.reshape(tl.sum(b_zqd * b_xk, 2), [C])[:, None], 0.0)
        if DELTA:
            b_r += b_xk * b_kr[:, :, None]
            b_cols += b_zd * b_x * b_kr[:, :, None]
            b_k2 += tl.where(this, tl.reshape(tl.sum(b_zd * b_xk, 2), [C])[:, None], 0.0)
        b_w += tl.where(this, tl.reshape(tl.sum(b_cols, 1), [C])[:, None], 0.0)
    return b_q2, b_k2, b_w, b_r, b_rq


@triton.jit
def partial_sums(p, o, m, stride, NKB: tl.constexpr):
    """Sum over kernel 5's blocks of key columns."""
    b = tl.load(p + o, mask=m, other=0.0)
    for i in tl.static_range(1, NKB):
        b += tl.load(p + i * stride + o, mask=m, other=0.0)
    return b


@triton.jit
def gate_gradients(
    b_q2, b_k2, b_w, p_gc, p_q2t, p_k2t, p_bt, p_dtab, p_ddec, p_dbeta, p_dg, pos, m_t, scale, chunks_all,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, NKB: tl.constexpr, NDB: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Adds the state parts to dq2, dk2read and w, stores dbeta and dg at rows pos [C]; returns dq2 and dk2 [C, EP].
    chunks_all = HV * NC.
    """
    o_t, o_e = tl.arange(0, C), tl.arange(0, EP)
    o = o_e[None, :] * C + o_t[:, None]
    m_e = o_e < E
    m = m_t[:, None] & m_e[None, :]
    stride = chunks_all.to(tl.int64) * (3 * E * C)
    b_gc, b_kt, b_qt, b_beta = tl.load(p_gc + o), tl.load(p_k2t + o), tl.load(p_q2t + o), tl.load(p_bt + o_t)
    b_last = tl.load(p_gc + o_e * C + C - 1)
    b_decay = tl.exp2(b_gc)
    b_q2 += scale * b_decay * partial_sums(p_dtab, o, m, stride, NKB)
    if DELTA:
        b_k2 -= b_decay * partial_sums(p_dtab + E * C, o, m, stride, NKB)
    b_sw = tl.exp2(b_last[None, :] - b_gc) * partial_sums(p_dtab + 2 * E * C, o, m, stride, NKB)
    b_w += b_sw
    tl.store(p_dbeta + pos, tl.sum(b_kt * b_w, 1), mask=m_t)
    b_bw = b_beta[:, None] * b_w
    if GATE != "none":
        b_end = tl.exp2(b_last) * partial_sums(p_ddec, o_e, m_e, chunks_all * E, NDB) + tl.sum(
            b_kt * b_beta[:, None] * b_sw, 0
        )
        b_dg = tl.cumsum(b_qt * b_q2 + b_kt * (b_k2 - b_bw), 0, reverse=True) + b_end[None, :]
        if GATE == "slice":
            tl.store(p_dg + pos[:, None] * E + o_e[None, :], b_dg, mask=m)
        else:
            tl.store(p_dg + pos, tl.sum(tl.where(m_e[None, :], b_dg, 0.0), 1), mask=m_t)
    return b_q2, b_k2 + b_bw


@triton.jit
def query_key_gradients(
    p_q, p_k, p_dqs, p_dkr, p_dkw, p_dq, p_dk, b_p, b_g, row, m_t,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq = dqs + P K and dk = dkr + dkw + P^T Q + (G + G^T) K with P = M * R', G = N * R [C, C]; row [C]."""
    o_d = tl.arange(0, BK)
    for i_d in range(0, K, BK):
        p_x = row[:, None] * K + i_d + o_d[None, :]
        p_xt = row[None, :] * K + (i_d + o_d)[:, None]
        b_k = tl.load(p_k + p_x, mask=m_t[:, None], other=0.0)
        b_dq = tl.dot(b_p, b_k, input_precision=PREC) + tl.load(p_dqs + p_x, mask=m_t[:, None], other=0.0)
        tl.store(p_dq + p_x, b_dq.to(p_dq.dtype.element_ty), mask=m_t[:, None])
        b_dkt = tl.dot(tl.load(p_q + p_xt, mask=m_t[None, :], other=0.0), b_p, input_precision=PREC)  # [BK, C]
        b_dk = tl.load(p_dkw + p_x, mask=m_t[:, None], other=0.0).to(tl.float32)
        if DELTA:
            b_dkt = tl.dot(tl.load(p_k + p_xt, mask=m_t[None, :], other=0.0), b_g, b_dkt, input_precision=PREC)
            b_dk += tl.dot(b_g, b_k, input_precision=PREC) + tl.load(p_dkr + p_x, mask=m_t[:, None], other=0.0)
        b_dk += tl.trans(b_dkt)
        tl.store(p_dk + p_x, b_dk.to(p_dk.dtype.element_ty), mask=m_t[:, None])


@triton.jit(do_not_specialize=["NC"])
def mask_gradients_kernel(
    p_q, p_k, p_y, p_do, p_dw, p_q2t, p_k2t, p_bt, p_gc, p_dtab, p_ddec, p_ch, p_dqs, p_dkr, p_dkw,
    p_dq, p_dk, p_dq2, p_dk2, p_dbeta, p_dg, scale, NC,
    H: tl.constexpr, HV: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, NKB: tl.constexpr, NDB: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    DELTA: tl.constexpr, GATE: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, key head); the value heads of the group are looped inside, so no sum is atomic."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    NB: tl.constexpr = C // 16
    row0, valid = tl.load(p_ch + i_c * 3 + 1).to(tl.int64), tl.load(p_ch + i_c * 3 + 2)
    if valid == 0:
        return
    o_t, o_e, o_b, o_x = tl.arange(0, C), tl.arange(0, EP), tl.arange(0, NB), tl.arange(0, NB * EP)
    m_t = o_t < valid
    same_block = o_b[:, None, None, None] == o_b[None, None, :, None]
    row_k = (row0 + o_t) * H + i_h
    i_kc = i_c.to(tl.int64) * H + i_h
    p_q2t += i_kc * (EP * C)
    p_k2t += i_kc * (EP * C)
    o = (o_x % EP)[None, :] * C + o_t[:, None]
    b_p = tl.zeros([C, C], tl.float32)
    b_g = tl.zeros([C, C], tl.float32)
    b_dq2 = tl.zeros([C, EP], tl.float32)
    b_dk2 = tl.zeros([C, EP], tl.float32)
    for j in tl.range(0, HV // H, num_stages=1, disable_licm=True):
        i_hv = i_h * (HV // H) + j
        i_hc = i_c.to(tl.int64) * HV + i_hv
        p_gj, p_bj = p_gc + i_hc * (EP * C), p_bt + i_hc * C
        pos = (row0 + o_t) * HV + i_hv
        b_m, b_n, b_zq, b_z = products(
            p_q, p_k, p_y, p_do, p_dw, row_k, pos, m_t, scale, K, V, BD, C, DELTA, PREC, STAGES
        )  # fmt: skip
        b_left, b_right = decay_factors(p_gj, p_k2t, p_bj, EP, C)
        b_q2 = tl.sum(tl.reshape(b_left * tl.dot(b_zq, b_right, input_precision=PREC), [C, NB, EP]), 1)
        b_k2 = tl.zeros([C, EP], tl.float32)
        b_rq = tl.dot(tl.load(p_q2t + o) * b_left, tl.trans(b_right), input_precision=PREC)
        if DELTA:
            b_k2 = tl.sum(tl.reshape(b_left * tl.dot(b_z, b_right, input_precision=PREC), [C, NB, EP]), 1)
            b_r = tl.dot(tl.load(p_k2t + o) * b_left, tl.trans(b_right), input_precision=PREC)
        b_w = column_sums(b_zq, b_z, p_gj, p_q2t, p_k2t, EP, C, DELTA, PREC)
        b_q2, b_k2, b_w, b_rd, b_rqd = diagonal_sums(
            b_q2, b_k2, b_w, b_zq, b_z, p_gj, p_q2t, p_k2t, p_bj, same_block, E, EP, C, DELTA
        )
        b_p += b_m * (b_rq + block_diagonal(b_rqd, same_block, C))
        if DELTA:
            b_g += b_n * (b_r + block_diagonal(b_rd, same_block, C))
        p_rj, p_ej = p_dtab + i_hc * (3 * E * C), p_ddec + i_hc * E
        b_q2, b_k2 = gate_gradients(
            b_q2, b_k2, b_w, p_gj, p_q2t, p_k2t, p_bj, p_rj, p_ej, p_dbeta, p_dg, pos, m_t, scale, HV * NC,
            E, EP, C, NKB, NDB, GATE, DELTA,
        )  # fmt: skip
        b_dq2 += b_q2
        b_dk2 += b_k2
    m = m_t[:, None] & (o_e < E)[None, :]
    tl.store(p_dq2 + row_k[:, None] * E + o_e[None, :], b_dq2, mask=m)
    tl.store(p_dk2 + row_k[:, None] * E + o_e[None, :], b_dk2, mask=m)
    dtype: tl.constexpr = p_k.dtype.element_ty
    query_key_gradients(
        p_q, p_k, p_dqs, p_dkr, p_dkw, p_dq, p_dk, b_p.to(dtype), b_g.to(dtype), row_k, m_t, K, BK, C, DELTA, PREC
    )
