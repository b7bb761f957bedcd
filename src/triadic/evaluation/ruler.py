"""RULER's needle-in-a-haystack tasks at chosen lengths, from lm-eval's own task files.

The score is the share of answers that occur in 128 greedily generated tokens, ignoring case. Each task and length is
a run of its own, so its samples depend on nothing but the tokenizer and lm-eval's version (and a haystack of one's
own); they are frozen as JSON lines before a model sees them, and their hash goes into the rows.

Scores on another haystack than RULER's essays have a metric of their own, "contains_local", and a mean of their own.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from tqdm import tqdm

from triadic.evaluation.config import RulerConfig
from triadic.evaluation.harness import TriadicLM, check_end, run_task
from triadic.evaluation.haystack import (
    ESSAY_TASKS,
    NEW_TOKENS,
    TASKS,
    Haystack,
    frozen,
    generator,
    open_haystack,
    stock_tasks,
)
from triadic.evaluation.journal import rank, share
from triadic.evaluation.loading import learned_positions

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context

ALLOWANCE = 256  # a prompt with its answer prefix and the generation may exceed the nominal length by this


def check(context: "Context", config: RulerConfig) -> dict[str, str]:
    """Raise ValueError for an unknown task, a length beyond what the model takes, or words or essays not to be had."""
    _known(config)
    limit = context.checkpoint.max_length
    too_long = [length for length in config.lengths if limit is not None and length > limit]
    if too_long:
        raise ValueError(
            f"ruler.lengths has {too_long}, but {context.checkpoint.name} takes at most {limit} tokens; "
            "leave them out, or raise model.max_length if the model can extrapolate"
        )
    last = learned_positions(context.checkpoint.model)
    too_long = [length for length in config.lengths if last is not None and length + ALLOWANCE > last]
    if too_long:
        raise ValueError(
            f"ruler.lengths has {too_long}, whose prompts and answers can take {ALLOWANCE} tokens more, but "
            f"{context.checkpoint.name} has learned {last} positions; take lengths of at most {last - ALLOWANCE}"
        )
    check_end(context.checkpoint)
    fetch(config)
    haystack = _haystack(config)
    return {} if haystack is None else {haystack.name: haystack.sha256}  # the samples' hashes are in the rows


def _known(config: RulerConfig) -> None:
    unknown = [task for task in config.tasks if task not in TASKS]
    if unknown:
        raise ValueError(f"unknown ruler tasks {', '.join(unknown)}; this suite runs {', '.join(TASKS)}")


def fetch(config: RulerConfig) -> None:
    """Raise ValueError for unknown tasks, and for words or essays that cannot be had."""
    _known(config)
    generator()
    _haystack(config)


def ready(context: "Context", config: RulerConfig) -> None:
    """Raise ValueError unless the model can be asked, if it is to be."""
    if _missing(context, config):
        context.lm()


def prepare(context: "Context", config: RulerConfig) -> None:
    """Make the samples of all that is to be run; raises ValueError if some are not as long as they promise."""
    missing = _missing(context, config)
    for task, length in tqdm(missing, desc="needle samples", unit="file", disable=rank() != 0 or not missing):
        share(lambda task=task, length=length: bool(_documents(context.lm(), task, length, config, _folder(context))))
    context.kept["needles"] = missing


def measure(context: "Context", config: RulerConfig) -> list[dict[str, Any]]:
    """One row for each task and length: its score, the number of samples and their actual lengths; then the mean."""
    once = context.journal.once
    pairs = itertools.product(config.tasks, config.lengths)

    def run(task: str, length: int) -> dict[str, Any]:
        checked = (task, length) in context.kept.get("needles", ())
        return needle(context.lm(), task, length, config, _folder(context), once, checked)

    rows = [once(_step(task, length), functools.partial(run, task, length)) for task, length in pairs]
    if set(config.tasks) == set(TASKS):
        local = "" if config.haystack is None else "_local"
        mean = statistics.fmean(row["value"] for row in rows)
        facts = {"lengths": config.lengths, "haystack": _haystack(config).name}
        rows.append({"metric": "niah_mean" + local, "value": mean} | facts)
    return rows


def _step(task: str, length: int) -> str:
    return f"{task}-{length}"


def _missing(context: "Context", config: RulerConfig) -> list[tuple[str, int]]:
    """The tasks and lengths without a row."""
    pairs = itertools.product(config.tasks, config.lengths)
    return [(task, length) for task, length in pairs if not context.journal.has(_step(task, length))]


def _folder(context: "Context") -> Path:
    """Where the samples are."""
    frozen_in = context.suite.ruler.frozen
    if frozen_in is None:
        return context.journal.folder / "samples"
    return Path(frozen_in) / f"tokenizer-{context.checkpoint.tokenizer_hash[:12]}"


def _documents(
    lm: LM, task: str, length: int, config: RulerConfig, folder: Path, checked: bool = False
) -> list[dict[str, Any]]:
    """The samples, read from `folder` or made and frozen there; raises ValueError unless they are as they should be."""
    haystack = _haystack(config) if task in ESSAY_TASKS else None
    path = folder / ("-".join([task, str(length), *([haystack.label] if haystack else [])]) + ".jsonl")
    documents = frozen(path, lm.tokenizer, task, length, config.samples, haystack)
    if not checked:
        check_lengths(documents, task, length, config, lm)
    return documents


def needle(
    lm: LM,
    task: str,
    length: int,
    config: RulerConfig,
    folder: Path,
    once: Any = lambda _, compute: compute(),
    checked: bool = False,
) -> dict[str, Any]:
    """Run one task at one length on any lm-eval model, in steps that `once(name, compute)` keeps.

    The samples are read from `folder`, or made and frozen there by the first process. Raises ValueError if a sample
    is shorter than config.min_fill of `length` or longer than it (unless that was `checked`), if a prompt lost its
    text or its answer prefix, or if samples are missing.
    """
    haystack = _haystack(config) if task in ESSAY_TASKS else None
    documents = share(_documents, lm, task, length, config, folder, checked)

    def run(some: range) -> dict[str, Any] | None:
        with _room_for(lm, length + ALLOWANCE), stock_tasks(lm.tokenizer, length, documents) as manager:
            found = run_task(lm, task, manager, some)
        if found is None:
            return None
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        check_prompts(samples, task)
        scores = [sample[str(length)] for sample in samples]  # lengths that were not run report -1 under other names
        return {"scores": scores, "version": found["versions"][task]}

    steps = []
    for first in range(0, len(documents), config.samples_per_step):
        some = range(first, min(first + config.samples_per_step, len(documents)))
        steps.append(once(f"{task}-{length}-{first:03d}", functools.partial(run, some)))
    scores = [score for step in steps for score in step["scores"]]
    lengths = [document["length"] for document in documents]
    lines = "".join(json.dumps(document, sort_keys=True) + "\n" for document in documents)
    return {
        "metric": "contains" if haystack is None or not haystack.local else "contains_local",
        "task": task,
        "length": length,
        "value": statistics.fmean(scores),
        "se": statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None,
        "samples": len(scores),
        "task_version": steps[0]["version"],
        "haystack": "of the task" if haystack is None else haystack.name,
        "actual_lengths": [min(lengths), max(lengths)],
        "samples_sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }


def _haystack(config: RulerConfig) -> Haystack | None:
    """The essays, or what stands in their place; None if no task reads them."""
    if not set(config.tasks) & set(ESSAY_TASKS):
        return None
    return open_haystack(config.essays, config.haystack)


@contextlib.contextmanager
def _room_for(lm: LM, tokens: int) -> Iterator[None]:
    """Let a model whose limit is the nominal length take the few tokens that a sample exceeds it by."""
    before = getattr(lm, "_max_length", None)
    if isinstance(lm, TriadicLM):
        lm._max_length = max(before, tokens)
    yield
    if isinstance(lm, TriadicLM):
        lm._max_length = before


def check_lengths(documents: list[dict], task: str, length: int, config: RulerConfig, lm: LM) -> None:
    """Raise ValueError unless there are as many samples as asked for, each of the length that it promises."""
    if len(documents) != config.samples:
        raise ValueError(f"{task} at {length} tokens gave {len(documents)} samples, not the {config.samples} asked for")
    for number, document in enumerate(documents):
        counted = len(lm.tokenizer(document["input"]).input_ids) + NEW_TOKENS
        if counted != document["length"] or not config.min_fill * length <= counted <= length:
            raise ValueError(
                f"sample {number} of {task} has {counted} tokens (with {NEW_TOKENS} to generate), not "
                f"between {config.min_fill:.0%} of {length} and {length}"
            )


def check_prompts(samples: list[dict], task: str) -> None:
    """Raise ValueError unless every prompt holds its text, with all needles, and ends with its answer prefix."""
    for sample in samples:
        document, prompt = sample["doc"], sample["arguments"][0][0]
        whole = prompt == f"{document['input']} {document['gen_prefix']}"
        if not whole or not all(needle in document["input"] for needle in document["outputs"]):
            raise ValueError(f"sample {sample['doc_id']} of {task} lost its text, a needle or its answer prefix")
