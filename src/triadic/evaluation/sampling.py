"""Let a model write: text completion with streaming, and how many of its words are words of a corpus."""

import functools
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from triadic.data import TokenStore
from triadic.evaluation.config import SampleConfig, check_sampling
from triadic.evaluation.documents import own_store

if TYPE_CHECKING:
    from triadic.evaluation.suite import Context

WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt, and how fast."""

    prompt: str
    text: str  # without the prompt
    tokens: int  # written
    prefill_seconds: float
    tokens_per_s: float  # after the first token


class _Stream(TextStreamer):
    """Hands over finished pieces of text, and notes when tokens arrive."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], Any]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Ids of a prompt after one BOS.

    Raises ValueError for an empty prompt if the tokenizer has no BOS, and for one that is no Unicode text.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError(f"the prompt {prompt!r} is no Unicode text; give it in UTF-8")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    if tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    if not ids:
        raise ValueError("the prompt is empty and the tokenizer has no BOS token to begin with; give a prompt")
    return ids


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 50,
    seed: int = 0,
    on_text: Callable[[str], Any] = lambda text: None,
) -> Completion:
    """Continue `prompt` (after a BOS) until EOS or max_new_tokens; `on_text` gets each piece as it is finished.

    temperature 0 is greedy, top_k 0 leaves all tokens. Raises ValueError for an empty prompt if the tokenizer has no
    BOS to begin with, and for values that cannot be sampled with.
    """
    check_sampling(temperature, top_p, top_k, seed)
    ids = prompt_ids(tokenizer, prompt)
    choose = {"do_sample": temperature > 0}
    if temperature > 0:
        choose |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    stream = _Stream(tokenizer, on_text)
    inputs = torch.tensor([ids], device=model.device)
    torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=stream,
            **choose,
        )
    written = out[0, len(ids) :]
    first, last = stream.times[1] if len(stream.times) > 1 else start, stream.times[-1]  # times[0]: the prompt
    rate = (len(written) - 1) / (last - first) if last > first else 0.0
    text = tokenizer.decode(written, skip_special_tokens=True)
    return Completion(prompt, text, len(written), first - start, rate)


def check(context: "Context", config: SampleConfig) -> dict[str, str]:
    """Raise ValueError unless the corpus is there, and the model can begin every prompt and has room for its text."""
    longest = max(len(prompt_ids(context.checkpoint.tokenizer, prompt)) for prompt in config.prompts)
    limit = context.checkpoint.max_length
    if limit is not None and longest + config.max_new_tokens > limit:
        raise ValueError(
            f"sample.max_new_tokens is {config.max_new_tokens} behind prompts of up to {longest} tokens, but "
            f"{context.checkpoint.name} takes at most {limit}; lower it, or raise model.max_length if the model can "
            "extrapolate"
        )
    return {"train": own_store(context.data("train"), context.checkpoint.tokenizer).fingerprint}


def measure(context: "Context", config: SampleConfig) -> list[dict[str, Any]]:
    """One row for each prompt with the text, and one with the share of words that occur in the training store."""
    tokenizer = context.checkpoint.tokenizer
    corpus = corpus_words(own_store(context.data("train"), tokenizer), tokenizer)

    def write(number: int, prompt: str) -> dict[str, Any]:
        made = complete(
            context.checkpoint.model,
            tokenizer,
            prompt,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed + number,
        )
        known, total = count_words(made.text, corpus)
        facts = {"prompt": prompt, "text": made.text, "known": known, "words": total}
        return {"metric": "sample", "value": known / max(1, total)} | facts

    rows = [
        context.journal.once(f"sample-{number}", functools.partial(write, number, prompt))
        for number, prompt in enumerate(config.prompts)
    ]
    known, total = sum(row["known"] for row in rows), sum(row["words"] for row in rows)
    return [*rows, {"metric": "word_share", "value": known / max(1, total), "known": known, "words": total}]


def words(text: str) -> list[str]:
    """Words in lower case: letters, with apostrophes inside. A word the text breaks off in does not count."""
    text = text.replace("\u2019", "'")
    found = [match.group().lower() for match in WORD.finditer(text)]
    return found[:-1] if found and text.lower().endswith(found[-1]) else found


def count_words(text: str, corpus: set[str]) -> tuple[int, int]:
    """(words of the text that occur in the corpus, words of the text)."""
    found = words(text)
    return sum(word in corpus for word in found), len(found)


def corpus_words(store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """All words of a token store."""
    starts = [*store.starts(0, store.num_tokens).tolist(), store.num_tokens]
    known: set[str] = set()
    for start, stop in itertools.pairwise(starts):
        text = tokenizer.decode(store.tokens(start, stop), skip_special_tokens=True)
        known.update(words(text + "\n"))
    return known
