"""The folder of a run: whose it is, and who may write there.

runs/NAME/  run.yaml (settings)  identity.json (what must not change)  log.jsonl  loss.png  tensorboard/
            checkpoints/step-00000100/ (see checkpoint.py)  final/ (Hugging Face folder of the last step)
            earlier-final-00000100/ (what was final/ before run.steps was raised and the run went on from that step)
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import yaml
from transformers import PreTrainedConfig

from triadic import settings
from triadic.models import TriadicConfig
from triadic.training.config import OptimizerSettings, ScheduleSettings, TrainConfig

# Keys of a Hugging Face configuration that describe a file or a library, not the architecture.
_NOT_ARCHITECTURE = {"transformers_version", "dtype", "torch_dtype", "architectures", "_name_or_path", "use_cache"}

_TRACES = {".lock", "identity.json.new"}  # what a process leaves that was stopped while it claimed the folder


def identity(config: TrainConfig, model: PreTrainedConfig, tokenizer_hash: str, data_fingerprint: str) -> dict:
    """What makes two runs the same run, as {dotted key: value}: with these equal, every step computes the same.

    Left out on purpose: world size, micro-batch and workers (they only slice the stream), logging, saving, steps.
    """
    architecture = {key: value for key, value in model.to_dict().items() if key not in _NOT_ARCHITECTURE}
    tree = {
        "model": {**architecture, "init_from": config.model.init_from},
        "tokenizer": tokenizer_hash,
        "data": {
            "train fingerprint": data_fingerprint,
            "seq_len": config.data.seq_len,
            "mask_boundary_targets": config.data.mask_boundary_targets,
        },
        "batch": {"global_batch_tokens": config.batch.global_batch_tokens},
        "optimizer": dataclasses.asdict(config.optimizer),
        "schedule": {**dataclasses.asdict(config.schedule), "decay_steps": config.decay_steps},
        "run": {"seed": config.run.seed, "precision": config.run.precision},
    }
    return json.loads(json.dumps(_flat(tree)))  # plain JSON values: a tuple equals the list it is read back as


def check(folder: Path, ours: dict) -> None:
    """Raise ValueError if `folder` holds anything but a run of identity `ours`. Writes nothing."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"run.output_dir {folder} is a file; name a folder")
    if not (folder / "identity.json").is_file():
        if any(entry.name not in _TRACES for entry in folder.iterdir()):
            raise ValueError(f"run.output_dir {folder} is not empty and is no run's folder; choose another one")
        return
    try:
        theirs = json.loads((folder / "identity.json").read_text())
    except ValueError:  # no JSON, or no text
        raise ValueError(
            f"{folder}/identity.json is damaged, so whose run this is is unknown; restore it, choose another "
            "run.output_dir, or, to start again, remove the folder"
        ) from None
    theirs = _defaults(ours.keys() - theirs.keys()) | theirs
    absent = "nothing"
    different = [
        f"{_NAMES.get(key, key)} is {theirs.get(key, absent)} there and {ours.get(key, absent)} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key, absent) != ours.get(key, absent)
    ]
    if different:
        raise ValueError(
            f"run.output_dir {folder} belongs to another run: {'; '.join(different)}. "
            "Set these back to resume it, or choose another run.output_dir (model.init_from starts from its weights)"
        )


_NAMES = {"schedule.decay_steps": "schedule.decay_steps (by default run.steps)"}


def _defaults(keys: Iterable[str]) -> dict:
    """What those of `keys` that have a default have by it: a run made before such a setting existed trained with it."""
    tree = {
        "model": TriadicConfig().to_dict(),
        "optimizer": dataclasses.asdict(OptimizerSettings()),
        "schedule": dataclasses.asdict(ScheduleSettings()),
    }
    known = json.loads(json.dumps(_flat(tree)))
    return {key: known[key] for key in keys if key in known}


class Claim:
    """The right to write in a run's folder, held by a file lock until `release` or the end of the process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: IO | None = None

    def take(self, config: TrainConfig, ours: dict) -> None:
        """Make the folder, lock it and write down whose it is.

        Raises ValueError if it belongs to another run or another process is training there.
        """
        check(self.folder, ours)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115 (stays open as long as the run)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_atomically(self.folder / "identity.json", json.dumps(ours, indent=1))
            write_atomically(self.folder / "run.yaml", settings_text(config))
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"another process is training in {self.folder}; wait for it, or choose another run.output_dir"
            ) from None
        except OSError as error:
            self.release()
            raise ValueError(f"run.output_dir {self.folder} cannot be written to: {error.strerror}") from None

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def settings_text(config: TrainConfig) -> str:
    """The run's settings as the YAML that `load_config` reads back."""
    return yaml.safe_dump(json.loads(json.dumps(settings.to_dict(config))), sort_keys=False)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` so that a reader, or a crash, sees the old content or the new one."""
    new = path.with_name(path.name + ".new")
    with open(new, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
