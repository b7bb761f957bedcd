"""How fast a model decodes and reads a prompt, on a GPU against what the memory's bandwidth allows."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache

from triadic.models import TriadicConfig, TriadicForCausalLM, check_timeable
from triadic.models.cache import CACHE_NAME, RecurrentLayer, new_cache
from triadic.models.loading import load_config
from triadic.origin import origin, versions

SEED_TOKENS = 4  # fill the caches before the clock starts
UNTIMED = 4  # steps that compile, record and replay
TRIAL = "configs/model/demo.json --batch 1 --context 128 --steps 9"  # seconds on a CPU
ROUNDS = 5  # of steps, timed one by one; their median counts


def copy_bandwidth(device: torch.device, gib: float = 4.0) -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted: the best of a few."""
    x = torch.empty(int(gib * 2**28), device=device).normal_()
    y = torch.empty_like(x)
    y.copy_(x)
    return 2 * x.nbytes / min(_seconds(lambda: y.copy_(x), device) for _ in range(10))


def random_model(config: TriadicConfig, device: torch.device, dtype: torch.dtype) -> TriadicForCausalLM:
    """A model of random weights: speed does not depend on their values."""
    with torch.device(device):
        return TriadicForCausalLM._from_config(config, dtype=dtype).eval()


@torch.no_grad()
def decoding_speed(
    model: TriadicForCausalLM, batch: int, contexts: list[int], bandwidth: float | None, *, steps: int = 64
) -> list[dict[str, Any]]:
    """Greedy decoding of `batch` sequences of so many tokens each, from a static cache; on a GPU compiled and replayed
    as CUDA graphs. A row for each context.

    The prompt itself is not read: the caches are told that they hold `context` tokens. Where all layers are recurrent
    one cache serves all contexts, whose rounds take turns, so that a GPU that grows warm slows none more than another.

    Args:
        contexts: one alone where a layer keeps keys and values, whose cache is as long as the context.
        bandwidth: bytes per second, see `copy_bandwidth`; None on a CPU, whose caches hold what a small model reads.

    Returns:
        ms_per_step (each step gives every sequence a token; host time included), tokens_per_s, and roofline: the time
        to read the weights once and the states or keys and values (read and, states, written) at `bandwidth`, over the
        time taken (None without a bandwidth); the bytes of each, and the peak of the allocated memory.
    """
    device = model.device
    cache = StaticCache(model.config, max_cache_len=max(contexts) + steps + SEED_TOKENS)
    ids = torch.randint(model.config.vocab_size, (batch, SEED_TOKENS), device=device)
    model(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    step, ids = _stepper(model, cache, device), ids[:, :1]

    def decode(context, count):
        """Seconds of `count` steps after `context` tokens."""
        for layer in cache.layers:
            length = layer.num_tokens if isinstance(layer, RecurrentLayer) else layer.cumulative_length
            length.fill_(context)
        now = ids, torch.full((batch, 1), context, device=device)

        def run():
            nonlocal now
            for _ in range(count):
                now = step(*now)

        return _seconds(run, device)

    decode(contexts[0], UNTIMED)
    _reset_peak(device)
    each = (steps - UNTIMED) // ROUNDS
    rounds = [[decode(context, each) / each for context in contexts] for _ in range(ROUNDS)]
    rows = []
    for context, times in zip(contexts, zip(*rounds, strict=True), strict=True):
        seconds, moved = statistics.median(times), _bytes_moved(model, cache, batch, context)
        roofline = None if bandwidth is None else round(sum(moved.values()) / bandwidth / seconds, 3)
        rows.append({
            "what": "decode_model", "B": batch, "context": context, "ms_per_step": round(seconds * 1e3, 4),
            "tokens_per_s": round(batch / seconds, 1), "roofline": roofline,
            **{f"{name}_gb": round(value / 1e9, 9) for name, value in moved.items()}, "peak_gib": _peak(device),
        })  # fmt: skip
    return rows


@torch.no_grad()
def prefill_speed(
    model: TriadicForCausalLM, batch: int, contexts: list[int], *, chunk: int = 16384
) -> list[dict[str, Any]]:
    """Time to read prompts of one context's tokens, `chunk` tokens at a time, until the first logits."""
    (context,) = contexts
    ids = torch.randint(model.config.vocab_size, (batch, context), device=model.device)

    def prefill():
        cache = new_cache(model.config)
        for piece in ids.split(chunk, dim=1):
            model(piece, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})

    prefill()
    _reset_peak(model.device)
    seconds = _seconds(prefill, model.device)
    return [{
        "what": "prefill_model", "B": batch, "context": context, "chunk": chunk, "ms": round(seconds * 1e3, 3),
        "tokens_per_s": round(batch * context / seconds, 1), "peak_gib": _peak(model.device),
    }]  # fmt: skip


def _stepper(model, cache, device):
    """(ids [B, 1], positions [B, 1]) -> those of the next step."""

    def step(ids, position, mask):
        logits = model(
            ids, position_ids=position, attention_mask=mask, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache}
        ).logits
        return logits[:, -1:].argmax(-1), position + 1

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True) if device.type == "cuda" else step

    def call(ids, position):
        embeds = torch.empty(len(ids), 1, 0, dtype=model.dtype, device=device)
        mask = model.create_masks_for_generate(model.config, embeds, None, **{CACHE_NAME: cache})
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(x.clone() for x in compiled(ids, position, mask))  # the graph owns its outputs

    return call


def _bytes_moved(model, cache, batch, context) -> dict[str, int]:
    """Bytes that a step cannot avoid: weights once (of the embedding only rows), states twice, keys and values once."""
    unread = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    moved = {"weights": sum(p.nbytes for p in model.parameters()) - unread, "states": 0, "keys_values": 0}
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            moved["states"] += 2 * layer.recurrent_states[0].nbytes
        else:
            moved["keys_values"] += 2 * batch * context * layer.keys[0, :, 0].nbytes
    return moved


def _seconds(call, device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def _reset_peak(device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None


def _device(name) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name} is no device; give --device cuda or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name}; torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def measure(models, batch, context, prefill, state, dtype, steps, device, command, **_) -> Iterator[dict[str, Any]]:
    """The result file after every row: each model config at every batch and context, and at every prompt length.

    What does not fit into the memory leaves a row that says so.

    Raises:
        ValueError: numbers that cannot be measured with, a device that is not there, a model config that cannot be
            read, or a large model where there is no GPU.
    """
    if steps < UNTIMED + ROUNDS or min([1, *batch, *context, *prefill]) < 1:
        raise ValueError(
            f"batch, context and prefill must be at least 1, and steps at least {UNTIMED + ROUNDS}: "
            f"{UNTIMED} untimed ones and {ROUNDS} rounds of one or more."
        )
    device = _device(device)
    states = {"linear_state_dtype": state}
    configs = {path: TriadicConfig(**{**load_config(path).to_dict(), **states}) for path in models}  # checked once more
    for path, config in configs.items():
        check_timeable(config, path, TRIAL)
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    tbps = None if bandwidth is None else round(bandwidth / 1e12, 3)
    result = origin(command) | {"versions": versions(), "copy_tbps": tbps, "rows": []}
    for path, config in configs.items():
        model = random_model(config, device, getattr(torch, dtype))
        facts = {"model": Path(path).stem, "E": config.second_key_dim, "state": state, "dtype": dtype}
        recurrent = set(config.layer_types) == {"linear_attention"}
        together = [context] if recurrent else [[c] for c in context]
        jobs = [(decoding_speed, b, cs, {"bandwidth": bandwidth, "steps": steps}) for b in batch for cs in together]
        jobs += [(prefill_speed, 1, [length], {}) for length in prefill]
        for job, b, contexts, options in jobs:
            try:
                rows = job(model, b, contexts, **options)
            except torch.OutOfMemoryError as error:
                rows = [{"what": job.__name__, "B": b, "context": c, "error": str(error)[:200]} for c in contexts]
            for row in rows:
                result["rows"].append(facts | row)
                yield result
            torch.compiler.reset()  # graphs hold memory
            if device.type == "cuda":
                torch.cuda.empty_cache()
