"""What the ops accept, in a sentence each where they do not.

Legend: B batch, T time, H key heads, HV value heads, K and V key and value sizes, E second-key size, N sequences.
"""

import torch
from torch import Tensor

from .packing import check_cu_seqlens, check_cu_seqlens_metadata

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_arguments(q, k, v, q2, k2, g, beta, initial_state, cu_seqlens, state_dtypes=()) -> None:
    """Raise ValueError for shapes, dtypes or devices that do not fit together; reads no values. `state_dtypes` are
    further dtypes of the initial state beside float32 (of any q but float64).
    """
    given = dict(q=q, k=k, v=v, q2=q2, k2=k2, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v")):
            raise ValueError(f"{name} is of type {type(x).__name__}; pass a torch.Tensor.")
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q has shape {list(q.shape)} and v {list(v.shape)}; pass [B, T, H, K] and [B, T, HV, V].")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if 0 in (H, K, HV, V):
        raise ValueError(f"q has shape {list(q.shape)} and v {list(v.shape)}; heads and head sizes must be at least 1.")
    if HV % H:
        raise ValueError(
            f"v has {HV} heads, which is not a multiple of the {H} heads of q and k; repeat or drop heads."
        )
    if q2 is not None and q2.ndim != 4:
        raise ValueError(f"q2 has shape {list(q2.shape)}; pass [B, T, H, E].")
    if (q2 is None) != (k2 is None):
        raise ValueError(
            f"{'k2' if q2 is None else 'q2'} was given without the other; pass both q2 and k2, or neither."
        )
    E = 1 if q2 is None else q2.shape[-1]
    if E < 1:
        raise ValueError("q2 has second-key size 0; pass E >= 1, or neither q2 nor k2.")
    if cu_seqlens is not None:
        check_cu_seqlens_metadata(cu_seqlens, B, q.device)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; pass float64, float32, bfloat16 or float16.")
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    expected = (
        ("k", k, q.dtype, "[B, T, H, K]", (B, T, H, K)),
        ("v", v, q.dtype, "[B, T, HV, V]", (B, T, HV, V)),
        ("q2", q2, exact, "[B, T, H, E]", (B, T, H, E)),
        ("k2", k2, exact, "[B, T, H, E]", (B, T, H, E)),
        ("g", g, exact, "[B, T, HV, E] or [B, T, HV]", (B, T, HV) if g is not None and g.ndim == 3 else (B, T, HV, E)),
        ("beta", beta, exact, "[B, T, HV]", (B, T, HV)),
        ("initial_state", initial_state, exact, "[N, HV, E, K, V]", (N, HV, E, K, V)),
    )
    for name, x, dtype, letters, shape in expected:
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; pass {letters}, here {list(shape)}.")
        if x.dtype != dtype and not (name == "initial_state" and x.dtype in state_dtypes and dtype == torch.float32):
            raise ValueError(f"{name} has dtype {x.dtype}; pass {dtype}, as q is {q.dtype}.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}; move it there.")


def check_values(g: Tensor | None, cu_seqlens: Tensor | None, tokens: int, check: bool) -> None:
    """Raise ValueError for a positive g or inconsistent cu_seqlens: always on the CPU, elsewhere with check=True."""
    if g is not None and (check or g.device.type == "cpu") and (g > 0).any():
        raise ValueError(
            f"g reaches {g.max().item():.3g}, but log decays must be <= 0; pass log(alpha), alpha in [0, 1]."
        )
    if cu_seqlens is not None and (check or cu_seqlens.device.type == "cpu"):
        check_cu_seqlens(cu_seqlens, tokens)
