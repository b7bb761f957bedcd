"""What a model remembers of a text as a thing of its own: copied, put into other batches, saved and loaded.

Read a long document once, answer many questions:

    model(document, cache=cache)
    for question in questions:
        model.generate(torch.cat([document, question], 1), cache=copy_cache(cache))

or all at once, `select_rows(cache, [0] * len(questions))`. Before transformers 5.18 the argument is `past_key_values`.
A snapshot of a recurrent layer has one size, whatever the length of the text.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from .cache import RECURRENT, RecurrentLayer, adopt, new_cache

TENSORS = ("conv", "recurrent", "keys", "values")


def copy_cache(cache: Cache) -> Cache:
    """The same memory in tensors of its own, without gradients: neither notices what the other reads next."""
    if not isinstance(cache, Cache):
        raise ValueError(f"the cache is a {type(cache).__name__} but must be a transformers Cache.")
    made = {}  # deepcopy refuses tensors that a graph made, as they are after reading without torch.no_grad()
    for layer in cache.layers:
        recurrent = isinstance(layer, RecurrentLayer)
        held = (layer.conv_states[0], layer.recurrent_states[0]) if recurrent else (layer.keys, layer.values)
        made |= {id(x): x.detach().clone() for x in held if x is not None and x.grad_fn is not None}
    return copy.deepcopy(cache, made)


def select_rows(cache: Cache, rows: Sequence[int] | torch.Tensor) -> Cache:
    """A copy whose row i is row rows[i] of a DynamicCache: a part of the batch, or one text for several continuations.

    Raises:
        ValueError: a cache of another kind, or rows that are no integers or do not exist.
    """
    if not isinstance(cache, DynamicCache):
        raise ValueError(f"the cache is a {type(cache).__name__}, whose batch is fixed; select rows of a DynamicCache.")
    tensors = [tensor for layer in cache.layers for tensor in _tensors(layer).values()]
    size = len(tensors[0]) if tensors else 0
    rows = torch.as_tensor(rows) if len(rows) else torch.empty(0, dtype=torch.long)
    if rows.ndim != 1 or rows.dtype == torch.bool or rows.is_floating_point():
        raise ValueError(f"rows is {rows.tolist()}; give a sequence of integers, such as [0, 0, 2].")
    if len(rows) and (rows.min() < 0 or rows.max() >= size):
        raise ValueError(f"rows has {rows.min()} to {rows.max()}, but the cache has {size} rows, from 0 on.")
    chosen = copy_cache(cache)
    if tensors:
        chosen.batch_select_indices(rows.to(tensors[0].device))
    return chosen


def save_cache(cache: Cache, path: str | Path) -> None:
    """Write a cache that has read something to one safetensors file.

    Raises:
        ValueError: an empty cache, or a layer of a kind that has no file format here.
    """
    tensors, kinds, length = {}, [], int(cache.get_seq_length())
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, (RecurrentLayer, DynamicLayer, StaticLayer)):
            raise ValueError(f"layer {index} is a {type(layer).__name__}; save recurrent, dynamic or static layers.")
        kinds.append("linear_attention" if isinstance(layer, RecurrentLayer) else "full_attention")
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in _tensors(layer).items()}
    if not tensors or not length:
        raise ValueError("the cache is empty; save it after the model has read something.")
    save_file(tensors, path, metadata={"format": "pt", "tokens": str(length), "layer_types": " ".join(kinds)})


def load_cache(
    path: str | Path, config, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> DynamicCache:
    """The DynamicCache that `save_cache` wrote, for a model of this config.

    Args:
        dtype: of the model, where it is not that of the one which wrote the cache. Recurrent states have
            `config.linear_state_dtype` (float64 in a float64 model).

    Raises:
        ValueError: no such file or a torn one, a cache of another architecture, or a device that is not there.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # unknown, absent, or torch was built without it
        raise ValueError(f"device {device} cannot be used here; give that of the model, model.device.") from None
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as a cache ({error}); give a file that save_cache wrote.") from None
    found = metadata.get("layer_types", "").split()
    if found != ["linear_attention" if kind in RECURRENT else "full_attention" for kind in config.layer_types]:
        raise ValueError(f"{path} holds a cache of layers {found}, but the model has {list(config.layer_types)}.")
    cache = new_cache(config)
    try:
        for index, layer in enumerate(cache.layers):
            _fill(layer, {n: tensors.get(f"{index}.{n}") for n in TENSORS}, int(metadata["tokens"]), dtype)
    except (KeyError, AttributeError) as error:
        raise ValueError(f"{path} lacks tensors of a cache; give a file that save_cache wrote.") from error
    try:
        return adopt(cache, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _fill(layer, tensors: dict[str, torch.Tensor | None], num_tokens: int, dtype: torch.dtype | None) -> None:
    """Put tensors that `_tensors` named into an empty layer."""
    if dtype is not None:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = dict.fromkeys(TENSORS, dtype) | {"recurrent": exact}
        tensors = {name: None if x is None else x.to(dtypes[name]) for name, x in tensors.items()}
    if isinstance(layer, RecurrentLayer):
        layer.write(tensors["conv"], tensors["recurrent"], num_tokens)
    else:
        layer.update(tensors["keys"], tensors["values"])


def _tensors(layer) -> dict[str, torch.Tensor]:
    """What a layer remembers, by name; rows first, keys and values without room for more."""
    if isinstance(layer, RecurrentLayer):
        found = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
    else:
        end = int(layer.get_seq_length()) if isinstance(layer, StaticLayer) else None
        found = {n: None if x is None else x[:, :, :end] for n, x in (("keys", layer.keys), ("values", layer.values))}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.numel()}
