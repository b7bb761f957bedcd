"""Sequences packed one after another along T, and their chunks.

`cu_seqlens` [N+1] (int32 or int64) holds the documents' boundaries: document n is tokens cu_seqlens[n] to
cu_seqlens[n+1] - 1. A batch [B, T] is the packed case of B documents of length T. A chunk never spans two documents.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class ChunkTable(NamedTuple):
    """Where each chunk's tokens stand, chunks ordered by their place in their document, longest document first.

    So the chunks that can be computed together, the j-th of every document that has one, are a slice, and row i of each
    slice is document order[i].
    """

    order: Tensor  # [N] documents, longest first
    steps: list[int]  # how many documents have a chunk 0, 1, 2, ...: never increasing
    token: Tensor  # [chunks, C] token of each slot (the document's first where the slot is padding)
    padding: tuple[Tensor, Tensor]  # chunk and slot within it of every padded slot
    slot: Tensor  # [tokens] slot of each token, counted through the chunks


def chunk_bound(batch: int, length: int, documents: int | None, chunk: int) -> int:
    """How many chunks a batch needs, or, packed, the most that so many documents can need: from metadata alone."""
    return batch * ((length + chunk - 1) // chunk) if documents is None else length // chunk + documents


def document_lengths(batch: int, length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Documents' lengths as Python numbers (reads `cu_seqlens` on the host)."""
    return [length] * batch if cu_seqlens is None else cu_seqlens.diff().tolist()


def chunk_table(lengths: list[int], chunk: int, device: torch.device) -> ChunkTable:
    """Cut documents of these lengths, lying one after another, into chunks of at most `chunk` tokens."""
    length = torch.tensor(lengths, dtype=torch.int64)
    start = length.cumsum(0) - length
    length, order = length.sort(descending=True, stable=True)
    chunks = (length + chunk - 1) // chunk
    # [most, N], true where the document has that chunk; read row by row, this is the order of chunks
    present = torch.arange(int(chunks.max()) if lengths else 0)[:, None] < chunks
    place, row = present.nonzero().unbind(1)
    offset = place[:, None] * chunk + torch.arange(chunk)  # [chunks, C] token within the document
    valid = offset < length[row, None]
    token = torch.where(valid, offset, 0) + start[order][row, None]
    slot = torch.empty(sum(lengths), dtype=torch.int64)
    slot[token[valid]] = valid.flatten().nonzero()[:, 0]
    padding = (~valid).nonzero().unbind(1)
    order, token, chunk_of, place, slot = (x.to(device) for x in (order, token, *padding, slot))
    return ChunkTable(order, present.sum(1).tolist(), token, (chunk_of, place), slot)


def to_chunks(x: Tensor, table: ChunkTable, heads: int) -> Tensor:
    """[tokens, H, D] -> [chunks * heads, C, D]: head h from head h // (heads / H), padding zero."""
    H, D = x.shape[1:]
    chunks, chunk = table.token.shape
    head = torch.arange(heads, device=x.device) // (heads // H)
    rows = table.token[:, None] * H + head[:, None]  # [chunks, heads, C]
    y = x.flatten(0, 1).index_select(0, rows.flatten()).view(chunks, heads, chunk, D)
    y[table.padding[0], :, table.padding[1]] = 0
    return y.flatten(0, 1)


def from_chunks(x: Tensor, table: ChunkTable, heads: int) -> Tensor:
    """[chunks * heads, C, D] -> [tokens, heads, D]."""
    _, chunk, D = x.shape
    first = (table.slot // chunk) * heads * chunk + table.slot % chunk  # [tokens] in head 0
    rows = first[:, None] + torch.arange(heads, device=x.device) * chunk
    return x.flatten(0, 1).index_select(0, rows.flatten()).view(-1, heads, D)


def by_length(h: Tensor, table: ChunkTable) -> Tensor:
    """States [N, HV, E, K, V] -> [N * HV, E * K, V] in the order of the chunk table; a copy."""
    return h.index_select(0, table.order).flatten(2, 3).flatten(0, 1)


def as_given(S: Tensor, table: ChunkTable, shape: tuple[int, ...]) -> Tensor:
    """States [N * HV, E * K, V] in the order of the chunk table -> [N, HV, E, K, V] as documents stand."""
    return S.view(shape).index_select(0, table.order.argsort())


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise ValueError unless cu_seqlens starts at 0, never decreases and ends at `tokens` (reads its values)."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts at {bounds[0]}, but the first document starts at token 0.")
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
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
