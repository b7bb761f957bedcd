"""Recall: greedy completions of six data sets in the form of Arora et al., and their unweighted mean.

An answer counts if it occurs in at most 48 tokens up to the end of the line, whatever its case. See recall_tasks.py
for the prompts and for how texts are cut.
"""

import functools
import hashlib
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from triadic import settings
from triadic.evaluation.config import RecallConfig
from triadic.evaluation.documents import file_hash, local_file
from triadic.evaluation.harness import check_end, check_fits, run_task, seed
from triadic.evaluation.recall_tasks import TASKS, contains, read

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context

FOLDER = Path(__file__).parent / "tasks"
NEW_TOKENS = 48


def check(context: "Context", config: RecallConfig) -> dict[str, str]:
    """Raise ValueError for unknown tasks, missing local files, and texts longer than the model takes."""
    _known(config)
    limit = context.checkpoint.max_length
    if limit is not None and config.context_length > limit:
        raise ValueError(
            f"recall.context_length is {config.context_length}, but {context.checkpoint.name} takes at most {limit} "
            "tokens; lower it, or raise model.max_length if the model can extrapolate"
        )
    check_end(context.checkpoint)
    if config.folder is None:
        return {}  # the prompts' hashes are in the rows
    return {task: file_hash(local_file(config.folder, task, "recall.folder")) for task in config.tasks}


def _known(config: RecallConfig) -> None:
    unknown = [task for task in config.tasks if task not in TASKS]
    if unknown:
        raise ValueError(f"recall.tasks names {', '.join(unknown)}; the recall tasks are {', '.join(TASKS)}")


def fetch(config: RecallConfig) -> None:
    """Raise ValueError for unknown tasks, and for data that cannot be had or used."""
    _known(config)
    for task in config.tasks:
        for _ in read(task, config.folder, config.nq):  # to the end, so that a bad row is found
            pass


def ready(context: "Context", config: RecallConfig) -> None:
    """Load what is to be run; raises ValueError for data that cannot be had and prompts that the model cannot take."""
    for task in config.tasks:
        if not context.journal.has(f"recall-{task}"):
            loaded = load(context.lm(), task, config)
            check_fits(context.lm(), loaded, config.samples, "lower recall.context_length")
            context.kept[f"recall-{task}"] = loaded


def measure(context: "Context", config: RecallConfig) -> list[dict[str, Any]]:
    """One row for each task, and with all six of them one with their unweighted mean."""

    def run(task: str) -> dict[str, Any] | None:
        return score(context.lm(), task, config, context.kept.pop(f"recall-{task}", None))

    rows = [context.journal.once(f"recall-{task}", functools.partial(run, task)) for task in config.tasks]
    if set(config.tasks) == set(TASKS):
        mean = statistics.fmean(row["value"] for row in rows)
        rows.append({"metric": "recall_mean", "value": mean, "context_length": config.context_length})
    return rows


def load(lm: LM, task: str, config: RecallConfig) -> Task:
    """The task with its prompts, cut by the model's tokenizer; raises ValueError if its data cannot be had."""
    seed()
    return _manager(lm, config).load([f"recall_{task}"])["tasks"][f"recall_{task}"]


def _manager(lm: LM, config: RecallConfig) -> TaskManager:
    options = settings.to_dict(config)
    metadata = {key: options[key] for key in ("context_length", "centre", "nq", "folder")}
    return TaskManager(
        include_path=str(FOLDER), include_defaults=False, metadata=metadata | {"tokenizer": lm.tokenizer.name_or_path}
    )


def score(lm: LM, task: str, config: RecallConfig, loaded: Task | None = None) -> dict[str, Any] | None:
    """Run one task, `loaded` already or not, on any lm-eval model; None in all processes but the first.

    Raises ValueError if its data cannot be had or a prompt is not what the model was given.
    """
    loaded = load(lm, task, config) if loaded is None else loaded
    found = run_task(lm, loaded, _manager(lm, config), config.samples)
    if found is None:
        return None
    samples = sorted(found["samples"][f"recall_{task}"], key=lambda sample: sample["doc_id"])
    for sample in samples:
        if sample["arguments"][0][0] != sample["doc"]["prompt"]:
            raise ValueError(f"document {sample['doc']['doc_id']} of {task} did not reach the model as it is")
    scores = [sample["contains"] for sample in samples]
    answered = [contains(sample["doc"]["prompt"], sample["doc"]["answers"]) for sample in samples]
    lines = "".join(json.dumps(sample["doc"], sort_keys=True) + "\n" for sample in samples)
    return {
        "metric": "recall",
        "task": task,
        "value": statistics.fmean(scores),
        "se": statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None,
        "samples": len(scores),
        "context_length": config.context_length,
        "centre": config.centre,
        "cut": sum(sample["doc"]["cut"] for sample in samples),
        "answer_in_prompt": sum(answered),
        "data": "local files" if config.folder is not None else TASKS[task].hub.format(nq=config.nq),
        "task_version": found["versions"][f"recall_{task}"],
        "prompts_sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }
