"""Zero-shot tasks of lm-eval, from the hub or from local files, and their unweighted mean."""

import contextlib
import functools
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from datasets.exceptions import DatasetsError
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from triadic.evaluation.config import ZeroshotConfig
from triadic.evaluation.documents import file_hash, local_file, read_rows
from triadic.evaluation.harness import check_fits, run_task, seed
from triadic.evaluation.recall_tasks import row_place
from triadic.models.loading import one_line

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context

COLUMNS = {  # of the shipped suite's tasks, those that lm-eval reads
    "lambada_openai": "text",
    "hellaswag": "activity_label, ctx_a, ctx_b, endings, label",
    "piqa": "goal, sol1, sol2, label",
    "arc_easy": "question, choices, answerKey",
    "arc_challenge": "question, choices, answerKey",
    "winogrande": "sentence, option1, option2, answer",
    "openbookqa": "question_stem, choices, answerKey",
    "sciq": "support, question, distractor1, distractor2, distractor3, correct_answer",
    "boolq": "passage, question, label",
    "copa": "premise, choice1, choice2, question, label",
}
FOREIGN = (ValueError, TypeError, SyntaxError, AttributeError, IndexError)  # what a task says of other data's columns


@functools.cache
def stock_tasks() -> TaskManager:
    """All of lm-eval's tasks (their index takes seconds to make)."""
    return TaskManager()


def check(context: "Context", config: ZeroshotConfig) -> dict[str, str]:
    """Raise ValueError for tasks that lm-eval does not ship, and for local files that are missing."""
    _known(config)
    if config.folder is None:
        return {}  # the hub's data go under the task's version
    return {task: file_hash(local_file(config.folder, task, "zeroshot.folder")) for task in config.metrics}


def _known(config: ZeroshotConfig) -> None:
    unknown = [task for task in config.metrics if task not in stock_tasks().all_subtasks]
    if unknown:
        raise ValueError(f"zeroshot.metrics names {', '.join(unknown)}, which lm-eval does not ship")


def fetch(config: ZeroshotConfig) -> None:
    """Raise ValueError for tasks and metrics that lm-eval does not ship, and for data that cannot be had or used."""
    _known(config)
    for task, metric in config.metrics.items():
        _loaded(task, metric, config)


def ready(context: "Context", config: ZeroshotConfig) -> None:
    """Load what is to be run; raises ValueError for unknown metrics, data not to be had, texts that are too long."""
    for task, metric in config.metrics.items():
        if context.journal.has(task):
            continue
        loaded = _loaded(task, metric, config)
        with _needs_data(task):
            check_fits(context.lm(), loaded, config.samples, f"drop {task} from zeroshot.metrics")
        context.kept[f"zeroshot-{task}"] = loaded


def _loaded(task: str, metric: str, config: ZeroshotConfig) -> Task:
    loaded = load(task, config)
    if metric not in (known := metrics(loaded)):
        raise ValueError(
            f"the task {task} has no metric {metric}; set another one in zeroshot.metrics: {', '.join(known)}"
        )
    return loaded


def load(task: str, config: ZeroshotConfig) -> Task:
    """lm-eval's task with its data, from the hub or the local file; raises ValueError if these cannot be had."""
    file = None
    if config.folder is not None:
        file = local_file(config.folder, task, "zeroshot.folder")
        _check_rows(task, file)
    with tempfile.TemporaryDirectory() as folder, _needs_data(task, *FOREIGN):
        name = task if file is None else _overlay(Path(folder), task, file)
        seed()
        (loaded,) = stock_tasks().load([name])["tasks"].values()
        if file is not None:
            _check_answers(loaded, task, file)
    return loaded


def _check_rows(task: str, file: Path) -> None:
    """Raise ValueError for a file without rows, and for a row whose label hides the answer, as the hub's have it.

    lm-eval would score such a row as wrong, or (copa) as if the second choice were right.
    """
    number = 0
    for number, row in enumerate(read_rows(file), 1):  # the reader of `datasets` does not say what is wrong
        if row.get("label", 0) in (-1, "-1", "", None):
            said = f"{row_place(file, number)} has the label {row['label']!r}, which hides the answer"
            raise ValueError(f"{said}; bring {_wanted(task)}")
    if not number:
        raise ValueError(f"{file} holds no rows; bring the data set of {task}, or drop the task")


def _check_answers(loaded: Task, task: str, file: Path) -> None:
    """Make what lm-eval makes of every document; raises ValueError for an answer that is none of its choices."""
    for number, doc in enumerate(loaded.eval_docs, 1):
        text, target = loaded.doc_to_text(doc), loaded.doc_to_target(doc)
        choices = loaded.doc_to_choice(doc) if loaded.OUTPUT_TYPE == "multiple_choice" else None
        right = text if isinstance(text, int) else target  # of several texts with one ending, the text is the answer
        if choices and isinstance(right, int) and not 0 <= right < len(choices):
            raise IndexError(f"document {number} of {file} has the answer {right}, of {len(choices)} choices from 0 on")


def _wanted(task: str) -> str:
    """The file to bring: split and columns of the data set that lm-eval reads."""
    config = stock_tasks().task_index[task].cfg or {}
    split = config.get("test_split") or config.get("validation_split")
    name = " ".join(filter(None, (config.get("dataset_path"), config.get("dataset_name"))))
    columns = f"the columns {COLUMNS[task]}" if task in COLUMNS else "the data set's own columns"
    return f"the split {split} of {name}, with {columns}"


def metrics(loaded: Task) -> list[str]:
    """What a task measures."""
    filters = [option["name"] for option in loaded.get_config("filter_list") or [{"name": "none"}]]
    return list(loaded.aggregation()) if "none" in filters else []


def measure(context: "Context", config: ZeroshotConfig) -> list[dict[str, Any]]:
    """One row for each task, and one with the unweighted mean."""

    def run(task: str, metric: str) -> dict[str, Any] | None:
        return score(context.lm(), task, metric, config, context.kept.pop(f"zeroshot-{task}", None))

    rows = [context.journal.once(task, functools.partial(run, task, metric)) for task, metric in config.metrics.items()]
    mean = statistics.fmean(row["value"] for row in rows)
    return [*rows, {"metric": "zeroshot_mean", "value": mean, "tasks": list(config.metrics)}]


def score(lm: LM, task: str, metric: str, config: ZeroshotConfig, loaded: Task | None = None) -> dict[str, Any] | None:
    """Run one task, `loaded` already or not, on any lm-eval model; None in all processes but the first.

    Raises ValueError if its data cannot be had.
    """
    loaded = load(task, config) if loaded is None else loaded
    with _needs_data(task):
        found = run_task(lm, loaded, stock_tasks(), config.samples)
    if found is None:
        return None
    scores = [sample[metric] for sample in found["samples"][task]]
    single = all(isinstance(score, int | float) for score in scores)  # f1 and its like are of all documents together
    return {
        "metric": metric,
        "task": task,
        "value": found["results"][task][f"{metric},none"],
        "se": statistics.stdev(scores) / len(scores) ** 0.5 if single and len(scores) > 1 else None,
        "samples": len(scores),
        "task_version": found["versions"][task],
        "local_files": config.folder is not None,
    }


@contextlib.contextmanager
def _needs_data(task: str, *more: type[Exception]) -> Iterator[None]:
    """Says in a ValueError what to bring where the data of the task cannot be had, or are not its own."""
    try:
        yield
    except (OSError, KeyError, jinja2.TemplateError, DatasetsError, *more) as error:
        raise ValueError(
            f"the data of {task} cannot be had ({one_line(error)}); for local files give zeroshot.folder=FOLDER "
            f"with {task}.jsonl or {task}.parquet in it: {_wanted(task)}"
        ) from error


def _overlay(folder: Path, task: str, file: Path) -> str:
    """A task file that is lm-eval's own but reads a local file, whichever split it asks for."""
    splits = dict.fromkeys(("train", "validation", "test"), str(file.resolve()))
    overlay = {
        "include": str(stock_tasks().task_index[task].yaml_path),
        "dataset_path": {".jsonl": "json", ".parquet": "parquet"}[file.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": splits},
    }
    (folder / f"{task}.yaml").write_text(json.dumps(overlay))  # JSON is YAML
    return str(folder / f"{task}.yaml")
