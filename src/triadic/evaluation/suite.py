"""Run the parts of a suite on one checkpoint: measured once, resumed after a kill, reported in files."""

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from triadic import origin as provenance
from triadic import settings
from triadic.evaluation import figures, report
from triadic.evaluation.batching import Batches
from triadic.evaluation.config import CHECKS, ChecksConfig, SuiteConfig
from triadic.evaluation.journal import Journal, rank, share, write_json
from triadic.evaluation.loading import Checkpoint, load_checkpoint

# Each module has check(context, its section of the suite) -> fingerprints of the data it reads, which raises ValueError
# for what cannot be measured, and measure(context, section) -> rows. Where steps need more, before the first of them:
# ready(context, section) raises ValueError if one that is to be run cannot be, and prepare(context, section) makes what
# they read in the output folder. fetch(section) does what needs no checkpoint: ValueError if data cannot be had.
PARTS = {
    "perplexity": "triadic.evaluation.perplexity",
    "wikitext": "triadic.evaluation.wikitext",
    "zeroshot": "triadic.evaluation.zeroshot",
    "recall": "triadic.evaluation.recall",
    "ruler": "triadic.evaluation.ruler",
    "mqar": "triadic.evaluation.mqar",
    "sample": "triadic.evaluation.sampling",
}


@dataclass
class Context:
    """What every part may use."""

    checkpoint: Checkpoint
    suite: SuiteConfig
    journal: Journal | None = None  # there once every part has been checked
    kept: dict[str, Any] = field(default_factory=dict, repr=False)  # what a part's check has read for its measure
    _lm: Any = field(default=None, repr=False)
    _batches: dict[int, Batches] = field(default_factory=dict, repr=False)

    def data(self, kind: str) -> str:
        """Path of the "train" or "validation" text; raises ValueError if neither the suite nor a run names one."""
        path = getattr(self.suite.data, kind) or self.checkpoint.run.get(kind)
        if path is None:
            raise ValueError(
                f"{self.checkpoint.name} lies in no run folder, so its {kind} text is unknown; give data.{kind}=PATH"
            )
        return path

    def batches(self, checkpoint: Checkpoint) -> Batches:
        """The limits of a batch for this checkpoint (the evaluated one, or a baseline)."""
        options = self.suite.model
        key = id(checkpoint.model)
        if key not in self._batches:
            self._batches[key] = Batches(checkpoint.model, options.batch_size, options.batch_tokens)
        return self._batches[key]

    def batch_limits(self) -> dict[str, int] | None:
        """The limits that the evaluated checkpoint's batches have come to; None if none was needed."""
        batches = self._batches.get(id(self.checkpoint.model))
        return None if batches is None else {"sequences": batches.sequences, "tokens": batches.tokens}

    def lm(self) -> Any:
        """The checkpoint behind lm-eval's interface; made on first use, since lm-eval takes seconds to import."""
        if self._lm is None:
            from triadic.evaluation.harness import TriadicLM

            logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are errors here, or about its own CLI
            batches = self.batches(self.checkpoint)
            self._lm = TriadicLM(self.checkpoint, batches, add_bos=self.suite.model.add_bos)
        return self._lm


def evaluate(
    name: str | Checkpoint, suite: SuiteConfig, output: str | Path, *, overwrite: bool = False, command: str = ""
) -> dict[str, Any]:
    """Evaluate the checkpoint `name` and write results.json, results.md, timing.json and figures into `output`.

    Finished steps found in `output` are not computed again: results.json does not depend on how often it was stopped.
    Returns what it holds. Raises ValueError in one sentence for a checkpoint, suite or output folder that cannot be
    used.
    """
    modules = {part: _module(part) for part in suite.parts()}
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        PartialState()  # started by accelerate launch or torchrun: join the other processes, take this one's device
    checkpoint = name if isinstance(name, Checkpoint) else load_checkpoint(name, suite.model)
    versions = provenance.versions()
    identity = {"checkpoint": checkpoint.facts(), "suite": settings.to_dict(suite), "versions": versions}
    context = Context(checkpoint, suite)
    identity["data"] = {part: modules[part].check(context, section) for part, section in suite.parts().items()}
    context.journal = Journal(output, identity, overwrite)
    _each(modules, "ready", context)
    origin = context.journal.once("origin", lambda: provenance.origin(command))
    now = share(provenance.commit)
    if now != origin["commit"]:
        origin["commit"] = f"{origin['commit']}, resumed at {now}"
    facts = {"model": checkpoint.name, "tokens": checkpoint.run.get("tokens"), "seed": checkpoint.run.get("seed")}
    rows, timing = [], {part: {"seconds": 0.0} for part in modules}
    _each(modules, "prepare", context, timing)
    for part, section in suite.parts().items():
        with _timed(timing, part):
            rows += [facts | {"part": part} | row for row in modules[part].measure(context, section)]
    results = {**origin, **identity, "checks": checks(rows, suite.checks), "rows": rows}
    if rank() == 0:
        write_json(Path(output) / "timing.json", {"parts": timing, "batch": context.batch_limits()})
        write_json(Path(output) / "results.json", results)
        report.write_markdown(Path(output))
        figures.draw(Path(output))
    share(lambda: None)
    return results


def fetch(suite: SuiteConfig) -> list[str]:
    """Read, or fetch into the hub's cache, what the parts of a suite need of data that no training makes; their names.

    Raises ValueError in one sentence for data, tasks, metrics or packages that cannot be had.
    """
    modules = {part: _module(part) for part in suite.parts()}
    parts = [part for part, module in modules.items() if hasattr(module, "fetch")]
    for part in parts:
        modules[part].fetch(suite.parts()[part])
    return parts


def _each(modules: dict[str, Any], function: str, context: Context, timing: dict | None = None) -> None:
    """Call this function of every part that has it."""
    for part, section in context.suite.parts().items():
        if hasattr(modules[part], function):
            with contextlib.nullcontext() if timing is None else _timed(timing, part):
                getattr(modules[part], function)(context, section)


@contextlib.contextmanager
def _timed(timing: dict[str, dict[str, float]], part: str) -> Iterator[None]:
    """Adds seconds of a part in this process, of what was not finished before; and the peak of its allocated memory."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    timing[part]["seconds"] = round(timing[part]["seconds"] + time.perf_counter() - start, 2)
    if gpu:
        timing[part]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)


def checks(rows: list[dict[str, Any]], wanted: ChecksConfig) -> list[dict[str, Any]]:
    """Each check the suite asks for: its figure, what it must reach, and whether it does."""
    own = {row["metric"]: row for row in reversed(rows)}  # the evaluated model's rows come before a baseline's
    out = []
    for field_name, (metric, _, title) in CHECKS.items():
        least = getattr(wanted, field_name)
        if least is None:
            continue
        row = own[metric]
        value = row["value"]
        if metric == "context_gain":  # without a standard error (one document or bucket only) nothing is shown
            value = value / row["se"] if row["se"] else None
        passed = value is not None and value >= least
        out.append({"name": title, "metric": metric, "value": value, "at_least": least, "passed": passed})
    return out


def _module(part: str) -> Any:
    try:
        return importlib.import_module(PARTS[part])
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the part {part} needs {error.name}, which is not installed: pip install -e '.[eval]' in the repository"
        ) from error
