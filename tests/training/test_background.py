"""Saving beside the training, and ranks that stand still."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from triadic.training import checkpoint, loop, train
from triadic.training.background import Watch, Writer, stalled

ALONE = SimpleNamespace(is_main_process=True, num_processes=1)


def test_a_job_runs_beside_and_is_told_of_once(monkeypatch):
    monkeypatch.setattr("triadic.training.background.parallel.on_main", lambda accelerator, function: function())
    writer, go = Writer(ALONE), threading.Event()
    writer.start(lambda: go.wait(10) and "there")
    assert writer.finished() is None
    assert not writer.failed
    go.set()
    assert writer.wait() == "there"
    assert writer.wait() is None
    writer.start(lambda: "again")
    while (said := writer.finished()) is None:
        time.sleep(0.001)
    assert said == "again"
    assert writer.finished() is None

    writer.start(lambda: 1 / 0)
    while not writer.failed:
        time.sleep(0.001)
    assert writer.finished() is None
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    assert not writer.failed
    writer.close()


def test_steps_go_on_while_a_checkpoint_is_written(configure, monkeypatch, capsys):
    """The first save is held back until four more steps are done; the second waits for the first."""
    write, steps, order = checkpoint.write, threading.Semaphore(0), []
    step_of = loop.train_step

    def train_step(run, batches):
        steps.release()
        return step_of(run, batches)

    def slow(checkpoints, snapshot, *rest):
        for _ in range(8 if snapshot.trainer["step"] == 4 else 0):
            assert steps.acquire(timeout=30)
        order.append(snapshot.trainer["step"])
        return write(checkpoints, snapshot, *rest)

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(checkpoint, "write", slow)
    config = configure("run.steps=12", "run.save_every=4")
    assert train(config).finished
    assert order == [4, 8, 12]
    printed = capsys.readouterr().out
    assert printed.index("step  7/12 | 0.00M") < printed.index("saved")
    folder = Path(config.run.output_dir) / "checkpoints"
    assert all(checkpoint.damage(folder / f"step-{step:08d}") is None for step in order)


def test_a_save_that_fails_stops_the_run_at_the_next_step(configure, monkeypatch):
    steps, step_of, failed = [], loop.train_step, threading.Event()

    def train_step(run, batches):
        steps.append(run.progress.step)
        if run.progress.step == 4:
            assert failed.wait(30)
            while not run.writer.failed:
                time.sleep(0.001)
        return step_of(run, batches)

    def full(*arguments):
        failed.set()
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(RuntimeError, match="the disk is full"):
        train(configure())
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("posts", "told", "silent"),
    [
        ([(6, 1, 99.0), (6, 0, 99.0)], "rank 1 (reading data of step 7)", set()),
        ([(6, 1, 99.0), (5, 3, 99.0), (5, 3, 99.0)], "ranks 1 (saving of step 6), 2 (saving of step 6)", set()),
        ([(6, 1, 99.0), (6, 1, 10.0)], "silent rank 1 (computing of step 7)", {1}),
        ([(6, 1, 10.0), (6, 0, 99.0)], "silent rank 0 (computing of step 7)", {0}),
    ],
)
def test_who_keeps_the_others_waiting(posts, told, silent):
    assert stalled(posts, alive_since=50.0) == (told, silent)


def test_one_process_is_not_watched():
    threads = threading.active_count()
    with Watch(SimpleNamespace(process_index=0, num_processes=1), 0.01) as watch:
        watch.at(3, "computing")
        assert threading.active_count() == threads


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_a_rank_that_stands_still_ends_the_run_with_its_name(engine, started, tmp_path, configure):
    settings = ("run.steps=2000", "run.save_every=5", "run.validate_every=3000", "batch.micro_batch_windows=2")
    process = started(engine, 2, "scripts/pretrain.py", *settings, "parallel.stall_seconds=10")
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and '{"step": 12,' in log.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if "--config" in child.cmdline()]
    (last,) = [worker for worker in workers if worker.environ()["RANK"] == "1"]
    os.kill(last.pid, signal.SIGSTOP)
    assert process.wait(timeout=120) != 0
    output = (tmp_path / "output").read_text()
    assert output.count("error: no rank got on for 10 seconds, waiting for silent rank 1 (") == 1, output
    kept, damaged = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert not damaged
    assert json.loads((kept / "done.json").read_text())["step"] >= 10
