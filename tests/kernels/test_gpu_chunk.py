"""The GPU back ends against the token recurrence in float64: output, final state, every gradient, twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("triton_cases.py")


def judge(tolerance, *arguments):
    command = [sys.executable, PROGRAM, "--device", "cuda", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    for row in rows:
        assert row["worst"] < tolerance[getattr(torch, row["dtype"])], row
        assert row["absent"], f"a gradient is given for an absent input, or missing for one that is there: {row}"
        assert row["repeatable"], f"two runs differ: {row}"
        assert row["inference"], f"the output changes when nothing is kept for the backward: {row}"
        assert row["isolated"], f"a document changes another one: {row}"


@pytest.mark.parametrize("cases", ["small", "slow", "large"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_triton(cases, dtype, triton_tolerance):
    judge(triton_tolerance, cases, "--backend", "triton", "--dtypes", dtype)


def test_gluon_hopper(triton_tolerance):
    judge(triton_tolerance, "large", "--backend", "gluon_hopper", "--dtypes", "bfloat16", "--only-supported")
