"""Triadic linear attention in plain torch: the token recurrence, which is the definition, and its chunkwise form.

Legend: B batch, T time, H key heads, HV value heads, K and V key and value sizes, E second-key size, C chunk length,
N sequences, NC chunks. Log decays are natural logs, <= 0.
"""

import torch
from torch import Tensor

from .packing import chunk_bound, chunk_table, document_lengths, from_chunks, to_chunks

C = 64  # tokens of a chunk


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, computed in float32 or better, in the dtype of x."""
    y = x.to(_exact(x.dtype))
    return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def token_recurrence(q, k, v, q2, k2, g, beta, S, delta_rule: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The definition (arXiv 2609.36529): one token after another, differentiable, any dtype.

    q, k [B, T, HV, K], v [B, T, HV, V], q2, k2 [B, T, HV, E], g [B, T, HV, E] or [B, T, HV, 1], beta [B, T, HV] and the
    state S [B, HV, E, K, V], all of one dtype. Returns o [B, T, HV, V] and the state after the last token.
    """
    B, T, HV, K = q.shape
    E, V = k2.shape[-1], v.shape[-1]
    alpha = g.exp()[..., None, None]  # [B, T, HV, E, 1, 1]
    read = (q2[..., None] * q[..., None, :]).view(B, T, HV, 1, E * K)  # joint query q2 (x) q
    write = (k2[..., None] * k[..., None, :]).view(B, T, HV, 1, E * K)  # joint key k2 (x) k
    o = []
    for t in range(T):
        S = (alpha[:, t] * S).view(B, HV, E * K, V)
        r = v[:, t, :, None]  # [B, HV, 1, V]
        if delta_rule:
            r = r - write[:, t] @ S
        S = S + write[:, t].mT @ (beta[:, t, :, None, None] * r)
        o.append(scale * (read[:, t] @ S))
        S = S.view(B, HV, E, K, V)
    return torch.stack(o, 1).view(B, T, HV, V) if o else torch.zeros_like(v), S


def unsupported(p) -> str | None:
    """This back end runs everything."""
    return None


def recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    """`recurrent_triadic` by the token recurrence."""
    dtype = _exact(p.dtype)
    q, k, v, q2, k2, g, beta = _all_present(p, q, k, v, q2, k2, g, beta, dtype)
    S = v.new_zeros(p.N, p.HV, p.E, p.K, p.V) if h0 is None else h0
    if cu_seqlens is None:
        o, S = token_recurrence(q, k, v, q2, k2, g, beta, S, p.delta_rule, p.scale)
    else:
        bounds = cu_seqlens.tolist()
        parts = []
        for n in range(p.N):
            document = [x[:, bounds[n] : bounds[n + 1]] for x in (q, k, v, q2, k2, g, beta)]
            parts.append(token_recurrence(*document, S[n : n + 1], p.delta_rule, p.scale))
        o, S = (torch.cat(x, dim) for x, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
    return o.to(p.dtype), S if p.output_final else None


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _all_present(p, q, k, v, q2, k2, g, beta, dtype):
    """One dtype, one head count, and what is absent spelt out: q2 = k2 = 1, g = 0, beta = 1."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if q2 is None:
        q2 = k2 = q.new_ones(()).expand(*q.shape[:3], 1)
    if p.H != p.HV:
        q, k, q2, k2 = (x.repeat_interleave(p.HV // p.H, 2) for x in (q, k, q2, k2))
    if g is None:
        g = v.new_zeros(()).expand(*v.shape[:3], 1)
    elif p.gate == "head":
        g = g[..., None]
    if beta is None:
        beta = v.new_ones(()).expand(v.shape[:3])
    return q, k, v, q2, k2, g, beta


def forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep: bool):
    """The chunkwise form (MATH: W, U, O, S of a chunk); the chunks of different documents and heads go together."""
    table = chunk_table(document_lengths(p.B, p.T, cu_seqlens), C, q.device)
    q, k, v, q2, k2, g, beta = _chunks(p, q, k, v, q2, k2, g, beta, table)
    into, out, whole = _decays(g)
    A, P, *_ = _masks(p, q, k, q2, k2, g, beta)
    a, b, c = _outer(k2 * into, k), _outer(q2 * into, q), _outer(k2 * out, k)

    S = v.new_zeros(p.N, p.HV, p.E * p.K, p.V) if h0 is None else h0.view(p.N, p.HV, p.E * p.K, p.V)[table.order]
    bound = chunk_bound(p.B * p.T, p.N, C)
    saved = [x.new_empty(bound, p.HV, *x.shape[2:]) for x in (S, v, v, A)] if keep else []
    O = torch.empty_like(v)
    ht, at = [], 0
    for n in table.steps:
        ht.append(S[n:])
        S, now = S[:n], slice(at, at + n)
        W = v[now] - a[now] @ S if p.delta_rule else v[now]
        U = beta[now] * W
        if p.delta_rule:
            U = A[now] @ U
        O[now] = p.scale * (b[now] @ S) + P[now] @ U
        if keep:
            for x, y in zip(saved, (S, W, U, A[now]), strict=True):
                x[now] = y
        S = _scale(S, whole[now], p) + c[now].mT @ U
        at += n
    ht = torch.cat([S, *reversed(ht)])
    o = from_chunks(O, table).view(p.B, p.T, p.HV, p.V).to(p.dtype)
    if not p.output_final:
        return o, None, saved
    final = torch.empty_like(ht)
    final[table.order] = ht
    return o, final.view(p.N, p.HV, p.E, p.K, p.V), saved


def saved_like(p, q, cu_seqlens) -> list[Tensor]:
    """What `forward` keeps, of every chunk: its first state, W, U and A."""
    bound = chunk_bound(p.B * p.T, p.N, C)
    shapes = (p.E * p.K, p.V), (C, p.V), (C, p.V), (C, C)
    return [q.new_empty((bound, p.HV, *shape), dtype=_exact(p.dtype)) for shape in shapes]


def backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht):
    """The closed form: masks are computed again, states are read."""
    table = chunk_table(document_lengths(p.B, p.T, cu_seqlens), C, q.device)
    given = q, k, v, q2, k2, g, beta
    q, k, v, q2, k2, g, beta = _chunks(p, q, k, v, q2, k2, g, beta, table)
    do = to_chunks(do.to(v.dtype).flatten(0, 1), table, C)
    chunks = v.shape[0]
    S, W, U, A = (x[:chunks] for x in saved)
    into, out, whole = _decays(g)
    _, P, QK, KK, R, R1, G = _masks(p, q, k, q2, k2, g, beta)
    a, b, c = _outer(k2 * into, k), _outer(q2 * into, q), _outer(k2 * out, k)

    shape = p.N, p.HV, p.E * p.K, p.V
    dS = v.new_zeros(shape) if dht is None else dht.view(shape)[table.order]
    dSn = torch.empty_like(S)  # gradient of the state after each chunk
    dU = P.mT @ do
    dX, dW = torch.empty_like(U), torch.empty_like(U)
    at = chunks
    for n in reversed(table.steps):
        now = slice(at - n, at)
        dSn[now] = dS[:n]
        du = dU[now] + c[now] @ dS[:n]
        dX[now] = A[now].mT @ du if p.delta_rule else du
        dW[now] = beta[now] * dX[now]
        new = _scale(dS[:n], whole[now], p) + p.scale * (b[now].mT @ do[now])
        if p.delta_rule:
            new = new - a[now].mT @ dW[now]
        dS = torch.cat([new, dS[n:]])
        at -= n

    split = lambda x: x.unflatten(-1, (p.E, p.K))  # noqa: E731
    UdS = split(U @ dSn.mT)  # [NC, HV, C, E, K]
    dOS = split(do @ S.mT) * p.scale
    dP = p.scale * (do @ U.mT).tril()
    dQK, Z1 = dP * R1, dP * QK
    dbeta = (dX * W).sum(-1)
    dq = (b_ := (q2 * into))[..., None, :] @ dOS
    dq = dq.squeeze(-2) + dQK @ k
    dk = ((k2 * out)[..., None, :] @ UdS).squeeze(-2) + dQK.mT @ q
    wUdS = (UdS @ k[..., None]).squeeze(-1)
    dq2 = into * (dOS @ q[..., None]).squeeze(-1) + torch.einsum("...rs,...rse,...se->...re", Z1, G, k2)
    write = out * wUdS + torch.einsum("...rs,...rse,...re->...se", Z1, G, q2)
    read = torch.zeros_like(dq2)
    if p.delta_rule:
        dWS = split(dW @ S.mT)
        dL = -(dX @ U.mT).tril(-1)
        dbeta = dbeta + (dL * KK * R).sum(-1)
        Gk = beta * dL * R
        Z = beta * dL * KK
        dk = dk - ((k2 * into)[..., None, :] @ dWS).squeeze(-2) + (Gk + Gk.mT) @ k
        read = -into * (dWS @ k[..., None]).squeeze(-1) + torch.einsum("...rs,...rse,...se->...re", Z, G, k2)
        write = write + torch.einsum("...rs,...rse,...re->...se", Z, G, k2)
    dgc = q2 * dq2 + k2 * (read - write)
    last = (S * dSn).view(chunks, p.HV, p.E, -1).sum(-1) * whole + (k2 * out * wUdS).sum(-2)
    dgc[..., -1, :] += last
    dg = dgc.flip(-2).cumsum(-2).flip(-2)
    grads = _from_chunks(p, given, (dq, dk, dW, dq2, read + write, dg, dbeta[..., None]), table)
    dh0 = None
    if h0 is not None:
        dh0 = torch.empty_like(h0)
        dh0[table.order] = dS.view(h0.shape)
    return *grads, dh0


def _chunks(p, q, k, v, q2, k2, g, beta, table):
    given = _all_present(p, q, k, v, q2, k2, g, beta, _exact(p.dtype))
    given = (*given[:6], given[6][..., None])
    return [to_chunks(x.flatten(0, 1), table, C) for x in given]


def _from_chunks(p, given, grads, table):
    out = []
    for i, (x, dx) in enumerate(zip(given, grads, strict=True)):
        if x is None:
            out.append(None)
            continue
        dx = from_chunks(dx, table)
        if i in (0, 1, 3, 4) and p.H != p.HV:
            dx = dx.unflatten(1, (p.H, -1)).sum(2)
        if i == 5 and p.gate == "head":
            dx = dx.sum(-1)
        out.append(dx.reshape(x.shape).to(x.dtype))
    return out


def _decays(g):
    into = g.cumsum(-2)
    out = torch.cat([g[..., 1:, :].flip(-2).cumsum(-2).flip(-2), torch.zeros_like(g[..., :1, :])], -2)
    return into.exp(), out.exp(), into[..., -1, :].exp()


def _masks(p, q, k, q2, k2, g, beta):
    gc = g.cumsum(-2)
    mask = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()[..., None]
    G = (gc[..., :, None, :] - gc[..., None, :, :]).masked_fill(~mask, -torch.inf).exp()
    R = torch.einsum("...re,...se,...rse->...rs", k2, k2, G)
    R1 = torch.einsum("...re,...se,...rse->...rs", q2, k2, G)
    KK, QK = k @ k.mT, q @ k.mT
    I = torch.eye(C, dtype=k.dtype, device=k.device)
    A = None
    A = I.expand_as(KK)
    if p.delta_rule:
        A = torch.linalg.solve_triangular(I + (beta * KK * R).tril(-1), I, upper=False, unitriangular=True)
    return A, p.scale * QK * R1, QK, KK, R, R1, G


def _outer(x, y):
    return (x[..., None] * y[..., None, :]).flatten(-2)


def _scale(S, whole, p):
    return (S.view(*S.shape[:2], p.E, -1) * whole[..., None]).view(S.shape)
