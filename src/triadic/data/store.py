"""Token stores: Arrow files that `datasets.load_from_disk` opens, read here memory-mapped and without copies.

A store is one stream of tokens, document after document, each BOS + ids + EOS. On disk it is a folder of Arrow files
with the column input_ids (a list of uint16 or uint32 a document) and `store.json`, which is written last.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from .files import sha256, write_json

FORMAT = 1
_FIELDS = {"num_tokens": int, "num_documents": int, "vocab_size": int, "bos": int, "eos": int}
_FIELDS |= {"tokenizer_hash": str, "fingerprint": str, "dtype": str, "files": list}
_DTYPES = ("uint16", "uint32")
_PIECES = {"tokens": "files", "mixture": "parts"}  # what the totals of a store of each kind are summed over


class TokenStore:
    """One stream of `num_tokens` tokens in `num_documents` documents.

    Raises ValueError if the folder holds no complete store or a file's size is not the recorded one.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        meta = read_meta(self.path, kind="tokens")
        self.num_tokens: int = meta["num_tokens"]
        self.num_documents: int = meta["num_documents"]
        self.vocab_size: int = meta["vocab_size"]
        self.tokenizer_hash: str = meta["tokenizer_hash"]
        self.fingerprint: str = meta["fingerprint"]
        self.bos: int = meta["bos"]
        self.eos: int = meta["eos"]
        self.dtype = np.dtype(meta["dtype"])
        self._files = meta["files"]
        self._edges = np.cumsum([0] + [file["tokens"] for file in self._files])  # [files + 1] first token of each file
        self._opened: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for file in self._files:
            check_size(self.path / file["name"], file["bytes"])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream: uint16 or uint32, a view of the file where one file holds them all."""
        check_range(self, start, stop)
        pieces = []
        while start < stop or not pieces:
            index = self._file_of(start)
            first = int(self._edges[index])
            end = min(stop, int(self._edges[index + 1]))
            pieces.append(self._file(index)[0][start - first : end - first])
            start = end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) of the stream at which a document starts: int64, ascending."""
        check_range(self, start, stop)
        pieces = [np.empty(0, dtype=np.int64)]
        while start < stop:
            index = self._file_of(start)
            first = int(self._edges[index])
            end = min(stop, int(self._edges[index + 1]))
            offsets = self._file(index)[1][:-1]  # [documents of the file]
            low, high = np.searchsorted(offsets, [start - first, end - first])
            pieces.append(offsets[low:high].astype(np.int64) + first)
            start = end
        return np.concatenate(pieces)

    def offsets(self) -> np.ndarray:
        """Where every document starts, and at last where the stream ends: int64 [num_documents + 1]."""
        return np.append(self.starts(0, self.num_tokens), self.num_tokens)

    def document_ids(self) -> list[str] | None:
        """The documents' ids in order, or None if the store keeps none."""
        tables = [read_table(self.path / file["name"]) for file in self._files]
        if "id" not in tables[0].column_names:
            return None
        return [value for table in tables for value in table["id"].to_pylist()]

    def verify(self) -> None:
        """Read every byte and raise ValueError if a file is not what was written."""
        for file in self._files:
            if sha256(self.path / file["name"]) != file["sha256"]:
                raise damaged(self.path / file["name"], "its content is not what was written")

    def __reduce__(self):
        return TokenStore, (str(self.path),)

    def _file_of(self, position: int) -> int:
        return min(int(np.searchsorted(self._edges, position, side="right")) - 1, len(self._files) - 1)

    def _file(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Values [tokens of the file] and offsets [documents of the file + 1], both memory-mapped."""
        if index not in self._opened:
            path = self.path / self._files[index]["name"]
            column = read_table(path)["input_ids"].chunk(0)
            values, offsets = column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)
            if len(values) != self._files[index]["tokens"] or values.dtype != self.dtype:
                raise damaged(path, f"it holds {len(values):,} {values.dtype} tokens")
            self._opened[index] = values, offsets
        return self._opened[index]


def open_store(path: str | Path):
    """The store at `path`: a TokenStore, or a MixtureStore with the same reading methods."""
    from .mixture import MixtureStore

    kinds = {"tokens": TokenStore, "mixture": MixtureStore}
    return kinds[read_meta(Path(path))["kind"]](path)


def write_tokens(path: Path, values: np.ndarray, lengths: Sequence[int], ids: Sequence[str] | None) -> None:
    """Write documents to one Arrow file at `path` (one record batch).

    values: uint16 or uint32 [tokens]; lengths: tokens of each document; ids: a text a document, or None.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    columns = {"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))}
    if ids is not None:
        columns["id"] = pa.array(ids, pa.string())
    batch = pa.record_batch(columns)
    write_batch(path, batch)


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    """An Arrow file (stream format, as `datasets` keeps it) of one record batch."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_tokens(path: Path) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
    """What write_tokens wrote: values, lengths (int64), ids."""
    table = read_table(path)
    column = table["input_ids"].chunk(0)
    ids = table["id"].to_pylist() if "id" in table.column_names else None
    return column.values.to_numpy(), np.diff(column.offsets.to_numpy().astype(np.int64)), ids


def write_meta(folder: Path, meta: dict, columns: dict[str, str]) -> None:
    """Complete a store: the two files that make the folder a `datasets` one, then store.json.

    meta needs kind, fingerprint and files (each with name, bytes); columns maps names to Arrow types, "list:uint16"
    being a list.
    """
    features = {}
    for name, kind in columns.items():
        value = {"dtype": kind.removeprefix("list:"), "_type": "Value"}
        features[name] = {"feature": value, "_type": "List"} if kind.startswith("list:") else value
    state = {"_data_files": [{"filename": file["name"]} for file in meta["files"]]}
    state |= {"_fingerprint": meta["fingerprint"][:16], "_format_columns": None, "_format_kwargs": {}}
    state |= {"_format_type": None, "_output_all_columns": False, "_split": None}
    write_json(folder / "dataset_info.json", {"features": features})
    write_json(folder / "state.json", state)
    write_json(folder / "store.json", {"format": FORMAT} | meta)


def read_meta(folder: Path, kind: str | None = None) -> dict:
    """The content of store.json, or ValueError."""
    path = folder / "store.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no complete token store (no store.json); run scripts/prepare_data.py for it")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise ValueError(
                f"{folder} has store format {meta['format']}, this version reads {FORMAT}; prepare it again"
            )
        sound = _adds_up(meta)
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        sound = False
    if not sound:
        raise damaged(path, "it is not the JSON that was written")
    if kind is not None and meta["kind"] != kind:
        raise ValueError(f"{folder} is a store of kind {meta['kind']!r}, not {kind!r}; open it with open_store")
    return meta


def _adds_up(meta: dict) -> bool:
    """Whether store.json holds every field with its type, and its parts sum up to its totals."""
    if not all(isinstance(meta[name], kind) for name, kind in _FIELDS.items()) or meta["dtype"] not in _DTYPES:
        return False
    pieces = meta[_PIECES[meta["kind"]]]
    files = all(isinstance(file["name"], str) and isinstance(file["bytes"], int) for file in meta["files"])
    counted = all(meta[f"num_{what}"] == sum(piece[what] for piece in pieces) for what in ("tokens", "documents"))
    return bool(meta["files"]) and files and counted


def check_size(path: Path, size: int) -> None:
    """Raise ValueError unless `path` is a file of `size` bytes."""
    if not path.is_file():
        raise damaged(path, "it is missing")
    if path.stat().st_size != size:
        raise damaged(path, f"it has {path.stat().st_size:,} bytes instead of {size:,}")


def check_tokenizer(store, tokenizer) -> None:
    """Raise ValueError unless `store` was made with `tokenizer` (an object, a folder or a hub id)."""
    from .tokenizer import tokenizer_hash

    found = tokenizer_hash(tokenizer)
    if found != store.tokenizer_hash:
        raise ValueError(
            f"the store {store.path} was made with another tokenizer ({store.tokenizer_hash[:12]}) than this one "
            f"({found[:12]}); prepare the data with the model's tokenizer or load the tokenizer saved beside the store"
        )


def read_table(path: Path) -> pa.Table:
    """A memory-mapped Arrow file, or ValueError."""
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path, f"Arrow cannot read it ({str(error).splitlines()[0]})") from None


def check_range(store, start: int, stop: int) -> None:
    """Raise ValueError unless [start, stop) lies in the store's stream."""
    if not 0 <= start <= stop <= store.num_tokens:
        raise ValueError(f"tokens [{start}, {stop}) lie outside the store's {store.num_tokens:,} tokens")


def damaged(path: Path, what: str) -> ValueError:
    """The error for a file of a store that is not as it was written."""
    return ValueError(f"the token store file {path} is damaged: {what}; delete its folder and prepare the data again")
