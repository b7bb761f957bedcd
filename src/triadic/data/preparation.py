"""Text to token stores, by several processes, killed and resumed at any moment with the same bytes in the end.

An output folder holds `job.json` (what it is being prepared from; another configuration is refused), `tokenizer/`,
`parts/` while work is going on, and at last the stores `validation/` and `train/`, complete once they have store.json.
"""

import json
import logging
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from ..models.loading import load_tokenizer
from ..settings import to_dict
from . import mixture, tokenizer
from .assemble import Splitter, assemble
from .config import DataConfig, SourceConfig
from .files import locked, sweep, sync, write_json
from .parts import Chooser, Done, Job, Part, cut, start_worker, tokenise
from .sources import Rows, describe, digest
from .store import open_store, read_tokens

log = logging.getLogger("triadic.data")


def prepare(config: DataConfig) -> Path:
    """Do what `config` says, or go on with it, or see that it is done; returns the output folder.

    Raises ValueError, before anything is written, if the text cannot be read or the folder belongs to something else.
    """
    output = Path(config.output)
    asked = {key: value for key, value in to_dict(config).items() if key not in ("output", "workers")}
    check_claim(output, asked)
    if _complete(output):
        log.info("%s is already prepared", output)
        _settle(output)
    else:
        if config.source is not None:
            check_source(config.source)
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the output {output} cannot be made: {error.strerror}; choose another one") from None
        with locked(output):
            sweep(output)
            try:
                claim(output, asked, None if config.source is None else digest(config.source))
                _tokenizer(config, output)
                if config.source is not None:
                    prepare_source(config.source, output, output / "tokenizer", config)
                else:
                    _prepare_mixture(config, output)
            except ValueError:
                _withdraw(output)
                raise
    stores = [open_store(output / split) for split in ("train", "validation") if (output / split).is_dir()]
    for store in stores:
        log.info("%s: %s tokens in %s documents", store.path, f"{store.num_tokens:,}", f"{store.num_documents:,}")
    if len(stores) == 2 and stores[1].num_tokens > stores[0].num_tokens:
        log.warning("more text is held out than there is for training; lower what source.validation holds out")
    return output


def prepare_source(source: SourceConfig, output: Path, tokenizer_folder: Path, config: DataConfig) -> None:
    """Tokenise `source` into output/train and output/validation."""
    parts = output / "parts"
    plan = parts / "plan.json"
    if not plan.is_file():
        parts.mkdir(exist_ok=True)
        sweep(parts)
        meta = _meta(tokenizer_folder)
        splitter = _tokenise_all(source, parts, tokenizer_folder, meta, config)
        write_json(plan, {"meta": meta | {"source": describe(source)}, "parts": splitter.plan})
    assemble(json.loads(plan.read_text(encoding="utf-8")), output, source)
    _settle(output)


def check_source(source: SourceConfig) -> None:
    """Raise ValueError unless the source has a document to give."""
    if next(iter(Rows(replace(source, shuffle=False))), None) is None:
        raise ValueError(
            f"{describe(source)} has no document of at least {source.min_characters} characters in column "
            f"{source.text_column!r}" + (" that passes source.where" if source.where else "")
        )


def check_claim(output: Path, asked: dict) -> None:
    """Raise ValueError unless `output` is new, empty, or was begun with the configuration `asked`."""
    path = output / "job.json"
    if path.is_file():
        begun = _flat(json.loads(path.read_text(encoding="utf-8"))["config"])
        now = _flat(json.loads(json.dumps(asked)))
        differing = [key for key in {**begun, **now} if begun.get(key) != now.get(key)]
        if differing:
            changes = "; ".join(f"{key} was {begun.get(key)!r}, now {now.get(key)!r}" for key in differing)
            kept = [path.parent for path in sorted(output.glob("sources/*/train/store.json"))]
            again = "; its sources are finished and can be named as store: " + ", ".join(map(str, kept)) if kept else ""
            raise ValueError(
                f"{output} was prepared with other settings ({changes}); choose another output or delete it{again}"
            )
    elif output.is_dir() and any(not _is_trace(entry) for entry in output.iterdir()):
        raise ValueError(f"{output} holds something else than prepared data (no job.json); choose another output")
    elif output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; choose another output")


def claim(output: Path, asked: dict, files: str | None) -> None:
    """Mark `output` as being prepared from `asked` and local files with the digest `files`."""
    path = output / "job.json"
    if not path.is_file():
        write_json(path, {"config": asked, "files": files})
    elif json.loads(path.read_text(encoding="utf-8"))["files"] != files:
        raise ValueError(f"the source files changed since {output} was begun; delete it or restore them")


def _tokenise_all(
    source: SourceConfig, parts: Path, tokenizer_folder: Path, meta: dict, config: DataConfig
) -> Splitter:
    """Tokenise what is not yet in `parts`; returns which documents go where."""
    splitter = Splitter(source)
    after = None
    while not splitter.full and (record := parts / f"part-{len(splitter.plan):05d}.json").is_file():
        done = json.loads(record.read_text(encoding="utf-8"))
        after = done.pop("after")
        splitter.add(done, read_tokens(record.with_suffix(".arrow"))[1])
    job = Job(str(parts), str(tokenizer_folder / "tokenizer.json"), meta["tokenizer_hash"], *_special(meta))
    with tqdm(desc=describe(source), unit=" tokens", unit_scale=True, total=source.max_tokens) as bar:
        bar.update(splitter.tokens)
        if not splitter.full:
            todo = cut(source, config.part_characters, len(splitter.plan), after)
            for part, done in _run(todo, job, config.workers or os.cpu_count() or 1):
                splitter.add(_commit(part, done, parts), done.lengths)
                bar.update(int(done.lengths.sum()))
                if splitter.full:
                    break
    try:
        splitter.check()
    except ValueError:  # these parts serve this configuration alone, which can never succeed
        shutil.rmtree(parts)
        raise
    return splitter


def _run(parts: Iterable[Part], job: Job, workers: int) -> Iterator[tuple[Part, Done]]:
    """Each part with its result, in order; a few parts ahead are under way in other processes."""
    if workers == 1:
        yield from ((part, tokenise(part, job)) for part in parts)
        return
    context = multiprocessing.get_context("forkserver")  # starts clean: no threads of this process are forked
    context.set_forkserver_preload(["triadic.data.parts"])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
        waiting: deque = deque()
        try:
            for part in parts:
                waiting.append((part._replace(texts=[]), pool.submit(tokenise, part, job)))
                if len(waiting) > workers:
                    part, future = waiting.popleft()
                    yield part, future.result()
            while waiting:
                part, future = waiting.popleft()
                yield part, future.result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a tokenising process was killed (out of memory?); run the same command again to go on, with fewer "
                "workers if need be"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _commit(part: Part, done: Done, parts: Path) -> dict:
    """Give a part its final name, then its record, which makes it count."""
    name = f"part-{part.index:05d}"
    os.replace(done.temporary, parts / f"{name}.arrow")
    sync(parts)
    record = {"bytes": done.bytes, "sha256": done.sha256, "validation": part.validation, "reserved": part.reserved}
    write_json(parts / f"{name}.json", record | {"after": part.after})
    return record


def _tokenizer(config: DataConfig, output: Path) -> None:
    """Make output/tokenizer unless it is there."""
    folder = output / "tokenizer"
    if folder.is_dir():
        return
    if config.tokenizer.train is not None:
        log.info("training a tokenizer of %d entries", config.tokenizer.train.vocab_size)
        chooser = Chooser(config.source)
        texts = (text for _, text in Rows(config.source) if chooser(text) == "train")
        made = tokenizer.train(config.tokenizer.train, texts)
    else:
        made = tokenizer.load_pretrained(config.tokenizer)
    temporary = output / "tokenizer.tmp"
    made.save_pretrained(temporary)
    for file in temporary.iterdir():
        sync(file)
    os.replace(temporary, folder)
    sync(output)


def _prepare_mixture(config: DataConfig, output: Path) -> None:
    """Prepare the parts that are sources, then write the order of documents."""
    stores = {}
    for name, part in config.mixture.parts.items():
        if part.store is not None:
            stores[name] = Path(part.store)
            continue
        folder = output / "sources" / name
        source = mixture.limited(part, config.mixture.tokens)
        asked = {"source": to_dict(source), "part_characters": config.part_characters}
        check_claim(folder, asked)
        if not _complete(folder):
            check_source(source)
            folder.mkdir(parents=True, exist_ok=True)
            claim(folder, asked, digest(source))
            prepare_source(source, folder, output / "tokenizer", config)
        stores[name] = folder / "train"
    mixture.build(config.mixture, stores, output / "train", tokenizer.tokenizer_hash(output / "tokenizer"))


def _meta(tokenizer_folder: Path) -> dict:
    """What a store records about its tokenizer."""
    made = load_tokenizer(tokenizer_folder)
    size = tokenizer.vocab_size(made)
    meta = {"tokenizer_hash": tokenizer.tokenizer_hash(made), "vocab_size": size}
    return meta | {"bos": made.bos_token_id, "eos": made.eos_token_id}


def _special(meta: dict) -> tuple[int, int, int]:
    return meta["vocab_size"], meta["bos"], meta["eos"]


def _complete(output: Path) -> bool:
    return (output / "train" / "store.json").is_file()  # written last


def _is_trace(entry: Path) -> bool:
    """Whether a file is only the trace of a process that was stopped before it had claimed the folder."""
    return entry.name == ".lock" or entry.suffix == ".tmp"


def _withdraw(output: Path) -> None:
    """Take back the claim on an output that holds no work yet, so that a mended configuration can have it."""
    if not any((output / name).exists() for name in ("parts", "sources", "train", "validation")):
        (output / "job.json").unlink(missing_ok=True)
        shutil.rmtree(output / "tokenizer", ignore_errors=True)


def _settle(output: Path) -> None:
    """Remove what only an unfinished output needs."""
    shutil.rmtree(output / "parts", ignore_errors=True)


def _flat(tree: dict, prefix: str = "") -> dict:
    """Nested mappings as one with dotted keys."""
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
