"""Units of work: a run of consecutive documents, tokenised into one Arrow file.

Where parts are cut depends on the texts alone, so it is the same for every number of workers and after every restart.
"""

import os
import threading
from collections.abc import Iterator
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from .config import SourceConfig
from .files import sha256, sync
from .sources import Rows, has_ids
from .store import write_tokens
from .tokenizer import encoder

_BATCH_CHARACTERS = 1_000_000  # encodings are bulky: about 100 bytes a token


class Part(NamedTuple):
    """Documents to tokenise, and what the reader must know to go on behind them."""

    index: int
    texts: list[str]
    ids: list[str] | None
    validation: list[int]  # which of them are held out by count
    reserved: list[dict]  # documents passed over by the reserve, for the manifest
    after: dict  # reader, validation, reserved: where the next part starts


class Job(NamedTuple):
    """What every worker knows."""

    folder: str
    tokenizer: str  # tokenizer.json
    tokenizer_hash: str
    vocab_size: int
    bos: int
    eos: int


class Done(NamedTuple):
    """A tokenised part, fsynced under a temporary name."""

    temporary: str
    lengths: np.ndarray  # int64 [documents]
    bytes: int
    sha256: str


class Chooser:
    """Says of each text, in order, whether it is "train", "validation" or "reserved" (held out, not tokenised)."""

    def __init__(self, source: SourceConfig, validation: int = 0, reserved: int = 0):
        self.source, self.validation, self.reserved = source, validation, reserved

    def __call__(self, text: str) -> str:
        holdout, reserve = self.source.validation, self.source.reserve
        inside = self.reserved < reserve.documents
        if inside and len(text) >= reserve.min_characters:
            self.reserved += 1
        eligible = inside or not reserve.documents
        if eligible and self.validation < holdout.documents and len(text) >= holdout.min_characters:
            self.validation += 1
            return "validation"
        return "reserved" if inside else "train"


def cut(source: SourceConfig, part_characters: int, index: int = 0, after: dict | None = None) -> Iterator[Part]:
    """The source's documents as parts of at least `part_characters`, from part `index` on (`after` its predecessor)."""
    rows = Rows(source, after["reader"] if after else None)
    chooser = Chooser(source, after["validation"], after["reserved"]) if after else Chooser(source)
    keeps_ids = has_ids(source)
    texts, ids, validation, reserved, size = [], [], [], [], 0

    def part() -> Part:
        progress = {"reader": rows.progress(), "validation": chooser.validation, "reserved": chooser.reserved}
        return Part(index, texts, ids if keeps_ids else None, validation, reserved, progress)

    for name, text in rows:
        kind = chooser(text)
        if kind != "train" and source.reserve.documents:
            reserved.append({"id": name, "characters": len(text), "split": kind})
        if kind == "reserved":
            continue
        if kind == "validation":
            validation.append(len(texts))
        texts.append(text)
        ids.append(name)
        size += len(text)
        if size >= part_characters:
            yield part()
            index += 1
            texts, ids, validation, reserved, size = [], [], [], [], 0
    if texts or reserved:
        yield part()


def tokenise(part: Part, job: Job) -> Done:
    """Write a part's documents to a temporary file in the job's folder."""
    values, lengths = encode(encoder(job.tokenizer, job.tokenizer_hash), part.texts, job.bos, job.eos, job.vocab_size)
    path = Path(job.folder) / f"part-{part.index:05d}.{os.getpid()}.tmp"
    write_tokens(path, values, lengths, part.ids)
    sync(path)
    return Done(str(path), lengths, path.stat().st_size, sha256(path))


def encode(
    tokenizer: Tokenizer, texts: list[str], bos: int, eos: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """BOS + ids + EOS of every text, one after another.

    Returns values (uint16 if the vocabulary allows it, else uint32) [tokens] and lengths int64 [texts]. Raises
    ValueError for an id outside the vocabulary.
    """
    dtype = token_dtype(vocab_size)
    pieces, lengths = [], []
    for batch in _batches(texts):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids = np.array([bos, *encoding.ids, eos], dtype=np.int64)
            if ids.max() >= vocab_size:
                raise ValueError(f"the tokenizer gave id {ids.max()}, outside its vocabulary of {vocab_size}")
            pieces.append(ids.astype(dtype))
            lengths.append(len(ids))
    return np.concatenate([np.empty(0, dtype), *pieces]), np.array(lengths, dtype=np.int64)


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for ids up to 65,535, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def start_worker() -> None:
    """Prepare a worker process: one thread of tokenising, and an end when the parent ends, however it does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def follow() -> None:
        connection.wait([parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
