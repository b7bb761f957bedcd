"""Mixtures: an order of whole documents over several stores, kept as an index, read as one stream.

Every part gives documents, in a seeded order, up to its share of the tokens; all of them are then shuffled together
once. The folder holds the index as Arrow (source, document, start, length a row) and `store.json`.
"""

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from .config import Mixture, MixturePart, SourceConfig
from .files import sha256, whole
from .order import permutation
from .store import TokenStore, check_range, check_size, damaged, read_meta, read_table, write_batch, write_meta

log = logging.getLogger("triadic.data")

TOLERANCE = 0.005  # how far a part's share of the tokens may be from the one asked for


class MixtureStore:
    """The stream of a mixture, with TokenStore's reading methods.

    Raises ValueError if the index or one of the stores behind it is missing, damaged or another one than was mixed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        meta = read_meta(self.path, kind="mixture")
        self.num_tokens: int = meta["num_tokens"]
        self.num_documents: int = meta["num_documents"]
        self.vocab_size: int = meta["vocab_size"]
        self.tokenizer_hash: str = meta["tokenizer_hash"]
        self.fingerprint: str = meta["fingerprint"]
        self.bos: int = meta["bos"]
        self.eos: int = meta["eos"]
        self.dtype = np.dtype(meta["dtype"])
        self.parts: list[dict] = meta["parts"]
        self.stores = [_part_store(self.path, part) for part in self.parts]
        index = self.path / meta["files"][0]["name"]
        check_size(index, meta["files"][0]["bytes"])
        table = read_table(index)
        self._source, self._start, length = (table[name].chunk(0).to_numpy() for name in ("source", "start", "length"))
        self._offsets = np.append(0, np.cumsum(length))  # int64 [num_documents + 1]
        if self._offsets[-1] != self.num_tokens:
            raise damaged(index, f"its documents hold {self._offsets[-1]:,} tokens")

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream: uint16 or uint32."""
        check_range(self, start, stop)
        pieces = [np.empty(0, dtype=self.dtype)]
        document = int(np.searchsorted(self._offsets, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._offsets[document + 1]))
            shift = int(self._start[document]) - int(self._offsets[document])
            pieces.append(self.stores[self._source[document]].tokens(start + shift, end + shift))
            start, document = end, document + 1
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) of the stream at which a document starts: int64, ascending."""
        check_range(self, start, stop)
        low, high = np.searchsorted(self._offsets[:-1], [start, stop])
        return self._offsets[low:high]

    def offsets(self) -> np.ndarray:
        """Where every document starts, and at last where the stream ends: int64 [num_documents + 1]."""
        return self._offsets

    def verify(self) -> None:
        """Read every byte of the index and of the stores and raise ValueError if something changed."""
        file = read_meta(self.path)["files"][0]
        if sha256(self.path / file["name"]) != file["sha256"]:
            raise damaged(self.path / file["name"], "its content is not what was written")
        for store in self.stores:
            store.verify()

    def __reduce__(self):
        return MixtureStore, (str(self.path),)


def limited(part: MixturePart, tokens: int) -> SourceConfig:
    """The part's source, told to stop at its share of a mixture of `tokens` (unless it has a limit of its own)."""
    if part.source.max_tokens is not None or part.repeat:
        return part.source
    return dataclasses.replace(part.source, max_tokens=max(1, round(part.share * tokens)))


def build(config: Mixture, stores: dict[str, Path], output: Path, tokenizer_hash: str) -> None:
    """Write the mixture of `stores` (a folder for each part of `config`) to the folder `output`.

    Raises ValueError if a store was made with another tokenizer, runs out before its share is full (unless the part
    repeats), or has documents too long to meet its share within TOLERANCE.
    """
    opened = {name: TokenStore(path) for name, path in stores.items()}
    for name, store in opened.items():
        if store.tokenizer_hash != tokenizer_hash:
            raise ValueError(f"the part {name} ({store.path}) was made with another tokenizer than the mixture's")
    chosen = [_choose(config, number, opened[name]) for number, name in enumerate(config.parts)]
    source = np.repeat(np.arange(len(chosen), dtype=np.uint16), [len(documents) for documents in chosen])
    document = np.concatenate(chosen)
    if not len(document):
        raise ValueError(f"no whole document fits a mixture of {config.tokens:,} tokens; raise mixture.tokens")
    start, length = _places(opened.values(), chosen)
    order = permutation(len(document), config.seed, len(chosen))
    columns = {"source": source, "document": document, "start": start, "length": length}
    columns = {name: values[order] for name, values in columns.items()}
    parts = [_summary(name, config, opened[name], output, number, columns) for number, name in enumerate(config.parts)]
    _check_shares(parts)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "data-00000-of-00001.arrow"
    batch = pa.record_batch({name: pa.array(values) for name, values in columns.items()})
    with whole(path) as temporary:
        write_batch(temporary, batch)
    first = next(iter(opened.values()))
    digest = sha256(path)
    content = [digest, [part["fingerprint"] for part in parts]]
    meta = {"kind": "mixture", "fingerprint": hashlib.sha256(json.dumps(content).encode()).hexdigest()}
    meta |= {"num_tokens": int(length.sum()), "num_documents": len(document), "dtype": str(first.dtype)}
    meta |= {name: getattr(first, name) for name in ("tokenizer_hash", "vocab_size", "bos", "eos")}
    files = [{"name": path.name, "bytes": path.stat().st_size, "sha256": digest}]
    types = {"source": "uint16", "document": "int64", "start": "int64", "length": "int64"}
    write_meta(output, meta | {"parts": parts, "files": files}, types)


def _choose(config: Mixture, number: int, store: TokenStore) -> np.ndarray:
    """Documents of part `number` up to its budget, in the order chosen: int64 [documents].

    The last one is taken if that brings the sum nearer to the budget.
    """
    name, part = list(config.parts.items())[number]
    budget = part.share * config.tokens
    lengths = np.diff(store.offsets())
    chosen, total, passes = [], 0, 0
    while total < budget:
        if passes and not part.repeat:
            if total >= budget - TOLERANCE * config.tokens:
                break
            raise ValueError(
                f"the part {name} holds {store.num_tokens:,} tokens, its share of the mixture is {round(budget):,}; "
                f"lower mixture.tokens, prepare more of it, or set mixture.parts.{name}.repeat=true"
            )
        if passes:
            log.info("%s: all %s documents are used, starting over (pass %d)", name, f"{len(lengths):,}", passes + 1)
        order = permutation(len(lengths), config.seed, number, passes)
        sums = total + np.cumsum(lengths[order])
        count = int(np.searchsorted(sums, budget))
        if count < len(order) and sums[count] - budget <= budget - (sums[count - 1] if count else total):
            count += 1
        chosen.append(order[:count])
        total = int(sums[count - 1]) if count else total
        passes += 1
        if count < len(order):
            break
    return np.concatenate(chosen)


def _places(stores, chosen: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Start (in its store) and length of every chosen document: int64 [documents] each."""
    starts, lengths = [], []
    for store, documents in zip(stores, chosen, strict=True):
        offsets = store.offsets()
        starts.append(offsets[documents])
        lengths.append(offsets[documents + 1] - offsets[documents])
    return np.concatenate(starts), np.concatenate(lengths)


def _summary(name: str, config: Mixture, store: TokenStore, output: Path, number: int, columns: dict) -> dict:
    mine = columns["source"] == number
    tokens = int(columns["length"][mine].sum())
    found = {"name": name, "store": os.path.relpath(store.path, output), "fingerprint": store.fingerprint}
    shares = {"asked": config.parts[name].share, "share": tokens / int(columns["length"].sum())}
    return found | shares | {"tokens": tokens, "documents": int(mine.sum())}


def _check_shares(parts: list[dict]) -> None:
    for part in parts:
        log.info("%s: %s tokens, %.2f %%", part["name"], f"{part['tokens']:,}", 100 * part["share"])
        if abs(part["share"] - part["asked"]) > TOLERANCE:
            raise ValueError(
                f"whole documents of {part['name']} come to {100 * part['share']:.2f} % of the tokens instead of "
                f"{100 * part['asked']:.2f} %; raise mixture.tokens, so that one document counts less"
            )


def _part_store(folder: Path, part: dict) -> TokenStore:
    store = TokenStore(os.path.normpath(folder / part["store"]))
    if store.fingerprint != part["fingerprint"]:
        raise ValueError(f"the store {store.path} is not the one that the mixture {folder} was made from; mix again")
    return store
