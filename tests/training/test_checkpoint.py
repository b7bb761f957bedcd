"""Complete or absent, exact, never the last good one lost."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from triadic.training import TrainingError, assemble, checkpoint, loop, metrics, train

FILES = {
    "hf": {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"},
    "state": {"optimizer.safetensors", "rng.safetensors", "trainer.json", "run.yaml"},
}


def steps_of(folder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((Path(folder) / "checkpoints").glob("step-*"))]


@pytest.fixture
def finished(configure, stand_at):
    """A finished run: its settings and its folder."""
    return configure(), stand_at(12)


def test_a_checkpoint_holds_these_files_and_no_pickles(stand_at):
    folder = stand_at(12)
    newest = folder / "checkpoints" / "step-00000012"
    assert {path.name for path in newest.iterdir()} == {"hf", "state", "done.json"}
    assert {name: {path.name for path in (newest / name).iterdir()} for name in FILES} == FILES
    manifest = json.loads((newest / "done.json").read_text())
    assert manifest["step"] == 12
    assert set(manifest["files"]) == {f"{name}/{file}" for name, files in FILES.items() for file in files}
    assert {path.name for path in (folder / "final").iterdir()} == FILES["hf"]
    for name in FILES["hf"]:
        assert (folder / "final" / name).read_bytes() == (newest / "hf" / name).read_bytes()


def test_the_export_is_the_model_in_float32_with_its_tokenizer(finished):
    config, folder = finished
    model, report = AutoModelForCausalLM.from_pretrained(folder / "final", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    for settings in (model.config, GenerationConfig.from_pretrained(folder / "final")):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == special
    row = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()][-1]
    again = assemble.assemble(config)  # resumes at the last step
    assert loop.validate(again)["val_loss"] == row["val_loss"]


def test_restoring_gives_back_weights_moments_and_generator(configure):
    run = assemble.assemble(configure())
    for _ in range(3):
        loop.train_step(run, list(loop.islice(loop.micro_batches(run), run.accumulation)))
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.progress.step, run.progress.skipped_steps = 3, 1
    torch.rand(7)  # the generator stands somewhere else than after building a model
    snapshot = checkpoint.take(run.accelerator, run.model, run.optimizer, run.progress)
    path = checkpoint.write(run.checkpoints, snapshot, run.bare, run.tokenizer, run.config)
    expected, drawn = run.optimizer.optimizer.state_dict(), torch.rand(3)
    weights = {name: value.clone() for name, value in run.bare.state_dict().items()}
    run.claim.release()

    other = assemble.assemble(configure())
    assert other.progress == checkpoint.Progress(3, 1)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, weights[name]) for name, value in other.bare.state_dict().items())
    restored = other.optimizer.optimizer.state_dict()
    assert restored["state"].keys() == expected["state"].keys()
    for i, state in expected["state"].items():
        assert all(torch.equal(value, restored["state"][i][key]) for key, value in state.items())
    assert len(load_file(path / "state" / "optimizer.safetensors")) == 3 * len(weights)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["run.save_every=2", "run.keep_last=2"], [4, 6]),
        (["run.save_every=1", "run.keep_last=1", "run.milestones=[2, 4]"], [2, 4, 6]),
        (["run.save_every=100", "run.milestones=[5]"], [5, 6]),
    ],
)
def test_the_last_ones_and_the_milestones_are_kept(configure, overrides, kept):
    config = configure("run.steps=6", *overrides)
    train(config)
    assert steps_of(config.run.output_dir) == kept


def test_every_rank_gets_its_own_generator_back(tmp_path):
    states, drawn = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        states.append(torch.get_rng_state())
        drawn.append(torch.rand(4))
    save_file({"cpu": torch.stack(states)}, tmp_path / "rng.safetensors")
    for rank in range(3):
        accelerator = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
        checkpoint._restore_rng(load_file(tmp_path / "rng.safetensors"), accelerator)
        assert torch.equal(torch.rand(4), drawn[rank])


def test_a_persons_own_copies_are_left_alone(configure, stand_at):
    checkpoints = stand_at(8) / "checkpoints"
    for name in ("step-00000008-good", "step-8", "step-best"):
        shutil.copytree(checkpoints / "step-00000004", checkpoints / name)
    assert train(configure("run.keep_last=1")).finished
    kept = ["step-00000008-good", "step-00000012", "step-8", "step-best"]
    assert sorted(path.name for path in checkpoints.iterdir()) == kept


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def misspell(path: Path) -> None:
    path.write_text(path.read_text().replace("sha256", "sha257", 1))


@pytest.mark.parametrize(
    ("hurt", "file", "said"),
    [
        (truncate, "hf/model.safetensors", "hf/model.safetensors has"),
        (flip, "state/optimizer.safetensors", "the content of state/optimizer.safetensors has changed"),
        (os.remove, "state/trainer.json", "state/trainer.json is missing"),
        (os.remove, "done.json", "done.json is missing or unreadable"),
        (truncate, "done.json", "done.json is missing or unreadable"),
        (misspell, "done.json", "done.json is missing or unreadable"),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_once_and_the_run_is_the_same(finished, rows, capsys, hurt, file, said):
    config, folder = finished
    expected = rows(folder)
    hurt(folder / "checkpoints" / "step-00000012" / file)
    capsys.readouterr()
    assert train(config).finished
    printed = capsys.readouterr().out
    assert printed.count("step-00000012 is damaged") == 1
    assert said in printed
    assert f"resuming from {folder / 'checkpoints' / 'step-00000008'}" in printed
    assert rows(folder) == expected
    assert steps_of(folder) == [4, 8, 12]
    assert checkpoint.damage(folder / "checkpoints" / "step-00000012") is None
    train(config)
    assert "is damaged" not in capsys.readouterr().out


def test_a_damaged_newest_never_counts_as_kept(stand_at, configure):
    """Saving at an older step while a damaged newer one lies there must not push the good ones out."""
    folder = stand_at(12)
    flip(folder / "checkpoints" / "step-00000012" / "hf" / "model.safetensors")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    train(configure("run.steps=9", "schedule.decay_steps=12", "run.keep_last=1"))
    assert steps_of(folder) == [9]
    assert checkpoint.damage(folder / "checkpoints" / "step-00000009") is None


def test_with_every_checkpoint_damaged_nothing_is_overwritten(finished):
    config, folder = finished
    for step in steps_of(folder):
        flip(folder / "checkpoints" / f"step-{step:08d}" / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged \(step-00000012: the content of"):
        train(config)
    assert steps_of(folder) == [4, 8, 12]


def test_a_full_disk_keeps_what_was_there(configure, stand_at, monkeypatch):
    folder = stand_at(8)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(TrainingError, match=r"could not save .*step-00000012: .*No space left on device; earlier"):
            train(configure())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]
    assert not (folder / "final").exists()
    assert train(configure()).finished


@pytest.mark.parametrize(("owner", "name"), [(checkpoint, "prune"), (checkpoint, "publish"), (metrics, "plot_losses")])
def test_a_disk_that_refuses_beside_a_checkpoint(configure, stand_at, monkeypatch, owner, name):
    """While old ones are removed, final/ is made or the plot drawn: a sentence, and the same command goes on."""
    folder = stand_at(8)

    def full(*arguments):
        raise OSError(28, "No space left on device", "there")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(TrainingError, match=r"No space left on device.*; .*the same command resumes"):
            train(configure())
    assert not (folder / "final").exists()
    assert train(configure()).finished


def test_another_process_that_saves_while_this_one_starts(configure, stand_at, templates, monkeypatch):
    """It still held the folder when this one looked for the newest checkpoint, and ended before this one claimed it."""
    folder, find = stand_at(8), checkpoint.find

    def then_another_saves(checkpoints):
        found = find(checkpoints)
        shutil.copytree(templates[12] / "checkpoints" / "step-00000012", checkpoints / "step-00000012")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "find", then_another_saves)
        with pytest.raises(ValueError, match=r"another process trained in .*, and saved step-00000012; give the same"):
            train(configure())
    assert steps_of(folder) == [4, 8, 12]
    assert train(configure()) == loop.Outcome(12, True)


def test_final_is_the_last_steps_or_absent(finished, configure):
    """A run that goes on beyond an earlier end keeps what it had published, under another name."""
    _, folder = finished
    before = (folder / "final" / "model.safetensors").read_bytes()

    def killed(*arguments):
        raise TrainingError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", killed)
        with pytest.raises(TrainingError, match="killed"):
            train(configure("run.steps=13", "schedule.decay_steps=12"))
    assert not (folder / "final").exists()
    assert (folder / "earlier-final-00000012" / "model.safetensors").read_bytes() == before
    assert train(configure("run.steps=13", "schedule.decay_steps=12")).finished
    assert (folder / "final" / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize("moment", ["_describe", "_flush_tree", "write_atomically", "_put_in_place"])
def test_dying_in_the_middle_of_a_save_leaves_the_previous_one(configure, stand_at, monkeypatch, moment):
    """The process ends (BaseException: no handler runs) at four points of a save; resuming finds the last good one."""
    config, folder = configure("run.steps=9", "schedule.decay_steps=12"), stand_at(8)

    class Killed(BaseException):
        pass

    def die(*arguments):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, die)
        with pytest.raises(Killed):
            train(config)
    assert (folder / "checkpoints" / ".writing-step-00000009").exists()
    (folder / "checkpoints" / ".removing-step-00000002").mkdir()  # as left by a death while pruning
    assert steps_of(folder) == [4, 8]
    assert train(config).finished
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [f"step-{s:08d}" for s in (4, 8, 9)]


def test_old_checkpoints_go_only_after_the_new_one_is_durable(configure, monkeypatch):
    order = []
    for name in ("_flush_tree", "_put_in_place", "prune"):
        original = getattr(checkpoint, name)
        note = lambda *arguments, name=name, original=original: (order.append(name), original(*arguments))[1]  # noqa: E731
        monkeypatch.setattr(checkpoint, name, note)
    train(configure("run.steps=4", "run.keep_last=1"))
    assert order == ["_flush_tree", "_put_in_place", "prune", "_flush_tree", "_put_in_place"]  # a save, then final/


def test_a_finished_run_has_nothing_left_to_do(finished, rows):
    config, folder = finished
    expected = rows(folder)
    shutil.rmtree(folder / "final")
    assert train(config) == loop.Outcome(12, True)
    assert rows(folder) == expected
    assert (folder / "final" / "model.safetensors").exists()
