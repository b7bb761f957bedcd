"""Held-out documents as token ids, from a token store or from text files."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from triadic.data import MixtureStore, TokenStore, check_tokenizer, open_store
from triadic.models.loading import one_line

TEXT_KINDS = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Documents:
    """Token sequences, each BOS + ids + EOS as in training, read on demand."""

    lengths: list[int]
    read: Callable[[int, int, int], np.ndarray]  # (document, start, stop) -> [stop - start]
    fingerprint: str


@dataclass(frozen=True)
class Window:
    """`window + 1` consecutive tokens of one document, beginning at `start`."""

    document: int
    start: int


def open_documents(path: str | Path, tokenizer: PreTrainedTokenizerBase, column: str = "text") -> Documents:
    """Open a token store, or the documents of .txt, .jsonl and .parquet files (one file, or a folder of them).

    Raises ValueError if there is nothing there, the text is empty, or a token store was made with another tokenizer.
    """
    path = Path(path)
    if (path / "store.json").is_file():
        return _from_store(path, tokenizer)
    return _from_texts(texts_of(path, column), tokenizer, path)


def texts_of(path: str | Path, column: str) -> list[str]:
    """The documents of .txt, .jsonl and .parquet files: one file, or a folder of them. ValueError if there are none."""
    path = Path(path)
    files = sorted(f for f in (path.iterdir() if path.is_dir() else [path]) if f.suffix in TEXT_KINDS and f.is_file())
    if not files:
        kinds = ", ".join(TEXT_KINDS)
        raise ValueError(f"there are no documents at {path}: give a token store or a file or folder of {kinds}")
    return list(_texts(files, column))


def own_store(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> TokenStore | MixtureStore:
    """A token store (or mixture) made with this tokenizer; raises ValueError if it was made with another."""
    store = open_store(path)
    check_tokenizer(store, tokenizer)
    return store


def full_windows(documents: Documents, window: int, most: int | None = None) -> list[Window]:
    """Every full window of every document: disjoint inputs of `window` tokens, each with the token after it.

    `most` keeps that many, evenly spaced. Raises ValueError if no document is long enough.
    """
    windows = [
        Window(document, start)
        for document, length in enumerate(documents.lengths)
        for start in range(0, length - window, window)
    ]
    if not windows:
        longest = max(documents.lengths, default=0)
        raise ValueError(
            f"no held-out document has the {window + 1} tokens of a full window (the longest has {longest}); "
            "lower perplexity.window"
        )
    if most is not None and most < len(windows):
        windows = [windows[i * len(windows) // most] for i in range(most)]
    return windows


def _from_store(path: Path, tokenizer: PreTrainedTokenizerBase) -> Documents:
    store = own_store(path, tokenizer)
    starts = np.asarray(store.starts(0, store.num_tokens), dtype=np.int64)  # [N]
    edges = np.append(starts, store.num_tokens)

    def read(document: int, start: int, stop: int) -> np.ndarray:
        return store.tokens(int(edges[document]) + start, int(edges[document]) + stop)

    return Documents(np.diff(edges).tolist(), read, str(store.fingerprint))


def _from_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase, path: Path) -> Documents:
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"the documents at {path} hold no text")
    before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    after = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    arrays = [np.array(before + document + after, dtype=np.int64) for document in ids]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return Documents([len(a) for a in arrays], lambda i, start, stop: arrays[i][start:stop], digest)


def _texts(files: list[Path], column: str) -> Iterator[str]:
    for file in files:
        if file.suffix != ".txt":
            yield from read_column(file, column)
            continue
        try:
            yield file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as text: {one_line(error)}") from error


def read_column(file: Path, column: str) -> Iterator[str]:
    """The texts in a column of a .jsonl or .parquet file; raises ValueError where a row has none."""
    for number, row in enumerate(read_rows(file), 1):
        if column not in row:
            raise ValueError(f"{file} has no column {column!r}, only {', '.join(row)}")
        if not isinstance(row[column], str):
            raise ValueError(f"row {number} of {file} has no text in its column {column!r}, but {row[column]!r:.40}")
        yield row[column]


def read_rows(file: Path) -> Iterator[dict]:
    """The rows of a .jsonl or .parquet file; raises ValueError for one that cannot be read as such."""
    try:
        if file.suffix == ".parquet":
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
            return
        with open(file, encoding="utf-8") as lines:
            yield from (_row(line, f"{file}, line {n},") for n, line in enumerate(lines, 1) if line.strip())
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file} cannot be read as {file.suffix}: {one_line(error)}") from error


def _row(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object with columns, but {line.strip():.40}")
    return row


def local_file(folder: str | Path, task: str, setting: str) -> Path:
    """FOLDER/TASK.jsonl or .parquet; raises ValueError, which names the setting, if there is neither."""
    for suffix in (".jsonl", ".parquet"):
        if (Path(folder) / (task + suffix)).is_file():
            return Path(folder) / (task + suffix)
    raise ValueError(f"{setting} {folder} holds no {task}.jsonl or {task}.parquet; bring it, or drop the task")


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
