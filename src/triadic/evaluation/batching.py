"""How many sequences go through a model at once: limits that shrink when the device's memory runs out."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

Answer = TypeVar("Answer")
MOST_SEQUENCES = 64
TOKENS = 32_768  # in one padded batch, where there is no memory to measure
MOST_TOKENS = 262_144  # in one batch, however much memory there is: more gains no speed
PROBE = 2048  # tokens of the forward pass that is measured
SHARE = 0.6  # of the free memory that a batch is to fill, by that measure


class Batches:
    """Limits of a batch, `sequences` and `tokens` with padding (a longer single sequence goes alone).

    A limit that is None is chosen: 64 sequences, and on a GPU as many tokens as a short forward pass says will fit
    into 60 % of the free memory. Whatever they are, both shrink when a batch does not fit after all.
    """

    def __init__(self, model: PreTrainedModel, sequences: int | None, tokens: int | None):
        self.model = model
        self.sequences = sequences or MOST_SEQUENCES
        self.tokens = tokens or _tokens_that_fit(model)

    def run(
        self, lengths: list[int], compute: Callable[[list[int]], list[Answer]]
    ) -> Iterator[tuple[list[int], list[Answer]]]:
        """`compute` the answers of the sequences of these lengths, longest first: yields (indices, their answers).

        Raises ValueError if a single sequence does not fit into memory.
        """
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        while order:
            size = max(1, min(self.sequences, self.tokens // lengths[order[0]]))
            answers, error = self._attempt(compute, order[:size])
            if error is not None:
                self._shrink(len(order[:size]), lengths[order[0]], error)
                continue
            yield order[:size], answers
            order = order[size:]

    def _attempt(self, compute: Callable, batch: list[int]) -> tuple[Any, str | None]:
        try:
            return compute(batch), None
        except torch.OutOfMemoryError as error:  # its traceback holds the tensors: keep no more than its text
            return None, str(error)

    def _shrink(self, size: int, longest: int, error: str) -> None:
        if size == 1:
            raise ValueError(
                f"one sequence of {longest} tokens does not fit into the device's memory "
                f"({' '.join(error.split())[:120]}); give a smaller model, dtype or length"
            )
        self.sequences = min(self.sequences, max(1, size // 2))
        self.tokens = max(1, min(self.tokens, size // 2 * longest))
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _tokens_that_fit(model: PreTrainedModel) -> int:
    """Tokens of a batch, from the memory that a forward pass through the model's body takes."""
    if model.device.type != "cuda":
        return TOKENS
    ids = torch.zeros(1, PROBE, dtype=torch.long, device=model.device)
    model.base_model(input_ids=ids, use_cache=False)  # compiles, and allocates what stays
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.base_model(input_ids=ids, use_cache=False)
    taken = max(1, torch.cuda.max_memory_allocated(model.device) - before)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return min(MOST_TOKENS, max(PROBE, int(SHARE * free / taken * PROBE)))
