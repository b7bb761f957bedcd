"""Perplexity by position in the full windows of held-out documents, against a unigram model and a baseline.

A window is `window + 1` consecutive tokens of one document; its first `window` tokens are the input and its last
`window` the targets, so position p is scored after p + 1 tokens of context and every window scores exactly `window`
targets. A bucket's perplexity is exp of its mean loss.

Buckets hold the tokens that happen to lie there. In most windows what lies where is chance, which evens out over many;
in a document's first window it is not: openings follow a form (a title, a salutation) that is easier to predict than
the text behind it, so where documents are short the first buckets show less than what context gives.

Every standard error is over documents (windows of one document are not independent): with x_i the value of window i
and m their mean, SE^2 = G / (G - 1) * sum over documents of (sum over its windows of (x_i - m))^2 / n^2, for G
documents and n windows. Differences are taken within each window first.
"""

import functools
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
from triadic.evaluation.loading import (
    Checkpoint,
    facts_without_weights,
    find_checkpoint,
    load_checkpoint,
    weights_hash,
)
from triadic.evaluation.scoring import token_losses

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context


def check(context: "Context", config: PerplexityConfig) -> dict[str, str]:
    """Raise ValueError unless the model takes the window, and the texts are there and have a full window."""
    _check_length(context.checkpoint.name, context.checkpoint.max_length, config.window)
    documents, _ = _windows(context, config)
    found = {"validation": documents.fingerprint}
    if config.unigram:
        found["train"] = own_store(context.data("train"), context.checkpoint.tokenizer).fingerprint
    if config.baseline is not None:
        tokenizer, limit = facts_without_weights(config.baseline, _baseline_options(context))
        _check_length(config.baseline, limit, config.window)
        if tokenizer != context.checkpoint.tokenizer_hash:
            raise ValueError(f"the baseline {config.baseline} has another tokenizer, so perplexities do not compare")
        found["baseline"] = weights_hash(find_checkpoint(config.baseline))
    return found


def ready(context: "Context", config: PerplexityConfig) -> None:
    """Raise ValueError for a baseline that cannot be loaded, if some of its windows are to be scored."""
    firsts = range(0, len(_windows(context, config)[1]), config.windows_per_step)
    if config.baseline is not None and not all(context.journal.has(_step("baseline", first)) for first in firsts):
        load_checkpoint(config.baseline, _baseline_options(context))  # and again when its turn comes


def measure(context: "Context", config: PerplexityConfig) -> list[dict[str, Any]]:
    """The rows of this part: perplexity by bucket, loss by position, the drop between buckets, loss over unigram."""
    documents, windows = _windows(context, config)
    unigram = None
    if config.unigram:
        store = own_store(context.data("train"), context.checkpoint.tokenizer)
        unigram = unigram_losses(store, context.checkpoint.model.get_output_embeddings().weight.shape[0])
    found = _measured(context, "perplexity", context.checkpoint, documents, windows, config, unigram)
    rows = _rows(found, windows, config)
    if config.baseline is not None:
        rows += _baseline_rows(context, documents, windows, config)
    return rows


def _check_length(name: str, limit: int | None, window: int) -> None:
    if limit is not None and window > limit:
        raise ValueError(
            f"perplexity.window is {window} tokens, but {name} takes at most {limit}; "
            "lower it, or raise model.max_length if the model can extrapolate"
        )


def _windows(context: "Context", config: PerplexityConfig) -> tuple[Documents, list[Window]]:
    if "windows" not in context.kept:
        text = context.data("validation"), context.checkpoint.tokenizer, context.suite.data.column
        documents = open_documents(*text)
        windows = full_windows(documents, config.window, config.max_windows)
        context.kept["windows"] = documents, windows
    return context.kept["windows"]


def _step(name: str, first: int) -> str:
    return f"{name}-{first:06d}"


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


def bucket_losses(losses: torch.Tensor, buckets: list[int]) -> torch.Tensor:
    """Mean loss of each bucket in each window: [n, W] -> [n, buckets]"""
    return torch.stack([losses[:, low:high].mean(1) for low, high in itertools.pairwise(buckets)], 1)


def _measured(
    context: "Context",
    name: str,
    checkpoint: Checkpoint,
    documents: Documents,
    windows: list[Window],
    config: PerplexityConfig,
    unigram: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Mean losses of windows: "buckets" [n, buckets], "curve" [n, bins], "whole" [n]; with a table "unigram" [n]."""
    edges = np.array(curve_edges(config.window, config.curve_points))
    batches = context.batches(checkpoint)

    def score(some: list[Window]) -> list[dict[str, Any]]:
        tokens = np.stack([documents.read(w.document, w.start, w.start + config.window + 1) for w in some])
        ids = torch.from_numpy(tokens.astype(np.int64)).to(checkpoint.model.device)  # [b, window + 1]
        losses = token_losses(checkpoint.model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())  # [b, window]
        losses = losses.double().cpu()
        parts = {
            "buckets": bucket_losses(losses, config.buckets).numpy(),
            "curve": np.add.reduceat(losses.numpy(), edges[:-1], axis=1) / np.diff(edges),
            "whole": losses.mean(1).numpy(),
        }
        if unigram is not None:
            parts["unigram"] = unigram[tokens[:, 1:]].mean(1)
        bar.update(len(some) * world_size())
        return [{key: values[i].tolist() for key, values in parts.items()} for i in range(len(some))]

    def step(group: list[Window]) -> list[dict[str, Any]]:
        mine = group[rank() :: world_size()]
        made = batches.run([config.window] * len(mine), lambda batch: score([mine[i] for i in batch]))
        return gather([row for _, rows in made for row in rows])  # of equal lengths, hence in their order

    rows = []
    with tqdm(total=len(windows), desc=name, unit="window", disable=rank() != 0) as bar:
        for first in range(0, len(windows), config.windows_per_step):
            group = windows[first : first + config.windows_per_step]
            rows += context.journal.once(_step(name, first), functools.partial(step, group))
            bar.n = len(rows)
            bar.refresh()
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def _rows(found: dict[str, np.ndarray], windows: list[Window], config: PerplexityConfig) -> list[dict[str, Any]]:
    owners = np.array([w.document for w in windows])
    facts = {"windows": len(windows), "documents": len(set(owners.tolist())), "window": config.window}
    buckets = list(itertools.pairwise(config.buckets))
    rows = []
    for (low, high), values in zip(buckets, found["buckets"].T, strict=True):
        loss, se = clustered_mean(values, owners)
        _, paired_se = clustered_mean(values - found["buckets"][:, -1], owners)
        rows.append(
            {"metric": "perplexity", "position": [low, high], "value": math.exp(loss)}
            | {"se": None if se is None else math.exp(loss) * se}  # to first order
            | {"loss": loss, "loss_se": se, "loss_minus_last_se": paired_se}
            | {"tokens_scored": len(windows) * (high - low)}
            | facts
        )
    gain, se = clustered_mean(found["buckets"][:, 0] - found["buckets"][:, -1], owners)
    between = [*buckets[0], *buckets[-1]]
    rows.append({"metric": "context_gain", "position": between, "value": gain, "se": se} | facts)
    whole = {"heldout_loss": found["whole"]}
    if "unigram" in found:
        whole |= {"unigram_loss": found["unigram"], "gain_over_unigram": found["unigram"] - found["whole"]}
    for metric, values in whole.items():
        value, se = clustered_mean(values, owners)
        rows.append({"metric": metric, "value": value, "se": se, "tokens_scored": len(windows) * config.window} | facts)
    edges = curve_edges(config.window, config.curve_points)
    for (low, high), values in zip(itertools.pairwise(edges), found["curve"].T, strict=True):
        loss, se = clustered_mean(values, owners)
        rows.append({"metric": "loss_by_position", "position": [low, high], "value": loss, "se": se})
    return rows


def _baseline_options(context: "Context") -> ModelConfig:
    """The evaluated model's, but for its batch and its tokenizer."""
    names = ("dtype", "device", "trust_remote_code", "max_length")
    return ModelConfig(**{name: getattr(context.suite.model, name) for name in names})


def _baseline_rows(
    context: "Context", documents: Documents, windows: list[Window], config: PerplexityConfig
) -> list[dict[str, Any]]:
    """The same rows for the baseline model, marked with its name."""
    baseline = load_checkpoint(config.baseline, _baseline_options(context))
    found = _measured(context, "baseline", baseline, documents, windows, config, None)
    return [row | {"model": baseline.name} for row in _rows(found, windows, config)]
