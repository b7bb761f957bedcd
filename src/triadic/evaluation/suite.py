"""Run the parts of a suite on one checkpoint: measured once, resumed after a kill, reported in files."""

import importlib
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState

from triadic import settings
from triadic.evaluation import report
from triadic.evaluation.config import CHECKS, ChecksConfig, SuiteConfig
from triadic.evaluation.journal import Journal, rank, share, write_json
from triadic.evaluation.loading import Checkpoint, load_checkpoint

# Each module has check(context, its section of the suite) -> fingerprints of the data it reads, which raises ValueError
# for what cannot be measured, and measure(context, section) -> rows.
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
    _lm: Any = field(default=None, repr=False)

    def data(self, kind: str) -> str:
        """Path of the "train" or "validation" text; raises ValueError if neither the suite nor a run names one."""
        path = getattr(self.suite.data, kind) or self.checkpoint.run.get(kind)
        if path is None:
            raise ValueError(
                f"{self.checkpoint.name} lies in no run folder, so its {kind} text is unknown; give data.{kind}=PATH"
            )
        return path

    def lm(self) -> Any:
        """The checkpoint behind lm-eval's interface; made on first use, since lm-eval takes seconds to import."""
        if self._lm is None:
            from triadic.evaluation.harness import TriadicLM

            logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are errors here, or about its own CLI
            options = settings.to_dict(self.suite.model)
            self._lm = TriadicLM(self.checkpoint, **{k: options[k] for k in ("add_bos", "batch_size", "batch_tokens")})
        return self._lm


def evaluate(
    name: str, suite: SuiteConfig, output: str | Path, *, overwrite: bool = False, command: str = ""
) -> dict[str, Any]:
    """Evaluate the checkpoint `name` and write results.json, results.md and figures into `output`.

    Finished steps found in `output` are not computed again. Returns what results.json holds. Raises ValueError in
    one sentence for a checkpoint, suite or output folder that cannot be used.
    """
    modules = {part: _module(part) for part in suite.parts()}
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        PartialState()  # started by accelerate launch or torchrun: join the other processes, take this one's device
    checkpoint = load_checkpoint(name, suite.model)
    versions = report.versions()
    identity = {"checkpoint": checkpoint.facts(), "suite": settings.to_dict(suite), "versions": versions}
    context = Context(checkpoint, suite)
    identity["data"] = {part: modules[part].check(context, section) for part, section in suite.parts().items()}
    context.journal = Journal(output, identity, overwrite)
    facts = {"model": name, "tokens": checkpoint.run.get("tokens"), "seed": checkpoint.run.get("seed")}
    rows, seconds = [], {}
    for part, section in suite.parts().items():
        start = time.perf_counter()
        rows += [facts | {"part": part} | row for row in modules[part].measure(context, section)]
        seconds[part] = round(time.perf_counter() - start, 2)
    results = {
        **report.origin(command),
        **identity,
        "seconds": seconds,
        "checks": checks(rows, suite.checks),
        "rows": rows,
    }
    if rank() == 0:
        write_json(Path(output) / "results.json", results)
        report.write_markdown(Path(output))
        report.draw(Path(output))
    share(lambda: None)
    return results


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
        if metric == "context_gain":  # without a standard error (one document only) nothing is shown
            value = None if row["se"] is None else value / row["se"]
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
