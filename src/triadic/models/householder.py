"""Several writes a token (Gated DeltaProduct, Siems et al., arXiv 2502.10297), by the ops as they are.

A token decays the state once, then writes n times, each write with its own key, value, second key and strength:

    S_e <- exp(g_e) S_e
    for j in 1 .. n:  r = v_j - sum_e k'_je S_e^T k_j;   S_e <- S_e + beta_j k'_je k_j r^T
    o = scale sum_e q'_e S_e^T q

so that its transition is a product of n generalised Householder matrices in the joint key k' (x) k, with eigenvalues
down to -1 where beta goes up to 2 (`allow_neg_eigval`). To an op these are n steps of which only the first decays and
only the last is read.
"""

import torch.nn.functional as F


def spread_writes(n, q, k, v, q2, k2, g, beta):
    """A mixer's tokens of n writes as n steps of one write each.

    Args:
        q [B, T, H, K], q2 [B, T, H, E], g [B, T, HV, E] or [B, T, HV]: of a token.
        k [B, T, H n, K], v [B, T, HV n, V], k2 [B, T, H n, E], beta [B, T, HV, n]: of its writes, a head's together.

    Returns:
        The same, [B, T n, H or HV, ...]; what is None stays None, and n = 1 changes nothing.
    """
    if n == 1:
        return q, k, v, q2, k2, g, beta
    q, q2 = (_pad(x, n - 1, 0) for x in (q, q2))
    k, v, k2 = (_steps(x, n) for x in (k, v, k2))
    beta = None if beta is None else beta.transpose(2, 3).flatten(1, 2)
    return q, k, v, q2, k2, _pad(g, 0, n - 1), beta


def read_last(n, o):
    """[B, T n, HV, V] of the steps -> [B, T, HV, V] of the tokens."""
    return o if n == 1 else o[:, n - 1 :: n]


def _pad(x, before, after):
    """[B, T, ...] -> [B, T n, ...]: zero steps before and after each token's own."""
    if x is None:
        return None
    rest = x.flatten(2)[:, :, None]  # [B, T, 1, C]
    return F.pad(rest, (0, 0, before, after)).flatten(1, 2).unflatten(-1, x.shape[2:])


def _steps(x, n):
    """[B, T, H n, D] -> [B, T n, H, D]."""
    return None if x is None else x.unflatten(2, (-1, n)).transpose(2, 3).flatten(1, 2)


__all__ = ["read_last", "spread_writes"]
