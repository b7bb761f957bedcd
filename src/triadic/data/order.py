"""Seeded permutations that no library release can change, so that a resumed run reads what it would have read."""

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_STEP = 0x9E3779B97F4A7C15  # splitmix64's increment
_MASK = (1 << 64) - 1
_BLOCK = 4096  # words drawn at a time
_END = object()


def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) that depends on `key` alone: the order that sorts n random words.

    The words are distinct, so no tie has to be broken. Returns int64 [n].
    """
    return np.argsort(words(n, *key), kind="stable")


def words(n: int, *key: int) -> np.ndarray:
    """The first n outputs of splitmix64 (Steele, Lea and Flood 2014), seeded by `key`: uint64 [n], all different."""
    seed = 0
    for word in key:
        seed = int(_mix(np.array([(seed + word + _STEP) & _MASK], dtype=np.uint64))[0])
    counter = np.arange(1, n + 1, dtype=np.uint64)
    counter *= np.uint64(_STEP)
    counter += np.uint64(seed)
    return _mix(counter)


def shuffled(rows: Iterable[T], buffer_size: int, seed: int) -> Iterator[T]:
    """The rows in a random order, each drawn from the `buffer_size` that are next (all, if there are no more)."""
    rows = iter(rows)
    buffer = list(itertools.islice(rows, buffer_size))
    for block in itertools.count():
        for word in words(_BLOCK, seed, block).tolist():
            row = next(rows, _END)
            if row is _END:
                yield from (buffer[i] for i in permutation(len(buffer), seed))
                return
            place = word % buffer_size
            yield buffer[place]
            buffer[place] = row


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function, a bijection on uint64; changes `x` in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
