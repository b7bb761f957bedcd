"""Zero-shot tasks and WikiText on invented documents in the data sets' own columns, against lm-eval's own wrapper."""

import json
import math
import re
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from triadic import settings
from triadic.evaluation import config, evaluate, recall, wikitext, zeroshot
from triadic.evaluation.harness import TriadicLM, run_task
from triadic.evaluation.journal import Journal
from triadic.evaluation.loading import load_checkpoint
from triadic.evaluation.suite import Context


@pytest.fixture(scope="module")
def shipped():
    path = Path(__file__).resolve().parents[2] / "configs" / "eval" / "zeroshot.yaml"
    return settings.load(config.SuiteConfig, path).zeroshot.metrics


def test_the_ten_tasks_score_as_with_lm_evals_wrapper(llama, local, shipped):
    """Log-likelihoods decide; so small a model's scores would agree by chance too often."""
    assert shipped.keys() == {file.stem for file in local.iterdir()}
    ours = TriadicLM(str(llama))
    stock = HFLM(str(llama), device="cpu", dtype="float32", softmax_dtype="float32")
    for task, metric in shipped.items():
        said, meant = [], []
        for lm, replies in ((ours, said), (stock, meant)):
            answer = lm._loglikelihood_tokens

            def keep(requests, *args, answer=answer, replies=replies, **kwargs):
                found = answer(requests, *args, **kwargs)
                replies.extend(value for value, _ in found)
                return found

            lm._loglikelihood_tokens = keep
        rows = [
            zeroshot.score(lm, task, metric, config.ZeroshotConfig(shipped, folder=str(local))) for lm in (ours, stock)
        ]
        del ours._loglikelihood_tokens, stock._loglikelihood_tokens
        assert rows[0] == rows[1]
        assert rows[0]["samples"] == 3
        share = rows[0]["value"]
        assert rows[0]["se"] == pytest.approx((share * (1 - share) / 2) ** 0.5)  # of three zeros and ones
        assert len(said) >= 3
        torch.testing.assert_close(torch.tensor(said), torch.tensor(meant), rtol=1e-5, atol=1e-4)


def test_suite_of_tasks_and_documents(llama, local, pages, tmp_path, monkeypatch):
    read, load_dataset = [], datasets.load_dataset
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: read.append(k["data_files"]) or load_dataset(*a, **k))
    tree = {
        "name": "tasks",
        "zeroshot": {"metrics": {"piqa": "acc", "copa": "acc"}, "folder": str(local), "samples": 2},
        "wikitext": {"path": str(pages), "documents_per_step": 1},
    }
    results = evaluate(str(llama), settings.from_dict(config.SuiteConfig, tree), tmp_path)
    assert [Path(files["test"]).name for files in read] == ["piqa.jsonl", "copa.jsonl"], "each is read once"
    rows = {(row["metric"], row.get("task")): row for row in results["rows"]}
    piqa, copa = rows["acc", "piqa"], rows["acc", "copa"]
    assert (piqa["samples"], copa["samples"]) == (2, 2)
    assert rows["zeroshot_mean", None]["value"] == pytest.approx((piqa["value"] + copa["value"]) / 2)
    assert set(results["data"]["zeroshot"]) == {"piqa", "copa"}
    text = (tmp_path / "results.md").read_text()
    assert "| piqa | acc |" in text
    assert "| token perplexity |" in text
    assert (tmp_path / "steps" / "wikitext-000001.json").is_file()


def texts_of(pages):
    """The pages that hold text."""
    return [row["page"] for row in map(json.loads, pages.read_text().splitlines()) if row["page"]]


def wiki(folder, pages, output, **options):
    section = {"path": str(pages), **options}
    suite = settings.from_dict(config.SuiteConfig, {"name": "wikitext", "wikitext": section})
    here = Context(load_checkpoint(str(folder), suite.model), suite, Journal(output, {}))
    wikitext.check(here, suite.wikitext)
    return {row["metric"]: row for row in wikitext.measure(here, suite.wikitext)}


def test_token_perplexity_equals_a_loop(hf_folder, pages, tmp_path, tokenizer):
    rows = wiki(hf_folder, pages, tmp_path, detokenize=False)
    model = AutoModelForCausalLM.from_pretrained(hf_folder).eval()
    total, count = 0.0, 0
    for page in texts_of(pages):
        ids = [1, *tokenizer.encode(page, add_special_tokens=False)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total -= sum(logits[t, ids[t + 1]].item() for t in range(len(ids) - 1))
        count += len(ids) - 1
    assert rows["token_perplexity"]["tokens_scored"] == count
    assert rows["token_perplexity"]["value"] == pytest.approx(math.exp(total / count), rel=1e-6)
    words = sum(len(re.split(r"\s+", page)) for page in texts_of(pages))
    assert rows["word_perplexity"]["value"] == pytest.approx(math.exp(total / words), rel=1e-6)


def test_zero_head_gives_the_vocabulary_size(silent, pages, tmp_path):
    assert wiki(silent, pages, tmp_path)["token_perplexity"]["value"] == pytest.approx(512, rel=1e-6)


def test_word_perplexity_equals_lm_evals(llama, pages, tmp_path):
    """With a tokenizer that adds no BOS by itself, where lm-eval's rolling mode scores none either."""
    plain = tmp_path / "plain"
    shutil.copytree(llama, plain)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(plain)
    full = tmp_path / "local"
    full.mkdir()
    (full / "wikitext.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in texts_of(pages)))
    lm = HFLM(str(plain), device="cpu", dtype="float32", softmax_dtype="float32")
    name = zeroshot._overlay(tmp_path, "wikitext", full / "wikitext.jsonl")
    stock = run_task(lm, name, zeroshot.stock_tasks())["results"]["wikitext"]["word_perplexity,none"]
    assert wiki(plain, full / "wikitext.jsonl", tmp_path / "out")["word_perplexity"]["value"] == pytest.approx(
        stock, rel=1e-6
    )


def test_a_metric_of_all_documents_together_has_no_error_of_its_own(llama, tmp_path, monkeypatch):
    """F1 of choices against labels; lm-eval gives each document the pair of them in a number's place."""
    rows = [{"sentence1": "ka lo" * (i % 3), "sentence2": "mi" * i, "label": i // 2 % 2, "idx": i} for i in range(9)]
    (tmp_path / "mrpc.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lm, options = TriadicLM(str(llama)), config.ZeroshotConfig({"mrpc": "f1"}, folder=str(tmp_path))

    def likelihoods(requests, **_):
        return [(float(i * 7 % 5), False) for i in range(len(requests))]

    monkeypatch.setattr(lm, "_loglikelihood_tokens", likelihoods)
    row = zeroshot.score(lm, "mrpc", "f1", options)
    found = run_task(lm, zeroshot.load("mrpc", options), zeroshot.stock_tasks())
    pairs = [(sample["doc"]["label"], sample["f1"][1]) for sample in found["samples"]["mrpc"]]
    both, either = pairs.count((1, 1)), pairs.count((0, 1)) + pairs.count((1, 0))
    assert both > 0 < either
    assert (row["value"], row["se"], row["samples"]) == (pytest.approx(2 * both / (2 * both + either)), None, 9)


def test_what_is_missing_is_named(llama, local, pages, tmp_path, monkeypatch):
    def suite(**sections):
        return settings.from_dict(config.SuiteConfig, {"name": "tasks"} | sections)

    with pytest.raises(ValueError, match=r"holds no boolq.jsonl or boolq.parquet"):
        evaluate(str(llama), suite(zeroshot={"metrics": {"boolq": "acc"}, "folder": str(tmp_path)}), tmp_path / "out")
    with pytest.raises(ValueError, match="names picka, which lm-eval does not ship"):
        evaluate(str(llama), suite(zeroshot={"metrics": {"picka": "acc"}}), tmp_path / "out")
    with pytest.raises(ValueError, match=r"piqa has no metric f1; set another .* in zeroshot.metrics: acc, acc_norm"):
        evaluate(
            str(llama), suite(zeroshot={"metrics": {"copa": "acc", "piqa": "f1"}, "folder": str(local)}),
            tmp_path / "out",
        )  # fmt: skip
    assert not (tmp_path / "out").exists(), "no folder is claimed for what cannot be measured"
    with pytest.raises(ValueError, match=r"there is no file .*; give wikitext.path"):
        evaluate(str(llama), suite(wikitext={"path": str(tmp_path / "none.jsonl")}), tmp_path / "out2")
    long = {"path": str(pages)}
    with pytest.raises(ValueError, match=r"longest document has \d+ tokens, but .* takes at most 20"):
        evaluate(str(llama), suite(wikitext=long, model={"max_length": 20}), tmp_path / "out3")

    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    row = {"value": 0.5, "se": None, "samples": 1, "cut": 0, "data": "hub", "context_length": 9, "centre": "answer"}
    done = {"zeroshot": {"metrics": {"piqa": "acc"}}, "recall": {"tasks": ["nq"]}}
    with monkeypatch.context() as online:  # a finished evaluation needs its data no more
        online.setattr(zeroshot, "load", lambda *_: None)
        online.setattr(zeroshot, "metrics", lambda *_: ["acc"])
        for part in (zeroshot, recall):
            online.setattr(part, "check_fits", lambda *_: None)
        online.setattr(zeroshot, "score", lambda *_: row | {"metric": "acc", "task": "piqa"})
        online.setattr(recall, "load", lambda *_: None)
        online.setattr(recall, "score", lambda *_: row | {"metric": "recall", "task": "nq"})
        first = evaluate(str(llama), suite(**done), tmp_path / "out6")
    again = evaluate(str(llama), suite(**done), tmp_path / "out6")
    assert again["rows"] == first["rows"]
    with pytest.raises(ValueError, match="the data of piqa cannot be had"):
        evaluate(str(llama), suite(**done), tmp_path / "out6", overwrite=True)
    assert (tmp_path / "out6" / "steps" / "piqa.json").is_file(), "nothing is forgotten for what cannot be measured"
    with pytest.raises(
        ValueError, match=r"WikiText-2 cannot be had \(no network\); for a local copy give wikitext.path"
    ):
        evaluate(str(llama), suite(wikitext={}), tmp_path / "out4")
    with pytest.raises(
        ValueError, match=r"the data of piqa cannot be had .*; for local files give zeroshot.folder=FOLDER"
    ):
        evaluate(str(llama), suite(zeroshot={"metrics": {"piqa": "acc"}}), tmp_path / "out5")
    with pytest.raises(ValueError, match=r"the data of nq cannot be had .*; for local files give recall.folder=FOLDER"):
        evaluate(str(llama), suite(recall={"tasks": ["nq"]}), tmp_path / "out5")
    assert not (tmp_path / "out5").exists()


TORN = {  # content of a .jsonl file -> what is said of it
    "": "holds no rows; bring the data set of piqa, or drop the task",
    "\n\n": "holds no rows",
    '{"goal": "ka"': r"piqa.jsonl, line 1, is no JSON: Expecting",
    '{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n[1]\n': r"line 2, is no JSON object with columns, but \[1\]",
    '{"goal": "ka"}': r"the data of piqa cannot be had \(malformed .*\); for local files give zeroshot.folder",
    '{"text": "ka"}': r"the data of piqa cannot be had \('goal' is undefined\); for local files give zeroshot.folder",
}


@pytest.mark.parametrize("content", TORN)
def test_files_that_are_no_data_are_named(content, llama, tmp_path):
    (tmp_path / "piqa.jsonl").write_text(content)
    suite = {"name": "tasks", "zeroshot": {"metrics": {"piqa": "acc"}, "folder": str(tmp_path)}}
    with pytest.raises(ValueError, match=TORN[content]):
        evaluate(str(llama), settings.from_dict(config.SuiteConfig, suite), tmp_path / "out")
    assert not (tmp_path / "out").exists()


HIDDEN = {  # task, what its second row has instead -> what is said of it
    (
        "copa",
        "label",
        -1,
    ): r"copa.jsonl, line 2, has the label -1, which hides the answer; bring the split validation of "
    "aps/super_glue copa, with the columns premise, choice1, choice2, question, label",
    (
        "piqa",
        "label",
        -1,
    ): "the label -1, .* the split validation of baber/piqa, with the columns goal, sol1, sol2, label",
    ("boolq", "label", -1): "the label -1, .* aps/super_glue boolq, with the columns passage, question, label",
    (
        "boolq",
        "label",
        2,
    ): r"document 2 of .*boolq.jsonl has the answer 2, of 2 choices from 0 on\); for local files .*: the",
    (
        "hellaswag",
        "label",
        "",
    ): "the label '', .* the split validation of Rowan/hellaswag, with the columns activity_label",
    (
        "arc_easy",
        "answerKey",
        "",
    ): "local files give .*: the split test of allenai/ai2_arc ARC-Easy, with .*, answerKey",
    ("winogrande", "answer", ""): "local files give .*: the split validation of allenai/winogrande winogrande_xl, with",
}


@pytest.mark.parametrize(("task", "column", "given"), HIDDEN)
def test_hidden_labels_are_refused(task, column, given, local, shipped, tmp_path):
    rows = [json.loads(line) for line in (local / f"{task}.jsonl").read_text().splitlines()]
    rows[1][column] = given
    (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=HIDDEN[task, column, given]):
        zeroshot.load(task, config.ZeroshotConfig(shipped, folder=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\xff\xfe", "a.jsonl cannot be read as .jsonl: 'utf-8' codec can't decode"),
        ("a.parquet", b"none", "a.parquet cannot be read as .parquet: Parquet"),
        ("a.jsonl", b'{"text": "ka"}', "a.jsonl has no column 'page', only text"),
        ("a.jsonl", b'{"page": "ka"}\n{"page": null}', "row 2 of .*a.jsonl has no text in its column 'page', but None"),
        ("a.jsonl", b'{"page": " "}', "a.jsonl holds no page with text"),
    ],
)
def test_pages_that_are_no_text_are_named(name, content, message, llama, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        wiki(llama, tmp_path / name, tmp_path / "out")
