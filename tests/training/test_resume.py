"""Killed, stopped, resumed: on a CPU the losses are bitwise those of a run that nobody touched."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from triadic.training import train

ROOT = Path(__file__).resolve().parents[2]


def start(settings_file: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / "pretrain.py"), "--config", str(settings_file), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Until log.jsonl has reached `step`."""
    log = folder / "log.jsonl"
    while not (log.exists() and f'{{"step": {step},' in log.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)


def test_killed_twice_stopped_once_and_resumed_is_bitwise_the_same(configure, settings_file, tmp_path, rows):
    overrides = ("run.steps=36", "run.save_every=5", "run.validate_every=7", "data.num_workers=1")
    whole, pieces = tmp_path / "whole", tmp_path / "run"
    train(configure(*overrides, f"run.output_dir={whole}"))

    draw = random.Random(os.getpid())
    reached = 0
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        reached += draw.randint(3, 9)
        process = start(settings_file, *overrides)
        wait_for_step(pieces, reached, process)
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL), output
        assert not (pieces / "final").exists()
    assert "stopped by SIGTERM after step" in output
    assert "Traceback" not in output
    stopped = max(int(path.name.removeprefix("step-")) for path in (pieces / "checkpoints").glob("step-*"))
    assert stopped >= reached
    assert f"saved {pieces}/checkpoints/step-{stopped:08d}" in output

    assert train(configure(*overrides)).finished
    assert rows(pieces) == rows(whole)
    for name in ("final/model.safetensors", "checkpoints/step-00000036/state/optimizer.safetensors"):
        ours, theirs = load_file(pieces / name), load_file(whole / name)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours)


def test_another_micro_batch_and_accumulation_continue_the_same_run(configure, stand_at, templates, rows):
    stand_at(8)
    config = configure("batch.micro_batch_windows=2")
    train(config)
    for ours, theirs in zip(rows(config.run.output_dir), rows(templates[12]), strict=True):
        for key in ("loss", "val_loss", "grad_norm"):
            assert abs(ours.get(key, 0) - theirs.get(key, 0)) < 2e-5, (ours, theirs)


def test_the_seed_alone_makes_the_initial_weights(configure, tmp_path, rows):
    first = {}
    for seed in (0, 1):
        folder = tmp_path / f"seed{seed}"
        train(configure("run.steps=1", "schedule.warmup_steps=0", f"run.seed={seed}", f"run.output_dir={folder}"))
        first[seed] = rows(folder)[0]
    assert first[0] != first[1]
    again = configure("run.steps=1", "schedule.warmup_steps=0")
    train(again)
    assert rows(again.run.output_dir)[0] == first[0]
