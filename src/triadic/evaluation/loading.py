"""Find a checkpoint, load it for evaluation, and say exactly which one it is."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import triadic.models.families  # noqa: F401  (registers ours with transformers' Auto classes)
from triadic.data import tokenizer_hash
from triadic.evaluation.config import ModelConfig
from triadic.evaluation.scoring import check_head
from triadic.models import TriadicConfig
from triadic.models.accounting import state_bytes
from triadic.models.cache import RECURRENT
from triadic.models.loading import load_tokenizer, load_weights, one_line

ACCEPTED = "a Hugging Face folder, a run folder or a hub id"


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to be evaluated, with what identifies it."""

    name: str  # as the user gave it
    folder: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights_hash: str
    tokenizer_hash: str
    max_length: int | None  # None: no limit
    run: dict[str, Any]  # what the run folder says: train, validation, tokens, seed; empty for other checkpoints

    def facts(self) -> dict[str, Any]:
        """What a result file says about the checkpoint."""
        return {
            "name": self.name,
            "weights_sha256": self.weights_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "max_length": self.max_length,
            "state_mb": state_mb(self.model.config),
        }


def state_mb(config: AutoConfig) -> dict[str, float] | None:
    """Megabytes (1e6 bytes, 2 an entry) that decoding keeps after 4k and 64k tokens; None for other families."""
    if not isinstance(config, TriadicConfig):
        return None
    return {str(length): state_bytes(config, length) / 1e6 for length in (4096, 65_536)}


def find_checkpoint(name: str) -> Path:
    """The Hugging Face folder that `name` stands for.

    `name` is such a folder (with config.json), a run folder (its `final`, else its newest complete checkpoint), one
    checkpoint of a run (`checkpoints/step-...`), or a hub id, whose files are fetched into the hub's cache.
    Raises ValueError in one sentence if there is no such thing, or if it holds no safetensors weights.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        found = _inside(folder)
    elif folder.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ValueError(f"there is no folder {name}; give {ACCEPTED}")
    else:
        found = _fetch(name)
    if not any(found.glob("*.safetensors")):
        raise ValueError(f"{found} holds no *.safetensors file; weights in other formats are not loaded, convert them")
    return found


def load_checkpoint(name: str, config: ModelConfig | None = None) -> Checkpoint:
    """Load model and tokenizer for evaluation: right dtype and device, eval mode, no gradients.

    Raises ValueError if the checkpoint or its tokenizer is missing, the ids do not fit the model's vocabulary, or
    the model changes its logits after the output projection (see scoring.check_head).
    """
    config = config or ModelConfig()
    folder = find_checkpoint(name)
    device = _device(config.device)
    dtype = {"auto": "bfloat16" if device.type == "cuda" else "float32"}.get(config.dtype, config.dtype)
    options = {"trust_remote_code": config.trust_remote_code}
    model = load_weights(AutoModelForCausalLM, folder, dtype=getattr(torch, dtype), **options)
    tokenizer = load_tokenizer(config.tokenizer or folder, **options)
    model = model.to(device).eval().requires_grad_(False)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, but the model {name} only {vocabulary}")
    check_head(model)
    last = learned_positions(model)
    if config.max_length is not None and last is not None and config.max_length > last:
        raise ValueError(
            f"model.max_length is {config.max_length}, but {name} has learned {last} positions and knows no others; "
            "lower it"
        )
    return Checkpoint(
        name=name,
        folder=str(folder),
        model=model,
        tokenizer=tokenizer,
        weights_hash=weights_hash(folder),
        tokenizer_hash=tokenizer_hash(tokenizer),
        max_length=config.max_length or position_limit(model.config),
        run=run_facts(folder),
    )


def facts_without_weights(name: str, config: ModelConfig) -> tuple[str, int | None]:
    """The tokenizer's hash and the longest input of a checkpoint, as `load_checkpoint` would give them."""
    folder, options = find_checkpoint(name), {"trust_remote_code": config.trust_remote_code}
    tokenizer = load_tokenizer(config.tokenizer or folder, **options)
    try:
        limit = position_limit(AutoConfig.from_pretrained(folder, **options))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} cannot be loaded: {one_line(error)}") from error
    return tokenizer_hash(tokenizer), config.max_length or limit


def run_facts(folder: Path) -> dict[str, Any]:
    """What the run around a checkpoint's HF folder says of it: data stores, tokens trained on, seed; or {}."""
    step = folder.parent.name.removeprefix("step-")
    if folder.name == "hf" and step.isdigit():
        home, steps = folder.parents[2], int(step)
    else:
        home, steps = folder.parent, None
    if not (home / "run.yaml").is_file():
        return {}
    try:
        run = yaml.safe_load((home / "run.yaml").read_text())
        steps = run["run"]["steps"] if steps is None else steps
        return {
            "train": run["data"]["train"],
            "validation": run["data"]["validation"],
            "tokens": steps * run["batch"]["global_batch_tokens"],
            "seed": run["run"]["seed"],
        }
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"{home}/run.yaml is damaged, or no run's settings; restore or remove it") from None


def position_limit(config: AutoConfig) -> int | None:
    """The longest input a model's config allows; None for models that know no positions.

    A model without attention layers, or whose attention has no positional encoding, has no limit of its own.
    """
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds and all(kind in RECURRENT for kind in kinds):
        return None
    if getattr(config, "position_embedding", None) == "none":
        return None
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model has an embedding for (GPT-2 and its like); None if it computes them."""
    words = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words]
    limit = position_limit(model.config)
    return limit if any(limit is not None and limit <= m.num_embeddings <= limit + 2 for m in tables) else None


def weights_hash(folder: Path) -> str:
    """SHA-256 over the folder's *.safetensors files, by name."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _inside(folder: Path) -> Path:
    """The HF folder of a run folder, of one of its checkpoints, or the folder itself."""
    if (folder / "config.json").is_file():
        return folder
    if (folder / "hf" / "config.json").is_file():
        return folder / "hf"
    if (folder / "final" / "config.json").is_file():
        return folder / "final"
    steps = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    for step in steps:
        if (step / "done.json").is_file() and (step / "hf" / "config.json").is_file():
            return step / "hf"
    if steps:
        raise ValueError(f"{folder} holds no complete checkpoint: none of its {len(steps)} has a done.json and an hf/")
    raise ValueError(f"{folder} is neither a Hugging Face folder (no config.json) nor a run folder (no checkpoints)")


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.py"]))
    except Exception as error:  # the hub's client raises many kinds, all of which mean: not to be had
        reason = one_line(error).rstrip(".")
        raise ValueError(
            f"there is no folder {name} here, and the hub gives no model of that name ({reason})"
        ) from None


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:  # unknown, absent, or torch was built without it
            raise ValueError(f"model.device {name} cannot be used: {one_line(error)}") from None
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
