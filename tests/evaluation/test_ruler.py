"""The needle task: an oracle finds every needle, prompts are whole, samples have their length and never change."""

import json
import re

import pytest
from lm_eval.api.model import LM

from triadic.evaluation import ruler
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
            asked = re.search(r"special magic number for (\S+) mentioned in the provided text is$", prompt).group(1)
            replies.append(re.search(rf"One of the special magic numbers for {asked} is: (\d+)", prompt).group(1))
        return ["nothing"] * self.wrong + replies[self.wrong :]

    def loglikelihood(self, requests):
        raise AssertionError("the needle task only generates")

    loglikelihood_rolling = loglikelihood


@pytest.fixture
def oracle(tokenizer):
    return Oracle(tokenizer)


@pytest.mark.parametrize("length", [512, 1024])
def test_oracle_scores_one(oracle, length, tmp_path):
    row = ruler.needle(oracle, "niah_single_1", length, CONFIG, tmp_path / "samples.jsonl")
    assert (row["value"], row["se"], row["samples"], row["length"]) == (1.0, 0.0, 5, length)
    low, high = row["actual_lengths"]
    assert 0.5 * length <= low <= high <= length
    documents = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [document["length"] for document in documents] == [
        len(oracle.tokenizer(document["input"]).input_ids) + 128 for document in documents
    ]
    assert len({document["outputs"][0] for document in documents}) == 5
    for prompt, document in zip(oracle.prompts, documents, strict=True):
        assert prompt == document["input"] + " " + document["gen_prefix"]
        assert document["gen_prefix"].startswith("The special magic number for ")


def test_score_is_the_share_of_needles_found(tokenizer):
    row = ruler.needle(Oracle(tokenizer, wrong=2), "niah_single_1", 512, CONFIG)
    assert row["value"] == pytest.approx(3 / 5)
    assert row["se"] == pytest.approx((0.3 / 5) ** 0.5)  # standard deviation of 1, 1, 1, 0, 0 over the root of 5


def test_the_needle_lies_in_the_middle_of_text(oracle):
    """At twice the length there is more hay, and not every needle at the same place."""
    ruler.needle(oracle, "niah_single_1", 512, CONFIG)
    short = list(oracle.prompts)
    ruler.needle(oracle, "niah_single_1", 1024, CONFIG)
    assert min(map(len, oracle.prompts)) > 1.5 * max(map(len, short))
    assert len({prompt.index("One of the special magic") for prompt in oracle.prompts}) > 1


def test_samples_do_not_depend_on_what_ran_before(oracle):
    first = ruler.needle(oracle, "niah_single_1", 512, CONFIG)
    ruler.needle(oracle, "niah_single_1", 1024, CONFIG)
    assert ruler.needle(oracle, "niah_single_1", 512, CONFIG) == first


def test_short_haystacks_and_lost_prefixes_are_errors(oracle):
    greedy = RulerConfig(lengths=[512], samples=5, min_fill=0.99)
    with pytest.raises(ValueError, match="not between 99% of 512 and 512"):
        ruler.needle(oracle, "niah_single_1", 512, greedy)
    document = {"input": "text", "gen_prefix": "The number is", "length": 129}
    sample = {"doc_id": 0, "doc": document, "arguments": [["text"]]}
    with pytest.raises(ValueError, match="lost its text or its answer prefix"):
        ruler.check_samples([sample], "niah_single_1", 512, RulerConfig(lengths=[512], samples=1), oracle)
    with pytest.raises(ValueError, match="gave 1 samples, not the 5"):
        ruler.check_samples([sample], "niah_single_1", 512, CONFIG, oracle)


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
    (tmp_path / "steps" / "niah_single_1-520.json").unlink()
    ran = []
    needle = ruler.needle
    monkeypatch.setattr(
        ruler, "needle", lambda lm, task, length, *rest: ran.append(length) or needle(lm, task, length, *rest)
    )
    again = context(triadic_hf, setting, tmp_path)
    assert ruler.measure(again, again.suite.ruler) == rows
    assert ran == [520]


def test_a_nominal_length_at_the_models_limit_fits(llama, tokenizer):
    """The answer prefix comes on top of a sample's nominal length: nothing is cut, and afterwards the limit is back."""
    config = RulerConfig(lengths=[512], samples=2)
    longest = ruler.needle(Oracle(tokenizer), "niah_single_1", 512, config)["actual_lengths"][1]
    lm = TriadicLM(str(llama), max_length=longest)
    assert ruler.needle(lm, "niah_single_1", 512, config)["samples"] == 2
    assert lm.max_length == longest


def test_lengths_beyond_the_model_and_unknown_tasks_are_refused(llama, tmp_path):
    here = context(llama, {"lengths": [1024, 4096]}, tmp_path)
    with pytest.raises(ValueError, match=r"ruler.lengths has \[4096\], but .* takes at most 2048"):
        ruler.check(here, here.suite.ruler)
    here = context(llama, {"lengths": [1024], "tasks": ["niah_single_9"]}, tmp_path)
    with pytest.raises(ValueError, match="unknown ruler tasks niah_single_9"):
        ruler.check(here, here.suite.ruler)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "lengths must be different"),
        ({"lengths": [512, 512]}, "lengths must be different"),
        ({"lengths": [64]}, "at least 256"),
        ({"lengths": [512], "samples": 501}, "at most 500"),
        ({"samples": 5}, "ruler.lengths is required"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingsError, match=message):
        from_dict(SuiteConfig, {"name": "test", "ruler": settings})
