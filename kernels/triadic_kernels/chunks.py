"""Chunk tables: which rows belong to which chunk, built on the device without looking at its values.

    chunks    [NC, 3] int32   sequence, first row, rows (0: beyond the last chunk)
    sequences [N, 2] int32    first chunk, number of chunks; chunks of a sequence are consecutive
    order     [N] int32       sequences, longest first

A batch [B, T] is the packed case of B sequences of length T. The host knows NC: exactly for a batch, by the bound
R // C + N for R packed rows.
"""

import weakref

import torch

from .dispatch import CALL

CHUNK = 64

_latest = {}  # (device, stream) -> (weak reference to cu_seqlens, its address and version, T, tables), the last there
_batches = {}  # (B, T, (device, stream)) -> tables of the last MANY batch shapes; another stream might read them early
_captured = {}  # (B, T, device) -> those that a CUDA graph reads, which must outlive it
MANY = 128


def count(B: int, T: int, N: int, varlen: bool) -> int:
    """Rows of the chunk table."""
    return B * T // CHUNK + N if varlen else B * -(-T // CHUNK)


def tables(B: int, T: int, cu_seqlens, device):
    """(chunks, sequences, order) for cu_seqlens [N+1], or for B sequences of length T where it is None.

    Where the op is called directly, built once for all layers of a model that share a cu_seqlens: the same tensor,
    unchanged by what its version counts. Not to be written to.
    """
    if cu_seqlens is None:
        return _equal(B, T, device)
    if not _remembered(cu_seqlens):
        return _build(cu_seqlens.long(), count(B, T, cu_seqlens.numel() - 1, True))
    place = _place(device)
    state = cu_seqlens.data_ptr(), cu_seqlens._version, T
    reference, known, made = _latest.get(place, (lambda: None, None, None))
    if reference() is not cu_seqlens or known != state:
        made = _build(cu_seqlens.long(), count(B, T, cu_seqlens.numel() - 1, True))
        _latest[place] = weakref.ref(cu_seqlens), state, made
    return made


def _remembered(cu_seqlens) -> bool:
    """Not inference tensors, which count no versions (nor in inference mode, whose tables autograd would not take), nor
    inside a CUDA graph, whose replays must build the tables.
    """
    inference = cu_seqlens.is_inference() or torch.is_inference_mode_enabled()
    return CALL.direct and not inference and not _capturing(cu_seqlens.device)


def _place(device):
    """The device and the stream on it that work is queued on."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _capturing(device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def tables_like(N: int, NC: int, device):
    """Uninitialised (chunks, sequences, order)."""
    return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in ((NC, 3), (N, 2), (N,)))


def _equal(B, T, device):
    """Tables of a batch, built once on each stream. A CUDA graph keeps those it found, of any stream, for good; what it
    builds itself, which only a replay fills, is its own.
    """
    if _capturing(device):
        known = [made for (*shape, place), made in _batches.items() if shape == [B, T] and place[0] == device]
        if known:
            _captured.setdefault((B, T, device), known[0])
        return _captured.get((B, T, device)) or _build_equal(B, T, device)
    key = B, T, _place(device)
    made = _captured.get((B, T, device)) or _batches.get(key)
    if made is None:
        made = _build_equal(B, T, device)
        if len(_batches) == MANY:
            _batches.pop(next(iter(_batches)), None)
        _batches[key] = made
    return made


def _build_equal(B, T, device):
    return _build(torch.arange(B + 1, device=device) * T, count(B, T, B, False))


def _build(cu, NC):
    lengths = cu.diff()
    per_sequence = (lengths + (CHUNK - 1)) // CHUNK
    ends = per_sequence.cumsum(0)
    first = ends - per_sequence
    c = torch.arange(NC, device=cu.device)
    n = torch.searchsorted(ends, c, right=True).clamp_(max=lengths.numel() - 1)
    row = cu[n] + (c - first[n]) * CHUNK
    rows = (cu[n + 1] - row).clamp(0, CHUNK)
    chunks = torch.stack([n, row, rows], 1).int()
    order = lengths.argsort(descending=True, stable=True).int()
    return chunks, torch.stack([first, per_sequence], 1).int(), order
