"""The collector on results made by hand, where every cell can be computed on paper."""

import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("collect", RECIPES / "collect.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXPECTED = {
    "title": "A table",
    "source": "nowhere",
    "results": "evaluation/results.json",
    "figure": {"bars": {"y": "both"}},
    "columns": {
        "params_m": {"label": "parameters, M", "config": "params_m"},
        "state_mb": {"label": "state, MB", "config": "state_mb", "context": 4096},
        "first": {"label": "first", "metric": "perplexity", "buckets": [0]},
        "both": {"label": "both", "metric": "perplexity", "buckets": [0, 1]},
        "needle": {"label": "needle", "metric": "contains", "scale": 100},
        "recall": {"label": "recall", "unmeasured": "nobody has looked"},
    },
    "rows": {
        "GDN": {"models": {"paper": "gdn_400m", "small": "gdn"}, "paper": {"first": 9.5, "recall": 26.2}},
        "E=8": {"models": {"paper": "triadic_gdn_400m_e8", "small": "triadic_gdn_e8_upcycled"}, "paper": {}},
        "sGLA": {"models": {"paper": "sgla_400m"}, "paper": {}},
    },
}


def evaluation(folder, losses, needles=(), name="ours"):
    """A results.json with perplexity buckets of 10 and 30 tokens, beside a baseline's rows."""
    rows = [
        {"metric": "perplexity", "model": name, "position": [0, 10], "loss": losses[0], "tokens_scored": 10},
        {"metric": "perplexity", "model": name, "position": [10, 40], "loss": losses[1], "tokens_scored": 30},
        {"metric": "perplexity", "model": "baseline", "position": [0, 10], "loss": 9.0, "tokens_scored": 10},
        *({"metric": "contains", "model": name, "length": 512, "value": value} for value in needles),
    ]
    header = {"commit": "abc", "date": "today", "gpu": None, "gpu_count": 0, "command": "evaluate"}
    (folder / "evaluation").mkdir(parents=True)
    (folder / "evaluation" / "results.json").write_text(
        json.dumps(header | {"checkpoint": {"name": name}, "rows": rows[::-1]})
    )


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "expected.json").write_text(json.dumps(EXPECTED))
    return tmp_path / "recipe"


def cells(text, row):
    line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_cells_are_means_over_seeds_beside_the_papers(program, recipe, tmp_path):
    runs = tmp_path / "runs"
    evaluation(runs / "gdn", [2.0, 1.0], [0.25, 0.75])
    evaluation(runs / "gdn-s1", [2.2, 1.2], [0.5, 1.0])
    evaluation(runs / "gdn_h8", [5.0, 5.0])  # another model, whose name begins alike
    text = program.collect(recipe, "small", runs)
    first = [math.exp(2.0), math.exp(2.2)]
    both = [math.exp((20 + 30) / 40), math.exp((22 + 36) / 40)]
    spread = abs(first[1] - first[0]) / math.sqrt(2)
    gdn = cells(text, "GDN")
    assert gdn[2] == f"{sum(first) / 2:.2f} ± {spread:.2f} (9.5)"
    assert gdn[3].startswith(f"{sum(both) / 2:.2f} ± ")
    assert gdn[4].startswith("62.5 ± ")
    assert gdn[5] == "- (26.2)"
    assert sorted(path.name for path in (recipe / "results" / "small").glob("*.json")) == ["gdn-s1.json", "gdn.json"]
    assert (recipe / "results" / "small" / "figure.png").stat().st_size > 5_000


def test_points_are_joined_from_the_origin_of_their_series(program):
    """A line for each series, from the row that `origins` names, at the means over seeds."""
    import matplotlib.pyplot as plt

    table = {"gdn": {"x": [1.0], "y": [5.0, 7.0]}, "E=2": {"x": [2.0], "y": [4.0]}, "E=4": {"x": [4.0], "y": []}}
    rows = {"gdn": {}, "E=2": {"series": "triadic gdn"}, "E=4": {"series": "triadic gdn"}}
    expected = {"rows": rows, "columns": {"x": {"label": "state"}, "y": {"label": "loss"}}}
    figure, axis = plt.subplots()
    program.draw_points(axis, {"x": "x", "y": "y", "origins": {"gdn": "gdn"}}, table, expected)
    (line,) = axis.get_lines()
    assert line.get_xydata().tolist() == [[1.0, 6.0], [2.0, 4.0]]
    assert line.get_label() == "triadic gdn"
    plt.close(figure)


def test_curves_are_labelled_by_what_their_rows_have(program):
    import matplotlib.pyplot as plt

    rows = [{"what": "block", "impl": impl, "E": E, "T": T, "ms": T + (E or 0)}
            for impl, E in (("triadic", 8), ("sdpa_flash", None)) for T in (2, 1)]  # fmt: skip
    panel = {"where": {"what": "block"}, "x": "T", "y": "ms", "series": ["impl", "E"], "xlabel": "", "ylabel": ""}
    figure, axis = plt.subplots()
    program.draw_curves(axis, panel, [*rows, rows[0] | {"what": "op"}, rows[0] | {"ms": None}])
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    assert lines == {"triadic, E 8": [[1, 9], [2, 10]], "sdpa_flash": [[1, 1], [2, 2]]}
    plt.close(figure)


def test_what_is_missing_is_said(program, recipe, tmp_path):
    evaluation(tmp_path / "runs" / "gdn", [2.0, 1.0])
    text = program.collect(recipe, "small", tmp_path / "runs")
    assert "- recall: nobody has looked." in text
    assert "- No results yet: E=8." in text
    assert "- Not part of this scale: sGLA." in text
    assert cells(text, "GDN")[4] == "-"
    assert "`gdn.json`: commit abc, today, CPU, `evaluate`" in text


def test_results_stay_when_the_runs_are_gone(program, recipe, tmp_path):
    evaluation(tmp_path / "runs" / "gdn", [2.0, 1.0])
    first = program.collect(recipe, "small", tmp_path / "runs")
    assert program.collect(recipe, "small", tmp_path / "elsewhere") == first


def test_parameters_and_state_come_from_the_configs(program, recipe, tmp_path):
    text = program.collect(recipe, "paper", tmp_path)
    assert cells(text, "GDN")[:2] == ["380.9", "6.3"]
    assert cells(text, "E=8")[:2] == ["385.4", "50.3"]
    upcycled = cells(program.collect(recipe, "small", tmp_path), "E=8")
    assert upcycled[:2] == ["56.8", "12.6"]


def test_ratios_pair_equal_lengths(program, recipe, tmp_path):
    ratio = {
        "title": "Times",
        "source": "nowhere",
        "figure": {
            "curves": [{"where": {"what": "op"}, "x": "T", "y": "ms", "series": "impl", "xlabel": "", "ylabel": ""}]
        },
        "columns": {"time": {"label": "time", "field": "ms", "ratio": True, "digits": 2}},
        "rows": {"new over old": {"where": {"impl": "new"}, "over": {"impl": "old"}, "paper": {"time": [1.2, 1.4]}}},
    }
    (recipe / "expected.json").write_text(json.dumps(ratio))
    rows = [
        {"what": "op", "impl": impl, "T": length, "ms": ms}
        for impl, length, ms in [("new", 1, 3.0), ("old", 1, 2.0), ("new", 2, 5.0), ("old", 2, 4.0), ("new", 4, 9.0)]
    ]
    header = {"commit": "abc", "date": "today", "gpu": "H200", "gpu_count": 1, "command": "bench"}
    (recipe / "results" / "small").mkdir(parents=True)
    (recipe / "results" / "small" / "op.json").write_text(json.dumps(header | {"rows": rows}))
    text = program.collect(recipe, "small", None)
    assert cells(text, "new over old") == ["1.38 ± 0.18 (1.2-1.4)"]
    assert "1 x H200" in text


def test_wrong_folders_and_scales_are_refused(program, recipe, tmp_path):
    with pytest.raises(ValueError, match=r"no expected\.json"):
        program.collect(tmp_path, "small", None)
    with pytest.raises(ValueError, match="the scales are paper, small, smoke"):
        program.collect(recipe, "medium", None)


@pytest.mark.parametrize(
    "recipe_folder", sorted(p.parent for p in RECIPES.glob("*/expected.json")), ids=lambda p: p.name
)
@pytest.mark.parametrize("scale", ["paper", "small"])
def test_committed_tables_are_up_to_date(recipe_folder, scale, program, tmp_path):
    """results/SCALE/table.md is what the collector makes of the committed results and expected.json."""
    copied = tmp_path / recipe_folder.name
    shutil.copytree(recipe_folder, copied)
    committed = (recipe_folder / "results" / scale / "table.md").read_text()
    assert program.collect(copied, scale, None) == committed
