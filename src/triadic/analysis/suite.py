"""All analyses of one model on held-out documents, from one set of settings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from triadic.analysis.context import tail_loss
from triadic.analysis.gates import half_lives, linear_mixers, observe_gates, write_strengths
from triadic.analysis.state import state_ranks


@dataclass(frozen=True)
class AnalysisConfig:
    """Which text is read; lengths in tokens."""

    window: int = 65_536  # for gates and states: the first tokens of documents
    windows: int = 16  # documents used, evenly spaced among those long enough
    rank_positions: list[int] = field(default_factory=lambda: [1024, 4096, 16_384, 65_536])
    tail: int = 4096  # scored at the end of documents
    contexts: list[int] = field(default_factory=lambda: [256, 1024, 2048, 4096, 8192, 16_384, 32_768, 61_440])
    tail_documents: int = 64
    data: str | None = None  # a token store or text; null: what the checkpoint's run was validated on

    def __post_init__(self):
        if min(self.window, self.windows, self.tail, self.tail_documents) < 1:
            raise ValueError("window, windows, tail and tail_documents must be at least 1")
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts must be numbers of tokens, 1 or more, not {self.contexts}")
        if self.rank_positions and max(self.rank_positions) > self.window:
            raise ValueError(f"rank_positions ({self.rank_positions}) must lie in the window of {self.window} tokens")


def analyse(
    model: PreTrainedModel, lengths: Sequence[int], read: Callable[[int, int, int], Any], config: AnalysisConfig
) -> list[dict[str, Any]]:
    """Rows of every analysis that the model has something for (one without our mixers: only the use of context).

    `lengths` are the documents' in tokens, `read(document, start, stop)` gives token ids. Raises ValueError if no
    document is long enough.
    """

    def windows() -> Iterator[torch.Tensor]:
        for index in choose(lengths, config.window, config.windows):
            ids = torch.tensor(read(index, 0, config.window), dtype=torch.int64)  # a copy: stores are read-only
            yield ids[None].to(model.device)  # [1, T]

    rows = []
    if linear_mixers(model):
        gates = observe_gates(model, windows())
        rows += half_lives(gates) + write_strengths(gates)
        if config.rank_positions:
            rows += state_ranks(model, windows(), config.rank_positions)
    documents = choose(lengths, max(config.contexts) + config.tail, config.tail_documents)
    return rows + tail_loss(model, lengths, read, config.contexts, config.tail, documents)


def choose(lengths: Sequence[int], least: int, most: int) -> list[int]:
    """Up to `most` documents of at least `least` tokens, evenly spaced. Raises ValueError if there is none."""
    long_enough = [i for i, length in enumerate(lengths) if length >= least]
    if not long_enough:
        raise ValueError(
            f"no document has {least} tokens (the longest has {max(lengths, default=0)}); lower the lengths"
        )
    count = min(most, len(long_enough))
    return [long_enough[i * len(long_enough) // count] for i in range(count)]
