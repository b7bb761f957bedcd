"""Several evaluations side by side, beside the paper's numbers: a table, its JSON and common figures."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from triadic.evaluation import figures
from triadic.evaluation.journal import write_json
from triadic.evaluation.report import table
from triadic.models.accounting import figure

PAPER = Path(__file__).parent / "paper_tables.json"
COLUMNS = {  # column of paper_tables.json -> (heading, digits)
    "params_m": ("parameters, M", 1),
    "state_mb": ("state, MB", 1),
    "state_mb_4k": ("state at 4k, MB", 0),
    "state_mb_64k": ("state at 64k, MB", 0),
    "zero_shot": ("zero-shot mean, %", 1),
    "wikitext_ppl": ("WikiText-2, token ppl", 2),
    "pg19_le4k": ("PG19 ≤ 4k", 2),
    "pg19_4k_16k": ("PG19 4k-16k", 2),
    "pg19_16k_64k": ("PG19 16k-64k", 2),
    "pg19_4k_64k": ("PG19 4k-64k", 2),
    "recall": ("recall mean, %", 1),
    "niah_avg": ("needle mean, %", 1),
    "niah_avg_local": ("needle mean on another text, %", 1),
}
BUCKETS = {"pg19_le4k": (0, 4096), "pg19_4k_16k": (4096, 16_384), "pg19_16k_64k": (16_384, 65_536)}
MEANS = {  # column -> (metric, what its row must say for the figure to be the paper's)
    "zero_shot": ("zeroshot_mean", lambda row: len(row["tasks"]) == 10),
    "recall": ("recall_mean", lambda row: True),
    "niah_avg": ("niah_mean", lambda row: sorted(row["lengths"]) == [1024 << i for i in range(7)]),
    "niah_avg_local": ("niah_mean_local", lambda row: True),
}


def columns(results: dict[str, Any]) -> dict[str, float]:
    """The columns of the paper's tables that a results.json has the figures for.

    Only figures measured as the paper's are: PG19's columns need its buckets (4k-64k is the mean loss of its tokens),
    the needle mean its seven lengths and RULER's essays, the zero-shot mean its ten tasks.
    """
    name = results["checkpoint"]["name"]
    rows = [row for row in results["rows"] if row["model"] == name]
    found = {"params_m": results["checkpoint"]["parameters"] / 1e6}
    state = results["checkpoint"].get("state_mb")
    if state:
        found |= {"state_mb_4k": state["4096"], "state_mb_64k": state["65536"]}
        if state["4096"] == state["65536"]:
            found["state_mb"] = state["4096"]
    by_metric = {row["metric"]: row for row in rows}
    for column, (metric, fits) in MEANS.items():
        if metric in by_metric and fits(by_metric[metric]):
            found[column] = 100 * by_metric[metric]["value"]
    if "token_perplexity" in by_metric:
        found["wikitext_ppl"] = by_metric["token_perplexity"]["value"]
    losses = {tuple(row["position"]): row["loss"] for row in rows if row["metric"] == "perplexity"}
    found |= {column: math.exp(losses[bucket]) for column, bucket in BUCKETS.items() if bucket in losses}
    if "pg19_4k_16k" in found and "pg19_16k_64k" in found:
        later = [BUCKETS["pg19_4k_16k"], BUCKETS["pg19_16k_64k"]]
        sizes = [high - low for low, high in later]
        found["pg19_4k_64k"] = math.exp(statistics.fmean([losses[bucket] for bucket in later], sizes))
    return found


def heldout(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The held-out losses of a results.json, nats a token, one row for each model in it (a baseline is another).

    Losses compare where `text` (begin of the fingerprint of the token ids), `window` and `windows` are the same.
    """
    text = results.get("data", {}).get("perplexity", {}).get("validation", "unknown")[:12]
    found = []
    for whole in (row for row in results["rows"] if row["metric"] == "heldout_loss"):
        own = [row for row in results["rows"] if row["model"] == whole["model"]]
        gain = [row["value"] for row in own if row["metric"] == "gain_over_unigram"]
        buckets = {"{}-{}".format(*row["position"]): row["loss"] for row in own if row["metric"] == "perplexity"}
        facts = {key: whole[key] for key in ("model", "window", "windows")} | {"text": text}
        found.append(facts | {"loss": whole["value"], "over_unigram": gain[0] if gain else None, "buckets": buckets})
    return found


def paper_rows(names: list[str]) -> dict[str, dict[str, float | str]]:
    """Rows of the paper's tables by "TABLE/ROW", or by the row's name alone; raises ValueError for unknown ones."""
    tables = {name: rows for name, rows in json.loads(PAPER.read_text()).items() if isinstance(rows, dict)}
    every = {f"{name}/{row}": values for name, rows in tables.items() for row, values in rows.items()}
    chosen = {}
    for name in names:
        fits = [key for key in every if name in (key, key.split("/", 1)[1])]
        if not fits:
            raise ValueError(f"the paper's tables have no row {name!r}; they have {', '.join(every)}")
        chosen[f"paper: {name}"] = every[fits[0]]
    return chosen


def compare(folders: list[str | Path], output: str | Path, paper: list[str] | None = None) -> str:
    """Write comparison.json, comparison.md and figures of all models into `output`; returns the Markdown.

    `folders` hold a results.json each, or several of one model's suites (they are put together); `paper` names rows of
    the paper's tables. Losses on held-out text follow, a table for each text. Raises ValueError for a folder without
    results and for figures of one model that contradict.
    """
    models: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    losses: dict[tuple[Any, ...], dict[str, Any]] = {}
    for folder in folders:
        results = _read(Path(folder))
        name = results["checkpoint"]["name"]
        entry = models.setdefault(name, {"weights_sha256": results["checkpoint"]["weights_sha256"], "columns": {}})
        _same(entry["weights_sha256"], results["checkpoint"]["weights_sha256"], name, "weights")
        for column, value in columns(results).items():
            _same(entry["columns"].setdefault(column, value), value, name, column)
        for row in heldout(results):
            key = tuple(row[name] for name in ("text", "window", "windows", "model"))
            _same(losses.setdefault(key, row)["loss"], row["loss"], row["model"], "held-out losses")
        rows += results["rows"]
    beside = paper_rows(paper or [])
    used = [c for c in COLUMNS if any(c in values for values in [*(m["columns"] for m in models.values())])]
    cells = [[name, *(_cell(model["columns"], c) for c in used)] for name, model in models.items()]
    cells += [[name, *(_cell(values, c) for c in used)] for name, values in beside.items()]
    lines = table(["model", *(COLUMNS[c][0] for c in used)], cells)
    text = "\n".join(["# Comparison", "", *lines, "", *_losses(list(losses.values()))])
    output = Path(output)
    write_json(output / "comparison.json", {"models": models, "paper": beside, "heldout": list(losses.values())})
    (output / "comparison.md").write_text(text)
    figures.draw_rows(rows, output)
    return text


def _losses(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each text, window and number of windows, in which losses compare."""
    lines, groups = [], {}
    for row in rows:
        groups.setdefault((row["text"], row["window"], row["windows"]), []).append(row)
    for (text, window, windows), group in groups.items():
        buckets = list(dict.fromkeys(bucket for row in group for bucket in row["buckets"]))
        cells = [
            [row["model"], f"{row['loss']:.4f}", "" if row["over_unigram"] is None else f"{row['over_unigram']:.4f}"]
            + [f"{row['buckets'][bucket]:.4f}" if bucket in row["buckets"] else "" for bucket in buckets]
            for row in group
        ]
        heading = ["model", "loss", "below a unigram model's", *(f"at {bucket}" for bucket in buckets)]
        lines += [f"## Held-out loss, nats a token: text {text}, {windows} windows of {window} tokens", ""]
        lines += [*table(heading, cells), ""]
    return lines


def _read(folder: Path) -> dict[str, Any]:
    try:
        results = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError):
        results = None
    if not isinstance(results, dict) or not results.keys() >= {"checkpoint", "rows"}:  # an analysis has no checkpoint
        raise ValueError(f"{folder} holds no readable results.json of an evaluation; give the output folder of one")
    return results


def _same(known: Any, value: Any, name: str, what: str) -> None:
    if known != value:
        raise ValueError(f"two results of {name} have different {what} ({known} and {value}); compare one of them")


def _cell(values: dict[str, Any], column: str) -> str:
    value = values.get(column)
    return "" if value is None else value if isinstance(value, str) else figure(value, COLUMNS[column][1])
