"""Rows of text from wherever they are, in one fixed order, from any point of it on."""

import fnmatch
import glob
import hashlib
import importlib.metadata
import importlib.util
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from .config import SourceConfig
from .order import permutation, shuffled

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # what `datasets` reads the suffix with
_PACKED = (".gz", ".zst")
_UNREADABLE = (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error)  # torn, misnamed, out of reach


class Rows:
    """Iterates (id, text) of the rows that pass the source's filters, in the source's order.

    `after` is the progress() of an earlier reader: iteration goes on behind the last row that one gave. Ids are text
    or None. Raises ValueError if there is nothing to read or a column is missing (naming those there are).
    """

    def __init__(self, source: SourceConfig, after: dict | None = None):
        self.source = source
        self._count = after["rows"] if after else 0
        self._state = after["state"] if after else None
        self._stream = None  # a `datasets` stream in its own order; one that is shuffled has no state to go on from

    def __iter__(self) -> Iterator[tuple[str | None, str]]:
        source = self.source
        keeps_id = has_ids(source)
        id_column = source.id_column or "id"
        for row in self._read():
            self._count += 1
            _check_columns(source, row)
            text = row[source.text_column]
            if text is None or any(str(row[key]) not in allowed for key, allowed in source.where.items()):
                continue
            if not isinstance(text, str):
                raise ValueError(
                    f"column {source.text_column!r} of {describe(source)} holds {type(text).__name__}, not text"
                )
            if len(text) >= source.min_characters:
                yield (str(row[id_column]) if keeps_id else None), text

    def progress(self) -> dict:
        """Where this reader stands, as JSON: rows read and, where `datasets` can jump there, its own state."""
        state = None if self._stream is None else self._stream.state_dict()
        return {"rows": self._count, "state": state}

    def _read(self) -> Iterator[dict]:
        source = self.source
        if is_text(source):
            paths = local_files(source)
            return (_read_text(source, *paths[i]) for i in self._order(len(paths)))
        data = _load(source)
        if not source.streaming:
            return self._guarded(data.select(self._order(len(data))))
        if source.shuffle:
            files = permutation(data.num_shards, source.shuffle_seed)
            rows = itertools.chain.from_iterable(data.shard(len(files), int(i)) for i in files)
            rows = shuffled(rows, source.shuffle_buffer, source.shuffle_seed)
            return self._guarded(itertools.islice(rows, self._count, None))
        self._stream = data
        if self._state is not None:
            self._stream.load_state_dict(self._state)
        return self._guarded(self._stream)

    def _order(self, count: int):
        """Which of `count` rows to read, from where this reader stands."""
        order = permutation(count, self.source.shuffle_seed) if self.source.shuffle else range(count)
        return order[self._count :]

    def _guarded(self, rows) -> Iterator[dict]:
        try:
            yield from rows
        except _UNREADABLE as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(f"{describe(self.source)} cannot be read behind row {self._count}: {reason}") from None


def is_text(source: SourceConfig) -> bool:
    """Whether the source is .txt files, a document each."""
    return source.dataset is None and _suffix(local_files(source)[0][0]) == ".txt"


def has_ids(source: SourceConfig) -> bool:
    """Whether documents keep an id: a column's value, or a .txt file's path."""
    return source.id_column is not None or is_text(source)


def local_files(source: SourceConfig) -> list[tuple[str, Path]]:
    """(name, path) of the local files, sorted by name; ValueError if none match or their kinds differ."""
    if source.package is not None:
        try:
            entries = importlib.metadata.files(source.package) or []
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                f"the package {source.package!r} that holds the text is not installed; pip install {source.package}"
            ) from None
        names = {str(entry): Path(entry.locate()) for entry in entries}
        found = {name: path for name, path in names.items() if any(fnmatch.fnmatch(name, g) for g in source.files)}
    else:
        found = {name: Path(name) for pattern in source.files for name in glob.glob(pattern, recursive=True)}
    files = sorted((name, path) for name, path in found.items() if path.is_file() and path.stat().st_size)
    if not files:
        raise ValueError(f"there is nothing to read: no file of {describe(source)} exists and has content")
    suffixes = {_suffix(name) for name, _ in files}
    allowed = {".txt", *_BUILDERS}
    if len(suffixes) > 1 or not suffixes <= allowed:
        raise ValueError(
            f"the files of a source must be of one kind of {', '.join(sorted(allowed))}; "
            f"{', '.join(source.files)} matches {', '.join(sorted(suffixes))}"
        )
    return files


def digest(source: SourceConfig) -> str | None:
    """A digest of the local files' names and sizes; None for a hub dataset."""
    if source.dataset is not None:
        return None
    lines = [f"{name}\t{path.stat().st_size}\n" for name, path in local_files(source)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def describe(source: SourceConfig) -> str:
    """The source in a few words, for messages and the store's summary."""
    if source.dataset is not None:
        return (
            f"the dataset {source.dataset}" + (f" ({source.name})" if source.name else "") + f", split {source.split}"
        )
    where = f"the package {source.package}" if source.package else "the local files"
    return f"{where} {', '.join(source.files)}"


def _load(source: SourceConfig):
    """The source as a `datasets` object, in its own order."""
    import datasets

    if source.dataset is not None:
        options = {"data_files": source.data_files} if source.data_files else {}
        arguments = {"path": source.dataset, "name": source.name, "revision": source.revision, "split": source.split}
    else:
        files = [(name, str(path)) for name, path in local_files(source)]
        options = {"data_files": {"train": [path for _, path in files]}}
        arguments = {"path": _BUILDERS[_suffix(files[0][0])], "split": "train"}
    packed = [name for name in map(str, source.data_files + source.files) if name.endswith(".zst")]
    if packed and importlib.util.find_spec("zstandard") is None:
        raise ValueError(f"reading {packed[0]} needs the package zstandard; pip install zstandard")
    try:
        return datasets.load_dataset(**arguments, **options, streaming=source.streaming)
    except StopIteration:
        raise ValueError(f"there is nothing to read: {describe(source)} has no rows") from None
    except (*_UNREADABLE, ValueError, IndexError, datasets.exceptions.DatasetGenerationError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{describe(source)} cannot be opened: {reason}") from None


def _check_columns(source: SourceConfig, row: dict) -> None:
    for name in [source.text_column, *([source.id_column] if source.id_column else []), *source.where]:
        if name not in row:
            raise ValueError(f"{describe(source)} has no column {name!r}; its columns are {', '.join(row)}")


def _read_text(source: SourceConfig, name: str, path: Path) -> dict:
    try:
        return {"id": name, source.text_column: path.read_bytes().decode("utf-8")}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert or leave out the file") from None


def _suffix(name: str) -> str:
    path = Path(name)
    inner = path.with_suffix("").suffix
    return inner if path.suffix in _PACKED and inner in _BUILDERS else path.suffix
