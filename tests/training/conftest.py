"""A tiny real world for training: text -> prepared store -> settings; in-process runs start from a clean accelerate."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState

from triadic.data import DataConfig, prepare
from triadic.settings import from_dict
from triadic.training import load_config, train

ROOT = Path(__file__).resolve().parents[2]
# engine -> what accelerate launch needs to start it on a CPU, in its environment and on its command line
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
LAUNCHERS = {
    "single": (ON_CPU, []),
    "ddp": (ON_CPU, ["--multi_gpu"]),
    "fsdp2": (ON_CPU, ["--use_fsdp", "--fsdp_version", "2"]),
    **{f"zero{stage}": ({}, ["--use_deepspeed", "--zero_stage", str(stage)]) for stage in (1, 2, 3)},
}
VOCABULARY = 300
ARCHITECTURE = {
    "architectures": ["TriadicForCausalLM"],
    "model_type": "triadic",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "second_key_dim": 3,
    "output_gate_rank": 8,
    "pad_token_id": 0,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """accelerate keeps the first Accelerator's precision for the process; every test is its own process here."""
    torch.set_num_threads(1)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """A folder with data/ (60 documents of 1 to 300 words, one of them with one Q), gdn.json and hybrid.json."""
    folder = tmp_path_factory.mktemp("world")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 5))) for _ in range(200)]
    (folder / "text").mkdir()
    for i in range(60):
        length = draw.choice([1, 5, 40, 150, 300])
        text = " ".join(draw.choices(words, k=length))
        (folder / "text" / f"{i:02d}.txt").write_text(f"{text} Q {text}" if i == 59 else text)
    source = {"files": [str(folder / "text" / "*.txt")], "validation": {"documents": 12}}
    tree = {"output": str(folder / "data"), "workers": 1, "source": source}
    prepare(from_dict(DataConfig, tree | {"tokenizer": {"train": {"vocab_size": VOCABULARY}}}))
    (folder / "gdn.json").write_text(json.dumps(ARCHITECTURE))
    (folder / "hybrid.json").write_text(json.dumps(ARCHITECTURE | HYBRID))
    return folder


@pytest.fixture
def configure(world, tmp_path):
    """configure("a.b=value", ...) -> TrainConfig of a 12-step run in tmp_path / "run"; its file is run.yaml beside."""

    def make(*overrides: str):
        return load_config(write_settings(world, tmp_path), list(overrides))

    return make


@pytest.fixture(scope="session")
def templates(world, tmp_path_factory) -> dict[int, Path]:
    """Run folders that stand at step 8 and 12 of 12, trained once for the session; `stand_at` copies them."""
    made = {}
    for steps in (8, 12):
        folder = tmp_path_factory.mktemp("template")
        train(load_config(write_settings(world, folder), [f"run.steps={steps}", "schedule.decay_steps=12"]))
        AcceleratorState._reset_state(reset_partial_state=True)
        made[steps] = folder / "run"
    shutil.rmtree(made[8] / "final")  # as if it had been stopped there
    return made


@pytest.fixture
def stand_at(templates, tmp_path):
    """stand_at(8) or stand_at(12) -> the folder of `configure()`'s run, which stands at that step."""

    def copy(step: int) -> Path:
        return Path(shutil.copytree(templates[step], tmp_path / "run"))

    return copy


@pytest.fixture
def settings_file(world, tmp_path) -> Path:
    return write_settings(world, tmp_path)


def write_settings(world: Path, folder: Path) -> Path:
    tree = {
        "model": {"config": str(world / "gdn.json")},
        "data": {
            "train": str(world / "data" / "train"),
            "validation": str(world / "data" / "validation"),
            "seq_len": 32,
            "num_workers": 0,
        },
        "batch": {"global_batch_tokens": 256, "micro_batch_windows": 4},
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 3},
        "run": {
            "output_dir": str(folder / "run"),
            "steps": 12,
            "precision": "fp32",
            "log_every": 1,
            "validate_every": 4,
            "validation_windows": 7,
            "save_every": 4,
            "trackers": [],
        },
    }
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def rows():
    """rows(folder) -> the rows of its log.jsonl without the columns that depend on time."""

    def read(folder) -> list[dict]:
        lines = (Path(folder) / "log.jsonl").read_text().splitlines()
        timed = ("tokens_per_s", "mfu", "peak_gib", "eta_s")
        return [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]

    return read


def launch_command(engine: str, script: str, *arguments: str, processes: int = 2) -> tuple[list[str], dict[str, str]]:
    """The command and environment that start `script` in `processes` processes of `engine` on a CPU."""
    environment, launcher = LAUNCHERS[engine]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return [*command, str(ROOT / script), *arguments], variables


@pytest.fixture
def launched(settings_file):
    """launched(engine, "a.b=value", ...) -> the output of pretrain.py, or another `script`, in two processes."""

    def run(engine: str, *overrides: str, script="scripts/pretrain.py", leading=(), fails=False) -> str:
        command, variables = launch_command(engine, script, *leading, "--config", str(settings_file), *overrides)
        result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
        assert (result.returncode != 0) == fails, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run


@pytest.fixture
def started(settings_file, tmp_path):
    """started(engine, processes, script, "a.b=value", ...) -> a running launcher, alone in its process group; what it
    and its processes print is appended to tmp_path / "output"."""
    running = []

    def start(engine: str, processes: int, script: str, *overrides: str) -> subprocess.Popen:
        command, variables = launch_command(
            engine, script, "--config", str(settings_file), *overrides, processes=processes
        )
        if engine == "single":
            command = [sys.executable, str(ROOT / script), "--config", str(settings_file), *overrides]
        with open(tmp_path / "output", "a") as output:
            options = {"cwd": ROOT, "env": variables, "stdout": output, "stderr": output, "start_new_session": True}
            running.append(subprocess.Popen(command, **options))
        return running[-1]

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
