"""Where documents begin in a batch and which of its tokens are padding."""

import dataclasses

import torch
import torch.nn.functional as F

from .context import Context


@dataclasses.dataclass
class Layout:
    """Where documents begin and which tokens are padding, found once per forward and shared by all layers.

    packed: `cu_seqlens` [N + 1] int32 are the document bounds of the rows, one after another;
        `max_seqlen` their longest.
    padded: `valid` [n] are the flat positions of the real tokens of B rows, `cu_seqlens` [B + 1] the bounds of the
        rows among those n tokens.
    neither: every row is one document (or continues the one in its cache).
    context: the ranks that the packed row is spread over (see context.py); the bounds are those of the whole row.
    """

    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    valid: torch.Tensor | None = None
    context: Context | None = None
    spread: torch.Tensor | None = None  # what `bounds` found

    @property
    def packed(self):
        return self.cu_seqlens is not None and self.valid is None

    def longest(self):
        """Tokens of the longest document, an int; reading it stalls a GPU once, unless the caller gave it."""
        if self.max_seqlen is None:
            self.max_seqlen = int(self.cu_seqlens.diff().max())
        return self.max_seqlen

    def bounds(self, steps):
        """cu_seqlens where each token is `steps` steps of the recurrence; the same tensor for every layer."""
        if self.cu_seqlens is None or steps == 1:
            return self.cu_seqlens
        if self.spread is None:
            self.spread = self.cu_seqlens * steps
        return self.spread

    def one_row(self, x):
        """[B, T, D] -> [1, B T, D] where documents are packed (unchanged otherwise)."""
        return x.flatten(0, 1)[None] if self.packed else x

    def gather(self, x):
        """[B, T, D] -> [1, n, D] without the padding, or `one_row` if there is none."""
        return self.one_row(x) if self.valid is None else x.flatten(0, 1).index_select(0, self.valid)[None]

    def scatter(self, x, like):
        """The inverse of `gather` (and of `one_row`) onto the shape of `like` [B, T, D]; padding becomes zero."""
        if self.valid is None:
            return x.view(*like.shape[:2], x.shape[-1])
        flat = x.new_zeros(like.shape[0] * like.shape[1], x.shape[-1])
        return flat.index_copy(0, self.valid, x[0]).view(*like.shape[:2], -1)


def find_layout(batch, length, attention_mask, position_ids, cu_seqlens, max_seqlen, past_length, context=None):
    """Read packing and padding off the arguments of a forward.

    Packing is `cu_seqlens`, or `position_ids` that restart; padding is a zero in the `[B, past + T]` attention mask.
    A mask of ones changes nothing. Reading values stalls a GPU, so `cu_seqlens` is the way to train.

    Raises:
        ValueError: packing together with padding, with more than one row (cu_seqlens) or with a filled cache.
    """
    if context is not None:
        return _spread_layout(batch, length, attention_mask, cu_seqlens, max_seqlen, context)
    padded = _find_padding(batch, length, attention_mask)
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q describes one packed row, but the batch has {batch}: flatten it to one.")
        if padded is not None:
            raise ValueError("cu_seq_lens_q and an attention_mask with zeros exclude each other: give one of them.")
        _check_bounds(cu_seqlens, length)
        return Layout(cu_seqlens.to(torch.int32), max_seqlen)
    restarts = None
    empty = isinstance(past_length, int) and past_length == 0
    if position_ids is not None and length > 1 and (empty or not torch.compiler.is_compiling()):
        positions = position_ids.expand(batch, -1)
        if padded is not None:
            real = attention_mask[:, -length:].bool()
            restarts = (positions[:, 1:] <= positions[:, :-1]) & real[:, 1:] & real[:, :-1]
        elif empty:
            restarts = positions[:, 1:] != positions[:, :-1] + 1
        else:
            restarts = positions[:, 1:] <= positions[:, :-1]
        restarts = restarts if bool(restarts.any()) else None
    if restarts is None:
        return padded or Layout()
    if padded is not None:
        raise ValueError("position_ids restart inside a padded row: give packed rows without padding.")
    starts = F.pad(restarts, (1, 0), value=True).flatten().nonzero().flatten()
    end = starts.new_full((1,), batch * length)
    return Layout(torch.cat([starts, end]).to(torch.int32), max_seqlen)


def _spread_layout(batch, length, attention_mask, cu_seqlens, max_seqlen, context):
    """Packed documents that lie spread over ranks, `length` tokens on each."""
    if batch != 1 or cu_seqlens is None or attention_mask is not None:
        raise ValueError(
            "a context spread over ranks takes one packed row: input_ids [1, T / ranks] and cu_seq_lens_q of all T "
            "tokens, no attention_mask."
        )
    _check_bounds(cu_seqlens, length * context.degree)
    return Layout(cu_seqlens.to(torch.int32), max_seqlen, context=context)


def _check_bounds(cu_seqlens, length):
    """On the CPU; on a GPU reading the values would stall it, so there the collator is trusted."""
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != length or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to the {length} tokens of the row, but it is {cu_seqlens.tolist()[:8]}."
        )


def _find_padding(batch, length, attention_mask):
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    if attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns for {length} tokens: it covers the cached tokens "
            "and the new ones."
        )
    if len(attention_mask) not in (1, batch):
        raise ValueError(f"attention_mask has {len(attention_mask)} rows for a batch of {batch}: give as many.")
    real = attention_mask[:, -length:].bool().expand(batch, -1)
    if bool(real.all()):
        return None
    counts = real.sum(-1, dtype=torch.int32)
    return Layout(F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)), None, real.flatten().nonzero().flatten())


def document_positions(layout, length, past_length, device):
    """Positions [1, T] that count from each packed document's start, or go on after `past_length` tokens."""
    tokens = torch.arange(length, device=device)
    if not layout.packed:
        return (tokens + past_length)[None]
    bounds = layout.cu_seqlens
    if layout.context is not None:
        tokens = tokens + layout.context.rank * length
    return (tokens - bounds[torch.searchsorted(bounds, tokens, right=True) - 1])[None]
