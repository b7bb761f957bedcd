"""Sequences packed one after another along T, and their chunks.

`cu_seqlens` [N+1] (int32 or int64) holds the documents' boundaries: document n is tokens cu_seqlens[n] to
cu_seqlens[n+1] - 1. A batch [B, T] is the packed case of B documents of length T. A chunk never spans two documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ChunkTable(NamedTuple):
    """Where each chunk's tokens stand, chunks ordered by their place in their document, longest document first.

    So the chunks that can be computed together, the j-th of every document that has one, are a slice, and document
    order[i] is row i of each slice.
    """

    order: Tensor  # [N] documents, longest first
    steps: list[int]  # documents that have a chunk 0, 1, 2, ...: never increasing, sum = chunks
    token: Tensor  # [chunks * C] token of each slot (any valid token where the slot is padding)
    padding: Tensor  # [...] slots that are padding
    slot: Tensor  # [tokens] slot of each token


def chunk_bound(tokens: int, documents: int, chunk: int) -> int:
    """Most chunks that `tokens` tokens in `documents` documents can need: what metadata alone can tell."""
    return tokens // chunk + documents


def document_lengths(batch: int, length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Documents' lengths as Python numbers (reads `cu_seqlens` on the host)."""
    if cu_seqlens is None:
        return [length] * batch
    return cu_seqlens.diff().tolist()


def chunk_table(lengths: list[int], chunk: int, device: torch.device) -> ChunkTable:
    """Cut documents of these lengths, lying one after another, into chunks of at most `chunk` tokens."""
    length = torch.tensor(lengths, dtype=torch.int64)
    start = length.cumsum(0) - length
    length, order = length.sort(descending=True, stable=True)
    start = start[order]
    chunks = (length + chunk - 1) // chunk
    most = int(chunks[0]) if lengths else 0
    steps = [int(n) for n in (chunks[:, None] > torch.arange(most)).sum(0)]

    row = torch.cat([torch.arange(n) for n in steps] or [length.new_empty(0)])  # [chunks]: place in `order`
    place = torch.cat([torch.full((n,), j) for j, n in enumerate(steps)] or [length.new_empty(0)])  # chunk of document
    offset = place[:, None] * chunk + torch.arange(chunk)  # [chunks, C]: token within the document
    valid = offset < length[row][:, None]
    token = torch.where(valid, offset, 0) + start[row][:, None]
    slot = torch.empty(int(length.sum()), dtype=torch.int64)
    slot[token[valid]] = valid.flatten().nonzero()[:, 0]
    padding = (~valid).flatten().nonzero()[:, 0]
    return ChunkTable(order.to(device), steps, token.flatten().to(device), padding.to(device), slot.to(device))


def to_chunks(x: Tensor, table: ChunkTable, chunk: int) -> Tensor:
    """Tokens to chunks, padding zero: [tokens, heads, D] -> [chunks, heads, C, D]."""
    rows = x.index_select(0, table.token).index_fill_(0, table.padding, 0)
    return rows.view(-1, chunk, *x.shape[1:]).transpose(1, 2).contiguous()


def from_chunks(x: Tensor, table: ChunkTable) -> Tensor:
    """Chunks to tokens: [chunks, heads, C, D] -> [tokens, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, table.slot)


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise ValueError unless cu_seqlens starts at 0, never decreases and ends at `tokens` (reads its values)."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts at {bounds[0]}, but the first document starts at token 0.")
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end < start:
            raise ValueError(f"cu_seqlens decreases from {start} to {end} at document {n}; sort the boundaries.")
    if bounds[-1] != tokens:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but the input has {tokens} tokens; make them equal.")


def check_cu_seqlens_metadata(cu_seqlens: Tensor, batch: int, device: torch.device) -> None:
    """Raise ValueError unless cu_seqlens is a 1-D int32 or int64 tensor on `device` and the batch is 1."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}; pass int32 or int64.")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; pass [N + 1] boundaries, N >= 1.")
    if batch != 1:
        raise ValueError(f"cu_seqlens needs one packed row, but the batch size is {batch}; reshape to [1, B * T, ...].")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, but the inputs are on {device}; move it there.")
