"""triadic.settings: what a YAML file and its overrides may say, and the sentence a mistake earns."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from triadic.settings import SettingsError, dump, load


@dataclass(frozen=True)
class Schedule:
    warmup_steps: int = 10
    kind: Literal["cosine", "linear"] = "cosine"


@dataclass(frozen=True)
class Run:
    name: str
    learning_rate: float = 3e-4
    resume: bool = True
    limit: int | None = None
    schedule: Schedule = field(default_factory=Schedule)
    lengths: list[int] = field(default_factory=list)
    stages: tuple[Schedule, ...] = ()
    metadata: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be positive")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_file_defaults_and_overrides(write):
    path = write("name: a\nlearning_rate: 1e-3\nschedule: {warmup_steps: 5}\nmetadata: {x: 1}\n")
    run = load(Run, path, ["schedule.kind=linear", "limit=7", "lengths=[1, 2]", "stages=[{warmup_steps: 3}]"])
    assert run == Run("a", 1e-3, True, 7, Schedule(5, "linear"), [1, 2], (Schedule(3, "cosine"),), {"x": 1.0})
    assert isinstance(run.metadata["x"], float)


def test_override_opens_a_section_that_the_file_leaves_out(write):
    assert load(Run, write("name: a"), ["schedule.warmup_steps=2"]).schedule.warmup_steps == 2


def test_null_resets_an_optional(write):
    assert load(Run, write("name: a\nlimit: 3"), ["limit=null"]).limit is None


def test_dump_and_load_agree(write, tmp_path):
    run = load(Run, write("name: a\nlearning_rate: 1e-10\nstages: [{kind: linear}]"))
    dump(run, tmp_path / "again.yaml")
    assert load(Run, tmp_path / "again.yaml") == run


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("name: a\nlearning_rat: 1", [], "unknown key learning_rat; did you mean learning_rate?"),
        ("name: a\nschedule: {warmup: 1}", [], "unknown key schedule.warmup; did you mean schedule.warmup_steps?"),
        ("name: a", ["schedule.knd=linear"], "unknown key schedule.knd; did you mean schedule.kind?"),
        ("name: a", ["schedule.lr=1"], "unknown key schedule.lr (allowed here: warmup_steps, kind)"),
        ("{}", [], "the key name is required"),
        ("name: 3", [], "name must be text, not a whole number (3)"),
        ("name: a\nlearning_rate: fast", [], "learning_rate must be a number, not text ('fast')"),
        ("name: a\nlearning_rate: .nan", [], "learning_rate must be a finite number, not nan"),
        ("name: a", ["metadata={x: .inf}"], "metadata.x must be a finite number, not inf"),
        ("name: a\nmetadata: {3: 1}", [], "a key of metadata must be text, not a whole number (3)"),
        ("name: a\nlearning_rate: true", [], "learning_rate must be a number, not true or false (True)"),
        ("name: a\nlimit: 1.5", [], "limit must be a whole number, not a number (1.5)"),
        ("name: a\nresume: 1", [], "resume must be true or false, not a whole number (1)"),
        ("name: a\nschedule: 4", [], "schedule must be a mapping, not a whole number (4)"),
        ("name: a\nschedule: {kind: cosin}", [], "schedule.kind must be one of cosine, linear, not 'cosin'; did you"),
        ("name: a\nlengths: [1, x]", [], "lengths[1] must be a whole number, not text ('x')"),
        ("name: a\nlengths: 1", [], "lengths must be a list, not a whole number (1)"),
        ("name: a\nlearning_rate: -1", [], "learning_rate is -1.0; it must be positive"),
        ("name: a", ["limit"], "the override 'limit' must have the form section.key=value"),
        ("name: a", ["name.x=1"], "goes below 'name', which holds text ('a')"),
        ("name: [a", [], "is not valid YAML"),
        ("- a", [], "must hold a mapping of settings, not a list"),
    ],
)
def test_mistakes(write, text, overrides, message):
    with pytest.raises(SettingsError) as error:
        load(Run, write(text), overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "overrides", "blamed"),
    [
        ("name: a", ["limit=3", "learning_rate=-1"], " with learning_rate=-1: learning_rate is"),
        (
            "name: a",
            ["schedule.warmup_steps=x", "limit=3"],
            " with schedule.warmup_steps=x: schedule.warmup_steps must",
        ),
        ("name: a", ["schedule={warmup_steps: x}"], " with schedule={warmup_steps: x}: schedule.warmup_steps must"),
        ("name: a\nschedule: {warmup_steps: y}", ["limit=3"], ": schedule.warmup_steps must"),  # the file's own
        ("name: a\nschedule: {limit: 3}", ["limit=3"], ": unknown key schedule.limit"),
        ("name: a\nlimits: 3", ["limit=3", "resume=false"], ": unknown key limits; did you mean limit?"),
        ("name: a\nfoo: 3", ["limit=3"], ": unknown key foo (allowed here"),
    ],
)
def test_a_mistake_of_an_override_is_told_as_one(write, text, overrides, blamed):
    path = write(text)
    with pytest.raises(SettingsError) as error:
        load(Run, path, overrides)
    assert str(error.value).startswith(f"{path}{blamed}")


def test_binary_file(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"name: \xff")
    with pytest.raises(SettingsError, match=r"run\.yaml is not UTF-8 text \(byte 6\)"):
        load(Run, tmp_path / "run.yaml")


def test_missing_file(tmp_path):
    with pytest.raises(SettingsError, match="there is no configuration file"):
        load(Run, tmp_path / "no.yaml")
