"""Chunk tables: which rows belong to which chunk, built on the device without looking at its values.

    chunks    [NC, 3] int32   sequence, first row, rows (0: beyond the last chunk)
    sequences [N, 2] int32    first chunk, number of chunks; chunks of a sequence are consecutive
    order     [N] int32       sequences, longest first

A batch [B, T] is the packed case of B sequences of length T. The host knows NC: exactly for a batch, by the bound
R // C + N for R packed rows. Every call makes its own, with one small kernel: what a cu_seqlens holds can change
without a new version (Inductor reuses a tensor for another, CUDA graphs are replayed, .data is written to), and
torch.compile(mode="reduce-overhead") refuses ops that keep memory between calls.
"""

from functools import lru_cache

import torch

from .chunk_tables import tables_kernel
from .launch import Launcher, aligned

CHUNK = 64
BLOCK = 1024  # sequences, or rows of the chunk table, that a program looks at together


def count(B: int, T: int, N: int, varlen: bool) -> int:
    """Rows of the chunk table."""
    return B * T // CHUNK + N if varlen else B * -(-T // CHUNK)


def tables(B: int, T: int, cu_seqlens, device):
    """(chunks, sequences, order) for cu_seqlens [N+1], or for B sequences of length T where it is None. `device`, where
    the tensors are, must be the current one (`launch.current`).
    """
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    NC = count(B, T, N, cu_seqlens is not None)
    made = tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in ((NC, 3), (N, 2), (N,)))
    launcher = _launcher(device, None if cu_seqlens is None else cu_seqlens.dtype)
    launcher((N, 1, 1), aligned(cu_seqlens), *made, T, N, NC)
    return made


@lru_cache(None)
def _launcher(device, dtype) -> Launcher:
    """For bounds of this dtype; None: of a batch."""
    return Launcher(tables_kernel, device, dict(VARLEN=dtype is not None, C=CHUNK, BLOCK=BLOCK, num_warps=4))
