"""results.md, made from results.json alone."""

import json
from pathlib import Path, PurePath
from typing import Any

from triadic.evaluation.paper import local_text


def write_markdown(folder: Path) -> str:
    """Write results.md from results.json; returns the text."""
    results = json.loads((folder / "results.json").read_text())
    facts = results["checkpoint"]
    lines = [
        f"# {results['suite']['name']}{_local(results, results['suite']['name'])}: {facts['name']}",
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
        ("Recall", _recall),
        ("Needle in a haystack", _needles),
        ("Associative recall", _mqar),
        ("Sample", _samples),
    ):
        body = make(results)
        if body:
            lines += ["", f"## {title}{_local(results, title)}", "", *body]
    text = "\n".join(lines) + "\n"
    (folder / "results.md").write_text(text)
    return text


def _local(results: dict, title: str) -> str:
    """Says in a heading that would be read as a known text's that the text is another one."""
    part = {"WikiText-2": "wikitext", "wikitext": "wikitext", "pg19": "perplexity"}.get(title)
    text = local_text(results, part) if part and results["suite"].get(part) else None
    return "" if text is None else f" (local: {PurePath(text).name})"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table; none without rows."""
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
    return table(["check", "figure", "at least", ""], cells)


def _heldout(results: dict) -> list[str]:
    names = {
        "heldout_loss": "loss, nats a token",
        "unigram_loss": "unigram model's loss on the same tokens",
        "gain_over_unigram": "gain over the unigram model",
    }
    cells = [[row["model"], names[row["metric"]], _plus_minus(row, 4)] for row in _pick(results, *names)]
    return table(["model", "figure", "value ± standard error"], cells)


def _positions(results: dict) -> list[str]:
    rows = _pick(results, "perplexity")
    cells = [
        [row["model"], "{}-{}".format(*row["position"]), _plus_minus(row, 2), f"{row['loss']:.4f}"] for row in rows
    ]
    lines = table(["model", "position", "perplexity ± standard error", "loss"], cells)
    for row in _pick(results, "context_gain"):
        a, b, c, d = row["position"]
        errors = "" if not row["se"] else f" ({row['value'] / row['se']:.1f} standard errors)"
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
    return table(["figure", "value", "tokens scored"], cells)


def _zeroshot(results: dict) -> list[str]:
    rows = [row for row in results["rows"] if row["part"] == "zeroshot" and "task" in row]
    cells = [[row["task"], row["metric"], _plus_minus(row, 4), str(row["samples"])] for row in rows]
    cells += [["mean", "", f"{row['value']:.4f}", ""] for row in _pick(results, "zeroshot_mean")]
    return table(["task", "metric", "value ± standard error", "samples"], cells)


def _recall(results: dict) -> list[str]:
    rows = _pick(results, "recall")
    cells = [[row["task"], _plus_minus(row, 4), str(row["samples"]), str(row["cut"]), row["data"]] for row in rows]
    cells += [["mean", f"{row['value']:.4f}", "", "", ""] for row in _pick(results, "recall_mean")]
    lines = table(["task", "answers found ± standard error", "samples", "of them cut", "data"], cells)
    if rows:
        lines += ["", f"Texts are cut to {rows[0]['context_length']} tokens less 50, centred by: {rows[0]['centre']}."]
    return lines


def _needles(results: dict) -> list[str]:
    rows = _pick(results, "contains", "contains_local")
    cells = [
        [row["task"], str(row["length"]), _plus_minus(row, 3), str(row["samples"]), row["haystack"]] for row in rows
    ]
    lines = table(["task", "length", "answers found ± standard error", "samples", "haystack"], cells)
    for row in _pick(results, "niah_mean", "niah_mean_local"):
        lines += ["", f"Mean over tasks and lengths: {row['value']:.4f}."]
    if _pick(results, "contains_local"):
        lines += ["", "Scores on a haystack called local are not RULER's and do not compare with published ones."]
    return lines


def _mqar(results: dict) -> list[str]:
    rows = [row for row in results["rows"] if row["part"] == "mqar" and row["metric"] == "accuracy"]
    cells = [[str(row["E"]), str(row["N"]), str(row["seed"]), f"{row['value']:.4f}"] for row in rows]
    return table(["E", "pairs", "seed", "accuracy"], cells)


def _samples(results: dict) -> list[str]:
    lines = []
    for row in _pick(results, "sample"):
        text = f"**{row['prompt']}**{row['text']}" if row["prompt"] else row["text"]
        lines += ["> " + line for line in text.splitlines()] + [""]
    for row in _pick(results, "word_share"):
        lines.append(f"{row['known']} of the {row['words']} words written occur in the corpus: {row['value']:.1%}.")
    return lines
