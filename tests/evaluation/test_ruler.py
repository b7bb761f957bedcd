"""The needle task: an oracle finds every needle, prompts are whole, samples have their length and never change."""

import json
import random
import re
import sys

import numpy as np
import pytest
from lm_eval.api.model import LM
from transformers import GPT2Config, GPT2LMHeadModel

from triadic.evaluation import haystack, ruler
from triadic.evaluation.config import ModelConfig, RulerConfig, SuiteConfig
from triadic.evaluation.harness import TriadicLM
from triadic.evaluation.journal import Journal
from triadic.evaluation.loading import load_checkpoint
from triadic.evaluation.suite import Context
from triadic.settings import SettingsError, from_dict

CONFIG = RulerConfig(lengths=[512], samples=5)


class Oracle(LM):
    """Reads the needle with a regular expression, as a perfect model would."""

    def __init__(self, tokenizer, wrong: int = 0):
        super().__init__()
        self.tokenizer, self.prompts, self.wrong = tokenizer, [], wrong

    def generate_until(self, requests):
        self.prompts = [request.args[0] for request in requests]
        replies = []
        for prompt in self.prompts:
            pattern = r".*special magic (\w+?)s? for (.+) mentioned in the provided text \w+$"  # the last one
            kind, asked = re.search(pattern, prompt, re.DOTALL).groups()
            found = []
            for key in re.split(r", and |, ", asked):
                found += re.findall(rf"One of the special magic {kind}s for {key} is: ([\w-]+)\.", prompt)
            replies.append(" and ".join(found).upper())
        return ["nothing"] * self.wrong + replies[self.wrong :]

    def loglikelihood(self, requests):
        raise AssertionError("the needle task only generates")

    loglikelihood_rolling = loglikelihood


@pytest.fixture
def oracle(tokenizer):
    return Oracle(tokenizer)


@pytest.mark.parametrize("length", [512, 1024])
def test_oracle_scores_one(oracle, length, tmp_path):
    row = ruler.needle(oracle, "niah_single_1", length, CONFIG, tmp_path)
    assert (row["value"], row["se"], row["samples"], row["length"]) == (1.0, 0.0, 5, length)
    low, high = row["actual_lengths"]
    assert 0.5 * length <= low <= high <= length
    documents = [json.loads(line) for line in (tmp_path / f"niah_single_1-{length}.jsonl").read_text().splitlines()]
    assert [document["length"] for document in documents] == [
        len(oracle.tokenizer(document["input"]).input_ids) + 128 for document in documents
    ]
    assert len({document["outputs"][0] for document in documents}) == 5
    for prompt, document in zip(oracle.prompts, documents, strict=True):
        assert prompt == document["input"] + " " + document["gen_prefix"]
        assert document["gen_prefix"].startswith("The special magic number for ")


@pytest.mark.parametrize("task", haystack.TASKS)
def test_oracle_scores_one_on_every_task(task, oracle, own, tmp_path):
    """On a haystack of one's own where RULER has essays: as long as asked for, and recorded as not RULER's."""
    config = RulerConfig(lengths=[2048], tasks=[task], samples=3, haystack=str(own), samples_per_step=2)
    row = ruler.needle(oracle, task, 2048, config, tmp_path)
    assert (row["value"], row["samples"]) == (1.0, 3)
    essays = task in haystack.ESSAY_TASKS
    assert row["metric"] == ("contains_local" if essays else "contains")
    assert row["haystack"] == (f"local: {own.name}" if essays else "of the task")
    if essays:
        assert row["actual_lengths"][0] > 0.95 * 2048
        assert "no ra" not in oracle.prompts[0]
        text = " ".join(path.read_text() for path in sorted(own.iterdir()))
        start = oracle.prompts[0].split("\n")[1].split("One of the special")[0].strip()
        assert start in re.sub(r"\s+", " ", text)


def test_essay_tasks_are_as_lm_eval_makes_them(tokenizer, monkeypatch):
    """With the essays (here a stand-in for them) the samples are lm-eval's first ones, sample by sample."""
    words = [f"w{i % 7}" + "." * (i % 11 == 0) for i in range(3000)]
    stand_in = haystack.Haystack("essays", False, words, "0" * 64)
    prepare = haystack.generator()
    monkeypatch.setattr(prepare, "cached_sent_tokenize", haystack.sentences)
    monkeypatch.setattr(prepare, "get_haystack", lambda type_haystack: words)
    made = haystack.make(tokenizer, "niah_multiquery", 2048, 3, stand_in)
    random.seed(0)
    np.random.seed(1234)
    sys.modules.pop("lm_eval.tasks.ruler.niah_utils", None)
    loaded = haystack._manager(tokenizer, 2048).load(["niah_multiquery"])["tasks"]
    stock = loaded["niah_multiquery"].dataset["test"]
    assert len(stock) == 500
    assert made == [stock[i] for i in range(3)]


def test_frozen_samples_are_read_and_damage_is_named(oracle, tmp_path):
    row = ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path)
    path = tmp_path / "niah_single_1-512.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(reversed(lines)))
    again = ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path)
    assert again["samples_sha256"] != row["samples_sha256"]
    assert oracle.prompts[0].startswith(json.loads(lines[-1])["input"])
    path.write_text("\n".join(lines).replace("The grass is green.", "The grass is not.", 1))
    with pytest.raises(ValueError, match=r"sample 0 of niah_single_1 has \d+ tokens"):
        ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path)
    path.write_text("\n".join(lines[:2]))  # fewer than needed: made again, the same
    assert ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path) == row
    path.write_text('{"half')
    with pytest.raises(ValueError, match="is damaged; remove it"):
        ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path)


def test_essays_that_cannot_be_had(monkeypatch, tmp_path, texts):
    def nothing(*_, **__):
        raise OSError("no network")

    haystack.open_haystack.cache_clear()
    monkeypatch.setattr("datasets.load_dataset", nothing)
    monkeypatch.setattr("nltk.data.find", lambda name: name)
    with pytest.raises(ValueError, match=r"no network\); give ruler.essays=FILE, .* or ruler.haystack=PATH"):
        haystack.open_haystack(None, None)
    rows = [{"text": "The essays say so.\n It is so."}, {"text": "Now."}]
    (tmp_path / "essays.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    essays = haystack.open_haystack(str(tmp_path / "essays.jsonl"), None)
    assert (" ".join(essays.words), essays.local) == ("The essays say so. It is so. Now.", False)
    with pytest.raises(ValueError, match="there are no documents at /no/such"):
        haystack.open_haystack(None, "/no/such")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"the haystack \(local: empty.txt\) holds no text; give another file"):
        haystack.open_haystack(None, str(tmp_path / "empty.txt"))
    haystack.open_haystack.cache_clear()
    monkeypatch.setattr("nltk.data.find", lambda name: (_ for _ in ()).throw(LookupError()))
    monkeypatch.setattr("nltk.download", lambda *_, **__: False)
    with pytest.raises(
        ValueError, match=r"nltk's punkt_tab, which cannot be had; bring it .* to ~/nltk_data/tokenizers/punkt_tab"
    ):
        haystack.open_haystack(str(tmp_path / "essays.jsonl"), None)


def test_a_mean_of_all_eight_tasks_is_apart_for_another_haystack(triadic_hf, own, tmp_path, monkeypatch):
    setting = {"lengths": [512], "samples": 1, "tasks": list(haystack.TASKS), "haystack": str(own)}
    here = context(triadic_hf, setting, tmp_path)
    assert list(ruler.check(here, here.suite.ruler)) == [f"local: {own.name}"]
    folders = []
    monkeypatch.setattr(ruler, "needle", lambda lm, task, *rest: folders.append(rest[2]) or {"value": len(task)})
    row = ruler.measure(here, here.suite.ruler)[-1]
    assert set(folders) == {tmp_path / "samples"}
    assert (row["metric"], row["value"]) == ("niah_mean_local", sum(map(len, haystack.TASKS)) / 8)
    shared = context(triadic_hf, setting | {"frozen": str(tmp_path / "shared")}, tmp_path / "other")
    ruler.measure(shared, shared.suite.ruler)
    assert folders[-1] == tmp_path / "shared" / f"tokenizer-{shared.checkpoint.tokenizer_hash[:12]}"


def test_score_is_the_share_of_needles_found(tokenizer, tmp_path):
    row = ruler.needle(Oracle(tokenizer, wrong=2), "niah_single_1", 512, CONFIG, tmp_path)
    assert row["value"] == pytest.approx(3 / 5)
    assert row["se"] == pytest.approx((0.3 / 5) ** 0.5)  # standard deviation of 1, 1, 1, 0, 0 over the root of 5


def test_the_needle_lies_in_the_middle_of_text(oracle, tmp_path):
    """At twice the length there is more hay, and not every needle at the same place."""
    ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path)
    short = list(oracle.prompts)
    ruler.needle(oracle, "niah_single_1", 1024, CONFIG, tmp_path)
    assert min(map(len, oracle.prompts)) > 1.5 * max(map(len, short))
    assert len({prompt.index("One of the special magic") for prompt in oracle.prompts}) > 1


def test_samples_do_not_depend_on_what_ran_before(oracle, tmp_path):
    first = ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path / "a")
    ruler.needle(oracle, "niah_single_1", 1024, CONFIG, tmp_path / "a")
    assert ruler.needle(oracle, "niah_single_1", 512, CONFIG, tmp_path / "b") == first


def test_short_haystacks_and_lost_prefixes_are_errors(oracle, tmp_path):
    greedy = RulerConfig(lengths=[512], samples=5, min_fill=0.99)
    with pytest.raises(ValueError, match="not between 99% of 512 and 512"):
        ruler.needle(oracle, "niah_single_1", 512, greedy, tmp_path)
    document = {"input": "text 7", "gen_prefix": "The number is", "length": 129, "outputs": ["7"]}
    sample = {"doc_id": 0, "doc": document, "arguments": [["text 7 The number is"]]}
    ruler.check_prompts([sample], "niah_single_1")
    for broken in (
        sample | {"arguments": [["text 7"]]},
        sample | {"arguments": [["7 The number is"]]},
        sample | {"doc": document | {"outputs": ["7", "8"]}},
    ):
        with pytest.raises(ValueError, match="lost its text, a needle or its answer prefix"):
            ruler.check_prompts([broken], "niah_single_1")
    with pytest.raises(ValueError, match="gave 1 samples, not the 5"):
        ruler.check_lengths([document], "niah_single_1", 512, CONFIG, oracle)


def context(folder, config, output) -> Context:
    suite = from_dict(SuiteConfig, {"name": "test", "ruler": config})
    return Context(load_checkpoint(str(folder), ModelConfig()), suite, Journal(output, {}))


def test_runs_a_model_and_resumes_by_length(triadic_hf, tmp_path, monkeypatch):
    """Twice the config's max_position_embeddings: a recurrent model has no limit."""
    setting = {"lengths": [512, 520], "samples": 2}
    here = context(triadic_hf, setting, tmp_path)
    rows = ruler.measure(here, here.suite.ruler)
    assert [(row["task"], row["length"], row["samples"]) for row in rows] == [
        ("niah_single_1", 512, 2),
        ("niah_single_1", 520, 2),
    ]
    assert rows[0]["task_version"] == 1.0
    assert all(0 <= row["value"] <= 1 for row in rows)
    assert (tmp_path / "samples" / "niah_single_1-520.jsonl").is_file()
    for step in ("niah_single_1-520", "niah_single_1-520-000"):
        (tmp_path / "steps" / f"{step}.json").unlink()
    ran, run_task = [], ruler.run_task
    monkeypatch.setattr(ruler, "run_task", lambda *given: ran.append(given[3]) or run_task(*given))
    again = context(triadic_hf, setting, tmp_path)
    assert ruler.measure(again, again.suite.ruler) == rows
    assert ran == [range(2)]


def test_a_nominal_length_at_the_models_limit_fits(llama, tokenizer, tmp_path):
    """The answer prefix comes on top of a sample's nominal length: nothing is cut, and afterwards the limit is back."""
    config = RulerConfig(lengths=[512], samples=2)
    longest = ruler.needle(Oracle(tokenizer), "niah_single_1", 512, config, tmp_path)["actual_lengths"][1]
    lm = TriadicLM(str(llama), max_length=longest)
    assert ruler.needle(lm, "niah_single_1", 512, config, tmp_path)["samples"] == 2
    assert lm.max_length == longest


def test_lengths_beyond_the_model_and_unknown_tasks_are_refused(llama, tmp_path):
    here = context(llama, {"lengths": [1024, 4096]}, tmp_path)
    with pytest.raises(ValueError, match=r"ruler.lengths has \[4096\], but .* takes at most 2048"):
        ruler.check(here, here.suite.ruler)
    here = context(llama, {"lengths": [1024], "tasks": ["niah_single_9"]}, tmp_path)
    with pytest.raises(ValueError, match="unknown ruler tasks niah_single_9"):
        ruler.check(here, here.suite.ruler)


def test_learned_positions_leave_no_room_for_the_answer(tokenizer, tmp_path):
    config = GPT2Config(
        vocab_size=512, n_positions=1024, n_embd=16, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    tokenizer.save_pretrained(tmp_path / "gpt")
    here = context(tmp_path / "gpt", {"lengths": [512, 1024]}, tmp_path)
    with pytest.raises(ValueError, match=r"ruler.lengths has \[1024\], .* learned 1024 positions; .* at most 768"):
        ruler.check(here, here.suite.ruler)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "lengths must be different"),
        ({"lengths": [512, 512]}, "lengths must be different"),
        ({"lengths": [64]}, "at least 256"),
        ({"lengths": [512], "samples": 501}, "at most 500"),
        ({"samples": 5}, "ruler.lengths is required"),
        ({"lengths": [512], "essays": "a", "haystack": "b"}, "give one of them"),
        ({"lengths": [512], "tasks": []}, "tasks must be different needle tasks, at least one"),
        ({"lengths": [512], "min_fill": 2.0}, "min_fill must be a share between 0 and 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingsError, match=message):
        from_dict(SuiteConfig, {"name": "test", "ruler": settings})
