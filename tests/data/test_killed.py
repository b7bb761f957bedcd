"""A preparation that is killed, at any moment, and run again ends with the bytes of one that was left in peace."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from triadic.data import DataConfig, prepare
from triadic.settings import dump, from_dict

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
SOURCES = {
    "txt": dict(kind="txt", shuffle=True, validation={"documents": 8}),
    "jsonl": dict(kind="jsonl", validation={"tokens": 900}, max_tokens=6000),
    "parquet": dict(kind="parquet", validation={"documents": 8}),
    "shuffled": dict(kind="jsonl", shuffle=True, shuffle_buffer=10, validation={"tokens": 900}),
    "reserve": dict(kind="jsonl", reserve={"documents": 12, "min_characters": 100}, validation={"documents": 3}),
}


@pytest.fixture(scope="module")
def killed():
    """killed(config, *how) -> the exit code of a child that prepares `config` and is killed as killed.py says."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("killed.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    ) as server, tempfile.TemporaryDirectory() as folder:  # fmt: skip
        settings = Path(folder) / "settings.yaml"

        def ask(config: DataConfig, *how) -> int:
            dump(config, settings)
            print(json.dumps([str(settings), how]), file=server.stdin, flush=True)
            return int(server.stdout.readline())

        yield ask
        server.stdin.close()


@pytest.mark.parametrize("name", SOURCES)
def test_killed_around_every_rename_in_turn(name, tmp_path, configure, plain, killed):
    """Kills after 0, 1, ... 8 renames in turn on the same output: its states are left and met again."""
    source = SOURCES[name] | {"part_characters": 2000}
    whole = prepare(configure(tmp_path / "whole", **source))
    config = configure(tmp_path / "out", **source)
    kills = 0
    while code := killed(config, "rename", kills % 9, kills % 2 == 0):
        assert code == -signal.SIGKILL
        kills += 1
        assert kills < 100, "no progress"
    assert kills >= 5
    assert plain.files(tmp_path / "out") == plain.files(whole)


def test_killed_at_each_rename_of_a_fresh_output(tmp_path, configure, plain, killed):
    whole = prepare(configure(tmp_path / "whole", **SOURCES["jsonl"]))
    count = 0
    while code := killed(config := configure(tmp_path / f"out{count}", **SOURCES["jsonl"]), "rename", count, False):
        assert code == -signal.SIGKILL
        prepare(config)
        assert plain.files(tmp_path / f"out{count}") == plain.files(whole), f"killed at rename {count}"
        count += 1
    assert count >= 15


def test_killed_at_random_moments(tmp_path, configure, plain, killed):
    started = time.perf_counter()
    whole = prepare(configure(tmp_path / "whole", part_characters=500, validation={"documents": 8}))
    duration = time.perf_counter() - started
    config = configure(tmp_path / "out", part_characters=500, validation={"documents": 8})
    draw = random.Random()
    for _ in range(6):
        killed(config, "seconds", draw.uniform(0.001, duration))
    prepare(config)
    assert plain.files(tmp_path / "out") == plain.files(whole)


def test_command_line_with_workers_killed_then_finished_by_one(tmp_path, configure, plain):
    """The whole process tree: the workers end with their parent, and what they left does no harm."""
    whole = prepare(configure(tmp_path / "whole", part_characters=500))
    config = configure(tmp_path / "out", part_characters=500, workers=2)
    dump(config, tmp_path / "config.yaml")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--config", str(tmp_path / "config.yaml")]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
    while running.poll() is None and not list(tmp_path.glob("out/parts/part-*.json")):
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.wait()
    deadline = time.monotonic() + 30
    while group_members(running.pid):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    prepare(dataclasses.replace(config, workers=1))
    assert plain.files(tmp_path / "out") == plain.files(whole)


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member = path.read_text().rsplit(")", 1)[1].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(member) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_killed_while_training_the_tokenizer(tmp_path, plain, killed):
    for i in range(30):
        (tmp_path / f"{i:02d}.txt").write_text(plain.texts(1, seed=i)[0] * 20)
    tree = {"workers": 1, "part_characters": 3000, "tokenizer": {"train": {"vocab_size": 330}}}
    tree["source"] = {"files": [str(tmp_path / "*.txt")], "shuffle": True, "validation": {"documents": 4}}
    whole = prepare(from_dict(DataConfig, tree | {"output": str(tmp_path / "whole")}))
    config = from_dict(DataConfig, tree | {"output": str(tmp_path / "out")})

    assert killed(config, "tokenizer") == -signal.SIGKILL
    assert killed(config, "rename", 1, False) == -signal.SIGKILL
    prepare(config)
    assert plain.files(tmp_path / "out") == plain.files(whole)
