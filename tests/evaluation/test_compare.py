"""Evaluations side by side: the paper's columns from results, the paper's rows as printed, and what contradicts."""

import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from triadic import settings
from triadic.evaluation import compare, figures, paper
from triadic.evaluation.config import SuiteConfig
from triadic.evaluation.report import write_markdown

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]


def suite(*changes: str) -> dict:
    """What a results.json says of the shipped suite, whose settings are the paper's."""
    return settings.to_dict(settings.load(SuiteConfig, ROOT / "configs" / "eval" / "all.yaml", changes))


def results(name="ours", weights="abc", **changes) -> dict:
    """What a results.json holds, with round figures."""
    rows = [
        {"metric": "zeroshot_mean", "value": 0.5, "tasks": list("0123456789")},
        {"metric": "token_perplexity", "value": 11.5},
        {"metric": "recall_mean", "value": 0.25},
        {"metric": "niah_mean", "value": 0.75, "lengths": LENGTHS},
        {"metric": "perplexity", "position": [0, 4096], "loss": 3.0, "value": math.exp(3.0), "loss_se": 0.1},
        {"metric": "perplexity", "position": [4096, 16_384], "loss": 2.5, "value": math.exp(2.5), "loss_se": 0.1},
        {"metric": "perplexity", "position": [16_384, 65_536], "loss": 2.0, "value": math.exp(2.0), "loss_se": 0.1},
        {"metric": "loss_by_position", "position": [0, 65_536], "value": 2.1, "se": None},
    ]
    state = {"4096": 6.25, "65536": 6.25}
    checkpoint = {"name": name, "parameters": 380_900_000, "state_mb": state, "weights_sha256": weights}
    found = {"checkpoint": checkpoint, "suite": suite()}
    found["rows"] = [row | {"model": name} | changes.get(row["metric"], {}) for row in rows]
    found["rows"].append({"metric": "token_perplexity", "value": 99.0, "model": "a baseline"})
    return found


def test_columns_are_the_papers():
    found, otherwise = compare.columns(results())
    assert otherwise == []
    assert found == {
        "params_m": 380.9,
        "state_mb": 6.25,
        "state_mb_4k": 6.25,
        "state_mb_64k": 6.25,
        "zero_shot": 50.0,
        "wikitext_ppl": 11.5,
        "recall": 25.0,
        "niah_avg": 75.0,
        "pg19_le4k": math.exp(3.0),
        "pg19_4k_16k": math.exp(2.5),
        "pg19_16k_64k": math.exp(2.0),
        "pg19_4k_64k": pytest.approx(math.exp((2.5 * 12_288 + 2.0 * 49_152) / 61_440)),
    }


PG19 = {"pg19_le4k", "pg19_4k_16k", "pg19_16k_64k", "pg19_4k_64k"}
OTHERWISE = {  # setting -> the columns that it takes out of the table, what is said of them
    "recall.context_length=1000": ({"recall"}, "recall.context_length is 1000, not 2000"),
    "recall.samples=50": ({"recall"}, "recall.samples is 50, not all"),
    "recall.folder=mine": ({"recall"}, "recall.folder is mine, not the hub's data"),
    "zeroshot.folder=mine": ({"zero_shot"}, "zeroshot.folder is mine, not the hub's data"),
    "zeroshot.samples=50": ({"zero_shot"}, "zeroshot.samples is 50, not all"),
    "zeroshot.metrics.piqa=acc_norm": ({"zero_shot"}, "zeroshot.metrics is lambada_openai: acc, "),
    "wikitext.path=mine.jsonl": ({"wikitext_ppl"}, "wikitext.path is mine.jsonl, not the hub's data"),
    "ruler.lengths=[1024,2048]": ({"niah_avg"}, "ruler.lengths is 1024, 2048, not 1024, 2048, 4096, "),
    "ruler.samples=1": ({"niah_avg"}, "ruler.samples is 1, not 500"),
    "ruler.essays=mine.jsonl": ({"niah_avg"}, "ruler.essays is mine.jsonl, not the hub's data"),
    "data.validation=data/my/validation": (PG19, "the text is data/my/validation, not PG19"),
    "data.validation=null": (PG19, "the text is the run's own validation text, not PG19"),
    "perplexity.max_windows=8": (PG19, "perplexity.max_windows is 8, not all"),
}


@pytest.mark.parametrize("change", OTHERWISE)
def test_figures_measured_otherwise_stand_apart(change, tmp_path):
    other = results() | {"suite": suite(change)}
    found, otherwise = compare.columns(other)
    every, _ = compare.columns(results())
    gone, said = OTHERWISE[change]
    assert every.keys() - found.keys() == gone
    assert {row["column"]: row["value"] for row in otherwise} == {column: every[column] for column in gone}
    assert all(row["differs"].startswith(said) for row in otherwise)
    table, apart = compare.compare([write(tmp_path / "1", other)], tmp_path / "out").split("## Not measured as")
    assert not any(compare.COLUMNS[column][0] in table for column in gone)
    assert apart.count(f"({said}") == apart.count("- ours: ") == len(gone)


def test_a_local_text_is_called_so(tmp_path):
    """In headings and titles that would be read as a known text's."""
    rows = [{"metric": "token_perplexity", "value": 9.0, "tokens_scored": 5, "part": "wikitext"}]
    facts = {"name": "m", "parameters": 1, "dtype": "float32", "weights_sha256": "a", "tokenizer_hash": "b"}
    found = {"checkpoint": facts, "commit": "c", "date": "d", "checks": [], "rows": rows}
    titles = []
    for changes in ([], ["wikitext.path=a/mine.jsonl", "data.validation=data/my", "name=pg19"]):
        write(folder := tmp_path / str(len(changes)), found | {"suite": suite(*changes)})
        titles += [line for line in write_markdown(folder).splitlines() if line.startswith("#")]
    assert titles == ["# all: m", "## WikiText-2", "# pg19 (local: my): m", "## WikiText-2 (local: mine.jsonl)"]


def test_a_row_of_several_tables_is_asked_for_by_table():
    with pytest.raises(ValueError, match="have a row 'gdn'; give table1/gdn or table3/gdn"):
        paper.rows(["gdn"])
    shorts = paper.rows(["table1/gdn", "table3/gdn", "table3_hybrid/gdn", "sgla", "table3/hybrid 3:1 gdn/gqa-8"])
    tables = json.loads(paper.TABLES.read_text())
    hybrid = tables["table3_hybrid"]
    wanted = [tables["table1_state_matched"]["gdn"], hybrid["gdn"], hybrid["gdn"]]
    wanted += [tables["table1_state_matched"]["sgla"], hybrid["hybrid 3:1 gdn/gqa-8"]]
    assert list(shorts.values()) == wanted


def test_one_checkpoint_under_two_paths_is_one_model(tmp_path, monkeypatch):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = ["runs/demo", str(tmp_path / "runs" / "demo"), "runs/demo/", "org/model"]
    folders = [write(tmp_path / str(i), results(name)) for i, name in enumerate(names)]
    compare.compare(folders, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(written["models"]) == ["runs/demo", "org/model"]
    with pytest.raises(ValueError, match="two results of runs/demo have different weights"):
        compare.compare([folders[0], write(tmp_path / "9", results(names[1], weights="b"))], tmp_path / "out")


def test_the_papers_rows_are_those_of_its_recipes():
    """Each number of recipes/*/expected.json stands in the shipped tables, under the same row."""
    tables = json.loads(paper.TABLES.read_text())
    names = {
        "figure2_table1_state_matched": "table1_state_matched",
        "table2_upcycling": "table2_upcycling",
        "table3_hybrids": "table3_hybrid",
        "table4_key_dimensions": "table4_ablations",
    }
    compared = 0
    for recipe, table in names.items():
        for row, spec in json.loads((ROOT / "recipes" / recipe / "expected.json").read_text())["rows"].items():
            for column, value in spec["paper"].items():
                if row in tables[table] and column in tables[table][row]:
                    assert tables[table][row][column] == value
                    compared += 1
    assert compared > 200


def write(folder: Path, content: dict) -> str:
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(content))
    return str(folder)


def test_the_table_stands_beside_the_papers(tmp_path, monkeypatch, capsys):
    one = results()
    split = one["rows"][:3], one["rows"][3:]
    folders = [write(tmp_path / str(i), one | {"rows": rows}) for i, rows in enumerate(split)]
    folders.append(write(tmp_path / "other", results("theirs", recall_mean={"value": 0.5})))
    script = ["compare.py", *folders, "--output", str(tmp_path / "out"), "--paper", "table1/gdn", "triadic gdn E=4"]
    monkeypatch.setattr(sys, "argv", script)
    runpy.run_path(str(ROOT / "scripts" / "compare.py"), run_name="__main__")
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert "\n".join(lines).strip() == capsys.readouterr().out.strip()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    cells = {line[0]: line[1:] for line in split}
    heading = cells["model"]
    assert cells["ours"][heading.index("recall mean, %")] == "25.0"
    assert cells["theirs"][heading.index("recall mean, %")] == "50.0"
    assert cells["ours"][heading.index("PG19 16k-64k")] == "7.39"
    assert cells["paper: table1/gdn"][heading.index("PG19 16k-64k")] == "14.15"
    assert cells["paper: triadic gdn E=4"][heading.index("recall mean, %")] == "31.1"
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["models"]["ours"]["columns"] == compare.columns(one)[0]


def test_a_tiny_models_state_is_not_zero(tmp_path):
    tiny = results()
    tiny["checkpoint"] |= {"parameters": 21_000, "state_mb": {"4096": 0.012288, "65536": 0.196608}}
    lines = compare.compare([write(tmp_path / "tiny", tiny)], tmp_path / "out").splitlines()
    assert [cell.strip() for cell in lines[4].split("|")][2:5] == ["0.021", "0.012", "0.20"]


def demo(name: str, loss: float, text="0123456789abcdef", **changes) -> dict:
    """What the demo's suite leaves of a model, and of a baseline that is 0.5 nats worse."""
    found = results(name, weights=name) | {"data": {"perplexity": {"validation": text}}, "rows": []}
    facts = {"windows": 8, "window": 1024} | changes
    for model, own in ((name, loss), ("baseline", 5.5)):
        found["rows"] += [
            {"metric": "perplexity", "model": model, "position": [0, 4], "loss": own + 1.0, "value": 1.0},
            {"metric": "perplexity", "model": model, "position": [4, 1024], "loss": own - 0.25, "value": 1.0},
            {"metric": "heldout_loss", "model": model, "value": own, "se": 0.1} | facts,
        ]
    found["rows"].append({"metric": "gain_over_unigram", "model": name, "value": 6.5 - loss, "se": None} | facts)
    return found


def test_losses_stand_side_by_side_where_the_text_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw_rows", lambda *_: [])
    suites = [demo("a", 5.0), demo("b", 4.5), demo("c", 3.0, text="f" * 16), demo("c", 3.5, windows=4)]
    folders = [write(tmp_path / str(i), suite) for i, suite in enumerate(suites)]
    tables = compare.compare(folders, tmp_path / "out").split("## ")[1:]
    assert [text.splitlines()[0] for text in tables] == [
        "Held-out loss, nats a token: text 0123456789ab, 8 windows of 1024 tokens",
        "Held-out loss, nats a token: text ffffffffffff, 8 windows of 1024 tokens",
        "Held-out loss, nats a token: text 0123456789ab, 4 windows of 1024 tokens",
    ]
    assert tables[0].splitlines()[2:-1] == [
        "| model | loss | below a unigram model's | at 0-4 | at 4-1024 |",
        "| --- | --- | --- | --- | --- |",
        "| a | 5.0000 | 1.5000 | 6.0000 | 4.7500 |",
        "| baseline | 5.5000 |  | 6.5000 | 5.2500 |",
        "| b | 4.5000 | 2.0000 | 5.5000 | 4.2500 |",
    ]
    kept = json.loads((tmp_path / "out" / "comparison.json").read_text())["heldout"]
    assert kept[0]["buckets"] == {"0-4": 6.0, "4-1024": 4.75}
    again = write(tmp_path / "again", demo("a", 5.1))
    with pytest.raises(ValueError, match="two results of a have different held-out losses"):
        compare.compare([folders[0], again], tmp_path / "out2")


def test_what_contradicts_or_is_missing_is_refused(tmp_path):
    one, two = write(tmp_path / "1", results()), write(tmp_path / "2", results(weights="other"))
    with pytest.raises(ValueError, match="two results of ours have different weights"):
        compare.compare([one, two], tmp_path / "out")
    three = write(tmp_path / "3", results(recall_mean={"value": 0.5}))
    with pytest.raises(ValueError, match="two results of ours have different recall"):
        compare.compare([one, three], tmp_path / "out")
    with pytest.raises(ValueError, match="holds no readable results"):
        compare.compare([tmp_path / "none"], tmp_path / "out")
    for number, other in enumerate(([], {"settings": {}, "rows": []})):  # the second is what an analysis leaves
        with pytest.raises(ValueError, match=r"holds no readable results\.json of an evaluation; give the output"):
            compare.compare([write(tmp_path / f"other{number}", other)], tmp_path / "out")
    with pytest.raises(ValueError, match="the paper's tables have no row 'gdm'"):
        compare.compare([one], tmp_path / "out", ["gdm"])
    assert not (tmp_path / "out").exists()


def test_needles_and_recall_are_drawn(tmp_path):
    needles = [
        {"metric": metric, "model": "a", "task": task, "length": length, "value": value}
        for metric, task, value in (("contains", "niah_single_1", 1.0), ("contains_local", "niah_multiquery", 0.5))
        for length in (2048, 1024)
    ]
    tasks, lengths, grid = figures.needle_grid([*needles[:2], needles[3]])
    assert (tasks, lengths) == (["niah_single_1", "niah_multiquery"], [1024, 2048])
    np.testing.assert_array_equal(grid, [[1.0, 1.0], [0.5, np.nan]])
    recall = [
        {"metric": "recall", "model": model, "task": task, "value": 0.4, "se": se}
        for model, se in (("a", 0.1), ("b", None))
        for task in ("fda", "nq")
    ]
    drawn = figures.draw_rows([*needles, *recall[:3]], tmp_path)
    assert [path.name for path in drawn] == ["needles.png", "recall.png"]
    first = [path.read_bytes() for path in drawn]
    assert all(picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 5000 for picture in first)
    needles[0]["value"] = 0.0
    figures.draw_rows([*needles, *recall], tmp_path)
    assert all(path.read_bytes() != picture for path, picture in zip(drawn, first, strict=True))
