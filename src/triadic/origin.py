"""Where a result comes from: commit, date, machine, versions, as every result file has them."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "triadic",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "tokenizers",
    "datasets",
    "lm-eval",
    "wonderwords",
)


def origin(command: str) -> dict[str, Any]:
    """Commit, date, machine and command of a measurement."""
    gpu = torch.cuda.is_available()
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gpu_count": torch.cuda.device_count() if gpu else 0,
        "command": command,
    }


def versions() -> dict[str, str]:
    """Python's and each relevant package's version, of those installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The git commit of this source tree, with "-dirty" if files differ; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
