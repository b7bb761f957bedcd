"""The benchmark programs where they cannot run, and how they time, on a GPU made of a clock."""

import contextlib
import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from triadic_kernels import dispatch

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
def bench(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("bench")


@pytest.fixture
def gpu(bench, monkeypatch):
    """(bench, a GPU of 2 GHz that says when it stands at what): `ms` of its time and `trace` of what it was given."""
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


@pytest.mark.parametrize(
    ("impl", "error", "recorded"),
    [
        ("fla", RuntimeError("refuses this compiler"), True),
        ("fla", ImportError("no module"), True),
        ("triadic", ValueError("cannot run this call"), True),
        ("triadic", torch.OutOfMemoryError("too large"), True),
        ("triadic", RuntimeError("wrong"), False),
        ("triadic", ImportError("moved"), False),
    ],
)
def test_faults_of_our_own_op_are_no_rows(impl, error, recorded, gpu, monkeypatch):
    bench, _ = gpu

    def fail(*_):
        raise error

    monkeypatch.setattr(bench, "inputs", lambda *_: {})
    monkeypatch.setitem(bench.PASSES, "fwd", fail)
    a = types.SimpleNamespace(H=1, D=16, backend="auto", segment_size=None)
    if recorded:
        assert bench.measure(impl, 1, 8, 2, "fwd", a)["error"] == f"{type(error).__name__}: {error}"
    else:
        with pytest.raises(type(error), match=str(error)):
            bench.measure(impl, 1, 8, 2, "fwd", a)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_row_names_the_back_end_that_ran(compiles, bench, inputs, monkeypatch):
    """Of a call with backend="auto" that first tries one which Triton cannot compile, and its gradients."""
    reference = dispatch.load("reference")

    def forward(*arguments):
        if not compiles:
            raise type("CompilationError", (Exception,), {"__module__": "triton.compiler"})("too many registers")
        return reference.forward(*arguments)

    best = types.SimpleNamespace(
        unsupported=lambda p: None, forward=forward, backward=reference.backward, saved_like=reference.saved_like
    )
    monkeypatch.setitem(dispatch._loaded, dispatch.CHUNK["triton"], best)
    x = {name: y for name, y in inputs(dtype=torch.float32).items() if name != "initial_state"}
    monkeypatch.setattr(bench, "inputs", lambda *_: x)
    for name, figure in {"timed": (1.0, 1980), "peak_gib": 1.0, "host_ms": 1.0}.items():
        monkeypatch.setattr(bench, name, lambda *_, figure=figure: figure)
    a = types.SimpleNamespace(H=2, D=5, backend="auto", segment_size=None, repeats=1, rest=0, profile=False)
    for which in bench.PASSES:
        with (
            contextlib.nullcontext() if compiles or which != "fwd" else pytest.warns(UserWarning, match="triton: does")
        ):
            row = bench.measure("triadic", 1, 10, 3, which, a)
        assert row["backend"] == ("triton" if compiles else "torch")
    monkeypatch.setitem(bench.IMPLEMENTATIONS, "fla", lambda x, backend: x["q"] + x["v"].sum())
    assert bench.measure("fla", 1, 10, 1, "fwd", a)["backend"] is None
