"""The model wrapper lm-eval drives, registered there as "triadic"; works with any Hugging Face causal LM.

What differs from lm-eval's own `hf` wrapper, and why:
- nothing is ever truncated: an input longer than `max_length` raises (`hf` cuts it on the left with a log line);
- a text is scored after exactly one BOS, also in rolling mode (`hf` scores a second BOS there);
- logits exist only for the scored tokens, in pieces, with a float32 softmax (`hf` builds [B, T, V]);
- batches hold sequences of similar length, are limited in tokens, and shrink when memory runs out;
- run folders are found, safetensors only.
Generation is left-padded with a mask, as in `hf`.
"""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from triadic.evaluation.batching import Batches
from triadic.evaluation.config import ModelConfig
from triadic.evaluation.journal import rank, world_size
from triadic.evaluation.loading import Checkpoint, load_checkpoint
from triadic.evaluation.scoring import hidden_states, score_hidden

UNLIMITED = 1 << 30
Scored = tuple[Any, list[int], list[int]]  # (cache key, context ids, continuation ids)


@register_model("triadic")
class TriadicLM(HFLM):
    """lm-eval's view of a checkpoint.

    `pretrained` is a Checkpoint already loaded, or anything load_checkpoint finds; `batches` may be shared with other
    users of the model; the other arguments are ModelConfig's fields. Raises ValueError for inputs longer than the
    model takes.
    """

    def __init__(self, pretrained: str | Checkpoint, batches: Batches | None = None, **options: Any):
        options = {k: v for k, v in options.items() if v is not None and k != "max_batch_size"}
        config = ModelConfig(**options)
        found = load_checkpoint(pretrained, config) if isinstance(pretrained, str) else pretrained
        super().__init__(
            found.model,
            backend="causal",
            tokenizer=found.tokenizer,
            truncation=False,
            softmax_dtype="float32",
            max_length=found.max_length or UNLIMITED,
            batch_size=1,
        )
        self.checkpoint = found
        self.batches = batches or Batches(found.model, config.batch_size, config.batch_tokens)
        self.add_bos = adds_bos(found.tokenizer) if config.add_bos is None else config.add_bos
        if self.add_bos and found.tokenizer.bos_token_id is None:
            raise ValueError(f"model.add_bos asks for a BOS, but the tokenizer of {found.name} has none")
        self._rank, self._world_size = rank(), world_size()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, after one BOS if `add_special_tokens` (None: this wrapper's add_bos) says so."""
        ids = self.tokenizer.encode(string, add_special_tokens=False)
        bos = self.tokenizer.bos_token_id
        if (self.add_bos if add_special_tokens is None else add_special_tokens) and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def tok_batch_encode(
        self, strings: list[str], left_truncate_len: int | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-padded ids and their mask, both [B, T] int64; raises ValueError rather than truncate."""
        rows = [self.tok_encode(string) for string in strings]
        longest = max(map(len, rows))
        if left_truncate_len is not None and longest > left_truncate_len:
            raise ValueError(
                f"a prompt of {longest} tokens leaves no room to generate: {self.checkpoint.name} takes "
                f"{self.max_length}, of which {left_truncate_len} may be prompt; raise model.max_length or shorten it"
            )
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id)  # [B, T]
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.tensor(row)
            mask[i, longest - len(row) :] = 1
        return ids, mask

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generated text for each request, in batches of similar length."""
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        texts: list[str] = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate", disable=disable_tqdm or self.rank != 0) as bar:

            def write(batch: list[int]) -> list[str]:
                self.batch_size_per_gpu = len(batch)
                return super(TriadicLM, self).generate_until([requests[i] for i in batch], disable_tqdm=True)

            for batch, made in self.batches.run(lengths, write):
                for i, text in zip(batch, made, strict=True):
                    texts[i] = text
                bar.update(len(batch))
        return texts

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts after one BOS; a text beyond max_length falls into disjoint windows."""
        pieces: list[Scored] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            if ids[:1] == [self.prefix_token_id]:
                ids = ids[1:]
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            for context, continuation in map(make_disjoint_window, windows):
                pieces.append((None, context, continuation))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(pieces, disable_tqdm), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, greedy?) of each continuation; requests that differ in the last token share one pass."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            groups.setdefault(tuple(context + continuation[:-1]), []).append(i)
        inputs = list(groups)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)

        def asked(batch: list[int]) -> list[tuple[int, int]]:
            return [(row, i) for row, n in enumerate(batch) for i in groups[inputs[n]]]

        def score(batch: list[int]) -> list[tuple[float, bool]]:
            return self._score_batch([inputs[n] for n in batch], [(row, requests[i]) for row, i in asked(batch)])

        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm or self.rank != 0) as bar:
            for batch, answers in self.batches.run([len(ids) for ids in inputs], score):
                for (_, i), answer in zip(asked(batch), answers, strict=True):
                    results[i] = answer
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
                bar.update(len(answers))
        return results

    @torch.no_grad()
    def _score_batch(self, inputs: list[tuple[int, ...]], asked: list[tuple[int, Scored]]) -> list[tuple[float, bool]]:
        """Score continuations against one right-padded batch; `asked` names each one's row of `inputs`."""
        longest = max(map(len, inputs))
        if longest > self.max_length:
            raise ValueError(
                f"an input of {longest} tokens is longer than the {self.max_length} that {self.checkpoint.name} "
                "takes; raise model.max_length or shorten it"
            )
        ids = torch.zeros(len(inputs), longest, dtype=torch.long)  # [B, T]; padding on the right is never seen
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        hidden = hidden_states(self.model, ids.to(self.device))  # [B, T, D]
        states = [hidden[r, len(ctx) - 1 : len(ctx) + len(cont) - 1] for r, (_, ctx, cont) in asked]
        targets = torch.tensor([token for _, (_, _, cont) in asked for token in cont], device=self.device)
        losses, hits = score_hidden(self.model, torch.cat(states), targets)  # [N], [N]
        sizes = [len(cont) for _, (_, _, cont) in asked]
        return [
            (-float(loss.sum()), bool(hit.all()))
            for loss, hit in zip(losses.split(sizes), hits.split(sizes), strict=True)
        ]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """One entry of each process: [...] -> [processes, ...]"""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def get_model_info(self) -> dict[str, Any]:
        return self.checkpoint.facts()


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this tokenizer puts a BOS before a text by itself."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def seed() -> None:
    """The seeds of `simple_evaluate`, which a task may draw with when it is loaded and when it runs."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


def check_end(checkpoint: Checkpoint) -> None:
    """Raise ValueError if the tokenizer has no token that ends what the model generates."""
    if checkpoint.tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {checkpoint.name} has no EOS, which ends a generated text; give one in model.tokenizer"
        )


def check_fits(lm: TriadicLM, loaded: Task, samples: int | None, remedy: str) -> None:
    """Raise ValueError, with the remedy, if a document of the task does not fit into the model's longest input."""
    if lm.max_length >= UNLIMITED:
        return
    _alone(loaded)
    loaded.build_all_requests(samples=_picked(loaded, samples))
    for request in loaded.instances:
        tokens = _tokens(lm, request)
        if tokens > lm.max_length:
            raise ValueError(
                f"document {request.doc_id} of {request.task_name} takes {tokens} tokens, {lm.checkpoint.name} at most "
                f"{lm.max_length}; raise model.max_length if the model can extrapolate, or {remedy}"
            )


def _tokens(lm: TriadicLM, request: Instance) -> int:
    """Tokens that the model reads or writes for a request; 0 where a long one falls into windows."""
    if request.request_type == "loglikelihood":
        context, continuation = request.args
        pair = lm._encode_pair(context, continuation) if context else (["BOS"], lm.tok_encode(continuation))
        return sum(map(len, pair)) - 1
    if request.request_type == "generate_until":
        return len(lm.tok_encode(request.args[0])) + request.args[1].get("max_gen_toks", lm.max_gen_toks)
    return 0


def _alone(task: Task) -> None:
    """What `simple_evaluate` sets in a task, with its default arguments."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=1234)


def _picked(task: Task, samples: int | range | None) -> list[int] | None:
    wanted = range(samples) if isinstance(samples, int) else samples
    return None if wanted is None else [i for i in wanted if i < len(task.eval_docs)]


def run_task(
    lm: LM, task: str | Task, manager: TaskManager, samples: int | range | None = None
) -> dict[str, Any] | None:
    """One lm-eval task, as `simple_evaluate` runs it with its default seeds.

    `samples`: how many of its first documents, or which of them; None: all. `task` is a name the manager knows, a
    YAML file, or a task that it has loaded after `seed`. Returns lm-eval's results with the samples, in a job of
    several processes only in the first one. There is no environment report, which costs seconds for each task.
    """
    seed()
    loaded = manager.load([task])
    ((name, chosen),) = loaded["tasks"].items()
    _alone(chosen)
    some = _picked(chosen, samples)
    picked = None if some is None else {name: some}
    everyone, documents = lm.world_size, len(chosen.eval_docs if some is None else some)
    if documents >= everyone:
        return evaluate(lm, loaded, samples=picked, log_samples=True, bootstrap_iters=0)
    if lm.rank > 0:  # lm-eval wants a document for each process: these few are the first one's
        return None
    lm._world_size = 1
    try:
        return evaluate(lm, loaded, samples=picked, log_samples=True, bootstrap_iters=0)
    finally:
        lm._world_size = everyone
