"""Perplexity of whole documents: per token of the model's tokenizer, and per word, which tokenizers share.

A document is read in one pass after one BOS, however long it is (lm-eval's `wikitext` cuts it at the model's length);
every one of its tokens is scored once. Words are counted as lm-eval does, in the text before its spacing is undone.
"""

import functools
import hashlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from transformers import PreTrainedTokenizerBase

from triadic.evaluation.config import WikitextConfig
from triadic.evaluation.documents import read_column
from triadic.evaluation.journal import gather, rank, world_size
from triadic.evaluation.scoring import token_losses
from triadic.models.loading import one_line

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context


def check(context: "Context", config: WikitextConfig) -> dict[str, str]:
    """Raise ValueError unless the documents can be had and the model takes the longest."""
    tokenizer, limit = context.checkpoint.tokenizer, context.checkpoint.max_length
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {context.checkpoint.name} has no BOS or EOS for a document to begin with")
    longest = max(len(ids) for ids, _ in _documents(context, config)) - 1
    if limit is not None and longest > limit:
        raise ValueError(
            f"the longest document has {longest} tokens, but {context.checkpoint.name} takes at most {limit}; "
            "raise model.max_length if the model can extrapolate"
        )
    return {"pages": hashlib.sha256("\0".join(_pages(config.path)).encode()).hexdigest()}


def fetch(config: WikitextConfig) -> None:
    """Raise ValueError unless the documents can be had."""
    _pages(config.path)


def measure(context: "Context", config: WikitextConfig) -> list[dict[str, Any]]:
    """Two rows: token perplexity and word perplexity, with the counts behind them."""
    documents = _documents(context, config)
    model = context.checkpoint.model

    def score(group: list[tuple[list[int], int]]) -> list[float]:
        totals = []
        for ids, _ in group[rank() :: world_size()]:
            tokens = torch.tensor([ids], device=model.device)  # [1, T + 1]
            losses = token_losses(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            totals.append(losses.double().sum().item())
        return gather(totals)

    totals = []
    for first in range(0, len(documents), config.documents_per_step):
        group = documents[first : first + config.documents_per_step]
        totals += context.journal.once(f"wikitext-{first:06d}", functools.partial(score, group))
    tokens, words = sum(len(ids) - 1 for ids, _ in documents), sum(count for _, count in documents)
    facts = {"tokens_scored": tokens, "words": words, "documents": len(documents), "detokenized": config.detokenize}
    return [
        {"metric": "token_perplexity", "task": "wikitext", "value": math.exp(sum(totals) / tokens)} | facts,
        {"metric": "word_perplexity", "task": "wikitext", "value": math.exp(sum(totals) / words)} | facts,
    ]


def _documents(context: "Context", config: WikitextConfig) -> list[tuple[list[int], int]]:
    """(BOS and ids, number of words) of every document."""
    return [_encode(context.checkpoint.tokenizer, page, config.detokenize) for page in _pages(config.path)]


def _encode(tokenizer: PreTrainedTokenizerBase, page: str, detokenize: bool) -> tuple[list[int], int]:
    text = wikitext_detokenizer({"page": page}) if detokenize else page
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return [first, *tokenizer.encode(text, add_special_tokens=False)], len(re.split(r"\s+", page))


@functools.cache
def _pages(path: str | None) -> list[str]:
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}; give wikitext.path a .jsonl or .parquet with the column page")
        pages = [page for page in read_column(Path(path), "page") if page.strip()]
        if not pages:
            raise ValueError(f"{path} holds no page with text; give wikitext.path another file")
        return pages
    try:
        pages = datasets.load_dataset("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", split="test")["page"]
    except OSError as error:
        raise ValueError(
            f"WikiText-2 cannot be had ({one_line(error)}); for a local copy give wikitext.path=FILE, a .jsonl or "
            ".parquet of EleutherAI/wikitext_document_level, wikitext-2-raw-v1, test"
        ) from error
    return [page for page in pages if page.strip()]
