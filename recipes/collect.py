"""Put a recipe's results beside the paper's numbers: python recipes/collect.py recipes/table2_upcycling --scale small

What the runs under runs/SCALE measured is copied to RECIPE/results/SCALE (committed); from there, and from
RECIPE/expected.json, come RECIPE/results/SCALE/table.md and figure.png. A run that is not there keeps what an earlier
one left; what nothing measured is listed under the table.

expected.json:
    results    the file inside a run's folder that is copied (absent: something else writes into results/SCALE)
    columns    name -> how a cell is made, see `cell`
    rows       name -> {"models": {scale: run}, "paper": {column: number, [low, high] or text}}, or instead of models
               {"where": {key: value}, "over": {...}}: the result rows (and those to divide by) it is about
    figure     {"points": ...} | {"bars": ...} of the table's columns, or {"curves": [...]} of result rows
A run named gdn-s1 is another seed of gdn: cells are means over seeds.
"""

import argparse
import json
import math
import re
import shutil
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"paper": "configs/model", "small": "recipes/scales/small/models", "smoke": "recipes/scales/smoke/models"}
SEED = re.compile(r"-s\d+$")
Row = dict[str, Any]


def collect(recipe: Path, scale: str, runs: Path | None = None) -> str:
    """Copy results, write table.md and figure.png into recipe/results/scale; returns the table.

    Raises ValueError if `recipe` has no expected.json or `scale` is unknown.
    """
    if scale not in MODELS:
        raise ValueError(f"the scale {scale} is unknown; the scales are {', '.join(MODELS)}")
    if not (recipe / "expected.json").is_file():
        raise ValueError(f"{recipe} is no recipe: it holds no expected.json")
    expected = json.loads((recipe / "expected.json").read_text())
    folder = recipe / "results" / scale
    folder.mkdir(parents=True, exist_ok=True)
    copy_results(expected, scale, runs, folder)
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    found = [row for name, file in files.items() for row in labelled(name, file)]
    table = {
        name: {column: cell(spec, column_spec, found, scale) for column, column_spec in expected["columns"].items()}
        for name, spec in expected["rows"].items()
        if "models" not in spec or scale in spec["models"]
    }
    text = markdown(expected, scale, table, files)
    (folder / "table.md").write_text(text)
    draw(expected, table, found, folder / "figure.png")
    return text


def copy_results(expected: dict, scale: str, runs: Path | None, folder: Path) -> None:
    """Copy what each run of this scale, and its further seeds, measured."""
    if "results" not in expected or runs is None:
        return
    for spec in expected["rows"].values():
        model = spec["models"].get(scale)
        for run in sorted(runs.glob(f"{model}*")) if model else []:
            source = run / expected["results"]
            if SEED.sub("", run.name) == model and source.is_file():
                shutil.copyfile(source, folder / f"{run.name}.json")


def labelled(name: str, file: dict) -> list[Row]:
    """A result file's rows; those about a model (the file's own, not its baseline) are named after the run."""
    own = file.get("checkpoint", {}).get("name")
    rows = [row for row in file["rows"] if own is None or row.get("model") == own]
    return [row | {"run": name} | ({"model": SEED.sub("", name)} if "model" in row else {}) for row in rows]


def cell(row: dict, column: dict, found: list[Row], scale: str) -> list[float]:
    """Our values of one cell, one for each seed; [] if not measured.

    A column is {"config": "params_m" | "state_mb"} (from the architecture alone), {"ratio": true, "field": name} (of
    the row's `where` over its `over`, a value for each T), or {"metric": name} with "buckets" (perplexity over those
    buckets together) or "pick" ("mean", "min", "max" over the metric's rows in a run) and "scale" (a factor).
    """
    if "unmeasured" in column:
        return []
    if "config" in column:
        return from_config(row, column, scale)
    if column.get("ratio"):
        upper, lower = (
            {r["T"]: r[column["field"]] for r in found if matches(r, row[side])} for side in ("where", "over")
        )
        return [upper[length] / lower[length] for length in sorted(upper.keys() & lower.keys())]
    where = {"model": row["models"][scale]} if "models" in row else row["where"]
    chosen = [r for r in found if matches(r, where | {"metric": column["metric"]})]
    runs = {r["run"]: [] for r in chosen}
    for r in chosen:
        runs[r["run"]].append(r)
    return [reduce_rows(rows, column) for rows in runs.values()]


def from_config(row: dict, column: dict, scale: str) -> list[float]:
    """Parameters in millions or decoding memory in MB of a row's architecture; [] for a transformer's state alone."""
    from triadic.models import TriadicConfig, count_parameters, state_bytes

    name = re.sub(r"_upcycled.*", "", row["models"][scale])
    config = TriadicConfig.from_pretrained(ROOT / MODELS[scale] / f"{name}.json")
    if column["config"] == "params_m":
        return [count_parameters(config)[0] / 1e6]
    return [state_bytes(config, column.get("context", 1024)) / 1e6]


def matches(row: Row, where: dict) -> bool:
    return all(row.get(key) == value for key, value in where.items())


def reduce_rows(rows: list[Row], column: dict) -> float:
    """One number from the rows of one metric in one run."""
    if "buckets" in column:
        buckets = sorted(rows, key=lambda row: row["position"])
        chosen = [buckets[i] for i in column["buckets"]]
        tokens = sum(row["tokens_scored"] for row in chosen)
        return math.exp(sum(row["loss"] * row["tokens_scored"] for row in chosen) / tokens)
    pick = {"mean": statistics.fmean, "min": min, "max": max}[column.get("pick", "mean")]
    return pick([row["value"] for row in rows]) * column.get("scale", 1)


def markdown(expected: dict, scale: str, table: dict[str, dict[str, list[float]]], files: dict[str, dict]) -> str:
    """The table: ours, and the paper's in brackets; then what is missing and where the results come from."""
    columns = expected["columns"]
    lines = [
        f"# {expected['title']}",
        "",
        f"Scale `{scale}`: our value ± standard deviation over seeds, and the paper's in brackets"
        + ("." if scale == "paper" else "; sizes in names are those of the paper's models."),
        "",
        "| | " + " | ".join(column["label"] for column in columns.values()) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, cells in table.items():
        paper = expected["rows"][name]["paper"]
        shown = [show(cells[column], paper.get(column), spec) for column, spec in columns.items()]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    missing = [
        name for name, cells in table.items() if not any(cells[c] for c in columns if "config" not in columns[c])
    ]
    absent = [name for name in expected["rows"] if name not in table]
    reasons = [f"{spec['label']}: {spec['unmeasured']}." for spec in columns.values() if "unmeasured" in spec]
    lines += ["", *(f"- {reason}" for reason in reasons)]
    lines += [f"- No results yet: {', '.join(missing)}."] if missing else []
    lines += [f"- Not part of this scale: {', '.join(absent)}."] if absent else []
    for name, file in files.items():
        on = f"{file['gpu_count']} x {file['gpu']}" if file.get("gpu") else "CPU"
        lines.append(f"- `{name}.json`: commit {file['commit']}, {file['date']}, {on}, `{file['command']}`")
    return "\n".join(lines) + "\n"


def show(ours: list[float], paper: Any, column: dict) -> str:
    digits = column.get("digits", 2 if "buckets" in column else 1)
    text = "-"
    if ours:
        text = f"{statistics.fmean(ours):.{digits}f}"
        text += f" ± {statistics.stdev(ours):.{digits}f}" if len(ours) > 1 else ""
    if paper is None:
        return text
    return f"{text} ({'-'.join(map(str, paper)) if isinstance(paper, list) else paper})"


def draw(expected: dict, table: dict, found: list[Row], path: Path) -> None:
    """The recipe's figure; none is written while there is nothing of ours to show."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ((kind, spec),) = expected["figure"].items()
    panels = spec if kind == "curves" else [paper_side(expected, table), table]
    if kind == "curves":
        panels = [panel for panel in panels if any(matches(row, panel["where"]) for row in found)]
    elif not any(cells[spec["y"]] for cells in table.values()):
        panels = []
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 4.2), layout="constrained", squeeze=False)
    for axis, panel, title in zip(axes[0], panels, ("the paper", "ours", ""), strict=False):
        if kind == "curves":
            draw_curves(axis, panel, found)
        else:
            {"points": draw_points, "bars": draw_bars}[kind](axis, spec, panel, expected)
            axis.set_title(title)
        axis.grid(alpha=0.3)
    figure.suptitle(textwrap.fill(expected["title"], 60 * len(panels)))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def paper_side(expected: dict, table: dict) -> dict[str, dict[str, list[float]]]:
    """The paper's numbers in the shape of our table."""
    return {
        name: {column: [number] for column in cells if isinstance(number := paper.get(column), int | float)}
        | {column: [] for column in cells if not isinstance(paper.get(column), int | float)}
        for name, cells in table.items()
        for paper in [expected["rows"][name]["paper"]]
    }


def draw_points(axis, spec: dict, table: dict, expected: dict) -> None:
    """A line for each `series` of rows, from its row of `origins` on; the triadic ones stand out."""
    lines: dict[str, list[str]] = {}
    for name in table:
        series = expected["rows"][name].get("series")
        if series:
            lines.setdefault(series, [o for start, o in spec["origins"].items() if start in series]).append(name)
    for series, names in lines.items():
        points = [(table[n][spec["x"]], table[n][spec["y"]]) for n in names if n in table]
        points = [(statistics.fmean(x), statistics.fmean(y)) for x, y in points if x and y]
        if points:
            strong = {"linewidth": 2.5} if series.startswith("triadic") else {"linewidth": 1, "linestyle": "--"}
            axis.plot(*zip(*points, strict=True), marker="o", label=series, **strong)
    labels = expected["columns"]
    axis.set(xlabel=labels[spec["x"]]["label"], ylabel=labels[spec["y"]]["label"])
    axis.set_xscale("log", base=2)
    states = sorted({round(x, 1) for name in lines for n in lines[name] for x in table.get(n, {}).get(spec["x"], [])})
    axis.set_xticks(states, [f"{state:g}" for state in states])
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))


def draw_bars(axis, spec: dict, table: dict, expected: dict) -> None:
    """One mark for each row, so that differences of a few per cent can be seen; a line spans the seeds."""
    for i, cells in enumerate(table.values()):
        values = cells[spec["y"]]
        if values:
            axis.plot([min(values), max(values)], [i, i], color="C0", alpha=0.5)
            axis.plot(statistics.fmean(values), i, "o", color="C0")
    axis.set(yticks=range(len(table)), yticklabels=table, xlabel=expected["columns"][spec["y"]]["label"])
    axis.invert_yaxis()


def draw_curves(axis, panel: dict, found: list[Row]) -> None:
    """Means over seeds of the rows `where`, against x, a line for each value of the `series` keys."""
    keys = [panel["series"]] if isinstance(panel["series"], str) else panel["series"]
    lines: dict[str, dict[float, list[float]]] = {}
    for row in found:
        if matches(row, panel["where"]) and row.get(panel["y"]) is not None:
            named = [(key, row[key]) for key in keys if row.get(key) is not None]
            label = ", ".join(f"{key} {value}" if len(str(key)) == 1 else str(value) for key, value in named)
            lines.setdefault(label, {}).setdefault(row[panel["x"]], []).append(row[panel["y"]])
    for label, points in lines.items():
        xs = sorted(points)
        (line,) = axis.plot(xs, [statistics.fmean(points[x]) for x in xs], marker="o", markersize=3, label=label)
        axis.fill_between(
            xs, [min(points[x]) for x in xs], [max(points[x]) for x in xs], color=line.get_color(), alpha=0.15
        )
    axis.set(xlabel=panel["xlabel"], ylabel=panel["ylabel"])
    axis.set(yscale="log" if panel.get("logy") else "linear")
    if panel.get("logx"):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    axis.legend(fontsize="small")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a folder of recipes/")
    parser.add_argument("--scale", required=True, choices=MODELS)
    parser.add_argument("--runs", type=Path, help="folder of the scale's runs; default runs/SCALE")
    args = parser.parse_args()
    try:
        print(collect(args.recipe, args.scale, args.runs or ROOT / "runs" / args.scale))
    except ValueError as error:
        sys.exit(f"error: {error}")
