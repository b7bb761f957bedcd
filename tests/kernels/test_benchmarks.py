"""The benchmark programs where they cannot run, and how they time, on a GPU made of a clock."""

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

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


@pytest.fixture
def gpu(monkeypatch):
    """(bench, a GPU of 2 GHz that says when it stands at what): `ms` of its time and `trace` of what it was given."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    bench = importlib.import_module("bench")
    gpu = types.SimpleNamespace(ms=0.0, trace=[])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = gpu.ms

        def elapsed_time(self, other):
            return other.ms - self.ms

    def spend(name, ms):
        gpu.ms += ms
        gpu.trace.append(name)

    gpu.spend = spend
    flush = types.SimpleNamespace(zero_=lambda: spend("flush", 0.1))
    monkeypatch.setattr(torch, "empty", lambda size, **options: flush)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: gpu.trace.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: spend("spin", cycles / 2e6))
    monkeypatch.setattr(bench.time, "sleep", lambda seconds: spend(f"rest {seconds}", 1e3 * seconds))
    return bench, gpu


@pytest.mark.parametrize("rest", [0, 0.05])
def test_time_is_the_median_of_the_calls_alone(gpu, rest):
    bench, gpu = gpu
    lengths = iter([50.0, 50.0, 3.0, 9.0, 1.0, 2.0, 30.0])  # ms of the calls; the first two warm up
    ms, mhz = bench.timed(lambda: gpu.spend("call", next(lengths)), 5, rest)
    assert ms == pytest.approx(3.0)
    assert mhz == 2000
    once = [*(["wait", f"rest {rest}"] if rest else []), "flush", "spin", "call", "spin"]
    assert gpu.trace == ["call", "call", "wait", *once * 5, "wait"]
