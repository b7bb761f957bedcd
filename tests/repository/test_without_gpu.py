"""What the speed benchmarks say without a GPU: one sentence for large models, whose advice works; small ones run."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triadic.evaluation import speed as decoding
from triadic.evaluation import suite_speed
from triadic.training import speed as training

ROOT = Path(__file__).resolve().parents[2]
LARGE = "configs/model/triadic_gdn_1.3b_e8.json"
SCRIPTS = {  # name -> (arguments that name a large model, the small trial)
    "benchmark_training.py": ([LARGE, "--out"], training.TRIAL),
    "benchmark_decoding.py": ([LARGE, "--device", "cpu", "--out"], decoding.TRIAL),
    "benchmark_evaluation.py": (["--output"], suite_speed.TRIAL),
}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(ROOT)


def call(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    try:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise


@pytest.mark.parametrize("script", SCRIPTS)
def test_large_models_are_refused(script, monkeypatch, tmp_path):
    arguments, trial = SCRIPTS[script]
    with pytest.raises(SystemExit) as refusal:
        call(script, monkeypatch, *arguments, tmp_path / "out.json")
    assert refusal.value.code.startswith("error: ")
    assert "1.4B parameters: it is timed on a CUDA device, and torch sees none here" in refusal.value.code
    assert refusal.value.code.endswith(f"try a small model on the CPU: {trial}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    ["benchmark_training.py", "benchmark_decoding.py", pytest.param("benchmark_evaluation.py", marks=pytest.mark.slow)],
)
def test_the_small_trial_runs(script, monkeypatch, tmp_path):
    arguments, trial = SCRIPTS[script]
    call(script, monkeypatch, *trial.split(), arguments[-1], tmp_path / "out")
    found = tmp_path / "out"
    rows = json.loads((found / "speed.json" if found.is_dir() else found).read_text())["rows"]
    assert rows
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("script", "variable"),
    [("bench_train.sh", "MODELS_4K"), ("bench_train_2gpu.sh", "CONTEXT_ARGS"), ("bench_train_gpus.sh", "MODELS")],
)
def test_shell_scripts_say_so_too(script, variable, tmp_path):
    """With a python3 that can do no more than look for GPUs, and finds none."""
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available, device_count = bool, int\n")
    look = f'test "$1" = -c && PYTHONPATH={tmp_path} exec {sys.executable} "$@"'
    (tmp_path / "python3").write_text(f"#!/bin/sh\n{look}\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}

    def told(**more):
        done = subprocess.run([ROOT / "scripts" / script], env=env | more, capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr

    assert told().startswith("error: ")
    assert told().count("\n") == 1
    assert f"{variable}=" in told()
    assert not (tmp_path / "out").exists()
    assert told(**{variable: "x"}) == ""


TWO_TESTS = """
import pytest

@pytest.mark.gpu
def test_gpu():
    raise NotImplementedError

def test_cpu():
    pass
"""


@pytest.mark.parametrize(
    ("chosen", "code", "said", "last"),
    [
        (["-m", "gpu"], 4, "ERROR: each of the 1 tests chosen needs a CUDA device, and torch sees none here", ""),
        (
            [],
            1,
            "needs a CUDA device, and torch sees none here; leave such tests out with -m 'not gpu'",
            "1 passed, 1 error",
        ),
    ],
)
def test_tests_that_need_one_say_so(chosen, code, said, last, tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, tmp_path]
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    told = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert done.returncode == code, told
    assert any(line.startswith(said) for line in told), told
    assert not any("NotImplementedError" in line or "Traceback" in line for line in told), told
    if last:
        assert told[-1].startswith(last)


@pytest.mark.parametrize("script", SCRIPTS)
def test_outputs_that_cannot_be_written_are_refused_before_anything_is_measured(script, monkeypatch, tmp_path):
    arguments, trial = SCRIPTS[script]
    out = tmp_path
    if script == "benchmark_evaluation.py":
        out = tmp_path / "file"
        out.touch()
    with pytest.raises(SystemExit, match=f"^error: .*{out.name}"):
        call(script, monkeypatch, *trial.split(), arguments[-1], out)
