"""Processes: what the launcher started against what the run asked for, reductions between ranks, signals to stop."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
)
from transformers.integrations import unset_hf_deepspeed_config

from triadic.models.context import Context
from triadic.training import engines
from triadic.training.config import TrainConfig

# What a DeepSpeed file may not decide, because the run's settings do.
NOT_DEEPSPEEDS = {
    "optimizer": "optimizer.*",
    "scheduler": "schedule.*",
    "fp16": "run.precision",
    "bf16": "run.precision",
    "amp": "run.precision",
    "torch_autocast": "run.precision",
    "gradient_clipping": "optimizer.clip_norm",
    "gradient_accumulation_steps": "batch.*",
    "train_micro_batch_size_per_gpu": "batch.*",
}


def start(config: TrainConfig) -> Accelerator:
    """The Accelerator of this process, after checking that the launcher started what it was meant to.

    Precision, accumulation and compilation come from the run's settings, never from the launcher's environment.
    Raises ValueError for a launch that would silently train something else.
    """
    available = {tracker.value for tracker in get_available_trackers()}
    for tracker in config.run.trackers:
        if tracker not in available:  # accelerate would leave it out
            raise ValueError(
                f"run.trackers asks for {tracker}, which is not installed; pip install {tracker}, or take it out"
            )
    # torch 2.13 has a new name for it, which accelerate cannot pass on
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)  # what DeepSpeed calls
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # transformers would leave other ranks' weights empty
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        _ready_deepspeed()
    accelerator = Accelerator(
        mixed_precision="no",  # autocast is put around the model by engines.prepare, the same under every engine
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # the loop accumulates by itself
        dynamo_backend="no",
        log_with=list(config.run.trackers) or None,
        project_config=ProjectConfiguration(logging_dir=f"{config.run.output_dir}/tensorboard"),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(
                backend="gloo" if "LOCAL_RANK" in os.environ and not torch.cuda.is_available() else None,
                timeout=timedelta(seconds=2 * config.parallel.stall_seconds),  # background.Watch says more, earlier
            ),
        ],
        step_scheduler_with_optimizer=False,
    )
    engine = engines.name_of(accelerator)
    check_launch(os.environ, accelerator.num_processes, engine, config.parallel.processes, config.parallel.engine)
    if accelerator.state.deepspeed_plugin is not None:
        _settle_deepspeed(accelerator.state.deepspeed_plugin, config)
    return accelerator


def _ready_deepspeed() -> None:
    """Before DeepSpeed starts: quiet, and on a CPU without its shared-memory op, which it would compile; one killed
    meanwhile leaves a lock behind that keeps all later ones waiting. gloo does the same."""
    try:
        from deepspeed.ops import __compatible_ops__ as compatible
    except ImportError as error:
        raise ValueError(f'DeepSpeed cannot be imported ({error}); pip install -e ".[deepspeed]"') from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        compatible["deepspeed_shm_comm"] = False


def _settle_deepspeed(plugin, config: TrainConfig) -> None:
    """Fill the launcher's DeepSpeed settings from the run's. Raises ValueError where they would decide what the run
    decides, or ask for what is not supported."""
    file = plugin.deepspeed_config
    ours = {
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_windows,
        "gradient_accumulation_steps": 1,  # the loop says which micro-batch is the last
        "gradient_clipping": config.optimizer.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the same AdamW everywhere, offloaded or not
    }
    for key, setting in NOT_DEEPSPEEDS.items():
        value = file.get(key)
        if isinstance(value, dict) and "enabled" in value:
            value = value["enabled"]
        if value not in (None, "auto", False, ours.get(key)):
            raise ValueError(f"the DeepSpeed settings have {key}, which {setting} decides; remove it from them")
    zero = file.get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") == "nvme":
            raise ValueError(f"zero_optimization.{part}.device nvme is not supported, only cpu and none")
    for key in [key for key, value in file.items() if value == "auto"]:
        del file[key]
    file.update(ours)
    # The model is made whole on the CPU, so that every engine starts from the same weights, and split afterwards.
    plugin.zero3_init_flag = False
    plugin.dschf = None
    unset_hf_deepspeed_config()


def check_launch(
    environment: Mapping[str, str], world_size: int, engine: str, processes: int | None, asked: str | None
) -> None:
    """Raise ValueError if `world_size` processes under `engine` are not what launcher and settings announced."""
    announced = environment.get("WORLD_SIZE")
    if announced is not None and int(announced) != (1 if engine == "single" else world_size):
        raise ValueError(
            f"the launcher started {announced} processes but this one stands alone, so each would train by itself; "
            "on a CPU put ACCELERATE_USE_CPU=true before `accelerate launch --multi_gpu`"
        )
    if announced is None and "MASTER_ADDR" in environment and world_size == 1:
        raise ValueError(
            "the launcher was asked for several processes and started one (accelerate does so with --cpu); "
            "on a CPU use ACCELERATE_USE_CPU=true accelerate launch --multi_gpu, or unset MASTER_ADDR for one process"
        )
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" and not engine.startswith("zero"):
        raise ValueError(
            f"the launcher was asked for DeepSpeed and this process runs the engine {engine!r}; "
            "remove ACCELERATE_USE_CPU, which turns DeepSpeed off in silence"
        )
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not engine.startswith("fsdp"):
        raise ValueError(
            f"the launcher was asked for FSDP and this process runs the engine {engine!r}; on a CPU put "
            "ACCELERATE_USE_CPU=true before accelerate launch --multi_gpu --use_fsdp --fsdp_version 2"
        )
    if engine not in engines.ENGINES:
        raise ValueError(
            f"the engine {engine} is not supported, only {', '.join(engines.ENGINES)}; "
            "launch with a file of configs/accelerate/"
        )
    for name, found, wanted in (("processes", world_size, processes), ("engine", engine, asked)):
        if wanted is not None and found != wanted:
            raise ValueError(f"parallel.{name} asks for {wanted} but the launcher started {found}; change either")


def share_windows(accelerator: Accelerator, degree: int) -> Context | None:
    """The ranks that share this one's windows: `degree` neighbours; None if every rank has windows of its own."""
    if degree == 1:
        return None
    rank, ranks = accelerator.process_index, accelerator.num_processes
    groups = [torch.distributed.new_group(list(range(i, i + degree))) for i in range(0, ranks, degree)]
    return Context(groups[rank // degree], rank % degree, degree)


def total(accelerator: Accelerator, *values: torch.Tensor | float) -> torch.Tensor:
    """Sums over all ranks, [len(values)] on the device; no rank looks at them here."""
    device = accelerator.device
    precise = torch.float32 if device.type == "mps" else torch.float64  # what the device has
    sums = torch.stack([torch.as_tensor(value, device=device).to(precise) for value in values])
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(sums)
    return sums


def on_main(accelerator: Accelerator, function: Callable[..., Any], *arguments) -> Any:
    """Call `function` on rank 0 and hand its result, or its exception, to every rank."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome = [function(*arguments), None]
        except Exception as error:  # whatever it is: the others wait for an answer
            if accelerator.num_processes == 1:
                raise
            outcome = [None, error]
    broadcast_object_list(outcome)
    result, error = outcome
    if error is not None:
        raise error
    return result


class StopSignals:
    """While entered, SIGTERM and SIGINT ask for a stop at the next step.

    More of them change nothing, because launchers and schedulers send several for one stop; only Ctrl-C again, later
    than `PATIENCE` seconds, ends the process at once.
    """

    PATIENCE = 3.0

    def __init__(self):
        self.received: signal.Signals | None = None
        self._since = 0.0

    def __enter__(self) -> "StopSignals":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > self.PATIENCE:
            raise KeyboardInterrupt
