"""Every command of README and recipes: files exist, settings load, what it reads was made by a command before it."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from triadic import settings
from triadic.data import DataConfig
from triadic.evaluation import SuiteConfig, paper
from triadic.training import load_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/expected.json"))
SCALES = ("paper", "small", "smoke")
SCRIPTS = [recipe / f"{scale}.sh" for recipe in RECIPES for scale in SCALES]
NAMES = [f"{script.parent.name}/{script.stem}" for script in SCRIPTS]

BY_HAND = (["data/small_text/*.jsonl"], ["my/*.txt"])  # see scales/small/text.sh; the reader's own


def split(call):
    """(script, its arguments, processes it is launched with) of one noted command."""
    words = call[1:]
    processes = 1
    if call[0] == "accelerate":
        assert words[:2] == ["launch", "--config_file"]
        processes = yaml.safe_load((ROOT / words[2]).read_text())["num_processes"]
        words = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
    return words[0], words[1:], processes


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


def overrides(arguments):
    return [word for word in arguments if re.match(r"[a-z_.]+=", word)]


def check_prepare(arguments, processes, made):
    config = settings.load(DataConfig, ROOT / option(arguments, "--config"), overrides(arguments))
    if config.source is not None and config.source.files and config.source.package is None:
        assert config.source.files in BY_HAND
    for part in config.mixture.parts.values() if config.mixture else []:
        assert part.store is None or part.store in made
    made |= {f"{config.output}/train", f"{config.output}/validation", f"{config.output}/tokenizer"}
    assert config.tokenizer.pretrained is None or not config.tokenizer.pretrained.startswith("data/") or (
        config.tokenizer.pretrained in made
    )  # fmt: skip


def check_pretrain(arguments, processes, made):
    config = load_config(ROOT / option(arguments, "--config"), overrides(arguments))
    assert config.accumulation(processes) >= 1
    assert config.model.config in made or (ROOT / config.model.config).is_file()
    assert config.model.init_from is None or config.model.init_from in made
    assert {config.data.train, config.data.validation} <= made
    made |= {config.run.output_dir, f"{config.run.output_dir}/final"}


def check_upcycle(arguments, processes, made):
    assert arguments[0] in made
    assert int(option(arguments, "--second_key_dim")) > 1
    made.add(arguments[1])


def check_evaluate(arguments, processes, made):
    assert arguments[0] in made
    suite = settings.load(SuiteConfig, ROOT / option(arguments, "--suite"), overrides(arguments))
    assert suite.data.validation is None or suite.data.validation in made
    made.add(option(arguments, "--output"))


def check_fetch(arguments, processes, made):
    name = arguments[0] if arguments[0].endswith(".yaml") else f"configs/eval/{arguments[0]}.yaml"
    settings.load(SuiteConfig, ROOT / name, overrides(arguments))


def check_analyse(arguments, processes, made):
    assert arguments[0] in made
    made.add(option(arguments, "--output"))


def check_compare(arguments, processes, made):
    options = [i for i, word in enumerate(arguments) if word.startswith("--")]
    assert set(arguments[: options[0]]) <= made
    paper.rows(arguments[arguments.index("--paper") + 1 :])


def check_collect(arguments, processes, made):
    assert (ROOT / arguments[0] / "expected.json").is_file()
    assert option(arguments, "--scale") in SCALES


CHECKS = {
    "scripts/prepare_data.py": check_prepare,
    "scripts/pretrain.py": check_pretrain,
    "scripts/upcycle.py": check_upcycle,
    "scripts/evaluate.py": check_evaluate,
    "scripts/fetch_suite.py": check_fetch,
    "scripts/analyse.py": check_analyse,
    "scripts/compare.py": check_compare,
    "recipes/collect.py": check_collect,
}


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_each_command_can_run(script, calls):
    made = set()
    commands = [split(call) for call in calls(script)]
    for program, arguments, processes in commands:
        assert (ROOT / program).is_file(), program
        if program in CHECKS:
            CHECKS[program](arguments, processes, made)
    suites = {option(words, "--suite") for program, words, _ in commands if program == "scripts/evaluate.py"}
    if suites and script.stem == "paper":  # days lie between the first command and the first evaluation
        assert [(commands[0][0], {commands[0][1][0]})] == [("scripts/fetch_suite.py", suites)]
    assert commands[-1][0] == "recipes/collect.py"
    assert commands[-1][1][0] == f"recipes/{script.parent.name}"
    assert option(commands[-1][1], "--scale") == script.stem


def readme_commands():
    """The programs of README's shell blocks in their order, each a list of words; pip and make are left out."""
    shell = "".join(re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL))
    for line in shell.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["scripts/eval.sh"]:
            suite = words.index("--suite") + 1
            words = [
                "python",
                "scripts/evaluate.py",
                *words[1:suite],
                f"configs/eval/{words[suite]}.yaml",
                *words[suite + 1 :],
            ]
        if words[:1] in (["python"], ["accelerate"]):
            yield words


def test_the_readme_can_be_followed_from_top_to_bottom():
    made, programs = set(), []
    for program, arguments, processes in map(split, readme_commands()):
        CHECKS[program](arguments, processes, made)
        programs.append(program)
    assert set(programs) >= {"scripts/prepare_data.py", "scripts/pretrain.py", "scripts/evaluate.py"}


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_each_row_of_the_table_is_measured(script, calls, root):
    import json

    expected = json.loads((script.parent / "expected.json").read_text())
    rows = [row["models"].get(script.stem) for row in expected["rows"].values() if "models" in row]
    outputs = {option(call, "--output") for call in calls(script) if "--output" in call}
    for model in filter(None, rows):
        assert f"runs/{script.stem}/{model}/{Path(expected['results']).parent}" in outputs


def test_every_recipe_has_its_parts():
    assert len(RECIPES) == 8
    for recipe in RECIPES:
        readme = (recipe / "README.md").read_text()
        for scale in SCALES:
            assert f"{scale}.sh" in readme, f"{recipe.name}/README.md does not name {scale}.sh"
        assert f"({recipe.name}/" in (ROOT / "recipes" / "README.md").read_text()


def test_smoke_runs_every_recipe_and_nothing_else(calls, tmp_path):
    """In a copy, since it begins by removing what runs of that scale have left."""
    for folder in ("recipes", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    wanted = [call for recipe in RECIPES for call in calls(recipe / "smoke.sh")]
    assert calls(tmp_path / "recipes" / "smoke.sh") == wanted
