"""The six recall tasks of Arora et al.: where the data stand, how a text is cut, what is asked, what counts.

A text is cut to a window of context_length - 50 of the model's tokens around the earliest match of an answer, whatever
its case; if none matches, its head is kept. The authors' program (github.com/HazyResearch/prefix-linear-attention)
does otherwise in places: `centre="harness"` does as it does. The prompts are the same.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from triadic.evaluation.documents import local_file, read_rows
from triadic.models.loading import load_tokenizer, one_line

ROOM = 50  # tokens of context_length that are not text
SUMMARY = "Summary of information above..."  # SWDE's texts end before it


@dataclass(frozen=True)
class Task:
    """One data set. The authors' program centres on the earliest match of the columns in `harness`; none: the head."""

    hub: str
    text: str  # the column that is cut
    asked: str | None  # the column that the prompt ends with; none: the text does
    columns: tuple[str, ...]
    prompt: Callable[[dict[str, Any]], str]
    harness: tuple[str, ...]


def _without(text: str, ending: str) -> str:
    """The text, without a question that it already ends with."""
    while ending and text.lower().endswith(ending.lower()):
        text = text[: -len(ending)]
    return text


def _fda(doc: dict[str, Any]) -> str:
    text = _without(doc["text"], doc["key"] + ":").strip("\n").strip(".")
    return f"{text}. {doc['key'][0].upper() + doc['key'][1:]}:"


def _swde(doc: dict[str, Any]) -> str:
    text = _without(doc["text"].split(SUMMARY)[0], doc["key"] + ":").strip().strip(".")
    return f"{text}. {doc['key'][0].upper() + doc['key'][1:]}:"


def _squad(doc: dict[str, Any]) -> str:
    return doc["text"].strip()


def _nq(doc: dict[str, Any]) -> str:
    question, context = doc["question"].strip(), doc["context"].strip()
    return f"{context.removesuffix(question).strip().strip('.')}. {question}"


def _asked(doc: dict[str, Any]) -> str:
    question = doc["question"].strip()
    return f"{_without(doc['context'].strip(), question).strip().strip('.')}. {question}"


def _trivia(doc: dict[str, Any]) -> str:
    return _asked(doc | {"context": re.sub(r"\[PAR\]|\[DOC\]|\[TLE\]", "", doc["context"].strip())})


CLOZE = ("doc_id", "file_name", "key", "value", "text")
SQUAD = ("doc_id", "text", "value", "title", "context", "question")
ASKED = ("doc_id", "context", "question", "orig_question", "answers")
TASKS = {
    "fda": Task("hazyresearch/based-fda", "text", "key", CLOZE, _fda, ("key", "value")),
    "swde": Task("hazyresearch/based-swde-v2", "text", "key", CLOZE, _swde, ("key", "value")),
    "squad": Task("hazyresearch/based-squad", "text", None, SQUAD, _squad, ("value",)),
    "nq": Task("hazyresearch/based_nq_{nq}", "context", "question", ASKED, _nq, ("answers",)),
    "triviaqa": Task("hazyresearch/based_triviaqa", "context", "question", ASKED, _trivia, ()),
    "drop": Task("hazyresearch/based_drop", "context", "question", ASKED, _asked, ()),
}


def recall_documents(
    task: str,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    pretrained: str | None = None,
    context_length: int = 2000,
    centre: str = "answer",
    nq: int = 2048,
    folder: str | None = None,
    **_: Any,
) -> dict[str, datasets.Dataset]:
    """The documents of a task as lm-eval wants them: {"test": rows of prompt, answers, doc_id, cut}.

    `tokenizer` (or `pretrained`) is the model's: a folder, a hub id, or the tokenizer itself. Documents that know no
    answer are left out. Raises ValueError if the data cannot be had, or lack a column.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = load_tokenizer(tokenizer or pretrained or "")
    made = (make_document(task, row, tokenizer, context_length, centre) for row in read(task, folder, nq))
    rows = [row for row in made if row is not None]
    if not rows:
        raise ValueError(f"no document of the recall task {task} has an answer")
    return {"test": datasets.Dataset.from_list(rows)}


def recall_score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """lm-eval's process_results: 1 if the generated text contains an answer, whatever its case."""
    return {"contains": float(contains(results[0], doc["answers"]))}


def contains(text: str, answers: Iterable[str]) -> bool:
    """Whether any of the answers occurs in the text, whatever its case."""
    return any(re.search(re.escape(answer), text, re.IGNORECASE) for answer in answers)


def make_document(
    task: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, context_length: int, centre: str
) -> dict[str, Any] | None:
    """Prompt and answers of a row; None if it knows no answer (or the authors' program leaves it out)."""
    answers = _answers(row)
    if not answers:
        return None
    text = row[TASKS[task].text].strip()
    if task == "swde" and centre == "answer":
        text = text.split(SUMMARY)[0].strip()  # before the cut, so that it lies in the text that is asked about
    ids = tokenizer(text).input_ids
    if centre == "answer":
        matches = [re.search(re.escape(answer), text, re.IGNORECASE) for answer in answers]
        position = min((match.start() for match in matches if match), default=0)
        at = len(tokenizer(text[:position]).input_ids)
    else:
        at = _harness_centre(task, row, text, tokenizer, context_length - ROOM)
        if at is None:
            return None
    start, stop = window(at, len(ids), context_length - ROOM)
    cut = tokenizer.decode(ids[start:stop], skip_special_tokens=True)
    prompt = TASKS[task].prompt(row | {TASKS[task].text: cut})
    return {"doc_id": str(row["doc_id"]), "prompt": prompt, "answers": answers, "cut": stop - start < len(ids)}


def window(at: int, length: int, size: int) -> tuple[int, int]:
    """Start and stop of `size` tokens out of `length` whose middle is `at`, as far as the text reaches to the right."""
    start = max(0, at - size // 2)
    return start, min(length, start + size)


def _harness_centre(task: str, row: dict, text: str, tokenizer: PreTrainedTokenizerBase, size: int) -> int | None:
    """The token that the authors' program puts in the middle: where nothing matches, the one before the last.

    None where it leaves the document out, because the word it looks for has one letter.
    """
    columns = TASKS[task].harness
    wanted = [row[column][0] if isinstance(row[column], list) else row[column] for column in columns]
    if any(len(answer) <= 1 for answer in wanted):
        return None
    found = [re.search(re.escape(answer), text, re.IGNORECASE) for answer in wanted]
    position = min((match.start() for match in found if match), default=-1 if columns else 0)
    at = len(tokenizer(text[:position]).input_ids)
    return row["tok_pos"] if position == -1 and row.get("tok_pos") is not None and at > size else at


def read(task: str, folder: str | None, nq: int = 2048) -> Iterator[dict[str, Any]]:
    """The rows of a task.

    Raises ValueError for what cannot be had, for missing columns, where no row has an answer, and, with its place, for
    a row whose columns hold something else than they should.
    """
    hub = TASKS[task].hub.format(nq=nq)
    if folder is not None:
        file = local_file(folder, task, "recall.folder")
        rows = read_rows(file)
    else:
        try:
            rows = datasets.load_dataset(hub, split="validation")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the data of {task} cannot be had ({one_line(error)}); for local files give recall.folder=FOLDER with "
                f"{task}.jsonl or {task}.parquet in it: {hub}, validation"
            ) from error
    number, answered, where = 0, False, Path(folder) if folder else hub
    for number, row in enumerate(rows, 1):
        missing = [column for column in TASKS[task].columns if column not in row]
        if missing:
            raise ValueError(
                f"{task} in {where} has no column {', '.join(missing)}; it needs {', '.join(TASKS[task].columns)}"
            )
        wrong = _wrong(task, row)
        if wrong is not None:
            place = f"row {number} of {hub}" if folder is None else row_place(file, number)
            raise ValueError(f"{place} has the {wrong}, for the recall task {task}; mend the row, or take it out")
        answered = answered or bool(_answers(row))
        yield row
    if number == 0:
        raise ValueError(f"{task} in {where} holds no rows; bring its data set, or drop the task")
    if not answered:
        raise ValueError(f"no row of {task} in {where} has an answer; bring its data set, or drop the task")


def row_place(file: Path, number: int) -> str:
    """Say "FILE, line N," of the row with this number (from 1) in a .jsonl file, "FILE, row N," in others."""
    if file.suffix != ".jsonl":
        return f"{file}, row {number},"
    with open(file, encoding="utf-8") as lines:
        filled = (n for n, line in enumerate(lines, 1) if line.strip())
        return f"{file}, line {next(itertools.islice(filled, number - 1, None))},"


def _answers(row: dict[str, Any]) -> list[str]:
    """The answers that count: `answers`, or else `value`, without blank ones."""
    known = row.get("answers") or [row.get("value") or ""]
    return [answer for answer in known if answer.strip()]


def _wrong(task: str, row: dict[str, Any]) -> str | None:
    """The first column of the row that cannot be used, as "COLUMN GIVEN, but WANTED is wanted"; None for a good row.

    A row without an answer is left out, so that its text and question may be anything.
    """
    given, value = row.get("answers"), row.get("value")
    if given is not None and not (isinstance(given, list) and all(isinstance(answer, str) for answer in given)):
        return f"answers {given!r:.60}, but a list of texts is wanted"
    if value is not None and not isinstance(value, str):
        return f"value {value!r:.60}, but a text is wanted"
    for column in filter(None, (TASKS[task].text, TASKS[task].asked)) if _answers(row) else ():
        if not isinstance(row[column], str) or not row[column].strip():
            return f"{column} {row[column]!r:.60}, but a text that is not blank is wanted"
    return None
