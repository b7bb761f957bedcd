"""Finished steps of an evaluation on disk, so that a killed one goes on; and one answer for all processes."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Journal:
    """Steps of one evaluation: each is computed once, written whole or not at all, and read back after a kill.

    `identity` says what is being measured (checkpoint, suite, versions). A folder that holds another evaluation is
    refused with a ValueError, unless `overwrite` is set: then its steps are forgotten.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any], overwrite: bool = False):
        self.folder = Path(folder)
        self.identity = json.loads(json.dumps(identity))
        self.overwrite = overwrite
        self.claimed = False  # the folder is made and marked with the first step, so that bad input leaves no trace
        if not overwrite:
            share(_check, self.folder, self.identity)

    def has(self, step: str) -> bool:
        """Whether this step was finished before, and counts."""
        return share(self._path(step).is_file) and (self.claimed or not self.overwrite)

    def _path(self, step: str) -> Path:
        return self.folder / "steps" / (re.sub(r"[^\w.-]+", "-", step) + ".json")

    def once(self, step: str, compute: Callable[[], Any]) -> Any:
        """The JSON value of `compute()`, from disk if this step was finished before.

        In a job of several processes all of them compute, the first one's value counts, and every one returns it.
        """
        if not self.claimed:
            share(_claim, self.folder, self.identity, self.overwrite)
            self.claimed = True
        path = self._path(step)
        if not share(path.is_file):
            value = compute()
            share(write_json, path, value)
        return share(_read, path, "remove it, and it is computed again")


def _check(folder: Path, identity: dict) -> None:
    """Raise ValueError if the folder is another evaluation's."""
    path = folder / "evaluation.json"
    if path.is_file():
        other = _read(path, "choose another --output, or replace it with --overwrite")
        if not isinstance(other, dict):
            raise ValueError(f"{path} is no evaluation's; choose another --output, or replace it with --overwrite")
        differs = [key for key in identity if other.get(key) != identity[key]]
        if differs:
            raise ValueError(
                f"{folder} holds an evaluation with another {' and '.join(differs)}; "
                "choose another --output, or replace it with --overwrite"
            )
    elif (folder / "steps").is_dir() and any((folder / "steps").iterdir()):
        raise ValueError(f"{folder} holds steps of an unknown evaluation; choose another --output or use --overwrite")


def _claim(folder: Path, identity: dict, overwrite: bool) -> None:
    """Mark the folder as this evaluation's; `overwrite` forgets what lies there."""
    if overwrite:
        for old in [folder / "evaluation.json", *(folder / "steps").glob("*.json")]:
            old.unlink(missing_ok=True)
    _check(folder, identity)
    write_json(folder / "evaluation.json", identity)


def _read(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:  # no JSON, or no text
        raise ValueError(f"{path} is damaged; {remedy}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is complete whenever it exists: temporary name, fsync, rename.

    Raises ValueError if the disk refuses.
    """
    _write(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines the same way."""
    _write(path, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(scratch, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(function: Callable, *arguments: Any) -> Any:
    """The first process calls, all get its value; its exception is raised in all."""
    if world_size() == 1:
        return function(*arguments)
    box: list[Any] = [None, None]
    if rank() == 0:
        try:
            box[0] = function(*arguments)
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def gather(values: list) -> list:
    """Values of every process for items dealt out as items[rank::world_size], back in the items' order."""
    if world_size() == 1:
        return values
    boxes: list[Any] = [None] * world_size()
    dist.all_gather_object(boxes, values)
    merged = [None] * sum(map(len, boxes))
    for first, box in enumerate(boxes):
        merged[first :: world_size()] = box
    return merged
