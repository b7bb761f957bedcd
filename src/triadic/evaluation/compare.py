"""Several evaluations side by side, beside the paper's numbers: a table, its JSON and common figures."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from triadic.evaluation import figures
from triadic.evaluation import paper as papers
from triadic.evaluation.journal import write_json
from triadic.evaluation.report import table
from triadic.models.accounting import figure

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
MEANS = {  # column -> the metric that it shows
    "zero_shot": "zeroshot_mean",
    "wikitext_ppl": "token_perplexity",
    "recall": "recall_mean",
    "niah_avg": "niah_mean",
    "niah_avg_local": "niah_mean_local",
}
PARTS = {  # column -> the part of a suite whose settings decide whether it is the paper's; none: any suite's
    "zero_shot": "zeroshot",
    "wikitext_ppl": "wikitext",
    "recall": "recall",
    "niah_avg": "ruler",
    "niah_avg_local": "ruler",
    **dict.fromkeys([*BUCKETS, "pg19_4k_64k"], "perplexity"),
}


def columns(results: dict[str, Any]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The columns of the paper's tables that a results.json has the figures for: those measured as the paper's are.

    Beside them the others, each with its "column", its "value" and in what it "differs" from the paper's settings.
    """
    own, otherwise = {}, []
    for column, value in figures_of(results).items():
        differs = papers.differs(results, PARTS[column]) if column in PARTS else []
        if differs:
            otherwise.append({"column": column, "value": value, "differs": "; ".join(differs)})
        else:
            own[column] = value
    return own, otherwise


def figures_of(results: dict[str, Any]) -> dict[str, float]:
    """What a results.json has for the columns, however it was measured (4k-64k is the mean loss of its tokens)."""
    name = results["checkpoint"]["name"]
    rows = [row for row in results["rows"] if row["model"] == name]
    found = {"params_m": results["checkpoint"]["parameters"] / 1e6}
    state = results["checkpoint"].get("state_mb")
    if state:
        found |= {"state_mb_4k": state["4096"], "state_mb_64k": state["65536"]}
        if state["4096"] == state["65536"]:
            found["state_mb"] = state["4096"]
    by_metric = {row["metric"]: row["value"] for row in rows if "value" in row}
    for column, metric in MEANS.items():
        if metric in by_metric:
            found[column] = by_metric[metric] * (1 if metric == "token_perplexity" else 100)
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


def compare(folders: list[str | Path], output: str | Path, paper: list[str] | None = None) -> str:
    """Write comparison.json, comparison.md and figures of all models into `output`; returns the Markdown.

    `folders` hold a results.json each, or several of one model's suites (they are put together); `paper` names rows of
    the paper's tables, beside which stand only figures measured as the paper's; the others follow in a list that says
    what differs. Losses on held-out text come last, a table for each text. One checkpoint under several paths is one
    model. Raises ValueError for a folder without results and for figures of one model that contradict.
    """
    beside = papers.rows(paper or [])
    models: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    losses: dict[tuple[Any, ...], dict[str, Any]] = {}
    otherwise: dict[tuple[str, ...], dict[str, Any]] = {}
    names: dict[str, str] = {}
    for folder in folders:
        results = _resolved(_read(Path(folder)), names)
        name = results["checkpoint"]["name"]
        entry = models.setdefault(name, {"weights_sha256": results["checkpoint"]["weights_sha256"], "columns": {}})
        _same(entry["weights_sha256"], results["checkpoint"]["weights_sha256"], name, "weights")
        own, others = columns(results)
        for column, value in own.items():
            _same(entry["columns"].setdefault(column, value), value, name, column)
        for other in others:
            key = (name, other["column"], other["differs"])
            kept = otherwise.setdefault(key, {"model": name} | other)
            _same(kept["value"], other["value"], name, other["column"])
        for row in heldout(results):
            key = tuple(row[name] for name in ("text", "window", "windows", "model"))
            _same(losses.setdefault(key, row)["loss"], row["loss"], row["model"], "held-out losses")
        rows += results["rows"]
    used = [c for c in COLUMNS if any(c in values for values in [*(m["columns"] for m in models.values())])]
    cells = [[name, *(_cell(model["columns"], c) for c in used)] for name, model in models.items()]
    cells += [[name, *(_cell(values, c) for c in used)] for name, values in beside.items()]
    lines = table(["model", *(COLUMNS[c][0] for c in used)], cells)
    lines += ["", *_otherwise(list(otherwise.values())), *_losses(list(losses.values()))]
    text = "\n".join(["# Comparison", "", *lines])
    output = Path(output)
    kept = {"models": models, "paper": beside}
    kept |= {"otherwise": list(otherwise.values()), "heldout": list(losses.values())}
    write_json(output / "comparison.json", kept)
    (output / "comparison.md").write_text(text)
    figures.draw_rows(rows, output)
    return text


def _otherwise(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each figure that does not compare with the paper's, which says why."""
    lines = []
    for row in rows:
        heading, digits = COLUMNS[row["column"]]
        lines.append(f"- {row['model']}: {heading} {figure(row['value'], digits)} ({row['differs']})")
    return ["## Not measured as the paper's figures", "", *lines, ""] if lines else []


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
    wanted = {"checkpoint", "suite", "rows"}  # an analysis has no checkpoint
    if not isinstance(results, dict) or not results.keys() >= wanted:
        raise ValueError(f"{folder} holds no readable results.json of an evaluation; give the output folder of one")
    return results


def _resolved(results: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The results with every model under the first of its names; `names` (path -> that name) grows.

    Names are of one model where they lead to one folder, seen from the working directory.
    """
    checkpoint, change = results["checkpoint"], {}
    for name in dict.fromkeys([checkpoint["name"], *(row["model"] for row in results["rows"])]):
        path = Path(name).expanduser()
        change[name] = names.setdefault(str(path.resolve()) if path.exists() else name, name)
    rows = [row | {"model": change[row["model"]]} for row in results["rows"]]
    return results | {"checkpoint": checkpoint | {"name": change[checkpoint["name"]]}, "rows": rows}


def _same(known: Any, value: Any, name: str, what: str) -> None:
    if known != value:
        raise ValueError(f"two results of {name} have different {what} ({known} and {value}); compare one of them")


def _cell(values: dict[str, Any], column: str) -> str:
    value = values.get(column)
    return "" if value is None else value if isinstance(value, str) else figure(value, COLUMNS[column][1])
