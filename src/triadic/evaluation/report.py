"""The files of a result: results.md and figures, both made from results.json alone."""

import json
from pathlib import Path
from typing import Any


def write_markdown(folder: Path) -> str:
    """Write results.md from results.json; returns the text."""
    results = json.loads((folder / "results.json").read_text())
    facts = results["checkpoint"]
    lines = [
        f"# {results['suite']['name']}: {facts['name']}",
        "",
        f"{facts['parameters'] / 1e6:.1f}M parameters, {facts['dtype']}, weights {facts['weights_sha256'][:12]}, "
        f"tokenizer {facts['tokenizer_hash'][:12]}, commit {results['commit']}, {results['date']}",
    ]
    for title, make in (
        ("Checks", _checks),
        ("Held-out text", _heldout),
        ("Perplexity by position", _positions),
        ("WikiText-2", _wikitext),
        ("Zero-shot", _zeroshot),
        ("Needle in a haystack", _needles),
        ("Sample", _samples),
    ):
        body = make(results)
        if body:
            lines += ["", f"## {title}", "", *body]
    text = "\n".join(lines) + "\n"
    (folder / "results.md").write_text(text)
    return text


def draw(folder: Path) -> list[Path]:
    """Draw the figures that results.json has rows for; returns their paths."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    wanted = [row for row in rows if row["metric"] in ("loss_by_position", "perplexity")]
    return [_draw_positions(wanted, folder / "ppl_by_position.png")] if wanted else []


def _draw_positions(rows: list[dict[str, Any]], path: Path) -> Path:
    """Perplexity against position, with two standard errors: buckets as bars over the finer curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        own = [row for row in rows if row["model"] == model]
        buckets = [row for row in own if row["metric"] == "perplexity"]
        _draw_curve(axes, [row for row in own if row["metric"] == "loss_by_position"], f"C{number}")
        for row in buckets:
            low, high = row["position"]
            line = axes.plot([low + 1, high], [row["value"]] * 2, color=f"C{number}", linewidth=2.5)
            middle, error = ((low + 1) * high) ** 0.5, 2 * row["value"] * (row["loss_se"] or 0.0)
            axes.errorbar(middle, row["value"], error, color=f"C{number}", capsize=3)
        line[0].set_label(model)
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="perplexity")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _draw_curve(axes: Any, rows: list[dict[str, Any]], color: str) -> None:
    import numpy as np

    low, high = np.array([row["position"] for row in rows]).T
    middle = np.sqrt((low + 1) * high)  # geometric middle of positions counted from 1
    loss = np.array([row["value"] for row in rows])
    spread = 2 * np.array([row["se"] or 0.0 for row in rows])
    axes.plot(middle, np.exp(loss), color=color, alpha=0.6, linewidth=1)
    axes.fill_between(middle, np.exp(loss - spread), np.exp(loss + spread), color=color, alpha=0.12, linewidth=0)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [" | ".join(["", *cells, ""]).strip() for cells in (header, ["---"] * len(header), *rows)] if rows else []


def _pick(results: dict, *metrics: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["metric"] in metrics]


def _plus_minus(row: dict[str, Any], digits: int) -> str:
    value = f"{row['value']:.{digits}f}"
    return value if row.get("se") is None else f"{value} ± {row['se']:.{digits}f}"


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _checks(results: dict) -> list[str]:
    cells = [
        [c["name"], _figure(c["value"]), f"{c['at_least']:g}", "passed" if c["passed"] else "FAILED"]
        for c in results["checks"]
    ]
    return _table(["check", "figure", "at least", ""], cells)


def _heldout(results: dict) -> list[str]:
    names = {
        "heldout_loss": "loss, nats a token",
        "unigram_loss": "unigram model's loss on the same tokens",
        "gain_over_unigram": "gain over the unigram model",
    }
    cells = [[row["model"], names[row["metric"]], _plus_minus(row, 4)] for row in _pick(results, *names)]
    return _table(["model", "figure", "value ± standard error"], cells)


def _positions(results: dict) -> list[str]:
    rows = _pick(results, "perplexity")
    cells = [
        [row["model"], "{}-{}".format(*row["position"]), _plus_minus(row, 2), f"{row['loss']:.4f}"] for row in rows
    ]
    lines = _table(["model", "position", "perplexity ± standard error", "loss"], cells)
    for row in _pick(results, "context_gain"):
        a, b, c, d = row["position"]
        errors = "" if row["se"] is None else f" ({row['value'] / row['se']:.1f} standard errors)"
        lines += ["", f"{row['model']}: loss at {a}-{b} minus loss at {c}-{d}: {_plus_minus(row, 4)} nats{errors}."]
    if rows:
        lines += [
            "",
            f"{rows[0]['windows']} windows of {rows[0]['window']} tokens from {rows[0]['documents']} documents. "
            "Differences are taken within windows, standard errors over documents.",
        ]
    return lines


def _wikitext(results: dict) -> list[str]:
    rows = _pick(results, "token_perplexity", "word_perplexity")
    cells = [[row["metric"].replace("_", " "), f"{row['value']:.2f}", f"{row['tokens_scored']:,}"] for row in rows]
    return _table(["figure", "value", "tokens scored"], cells)


def _zeroshot(results: dict) -> list[str]:
    rows = [row for row in results["rows"] if row["part"] == "zeroshot" and "task" in row]
    cells = [[row["task"], row["metric"], _plus_minus(row, 4), str(row["samples"])] for row in rows]
    cells += [["mean", "", f"{row['value']:.4f}", ""] for row in _pick(results, "zeroshot_mean")]
    return _table(["task", "metric", "value ± standard error", "samples"], cells)


def _needles(results: dict) -> list[str]:
    cells = [
        [row["task"], str(row["length"]), _plus_minus(row, 3), str(row["samples"])]
        for row in _pick(results, "contains")
    ]
    return _table(["task", "length", "answers found ± standard error", "samples"], cells)


def _samples(results: dict) -> list[str]:
    lines = []
    for row in _pick(results, "sample"):
        text = f"**{row['prompt']}**{row['text']}" if row["prompt"] else row["text"]
        lines += ["> " + line for line in text.splitlines()] + [""]
    for row in _pick(results, "word_share"):
        lines.append(f"{row['known']} of the {row['words']} words written occur in the corpus: {row['value']:.1%}.")
    return lines
