"""Train a grid of recall models, several at a time: python run.py --config small.yaml --output FILE [a.b=value ...]

Each run is a row of FILE as soon as it is done; the same command goes on where an earlier one stopped. With several
GPUs the processes take them in turn.
"""

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from triadic import settings
from triadic.evaluation import mqar
from triadic.origin import origin, versions


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every N x E x seed of one training configuration."""

    pairs: list[int]
    slices: list[int]
    seeds: int
    training: mqar.MqarConfig
    processes: int = 1  # at a time

    def runs(self) -> list[mqar.MqarConfig]:
        """The runs, longest sequences first so that the last process does not end alone; seeds outermost."""
        return [
            dataclasses.replace(self.training, pairs=pairs, slices=slices, seed=seed)
            for seed in range(self.seeds)
            for pairs in sorted(self.pairs, reverse=True)
            for slices in self.slices
        ]


def work(config: mqar.MqarConfig, index: int) -> dict:
    """One run, in a process of its own."""
    gpus = torch.cuda.device_count()
    name = f"N={config.pairs} E={config.slices} seed={config.seed}"

    def log(entry: dict) -> None:
        print(
            f"{name} | step {entry['step']}/{config.steps} | N {entry['pairs']} | loss {entry['loss']:.4f}", flush=True
        )

    return mqar.train(config, f"cuda:{index % gpus}" if gpus else "cpu", log)


def finished(processes: int, configs: list[mqar.MqarConfig]) -> Iterator[dict]:
    """Rows of the runs as they end; a single process is this one."""
    if processes == 1:
        yield from map(work, configs, range(len(configs)))
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(work, config, index) for index, config in enumerate(configs)]):
            yield future.result()


def run(grid: Grid, output: Path, command: str) -> dict:
    """Train what `output` does not hold yet and return its content.

    Raises ValueError if `output` was made with another training configuration.
    """
    training = settings.to_dict(grid.training)
    result = json.loads(output.read_text()) if output.is_file() else {"training": training, "rows": []}
    if result["training"] != training:
        raise ValueError(f"{output} holds runs of another configuration; name another --output or remove it")
    done = [row for row in result["rows"] if row["metric"] == "accuracy"]
    missing = [c for c in grid.runs() if (c.pairs, c.slices, c.seed) not in {(r["N"], r["E"], r["seed"]) for r in done}]
    output.parent.mkdir(parents=True, exist_ok=True)
    header = origin(command) | {"versions": versions(), "training": training}
    for count, row in enumerate(finished(grid.processes, missing), 1):
        done.append(row)
        print(f"{count}/{len(missing)}: {row}", flush=True)
        result = header | {"rows": done + list(mqar.summarize(done, grid.training))}
        output.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a grid, such as small.yaml beside this program")
    parser.add_argument("--output", required=True, type=Path, help="result file")
    parser.add_argument("settings", nargs="*", metavar="a.b=value", help="settings to change")
    args = parser.parse_intermixed_args()
    try:
        run(settings.load(Grid, args.config, args.settings), args.output, " ".join(["python", *sys.argv]))
    except ValueError as error:
        sys.exit(f"error: {error}")
