"""Back end "triton" of `recurrent_triadic`: a few tokens of every sequence in one kernel, which reads and writes the
state once.

Legend: N sequences, T time, H key heads, HV value heads, K and V key and value sizes, E second-key size, EP its padding
to a power of two, BV value columns of a program; p_s state pointers, m_s mask. Columns of V never interact, so each
program holds all E x K rows of its BV columns in registers, whatever the number of tokens.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from . import launch
from .launch import aligned, bound, current

# Bytes of a state entry -> rows of a head's state (padded E times K) -> columns and warps of a program, measured on an
# H200 with K = 128: of the tiles that fit registers those whose rows are 64 or 128 bytes keep the memory busiest.
TILES = {
    4: {128: (16, 4), 256: (32, 8), 512: (32, 8), 1024: (16, 4), 2048: (16, 8), 4096: (4, 8), 8192: (4, 8)},
    2: {128: (32, 2), 256: (32, 4), 512: (32, 8), 1024: (16, 8), 2048: (16, 8), 4096: (4, 8), 8192: (4, 8)},
}


@triton.jit(do_not_specialize=["T"])
def recurrent_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    q2,  # [B, T, H, E] float32
    k2,  # [B, T, H, E] float32
    g,  # [B, T, HV, E] or [B, T, HV] float32
    beta,  # [B, T, HV] float32
    h0,  # [N, HV, E, K, V]
    o,  # [B, T, HV, V]
    ht,  # [N, HV, E, K, V], may be h0
    cu_seqlens,  # [N + 1]
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ONE: tl.constexpr,
    HAS_Q2: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BETA: tl.constexpr,
    DELTA: tl.constexpr,
):
    i_v = tl.program_id(0) % (V // BV)  # neighbours share the rows of a state
    i_nh = (tl.program_id(0) // (V // BV)).to(tl.int64)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        tokens = (tl.load(cu_seqlens + i_n + 1) - first).to(tl.int32)
    elif ONE:
        first, tokens = i_n, 1
    else:
        first, tokens = i_n * T, T

    r_e, r_k, r_v = tl.arange(0, EP), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    m_e = r_e < E
    # [K, EP, BV], so that Triton spreads K over threads and keeps E within a thread
    p_s = r_k[:, None, None] * V + r_e[None, :, None] * (K * V) + r_v[None, None, :]
    m_s = (r_k[:, None, None] < K) & m_e[None, :, None] & (r_v[None, None, :] < V)
    if h0 is not None:
        s = tl.load(h0 + i_nh * (E * K * V) + p_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        s = tl.zeros([K, EP, BV], tl.float32)

    i = 0
    while i < tokens:
        t = first + i
        b_q = tl.load(q + (t * H + i_h) * K + r_k).to(tl.float32) * scale
        b_k = tl.load(k + (t * H + i_h) * K + r_k).to(tl.float32)
        b_v = tl.load(v + (t * HV + i_hv) * V + r_v).to(tl.float32)
        if HAS_Q2:
            b_q2 = tl.load(q2 + (t * H + i_h) * E + r_e, mask=m_e, other=0.0)
            b_k2 = tl.load(k2 + (t * H + i_h) * E + r_e, mask=m_e, other=0.0)
        else:
            b_q2 = tl.full([EP], 1.0, tl.float32)
            b_k2 = b_q2
        if GATE == "slice":
            s *= tl.exp(tl.load(g + (t * HV + i_hv) * E + r_e, mask=m_e, other=0.0))[None, :, None]
        elif GATE == "head":
            s *= tl.exp(tl.load(g + t * HV + i_hv))
        if DELTA:
            b_v -= tl.sum(tl.sum(s * b_k2[None, :, None], 1) * b_k[:, None], 0)
        if HAS_BETA:
            b_v *= tl.load(beta + t * HV + i_hv)
        s += b_k2[None, :, None] * (b_k[:, None] * b_v[None, :])[:, None, :]
        b_o = tl.sum(tl.sum(s * b_q2[None, :, None], 1) * b_q[:, None], 0)
        tl.store(o + (t * HV + i_hv) * V + r_v, b_o.to(o.dtype.element_ty))
        i += 1
    if ht is not None:
        tl.store(ht + i_nh * (E * K * V) + p_s, s.to(ht.dtype.element_ty), mask=m_s)


# From Triton 3.7 on the kernel spills whole states of 16 slices or more in these TILES, not in narrower ones: bytes of
# an entry, padded E, rows -> columns and warps, from what the compiler says alone (3.7.1, 3.8 and 3.9).
NARROW = dict.fromkeys([(4, 16, 1024), (4, 16, 2048), (4, 32, 1024), (4, 32, 2048), (2, 32, 2048)], (8, 8))
SPILLS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


def unsupported(p) -> str | None:
    if p.needs_grad:
        return "has no backward; use chunk_triadic or torch.no_grad()"
    return launch.unsupported(p)


@lru_cache(None)
def tile(E: int, K: int, V: int, state_bytes: int) -> tuple[int, int]:
    """Columns and warps of a program: functions of the head dims, the state's dtype and Triton's release alone, so that
    a sequence's numbers never depend on the batch.
    """
    slices = triton.next_power_of_2(E)
    columns, warps = TILES[state_bytes][min(max(slices * K, 128), 8192)]
    if SPILLS:
        columns, warps = NARROW.get((state_bytes, slices, slices * K), (columns, warps))
    return min(columns, V), max(1, warps * min(columns, V) // columns)


@bound(recurrent_kernel)
def step(p, columns: int, warps: int, one: bool, *same_types):
    return dict(
        H=p.H, HV=p.HV, E=p.E, EP=triton.next_power_of_2(p.E), K=p.K, V=p.V, BV=columns, ONE=one, HAS_Q2=p.has_q2,
        GATE=p.gate or "none", HAS_BETA=p.has_beta, DELTA=p.delta_rule, num_warps=warps,
    )  # fmt: skip


def recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, ht=None):
    """(o, ht). The final state goes to `ht`, which may be h0, or to a new tensor if p.output_final."""
    if ht is not None and aligned(ht) is not ht:
        o, state = recurrent(p._replace(output_final=True), q, k, v, q2, k2, g, beta, h0, cu_seqlens)
        return o, ht.copy_(state)
    o, state = torch.empty_like(v), p.state or torch.float32
    if ht is None and p.output_final:
        ht = q.new_empty((p.N, p.HV, p.E, p.K, p.V), dtype=state)
    columns, warps = tile(p.E, p.K, p.V, state.itemsize)
    types = ht is None, None if cu_seqlens is None else cu_seqlens.dtype
    run = step(p, q.device, columns, warps, p.T == 1, *types)
    inputs = (aligned(x) for x in (q, k, v, q2, k2, g, beta, h0))
    with current(q.device):
        run((p.N * p.HV * (p.V // columns), 1, 1), *inputs, o, ht, aligned(cu_seqlens), p.scale, p.T)
    return o, ht
