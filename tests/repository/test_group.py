"""triadic.group: programs leave their process group; one that fails ends at once, whatever the others wait for."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triadic.evaluation
import triadic.training
import triadic.training.speed
from triadic import group

ROOT = Path(__file__).resolve().parents[2]
FAILING = """
import runpy, sys, time
import torch, torch.distributed as dist

with runpy.run_path(sys.argv[3])["leaving_group"]():
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    if rank == 0:
        print("ready", flush=True)
        time.sleep(600)
    sent = dist.all_reduce(torch.ones(1), async_op=True)  # which the other never enters
    sys.exit("error: no such folder")
"""


def test_a_process_that_fails_does_not_wait_for_the_others(tmp_path):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    arguments = [tmp_path / "store", group.__file__]
    waiting, fails = (
        subprocess.Popen([sys.executable, "-c", FAILING, str(rank), *arguments], **options) for rank in range(2)
    )
    try:
        assert waiting.stdout.readline() == "ready\n"
        _, told = fails.communicate(timeout=60)
        assert waiting.poll() is None
    finally:
        for process in (waiting, fails):
            process.kill()
            process.communicate()
    assert (fails.returncode, told.splitlines()[-1]) == (1, "error: no such folder")


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (SystemExit("error: no such folder"), 1, "error: no such folder"),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
        (RuntimeError("out of memory"), 1, "RuntimeError: out of memory"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    ],
)
def test_it_says_what_python_would(error, code, last, one_process, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with group.leaving_group():
        raise error
    told = capsys.readouterr().err.splitlines()
    assert ended == [code]
    assert (told[-1] if told else "") == last
    assert (told[:1] == ["Traceback (most recent call last):"]) == (not isinstance(error, SystemExit))


def test_an_error_is_told_by_the_hook_that_names_the_rank(one_process, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print(f"[rank0]: {error}", file=sys.stderr))
    with group.leaving_group():
        raise RuntimeError("out of memory")
    assert capsys.readouterr().err == "[rank0]: out of memory\n"


def test_it_ends_although_nobody_reads_what_it_says(one_process, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(BrokenPipeError), group.leaving_group():  # there would be nobody to raise it to
        raise SystemExit("error: no such folder")
    assert ended == [1]


SCRIPTS = {  # name -> (module and function that do the work, what it returns, arguments)
    "pretrain.py": (triadic.training, "train", None, ["--config", "configs/train/demo.yaml"]),
    "evaluate.py": (triadic.evaluation, "evaluate", {"checks": []}, ["model", "--output", "out"]),
    "benchmark_training.py": (triadic.training.speed, "run", None, ["model.json", "--out", "out/x.json"]),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_leave_their_process_group(script, monkeypatch, tmp_path):
    module, function, result, arguments = SCRIPTS[script]
    inside = []

    def work(*_, **__):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        inside.append(torch.distributed.is_initialized())
        return result

    monkeypatch.setattr(module, function, work)
    monkeypatch.setenv("RANK", "1")  # which prints no report
    arguments = [str(ROOT / a) if a.startswith("configs/") else a for a in arguments]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert inside == [True]
    assert not torch.distributed.is_initialized()


def test_without_a_group_errors_are_pythons(monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("the process was ended"))
    with pytest.raises(RuntimeError, match="no group"), group.leaving_group():
        raise RuntimeError("no group")


ENDING = """
import atexit, runpy, sys, threading, time

class Late:
    def __del__(self):
        print("torn down")

late = Late()
end = runpy.run_path(sys.argv[1])["end"]  # imports for a while, so before the thread begins
atexit.register(print, "hook")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
end(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("processes", "code", "torn_down"), [(1, 0, True), (1, 3, True), (2, 0, False), (2, 3, False)])
def test_a_program_ends_after_its_threads_and_hooks(processes, code, torn_down):
    """One of several processes without what comes behind them."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, group.__file__, str(code)],
        env=os.environ | {"WORLD_SIZE": str(processes)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == ["thread", "hook", *["torn down"] * torn_down]
    assert done.returncode == code, done.stderr
