"""The settings of a training run: one YAML file, see configs/train/. Field comments say what a value means."""

from dataclasses import dataclass, field
from typing import Literal

from triadic import settings


@dataclass(frozen=True)
class ModelSettings:
    config: str  # Hugging Face JSON (configs/model/*.json) or a folder with a config.json
    tokenizer: str | None = None  # tokenizer folder; null: the folder tokenizer/ beside data.train
    init_from: str | None = None  # Hugging Face folder or hub id: start from its weights, with a new optimizer
    second_key_dim: int | None = None  # grow the state of init_from to this E, a multiple of its own (models.upcycling)
    rope_theta: float | None = None  # another RoPE base than the config's, for training at a longer context
    attn_implementation: str | None = None  # of softmax layers: null (sdpa), eager, flex_attention, flash_attention_2
    gradient_checkpointing: bool = False  # recompute each block in the backward
    torch_compile: bool = False  # each layer, around the ops' kernels


@dataclass(frozen=True)
class DataSettings:
    train: str  # token store, made by scripts/prepare_data.py
    validation: str
    seq_len: int = 4096  # tokens of a window
    mask_boundary_targets: bool = False  # leave the target "next document begins" out of the loss
    num_workers: int = 2  # reader processes of each rank; 0 reads in the training process
    prefetch_batches: int = 4  # micro-batches that each worker reads ahead


@dataclass(frozen=True)
class BatchSettings:
    global_batch_tokens: int = 524_288  # tokens of one optimizer step over all ranks
    micro_batch_windows: int = 8  # windows of one forward pass of one rank; the accumulation follows


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float = 3e-4  # the peak
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    weight_decay: float = 0.1  # of tensors with two or more dimensions
    clip_norm: float | None = 1.0  # null: gradients are measured, not clipped


@dataclass(frozen=True)
class ScheduleSettings:
    warmup_steps: int = 1000
    min_lr_fraction: float = 0.1  # of the peak, reached after decay_steps
    decay_steps: int | None = None  # end of the cosine; null: run.steps


@dataclass(frozen=True)
class RunSettings:
    output_dir: str
    steps: int
    seed: int = 0  # of the initial weights and of the order of windows
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16: autocast over fp32 master weights
    log_every: int = 10  # every *_every counts optimizer steps
    validate_every: int = 1000
    validation_windows: int = 512
    save_every: int = 1000
    keep_last: int = 3  # checkpoints kept besides the milestones
    milestones: list[int] = field(default_factory=list)  # steps that are saved and kept for good
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=lambda: ["tensorboard"])
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient norm that is not finite
    nonfinite_limit: int = 10  # skipped steps after which "skip" stops too
    peak_tflops: float | None = None  # of one device, for MFU; null: by the device's name


@dataclass(frozen=True)
class ParallelSettings:
    """What the launcher must have started; null asserts nothing. Launch files: configs/accelerate/."""

    context: int = 1  # processes that share each window, a part of its tokens on each; it divides the models' heads
    processes: int | None = None
    engine: Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"] | None = None
    stall_seconds: int = 1800  # without a step on some rank, after which the run ends and names the rank


@dataclass(frozen=True)
class TrainConfig:
    model: ModelSettings
    data: DataSettings
    run: RunSettings
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    parallel: ParallelSettings = ParallelSettings()

    def __post_init__(self):
        for dotted in _POSITIVE:
            value = _get(self, dotted)
            if value is not None and value <= 0:
                raise ValueError(f"{dotted} must be greater than 0, not {value}")
        for dotted in _NOT_NEGATIVE:
            if _get(self, dotted) < 0:
                raise ValueError(f"{dotted} must be 0 or greater, not {_get(self, dotted)}")
        if len(self.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in self.optimizer.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), not {list(self.optimizer.betas)}")
        if not 0 <= self.schedule.min_lr_fraction <= 1:
            raise ValueError(f"schedule.min_lr_fraction must lie in [0, 1], not {self.schedule.min_lr_fraction}")
        if self.run.seed >= 2**63:
            raise ValueError(f"run.seed must be less than 2^63, not {self.run.seed}")
        if min(self.run.milestones, default=1) < 1:
            raise ValueError(f"run.milestones must be steps from 1 on, not {self.run.milestones}")
        if self.schedule.warmup_steps > self.decay_steps:
            raise ValueError(
                f"schedule.warmup_steps ({self.schedule.warmup_steps}) must not exceed the schedule's length "
                f"({self.decay_steps} steps); lower it, or raise run.steps or schedule.decay_steps"
            )
        if self.batch.global_batch_tokens % self.data.seq_len:
            near = max(1, round(self.batch.global_batch_tokens / self.data.seq_len)) * self.data.seq_len
            raise ValueError(
                f"batch.global_batch_tokens ({self.batch.global_batch_tokens}) must be a multiple of data.seq_len "
                f"({self.data.seq_len}); the nearest is {near}"
            )
        if self.data.seq_len % self.parallel.context:
            raise ValueError(
                f"data.seq_len ({self.data.seq_len}) must be a multiple of parallel.context ({self.parallel.context}), "
                "the processes that share a window"
            )

    @property
    def windows_per_step(self) -> int:
        return self.batch.global_batch_tokens // self.data.seq_len

    @property
    def decay_steps(self) -> int:
        return self.run.steps if self.schedule.decay_steps is None else self.schedule.decay_steps

    def accumulation(self, world_size: int) -> int:
        """Micro-batches that each of `world_size` ranks runs in one step. Raises ValueError if they do not divide."""
        context = self.parallel.context
        if world_size % context:
            raise ValueError(
                f"parallel.context ({context}) must divide the {world_size} processes; change it, or launch a multiple"
            )
        per_pass = self.batch.micro_batch_windows * world_size // context
        if self.windows_per_step % per_pass:
            raise ValueError(
                f"a step of {self.windows_per_step} windows (batch.global_batch_tokens "
                f"{self.batch.global_batch_tokens} / data.seq_len {self.data.seq_len}) cannot be split over "
                f"{world_size} processes x batch.micro_batch_windows {self.batch.micro_batch_windows}"
                + (f" / parallel.context {context}" if context > 1 else "")
                + f"; make the product divide {self.windows_per_step}"
            )
        return self.windows_per_step // per_pass


_POSITIVE = (
    "data.seq_len",
    "data.prefetch_batches",
    "batch.global_batch_tokens",
    "batch.micro_batch_windows",
    "optimizer.learning_rate",
    "optimizer.eps",
    "optimizer.clip_norm",
    "schedule.decay_steps",
    "model.second_key_dim",
    "model.rope_theta",
    "run.steps",
    "run.log_every",
    "run.validate_every",
    "run.validation_windows",
    "run.save_every",
    "run.keep_last",
    "run.peak_tflops",
    "parallel.context",
    "parallel.processes",
    "parallel.stall_seconds",
)
_NOT_NEGATIVE = (
    "data.num_workers",
    "optimizer.weight_decay",
    "schedule.warmup_steps",
    "run.seed",
    "run.nonfinite_limit",
)


def _get(config, dotted: str):
    section, name = dotted.split(".")
    return getattr(getattr(config, section), name)


def load_config(path: str, overrides: list[str] = ()) -> TrainConfig:
    """Read configs/train/X.yaml with `a.b=value` overrides. Raises triadic.settings.SettingsError, a ValueError."""
    return settings.load(TrainConfig, path, overrides)
