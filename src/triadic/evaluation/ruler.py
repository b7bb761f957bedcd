"""RULER's needle-in-a-haystack tasks at chosen lengths, from lm-eval's own task files.

The score is the share of answers that occur in 128 greedily generated tokens, ignoring case. Each task and length is
a run of its own, so its samples depend on nothing but the tokenizer and lm-eval's version; they are kept beside the
results, and their hash goes into the rows.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from triadic.evaluation.config import RulerConfig
from triadic.evaluation.harness import TriadicLM, run_task

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context

TASKS = Path(lm_eval.__file__).parent / "tasks" / "ruler"
NEW_TOKENS = 128  # what lm-eval's task files generate
ALLOWANCE = 256  # a prompt with its answer prefix and the generation may exceed the nominal length by this
OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")  # the tasks that need no essays


def check(context: "Context", config: RulerConfig) -> dict[str, str]:
    """Raise ValueError for an unknown task, or a length beyond what the model takes."""
    unknown = [task for task in config.tasks if task not in OFFLINE]
    if unknown:
        raise ValueError(f"unknown ruler tasks {', '.join(unknown)}; this suite runs {', '.join(OFFLINE)}")
    limit = context.checkpoint.max_length
    too_long = [length for length in config.lengths if limit is not None and length > limit]
    if too_long:
        raise ValueError(
            f"ruler.lengths has {too_long}, but {context.checkpoint.name} takes at most {limit} tokens; "
            "leave them out, or raise model.max_length if the model can extrapolate"
        )
    return {}  # the samples' hashes are in the rows


def measure(context: "Context", config: RulerConfig) -> list[dict[str, Any]]:
    """One row for each task and length: its score, the number of samples and their actual lengths."""

    def run(task: str, length: int) -> dict[str, Any] | None:
        path = context.journal.folder / "samples" / f"{task}-{length}.jsonl"
        return needle(context.lm(), task, length, config, path)

    pairs = itertools.product(config.tasks, config.lengths)
    return [context.journal.once(f"{task}-{length}", functools.partial(run, task, length)) for task, length in pairs]


def needle(lm: LM, task: str, length: int, config: RulerConfig, path: Path | None = None) -> dict[str, Any] | None:
    """Run one task at one length on any lm-eval model; None in all processes but the first.

    Writes the samples as JSON lines to `path`. Raises ValueError if a sample is shorter than config.min_fill of
    `length` or longer than it, if a prompt lost its answer prefix, or if samples are missing.
    """
    metadata = {"max_seq_lengths": [length], "tokenizer": lm.tokenizer.name_or_path}
    with _room_for(lm, length + ALLOWANCE), _without_punkt():
        manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
        found = run_task(lm, task, manager, config.samples)
    if found is None:
        return None
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    check_samples(samples, task, length, config, lm)
    lines = [json.dumps(sample["doc"], sort_keys=True) + "\n" for sample in samples]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
    scores = [sample[str(length)] for sample in samples]  # lengths that were not run report -1 under other names
    lengths = [sample["doc"]["length"] for sample in samples]
    return {
        "metric": "contains",
        "task": task,
        "length": length,
        "value": statistics.fmean(scores),
        "se": statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None,
        "samples": len(samples),
        "task_version": found["versions"][task],
        "actual_lengths": [min(lengths), max(lengths)],
        "samples_sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
    }


@contextlib.contextmanager
def _room_for(lm: LM, tokens: int) -> Iterator[None]:
    """Let a model whose limit is the nominal length take the few tokens that a sample exceeds it by."""
    before = getattr(lm, "_max_length", None)
    if isinstance(lm, TriadicLM):
        lm._max_length = max(before, tokens)
    yield
    if isinstance(lm, TriadicLM):
        lm._max_length = before


@contextlib.contextmanager
def _without_punkt() -> Iterator[None]:
    """Keep lm-eval's task files from fetching a sentence splitter, which the tasks in OFFLINE never use."""
    with mock.patch("nltk.download"), contextlib.redirect_stdout(io.StringIO()):
        yield


def check_samples(samples: list[dict], task: str, length: int, config: RulerConfig, lm: LM) -> None:
    """Raise ValueError unless the samples are what their length promises and every prompt is whole."""
    if len(samples) != config.samples:
        raise ValueError(f"{task} at {length} tokens gave {len(samples)} samples, not the {config.samples} asked for")
    for sample in samples:
        doc, prompt = sample["doc"], sample["arguments"][0][0]
        if not prompt.endswith(doc["gen_prefix"]) or doc["input"] not in prompt:
            raise ValueError(f"sample {sample['doc_id']} of {task} lost its text or its answer prefix")
        counted = len(lm.tokenizer(doc["input"]).input_ids) + NEW_TOKENS
        if counted != doc["length"] or not config.min_fill * length <= counted <= length:
            raise ValueError(
                f"sample {sample['doc_id']} of {task} has {counted} tokens (with {NEW_TOKENS} to generate), not "
                f"between {config.min_fill:.0%} of {length} and {length}"
            )
