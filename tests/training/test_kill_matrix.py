"""Killed twenty times, at any moment and in the middle of saves, under one engine or several: the same training."""

import contextlib
import json
import random
import time
from pathlib import Path

import psutil
import pytest

from triadic.training import checkpoint

STEPS = 200
SETTINGS = (f"run.steps={STEPS}", "batch.micro_batch_windows=2", "run.save_every=5", "run.validate_every=50")
ONE_SIZE = [("zero2", 2, 20)]  # engine, processes, kills
CHANGING = [("zero2", 2, 7), ("single", 1, 6), ("fsdp2", 2, 7)]


def newest(run: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")), default=0)


def logged(run: Path) -> int:
    """The last step in the log, 0 before the first."""
    log = run / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_until(condition, process, seconds=240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended by itself with {process.returncode}"
        assert time.monotonic() < end, "no progress"
        time.sleep(0.002)


def kill(process, began: float, run: Path, draw: random.Random) -> str:
    """SIGKILL at a moment that `draw` chooses: to everything, or to one process of several. Says what it hit."""
    kind = draw.choice(["any", "any", "any", "save", "save", "save", "one", "one", "start"])
    if kind == "start":
        time.sleep(5 + 5 * draw.random())
    else:
        goal = newest(run) + draw.randint(1, 12)
        wait_until(lambda: (run / "log.jsonl").exists() and (run / "log.jsonl").stat().st_mtime > began, process)
        wait_until(lambda: logged(run) >= goal, process)
    if kind == "save":
        wait_until(lambda: list((run / "checkpoints").glob(".writing-*")), process)
    elif kind == "any":
        time.sleep(draw.random() * 0.2)
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if "--config" in child.cmdline()]
    if kind == "one" and workers:
        draw.choice(workers).kill()  # the launcher ends the others
    else:
        for victim in (process, *workers):  # the launcher first: it must not see a worker end
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    process.wait(timeout=120)
    wait_until_gone(workers)
    saving = list((run / "checkpoints").glob(".writing-*"))
    return f"{kind} at step {logged(run)}, newest checkpoint {newest(run)}{', a save was cut' if saving else ''}"


def wait_until_gone(workers) -> None:
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def stream(run: Path) -> dict[tuple[int, int], list[str]]:
    """(step, ranks) -> the windows of that step, in whatever order, where all ranks have noted theirs."""
    found: dict[tuple[int, int], list] = {}
    for note in (run / "stream").glob("*.*.[12]"):
        step, _, ranks = (int(part) for part in note.name.split("."))
        found.setdefault((step, ranks), []).append(json.loads(note.read_text()))
    complete = {key: notes for key, notes in found.items() if len(notes) == key[1]}
    return {key: sorted(window for note in notes for window in note) for key, notes in complete.items()}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [ONE_SIZE, CHANGING], ids=["one world size", "changing world size"])
def test_twenty_kills_leave_the_same_training(plan, started, tmp_path, rows):
    engine, processes, _ = plan[0]
    whole, run = tmp_path / "whole", tmp_path / "run"
    script = "tests/training/traced.py"
    assert started(engine, processes, script, *SETTINGS, f"run.output_dir={whole}").wait(timeout=1200) == 0
    draw, same_size_until = random.Random(len(plan)), None
    for engine, processes, kills in plan:
        for _ in range(kills):
            process, began = started(engine, processes, script, *SETTINGS, f"parallel.engine={engine}"), time.time()
            print(f"{engine} x {processes}:", kill(process, began, run, draw), flush=True)
            kept, _ = checkpoint.find(run / "checkpoints") if (run / "checkpoints").exists() else (None, {})
            assert newest(run) == 0 or kept is not None
        assert newest(run) < STEPS
        same_size_until = same_size_until or newest(run)
    assert started(engine, processes, script, *SETTINGS).wait(timeout=1200) == 0

    expected = {step: windows for (step, _), windows in stream(whole).items()}
    assert sorted(expected) == list(range(STEPS))
    assert all(windows == expected[step] for (step, _), windows in stream(run).items())
    assert {step for step, _ in stream(run)} == set(range(STEPS))
    ours, theirs = rows(run), rows(whole)
    worst = {
        key: max(abs(mine[key] - other[key]) for mine, other in zip(ours, theirs, strict=True) if key in mine)
        for key in ("loss", "val_loss", "grad_norm")
    }
    print("largest differences:", worst, "of the same size until step", same_size_until)
    same = STEPS if len(plan) == 1 else same_size_until
    assert [row for row in ours if row["step"] <= same] == [row for row in theirs if row["step"] <= same]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert worst["loss"] < 1e-5
    if len(plan) == 1:
        for file in ("final/model.safetensors", f"checkpoints/step-{STEPS:08d}/state/optimizer.safetensors"):
            assert (run / file).read_bytes() == (whole / file).read_bytes()
