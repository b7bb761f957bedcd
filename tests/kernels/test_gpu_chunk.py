"""The GPU back ends against the token recurrence in float64: output, final state, every gradient, twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("triton_cases.py")


@pytest.fixture
def measured(judge):
    """measured(argument, ...): runs triton_cases.py on the GPU and judges its rows."""

    def run(*arguments):
        command = [sys.executable, PROGRAM, "--device", "cuda", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        judge([json.loads(line) for line in done.stdout.splitlines()])

    return run


@pytest.mark.parametrize("cases", ["small", "slow", "large"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_triton(cases, dtype, measured):
    measured(cases, "--backend", "triton", "--dtypes", dtype)


def test_gluon_hopper(measured):
    measured("large", "--backend", "gluon_hopper", "--dtypes", "bfloat16", "--only-supported")
