"""Train a grid of recall models, several at a time: python run.py --config small.yaml --output FILE [a.b=value ...]

Each run is a row of FILE as soon as it is done; the same command goes on where an earlier one stopped. With several
GPUs the processes take them in turn. Within a seed, runs near `transition` x E come first: there the curves fall, far
from there they are 1 or 0. `reach` leaves the far ones out, and none begins later than `seconds`.
"""

import argparse
import collections
import dataclasses
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from triadic import settings
from triadic.evaluation import mqar
from triadic.evaluation.journal import write_json
from triadic.origin import origin, versions


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every N x E x seed of one training configuration, or those whose N is near `transition` x E."""

    pairs: list[int]
    slices: list[int]
    seeds: int
    training: mqar.MqarTraining
    processes: int = 1  # at a time
    transition: float = 90.0  # about N at 50 % accuracy with E = 1
    reach: float | None = None  # doublings of N from there that are trained; null: all
    seconds: float | None = None  # after which no further run begins; null: no limit

    def __post_init__(self):
        for name in ("pairs", "slices"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) != len(values):
                raise ValueError(f"{name} must be different numbers of at least 1, one or more of them, not {values}")
        for name in ("seeds", "processes", "transition", "reach", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value} but must be above 0{', or null' if name[0] in 'rs' else ''}")
        if not self.runs():  # which raises if there can be no such run
            raise ValueError(f"reach ({self.reach}) leaves no run near {self.transition} x E; raise it, or give null")

    def runs(self) -> list[mqar.MqarConfig]:
        """The runs: seeds outermost, then from the transition outwards; of two as far, the longer sequences first."""

        def distance(pairs, slices):
            return round(abs(math.log2(pairs / (self.transition * slices))), 6)

        points = [
            (distance(pairs, slices), -pairs, slices)
            for pairs in self.pairs
            for slices in self.slices
            if self.reach is None or distance(pairs, slices) <= self.reach
        ]
        return [
            mqar.one_run(self.training, -pairs, slices, seed)
            for seed in range(self.seeds)
            for _, pairs, slices in sorted(points, key=lambda point: point[:2])
        ]


def work(config: mqar.MqarConfig, index: int) -> dict:
    """One run, on the GPU that is its turn."""
    gpus = torch.cuda.device_count()
    name = f"N={config.pairs} E={config.slices} seed={config.seed}"

    def log(entry: dict) -> None:
        print(
            f"{name} | step {entry['step']}/{config.steps} | N {entry['pairs']} | loss {entry['loss']:.4f}", flush=True
        )

    return mqar.train(config, f"cuda:{index % gpus}" if gpus else "cpu", log)


def finished(grid: Grid, configs: list[mqar.MqarConfig]) -> Iterator[dict]:
    """Rows of the runs as they end; a single process is this one."""
    over = math.inf if grid.seconds is None else time.monotonic() + grid.seconds
    waiting, running = collections.deque(enumerate(configs)), set()
    if grid.processes == 1:
        while waiting and time.monotonic() < over:
            index, config = waiting.popleft()
            yield work(config, index)
        return
    with ProcessPoolExecutor(grid.processes, multiprocessing.get_context("spawn")) as pool:
        while True:
            while waiting and len(running) < grid.processes and time.monotonic() < over:
                index, config = waiting.popleft()
                running.add(pool.submit(work, config, index))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)


def read(output: Path) -> dict:
    """What an earlier call has left; raises ValueError if that is no result file of this program."""
    try:
        result = json.loads(output.read_text())
    except (OSError, ValueError):
        result = None
    if not isinstance(result, dict) or not result.keys() >= {"training", "rows"}:
        raise ValueError(f"{output} is no result file of this program; name another --output or remove it")
    return result


def run(grid: Grid, output: Path, command: str, commit: str | None = None) -> dict:
    """Train what `output` does not hold yet and return its content.

    Raises ValueError if `output` was made with another training configuration, is something else or cannot be written.
    """
    training = settings.to_dict(grid.training)
    result = read(output) if output.exists() else {"training": training, "rows": []}
    if {name: result["training"].get(name) for name in training} != training:
        raise ValueError(f"{output} holds runs of another configuration; name another --output or remove it")
    done = [row for row in result["rows"] if row["metric"] == "accuracy"]
    missing = [c for c in grid.runs() if (c.pairs, c.slices, c.seed) not in {(r["N"], r["E"], r["seed"]) for r in done}]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    header = origin(command) | {"device": device, "versions": versions(), "training": training}
    header["commit"] = commit or header["commit"]
    if missing:  # a disk that refuses does so before the first run
        write_json(output, header | {"rows": result["rows"]})
    count = 0
    for count, row in enumerate(finished(grid, missing), 1):
        done.append(row)
        print(f"{count}/{len(missing)}: {row}", flush=True)
        result = header | {"rows": done + list(mqar.summarize(done, grid.training))}
        write_json(output, result)
    if count < len(missing):
        print(f"{len(missing) - count} runs have not begun; the same command goes on with them", flush=True)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a grid, such as small.yaml beside this program")
    parser.add_argument("--output", required=True, type=Path, help="result file")
    parser.add_argument("--commit", help="where the repository's history is not at hand")
    parser.add_argument("settings", nargs="*", metavar="a.b=value", help="settings to change")
    args = parser.parse_intermixed_args()
    try:
        grid = settings.load(Grid, args.config, args.settings)
        run(grid, args.output, " ".join(["python", *sys.argv]), args.commit)
    except ValueError as error:
        sys.exit(f"error: {error}")
