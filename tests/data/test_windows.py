"""Windows, their order and their packing, against the definition written out in plain Python."""

import itertools
import pickle
import time

import numpy as np
import pytest
import torch

from triadic.data import Windows, collate, open_store, step_indices

T = 37


@pytest.fixture(scope="module")
def store(prepared):
    return open_store(prepared / "train")


@pytest.fixture(scope="module")
def oracle(plain, tokenizer, texts):
    """(inputs, labels, positions, boundary) of global position p, from lists alone."""
    flat, first = [], []
    for document in plain.tokens(tokenizer, texts)[8:]:
        flat += document
        first += [True] + [False] * (len(document) - 1)
    count = len(flat) // (T + 1)

    def window(position: int, seed: int):
        epoch, index = position // count, position % count
        at = plain.permutation(count, seed, epoch)[index] * (T + 1)
        tokens, begins = flat[at : at + T + 1], first[at : at + T + 1]
        positions = []
        for i in range(T):
            positions.append(0 if i == 0 or begins[i] else positions[-1] + 1)
        return tokens[:-1], tokens[1:], positions, begins[1:]

    window.count = count
    return window


def test_windows_are_those_of_the_definition_over_three_epochs(store, oracle):
    windows = Windows(store, T, seed=3)
    assert len(windows) == oracle.count
    crossed = 0
    for position in range(3 * len(windows)):
        sample = windows[position]
        inputs, labels, positions, begins = oracle(position, seed=3)
        assert sample["input_ids"].tolist() == inputs
        assert sample["shift_labels"].tolist() == labels
        assert sample["position_ids"].tolist() == positions
        crossed += sum(begins)
    assert crossed > 20


def test_boundary_targets_can_be_masked(store, oracle):
    windows = Windows(store, T, seed=3, mask_boundary_targets=True)
    for position in range(len(windows)):
        _, labels, _, begins = oracle(position, seed=3)
        expected = [-100 if begin else label for label, begin in zip(labels, begins, strict=True)]
        assert windows[position]["shift_labels"].tolist() == expected


def test_eos_to_bos_counts_by_default(store):
    pairs = 0
    for position in range(len(windows := Windows(store, T, seed=0))):
        sample = windows[position]
        pairs += int(((sample["input_ids"] == store.eos) & (sample["shift_labels"] == store.bos)).sum())
    assert pairs > 20


def test_every_window_of_an_epoch_once_and_epochs_differ(store):
    windows = Windows(store, T, seed=3)
    orders = [windows.order(epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(len(windows)))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], Windows(store, T, seed=4).order(0))
    assert [windows.epoch_of(p) for p in (0, len(windows) - 1, len(windows), 5 * len(windows))] == [0, 0, 1, 5]


def test_going_back_an_epoch_gives_the_same_windows(store):
    windows = Windows(store, T, seed=3)
    for position in (0, 5 * len(windows), 2 * len(windows), 1):
        fresh = Windows(store, T, seed=3)[position]
        assert torch.equal(windows[position]["input_ids"], fresh["input_ids"])


def test_windows_travel_to_loader_processes(store):
    windows = Windows(store, T, seed=3)
    twin = pickle.loads(pickle.dumps(windows))
    assert torch.equal(twin[7]["input_ids"], windows[7]["input_ids"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_only_slice_the_stream(world_size):
    """Resuming at any step, with any number of processes and micro-batches, reads the same global positions."""
    for step in (0, 1, 7):
        for micro_batch in (1, 2):
            lists = [step_indices(step, 12, rank, world_size, micro_batch) for rank in range(world_size)]
            assert all(len(batch) == micro_batch for rank in lists for batch in rank)
            assert [p for rank in lists for batch in rank for p in batch] == list(range(12 * step, 12 * step + 12))


UNEVEN = [(0, 12, 0, 5, 1), (0, 12, 0, 2, 4), (0, 12, 2, 2, 1), (-1, 12, 0, 1, 1), (0, 0, 0, 1, 1)]


@pytest.mark.parametrize("case", UNEVEN)
def test_steps_that_do_not_divide_are_refused(case):
    with pytest.raises(ValueError, match=r"cannot be cut|does not exist"):
        step_indices(*case)


def test_parts_of_a_row_make_it_up(store):
    """Ranks that share windows: each has a stretch of the row's tokens, all have the bounds of the whole row."""
    samples = [Windows(store, 12, seed=3)[position] for position in range(5)]
    whole = collate(samples)
    parts = [collate(samples, part, 4) for part in range(4)]
    for name in ("input_ids", "shift_labels", "position_ids"):
        assert [part[name].shape for part in parts] == [(1, 15)] * 4
        assert torch.cat([part[name] for part in parts], 1).tolist() == whole[name].tolist()
    for name in whole.keys() - {"input_ids", "shift_labels", "position_ids"}:
        assert all(torch.equal(torch.as_tensor(part[name]), torch.as_tensor(whole[name])) for part in parts)


def test_collate_packs_with_every_boundary(store, oracle):
    windows = Windows(store, T, seed=3)
    batch = collate([windows[p] for p in range(5)])
    rows = [oracle(p, seed=3) for p in range(5)]
    assert batch["input_ids"].tolist() == [[token for row in rows for token in row[0]]]
    assert batch["shift_labels"].tolist() == [[token for row in rows for token in row[1]]]
    positions = [position for row in rows for position in row[2]]
    assert batch["position_ids"].tolist() == [positions]
    bounds = [i for i, position in enumerate(positions) if position == 0] + [5 * T]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == bounds
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    assert batch["max_length_q"] == batch["max_length_k"] == longest
    packing = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert set(batch) == {"input_ids", "shift_labels", "position_ids"} | packing


def sample(**changes):
    plain = {"input_ids": [1, 5, 6, 2], "shift_labels": [5, 6, 2, 1], "position_ids": [0, 1, 2, 3]} | changes
    return {name: torch.tensor(value) for name, value in plain.items()} | {"vocab_size": 10}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [1, 5, 10, 2]}, "token id 10 lies outside the vocabulary of 10"),
        ({"shift_labels": [5, 6, 2, 11]}, "token id 11 lies outside"),
        ({"input_ids": [1, -1, 6, 2]}, "token id -1 lies outside"),
        ({"position_ids": [1, 2, 3, 4]}, "position_ids must start at 0"),
        ({"position_ids": [0, 1, 3, 4]}, "position_ids must start at 0"),
        ({"position_ids": [0, 1, 1, 2]}, "position_ids must start at 0"),
    ],
)
def test_collate_refuses(changes, message):
    collate([sample()])
    with pytest.raises(ValueError, match=message):
        collate([sample(), sample(**changes)])
    with pytest.raises(ValueError, match="at least one window"):
        collate([])


def test_store_shorter_than_a_window(store):
    assert len(Windows(store, store.num_tokens - 1, seed=0)) == 1
    with pytest.raises(ValueError, match=r"less than one window of [\d,]+ \+ 1; choose a shorter seq_len"):
        Windows(store, store.num_tokens, seed=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        Windows(store, 0, seed=0)


@pytest.mark.slow
def test_three_million_tokens_a_second(tmp_path, configure, plain):
    from triadic.data import prepare

    (tmp_path / "text.jsonl").write_text("".join(f'{{"body": "{"word " * 900}"}}\n' for _ in range(600)))
    config = configure(tmp_path / "out", files=[str(tmp_path / "text.jsonl")], id_column=None)
    windows = Windows(open_store(prepare(config) / "train"), 4096, seed=0)
    started, tokens = time.perf_counter(), 0
    while time.perf_counter() - started < 2:
        tokens += collate([windows[tokens // 4096 + i] for i in range(4)])["input_ids"].numel()
    assert tokens / (time.perf_counter() - started) > 3e6
