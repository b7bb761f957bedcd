"""Several processes: the same training, or a refusal; never two trainings by accident."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from triadic.training import train
from triadic.training.parallel import StopSignals, check_launch, on_main, start

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "found", "asked"),
    [
        ({}, (1, "single"), (None, None)),
        ({}, (1, "single"), (1, "single")),
        (TORCHRUN, (2, "ddp"), (None, None)),
        (TORCHRUN, (2, "ddp"), (2, "ddp")),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, (1, "single"), (None, None)),
        ({"ACCELERATE_USE_DEEPSPEED": "false"}, (1, "single"), (None, None)),
        (TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"}, (2, "zero3"), (2, "zero3")),
        (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, (2, "fsdp2"), (None, "fsdp2")),
    ],
)
def test_sound_launches_pass(environment, found, asked):
    check_launch(environment, *found, *asked)


@pytest.mark.parametrize(
    ("environment", "found", "asked", "message"),
    [
        (TORCHRUN, (1, "single"), (None, None), "the launcher started 2 processes but this one stands alone"),
        (TORCHRUN, (2, "single"), (None, None), "the launcher started 2 processes but this one stands alone"),
        ({"MASTER_ADDR": "127.0.0.1"}, (1, "single"), (None, None), "asked for several processes and started one"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            (2, "ddp"),
            (None, None),
            "remove ACCELERATE_USE_CPU, which turns Deep",
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, (2, "ddp"), (None, None), "was asked for FSDP and this process runs the"),
        ({}, (8, "fsdp1"), (None, None), "the engine fsdp1 is not supported, only single, ddp, fsdp2, zero1, zero2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, (8, "zero0"), (None, None), "the engine zero0 is not supported, only"),
        ({}, (8, "zero2"), (None, "zero3"), "parallel.engine asks for zero3 but the launcher started zero2"),
        ({}, (1, "single"), (8, None), "parallel.processes asks for 8 but the launcher started 1; change either"),
        (TORCHRUN, (2, "ddp"), (None, "single"), "parallel.engine asks for single but the launcher started ddp"),
    ],
)
def test_launches_that_would_train_something_else_are_refused(environment, found, asked, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_launch(environment, *found, *asked)


def launch(settings_file: Path, launcher: list[str], environment: dict[str, str], *overrides: str, processes: int = 2):
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(ROOT / "scripts" / "pretrain.py"), "--config", str(settings_file), *overrides]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def test_two_processes_train_as_one_and_take_over_its_run(configure, settings_file, rows):
    """One process does the first two of twelve steps, two do the rest; another run has one process throughout."""
    uneven = ("data.mask_boundary_targets=true", "batch.micro_batch_windows=2", "schedule.decay_steps=12")
    shared = configure(*uneven, "run.steps=2")
    train(shared)
    alone = configure(*uneven, f"run.output_dir={shared.run.output_dir}-alone")
    train(alone)
    result = launch(settings_file, ["--multi_gpu"], {"ACCELERATE_USE_CPU": "true"}, *uneven, "parallel.processes=2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 processes x 2 micro-batches x 2" in result.stdout
    assert "Warning" not in result.stderr
    assert result.stdout.count("resuming from") == result.stdout.count("step 12/12 | validation loss") == 1
    ours = [row for row in rows(shared.run.output_dir) if (row["step"], "val_loss" in row) != (2, True)]
    assert len(ours) == 12 + 3
    equal_steps(ours, rows(alone.run.output_dir))


def equal_steps(ours, theirs):
    """Rows of two log.jsonl agree: the same steps, windows and, to rounding, losses and gradient norms."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(abs(mine[key] - other[key]) < 1e-5 * max(1, abs(other[key])) for key in mine), (mine, other)


def test_two_processes_share_windows_and_take_over_a_run(configure, settings_file, stand_at, templates, rows):
    """Each reads half of every window's tokens, from step 8 on; a run of one process has been there to the end."""
    stand_at(8)
    result = launch(settings_file, ["--multi_gpu"], {"ACCELERATE_USE_CPU": "true"}, "parallel.context=2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 processes x 2 micro-batches x 4 / 2 that share each window" in result.stdout
    assert "resuming from" in result.stdout
    equal_steps(rows(configure().run.output_dir), rows(templates[12]))


@pytest.mark.slow
def test_two_pairs_of_processes_share_windows(configure, settings_file, world, tmp_path, rows):
    """A hybrid with one key/value head: data parallelism over two pairs, context parallelism within each; then all
    four go on as they would without."""
    settings = (f"model.config={world / 'hybrid.json'}", "batch.micro_batch_windows=1", "schedule.decay_steps=12")
    train(configure(*settings, f"run.output_dir={tmp_path / 'alone'}"))
    for more in (("run.steps=6", "parallel.context=2"), ("run.steps=12",)):
        result = launch(
            settings_file, ["--multi_gpu"], {"ACCELERATE_USE_CPU": "true"}, *settings, *more, processes=4
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
    ours = [row for row in rows(configure().run.output_dir) if (row["step"], "val_loss" in row) != (6, True)]
    equal_steps(ours, rows(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.context=3"], "data.seq_len (32) must be a multiple of parallel.context (3)"),
        (["parallel.context=2"], "parallel.context (2) must divide the 1 processes"),
    ],
)
def test_windows_that_cannot_be_shared_are_refused(configure, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train(configure(*overrides))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_resume_their_run(configure, settings_file, rows):
    settings = ("batch.micro_batch_windows=2", "schedule.decay_steps=12")
    alone = configure(*settings, f"run.output_dir={configure().run.output_dir}-alone")
    train(alone)
    for steps in (6, 12):
        result = launch(settings_file, ["--multi_gpu"], {"ACCELERATE_USE_CPU": "true"}, *settings, f"run.steps={steps}")
        assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("resuming from") == 1
    ours, theirs = ({row["step"]: row["loss"] for row in rows(f) if "loss" in row} for f in (
        configure().run.output_dir, alone.run.output_dir
    ))  # fmt: skip
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[step] - theirs[step]) < 1e-5 * theirs[step] for step in ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        (["--cpu"], {}, "asked for several processes and started one"),
        (["--multi_gpu"], {}, "stands alone, so each would train by itself"),
    ],
)
def test_accelerates_silent_traps_are_caught(settings_file, tmp_path, launcher, environment, message):
    result = launch(settings_file, launcher, environment)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["run.stepps=3"], ["parallel.processes=8"], ["model.config=missing.json"]])
def test_two_processes_refuse_bad_input_once(settings_file, tmp_path, overrides):
    result = launch(settings_file, ["--multi_gpu"], {"ACCELERATE_USE_CPU": "true"}, *overrides)
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1, result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_disk_that_takes_no_more_ends_every_rank_with_one_sentence(launched, tmp_path):
    settings = ("batch.micro_batch_windows=2", "run.save_every=4", "schedule.decay_steps=12")
    launched("ddp", *settings, "run.steps=4")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, limits[1]))  # the moments take 300 KiB
    try:
        output = launched("ddp", *settings, fails=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert output.count("error: could not save") == 1, output
    assert "File too large" in output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_two_machines_of_one_process(engine, settings_file, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"HEAD": "127.0.0.1", "PORT": port, "NODES": "2", "GPUS": "1", "ENGINE": engine, "PATH": path}
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables |= {} if engine == "zero2" else {"ACCELERATE_USE_CPU": "true"}
    command = [ROOT / "recipes" / "multi_node" / "torchrun.sh", "--config", settings_file, "run.steps=4"]
    machines = [
        subprocess.Popen(command, cwd=ROOT, env=os.environ | variables | {"NODE": node}, stdout=subprocess.PIPE)
        for node in ("0", "1")
    ]
    outputs = [machine.communicate(timeout=300)[0].decode() for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0]
    assert f"{engine}, 2 x cpu" in outputs[0]
    assert (tmp_path / "run" / "final").exists()


def test_an_error_on_the_main_rank_reaches_the_caller(configure):
    accelerator = start(configure())

    def fail(what):
        raise ValueError(what)

    assert on_main(accelerator, max, 3, 5) == 5
    with pytest.raises(ValueError, match="no room"):
        on_main(accelerator, fail, "no room")


def test_one_signal_asks_repeats_are_ignored_and_ctrl_c_again_ends(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received is None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert signals.received == signal.SIGINT
        monkeypatch.setattr(StopSignals, "PATIENCE", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
