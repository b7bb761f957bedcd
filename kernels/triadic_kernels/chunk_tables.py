"""Kernel: the chunk tables (chunks.py)."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "N", "NC"])
def tables_kernel(p_cu, p_ch, p_sq, p_or, T, N, NC, VARLEN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """One program per sequence. Among packed ones it looks at all lengths: how many chunks come before its own, and
    which place it has by length. It fills its rows of the tables, the last one also what lies beyond the last chunk.
    """
    n = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    if VARLEN:
        start, end = tl.load(p_cu + n).to(tl.int32), tl.load(p_cu + n + 1).to(tl.int32)
        length = tl.maximum(end - start, 0)
        b_first, b_place = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        seen = 0
        while seen < N:
            m = seen + o
            b_start = tl.load(p_cu + m, mask=m < N, other=0).to(tl.int32)
            b_end = tl.load(p_cu + m + 1, mask=m < N, other=0).to(tl.int32)
            b_length = tl.maximum(b_end - b_start, 0)
            b_first += tl.where(m < n, (b_length + C - 1) // C, 0)
            longer = (b_length > length) | ((b_length == length) & (m < n))
            b_place += tl.where(longer & (m < N), 1, 0)
            seen += BLOCK
        first, place = tl.sum(b_first, 0), tl.sum(b_place, 0)
    else:
        start, end, length = n * T, n * T + T, T
        first, place = n * ((T + C - 1) // C), n
    chunks = (length + C - 1) // C
    tl.store(p_or + place, n)
    tl.store(p_sq + n * 2, first)
    tl.store(p_sq + n * 2 + 1, chunks)
    rows = tl.where(n == N - 1, NC - first, chunks)
    filled = 0
    while filled < rows:
        c = filled + o
        m_c = (c < rows) & (first + c < NC)  # whatever the bounds say
        b_row = start + c * C
        p_row = p_ch + (first + c) * 3
        tl.store(p_row, n + tl.zeros([BLOCK], tl.int32), mask=m_c)
        tl.store(p_row + 1, b_row, mask=m_c)
        tl.store(p_row + 2, tl.minimum(tl.maximum(end - b_row, 0), C), mask=m_c)
        filled += BLOCK
