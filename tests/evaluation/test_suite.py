"""The whole evaluation: result files, checks, resume, command lines, shipped suites."""

import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triadic import settings
from triadic.evaluation import config, evaluate, figures, journal, sampling, suite

ROOT = Path(__file__).resolve().parents[2]
TREE = {
    "name": "tiny",
    "perplexity": {"window": 64, "buckets": [0, 16, 64], "windows_per_step": 5, "curve_points": 6},
    "ruler": {"lengths": [512], "samples": 2},
    "sample": {"prompts": ["", "ka lo"], "max_new_tokens": 12},
    "checks": {"min_gain_over_unigram": -100.0, "min_context_gain": -1000.0, "min_word_share": 0.0},
}


def tiny(**sections) -> config.SuiteConfig:
    return settings.from_dict(config.SuiteConfig, TREE | sections)


@pytest.fixture(scope="module")
def finished(run_folder, tmp_path_factory):
    """The tiny suite on a run folder, once: (folder, results)."""
    folder = tmp_path_factory.mktemp("evaluation")
    return folder, evaluate(str(run_folder), tiny(), folder, command="evaluate.py tiny")


def test_results_carry_their_origin(finished, run_folder, data):
    folder, results = finished
    written = json.loads((folder / "results.json").read_text())
    assert written == results
    assert {"commit", "date", "gpu", "gpu_count", "versions", "command", "rows"} <= written.keys()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert written["commit"] in ((head, head + "-dirty") if head else (None,))
    assert written["versions"]["lm-eval"] >= "0.4.13"
    assert {"torch", "transformers", "datasets", "python"} < written["versions"].keys()
    assert len(written["checkpoint"]["weights_sha256"]) == 64
    assert (
        written["checkpoint"]["tokenizer_hash"]
        == json.loads((data / "train" / "store.json").read_text())["tokenizer_hash"]
    )
    assert written["suite"]["perplexity"]["window"] == 64
    stores = {
        split: json.loads((data / split / "store.json").read_text())["fingerprint"] for split in ("train", "validation")
    }
    assert written["data"]["perplexity"] == stores
    for row in written["rows"]:
        assert (row["model"], row["tokens"], row["seed"]) == (str(run_folder), 50 * 4096, 7)
    metrics = {row["metric"] for row in written["rows"]}
    assert {"perplexity", "context_gain", "heldout_loss", "unigram_loss", "contains", "sample", "word_share"} < metrics


def test_report_shows_the_figures(finished):
    folder, results = finished
    text = (folder / "results.md").read_text()
    values = {row["metric"]: row["value"] for row in results["rows"]}
    for metric in ("heldout_loss", "unigram_loss", "gain_over_unigram"):
        assert f"{values[metric]:.4f}" in text
    assert f"{values['word_share']:.1%}" in text
    assert text.count("passed") == 3
    assert "| niah_single_1 | 512 |" in text
    for row in results["rows"]:
        if row["metric"] == "perplexity":
            assert f"{row['value']:.2f}" in text


def test_figure_is_drawn_from_the_results(finished, tmp_path):
    folder, results = finished
    picture = (folder / "ppl_by_position.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 5000
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert figures.draw(tmp_path) == [tmp_path / name for name in ("ppl_by_position.png", "needles.png")]
    twice = [row for row in results["rows"] if row["part"] == "perplexity"]
    twice += [row | {"model": "baseline", "value": row["value"] * 1.1} for row in twice]
    (tmp_path / "results.json").write_text(json.dumps({"rows": twice}))
    (compared,) = figures.draw(tmp_path)
    assert compared.read_bytes() != picture
    (tmp_path / "results.json").write_text(json.dumps({"rows": []}))
    assert figures.draw(tmp_path) == []


def test_word_share_counts_the_written_words(finished, data, tokenizer):
    from triadic.data import open_store

    _, results = finished
    corpus = sampling.corpus_words(open_store(data / "train"), tokenizer)
    rows = [row for row in results["rows"] if row["metric"] == "sample"]
    assert [row["prompt"] for row in rows] == ["", "ka lo"]
    counts = [sampling.count_words(row["text"], corpus) for row in rows]
    share = next(row for row in results["rows"] if row["metric"] == "word_share")
    assert (share["known"], share["words"]) == tuple(map(sum, zip(*counts, strict=True)))


def test_killed_and_resumed_gives_the_same_results(finished, run_folder, tmp_path, monkeypatch):
    """Killed at every step in turn, each time leaving a half-written file behind; then run to the end."""
    write, written = journal.write_json, []

    def dying(path, value):
        if "steps" in path.parts:
            if len(written) == kills + 1:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(path.name + ".tmp").write_text('{"half')
                raise KeyboardInterrupt
            written.append(path.name)
        write(path, value)

    monkeypatch.setattr(journal, "write_json", dying)
    kills, results = 0, None
    while results is None and kills < 40:
        try:
            results = evaluate(str(run_folder), tiny(), tmp_path, command="evaluate.py tiny")
        except KeyboardInterrupt:
            kills += 1
    assert 4 < kills < 40
    assert len(written) == len(set(written)) == len(list((tmp_path / "steps").glob("*.json")))
    ours, whole = (json.loads(json.dumps(r)) for r in (results, finished[1]))
    for found in (ours, whole):
        del found["date"]
    assert ours == whole


def test_a_finished_evaluation_is_not_computed_again(finished, run_folder, monkeypatch):
    folder, results = finished
    monkeypatch.setattr("triadic.evaluation.perplexity.token_losses", None)
    monkeypatch.setattr("triadic.evaluation.sampling.complete", None)
    monkeypatch.setattr("triadic.evaluation.ruler.needle", None)
    assert evaluate(str(run_folder), tiny(), folder)["rows"] == results["rows"]


def test_a_resumption_from_another_commit_is_said_and_timings_stand_apart(finished, run_folder, tmp_path, monkeypatch):
    folder, results = finished
    timing = json.loads((folder / "timing.json").read_text())
    assert timing["parts"].keys() == {"perplexity", "ruler", "sample"}
    assert timing["batch"] == {"sequences": 64, "tokens": 32_768}
    assert "seconds" not in results
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.setattr("triadic.origin.commit", lambda: "abc")
    again = evaluate(str(run_folder), tiny(), tmp_path / "copy", command="evaluate.py tiny")
    assert again == results | {"commit": f"{results['commit']}, resumed at abc"}


def test_the_folder_of_another_evaluation_is_refused(finished, run_folder, llama, data, tmp_path, monkeypatch):
    folder, _ = finished
    before = (folder / "evaluation.json").read_text()
    other = tiny(sample={"prompts": ["ka"]})
    with pytest.raises(ValueError, match="holds an evaluation with another suite; choose another --output"):
        evaluate(str(run_folder), other, folder)
    stores = {split: str(data / split) for split in ("train", "validation")}
    with pytest.raises(ValueError, match="another checkpoint and suite"):
        evaluate(str(llama), tiny(data=stores), folder)
    assert (folder / "evaluation.json").read_text() == before
    monkeypatch.setattr("triadic.evaluation.ruler.check", lambda *_: {"haystack": "other"})
    with pytest.raises(ValueError, match="another data"):
        evaluate(str(run_folder), tiny(), folder)
    assert list(tmp_path.iterdir()) == []
    claimed = journal.Journal(tmp_path, {"checkpoint": 1})
    claimed.once("a", lambda: 1)
    with pytest.raises(ValueError, match="another checkpoint"):
        journal.Journal(tmp_path, {"checkpoint": 2})
    assert journal.Journal(tmp_path, {"checkpoint": 2}, overwrite=True).once("a", lambda: 2) == 2


@pytest.mark.parametrize("least", [1e9, -1e9])
def test_checks(least):
    rows = [
        {"metric": "context_gain", "value": 0.3, "se": 0.1},
        {"metric": "gain_over_unigram", "value": 1.25, "se": 0.1},
        {"metric": "word_share", "value": 0.875},
        {"metric": "word_share", "value": 0.1, "model": "a baseline"},
    ]
    wanted = config.ChecksConfig(min_gain_over_unigram=least, min_context_gain=least, min_word_share=least)
    found = suite.checks(rows, wanted)
    assert [round(check["value"], 9) for check in found] == [1.25, 3.0, 0.875]
    assert all(check["passed"] == (least < 0) for check in found)
    assert suite.checks(rows, config.ChecksConfig()) == []
    for se in (None, 0.0):  # of one document, of one bucket
        (lonely,) = suite.checks([rows[0] | {"se": se}], config.ChecksConfig(min_context_gain=0.0))
        assert (lonely["value"], lonely["passed"]) == (None, False)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sample": None}, "checks.min_word_share needs word_share, which sample measures"),
        (
            {"perplexity": TREE["perplexity"] | {"unigram": False}},
            "checks.min_gain_over_unigram needs gain_over_unigram",
        ),
        (
            {"perplexity": None, "ruler": None, "sample": None},
            "has no part; give at least one of perplexity",
        ),
        ({"sample": {"temperature": -1.0}}, "temperature must be >= 0"),
        ({"sample": {"seed": 1 << 63}}, "seed must be a number of 64 bits, not 9223372036854775808"),
        ({"sample": {"prompts": []}}, "prompts must name at least one text to continue"),
        ({"rular": {}}, "did you mean ruler"),
        ({"model": {"dtype": "float8"}}, "model.dtype must be one of"),
    ],
)
def test_suites_that_make_no_sense(sections, message):
    with pytest.raises(settings.SettingsError, match=message):
        tiny(**sections)


def test_text_is_needed_outside_a_run(llama, tmp_path):
    with pytest.raises(ValueError, match=r"lies in no run folder, so its validation text is unknown; give data.valid"):
        evaluate(str(llama), tiny(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_part_is_checked_before_the_first_is_measured(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("triadic.evaluation.perplexity.measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="unknown ruler tasks niah"):
        evaluate(str(run_folder), tiny(ruler={"lengths": [512], "tasks": ["niah"]}), tmp_path / "out")
    with pytest.raises(ValueError, match="holds no complete token store"):
        evaluate(str(run_folder), tiny(data={"train": str(tmp_path)}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_section_of_a_suite_has_its_module():
    assert list(config.PARTS) == list(suite.PARTS)
    for name in suite.PARTS.values():
        module = importlib.import_module(name)
        assert callable(module.check)
        assert callable(module.measure)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "eval").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_suites_load(path):
    loaded = settings.load(config.SuiteConfig, path)
    assert loaded.name == path.stem
    assert loaded.parts().keys() <= suite.PARTS.keys()


def run_script(monkeypatch, name: str, *arguments: str):
    """Run scripts/NAME as a command would; returns its exit code (0, 1, or a message, which exits with 1)."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    return stop.value.code


def test_evaluate_command(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    small = ["perplexity.window=64", "perplexity.buckets=[0,16,64]", "ruler=null", "sample=null", "checks={}"]
    given = [str(run_folder), "--output", str(tmp_path)]
    assert run_script(monkeypatch, "evaluate.py", *given, *small) == 0
    out, err = capsys.readouterr()
    assert "## Perplexity by position" in out
    names = ", ".join(sorted(path.stem for path in (ROOT / "configs" / "eval").glob("*.yaml")))
    assert err.splitlines()[0] == f"suite demo: perplexity; --suite takes another: {names}, or a .yaml"
    failing = ["--suite", "demo", "--overwrite", *small[:-1], "checks={min_gain_over_unigram: 1e9}"]
    assert run_script(monkeypatch, "evaluate.py", *given, *failing) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "suite demo: perplexity"
    assert said[-1] == "1 of 1 checks failed: held-out loss below a unigram model's, nats a token"
    assert "FAILED" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such", "--suite", "demo"], "error: there is no folder /no/such; give a Hugging Face folder"),
        (["{run}", "--suite", "demmo"], "error: there is no configuration file"),
        (["{run}", "--suite", "demo", "ruler.sample=3"], "did you mean ruler.samples"),
    ],
)
def test_bad_commands_write_nothing(run_folder, tmp_path, monkeypatch, arguments, message):
    arguments = [argument.format(run=run_folder) for argument in arguments]
    code = run_script(monkeypatch, "evaluate.py", *arguments, "--output", str(tmp_path / "out"))
    assert message in code
    assert "\n" not in code
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written(run_folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    small = ["perplexity.window=64", "perplexity.buckets=[0,16,64]", "ruler=null", "sample=null", "checks={}"]
    code = run_script(monkeypatch, "evaluate.py", str(run_folder), "--output", str(tmp_path / "file"), *small)
    assert re.fullmatch(r"error: .*file/evaluation\.json cannot be written: (Not a directory|File exists)", code)


def test_generate_command(run_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(run_folder), "--prompt", "ka lo", "--max_new_tokens", "6"])
    runpy.run_path(str(ROOT / "scripts" / "generate.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert out.startswith("ka lo")
    assert re.search(rf"\[{run_folder}/final: \d+ tokens, [\d.]+ tokens/s after [\d.]+ s\]", err)
    assert "there is no folder" in run_script(monkeypatch, "generate.py", "/no/such")
    for word, said in (
        ("--prompt=\udcff", "is no Unicode text"),
        (f"--seed={1 << 64}", "a number of 64 bits"),
        ("--top_p=0", "error: top_p must be in (0, 1], not 0.0"),
        ("--max_new_tokens=0", "error: max_new_tokens must be at least 1, not 0"),
    ):
        assert said in run_script(monkeypatch, "generate.py", str(run_folder), word)
    assert capsys.readouterr().out == ""  # not even the prompt


def test_eval_sh_passes_everything_on(tmp_path, monkeypatch):
    """Without a GPU it becomes one python process with the same arguments, in the same order."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncase "$1" in -c) echo 0;; *) printf "%s\\n" "$@";; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    given = ["runs/a b", "--suite", "demo", "x.y=[1, 2]"]
    out = subprocess.run([ROOT / "scripts" / "eval.sh", *given], capture_output=True, text=True, check=True).stdout
    script, *rest = out.splitlines()
    assert Path(script).resolve() == ROOT / "scripts" / "evaluate.py"
    assert rest == given


@pytest.mark.slow
def test_two_processes_give_the_rows_of_one(finished, run_folder, tmp_path):
    """Windows and samples are dealt out over processes; the rows are the same."""
    _, results = finished
    (tmp_path / "tiny.yaml").write_text(json.dumps(TREE))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "scripts" / "evaluate.py"), str(run_folder), "--suite", str(tmp_path / "tiny.yaml")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--output", str(tmp_path / "two")], check=True, env=environment, timeout=600)
    assert json.loads((tmp_path / "two" / "results.json").read_text())["rows"] == results["rows"]


@pytest.mark.slow
def test_sigkill_at_any_moment_loses_only_the_step_in_hand(finished, run_folder, tmp_path):
    _, results = finished
    (tmp_path / "tiny.yaml").write_text(json.dumps(TREE))
    command = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), str(run_folder)]
    command += ["--suite", str(tmp_path / "tiny.yaml"), "--output", str(tmp_path / "out")]
    for steps in (1, 3):
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        while process.poll() is None and len(list(tmp_path.glob("out/steps/*.json"))) < steps:
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command, check=True, timeout=600)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["rows"] == results["rows"]
