"""A list of problems in which every pair of values of FACTORS occurs, and every launch configuration of the kernels:

    python tests/kernels/pairwise.py > tests/kernels/pairwise.json

The committed list is what `triton_cases.py pairwise` runs. All combinations together would be 57,344 problems.
"""

import itertools
import json
from collections import Counter

FACTORS = {
    "E": (1, 2, 3, 4, 8, 12, 16),
    "KV": ((64, 64), (64, 128), (128, 64), (128, 128)),
    "T": (1, 63, 64, 65, 127, 1000, 4096, 65537),
    "packed": (False, True),
    "decay": ("none", "weak", "mixed", "strong"),  # log decay of a token: 0, to -0.02, from -1e-4 to -50, to -50
    "delta": (True, False),
    "gate": ("slice", "head"),
    "groups": (1, 2),  # HV / H
    "h0": (False, True),
    "dht": (False, True),
}
HOPPER = FACTORS | {"E": (1, 2, 4, 8, 16), "KV": ((128, 128),)}  # what the Gluon kernels take
HEAD_DIMS = (16, 32, 64, 128, 256)  # of the plain Triton kernels


def pairwise(factors: dict) -> list[dict]:
    """Few choices of a value for each factor, so that any two values of two factors occur together.

    Each choice begins with the first pair that is still missing, and takes for one factor after another, those of many
    values first, the value that brings most missing pairs (of equals the one used least so far, then the first).
    """
    order = sorted(factors, key=lambda name: -len(factors[name]))
    items = {name: [(name, value) for value in factors[name]] for name in order}
    missing = dict.fromkeys(
        pair for a, b in itertools.combinations(order, 2) for pair in itertools.product(items[a], items[b])
    )
    position, used, rows = {name: i for i, name in enumerate(order)}, Counter(), []

    def pairs(item, others):
        return [tuple(sorted((item, other), key=lambda x: position[x[0]])) for other in others]

    while missing:
        row = list(next(iter(missing)))
        for name in order:
            if name not in dict(row):
                row.append(max(items[name], key=lambda x: (sum(p in missing for p in pairs(x, row)), -used[x])))
        for pair in itertools.combinations(sorted(row, key=lambda x: position[x[0]]), 2):
            missing.pop(pair, None)
        used.update(row)
        chosen = dict(row)
        rows.append({name: chosen[name] for name in factors})
    return rows


def documents(T: int) -> list[int]:
    """Lengths of packed documents, T tokens together: some of 1, 2 and no tokens where there is room."""
    return [T // 3, 1, 2, 0, T - T // 3 - 3] if T > 3 else [0, T]


def case(E, KV, T, packed, groups, **others) -> dict:
    """A choice as a problem of triton_cases.py."""
    H = 2 if T < 1000 else 1
    size = dict(lens=documents(T)) if packed else dict(T=T)
    return dict(**size, H=H, HV=groups * H, K=KV[0], V=KV[1], E=E, **others)


def cases() -> list[dict]:
    """Pairs of FACTORS, pairs of HOPPER, and the head dims that are not among them, at a few E each."""
    choices = pairwise(FACTORS)
    choices += [choice for choice in pairwise(HOPPER) if choice not in choices]
    rest = [KV for KV in itertools.product(HEAD_DIMS, HEAD_DIMS) if KV not in FACTORS["KV"]]
    for i, KV in enumerate(rest):
        few = dict(T=130, packed=i % 4 > 1, decay="mixed", delta=i % 2 == 0, gate="slice", groups=1, h0=True, dht=True)
        choices.append(dict(E=(8, 3, 16)[i % 3], KV=KV, **few))
    return [case(**choice) for choice in choices]


if __name__ == "__main__":
    print("[\n " + ",\n ".join(map(json.dumps, cases())) + "\n]")
