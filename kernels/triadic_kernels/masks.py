"""Kernels 1 and 2: decay sums and tables of a chunk; masks and the triangular inverse (MATH.md, chunkwise form).

Letters: R rows (tokens of all sequences), NC chunks, C chunk length, H key heads, HV value heads, E second-key size,
EP = E padded to a power of two >= 4, K and V head dims. i_ index, p_ pointer, o_ offsets, m_ mask, b_ block.
Tables are chunk-major and zero beyond a tail; decays are in log2 units; gc is the inclusive sum of g inside the chunk.

    gc [NC, HV, EP, C]       k2t, q2t [NC, H, EP, C]       bt [NC, HV, C] = beta       dec [NC, HV, E] = e^gc[C]
    tab [NC, HV, 3, E, C]    -k2 e^gc (0 without the delta rule),  scale q2 e^gc,  beta k2 e^(gc[C]-gc)
    tp [NC, HV, 2, C, C]     A' = (I + tril(K K^T * R, -1) diag(beta))^-1,  PT = scale tril(Q K^T * R') diag(beta) A'

With A' the recurrence yields Y = A' W, the residual r_t of each token, and U = diag(beta) Y: nothing is divided by
beta. Every exponent is <= 0: off-diagonal 16 x 16 blocks of the decay factor through the last row m before the block
of r, exp(gc_r - gc_m) exp(gc_m - gc_s).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SMALLEST_LOG_DECAY = tl.constexpr(
    -87.0
)  # e^-87 is float32's smallest normal number; keeps the sums exact to 2^-24 * 87 per token


@triton.jit(do_not_specialize=["NC"])
def gates_kernel(
    p_q2, p_k2, p_g, p_beta, p_ch, p_tab, p_dec, p_gc, p_q2t, p_k2t, p_bt, scale, NC,
    H: tl.constexpr, HV: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    HAS_Q2: tl.constexpr, GATE: tl.constexpr, HAS_BETA: tl.constexpr, DELTA: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, value head); heads side by side share rows of memory. tab and dec only if STATES."""
    i_c, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    row0, valid = tl.load(p_ch + i_c * 3 + 1).to(tl.int64), tl.load(p_ch + i_c * 3 + 2)
    if valid == 0:
        return
    o_t, o_e = tl.arange(0, C), tl.arange(0, EP)
    m_t, m_e = o_t < valid, o_e < E
    m = m_t[:, None] & m_e[None, :]
    row = row0 + o_t
    if HAS_Q2:
        p = (row * H + i_h)[:, None] * E + o_e[None, :]
        b_k2 = tl.load(p_k2 + p, mask=m, other=0.0).to(tl.float32)  # [C, EP]
        b_q2 = tl.load(p_q2 + p, mask=m, other=0.0).to(tl.float32)
    else:
        b_k2 = tl.where(m, 1.0, 0.0)
        b_q2 = b_k2
    if GATE == "slice":
        b_g = tl.load(p_g + (row * HV + i_hv)[:, None] * E + o_e[None, :], mask=m, other=0.0).to(tl.float32)
    elif GATE == "head":
        b_g = tl.load(p_g + row * HV + i_hv, mask=m_t, other=0.0).to(tl.float32)[:, None] + tl.zeros(
            [C, EP], tl.float32
        )
    else:
        b_g = tl.zeros([C, EP], tl.float32)
    if HAS_BETA:
        b_beta = tl.load(p_beta + row * HV + i_hv, mask=m_t, other=0.0).to(tl.float32)
    else:
        b_beta = tl.where(m_t, 1.0, 0.0)

    b_gc = tl.cumsum(tl.maximum(b_g, SMALLEST_LOG_DECAY) * LOG2E, 0)
    # The last row of the cumulative sum itself: a separate sum of g rounds differently and an exponent could exceed 0.
    b_last = tl.sum(tl.where((o_t == C - 1)[:, None], b_gc, 0.0), 0)  # [EP]
    b_decay = tl.exp2(b_gc)
    i_hc = i_c.to(tl.int64) * HV + i_hv
    o = o_e[None, :] * C + o_t[:, None]
    m_o = m_e[None, :] & (o_t >= 0)[:, None]
    if STATES:
        p_tab += i_hc * (3 * E * C)
        b_write = b_beta[:, None] * b_k2 * tl.exp2(tl.minimum(b_last[None, :] - b_gc, 0.0))
        tl.store(p_tab + o, -b_k2 * b_decay if DELTA else tl.zeros([C, EP], tl.float32), mask=m_o)
        tl.store(p_tab + E * C + o, scale * b_q2 * b_decay, mask=m_o)
        tl.store(p_tab + 2 * E * C + o, b_write, mask=m_o)
        tl.store(p_dec + i_hc * E + o_e, tl.exp2(b_last), mask=m_e)
    tl.store(p_gc + i_hc * (EP * C) + o, b_gc)
    tl.store(p_bt + i_hc * C + o_t, b_beta)
    if i_hv % (HV // H) == 0:
        i_kc = i_c.to(tl.int64) * H + i_h
        tl.store(p_k2t + i_kc * (EP * C) + o, b_k2)
        tl.store(p_q2t + i_kc * (EP * C) + o, b_q2)


@triton.jit
def block_diagonal(b, same_block, C: tl.constexpr):
    """[C/16, 16, 16] -> the [C, C] matrix with these blocks on its diagonal. same_block [C/16, 1, C/16, 1]."""
    return tl.reshape(tl.where(same_block, b[:, :, None, :], 0.0), [C, C])


@triton.jit
def diagonal_blocks(b, same_block, C: tl.constexpr):
    """[C, C] -> its diagonal blocks [C/16, 16, 16]."""
    return tl.sum(tl.where(same_block, tl.reshape(b, [C // 16, 16, C // 16, 16]), 0.0), 2)


@triton.jit
def decay_factors(p_gc, p_k2t, p_bt, EP: tl.constexpr, C: tl.constexpr):
    """Off-diagonal blocks, column x = (block of s, e), m the last row of that block.

    left  [C, X] = exp(gc_r - gc_m) for rows after the block, else 0;  right [C, X] = beta k2 exp(gc_m - gc_s) inside
    the block, else 0.
    """
    X: tl.constexpr = C // 16 * EP
    o_t, o_x = tl.arange(0, C), tl.arange(0, X)
    i_b, i_e = o_x // EP, o_x % EP
    b_m = tl.load(p_gc + i_e * C + i_b * 16 + 15)
    o = i_e[None, :] * C + o_t[:, None]
    b_gc = tl.load(p_gc + o)
    later = (o_t // 16)[:, None] > i_b[None, :]
    inside = (o_t // 16)[:, None] == i_b[None, :]
    left = tl.exp2(tl.where(later, b_gc - b_m[None, :], float("-inf")))
    b_w = tl.load(p_k2t + o) * tl.load(p_bt + o_t)[:, None]
    right = tl.where(inside, b_w * tl.exp2(tl.minimum(b_m[None, :] - b_gc, 0.0)), 0.0)
    return left, right


@triton.jit
def unit_lower_inverse(b_l, same_block, C: tl.constexpr, PREC: tl.constexpr, PREC_INV: tl.constexpr):
    """(I + L)^-1 for a strictly lower L [C, C].

    A Neumann series in 8 x 8 blocks (L^8 = 0), a merge to 16 x 16, then two products to C = 64.
    """
    o_t, o_i = tl.arange(0, C), tl.arange(0, 16)
    eye = tl.where((o_i[:, None] == o_i[None, :])[None, :, :], 1.0, 0.0)
    half = ((o_i // 8)[:, None] == (o_i // 8)[None, :])[None, :, :]
    b_d = diagonal_blocks(b_l, same_block, C)  # [C/16, 16, 16]
    b_8 = tl.where(half, b_d, 0.0)
    b_off = b_d - b_8
    b_2 = tl.dot(b_8, b_8, input_precision=PREC_INV)
    b_4 = tl.dot(b_2, b_2, input_precision=PREC_INV)
    b_x = eye - b_8 + b_2 - tl.dot(b_8, b_2, input_precision=PREC_INV)
    b_x = b_x + tl.dot(b_x, b_4, input_precision=PREC_INV)
    b_x = b_x - tl.dot(tl.dot(b_x, b_off, input_precision=PREC_INV), b_x, input_precision=PREC_INV)
    b_inv = block_diagonal(b_x, same_block, C)
    # I + L = D (I + N) with N = D^-1 L_off nilpotent in blocks: N^4 = 0, (I + N)^-1 = (I - N)(I + N^2)
    b_n = tl.dot(b_inv, tl.where((o_t // 16)[:, None] > (o_t // 16)[None, :], b_l, 0.0), input_precision=PREC)
    b_y = b_inv + tl.dot(tl.dot(b_n, b_n, input_precision=PREC), b_inv, input_precision=PREC)
    return b_y - tl.dot(b_n, b_y, input_precision=PREC)


@triton.jit
def diagonal_masks(p_gc, p_q2t, p_k2t, p_bt, E: tl.constexpr, C: tl.constexpr):
    """Diagonal 16 x 16 blocks of R diag(beta) and R' diag(beta), [C/16, 16, 16] each."""
    NB: tl.constexpr = C // 16
    o_i = tl.arange(0, 16)
    o_r = tl.arange(0, NB)[:, None] * 16 + o_i[None, :]
    lower = (o_i[:, None] >= o_i[None, :])[None, :, :]
    b_r = tl.zeros([NB, 16, 16], tl.float32)
    b_rq = tl.zeros([NB, 16, 16], tl.float32)
    b_beta = tl.load(p_bt + o_r)
    for e in range(E):
        b_gc, b_k2, b_q2 = tl.load(p_gc + e * C + o_r), tl.load(p_k2t + e * C + o_r), tl.load(p_q2t + e * C + o_r)
        b_x = tl.exp2(tl.where(lower, b_gc[:, :, None] - b_gc[:, None, :], float("-inf"))) * (b_k2 * b_beta)[:, None, :]
        b_r += b_x * b_k2[:, :, None]
        b_rq += b_x * b_q2[:, :, None]
    return b_r, b_rq


@triton.jit(do_not_specialize=["NC"])
def masks_kernel(
    p_q, p_k, p_gc, p_q2t, p_k2t, p_bt, p_ch, p_tp, scale, NC,
    H: tl.constexpr, HV: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr, PREC_INV: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, key head); the value heads of the group are looped inside."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    NB: tl.constexpr = C // 16
    row0, valid = tl.load(p_ch + i_c * 3 + 1).to(tl.int64), tl.load(p_ch + i_c * 3 + 2)
    if valid == 0:
        return
    o_t, o_d, o_b = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, NB)
    m_t = o_t < valid
    same_block = o_b[:, None, None, None] == o_b[None, None, :, None]
    i_kc = i_c.to(tl.int64) * H + i_h
    p_k2t += i_kc * (EP * C)
    p_q2t += i_kc * (EP * C)
    row = (row0 + o_t) * H + i_h
    o_x = tl.arange(0, NB * EP)
    o = (o_x % EP)[None, :] * C + o_t[:, None]
    b_qk = tl.zeros([C, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        b_q = tl.load(p_q + row[:, None] * K + i_k + o_d[None, :], mask=m_t[:, None], other=0.0)
        b_k = tl.load(p_k + row[:, None] * K + i_k + o_d[None, :], mask=m_t[:, None], other=0.0)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PREC)
        if DELTA:
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PREC)
    for j in range(HV // H):
        i_hc = i_c.to(tl.int64) * HV + i_h * (HV // H) + j
        p_g, p_b = p_gc + i_hc * (EP * C), p_bt + i_hc * C
        b_left, b_right = decay_factors(p_g, p_k2t, p_b, EP, C)
        b_r, b_rq = diagonal_masks(p_g, p_q2t, p_k2t, p_b, E, C)
        b_p = tl.dot(tl.load(p_q2t + o) * b_left, tl.trans(b_right), input_precision=PREC)
        b_p = (scale * (b_p + block_diagonal(b_rq, same_block, C)) * b_qk).to(p_tp.dtype.element_ty)
        if DELTA:
            b_l = tl.dot(tl.load(p_k2t + o) * b_left, tl.trans(b_right), input_precision=PREC)
            b_l = (b_l + block_diagonal(b_r, same_block, C)) * b_kk
            b_a = unit_lower_inverse(tl.where(o_t[:, None] > o_t[None, :], b_l, 0.0), same_block, C, PREC, PREC_INV)
        else:
            b_a = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
        b_a = tl.where(m_t[:, None] & m_t[None, :], b_a, 0.0).to(p_tp.dtype.element_ty)
        p_o = p_tp + i_hc * (2 * C * C) + o_t[:, None] * C + o_t[None, :]
        tl.store(p_o, b_a)
        tl.store(p_o + C * C, tl.dot(b_p, b_a, input_precision=PREC).to(p_tp.dtype.element_ty))
