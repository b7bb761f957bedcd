"""How fast a model trains: tokens per second, MFU, peak memory and where a step's time goes, on random tokens.

It takes what training takes (Accelerate, bf16 autocast over float32 weights, fused AdamW, pinned batches that are read
ahead, one read of loss and norm a step) and needs no token store.
"""

import gc
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, IterableDataset

from triadic.models import TriadicConfig, TriadicForCausalLM, check_timeable, flops_per_token
from triadic.models.context import check_context, spread_context
from triadic.models.loading import load_config
from triadic.models.modeling_triadic import compile_layers
from triadic.origin import origin, versions
from triadic.training import engines, metrics, optim, parallel
from triadic.training.config import (
    BatchSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RunSettings,
    ScheduleSettings,
    TrainConfig,
)

PHASES = ("data", "forward", "backward", "optimizer")
UNTIMED = 2  # steps that compile and fill the caches
TRIAL = "configs/model/demo.json --lengths 256 --pass-tokens 1024 --steps 2 --eager"  # seconds on a CPU
LONGEST = 40  # kernels that a profile names
LONG = 32_768  # from this window on blocks are recomputed, unless said otherwise


@dataclass(frozen=True)
class Cell:
    """One measurement: a step of `accumulation` passes of `windows` windows on each group of `context` processes."""

    model: str  # a file of configs/model
    seq_len: int
    windows: int
    accumulation: int
    checkpointed: bool
    compiled: bool
    documents: int = 1  # of equal length in each window
    context: int = 1
    precision: str = "bf16"

    def __post_init__(self):
        for name in ("seq_len", "accumulation", "documents", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.seq_len % self.documents:
            raise ValueError(f"{self.documents} documents of equal length do not fill {self.seq_len} tokens")

    def settings(self, processes: int) -> TrainConfig:
        """The same as settings of a training run."""
        tokens = self.windows * self.accumulation * self.seq_len * processes // self.context
        return TrainConfig(
            model=ModelSettings(config=self.model),
            data=DataSettings(train="random", validation="random", seq_len=self.seq_len),
            run=RunSettings(output_dir="none", steps=1, precision=self.precision, trackers=[]),
            batch=BatchSettings(global_batch_tokens=tokens, micro_batch_windows=self.windows),
            schedule=ScheduleSettings(warmup_steps=0),
            parallel=ParallelSettings(context=self.context),
        )


def make_cells(
    models: list[str], lengths: list[int], pass_tokens: int, accumulation: int, checkpoint: str, **options: Any
) -> list[Cell]:
    """A cell for each model at each length, `pass_tokens` tokens to a pass; `checkpoint`: "auto", "on" or "off".

    Raises ValueError for sizes that cannot be measured.
    """
    return [
        Cell(
            model, length, max(pass_tokens // max(length, 1), 1), accumulation if length < LONG else 1,
            checkpoint == "on" or (checkpoint == "auto" and length >= LONG), **options,
        )
        for length, model in itertools.product(lengths, models)
    ]  # fmt: skip


class RandomWindows(IterableDataset):
    """Packed micro-batches without end, as triadic.data's `collate` makes them: part `part` of `parts` of each row."""

    def __init__(self, vocab_size: int, cell: Cell, seed: int, part: int, parts: int):
        self.vocab_size, self.cell, self.seed, self.part, self.parts = vocab_size, cell, seed, part, parts

    def __iter__(self) -> Iterator[dict[str, torch.Tensor | int]]:
        cell, generator = self.cell, torch.Generator().manual_seed(self.seed)
        tokens, longest = cell.windows * cell.seq_len, cell.seq_len // cell.documents
        bounds = torch.arange(0, tokens + 1, longest, dtype=torch.int32)
        positions = torch.arange(longest).repeat(tokens // longest)
        while True:
            ids = torch.randint(self.vocab_size, (tokens + 1,), generator=generator)
            rows = {"input_ids": ids[:-1], "shift_labels": ids[1:], "position_ids": positions}
            rows = {name: row.view(self.parts, -1)[self.part, None] for name, row in rows.items()}
            yield rows | {"cu_seq_lens_q": bounds, "max_length_q": longest}


class Clock:
    """Time of each phase, on the device's own clock where it has one."""

    def __init__(self, device: torch.device):
        self.device, self.marks = device, []

    def mark(self, phase: str | None = None) -> None:
        """The end of `phase`, or (None) the begin of a stretch."""
        if self.device.type != "cuda":
            self.marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((phase, event))

    def milliseconds(self) -> dict[str, float]:
        """Sum of each phase."""
        spent = dict.fromkeys(PHASES, 0.0)
        for (_, begin), (phase, end) in itertools.pairwise(self.marks):
            if phase is not None:
                spent[phase] += begin.elapsed_time(end) if self.device.type == "cuda" else (end - begin) * 1e3
        return spent


def measure(cell: Cell, steps: int, learning_rate: float = 1e-4, profile: bool = False) -> dict[str, Any]:
    """Train `steps` timed steps of a cell and return its row of the result file. Every process calls this.

    With `profile` one more step is watched: busy_ms is the time of all its kernels, kernels_ms of the longest, by name
    (on a CPU, of operators). A step_ms well above busy_ms waits for the host or other processes.

    Raises ValueError for a model config that cannot be read, or windows that cannot be shared.
    """
    model_config = load_config(cell.model)
    check_context(model_config, cell.context)
    accelerator = parallel.start(cell.settings(int(os.environ.get("WORLD_SIZE", 1))))
    device, processes = accelerator.device, accelerator.num_processes
    context = parallel.share_windows(accelerator, cell.context)
    model, optimizer = _prepare(cell, model_config, accelerator, context, learning_rate)
    group, part = divmod(accelerator.process_index, cell.context)
    source = RandomWindows(model_config.vocab_size, cell, group, part, cell.context)
    loader = DataLoader(source, batch_size=None, num_workers=1, prefetch_factor=4, pin_memory=device.type == "cuda")
    batches = iter(loader)
    begin = time.perf_counter()
    _step(cell, accelerator, model, optimizer, batches, Clock(device))
    first = time.perf_counter() - begin
    for _ in range(UNTIMED - 1):
        _step(cell, accelerator, model, optimizer, batches, Clock(device))
    clock = Clock(device)
    accelerator.wait_for_everyone()
    _synchronise(device)
    begin = time.perf_counter()
    losses = [_step(cell, accelerator, model, optimizer, batches, clock) for _ in range(steps)]
    _synchronise(device)
    seconds = (time.perf_counter() - begin) / steps
    tokens_per_s = cell.windows * cell.accumulation * cell.seq_len * processes / cell.context / seconds
    peak, _ = metrics.peak_flops(device, cell.precision, None)
    share = metrics.mfu(tokens_per_s, flops_per_token(model_config, cell.seq_len), peak, processes)
    phases = {f"{name}_ms": round(spent / steps, 2) for name, spent in clock.milliseconds().items()}
    row = describe(cell, model_config, accelerator) | {
        "tokens_per_s": round(tokens_per_s, 1), "mfu": None if share is None else round(share, 4),
        "peak_gib": round(metrics.peak_gib(device), 2), "step_ms": round(seconds * 1e3, 2), **phases,
        "first_step_s": round(first, 1), "loss": round(losses[-1], 4),
    }  # fmt: skip
    if profile:
        row |= _watched(partial(_step, cell, accelerator, model, optimizer, batches, Clock(device)), device)
    del model, optimizer, batches, loader
    return row


def describe(cell: Cell, config: TriadicConfig, accelerator: Accelerator) -> dict[str, Any]:
    """The columns that say what was measured."""
    return {
        "what": "train", "model": Path(cell.model).stem, "E": config.second_key_dim, "T": cell.seq_len,
        "gpus": accelerator.num_processes, "engine": engines.name_of(accelerator), "context": cell.context,
        "windows": cell.windows, "accumulation": cell.accumulation, "documents": cell.documents,
        "compiled": cell.compiled, "checkpointed": cell.checkpointed, "precision": cell.precision,
    }  # fmt: skip


def _prepare(cell, model_config, accelerator, context, learning_rate):
    """Model and optimizer as `assemble` makes them, the weights drawn on the device."""
    torch.manual_seed(0)
    with torch.device(accelerator.device):
        model = TriadicForCausalLM._from_config(model_config, dtype=torch.float32).train()
    if cell.checkpointed:  # transformers 5.24 renamed the method
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if cell.compiled:
        compile_layers(model)
    optimizer = optim.build_optimizer(model, OptimizerSettings(learning_rate))
    if context is not None:
        spread_context(model, context)
    return engines.prepare(accelerator, model, optimizer, cell.precision)


def _step(cell, accelerator, model, optimizer, batches, clock) -> float:
    """One optimizer step, as loop.py makes it; returns the loss."""
    clock.mark()
    engine, losses, share = engines.of(accelerator), [], cell.windows * cell.accumulation * cell.seq_len / cell.context
    for i in range(cell.accumulation):
        batch = {
            name: value.to(accelerator.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in next(batches).items()
        }
        clock.mark("data")
        with engine.micro_batch(accelerator, model, i == cell.accumulation - 1):
            loss = model(**batch, num_items_in_batch=share, use_cache=False).loss
            clock.mark("forward")
            engine.backward(accelerator, model, loss)
            clock.mark("backward")
        losses.append(loss.detach())
    norm = engine.clip(accelerator, model, 1.0)
    total, norm = parallel.total(accelerator, torch.stack(losses).sum(), norm).tolist()
    if not math.isfinite(total + norm):
        raise ValueError(f"the loss ({total}) or the gradient norm ({norm}) is not finite")
    optimizer.step()
    optimizer.zero_grad()
    clock.mark("optimizer")
    return total / accelerator.num_processes


def _watched(step, device) -> dict[str, Any]:
    """busy_ms and kernels_ms of one call of `step`."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        step()
        _synchronise(device)
    spent = {}
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        spent[event.key[:80]] = spent.get(event.key[:80], 0.0) + microseconds / 1e3
    longest = sorted(spent.items(), key=lambda item: -item[1])[:LONGEST]
    return {"busy_ms": round(sum(spent.values()), 2), "kernels_ms": {name: round(ms, 3) for name, ms in longest}}


def _synchronise(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(
    cells: list[Cell], steps: int, seconds: float | None, out: Path, command: str, profile: bool = False
) -> dict[str, Any]:
    """Measure cells in order and keep the result file up to date; none is begun after `seconds` seconds.

    What does not fit into the memory, or fails otherwise on the device, leaves a row that says so. Raises ValueError
    for a model config that cannot be read, and where there is no GPU for a large model, OSError for a file that cannot
    be written, all before the first measurement.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    for path in dict.fromkeys(cell.model for cell in cells):
        check_timeable(load_config(path), path, TRIAL)
    begin, result = time.monotonic(), origin(command) | {"versions": versions(), "rows": []}
    main = int(os.environ.get("RANK", 0)) == 0
    if main:
        out.write_text(json.dumps(result, indent=1) + "\n")
    for cell in cells:
        if seconds is not None and broadcast_object_list([time.monotonic() - begin])[0] > seconds:
            result["left_out"] = [f"{Path(c.model).stem} at {c.seq_len}" for c in cells[len(result["rows"]) :]]
            break
        try:
            row = measure(cell, steps, profile=profile)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            named = {"what": "train", "model": Path(cell.model).stem, "T": cell.seq_len, "compiled": cell.compiled}
            row = named | {"error": f"{type(error).__name__}: {error}"[:300]}
        result["rows"].append(row)
        _release()
        if main:
            out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(row), flush=True)
    if main:
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _release() -> None:
    """Give the memory of a cell back before the next one counts its own."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
