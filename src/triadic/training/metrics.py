"""What a run reports: a progress bar, a line per interval, log.jsonl, trackers, loss.png."""

import json
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedConfig

from triadic import settings
from triadic.models import flops_per_token
from triadic.training.config import TrainConfig
from triadic.training.run_folder import write_atomically

# Dense bf16 peaks in TFLOP/s, by a part of the device's name; the first match counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
    "MI300X": 1307.4,
}


def peak_flops(device: torch.device, precision: str, tflops: float | None) -> tuple[float | None, str]:
    """FLOP/s that one device could do, and if that is not known, why."""
    if tflops is not None:
        return tflops * 1e12, ""
    if device.type != "cuda":
        return None, f"MFU is not reported: no peak is known for the device {device.type}; set run.peak_tflops"
    if precision != "bf16":
        return None, "MFU is not reported: the table of peaks is for bf16; set run.peak_tflops"
    name = torch.cuda.get_device_name(device)
    for part, peak in PEAK_TFLOPS.items():
        if part in name:
            return peak * 1e12, ""
    return None, f"MFU is not reported: no peak is known for {name!r}; set run.peak_tflops"


def mfu(tokens_per_s: float, flops_per_token: float, peak: float | None, devices: int) -> float | None:
    """Model FLOP/s over the peak of all devices; recomputation in the backward is not counted as work."""
    return None if peak is None else tokens_per_s * flops_per_token / (peak * devices)


def peak_gib(device: torch.device) -> float:
    """Peak memory so far: allocated on the GPU, or resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Meter:
    """Speed since the last lap, pauses (validation, saving) left out. `note` says why there is no MFU, if so."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, model: PreTrainedConfig):
        self.tokens_per_step = config.batch.global_batch_tokens
        self.flops_per_token = flops_per_token(model, config.data.seq_len)
        self.device, self.devices = accelerator.device, accelerator.num_processes
        self.peak, self.note = peak_flops(self.device, config.run.precision, config.run.peak_tflops)
        self._begin, self._steps, self._paused = time.perf_counter(), 0, 0.0

    def step(self) -> None:
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begin

    def lap(self, steps_left: int) -> dict:
        """The columns of log.jsonl that tell speed and memory; begins the next lap."""
        now = time.perf_counter()
        seconds = (now - self._begin - self._paused) / self._steps
        self._begin, self._steps, self._paused = now, 0, 0.0
        tokens_per_s = self.tokens_per_step / seconds
        return {
            "tokens_per_s": tokens_per_s,
            "mfu": mfu(tokens_per_s, self.flops_per_token, self.peak, self.devices),
            "peak_gib": peak_gib(self.device),
            "eta_s": steps_left * seconds,
        }


class Spikes:
    """Finds losses far above those before: more than `deviations` standard deviations over the mean of the last
    `window` steps. The training goes on; a report tells where to look."""

    def __init__(self, window: int = 100, deviations: float = 6.0):
        self.deviations, self._losses = deviations, deque(maxlen=window)

    def look(self, loss: float) -> str:
        """What is remarkable about the next step's loss, or an empty text."""
        before, found = list(self._losses), ""
        if len(before) >= self._losses.maxlen // 5:
            mean = statistics.fmean(before)
            spread = max(statistics.pstdev(before), 0.01 * abs(mean))  # a flat curve makes no spike of every wobble
            if loss - mean > self.deviations * spread:
                found = (
                    f"loss {loss:.4f} lies {(loss - mean) / spread:.1f} standard deviations above the mean "
                    f"{mean:.4f} of the {len(before)} steps before"
                )
        self._losses.append(loss)
        return found


class Reporter:
    """Writes on rank 0 and is silent elsewhere. A tracker that fails is dropped with a message, the run goes on."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, first_step: int):
        folder = Path(config.run.output_dir)
        self.log_file, self.plot_file = folder / "log.jsonl", folder / "loss.png"
        self.main = accelerator.is_main_process
        hide = None if self.main else True  # None: a terminal shows the bar, a file or pipe gets the lines alone
        self.bar = tqdm(total=config.run.steps, initial=first_step, unit="step", dynamic_ncols=True, disable=hide)
        self.trackers = []
        if self.main:
            _forget_after(self.log_file, first_step)
        if config.run.trackers:
            accelerator.init_trackers(
                "triadic",
                config=_flat(settings.to_dict(config)),
                init_kwargs={"tensorboard": {"purge_step": first_step + 1}},
            )
            self.trackers = list(accelerator.trackers) if self.main else []

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
        for tracker in list(self.trackers):
            self._track(tracker.finish)

    def say(self, message: str) -> None:
        """A line on the screen; an empty one is left out."""
        if self.main and message:
            self.bar.write(message)
            sys.stdout.flush()

    def saved(self, path: str | None) -> None:
        """Say that a checkpoint is complete."""
        self.say(f"saved {path}" if path else "")

    def advance(self) -> None:
        self.bar.update()

    def record(self, row: dict) -> None:
        """One row to log.jsonl, the trackers and the screen; the keys are those of `describe`."""
        if not self.main:
            return
        with open(self.log_file, "a") as file:
            file.write(json.dumps(row) + "\n")
        for tracker in list(self.trackers):
            values = {key: value for key, value in row.items() if key != "step" and value is not None}
            self._track(tracker.log, values, step=row["step"])
        self.say(describe(row, self.bar.total))

    def plot(self) -> None:
        if self.main:
            plot_losses(read_log(self.log_file), self.plot_file)

    def _track(self, method, *arguments, **named) -> None:
        try:
            method(*arguments, **named)
        except Exception as error:
            tracker = method.__self__
            self.trackers.remove(tracker)
            self.say(f"the tracker {tracker.name} failed and is off from here: {type(error).__name__}: {error}")


def describe(row: dict, steps: int) -> str:
    """A row of the log as a line for people."""
    head = f"step {row['step']:>{len(str(steps))}}/{steps}"
    if "val_loss" in row:
        return f"{head} | validation loss {row['val_loss']:.4f} over {row['val_tokens']:,} tokens"
    utilisation = "" if row["mfu"] is None else f" | mfu {row['mfu']:.1%}"
    return (
        f"{head} | {row['tokens'] / 1e6:.2f}M tokens | epoch {row['epoch']:.2f} | loss {row['loss']:.4f} | "
        f"lr {row['lr']:.2e} | norm {row['grad_norm']:.3f} | {row['tokens_per_s']:,.0f} tok/s{utilisation} | "
        f"{row['peak_gib']:.1f} GiB | eta {timedelta(seconds=round(row['eta_s']))}"
    )


def read_log(path: Path) -> list[dict]:
    """The rows of log.jsonl; what a crash has torn is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def plot_losses(rows: list[dict], path: Path) -> None:
    """Draw training and validation loss over tokens as a PNG."""
    training = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "val_loss" in row]
    if not training and not validation:
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([row["tokens"] for row in training], [row["loss"] for row in training], lw=1, label="training")
    axes.plot(
        [row["tokens"] for row in validation], [row["val_loss"] for row in validation], "o-", ms=4, label="validation"
    )
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _forget_after(log_file: Path, step: int) -> None:
    """Drop rows beyond the step that the run resumes from: they are about to be written again."""
    rows = [row for row in read_log(log_file) if row["step"] <= step]
    write_atomically(log_file, "".join(json.dumps(row) + "\n" for row in rows))


def _flat(tree: dict, prefix: str = "") -> dict:
    """Nested settings as {"a.b": plain value}, what trackers take."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return flat
