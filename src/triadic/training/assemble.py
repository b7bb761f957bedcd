"""What a run is made of, from its settings. A misfit is a ValueError, raised before anything is written."""

import copy
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from triadic.data import Windows, check_tokenizer, collate, open_store, step_indices, tokenizer_hash
from triadic.models import TriadicConfig, loading
from triadic.models.context import Context, check_context, spread_context
from triadic.models.loading import load_weights, one_line
from triadic.models.modeling_triadic import compile_layers
from triadic.models.upcycling import upcycle
from triadic.training import background, checkpoint, engines, optim, parallel, run_folder
from triadic.training.config import ModelSettings, TrainConfig

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class Run:
    """Everything that one rank holds during training."""

    config: TrainConfig
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    windows: Windows
    validation: Windows
    model: nn.Module  # as accelerate prepared it
    optimizer: torch.optim.Optimizer
    accumulation: int  # micro-batches of one step
    progress: checkpoint.Progress
    claim: run_folder.Claim
    writer: background.Writer  # of checkpoints
    notes: list[str]  # what to say before the first step
    context: Context | None = None  # the ranks that share this one's windows

    @property
    def bare(self) -> PreTrainedModel:
        """The model without accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def place(self) -> tuple[int, int]:
        """(i, n): this rank reads the i-th of n equal shares of the windows; ranks that share a window are one."""
        degree = self.config.parallel.context
        return self.accelerator.process_index // degree, self.accelerator.num_processes // degree

    @property
    def folder(self) -> Path:
        return self.claim.folder

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def assemble(config: TrainConfig) -> Run:
    """Everything that the loop needs, at the step where the run stands; takes possession of the run's folder.

    Raises ValueError if the launch, the settings, the model, the data or the folder do not fit each other.
    """
    accelerator = parallel.start(config)
    accumulation = config.accumulation(accelerator.num_processes)
    model_config = load_model_config(config)
    check_context(model_config, config.parallel.context)
    tokenizer = load_tokenizer(config, model_config)
    windows, validation = open_windows(config, tokenizer, model_config)

    ours = run_folder.identity(config, model_config, tokenizer_hash(tokenizer), windows.store.fingerprint)
    claim = run_folder.Claim(Path(config.run.output_dir))
    run_folder.check(claim.folder, ours)
    found, damaged = parallel.on_main(accelerator, checkpoint.find, claim.folder / "checkpoints")
    model = build_model(config, model_config, fresh=found is None)
    if found:
        checkpoint.load_weights(found, model)
    optimizer = optim.build_optimizer(model, config.optimizer)

    parallel.on_main(accelerator, claim.take, config, ours)
    parallel.on_main(accelerator, checkpoint.check_newest, claim.folder / "checkpoints", found, damaged)
    parallel.on_main(accelerator, checkpoint.tidy, claim.folder / "checkpoints", damaged)
    context = parallel.share_windows(accelerator, config.parallel.context)
    if context is not None:
        spread_context(model, context)
    model, optimizer = engines.prepare(accelerator, model, optimizer, config.run.precision)
    progress = checkpoint.restore(found, accelerator, model, optimizer) if found else checkpoint.Progress()
    if progress.step < config.run.steps:
        parallel.on_main(accelerator, checkpoint.set_aside, claim.folder / "final", progress.step)
    notes = [f"checkpoint {path} is damaged ({wrong}) and set aside" for path, wrong in damaged.items()]
    notes += opening(config, accelerator, accumulation, windows, model_config, found)
    return Run(
        config=config,
        accelerator=accelerator,
        tokenizer=tokenizer,
        windows=windows,
        validation=validation,
        model=model,
        optimizer=optimizer,
        accumulation=accumulation,
        progress=progress,
        claim=claim,
        writer=background.Writer(accelerator),
        notes=notes,
        context=context,
    )


def load_model_config(config: TrainConfig) -> PreTrainedConfig:
    """The architecture: a Hugging Face JSON, with the slices, RoPE base and context length of this run."""
    source, rope_theta = config.model.config, config.model.rope_theta
    if not Path(source).exists():
        raise ValueError(f"model.config {source} does not exist; name a file of configs/model/ or a model folder")
    try:
        model_config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a dtype that torch does not know
        raise ValueError(f"model.config {source} cannot be used: {one_line(error)}") from error
    if model_config.model_type != TriadicConfig.model_type:
        raise ValueError(
            f"model.config {source} is a {model_config.model_type} model, only {TriadicConfig.model_type} models are "
            "trained here; name a file of configs/model/ or a folder of such a model"
        )
    if config.model.second_key_dim is not None:
        if config.model.init_from is None:
            raise ValueError(
                "model.second_key_dim grows the state of model.init_from, which is not set; for a new model, set "
                "second_key_dim in a copy of its JSON and name that as model.config"
            )
        model_config.second_key_dim = config.model.second_key_dim
    if rope_theta is not None:
        if not model_config.rope_parameters or "full_attention" not in model_config.layer_types:
            raise ValueError(f"model.rope_theta is set but {source} has no layer with rotary positions; remove it")
        model_config.rope_parameters = {**model_config.rope_parameters, "rope_theta": rope_theta}
    model_config.max_position_embeddings = max(model_config.max_position_embeddings, config.data.seq_len)
    return model_config


def load_tokenizer(config: TrainConfig, model_config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of model.tokenizer, by default the one that prepare_data.py left beside the token store.

    Its special tokens become the model's.
    """
    folder = Path(config.model.tokenizer or Path(config.data.train).parent / "tokenizer")
    if not folder.is_dir():
        if config.model.tokenizer is None and not Path(config.data.train).is_dir():
            raise ValueError(f"data.train {config.data.train} does not exist; make it by scripts/prepare_data.py")
        raise ValueError(f"there is no tokenizer folder {folder}; set model.tokenizer or run scripts/prepare_data.py")
    tokenizer = loading.load_tokenizer(folder)
    if len(tokenizer) > model_config.vocab_size:
        raise ValueError(
            f"the tokenizer {folder} has {len(tokenizer)} entries but {config.model.config} has vocab_size "
            f"{model_config.vocab_size}; raise vocab_size or take the model's own tokenizer"
        )
    for name in SPECIAL_TOKENS:
        setattr(model_config, name, getattr(tokenizer, name))
    return tokenizer


def open_windows(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
) -> tuple[Windows, Windows]:
    """Training and validation windows; refuses stores of another tokenizer or with ids beyond the model's."""
    both = []
    for key, path, seed in (("train", config.data.train, config.run.seed), ("validation", config.data.validation, 0)):
        store = open_store(path)
        check_tokenizer(store, tokenizer)
        if store.vocab_size > model_config.vocab_size:
            raise ValueError(
                f"data.{key} {path} holds token ids up to {store.vocab_size - 1} but {config.model.config} has "
                f"vocab_size {model_config.vocab_size}; raise vocab_size or prepare the data again"
            )
        both.append(Windows(store, config.data.seq_len, seed, config.data.mask_boundary_targets))
    return tuple(both)


def build_model(config: TrainConfig, model_config: PreTrainedConfig, fresh: bool) -> PreTrainedModel:
    """The model in float32 on the CPU; a `fresh` run starts from model.init_from if that is set, else from the seed."""
    options = config.model
    torch.manual_seed(config.run.seed)
    chosen = {"attn_implementation": options.attn_implementation} if options.attn_implementation else {}
    if fresh and options.init_from:
        model = _from_weights(options, config.run.seed, model_config, chosen)
    else:
        try:
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32, **chosen)
        except ImportError as error:  # an attention implementation whose package is missing
            raise ValueError(f"model.attn_implementation cannot be used: {one_line(error)}") from error
    for name in SPECIAL_TOKENS:
        setattr(model.generation_config, name, getattr(model_config, name))
    if options.gradient_checkpointing:
        # transformers 5.24 renamed the method
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if options.torch_compile:
        compile_layers(model)
    return model.train()


def _from_weights(options: ModelSettings, seed: int, model_config: PreTrainedConfig, chosen: dict) -> PreTrainedModel:
    """model.init_from in the architecture of this run; with model.second_key_dim its state is enlarged to that."""
    grow, own = options.second_key_dim is not None, copy.deepcopy(model_config)
    try:
        if grow:
            own.second_key_dim = AutoConfig.from_pretrained(options.init_from).second_key_dim
        model = load_weights(AutoModelForCausalLM, options.init_from, config=own, dtype=torch.float32, **chosen)
        return upcycle(model, model_config.second_key_dim, seed=seed) if grow else model
    except (ValueError, OSError) as error:
        raise ValueError(f"model.init_from: {error}") from error


class StepBatches:
    """The micro-batches of one rank from the step where it stands to the last, as lists of window positions."""

    def __init__(self, run: Run):
        self.steps = range(run.progress.step, run.config.run.steps)
        self.windows_per_step, self.micro_batch = run.config.windows_per_step, run.config.batch.micro_batch_windows
        self.rank, self.ranks = run.place

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            yield from step_indices(step, self.windows_per_step, self.rank, self.ranks, self.micro_batch)


def micro_batches(run: Run) -> Iterator[dict]:
    """This rank's packed micro-batches in order, read ahead by worker processes if data.num_workers > 0.

    Raises ValueError for data that cannot be trained on.
    """
    workers = run.config.data.num_workers
    loader = DataLoader(
        run.windows,
        batch_sampler=StepBatches(run),
        collate_fn=collate_for(run),
        num_workers=workers,
        prefetch_factor=run.config.data.prefetch_batches if workers else None,
        worker_init_fn=_outlive_first_signal,
        pin_memory=run.accelerator.device.type == "cuda",
        generator=torch.Generator(),  # the loader draws worker seeds from it, not from the model's generator
    )
    reader = iter(loader)
    try:
        yield from reader
    except ValueError as error:  # from a worker it comes with the worker's traceback around it
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from error
    except (ConnectionError, EOFError, FileNotFoundError) as error:  # its socket went while a batch was handed over
        if not workers:
            raise
        raise RuntimeError(f"DataLoader worker died while it handed over a batch: {type(error).__name__}") from error
    finally:
        if workers:
            reader._shutdown_workers()  # now: a traceback can hold the reader long after


def collate_for(run: Run) -> Callable[[Sequence[dict]], dict]:
    """`collate`, or where ranks share windows, this rank's part of its batches."""
    if run.context is None:
        return collate
    return partial(collate, part=run.context.rank, parts=run.context.degree)


def _outlive_first_signal(_worker: int) -> None:
    """A worker ignores the first SIGTERM, and Ctrl-C: they reach the whole process group, and the trainer needs its
    batches until it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def opening(config, accelerator, accumulation, windows, model_config, found) -> list[str]:
    """What a run says before its first step."""
    epochs = config.run.steps * config.windows_per_step / len(windows)
    notes = [
        f"{config.model.config}, {config.run.precision}, {engines.name_of(accelerator)}, "
        f"{accelerator.num_processes} x {accelerator.device.type}: "
        f"{config.run.steps} steps of {config.windows_per_step} windows x {config.data.seq_len} tokens = "
        f"{accelerator.num_processes} processes x {accumulation} micro-batches x {config.batch.micro_batch_windows}"
        + (f" / {config.parallel.context} that share each window" if config.parallel.context > 1 else ""),
        f"{config.run.steps * config.batch.global_batch_tokens:,} tokens are {epochs:.2f} epochs of {config.data.train}"
        + (", each epoch in an order of its own" if epochs > 1 else ""),
    ]
    return [*notes, f"resuming from {found}"] if found else notes
