"""Chunk tables against a plain enumeration."""

import json
import os
import subprocess
import sys

import torch
from triadic_kernels import chunks, launch

CPU = torch.device("cpu")
INTERPRETED = """
import json, sys, torch
from triadic_kernels import chunks
chunks.BLOCK = 16  # so that few documents and chunks fill several
packed, batches, wrong = json.load(sys.stdin)
for bounds, dtype, shift in packed:
    cu_seqlens = torch.tensor([0] * shift + bounds, dtype=getattr(torch, dtype))[shift:]
    print(json.dumps([x.tolist() for x in chunks.tables(1, bounds[-1], cu_seqlens, cu_seqlens.device)]))
for B, T in batches:
    print(json.dumps([x.tolist() for x in chunks.tables(B, T, None, torch.device("cpu"))]))
for bounds in wrong:
    N, made = len(bounds) - 1, [torch.full((999,), -7, dtype=torch.int32) for _ in range(3)]
    constants = dict(VARLEN=True, C=64, BLOCK=16)
    chunks.tables_kernel[(N, 1, 1)](torch.tensor(bounds), *made, 200, N, 200 // 64 + N, **constants)
    print(json.dumps([x.tolist() for x in made]))
"""
LENGTHS = [[1], [64], [65, 1], [1, 70, 2, 0, 64], [0, 0, 130, 0], [3] * 100, [0], [70, 1100, 5], [2] * 40 + [200]]
WRONG = [[0, 500, 100, 200], [0, 9000], [200, 150, 0]]  # for 200 tokens, as they may come where nothing checks them
BATCHES = [(1, 1), (3, 64), (2, 130), (20, 70), (2, 1100)]


def enumerated(lengths, rows):
    """(chunks, sequences, order) of documents of these lengths, the first filled up to `rows`."""
    table, sequences, start = [], [], 0
    for n, length in enumerate(lengths):
        mine = [[n, start + i, min(64, length - i)] for i in range(0, length, 64)]
        sequences.append([len(table), len(mine)])
        table, start = table + mine, start + length
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    return table + [None] * (rows - len(table)), sequences, order


def assert_right(found, lengths):
    table, sequences, order = found
    wanted = enumerated(lengths, len(table))
    assert [row if row[2] else None for row in table] == wanted[0], "rows beyond the last chunk are empty"
    assert [sequences, order] == list(wanted[1:])


def test_an_enumeration():
    """By Triton's interpreter: bounds in int32 and int64, off 16-byte alignment, and wrong ones; batches."""
    bounds = [torch.tensor([0, *lengths]).cumsum(0).tolist() for lengths in LENGTHS]
    cases = [(x, ("int32", "int64")[i % 2], i % 3) for i, x in enumerate(bounds)]
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], input=json.dumps([cases, BATCHES, WRONG]),
        env=dict(os.environ, TRITON_INTERPRET="1"), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for tables, lengths in zip(found[: len(LENGTHS)], LENGTHS, strict=True):
        assert len(tables[0]) == chunks.count(1, sum(lengths), len(lengths), True) == sum(lengths) // 64 + len(lengths)
        assert_right(tables, lengths)
    for tables, (B, T) in zip(found[len(LENGTHS) : -len(WRONG)], BATCHES, strict=True):
        assert len(tables[0]) == chunks.count(B, T, B, False)
        assert all(row[2] for row in tables[0]), "exact: no empty rows"
        assert_right(tables, [T] * B)
    for tables, bounds in zip(found[-len(WRONG) :], WRONG, strict=True):
        N = len(bounds) - 1
        for table, size in zip(tables, (3 * (200 // 64 + N), 2 * N, N), strict=True):
            assert set(table[size:]) == {-7}, "nothing is written beyond the tables"


def test_packed_tables_belong_to_one_call(monkeypatch):
    """Nothing tells that a tensor was written to by a compiled graph: the same object, address and version."""
    given = []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, grid, cu, *rest: given.append((cu.tolist(), rest)))
    cu_seqlens = torch.tensor([0, 20, 130])
    first = chunks.tables(1, 130, cu_seqlens, CPU)
    cu_seqlens.numpy()[1] = 100
    assert cu_seqlens._version == 0
    second = chunks.tables(1, 130, cu_seqlens, CPU)
    assert [cu for cu, _ in given] == [[0, 20, 130], [0, 100, 130]]
    for made, (_, (*filled, T, N, NC)) in zip((first, second), given, strict=True):
        assert all(x is y for x, y in zip(made, filled, strict=True))
        assert [x.shape for x in made] == [(NC, 3), (N, 2), (N,)]
        assert (T, N, NC) == (130, 2, 130 // 64 + 2)
    assert not {x.data_ptr() for x in first} & {x.data_ptr() for x in second}
