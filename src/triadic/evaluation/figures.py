"""Figures of an evaluation, or of several side by side, from the rows of results.json alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NEEDLES = ("contains", "contains_local")


def draw(folder: Path) -> list[Path]:
    """Draw the figures that results.json has rows for beside it; returns their paths."""
    return draw_rows(json.loads((folder / "results.json").read_text())["rows"], folder)


def draw_rows(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw perplexity by position, the needle heat map and the recall bars of every model that has rows of it."""
    drawn = []
    for name, (metrics, paint) in FIGURES.items():
        wanted = [row for row in rows if row["metric"] in metrics]
        if wanted:
            drawn.append(paint(wanted, folder / f"{name}.png"))
    return drawn


def _models(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _figure(size: tuple[float, float], columns: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _draw_positions(rows: list[dict[str, Any]], path: Path) -> Path:
    """Perplexity against position, with two standard errors: buckets as bars over the finer curve."""
    figure, ((axes,),) = _figure((6.4, 4.0))
    for number, model in enumerate(_models(rows)):
        own = [row for row in rows if row["model"] == model]
        buckets = [row for row in own if row["metric"] == "perplexity"]
        _draw_curve(axes, [row for row in own if row["metric"] == "loss_by_position"], f"C{number}")
        for row in buckets:
            low, high = row["position"]
            line = axes.plot([low + 1, high], [row["value"]] * 2, color=f"C{number}", linewidth=2.5)
            middle, error = ((low + 1) * high) ** 0.5, 2 * row["value"] * (row["loss_se"] or 0.0)
            axes.errorbar(middle, row["value"], error, color=f"C{number}", capsize=3)
        line[0].set_label(model)
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="perplexity ± 2 standard errors")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    return _save(figure, path)


def _draw_curve(axes: Any, rows: list[dict[str, Any]], color: str) -> None:
    low, high = np.array([row["position"] for row in rows]).T
    middle = np.sqrt((low + 1) * high)  # geometric middle of positions counted from 1
    loss = np.array([row["value"] for row in rows])
    spread = 2 * np.array([row["se"] or 0.0 for row in rows])
    axes.plot(middle, np.exp(loss), color=color, alpha=0.6, linewidth=1)
    axes.fill_between(middle, np.exp(loss - spread), np.exp(loss + spread), color=color, alpha=0.12, linewidth=0)


def needle_grid(rows: list[dict[str, Any]]) -> tuple[list[str], list[int], np.ndarray]:
    """Tasks, lengths and the scores [tasks, lengths] of one model's needle rows; NaN where nothing was measured."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    grid = np.full((len(tasks), len(lengths)), np.nan)
    for row in rows:
        grid[tasks.index(row["task"]), lengths.index(row["length"])] = row["value"]
    return tasks, lengths, grid


def _draw_needles(rows: list[dict[str, Any]], path: Path) -> Path:
    """Answers found, task by length, one panel for each model; a star marks scores on another text than the essays."""
    models = _models(rows)
    figure, (panels,) = _figure((1.0 + 4.4 * len(models), 3.6), len(models))
    for panel, model in zip(panels, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        local = {row["task"] for row in own if row["metric"] == "contains_local"}
        tasks, lengths, grid = needle_grid(own)
        image = panel.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        panel.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
        panel.set_yticks(range(len(tasks)), [task.removeprefix("niah_") + "*" * (task in local) for task in tasks])
        for (i, j), value in np.ndenumerate(grid):
            if not np.isnan(value):
                panel.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color="wk"[int(value > 0.6)])
        note = "\n* not RULER's essays: no RULER scores" if local else ""
        panel.set(xlabel="tokens of context" + note)
        panel.set_title(model, fontsize="medium")
    figure.colorbar(image, ax=panels, label="answers found")
    return _save(figure, path)


def _draw_recall(rows: list[dict[str, Any]], path: Path) -> Path:
    """Recall by task, a bar for each model with two standard errors."""
    tasks, models = list(dict.fromkeys(row["task"] for row in rows)), _models(rows)
    figure, ((axes,),) = _figure((6.4, 4.0))
    width = 0.8 / len(models)
    for number, model in enumerate(models):
        own = {row["task"]: row for row in rows if row["model"] == model}
        places = [i for i, task in enumerate(tasks) if task in own]
        chosen = [own[tasks[i]] for i in places]
        left = np.array(places) + (number - (len(models) - 1) / 2) * width
        errors = [200 * (row["se"] or 0.0) for row in chosen]
        axes.bar(left, [100 * row["value"] for row in chosen], width, yerr=errors, capsize=2, label=model)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set(ylabel="completions with the answer, %", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3, axis="y")
    return _save(figure, path)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[[list[dict[str, Any]], Path], Path]]] = {
    "ppl_by_position": (("loss_by_position", "perplexity"), _draw_positions),
    "needles": (NEEDLES, _draw_needles),
    "recall": (("recall",), _draw_recall),
}
