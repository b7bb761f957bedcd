"""The plain Triton back end, run by Triton's interpreter, against the token recurrence in float64: output, final
state, every gradient. Not bfloat16, whose arithmetic is wrong in the interpreter: that runs on the GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

PROGRAM = Path(__file__).with_name("triton_cases.py")


def interpret(*arguments):
    env = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, PROGRAM, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_small_problems(dtype, judge):
    judge(interpret("small", "--dtypes", dtype))


@pytest.mark.slow
def test_large_heads_and_many_slices(judge):
    judge(interpret("slow"))
