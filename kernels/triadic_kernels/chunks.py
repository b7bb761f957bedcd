"""Chunk tables: which rows belong to which chunk, built on the device without looking at its values.

    chunks    [NC, 3] int32   sequence, first row, rows (0: beyond the last chunk)
    sequences [N, 2] int32    first chunk, number of chunks; chunks of a sequence are consecutive
    order     [N] int32       sequences, longest first

A batch [B, T] is the packed case of B sequences of length T. The host knows NC: exactly for a batch, by the bound
R // C + N for R packed rows. Tables of a batch are kept between calls: B and T say all about them. Those of packed
documents are not, since what a cu_seqlens holds can change without a new version (Inductor reuses a tensor for another,
CUDA graphs are replayed, .data is written to); one small kernel makes them.
"""

from functools import lru_cache

import torch

from .chunk_tables import tables_kernel
from .launch import Launcher, aligned

CHUNK = 64
BLOCK = 1024  # sequences, or rows of the chunk table, that a program looks at together

_batches = {}  # (B, T, (device, stream)) -> tables of the last MANY batch shapes; another stream might read them early
_captured = {}  # (B, T, device) -> those that a CUDA graph reads, which must outlive it
MANY = 128


def count(B: int, T: int, N: int, varlen: bool) -> int:
    """Rows of the chunk table."""
    return B * T // CHUNK + N if varlen else B * -(-T // CHUNK)


def tables(B: int, T: int, cu_seqlens, device):
    """(chunks, sequences, order) for cu_seqlens [N+1], or for B sequences of length T where it is None: then shared and
    not to be written to. `device`, where the tensors are, must be the current one (`launch.current`).
    """
    return _equal(B, T, device) if cu_seqlens is None else _packed(B, T, cu_seqlens, device)


def _packed(B, T, cu_seqlens, device):
    N = cu_seqlens.numel() - 1
    NC = count(B, T, N, True)
    made = tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in ((NC, 3), (N, 2), (N,)))
    _launcher(device, cu_seqlens.dtype)((N, 1, 1), aligned(cu_seqlens), *made, N, NC)
    return made


@lru_cache(None)
def _launcher(device, dtype) -> Launcher:
    """For bounds of this dtype."""
    return Launcher(tables_kernel, device, dict(C=CHUNK, BLOCK=BLOCK, num_warps=4))


def _place(device):
    """The device and the stream on it that work is queued on."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _capturing(device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _equal(B, T, device):
    """Tables of a batch, built once on each stream. A CUDA graph keeps those it found, of any stream, for good; what it
    builds itself, which only a replay fills, is its own.
    """
    if _capturing(device):
        known = [made for (*shape, place), made in _batches.items() if shape == [B, T] and place[0] == device]
        if known:
            _captured.setdefault((B, T, device), known[0])
        return _captured.get((B, T, device)) or _build(B, T, device)
    key = B, T, _place(device)
    made = _captured.get((B, T, device)) or _batches.get(key)
    if made is None:
        made = _build(B, T, device)
        if len(_batches) == MANY:
            _batches.pop(next(iter(_batches)), None)
        _batches[key] = made
    return made


def _build(B, T, device):
    each = -(-T // CHUNK)  # chunks of a sequence
    n, row = torch.arange(B, device=device), torch.arange(each, device=device) * CHUNK
    columns = torch.broadcast_tensors(n[:, None], n[:, None] * T + row, (T - row).clamp(max=CHUNK))
    chunks = torch.stack(columns, 2).flatten(0, 1).int()
    return chunks, torch.stack([n * each, torch.full_like(n, each)], 1).int(), n.int()
