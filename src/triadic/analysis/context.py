"""Loss on the last tokens of a document against how much of the document stood before them (paper, Figure 5)."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from triadic.models.losses import tokens_per_chunk


def tail_loss(
    model: PreTrainedModel,
    lengths: Sequence[int],
    read: Callable[[int, int, int], Any],
    contexts: Sequence[int],
    tail: int,
    documents: Sequence[int],
) -> list[dict[str, Any]]:
    """Mean loss on the last `tail` tokens of documents, for each number of tokens of context before them.

    Every context is measured on the same documents. `lengths` and `read(document, start, stop)` give token ids;
    `documents` are the indices to use. The standard error is over documents; None with one document.

    Raises ValueError for a context below 1 (the first scored token needs one before it) and if a document is shorter
    than the longest context and the tail.
    """
    if min(contexts) < 1:
        raise ValueError(f"contexts must be numbers of tokens, 1 or more, not {list(contexts)}")
    longest = max(contexts) + tail
    short = [index for index in documents if lengths[index] < longest]
    if short or not documents:
        raise ValueError(
            f"{len(short)} of {len(documents)} documents are shorter than the {longest} tokens of the longest context "
            "and the tail; lower them or choose longer documents"
        )
    rows = []
    for context in contexts:
        losses = []
        for index in documents:
            stop = lengths[index]
            ids = torch.tensor(read(index, stop - tail - context, stop), dtype=torch.int64).to(model.device)
            losses.append(_last_losses(model, ids, tail))
        se = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
        rows.append(
            {"metric": "tail_loss", "context": context, "value": statistics.fmean(losses), "se": se}
            | {"tail": tail, "documents": len(losses)}
        )
    return rows


@torch.no_grad()
def _last_losses(model: PreTrainedModel, ids: Tensor, tail: int) -> float:
    """Mean loss in nats on the last `tail` of ids [n], n > tail, after all before them."""
    hidden = model.base_model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0, -tail:]  # [tail, D]
    head = model.get_output_embeddings()
    pieces = zip(*(x.split(tokens_per_chunk(head.weight)) for x in (hidden, ids[-tail:])), strict=True)
    losses = [F.cross_entropy(head(x).float(), targets, reduction="sum").item() for x, targets in pieces]
    return sum(losses) / tail
