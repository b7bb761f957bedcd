"""The six recall tasks on invented documents: prompts, cuts and scores against definitions by hand, and an oracle."""

import json
import re

import pytest
from lm_eval.api.model import LM

from triadic.evaluation import recall
from triadic.evaluation.config import ModelConfig, RecallConfig, SuiteConfig
from triadic.evaluation.harness import TriadicLM
from triadic.evaluation.journal import Journal
from triadic.evaluation.loading import load_checkpoint
from triadic.evaluation.recall_tasks import TASKS, contains, make_document, read, recall_documents, window
from triadic.evaluation.suite import Context
from triadic.settings import SettingsError, from_dict


class Oracle(LM):
    """Reads the answer where the text states it."""

    def __init__(self, tokenizer, wrong: int = 0):
        super().__init__()
        self.tokenizer, self.wrong, self.asked = tokenizer, wrong, []

    def generate_until(self, requests):
        self.asked = [request.args for request in requests]
        found = [re.search(r"the word is (.*?) ka lo", prompt).group(1) for prompt, _ in self.asked]
        return ["nothing"] * self.wrong + [f" {word.upper()}, of course" for word in found[self.wrong :]]

    def loglikelihood(self, requests):
        raise AssertionError("recall only generates")

    loglikelihood_rolling = loglikelihood


@pytest.mark.parametrize("task", TASKS)
def test_an_oracle_scores_one_on_texts_cut_around_the_answer(task, recall_files, tokenizer):
    oracle = Oracle(tokenizer)
    config = RecallConfig(context_length=200, folder=str(recall_files), centre="answer")
    row = recall.score(oracle, task, config)
    assert (row["value"], row["samples"], row["cut"], row["answer_in_prompt"]) == (1.0, 3, 3, 3)
    assert (row["context_length"], row["data"], row["task_version"]) == (200, "local files", 1.0)
    assert recall.score(Oracle(tokenizer, wrong=1), task, config)["value"] == pytest.approx(2 / 3)
    for prompt, options in oracle.asked:
        assert (options["until"], options["max_gen_toks"], options["do_sample"]) == (["\n"], 48, False)
        assert 100 < len(tokenizer.encode(prompt, add_special_tokens=False)) < 200
    if task == "triviaqa":
        assert not any("[" in prompt for prompt, _ in oracle.asked)


def test_prompts_of_whole_texts(recall_files, tokenizer):
    hay = ("ka lo mi ter su no ra vel pi don " * 30).strip()
    body = f"{hay} the word is kamisu {hay}"
    prompts = {
        "fda": f"{body} . The word:",
        "swde": f"{body}. The word:",
        "squad": f"{body} \nThe word is",
        "nq": f"{body} . [DOC] [TLE] the word is. The word is",
        "triviaqa": f"{body} . The word is",
        "drop": f"{body} . [DOC] [TLE]. The word is",
    }
    for task, expected in prompts.items():
        document = make_document(task, next(iter(read(task, str(recall_files)))), tokenizer, 100_000, "answer")
        assert document["prompt"].split() == expected.split()
        assert document["prompt"][-8:] == expected[-8:]
        assert not document["cut"]


def test_the_cut_is_centred_on_the_earliest_match(tokenizer, recall_row):
    """Every token of the window is the text's own, 150 of them, half before the answer."""
    row = recall_row("nq", 0)
    text = row["context"].strip()
    ids = tokenizer(text).input_ids
    at = len(tokenizer(text[: text.index("kamisu")]).input_ids)
    cut = tokenizer.decode(ids[at - 75 : at + 75], skip_special_tokens=True)
    assert make_document("nq", row, tokenizer, 200, "answer")["prompt"] == f"{cut.strip()}. The word is"
    late = row | {"answers": ["don the word is KAMISU", "pi don"]}
    assert make_document("nq", late, tokenizer, 200, "answer")["prompt"].startswith("ka lo mi")
    nowhere = row | {"answers": ["zzz"]}
    head = tokenizer.decode(ids[:150], skip_special_tokens=True)
    assert make_document("nq", nowhere, tokenizer, 200, "answer")["prompt"] == f"{head.strip()}. The word is"
    assert make_document("nq", row | {"answers": ["", " "]}, tokenizer, 200, "answer") is None


@pytest.mark.parametrize(("at", "expected"), [(0, (0, 10)), (4, (0, 10)), (6, (1, 11)), (29, (24, 30))])
def test_window(at, expected):
    assert window(at, 30, 10) == expected
    assert window(0, 7, 10) == (0, 7)


def test_contains_ignores_case_and_knows_no_patterns():
    assert contains("it was A.B (c)", ["x", "a.b (C)"])
    assert not contains("it was aXb (c)", ["a.b"])


def test_the_authors_cut(tokenizer, recall_row):
    """On the key where it comes first, on the head for DROP and TriviaQA, near the end where nothing matches."""
    row = recall_row("fda", 0) | {"key": "lo mi"}
    assert make_document("fda", row, tokenizer, 200, "harness")["prompt"].startswith("ka lo mi ter")
    assert "kamisu" not in make_document("drop", recall_row("drop", 0), tokenizer, 200, "harness")["prompt"]
    assert "kamisu" in make_document("squad", recall_row("squad", 0), tokenizer, 200, "harness")["prompt"]
    missing = recall_row("nq", 0)
    assert "[DOC]" in make_document("nq", missing, tokenizer, 200, "harness")["prompt"]
    placed = make_document("nq", missing | {"tok_pos": 0}, tokenizer, 200, "harness")["prompt"]
    assert placed.startswith("ka lo mi")
    assert make_document("squad", recall_row("squad", 0) | {"value": "k"}, tokenizer, 200, "harness") is None


def test_a_model_is_measured_on_all_six(llama, recall_files, tmp_path):
    suite = from_dict(SuiteConfig, {"name": "test", "recall": {"context_length": 200, "folder": str(recall_files)}})
    here = Context(load_checkpoint(str(llama), ModelConfig()), suite, Journal(tmp_path, {}))
    assert recall.check(here, suite.recall).keys() == TASKS.keys()
    rows = recall.measure(here, suite.recall)
    assert [row.get("task") for row in rows] == [*TASKS, None]
    assert rows[-1]["value"] == pytest.approx(sum(row["value"] for row in rows[:-1]) / 6)
    once = recall.score(TriadicLM(str(llama), batch_size=1), "nq", suite.recall)
    assert once == rows[3]  # whatever the batch size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["fda", "quac"]}, "recall.tasks names quac; the recall tasks are fda, swde"),
        ({"context_length": 4000}, "recall.context_length is 4000, but .* takes at most 2048 tokens"),
        ({"folder": "/no/such"}, r"recall.folder /no/such holds no fda.jsonl or fda.parquet; bring it"),
    ],
)
def test_what_cannot_be_measured_is_refused(llama, tmp_path, options, message):
    suite = from_dict(SuiteConfig, {"name": "test", "recall": options})
    here = Context(load_checkpoint(str(llama), ModelConfig()), suite, Journal(tmp_path, {}))
    with pytest.raises(ValueError, match=message):
        recall.check(here, suite.recall)


def test_data_that_cannot_be_had_or_lack_a_column(tmp_path, tokenizer, monkeypatch):
    def nothing(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("datasets.load_dataset", nothing)
    with pytest.raises(ValueError, match=r"no network\); for local files give recall.folder=FOLDER with nq.jsonl"):
        list(read("nq", None))
    (tmp_path / "squad.jsonl").write_text('{"doc_id": 1, "text": "a"}\n')
    with pytest.raises(ValueError, match="has no column value, title, context, question; it needs doc_id, text"):
        list(read("squad", str(tmp_path)))
    (tmp_path / "nq.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"nq in .* holds no rows; bring its data set, or drop the task"):
        list(read("nq", str(tmp_path)))


NOT_ROWS = {  # task, what its second row has instead -> what is said of it
    ("nq", "context", None): "context None, but a text that is not blank is wanted",
    ("squad", "text", " \n"): r"text ' \\n', but a text that is not blank",
    ("triviaqa", "question", None): "question None, but a text that is not blank",
    ("fda", "key", ""): "key '', but a text that is not blank",
    ("drop", "answers", "the"): "answers 'the', but a list of texts is wanted",
    ("nq", "answers", (5,)): r"answers \[5\], but a list of texts",
    ("swde", "value", 5): "value 5, but a text is wanted",
    ("squad", "answers", "the"): "answers 'the', but a list of texts",  # a column too many, which would count
}


@pytest.mark.parametrize(("task", "column", "given"), NOT_ROWS)
def test_a_row_that_cannot_be_used_is_found_before_the_first_step(task, column, given, tmp_path, recall_row, llama):
    rows = [recall_row(task, 0), recall_row(task, 1) | {column: given}]
    (tmp_path / f"{task}.jsonl").write_text("\n".join(json.dumps(row) + "\n" for row in rows))
    suite = from_dict(SuiteConfig, {"name": "test", "recall": {"tasks": [task], "folder": str(tmp_path)}})
    here = Context(load_checkpoint(str(llama), ModelConfig()), suite, Journal(tmp_path / "out", {}))
    said = NOT_ROWS[task, column, given]
    with pytest.raises(ValueError, match=rf"{task}.jsonl, line 3, has the {said}.*, for the recall task {task}; mend"):
        recall.ready(here, suite.recall)
    assert not (tmp_path / "out").exists()


def test_rows_without_an_answer_are_left_out_but_not_all(tmp_path, recall_row, tokenizer):
    blank = recall_row("nq", 0) | {"answers": [" "], "question": None}
    (tmp_path / "nq.jsonl").write_text(json.dumps(blank) + "\n" + json.dumps(recall_row("nq", 1)) + "\n")
    assert [row["doc_id"] for row in recall_documents("nq", tokenizer, folder=str(tmp_path))["test"]] == ["1"]
    (tmp_path / "nq.jsonl").write_text(json.dumps(blank))
    with pytest.raises(ValueError, match=r"no row of nq in .* has an answer; bring its data set"):
        list(read("nq", str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 100}, "must be more than 100 tokens"),
        ({"tasks": []}, "different recall tasks"),
        ({"tasks": ["fda", "fda"]}, "different recall tasks"),
        ({"centre": "key"}, "centre must be one of"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(SettingsError, match=message):
        from_dict(SuiteConfig, {"name": "test", "recall": options})
