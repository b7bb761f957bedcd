"""Run a recipe's script with `python` and `accelerate` replaced by programs that only note how they were called."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/sh
test "$1" = -c && echo 0 && exit
for word in {name} "$@"; do printf '%s\\n' "$word"; done >> "$CALLS"
echo >> "$CALLS"
"""


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def calls(tmp_path_factory):
    """script -> the commands it runs, each a list of words."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("python", "accelerate"):
        (folder / name).write_text(STUB.format(name=name))
        (folder / name).chmod(0o755)

    def dry_run(script):
        log = folder / "calls"
        log.write_text("")
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(log)}
        done = subprocess.run(["sh", str(script)], cwd="/", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.quote(str(script))}: {done.stderr}"
        return [block.split("\n") for block in log.read_text().strip().split("\n\n")]

    return dry_run
