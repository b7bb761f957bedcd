"""The suite of everything on invented data: every column in one go, killed and resumed, and on two processes."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from triadic import settings
from triadic.evaluation import compare, config, evaluate, figures, journal, mqar
from triadic.evaluation.suite import Context

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["perplexity", "wikitext", "zeroshot", "recall", "ruler"]


@pytest.fixture(scope="module")
def changes(local, pages, recall_files, own) -> list[str]:
    """What makes the shipped suite small and offline."""
    return [
        "data.validation=null", "perplexity.window=64", "perplexity.buckets=[0,16,64]", "perplexity.curve_points=6",
        f"wikitext.path={pages}", f"zeroshot.folder={local}", f"recall.folder={recall_files}",
        "recall.context_length=200", "ruler.lengths=[1024]", "ruler.samples=2", f"ruler.haystack={own}",
    ]  # fmt: skip


def load(changes) -> config.SuiteConfig:
    return settings.load(config.SuiteConfig, ROOT / "configs" / "eval" / "all.yaml", changes)


def test_the_suite_holds_every_part_that_the_papers_tables_need(changes):
    suite = load([])
    assert list(suite.parts()) == PARTS
    assert suite.perplexity.buckets == [0, 4096, 16_384, 65_536]
    assert len(suite.zeroshot.metrics) == 10
    assert (len(suite.recall.tasks), suite.recall.context_length) == (6, 2000)
    assert (len(suite.ruler.tasks), suite.ruler.samples, max(suite.ruler.lengths)) == (8, 500, 65_536)
    assert suite.ruler.haystack is None
    assert load(changes).recall.context_length == 200


def test_what_all_reads_is_fetched_or_named_without_a_checkpoint(changes, monkeypatch, capsys, tmp_path):
    def run(*more):
        monkeypatch.setattr(sys, "argv", ["fetch_suite.py", "all", *changes, "zeroshot.metrics={copa: acc}", *more])
        runpy.run_path(str(ROOT / "scripts" / "fetch_suite.py"), run_name="__main__")

    run()
    assert capsys.readouterr().out == "suite all: nothing is missing for wikitext, zeroshot, recall, ruler\n"
    none = f"{tmp_path}/none"
    for change, message in {
        f"wikitext.path={none}": "there is no file",
        f"zeroshot.folder={none}": "zeroshot.folder .* holds no copa.jsonl",
        "zeroshot.metrics.copa=f1": "the task copa has no metric f1",
        f"recall.folder={none}": "recall.folder .* holds no fda.jsonl",
        "recall.tasks=[quac]": "recall.tasks names quac",
        f"ruler.haystack={none}": "there are no documents at",
        "ruler.tasks=[niah]": "unknown ruler tasks niah",
        "wikitext.paths=1": "did you mean wikitext.path",
    }.items():
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            run(change)


@pytest.mark.slow
def test_all_is_the_same_killed_and_resumed_and_on_two_processes(changes, run_folder, tmp_path, monkeypatch):
    whole = evaluate(str(run_folder), load(changes), tmp_path / "whole", command="all")
    metrics = {row["metric"] for row in whole["rows"]}
    wanted = {"perplexity", "token_perplexity", "zeroshot_mean", "recall_mean", "niah_mean_local", "contains_local"}
    assert wanted < metrics
    assert {path.name for path in (tmp_path / "whole").glob("*.png")} == {f"{name}.png" for name in figures.FIGURES}
    columns, otherwise = compare.columns(whole)
    assert columns.keys() == {"params_m", "state_mb", "state_mb_4k", "state_mb_64k"}, (
        "nothing is measured as the paper's figures"
    )
    assert {"zero_shot", "wikitext_ppl", "recall", "niah_avg_local"} == {row["column"] for row in otherwise}

    write, written, limits = journal.write_json, [], []

    def dying(path, value):
        if "steps" in path.parts:
            if len(written) in limits:
                raise KeyboardInterrupt
            written.append(path.name)
        write(path, value)

    steps = len(list((tmp_path / "whole" / "steps").glob("*.json")))
    monkeypatch.setattr(journal, "write_json", dying)
    for limit in (2, 9, 14, 20, 31, steps - 1):
        limits[:] = [limit]
        with pytest.raises(KeyboardInterrupt):
            evaluate(str(run_folder), load(changes), tmp_path / "killed", command="all")
    limits.clear()
    resumed = evaluate(str(run_folder), load(changes), tmp_path / "killed", command="all")
    assert len(written) == len(set(written)) == steps
    assert {**resumed, "date": ""} == {**whole, "date": ""}
    assert json.loads((tmp_path / "killed" / "results.json").read_text()) == resumed
    before = (tmp_path / "killed" / "results.json").read_bytes()
    evaluate(str(run_folder), load(changes), tmp_path / "killed", command="all")
    assert (tmp_path / "killed" / "results.json").read_bytes() == before

    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(ROOT / "scripts" / "evaluate.py"), str(run_folder), "--suite", "all", *changes]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--output", str(tmp_path / "two")], check=True, env=environment, timeout=900)
    assert json.loads((tmp_path / "two" / "results.json").read_text())["rows"] == whole["rows"]


def test_mqar_trains_a_model_for_each_pair_slice_and_seed(tmp_path, monkeypatch):
    training = {"keys": 16, "values": 16, "embedding_size": 8, "hidden_size": 16, "heads": 2, "head_dim": 4}
    training |= {"intermediate_size": 16, "steps": 1, "tokens_per_step": 64, "test_sequences": 4, "precision": "fp32"}
    grid = {"pairs": [4, 8], "slices": [2], "seeds": 2, "training": training}
    suite = settings.from_dict(config.SuiteConfig, {"name": "m", "mqar": grid})
    here = Context(_checkpoint(None), suite, journal.Journal(tmp_path, {}))
    rows = mqar.measure(here, suite.mqar)
    accuracy = [(row["N"], row["E"], row["seed"]) for row in rows if row["metric"] == "accuracy"]
    assert accuracy == [(4, 2, 0), (4, 2, 1), (8, 2, 0), (8, 2, 1)]
    assert {row["metric"] for row in rows} >= {"params_m", "non_embedding_ratio"}
    monkeypatch.setattr(mqar, "train", None)
    assert mqar.measure(here, suite.mqar) == rows
    own = settings.from_dict(config.SuiteConfig, {"name": "m", "mqar": grid | {"slices": None}})
    assert mqar._slices(Context(_checkpoint(3), own), own.mqar) == [3]
    with pytest.raises(ValueError, match=r"has no second key whose size mqar could take; give mqar.slices"):
        mqar.check(Context(_checkpoint(None), own), own.mqar)
    with pytest.raises(settings.SettingsError, match=r"pairs \(32\) must not exceed keys"):
        settings.from_dict(config.SuiteConfig, {"name": "m", "mqar": grid | {"pairs": [32]}})


def _checkpoint(slices):
    class Config:
        second_key_dim = slices

    class Model:
        config, device = Config(), "cpu"

    class Checkpoint:
        name, model = "a model", Model()

    return Checkpoint()
