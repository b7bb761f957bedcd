"""Checkpoints: safetensors and JSON only, complete or absent, exact.

    checkpoints/step-00000100/
        hf/      config.json  model.safetensors (the fp32 weights, also those that training resumes from)
                 tokenizer files  generation_config.json
        state/   optimizer.safetensors (moments by parameter name)  rng.safetensors  trainer.json (step, counters)
                 run.yaml (settings)
        done.json  {file: {bytes, sha256}} of all the above, written last

A checkpoint is written under a hidden name, flushed to the disk, renamed, and only then are old ones removed.
The position in the data is the step: the stream of windows is a pure function of it (triadic.data).
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import accelerate
import torch
import transformers
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from triadic.training import engines
from triadic.training.config import TrainConfig
from triadic.training.errors import TrainingError
from triadic.training.run_folder import settings_text, write_atomically


@dataclass
class Progress:
    """What a run has done; `step` counts finished optimizer steps."""

    step: int = 0
    skipped_steps: int = 0


@dataclass
class Snapshot:
    """A run at a step boundary, whole and on the CPU of rank 0: all that `write` needs."""

    weights: dict[str, torch.Tensor]  # by parameter name, float32
    moments: dict[str, torch.Tensor]  # "<parameter>.exp_avg", "<parameter>.exp_avg_sq", "<parameter>.step"
    rng: dict[str, torch.Tensor]  # "cpu": [ranks, bytes] uint8, and "cuda" where there is one
    trainer: dict


def take(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Snapshot:
    """Collect the state of a run from all ranks (every rank must call).

    Under every engine the same tensors by the same names: whole float32 weights and moments. They are gathered one
    parameter at a time, so that no GPU holds more than one of them beside its own part.
    """
    engine, bare = engines.of(accelerator), accelerator.unwrap_model(model)
    rng = {"cpu": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    gathered = {name: accelerator.gather(state[None].to(accelerator.device)).cpu() for name, state in rng.items()}
    weights, moments = {}, {}
    for name, parameter in bare.named_parameters():
        whole = {name: engine.weight(parameter)}
        parts = {f"{name}.{key}": value for key, value in engine.moments(optimizer, parameter).items()}
        if accelerator.is_main_process:
            weights |= {key: _copy(value) for key, value in whole.items()}
            moments |= {key: _copy(value) for key, value in parts.items()}
    if not accelerator.is_main_process:
        return Snapshot({}, {}, gathered, {})
    engines.check_float32([*weights.items(), *moments.items()], "in the checkpoint")
    trainer = {
        "step": progress.step,
        "skipped_steps": progress.skipped_steps,
        "world_size": accelerator.num_processes,
        "engine": engines.name_of(accelerator),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, accelerate)},
    }
    return Snapshot(weights, moments, gathered, trainer)


def write(
    checkpoints: Path,
    snapshot: Snapshot,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
) -> Path:
    """Write `snapshot` as a complete checkpoint and return its folder (rank 0 alone; needs no other rank).

    Raises TrainingError if the disk refuses; the checkpoints that were there stay as they are.
    """
    final = folder_of(checkpoints, snapshot.trainer["step"])
    partial = checkpoints / f".writing-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "state").mkdir(parents=True)
        model.save_pretrained(partial / "hf", state_dict=snapshot.weights, max_shard_size="10TB")
        tokenizer.save_pretrained(partial / "hf")
        save_file(snapshot.moments, partial / "state" / "optimizer.safetensors")
        save_file(snapshot.rng, partial / "state" / "rng.safetensors")
        (partial / "state" / "trainer.json").write_text(json.dumps(snapshot.trainer, indent=1))
        (partial / "state" / "run.yaml").write_text(settings_text(config))
        manifest = {"step": snapshot.trainer["step"], "files": _describe(partial)}
        _flush_tree(partial)
        write_atomically(partial / "done.json", json.dumps(manifest, indent=1))
        _flush_folder(partial)
        _put_in_place(partial, final)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"could not save {final}: {error}; earlier checkpoints are untouched, and the same command resumes from "
            "the newest once the disk takes writes again"
        ) from error
    return final


def publish(checkpoints: Path, step: int, final: Path) -> None:
    """Copy the Hugging Face folder of the checkpoint at `step` to `final`, complete or not at all."""
    partial = final.with_name(f".writing-{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder_of(checkpoints, step) / "hf", partial)
    _flush_tree(partial)
    _put_in_place(partial, final)


def set_aside(final: Path, step: int) -> None:
    """Rename what an earlier end of the run has published, because the run goes on from `step`: `final` is the last
    step's, or absent."""
    if final.exists():
        aside = final.with_name(f"earlier-{final.name}-{step:08d}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def _all(checkpoints: Path) -> list[Path]:
    """Folders named as `folder_of` names them, oldest first; a person's own copies beside them are left alone."""
    steps = {path: path.name.removeprefix("step-") for path in checkpoints.glob("step-*")}
    return sorted(
        path for path, step in steps.items() if step.isdecimal() and path == folder_of(checkpoints, int(step))
    )


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words, or None. Reads every byte."""
    try:
        files = json.loads((checkpoint / "done.json").read_text())["files"]
        recorded = [(name, file["bytes"], file["sha256"]) for name, file in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "done.json is missing or unreadable"
    for name, size, _ in recorded:
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    found = _digests([checkpoint / name for name in files])
    for (name, _, sha256), digest in zip(recorded, found, strict=True):
        if digest != sha256:
            return f"the content of {name} has changed"
    return None


def find(checkpoints: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest sound checkpoint (None if there are none), and the damaged ones above it with what is wrong.

    Raises ValueError if there are checkpoints and every one is damaged. Changes nothing.
    """
    damaged = {}
    for folder in reversed(_all(checkpoints)):
        wrong = damage(folder)
        if wrong is None:
            return folder, damaged
        damaged[folder] = wrong
    if damaged:
        reasons = "; ".join(f"{folder.name}: {wrong}" for folder, wrong in damaged.items())
        raise ValueError(f"every checkpoint in {checkpoints} is damaged ({reasons}); remove them to start from step 0")
    return None, {}


def check_newest(checkpoints: Path, found: Path | None, damaged: dict[Path, str]) -> None:
    """Raise ValueError if another process has saved since `find` returned these (call when no other can any more)."""
    newest, known = (_all(checkpoints) or [None])[-1], next(iter(damaged), found)
    if newest != known:
        raise ValueError(
            f"another process trained in {checkpoints.parent} while this one started, and saved "
            f"{newest.name if newest else 'nothing'}; give the same command again, it goes on from there"
        )


def tidy(checkpoints: Path, damaged: dict[Path, str]) -> None:
    """Rename `damaged` checkpoints to damaged-step-*, so that they never count as good, and remove the leftovers of
    a process that was killed while it saved or pruned."""
    for folder in damaged:
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    for leftover in checkpoints.glob(".*ing-*"):
        shutil.rmtree(leftover)


def load_weights(checkpoint: Path, model: PreTrainedModel) -> None:
    """Fill `model`, float32 on the CPU and not yet prepared, from a checkpoint of any engine.

    Raises ValueError if the weights do not fit the model.
    """
    weights = load_file(checkpoint / "hf" / "model.safetensors")
    engines.check_float32(weights.items(), f"in {checkpoint}")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = sorted(set(missing) - set(getattr(model, "all_tied_weights_keys", None) or {}))
    if missing or unexpected:
        raise ValueError(f"{checkpoint} does not fit the model: missing {missing}, unexpected {sorted(unexpected)}")


def restore(checkpoint: Path, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Give the prepared optimizer its moments, and this rank its generators; return where the run stands.

    The weights are the model's since `load_weights`. The engine and the number of ranks need not be those that saved.
    """
    named = list(accelerator.unwrap_model(model).named_parameters())
    with safe_open(checkpoint / "state" / "optimizer.safetensors", "pt") as file:  # read where needed, not as a whole
        saved = set(file.keys())

        def read(name: str) -> engines.Moments:
            keys = [key for key in ("step", *engines.MOMENTS) if f"{name}.{key}" in saved]
            return {key: file.get_tensor(f"{name}.{key}") for key in keys}

        engines.of(accelerator).load_moments(optimizer, named, read)
    _restore_rng(load_file(checkpoint / "state" / "rng.safetensors"), accelerator)
    trainer = json.loads((checkpoint / "state" / "trainer.json").read_text())
    return Progress(trainer["step"], trainer["skipped_steps"])


def prune(checkpoints: Path, keep_last: int, milestones: list[int]) -> None:
    """Remove sound checkpoints beyond the newest `keep_last` and the milestones. Call after a save has returned."""
    done = [folder for folder in _all(checkpoints) if (folder / "done.json").is_file()]
    for folder in done[:-keep_last]:
        if int(folder.name.removeprefix("step-")) not in milestones:
            doomed = checkpoints / f".removing-{folder.name}"
            os.replace(folder, doomed)  # first out of sight, so that a half-removed checkpoint is never seen
            shutil.rmtree(doomed)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """On the CPU, and never the memory that training goes on to change."""
    return value.detach().to("cpu", copy=True).contiguous()


def _restore_rng(rng: dict[str, torch.Tensor], accelerator: Accelerator) -> None:
    """Each rank's own generator; a rank that the saved run did not have starts from the last one's, offset."""
    rank = accelerator.process_index
    if rank >= len(rng["cpu"]):
        torch.manual_seed(int(rng["cpu"].sum()) + rank)
        return
    torch.set_rng_state(rng["cpu"][rank].clone())  # a copy: torch reads a row of a larger tensor from a wrong place
    if "cuda" in rng and accelerator.device.type == "cuda":
        torch.cuda.set_rng_state(rng["cuda"][rank].clone(), accelerator.device)


def _describe(folder: Path) -> dict:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _digests(paths), strict=True)
    }


def _digests(paths: list[Path]) -> list[str]:
    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter lock
        return list(pool.map(digest, paths))


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`; what stood there (a damaged checkpoint, an older export) goes afterwards."""
    old = final.with_name(f".replacing-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(partial, final)
    _flush_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
