"""The order's definition does not change: fixed values, and the same in plain Python."""

import numpy as np
import pytest

from triadic.data.order import permutation, shuffled, words


@pytest.mark.parametrize("key", [(0,), (0, 0), (1, 2, 3), (2**63 + 5, 17)])
@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_equals_the_plain_definition(n, key, plain):
    assert permutation(n, *key).tolist() == plain.permutation(n, *key)


def test_first_outputs_are_those_of_splitmix64():
    """The published outputs of splitmix64 for the seed 1234567."""
    from triadic.data.order import _STEP, _mix

    counter = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(_STEP)
    assert _mix(counter).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("count", "buffer"), [(0, 3), (2, 3), (3, 3), (10, 1), (10, 4), (9000, 500)])
def test_shuffle_buffer(count, buffer, plain):
    """Every row once, none before it can be in the buffer, and the same as drawn in plain Python."""
    rows = list(shuffled(range(count), buffer, seed=7))
    assert sorted(rows) == list(range(count))
    assert all(row < place + buffer for place, row in enumerate(rows))
    held, expected = list(range(min(buffer, count))), []
    for row in range(buffer, count):
        block, place = divmod(row - buffer, 4096)
        draw = int(words(place + 1, 7, block)[place]) % buffer
        expected.append(held[draw])
        held[draw] = row
    assert rows == expected + [held[i] for i in plain.permutation(len(held), 7)]


def test_places_are_spread_evenly():
    """Every element at every place about equally often, over 4,000 keys (chi-square, 49 degrees of freedom)."""
    counts = np.zeros((8, 8))
    for key in range(4000):
        counts[np.arange(8), permutation(8, 11, key)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 100
