"""Triadic linear attention in plain torch: the token recurrence, which is the definition, and its chunkwise form.

Legend: B batch, T time, H key heads, HV value heads, K and V key and value sizes, E second-key size, C chunk length,
N sequences, M chunks times value heads. Log decays are natural logs, <= 0. Source: Sieberling et al., Triadic Linear
Attention, arXiv 2609.36529.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .packing import ChunkTable, as_given, by_length, chunk_bound, chunk_table, document_lengths, from_chunks, to_chunks

C = 32  # tokens of a chunk
EVERY = 8  # the state before every 8th chunk is kept for the backward, which computes the others again
SLAB = 64  # chunks whose [C, C, E] masks exist at the same time
NEVER = -2000.0  # 2 to this is 0 in every dtype; sums over a log decay of -inf would be NaN


class Chunks(NamedTuple):
    """A call cut into chunks: a row for each chunk and value head."""

    q: Tensor  # [M, C, K], as k
    k: Tensor
    v: Tensor  # [M, C, V]
    q2: Tensor  # [M, C, E], as k2
    k2: Tensor
    g: Tensor  # [M, C, E], or [M, C, 1]: one decay for all slices; binary logs
    beta: Tensor  # [M, C, 1]
    into: Tensor  # as g: decay from the start of the chunk through each token
    out: Tensor  # as g: decay from after each token through the end of the chunk
    whole: Tensor  # [M, E] or [M, 1]: decay of the chunk
    a: Tensor  # [M, C, E] weights of k when it reads the state before the chunk
    b: Tensor  # [M, C, E] weights of q
    c: Tensor  # [M, C, E] weights of k when it writes to the state after the chunk


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
    ours = not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()  # S, once it has decayed
    add_product = Tensor.addcmul_ if ours else torch.addcmul
    for t in range(T):
        S = (alpha[:, t] * S).flatten(2, 3)  # [B, HV, E * K, V]
        r = v[:, t]  # [B, HV, 1, V]
        if delta_rule:
            r = r - write[:, t] @ S
        S = add_product(S, write[:, t].mT, beta[:, t] * r)
        o.append(read[:, t] @ S)
        S = S.view(B, HV, E, K, V)
    return (torch.stack(o, 1) if o else v.clone()).squeeze(3), S


def recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, ht=None) -> tuple[Tensor, Tensor | None]:
    """`recurrent_triadic`: the token recurrence of every sequence."""
    q, k, v, q2, k2, g, beta = _all_present(p, q, k, v, q2, k2, g, beta)
    if p.H != p.HV:
        q, k, q2, k2 = (x.repeat_interleave(p.HV // p.H, 2) for x in (q, k, q2, k2))
    tokens = [x.to(_exact(p.dtype)) for x in (q, k, v, q2, k2, g)] + [beta[..., 0]]
    S = tokens[2].new_zeros(p.N, p.HV, p.E, p.K, p.V) if h0 is None else h0.to(tokens[2].dtype)
    if cu_seqlens is None:
        o, S = token_recurrence(*tokens, S, delta_rule=p.delta_rule, scale=p.scale)
    else:
        lengths = document_lengths(p.B, p.T, cu_seqlens)
        documents = zip(*(x.split(lengths, 1) for x in tokens), S.split(1), strict=True)
        parts = [token_recurrence(*x, delta_rule=p.delta_rule, scale=p.scale) for x in documents]
        o, S = torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    if ht is not None:
        ht.copy_(S)
    elif p.output_final:
        ht = S.clone() if S is h0 else S if h0 is None else S.to(h0.dtype)  # no token: the state is not ours
    return o.to(p.dtype), ht


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
    x = _chunked(p, table, q, k, v, q2, k2, g, beta)
    saved = saved_like(p, q, cu_seqlens) if keep else _buffers(p, len(x.q), 0, q)
    states, U, P, W, A = _named(p, saved, x)
    for y in saved[1:]:
        y[len(x.q) :] = 0  # chunks that these documents do not need
    spans, one = _spans(x.g), torch.eye(C, dtype=x.q.dtype, device=x.q.device)
    for part in _slabs(len(x.q)):
        q, k, q2, k2 = x.q[part], x.k[part], x.q2[part], x.k2[part]
        G, F = _decay_between(x.g[part], k2, spans)
        P[part] = p.scale * (q @ k.mT) * _mix(q2, k2, G, F)
        if p.delta_rule:
            L = x.beta[part] * (k @ k.mT) * _mix(k2, k2, G, F)
            A[part] = torch.linalg.solve_triangular(L, one, upper=False, unitriangular=True)

    S, ended, o = _states(p, table, h0, x.q), [], torch.empty_like(x.v)
    for rows, steps in _segments(table, p.HV):
        if keep and rows is not None:
            states[rows] = S[: rows.stop - rows.start]
        for n, now in steps:
            ended.append(S[n:])
            S = S[:n]
            torch.bmm(_outer(x.b[now], x.q[now]), S, out=o[now])
            if p.delta_rule:
                torch.baddbmm(x.v[now], _outer(x.a[now], x.k[now]), S, alpha=-1, out=W[now])
                torch.bmm(A[now], x.beta[now] * W[now], out=U[now])
            else:
                torch.mul(x.beta[now], x.v[now], out=U[now])
            o[now].baddbmm_(P[now], U[now])
            S = _next_state(x, U, S, now)
    o = from_chunks(o, table, p.HV).view(p.B, p.T, p.HV, p.V).to(p.dtype)
    ht = as_given(torch.cat([S, *reversed(ended)]), table, (p.N, p.HV, p.E, p.K, p.V)) if p.output_final else None
    return o, ht, saved if keep else []


def saved_like(p, q, cu_seqlens) -> list[Tensor]:
    """What `forward` keeps: U, P and, with the delta rule, W and A of every chunk, and the state before some."""
    rows = chunk_bound(p.B, p.T, p.N if p.varlen else None, C) * p.HV
    return _buffers(p, rows, rows // EVERY, q)


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    """The gradient in closed form, chunk before chunk; masks and most states are computed again.

    With dS'_e the gradient of the states after a chunk:

        dU = P^T dO + sum_e diag(c_e) K dS'_e      dX = A^T dU      dV = dW = diag(beta) dX
        dS_e = exp(gc_e[C]) dS'_e + Q^T diag(b_e) dO - K^T diag(a_e) dW

    and every other gradient follows from dO S_e^T, dW S_e^T, U dS'_e^T and, within the chunk, dO U^T and dX U^T.
    """
    given = q, k, v, q2, k2, g, beta
    table = chunk_table(document_lengths(p.B, p.T, cu_seqlens), C, q.device)
    x = _chunked(p, table, *given)
    do = to_chunks(do.flatten(0, 1), table, p.HV).to(x.v.dtype)
    states, U, P, W, A = _named(p, saved, x)
    dS = _states(p, table, dht, x.q)  # becomes the gradient of the initial states
    S0 = _states(p, table, h0, x.q)
    dq, dk, dX, dW, dq2, read, write, kept = _through_states(p, x, table, S0, states, U, P, A, do, dS)

    dk2, dbeta = read + write, (dX * W).sum(-1, keepdim=True)
    # dg[t] sums over the pairs of a writing token before t and a reading token at or after t
    dgc, before = x.q2 * dq2 + x.k2 * read, x.k2 * write
    spans = _spans(x.g)
    for part in _slabs(len(x.q)):
        within = _within_chunks(p, Chunks(*(y[part] for y in x)), do[part], U[part], dX[part], spans)
        for total, y in zip((dq, dk, dq2, dk2, dbeta, dgc), within, strict=True):
            total[part] += y
    dg = dgc.flip(1).cumsum(1).flip(1) + before.cumsum(1) - before
    if x.g.shape[-1] == 1:
        dg = dg.sum(-1, keepdim=True)
    dg += kept[:, None]
    gradients = []
    for y, dy in zip(given, (dq, dk, dW, dq2, dk2, dg, dbeta), strict=True):
        if y is not None:  # summed over the value heads of a key head
            dy = from_chunks(dy, table, p.HV).unflatten(1, (y.shape[2], -1)).sum(2).view(y.shape).to(y.dtype)
        gradients.append(None if y is None else dy)
    return *gradients, None if h0 is None else as_given(dS, table, h0.shape)


def _through_states(p, x: Chunks, table, S0, states, U, P, A, do, dS):
    """The reverse recurrence. dS is updated in place; returns dq, dk, dX, dW, dq2, those of k2 where it reads and where
    it writes, all but for what stays within chunks, and the part of dg that every token of a chunk has in common.
    """
    dU = torch.bmm(P.mT, do)
    dq, dk, dX, dW = (torch.empty_like(y) for y in (x.q, x.k, U, U))
    dq2, read, write = (torch.zeros_like(x.a) for _ in range(3))
    kept = torch.empty_like(x.whole)  # exp(gc_e[C]) <S_e, dS'_e>
    for rows, steps in reversed(_segments(table, p.HV)):
        starts = [(S0 if rows is None else states[rows])[: steps[0][0]]]
        for (_, now), (n, _) in pairwise(steps):
            starts.append(_next_state(x, U, starts[-1], now)[:n])
        for S, (n, now) in reversed(list(zip(starts, steps, strict=True))):
            a, b, c, q, k, whole, dSn = x.a[now], x.b[now], x.c[now], x.q[now], x.k[now], x.whole[now], dS[:n]
            dk[now], write[now] = _split(torch.bmm(U[now], dSn.mT), c, k)
            dq[now], dq2[now] = _split(torch.bmm(do[now], S.mT), b, q)
            dU[now].baddbmm_(_outer(c, k), dSn)
            if p.delta_rule:
                torch.bmm(A[now].mT, dU[now], out=dX[now])
                torch.mul(x.beta[now], dX[now], out=dW[now])
                dk_read, read[now] = _split(torch.bmm(dW[now], S.mT), a, k)
                dk[now] -= dk_read
            kept[now] = whole * _slices(S * dSn, whole).sum(-1)
            _slices(dSn, whole).mul_(whole[..., None])
            dSn.baddbmm_(_outer(b, q).mT, do[now])
            if p.delta_rule:
                dSn.baddbmm_(_outer(a, k).mT, dW[now], alpha=-1)
    if not p.delta_rule:
        dX = dU
        torch.mul(x.beta, dX, out=dW)
    return dq, dk, dX, dW, p.scale * x.into * dq2, -x.into * read, x.out * write, kept


def _within_chunks(p, x: Chunks, do, U, dX, spans):
    """Gradients that pass through P and A: of q, k, q2, k2, beta, and of gc through pairs of different tokens."""
    q, k, q2, k2, beta = x.q, x.k, x.q2, x.k2, x.beta
    G, F = _decay_between(x.g, k2, spans)
    dP, QK = p.scale * (do @ U.mT), q @ k.mT
    dQK = dP * _mix(q2, k2, G, F)
    dq, dk = dQK @ k, dQK.mT @ q
    Z1 = dP * QK
    own = Z1.diagonal(dim1=1, dim2=2)[..., None]  # a token reading what it wrote itself: nothing decays in between
    Z1 = Z1.tril(-1)
    if p.delta_rule:
        KK, R = k @ k.mT, _mix(k2, k2, G, F)
        dL = -(dX @ U.mT).tril(-1)
        dbeta = (dL * KK * R).sum(-1, keepdim=True)
        dL = beta * dL
        dKK, Z = dL * R, dL * KK
        dk += (dKK + dKK.mT) @ k
    else:
        dbeta, Z = 0.0, torch.zeros_like(Z1)
    if F is None:
        Y, Y1 = Z * G[:, 0], Z1 * G[:, 0]
        dq2, read, write = Y1 @ k2, Y @ k2, Y.mT @ k2 + Y1.mT @ q2
    else:
        dq2, read = (F * Z1[:, None]).sum(-1).mT, (F * Z[:, None]).sum(-1).mT
        write = (Z1[:, None] * q2.mT[..., None]).addcmul_(Z[:, None], k2.mT[..., None]).mul_(G).sum(-2).mT
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


def _chunked(p, table: ChunkTable, q, k, v, q2, k2, g, beta) -> Chunks:
    tensors = _all_present(p, q, k, v, q2, k2, g, beta)
    q, k, v, q2, k2, g, beta = (to_chunks(x.flatten(0, 1), table, p.HV).to(_exact(p.dtype)) for x in tensors)
    # Binary logs: on a CPU exp2 costs a fifth of exp, and a hundredth where the result underflows.
    g = (g * math.log2(math.e)).clamp_(min=NEVER)
    into = g.cumsum(1).exp2()
    out = torch.cat([g[:, 1:].flip(1).cumsum(1).flip(1), torch.zeros_like(g[:, :1])], 1).exp2()
    return Chunks(q, k, v, q2, k2, g, beta, into, out, into[:, -1], k2 * into, p.scale * q2 * into, k2 * out)


def _states(p, table: ChunkTable, h: Tensor | None, like: Tensor) -> Tensor:
    """[N * HV, E * K, V] in the order of the chunk table; None stands for zeros."""
    return like.new_zeros(p.N * p.HV, p.E * p.K, p.V) if h is None else by_length(h, table)


def _buffers(p, rows: int, states: int, like: Tensor) -> list[Tensor]:
    """States, and U, P and, with the delta rule, W and A, not initialised."""
    like = like.new_empty(0, dtype=_exact(p.dtype))
    shapes = [(C, p.V), (C, C), (C, p.V), (C, C)][: 4 if p.delta_rule else 2]
    return [like.new_zeros(states, p.E * p.K, p.V), *(like.new_empty(rows, *shape) for shape in shapes)]


def _named(p, buffers: list[Tensor], x: Chunks) -> tuple[Tensor, ...]:
    """states, U, P, W, A of the chunks that exist; W and A of sGLA are v and no matrix at all."""
    states, *rows = buffers
    rows = [y[: len(x.v)] for y in rows]
    return (states, *rows) if p.delta_rule else (states, *rows, x.v, None)


def _segments(table: ChunkTable, HV: int) -> list[tuple[slice | None, list[tuple[int, slice]]]]:
    """The recurrence, EVERY steps at a time: where the states before them are kept (None: they are the initial states),
    and for each step how many rows take it and which.
    """
    segments, at, kept = [], 0, 0
    for step, n in enumerate(table.steps):
        if step % EVERY == 0:
            segments.append((slice(kept, kept + n * HV) if step else None, []))
            kept += n * HV if step else 0
        segments[-1][1].append((n * HV, slice(at, at + n * HV)))
        at += n * HV
    return segments


def _next_state(x: Chunks, U: Tensor, S: Tensor, now: slice) -> Tensor:
    """exp(gc_e[C]) S_e + K^T diag(c_e) U."""
    S = (_slices(S, x.whole) * x.whole[now, :, None]).view_as(S)
    return S.baddbmm_(_outer(x.c[now], x.k[now]).mT, U[now])


def _slabs(rows: int):
    return [slice(i, i + SLAB) for i in range(0, rows, SLAB)]


def _spans(g: Tensor) -> tuple[Tensor, Tensor]:
    """For `_decay_between`: the tokens t that decay what s wrote until r reads it, s < t <= r; -inf for s > r."""
    t, r, s = (torch.arange(C, device=g.device).view(shape) for shape in ((C, 1, 1), (1, C, 1), (1, 1, C)))
    never = torch.zeros(1, C, C, dtype=g.dtype, device=g.device).masked_fill_(s > r, -torch.inf)
    return ((s < t) & (t <= r)).to(g.dtype).flatten(1), never.flatten()


def _decay_between(g: Tensor, k2: Tensor, spans: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """G [M, E, C, C]: 2 ** (sum of g over s < t <= r), 0 for s > r, and F = G k2[s] (one decay for all slices: None).

    Every pair has a sum of its own: the difference of two sums that hold an erasing gate would cancel.
    """
    M, _, E = g.shape
    G = torch.addmm(spans[1], g.mT.reshape(M * E, C), spans[0]).exp2_().view(M, E, C, C)
    return G, None if E == 1 else G * k2.mT[:, :, None]


def _mix(x: Tensor, k2: Tensor, G: Tensor, F: Tensor | None) -> Tensor:
    """sum_e x[r, e] k2[s, e] G[e, r, s]: [M, C, C]."""
    return (x @ k2.mT) * G[:, 0] if F is None else (x.mT[..., None] * F).sum(1)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """Joint vectors [M, C, E] (x) [M, C, K] -> [M, C, E * K]."""
    return (x[..., None] * y[:, :, None]).flatten(2)


def _split(x: Tensor, weight: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Contract joint vectors [M, C, E * K] with weights over E and with vectors over K: [M, C, K], [M, C, E]."""
    x = x.unflatten(-1, (weight.shape[-1], -1))
    return (x * weight[..., None]).sum(2), x.mul_(vector[:, :, None]).sum(3)


def _slices(S: Tensor, whole: Tensor) -> Tensor:
    """States [M, E * K, V] seen as one row per decay, [M, 1 or E, ...]."""
    return S.view(len(S), whole.shape[-1], -1)
