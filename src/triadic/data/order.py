"""Seeded permutations that no library release can change, so that a resumed run reads what it would have read."""

import numpy as np

_STEP = 0x9E3779B97F4A7C15  # splitmix64's increment
_MASK = (1 << 64) - 1


def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) that depends on `key` alone.

    Position i gets the i-th output of splitmix64 (Steele, Lea and Flood 2014) seeded by the key; the outputs are
    distinct, and the order that sorts them is the permutation.

    Returns int64 [n].
    """
    seed = 0
    for word in key:
        seed = int(_mix(np.array([(seed + word + _STEP) & _MASK], dtype=np.uint64))[0])
    counter = np.arange(1, n + 1, dtype=np.uint64)
    counter *= np.uint64(_STEP)
    counter += np.uint64(seed)
    return np.argsort(_mix(counter), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function, a bijection on uint64; changes `x` in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
