"""The benchmark programs where they cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.mark.parametrize("program", ["bench.py", "decode.py"])
def test_without_a_gpu_they_say_so(program, tmp_path):
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, FOLDER / program, "--out", tmp_path / "out.json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this benchmark times kernels on a CUDA device")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()
