"""Tables and figures of analysis rows, whoever made them: one model's, or several models' side by side."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def write_table(rows: Rows, path: Path) -> str:
    """The headline figures as Markdown; returns the text."""
    titles = {
        "half_life": ("Half-life in tokens, slices ranked within their head (median of heads)", "rank"),
        "beta_mean": ("Write strength", None),
        "tail_loss": ("Loss on the last tokens of documents, by tokens of context before them", "context"),
        "state_rank": ("Effective rank of the state, by unfolding and position", "position"),
    }
    lines = []
    for metric, (title, key) in titles.items():
        own = [row for row in rows if row["metric"] == metric]
        if not own:
            continue
        lines += [f"## {title}", "", "| model | at | value |", "|---|---|---|"]
        for row in own:
            at = " ".join(str(row[k]) for k in ("unfolding", key) if k in row) or "all tokens"
            error = f" ± {row['se']:.4f}" if row.get("se") else ""
            lines.append(f"| {row.get('model', '')} | {at} | {row['value']:.4g}{error} |")
        lines.append("")
    text = "\n".join(lines)
    path.write_text(text)
    return text


def draw(rows: Rows, path: Path) -> Path:
    """One figure with a panel for each analysis that `rows` have, a line for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {metric: panel for metric, panel in PANELS.items() if any(row["metric"] == metric for row in rows)}
    if not panels:
        raise ValueError("there are no rows to draw")
    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 4), layout="constrained", squeeze=False)
    for axis, (metric, panel) in zip(axes[0], panels.items(), strict=True):
        panel(axis, [row for row in rows if row["metric"] == metric])
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _lines(rows: Rows, x: str, label: Callable[[dict], str]) -> dict[str, tuple[list, list, Rows]]:
    """label -> (x values, y values, rows), in the rows' order."""
    lines: dict[str, tuple[list, list, Rows]] = {}
    for row in rows:
        xs, ys, own = lines.setdefault(label(row), ([], [], []))
        xs.append(row[x])
        ys.append(row["value"])
        own.append(row)
    return lines


def _model(row: dict) -> str:
    return str(row.get("model", "model"))


def _draw_half_lives(axis, rows: Rows) -> None:
    for label, (xs, ys, own) in _lines(rows, "rank", _model).items():
        (line,) = axis.plot(xs, ys, marker="o", label=label)
        low, high = zip(*(row["quartiles"] for row in own), strict=True)
        axis.fill_between(xs, low, high, color=line.get_color(), alpha=0.15)
    axis.set(yscale="log", xlabel="slice, ranked within its head", ylabel="half-life, tokens (median, quartiles)")


def _draw_strengths(axis, rows: Rows) -> None:
    for label, (xs, ys, _) in _lines(rows, "beta", _model).items():
        axis.step(xs, ys, where="mid", label=label)
    axis.set(xlabel="write strength", ylabel="density")


def _draw_tail(axis, rows: Rows) -> None:
    for label, (xs, ys, own) in _lines(rows, "context", _model).items():
        axis.errorbar(xs, ys, [row["se"] or 0.0 for row in own], marker="o", capsize=2, label=label)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set(xlabel="context before the scored tokens", ylabel=f"loss on the last {rows[0]['tail']} tokens, nats")


def _draw_ranks(axis, rows: Rows) -> None:
    for label, (xs, ys, _) in _lines(rows, "position", lambda row: f"{_model(row)}, {row['unfolding']}").items():
        axis.plot(xs, ys, marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set(xlabel="tokens read", ylabel="effective rank of a head's state")


PANELS: dict[str, Callable[[Any, Rows], None]] = {
    "half_life": _draw_half_lives,
    "beta_histogram": _draw_strengths,
    "tail_loss": _draw_tail,
    "state_rank": _draw_ranks,
}
