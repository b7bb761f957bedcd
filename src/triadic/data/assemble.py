"""From tokenised parts to finished stores: which documents go where, and moving them there."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from .config import SourceConfig
from .files import sha256, sweep, sync, whole
from .parts import token_dtype
from .sources import describe, has_ids
from .store import read_tokens, write_meta, write_tokens

SPLITS = ("validation", "train")


class Splitter:
    """Assigns documents, in order, to the splits, until the source's budget is full.

    `plan` has one entry a part: its record, and for each split the documents that go there: "all", or indices.
    """

    def __init__(self, source: SourceConfig):
        self.source = source
        self.plan: list[dict] = []
        self.documents_held_out = 0
        self.held_out = 0  # tokens
        self.trained = 0

    @property
    def tokens(self) -> int:
        """Tokens assigned so far."""
        return self.held_out + self.trained

    @property
    def full(self) -> bool:
        """Whether the training tokens asked for are there."""
        return self.source.max_tokens is not None and self.trained >= self.source.max_tokens

    def add(self, record: dict, lengths: np.ndarray) -> None:
        """Assign a part's documents; lengths: int64 [documents]."""
        held = np.zeros(len(lengths), dtype=bool)
        held[record["validation"]] = True
        before = self.held_out + np.cumsum(lengths) - lengths  # [documents] tokens ahead of each
        held |= before < self.source.validation.tokens
        train = ~held
        if self.source.max_tokens is not None:
            counted = np.where(train, lengths, 0)
            train &= self.trained + np.cumsum(counted) - counted < self.source.max_tokens
        self.held_out += int(lengths[held].sum())
        self.trained += int(lengths[train].sum())
        self.documents_held_out += int(held.sum())
        self.plan.append({"record": record, "validation": _which(held), "train": _which(train)})

    def check(self) -> None:
        """Raise ValueError if a split that was asked for is empty or short."""
        holdout = self.source.validation
        documents = self.documents_held_out
        if self.trained == 0:
            raise ValueError(f"no document of {describe(self.source)} is left for training; hold out or reserve fewer")
        if documents < holdout.documents or self.held_out < holdout.tokens:
            raise ValueError(
                f"{describe(self.source)} has only {documents:,} documents ({self.held_out:,} tokens) for validation, "
                f"{holdout.documents or holdout.tokens:,} were asked for"
            )


def assemble(plan: dict, output: Path, source: SourceConfig) -> None:
    """Write output/validation, then output/train, from output/parts; may be killed and called again.

    A part that goes whole into one split is moved, one that is divided is copied.
    """
    if source.reserve.documents:
        reserved = [document for entry in plan["parts"] for document in entry["record"]["reserved"]]
        with whole(output / "reserved.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(document) + "\n" for document in reserved), encoding="utf-8")
    for split in SPLITS:
        chosen = [(index, entry) for index, entry in enumerate(plan["parts"]) if entry[split]]
        folder = output / split
        if not chosen or (folder / "store.json").is_file():
            continue
        folder.mkdir(exist_ok=True)
        sweep(folder)
        files = []
        for number, (index, entry) in enumerate(chosen):
            path = folder / f"data-{number:05d}-of-{len(chosen):05d}.arrow"
            files.append(_place(output / "parts" / f"part-{index:05d}.arrow", path, entry["record"], entry[split]))
        _finish(folder, files, plan["meta"], source)


def _which(mask: np.ndarray) -> list[int] | str:
    return "all" if len(mask) and mask.all() else np.flatnonzero(mask).tolist()


def _place(part: Path, path: Path, record: dict, documents: list[int] | str) -> dict:
    """Put a part's `documents` into the store file `path`; returns the file's description."""
    if documents == "all":
        if part.is_file():
            os.replace(part, path)
            sync(path.parent)
        size, digest = record["bytes"], record["sha256"]
        _, lengths, _ = read_tokens(path)
    else:
        values, lengths, ids = read_tokens(part)
        pieces = np.split(values, np.cumsum(lengths)[:-1])
        lengths = lengths[documents]
        with whole(path) as temporary:
            chosen = None if ids is None else [ids[i] for i in documents]
            write_tokens(temporary, np.concatenate([pieces[i] for i in documents]), lengths, chosen)
        size, digest = path.stat().st_size, sha256(path)
    return {"name": path.name, "bytes": size, "sha256": digest, "tokens": int(lengths.sum()), "documents": len(lengths)}


def _finish(folder: Path, files: list[dict], meta: dict, source: SourceConfig) -> None:
    """Complete the store of `files`."""
    dtype = str(token_dtype(meta["vocab_size"]))
    content = [meta["tokenizer_hash"], dtype, [file["sha256"] for file in files]]
    counts = {f"num_{what}": sum(file[what] for file in files) for what in ("tokens", "documents")}
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    columns = {"input_ids": f"list:{dtype}"} | ({"id": "string"} if has_ids(source) else {})
    details = {"kind": "tokens", "fingerprint": fingerprint, "dtype": dtype} | counts | meta
    write_meta(folder, details | {"files": files}, columns)
