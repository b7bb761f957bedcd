"""Triadic linear attention in plain torch: the token recurrence, which is the definition, and its chunkwise form.

Legend: B batch, T time, H key heads, HV value heads, K and V key and value sizes, E second-key size, C chunk length,
N sequences, M chunks times value heads. Log decays are natural logs, <= 0. Source: Sieberling et al., Triadic Linear
Attention, arXiv 2609.36529.
"""

import math

import torch
from torch import Tensor

from .packing import ChunkTable, chunk_bound, chunk_table, document_lengths, from_chunks, to_chunks

C = 32  # tokens of a chunk
SLAB = 64  # chunks whose [C, C, E] masks exist at the same time
NEVER = -2000.0  # 2 to this is 0 in every dtype; sums over a log decay of -inf would be NaN


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, computed in float32 or better, in the dtype of x."""
    y = x.to(_exact(x.dtype))
    return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def token_recurrence(q, k, v, q2, k2, g, beta, S, *, delta_rule: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The definition: one token after another, differentiable, any dtype.

    q, k [B, T, HV, K], v [B, T, HV, V], q2, k2 [B, T, HV, E], g [B, T, HV, E] or [B, T, HV, 1], beta [B, T, HV] and the
    state S [B, HV, E, K, V], all of one dtype. Returns o [B, T, HV, V] and the state after the last token.
    """
    B, T, HV, K = q.shape
    E, V = k2.shape[-1], v.shape[-1]
    alpha = g.exp()[..., None, None]  # [B, T, HV, E, 1, 1]
    read = (scale * q2[..., None] * q[..., None, :]).view(B, T, HV, 1, E * K)  # joint query q2 (x) q
    write = (k2[..., None] * k[..., None, :]).view(B, T, HV, 1, E * K)  # joint key k2 (x) k
    beta, v, o = beta[..., None, None], v[..., None, :], []
    add_product = torch.addcmul if torch.is_grad_enabled() else Tensor.addcmul_  # S is ours once it has decayed
    for t in range(T):
        S = (alpha[:, t] * S).flatten(2, 3)  # [B, HV, E * K, V]
        r = v[:, t]  # [B, HV, 1, V]
        if delta_rule:
            r = r - write[:, t] @ S
        S = add_product(S, write[:, t].mT, beta[:, t] * r)
        o.append(read[:, t] @ S)
        S = S.view(B, HV, E, K, V)
    return (torch.stack(o, 1) if o else v).squeeze(3), S


def recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    """`recurrent_triadic`: the token recurrence of every sequence."""
    q, k, v, q2, k2, g, beta = _all_present(p, q, k, v, q2, k2, g, beta)
    if p.H != p.HV:
        q, k, q2, k2 = (x.repeat_interleave(p.HV // p.H, 2) for x in (q, k, q2, k2))
    tokens = [x.to(_exact(p.dtype)) for x in (q, k, v, q2, k2, g)] + [beta[..., 0]]
    S = tokens[2].new_zeros(p.N, p.HV, p.E, p.K, p.V) if h0 is None else h0
    if cu_seqlens is None:
        o, S = token_recurrence(*tokens, S, delta_rule=p.delta_rule, scale=p.scale)
    else:
        lengths = document_lengths(p.B, p.T, cu_seqlens)
        documents = zip(*(x.split(lengths, 1) for x in tokens), S.split(1), strict=True)
        parts = [token_recurrence(*x, delta_rule=p.delta_rule, scale=p.scale) for x in documents]
        o, S = torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    return o.to(p.dtype), S if p.output_final else None


def unsupported(p) -> str | None:
    """Nothing: plain torch runs every problem."""
    return None


def forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep: bool):
    """The chunkwise form: what lies within chunks for all of them together, then the states chunk after chunk.

    For a chunk that starts with the states S_e, with gc the inclusive cumulative sum of g in it, G_e the decay between
    two of its tokens, a = k2 exp(gc), b = scale q2 exp(gc) and c = k2 exp(gc[C] - gc):

        P = scale tril(Q K^T * sum_e (q2_e k2_e^T) * G_e)
        A = (I + tril(diag(beta) (K K^T * sum_e (k2_e k2_e^T) * G_e), -1))^-1      (sGLA: A = I)
        W = V - sum_e diag(a_e) K S_e                                              (sGLA: W = V)
        U = A diag(beta) W
        O = sum_e diag(b_e) Q S_e + P U
        S_e <- exp(gc_e[C]) S_e + K^T diag(c_e) U
    """
    table = chunk_table(document_lengths(p.B, p.T, cu_seqlens), C, q.device)
    q, k, v, q2, k2, g, beta = _to_chunks(p, table, *_all_present(p, q, k, v, q2, k2, g, beta))
    g = _base_2(g)
    into, out, whole = _decays(g)
    a, b, c = k2 * into, p.scale * q2 * into, k2 * out
    saved = saved_like(p, q, cu_seqlens) if keep else _buffers(p, len(q), q, states=False)
    states, U, P, W, A = _named(p, saved, v)
    spans = _spans(g)
    for part in _slabs(len(q)):
        G = _decay_between(g[part], spans)
        P[part] = p.scale * (q[part] @ k[part].mT) * _mix(q2[part], k2[part], G)
        if p.delta_rule:
            L = beta[part] * (k[part] @ k[part].mT) * _mix(k2[part], k2[part], G)
            A[part] = torch.linalg.solve_triangular(L, torch.eye(C).to(L), upper=False, unitriangular=True)

    S, ended, o = _longest_first(p, table, h0, q), [], torch.empty_like(v)
    for n, now, _ in _steps(table, p.HV):
        ended.append(S[n:])
        S = S[:n]
        torch.bmm(_outer(b[now], q[now]), S, out=o[now])
        if p.delta_rule:
            torch.baddbmm(v[now], _outer(a[now], k[now]), S, alpha=-1, out=W[now])
            torch.bmm(A[now], beta[now] * W[now], out=U[now])
        else:
            torch.mul(beta[now], v[now], out=U[now])
        o[now].baddbmm_(P[now], U[now])
        after = states[now] if keep else torch.empty_like(S)
        torch.mul(_slices(S, whole), whole[now, :, None], out=_slices(after, whole))
        S = after.baddbmm_(_outer(c[now], k[now]).mT, U[now])
    o = _to_tokens(p, table, o).view(p.B, p.T, p.HV, p.V).to(p.dtype)
    ht = _as_given(p, table, torch.cat([S, *reversed(ended)])) if p.output_final else None
    for x in saved if keep else []:
        x[len(q) :] = 0  # chunks that these documents do not need
    return o, ht, saved if keep else []


def saved_like(p, q, cu_seqlens) -> list[Tensor]:
    """What `forward` keeps of every chunk: the state after it, U, P and, with the delta rule, W and A."""
    return _buffers(p, chunk_bound(p.B, p.T, p.N if p.varlen else None, C) * p.HV, q)


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    """The gradient in closed form, chunk before chunk; masks are computed again, states were kept.

    With dS'_e the gradient of the states after a chunk:

        dU = P^T dO + sum_e diag(c_e) K dS'_e      dX = A^T dU      dV = dW = diag(beta) dX
        dS_e = exp(gc_e[C]) dS'_e + Q^T diag(b_e) dO - K^T diag(a_e) dW

    and every other gradient follows from dO S_e^T, dW S_e^T, U dS'_e^T and, within the chunk, dO U^T and dX U^T.
    """
    given = q, k, v, q2, k2, g, beta
    table = chunk_table(document_lengths(p.B, p.T, cu_seqlens), C, q.device)
    q, k, v, q2, k2, g, beta, do = _to_chunks(p, table, *_all_present(p, *given), do)
    g = _base_2(g)
    into, out, whole = _decays(g)
    a, b, c = k2 * into, p.scale * q2 * into, k2 * out
    states, U, P, W, A = _named(p, saved, v)

    S0, dS = _longest_first(p, table, h0, q), _longest_first(p, table, dht, q)
    dU = torch.bmm(P.mT, do)
    dq, dk, dX, dW = (torch.empty_like(x) for x in (q, k, U, U))
    dq2, read, write = (torch.zeros_like(k2, memory_format=torch.contiguous_format) for _ in range(3))
    kept = torch.empty_like(whole)  # [M, 1 or E] <S_e, dS'_e> exp(gc_e[C])
    for n, now, before in reversed(list(_steps(table, p.HV))):
        S, dSn = S0[:n] if before is None else states[before], dS[:n]
        write_k = _outer(c[now], k[now])
        dk[now], write[now] = _split(torch.bmm(U[now], dSn.mT), c[now], k[now])
        dq[now], dq2[now] = _split(torch.bmm(do[now], S.mT), b[now], q[now])
        dU[now].baddbmm_(write_k, dSn)
        if p.delta_rule:
            torch.bmm(A[now].mT, dU[now], out=dX[now])
            torch.mul(beta[now], dX[now], out=dW[now])
            dk_read, read[now] = _split(torch.bmm(dW[now], S.mT), a[now], k[now])
            dk[now] -= dk_read
        kept[now] = whole[now] * _slices(S * dSn, whole).sum(-1)
        _slices(dSn, whole).mul_(whole[now, :, None])
        dSn.baddbmm_(_outer(b[now], q[now]).mT, do[now])
        if p.delta_rule:
            dSn.baddbmm_(_outer(a[now], k[now]).mT, dW[now], alpha=-1)
    if not p.delta_rule:
        dX = dU
        torch.mul(beta, dX, out=dW)

    dq2 *= p.scale * into
    read *= -into
    write *= out
    dk2, dbeta = read + write, (dX * W).sum(-1, keepdim=True)
    # dg[t] sums over the pairs of a writing token before t and a reading token at or after t
    dgc, before = q2 * dq2 + k2 * read, k2 * write
    spans = _spans(g)
    for part in _slabs(len(q)):
        x = (y[part] for y in (q, k, q2, k2, g, beta, do, U, dX))
        within = _within(p, *x, spans)
        for total, y in zip((dq, dk, dq2, dk2, dbeta, dgc), within, strict=True):
            total[part] += y
    dg = dgc.flip(1).cumsum(1).flip(1) + before.cumsum(1) - before
    if whole.shape[-1] == 1:
        dg = dg.sum(-1, keepdim=True)
    dg += kept[:, None]
    gradients = [
        None if x is None else _to_tokens(p, table, dx, x.shape[2]).view(x.shape).to(x.dtype)
        for x, dx in zip(given, (dq, dk, dW, dq2, dk2, dg, dbeta), strict=True)
    ]
    return *gradients, None if h0 is None else _as_given(p, table, dS)


def _within(p, q, k, q2, k2, g, beta, do, U, dX, spans):
    """Gradients that pass through P and A: of q, k, q2, k2, beta, and of gc through pairs of different tokens."""
    G = _decay_between(g, spans)
    dP, QK = p.scale * (do @ U.mT), q @ k.mT
    dQK = dP * _mix(q2, k2, G)
    dq, dk = dQK @ k, dQK.mT @ q
    Z1 = dP * QK
    own = Z1.diagonal(dim1=1, dim2=2)[..., None]  # a token reading what it wrote itself: nothing decays in between
    Z1 = Z1.tril(-1)
    if p.delta_rule:
        KK, R = k @ k.mT, _mix(k2, k2, G)
        dL = -(dX @ U.mT).tril(-1)
        dbeta = (dL * KK * R).sum(-1, keepdim=True)
        dL = beta * dL
        dKK, Z = dL * R, dL * KK
        dk += (dKK + dKK.mT) @ k
    else:
        dbeta, Z = 0.0, torch.zeros_like(Z1)
    if G.shape[1] == 1:
        Y, Y1 = Z * G[:, 0], Z1 * G[:, 0]
        dq2, read, write = Y1 @ k2, Y @ k2, Y.mT @ k2 + Y1.mT @ q2
    else:
        F = G * k2.mT[:, :, None]  # [M, E, C, C]
        dq2, read = (F * Z1[:, None]).sum(-1).mT, (F * Z[:, None]).sum(-1).mT
        write = (G * (Z1[:, None] * q2.mT[..., None] + Z[:, None] * k2.mT[..., None])).sum(-2).mT
    dgc = q2 * dq2 + k2 * (read - write)
    return dq, dk, dq2 + own * k2, read + write + own * q2, dbeta, dgc


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, gates and arithmetic."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _all_present(p, q, k, v, q2, k2, g, beta) -> list[Tensor]:
    """What is absent spelt out: q2 = k2 = 1, g = 0, beta = 1; decays and write strengths with a last dimension."""
    one = torch.ones((), dtype=_exact(p.dtype), device=q.device)
    if q2 is None:
        q2 = k2 = one.expand(*q.shape[:3], 1)
    if g is None:
        g = (one * 0).expand(*v.shape[:3], 1)
    beta = one.expand(v.shape[:3]) if beta is None else beta
    return [q, k, v, q2, k2, g if g.ndim == 4 else g[..., None], beta[..., None]]


def _to_chunks(p, table: ChunkTable, *tensors: Tensor) -> list[Tensor]:
    """Public layout to rows of one chunk and value head: [B, T, heads, D] -> [M, C, D]."""
    return [to_chunks(x.flatten(0, 1), table, p.HV).flatten(0, 1).to(_exact(p.dtype)) for x in tensors]


def _to_tokens(p, table: ChunkTable, x: Tensor, heads: int | None = None) -> Tensor:
    """[M, C, D] -> [B * T, heads, D], summed over the value heads of a key head."""
    x = from_chunks(x.unflatten(0, (-1, p.HV)), table)
    return x if heads in (None, p.HV) else x.unflatten(1, (heads, -1)).sum(2)


def _longest_first(p, table: ChunkTable, h: Tensor | None, like: Tensor) -> Tensor:
    """States [N, HV, E, K, V] (None: zeros) to [N * HV, E * K, V] in the order of the chunk table; a copy."""
    shape = p.N * p.HV, p.E * p.K, p.V
    return like.new_zeros(shape) if h is None else h.index_select(0, table.order).view(shape)


def _as_given(p, table: ChunkTable, S: Tensor) -> Tensor:
    """The inverse of `_longest_first`."""
    return S.view(p.N, p.HV, p.E, p.K, p.V).index_select(0, table.order.argsort())


def _buffers(p, rows: int, like: Tensor, states: bool = True) -> list[Tensor]:
    """Uninitialised states, U, P and, with the delta rule, W and A, of `rows` chunks times value heads."""
    shapes = [(p.E * p.K, p.V), (C, p.V), (C, C), (C, p.V), (C, C)][: 5 if p.delta_rule else 3]
    sizes = [rows if states else 0] + [rows] * (len(shapes) - 1)
    return [like.new_empty((n, *x), dtype=_exact(p.dtype)) for n, x in zip(sizes, shapes, strict=True)]


def _named(p, buffers: list[Tensor], v: Tensor) -> tuple[Tensor, ...]:
    """states, U, P, W, A of the chunks that exist; W and A of sGLA are v and no matrix at all."""
    rows = [x[: len(v)] for x in buffers]
    return tuple(rows) if p.delta_rule else (*rows, v, None)


def _steps(table: ChunkTable, HV: int):
    """Per step of the recurrence: rows that take it, their slice, and the slice of the same rows one step before."""
    at = before = 0
    for n in table.steps:
        yield n * HV, slice(at * HV, (at + n) * HV), slice(before * HV, (before + n) * HV) if at else None
        before, at = at, at + n


def _slabs(rows: int):
    return [slice(i, i + SLAB) for i in range(0, rows, SLAB)]


def _base_2(g: Tensor) -> Tensor:
    """Natural to binary log decays: on a CPU exp2 costs a fifth of exp, a hundredth where the result underflows."""
    return (g * math.log2(math.e)).clamp_(min=NEVER)


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the chunk's start through each token, from after each token through the end [M, C, E], and whole [M, E]."""
    after = torch.cat([g[:, 1:].flip(1).cumsum(1).flip(1), torch.zeros_like(g[:, :1])], 1)
    into = g.cumsum(1).exp2()
    return into, after.exp2(), into[:, -1]


def _spans(g: Tensor) -> tuple[Tensor, Tensor]:
    """For `_decay_between`: the tokens t that decay what s wrote until r reads it, s < t <= r; -inf for s > r."""
    t, r, s = (torch.arange(C, device=g.device).view(shape) for shape in ((C, 1, 1), (1, C, 1), (1, 1, C)))
    never = torch.zeros(1, C, C, dtype=g.dtype, device=g.device).masked_fill_(s > r, -torch.inf)
    return ((s < t) & (t <= r)).to(g.dtype).flatten(1), never.flatten()


def _decay_between(g: Tensor, spans: tuple[Tensor, Tensor]) -> Tensor:
    """G [M, E, C, C]: 2 ** (sum of g over s < t <= r), 0 for s > r. Summed for each pair: differences would cancel."""
    M, _, E = g.shape
    return torch.addmm(spans[1], g.mT.reshape(M * E, C), spans[0]).exp2_().view(M, E, C, C)


def _mix(x: Tensor, y: Tensor, G: Tensor) -> Tensor:
    """sum_e x[r, e] y[s, e] G[e, r, s]: [M, C, E], [M, C, E], [M, E or 1, C, C] -> [M, C, C]."""
    if G.shape[1] == 1:
        return (x @ y.mT) * G[:, 0]
    return (x.mT[..., None] * (y.mT[:, :, None] * G)).sum(1)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """Joint vectors [M, C, E] (x) [M, C, K] -> [M, C, E * K]."""
    return (x[..., None] * y[:, :, None]).flatten(2)


def _split(x: Tensor, weight: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Contract joint vectors [M, C, E * K] with weights over E and with vectors over K: [M, C, K] and [M, C, E]."""
    x = x.unflatten(-1, (weight.shape[-1], -1))
    return (x * weight[..., None]).sum(2), (x * vector[:, :, None]).sum(3)


def _slices(S: Tensor, whole: Tensor) -> Tensor:
    """States [M, E * K, V] seen as one row per decay, [M, 1 or E, ...]."""
    return S.view(len(S), whole.shape[-1], -1)
