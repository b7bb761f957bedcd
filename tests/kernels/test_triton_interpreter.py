"""The plain Triton back end, run by Triton's interpreter, against the token recurrence in float64: output, final
state, every gradient. Not bfloat16, whose arithmetic is wrong in the interpreter: that runs on the GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.triton

PROGRAM = Path(__file__).with_name("triton_cases.py")


def interpret(*arguments):
    env = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, PROGRAM, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(rows, tolerance):
    assert rows
    for row in rows:
        assert row["worst"] < tolerance[getattr(torch, row["dtype"])], row
        assert row["absent"], f"a gradient is given for an absent input, or missing for one that is there: {row}"
        assert row["repeatable"], f"two runs differ: {row}"
        assert row["inference"], f"the output changes when nothing is kept for the backward: {row}"
        assert row["isolated"], f"a document changes another one: {row}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_small_problems(dtype, triton_tolerance):
    judge(interpret("small", "--dtypes", dtype), triton_tolerance)


@pytest.mark.slow
def test_large_heads_and_many_slices(triton_tolerance):
    judge(interpret("slow"), triton_tolerance)
