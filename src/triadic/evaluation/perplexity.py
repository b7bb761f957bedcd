"""Perplexity by position in the full windows of held-out documents, against a unigram model and a baseline.

A window is `window + 1` consecutive tokens of one document; its first `window` tokens are the input and its last
`window` the targets, so position p is scored after p + 1 tokens of context and every window scores exactly `window`
targets. A bucket's perplexity is exp of the mean loss over all its targets. Every standard error is over documents
(windows of one document are not independent): with x_i the value of window i and m their mean,
SE^2 = G / (G - 1) * sum over documents of (sum over its windows of (x_i - m))^2 / n^2, for G documents, n windows.
"""

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from triadic.data import TokenStore
from triadic.evaluation.config import ModelConfig, PerplexityConfig
from triadic.evaluation.documents import Documents, Window, full_windows, open_documents, own_store
from triadic.evaluation.journal import gather, rank, world_size
from triadic.evaluation.loading import Checkpoint, load_checkpoint
from triadic.evaluation.scoring import token_losses

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context


def measure(context: "Context", config: PerplexityConfig) -> list[dict[str, Any]]:
    """The rows of this part: perplexity by bucket, loss by position, the drop between buckets, loss over unigram.

    Raises ValueError if the window is longer than the model can take or there is no full window.
    """
    documents = open_documents(context.data("validation"), context.checkpoint.tokenizer, context.suite.data.column)
    windows = full_windows(documents, config.window, config.max_windows)
    unigram = None
    if config.unigram:
        store = own_store(context.data("train"), context.checkpoint.tokenizer)
        unigram = unigram_losses(store, context.checkpoint.model.get_output_embeddings().weight.shape[0])
    table = _table(context, "perplexity", context.checkpoint, documents, windows, config, unigram)
    rows = _rows(table, windows, config)
    if config.baseline is not None:
        rows += _baseline_rows(context, documents, windows, config)
    return rows


def window_losses(
    checkpoint: Checkpoint, documents: Documents, windows: list[Window], length: int, batch: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Losses and targets of windows: ([n, length] float64 nats, [n, length] int64)."""
    losses, targets = [], []
    for first in range(0, len(windows), batch):
        tokens = np.stack([documents.read(w.document, w.start, w.start + length + 1) for w in windows[first:][:batch]])
        ids = torch.from_numpy(tokens.astype(np.int64)).to(checkpoint.model.device)  # [b, length + 1]
        losses.append(token_losses(checkpoint.model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).double().cpu())
        targets.append(ids[:, 1:].cpu())
    return torch.cat(losses).numpy(), torch.cat(targets).numpy()


def unigram_losses(store: TokenStore, vocabulary: int) -> np.ndarray:
    """Negative log-probability of every token under the store's own frequencies, add-one smoothed. [V] float64

    BOS is left out: no window has it as a target.
    """
    counts = np.zeros(vocabulary, dtype=np.int64)
    for first in range(0, store.num_tokens, 1 << 22):
        counts += np.bincount(store.tokens(first, min(first + (1 << 22), store.num_tokens)), minlength=vocabulary)
    if store.bos is not None:
        counts[store.bos] = 0
    return math.log(counts.sum() + vocabulary) - np.log(counts + 1)


def clustered_mean(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float | None]:
    """Mean of values [n] and its standard error over clusters [n] (see the top of this file).

    With one value for each cluster this is the usual standard deviation over the root of n. None with one cluster.
    """
    mean = values.mean()
    _, member = np.unique(clusters, return_inverse=True)
    sums = np.bincount(member, weights=values - mean)
    groups = len(sums)
    if groups < 2:
        return float(mean), None
    return float(mean), float(np.sqrt(groups / (groups - 1) * (sums**2).sum()) / len(values))


def curve_edges(window: int, points: int) -> list[int]:
    """Geometrically growing bin edges of positions, from 0 to `window`."""
    return [0, *np.unique(np.geomspace(1, window, points).round().astype(int)).tolist()]


def _cells(config: PerplexityConfig) -> np.ndarray:
    """Edges of the finest cells that buckets and curve are made of."""
    return np.unique([*config.buckets, *curve_edges(config.window, config.curve_points)])


def _table(
    context: "Context",
    name: str,
    checkpoint: Checkpoint,
    documents: Documents,
    windows: list[Window],
    config: PerplexityConfig,
    unigram: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Summed losses of each window: "cells" [n, cells] and, with a unigram table, "unigram" [n]."""
    if checkpoint.max_length is not None and config.window > checkpoint.max_length:
        raise ValueError(
            f"perplexity.window is {config.window} tokens, but {checkpoint.name} takes at most "
            f"{checkpoint.max_length}; lower it, or raise model.max_length if the model can extrapolate"
        )
    starts = _cells(config)[:-1]
    batch = max(1, min(context.suite.model.batch_size, context.suite.model.batch_tokens // config.window))

    def step(mine: list[Window]) -> list[list[float]]:
        out = []
        for first in range(0, len(mine), batch):
            losses, targets = window_losses(checkpoint, documents, mine[first : first + batch], config.window, batch)
            out += np.add.reduceat(losses, starts, axis=1).tolist()
            if unigram is not None:
                for row, wanted in zip(out[first:], targets, strict=True):
                    row.append(float(unigram[wanted].sum()))
            bar.update(len(losses) * world_size())
        return gather(out)

    values = []
    with tqdm(total=len(windows), desc=name, unit="window", disable=rank() != 0) as bar:
        for first in range(0, len(windows), config.windows_per_step):
            group = windows[first : first + config.windows_per_step]
            part = context.journal.once(f"{name}-{first:06d}", lambda g=group: step(g[rank() :: world_size()]))
            values += part
            bar.n = len(values)
            bar.refresh()
    table = np.array(values)  # [n, cells (+ 1)]
    return {"cells": table[:, : len(starts)]} | ({} if unigram is None else {"unigram": table[:, -1]})


def _rows(table: dict[str, np.ndarray], windows: list[Window], config: PerplexityConfig) -> list[dict[str, Any]]:
    owners = np.array([w.document for w in windows])
    facts = {"windows": len(windows), "documents": len(set(owners.tolist())), "window": config.window}

    def between(low: int, high: int) -> np.ndarray:
        """Each window's mean loss at positions low..high - 1. [n]"""
        edges = _cells(config)
        inside = (edges[:-1] >= low) & (edges[1:] <= high)
        return table["cells"][:, inside].sum(1) / (high - low)

    buckets = list(itertools.pairwise(config.buckets))
    rows = []
    for low, high in buckets:
        loss, se = clustered_mean(between(low, high), owners)
        scored = {"tokens_scored": len(windows) * (high - low)}
        rows.append(
            {"metric": "perplexity", "position": [low, high], "value": math.exp(loss), "loss": loss, "loss_se": se}
            | {"se": None if se is None else math.exp(loss) * se}  # to first order
            | facts
            | scored
        )
    drop, se = clustered_mean(between(*buckets[0]) - between(*buckets[-1]), owners)  # paired within a window
    rows.append({"metric": "context_gain", "position": [*buckets[0], *buckets[-1]], "value": drop, "se": se} | facts)
    whole = between(0, config.window)
    loss, se = clustered_mean(whole, owners)
    scored = {"tokens_scored": len(windows) * config.window}
    rows.append({"metric": "heldout_loss", "value": loss, "se": se} | facts | scored)
    if "unigram" in table:
        unigram = table["unigram"] / config.window
        for metric, values in (("unigram_loss", unigram), ("gain_over_unigram", unigram - whole)):
            value, se = clustered_mean(values, owners)
            rows.append({"metric": metric, "value": value, "se": se} | facts | scored)
    edges = curve_edges(config.window, config.curve_points)
    for low, high in itertools.pairwise(edges):
        loss, se = clustered_mean(between(low, high), owners)
        rows.append({"metric": "loss_by_position", "position": [low, high], "value": loss, "se": se})
    return rows


def _baseline_rows(
    context: "Context", documents: Documents, windows: list[Window], config: PerplexityConfig
) -> list[dict[str, Any]]:
    """The same rows for the baseline model, marked with its name."""
    options = context.suite.model
    baseline = load_checkpoint(
        config.baseline,
        ModelConfig(dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code),
    )
    if baseline.tokenizer_hash != context.checkpoint.tokenizer_hash:
        raise ValueError(f"the baseline {config.baseline} has another tokenizer, so perplexities do not compare")
    table = _table(context, "baseline", baseline, documents, windows, config, None)
    return [row | {"model": baseline.name} for row in _rows(table, windows, config)]
