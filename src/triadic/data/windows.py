"""From a stream of tokens to training batches: windows, their order, their packing.

A window is seq_len + 1 consecutive tokens of the stream; windows are disjoint. Global position p reads window
permutation(seed, epoch)[p - epoch * len], with epoch = p // len: the order depends on nothing else, so a run that
resumes needs no loader state, and any number of processes reads the same tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .order import permutation

IGNORED = -100  # the label that no loss counts


class Windows(torch.utils.data.Dataset):
    """Windows of a store, addressed by global position (any non-negative integer).

    Every window start and every document start resets position_ids to 0. The target that follows an EOS is the next
    document's BOS; it counts, unless `mask_boundary_targets`.

    Raises ValueError if the store holds less than one window.
    """

    def __init__(self, store, seq_len: int, seed: int, mask_boundary_targets: bool = False):
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, not {seq_len}")
        if store.num_tokens < seq_len + 1:
            raise ValueError(
                f"the store {store.path} holds {store.num_tokens:,} tokens, less than one window of {seq_len:,} + 1; "
                "choose a shorter seq_len or prepare more text"
            )
        self.store, self.seq_len, self.seed = store, seq_len, seed
        self.mask_boundary_targets = mask_boundary_targets
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Windows in an epoch; the tokens behind the last whole window are not read."""
        return self.store.num_tokens // (self.seq_len + 1)

    def epoch_of(self, position: int) -> int:
        """The epoch that a global position belongs to."""
        return position // len(self)

    def order(self, epoch: int) -> np.ndarray:
        """The windows in the order in which `epoch` reads them: int64 [len]."""
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:  # a loader reads ahead by one epoch at most
                del self._orders[old]
            self._orders[epoch] = permutation(len(self), self.seed, epoch)
        return self._orders[epoch]

    def __getitem__(self, position: int) -> dict[str, torch.Tensor | int]:
        """input_ids, shift_labels, position_ids: int64 [T]; vocab_size: what the ids must stay below."""
        epoch, index = divmod(position, len(self))
        return self.window(int(self.order(epoch)[index]))

    def window(self, index: int) -> dict[str, torch.Tensor | int]:
        """Window `index` of the stream in stream order, as __getitem__ gives it."""
        length = self.seq_len
        first = index * (length + 1)
        tokens = self.store.tokens(first, first + length + 1).astype(np.int64)  # [T + 1]
        starts = self.store.starts(first, first + length + 1) - first
        labels = tokens[1:].copy()
        if self.mask_boundary_targets:
            labels[starts[starts > 0] - 1] = IGNORED
        since = np.zeros(length, dtype=np.int64)  # [T] where the segment of each token starts
        inside = starts[starts < length]
        since[inside] = inside
        positions = np.arange(length) - np.maximum.accumulate(since)
        return {
            "input_ids": torch.from_numpy(tokens[:-1]),
            "shift_labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
            "vocab_size": self.store.vocab_size,
        }


def collate(samples: Sequence[dict], part: int = 0, parts: int = 1) -> dict[str, torch.Tensor | int]:
    """Pack n windows of T tokens into one row, with the boundaries that attention and recurrence reset at.

    part, parts: return only one of so many equal parts of the row's tokens (T must be a multiple of parts), with the
    boundaries of the whole row.

    Returns input_ids, shift_labels, position_ids: int64 [1, n * T / parts]; cu_seq_lens_q = cu_seq_lens_k: int32
    [N + 1], from 0 to n * T; max_length_q = max_length_k: int. Raises ValueError for an id outside the vocabulary or
    positions that neither count up nor reset to 0.
    """
    if not samples:
        raise ValueError("collate needs at least one window")
    batch = {name: torch.cat([s[name] for s in samples]) for name in ("input_ids", "shift_labels", "position_ids")}
    _check_ids(batch["input_ids"], batch["shift_labels"], min(sample["vocab_size"] for sample in samples))
    positions = batch["position_ids"]
    bounds = (positions == 0).nonzero().flatten()
    counted = torch.arange(len(positions))
    heads = torch.zeros_like(positions)
    heads[bounds] = bounds
    if positions[0] != 0 or not torch.equal(positions, counted - heads.cummax(0).values):
        raise ValueError("position_ids must start at 0 in every window and count up by 1 within a document")
    cu_seqlens = torch.cat([bounds, torch.tensor([len(positions)])])  # [N + 1]
    longest = int(cu_seqlens.diff().max())
    cu_seqlens = cu_seqlens.to(torch.int32)
    batch = {name: value.view(parts, -1)[part, None] for name, value in batch.items()}  # [1, n * T / parts]
    batch |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return batch | {"max_length_q": longest, "max_length_k": longest}


def step_indices(step: int, global_batch: int, rank: int, world_size: int, micro_batch: int) -> list[list[int]]:
    """The global positions that `rank` reads at `step`, cut into micro-batches.

    global_batch: windows a step over all ranks. The ranks' lists, in order of rank, are exactly
    step * global_batch ... (step + 1) * global_batch - 1. Raises ValueError if they do not divide into ranks and
    micro-batches.
    """
    if not 0 <= rank < world_size or step < 0:
        raise ValueError(f"rank {rank} of {world_size} at step {step} does not exist")
    if micro_batch < 1 or global_batch < 1 or global_batch % (world_size * micro_batch):
        raise ValueError(
            f"a global batch of {global_batch} windows cannot be cut into micro-batches of {micro_batch} on "
            f"{world_size} processes; it must be a multiple of {world_size * max(micro_batch, 1)}"
        )
    share = global_batch // world_size
    first = step * global_batch + rank * share
    return [list(range(at, at + micro_batch)) for at in range(first, first + share, micro_batch)]


def _check_ids(input_ids: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> None:
    low, high = (int(value) for value in input_ids.aminmax())
    highest_label = int(labels.max())
    if low < 0 or max(high, highest_label) >= vocab_size:
        wrong = low if low < 0 else max(high, highest_label)
        raise ValueError(
            f"token id {wrong} lies outside the vocabulary of {vocab_size}; the store is damaged or was made with "
            "another tokenizer: prepare the data again"
        )
