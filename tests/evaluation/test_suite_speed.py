"""The timing of the long-context parts: documents as promised, counts that add up, and a run on a CPU."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from triadic.evaluation import suite_speed

ROOT = Path(__file__).resolve().parents[2]


def test_documents_are_joined_in_order():
    texts = ["a" * 4, "b" * 9, "c" * 3, "d" * 8, "e"]
    joined = suite_speed.join(texts, 10)
    assert joined == ["aaaa\n\nbbbbbbbbb\n\n", "ccc\n\ndddddddd\n\n"]
    with pytest.raises(ValueError, match="has fewer than 100 characters in all"):
        suite_speed.join(texts, 100)


def test_work_is_what_the_rows_say():
    rows = [
        {"part": "perplexity", "metric": "heldout_loss", "tokens_scored": 640, "windows": 10, "documents": 4},
        {
            "part": "ruler",
            "metric": "contains",
            "task": "b",
            "samples": 3,
            "actual_lengths": [90, 110],
            "haystack": "b",
        },
        {
            "part": "ruler",
            "metric": "contains",
            "task": "a",
            "samples": 3,
            "actual_lengths": [80, 100],
            "haystack": "a",
        },
        {"part": "ruler", "metric": "niah_mean_local"},
    ]
    assert suite_speed._work("perplexity", rows) == {"tokens": 640, "windows": 10, "documents": 4}
    needles = {"tokens": 570, "tasks": 2, "samples_each": 3, "haystacks": ["a", "b"]}
    assert suite_speed._work("ruler", rows) == needles


@pytest.mark.parametrize("size", [{"length": -5}, {"windows": 0}, {"samples": 0}])
def test_sizes_that_cannot_be_measured(size, triadic_hf, own, tmp_path):
    sizes = {"length": 2048, "windows": 1, "samples": 1} | size
    with pytest.raises(ValueError, match="length must be at least 256 tokens, windows and samples at least 1, not"):
        suite_speed.suite_speed(str(triadic_hf), str(own), tmp_path / "out", **sizes, dtype="float32", command="")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_times_both_parts(own, triadic_hf, tmp_path, monkeypatch, capsys):
    given = ["--config", str(triadic_hf / "config.json"), "--text", str(own), "--output", str(tmp_path)]
    given += ["--length", "2048", "--windows", "2", "--samples", "1", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["benchmark_evaluation.py", *given])
    with pytest.raises(SystemExit, match="has fewer than 12288 characters in all"):
        runpy.run_path(str(ROOT / "scripts" / "benchmark_evaluation.py"), run_name="__main__")
    long = tmp_path / "long"
    long.mkdir()
    for name, word in (("a", "green"), ("b", "yellow")):
        (long / f"{name}.txt").write_text("".join(f"{word} sky {i}.\n" for i in range(4000)))
    given[3] = str(long)
    monkeypatch.setattr(sys, "argv", ["benchmark_evaluation.py", *given])
    runpy.run_path(str(ROOT / "scripts" / "benchmark_evaluation.py"), run_name="__main__")
    speed = json.loads(capsys.readouterr().out)
    assert speed == json.loads((tmp_path / "speed.json").read_text())
    perplexity, ruler = speed["rows"]
    assert (perplexity["what"], perplexity["tokens"], perplexity["windows"]) == ("perplexity", 2 * 2048, 2)
    assert (ruler["what"], ruler["tasks"], ruler["samples_each"]) == ("ruler", 8, 1)
    assert ruler["haystacks"] == ["local: long", "of the task"]
    for row in speed["rows"]:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"], abs=0.1)
