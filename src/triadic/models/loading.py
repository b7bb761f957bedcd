"""Load models and tokenizers, or say in one sentence why they cannot be used; write folders whole or not at all."""

import contextlib
import shutil
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoTokenizer

from .configuration_triadic import TriadicConfig

SHOWN = 3  # names of weights in a message


def load_weights(cls, source, **options):
    """`cls.from_pretrained(source, **options)` from safetensors alone, with every weight from the file.

    Raises ValueError for files that are missing, torn or need unpickling, and for weights that do not fit the config:
    missing ones (transformers would draw them anew and go on), other shapes and, in this package's models, unknown
    ones.
    """
    if Path(source).is_file():
        raise ValueError(f"{source} is a file; give the folder of the model")
    try:
        model, report = cls.from_pretrained(
            source, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (OSError, RuntimeError, ValueError, ImportError, KeyError, AttributeError, SafetensorError) as error:
        raise ValueError(f"{source} cannot be loaded: {one_line(error)}") from error
    kinds = {"missing_keys": "missing", "mismatched_keys": "of another shape"}
    if model.config.model_type == TriadicConfig.model_type:
        kinds["unexpected_keys"] = "unknown"
    misfits = [f"{kind}: {_some(report[key])}" for key, kind in kinds.items() if report[key]]
    if misfits:
        raise ValueError(f"the weights in {source} do not fit the model's config; {'; '.join(misfits)}")
    return model


def load_config(source: str | Path) -> TriadicConfig:
    """The model config of a JSON file, or of a folder that holds one; ValueError if there is none."""
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    try:
        if not path.is_file():
            raise OSError("there is no such file")  # which transformers would ask the hub for
        return TriadicConfig.from_pretrained(path)
    except (OSError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as a model config: {one_line(error)}") from error


def load_tokenizer(source: str | Path, **options):
    """The tokenizer in a folder or of a hub id; ValueError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(str(source), **options)
    except Exception as error:  # a damaged tokenizer.json makes `tokenizers` raise bare Exceptions
        raise ValueError(f"no tokenizer can be loaded from {source}: {one_line(error)}") from None


@contextlib.contextmanager
def writing(folder: Path):
    """While entered, a new or empty `folder` is filled; if that fails, what has been written is removed.

    Raises ValueError if the disk refuses.
    """
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if existed:
            folder.mkdir(exist_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise ValueError(f"{folder} cannot be written: {one_line(error)}") from error
        raise


def one_line(error: Exception) -> str:
    """An error's message on one line; its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _some(keys) -> str:
    names = sorted(key if isinstance(key, str) else key[0] for key in keys)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
