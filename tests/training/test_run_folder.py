"""Whose folder it is, and every misfit of model, tokenizer and data: refused in one sentence, nothing written."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from triadic.data import DataConfig, prepare
from triadic.models.upcycling import upcycle
from triadic.settings import from_dict
from triadic.training import run_folder, train


def content(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refuses(config, message: str) -> None:
    """Training `config` raises ValueError with `message` and changes nothing in its output folder."""
    folder = Path(config.run.output_dir)
    before = content(folder) if folder.exists() else None
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert (content(folder) if folder.exists() else None) == before


@pytest.fixture
def half_way(configure, stand_at):
    """`configure` for a run that was stopped at its eighth of twelve steps."""
    stand_at(8)
    return configure


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=1", "run.seed is 0 there and 1 here"),
        ("batch.global_batch_tokens=512", "batch.global_batch_tokens is 256 there and 512 here"),
        ("data.seq_len=64", "data.seq_len is 32 there and 64 here"),
        ("data.mask_boundary_targets=true", "data.mask_boundary_targets is False there and True here"),
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate is 0.01 there and 0.5 here"),
        ("schedule.decay_steps=13", "schedule.decay_steps (by default run.steps) is 12 there and 13 here"),
        ("run.precision=bf16", "run.precision is fp32 there and bf16 here"),
        ("model.config={world}/hybrid.json", "model.layer_types is ['linear_attention', 'linear_attention'] there and"),
        ("data.train={world}/data/validation", "data.train fingerprint is"),
    ],
)
def test_resuming_as_another_run_is_refused_and_the_difference_named(half_way, world, override, message):
    config = half_way(override.format(world=world), "model.tokenizer=" + str(world / "data" / "tokenizer"))
    refuses(config, message)
    refuses(config, "belongs to another run")
    refuses(config, "Set these back to resume it, or choose another run.output_dir")


def test_every_difference_is_named(half_way):
    config = half_way("run.seed=1", "data.seq_len=64")
    refuses(config, "data.seq_len is 32 there and 64 here; run.seed is 0 there and 1 here. Set these back")


def test_what_does_not_change_the_training_may_change(half_way, rows):
    operational = ("run.log_every=2", "run.save_every=3", "run.keep_last=1", "batch.micro_batch_windows=8")
    config = half_way("run.trackers=[tensorboard]", "data.num_workers=1", *operational)
    assert train(config).step == 12
    assert [row["step"] for row in rows(config.run.output_dir) if "loss" in row] == [*range(1, 9), 10, 12]
    assert "save_every: 3" in (Path(config.run.output_dir) / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("key", "other"),
    [("model.num_householder", "2"), ("optimizer.clip_norm", "0.5"), ("schedule.min_lr_fraction", "0.2")],
)
def test_a_run_from_before_a_setting_existed_had_its_default(half_way, key, other):
    """The oldest runs know no num_householder: they resume, unless it is set to something that they did not do."""
    path = Path(half_way().run.output_dir) / "identity.json"
    ours = json.loads(path.read_text())
    default = ours.pop(key)
    path.write_text(json.dumps(ours))
    run_folder.check(path.parent, ours | {key: default})
    with pytest.raises(ValueError, match=f"{key} is {default} there and {other} here"):
        run_folder.check(path.parent, ours | {key: json.loads(other)})
    with pytest.raises(ValueError, match=r"model.colour is nothing there and red here"):
        run_folder.check(path.parent, ours | {key: default, "model.colour": "red"})
    assert train(half_way()).finished


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_run_whose_identity_is_damaged_is_refused(half_way, content):
    config = half_way()
    (Path(config.run.output_dir) / "identity.json").write_bytes(content)
    refuses(config, "identity.json is damaged, so whose run this is is unknown; restore it")


def test_a_run_that_was_stopped_while_it_claimed_its_folder_begins_again(configure):
    config = configure("run.steps=4", "schedule.warmup_steps=0")
    folder = Path(config.run.output_dir)
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / "identity.json.new").write_text('{"run.se')
    assert train(config).finished


def test_a_longer_run_keeps_its_schedule_or_is_refused(half_way):
    config = half_way("run.steps=10", "schedule.decay_steps=12")
    assert train(config).finished
    refuses(half_way("run.steps=20"), "schedule.decay_steps (by default run.steps) is 12 there and 20 here")


def test_a_folder_of_something_else_is_refused(configure):
    config = configure()
    folder = Path(config.run.output_dir)
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    refuses(config, f"run.output_dir {folder} is not empty and is no run's folder")
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        train(config)


def test_two_trainings_in_one_folder_are_refused(half_way):
    config = half_way()
    claim = run_folder.Claim(Path(config.run.output_dir))
    claim.take(config, json.loads((claim.folder / "identity.json").read_text()))
    refuses(config, "another process is training in")
    claim.release()
    assert train(config).finished


def test_missing_things_are_named(configure, world, tmp_path):
    refuses(configure("model.config=configs/model/dmeo.json"), "model.config configs/model/dmeo.json does not exist")
    refuses(configure("data.train=nowhere/train"), "data.train nowhere/train does not exist")
    alone = shutil.copytree(world / "data" / "train", tmp_path / "alone" / "train")
    refuses(configure(f"data.train={alone}"), f"there is no tokenizer folder {tmp_path}/alone/tokenizer")
    refuses(configure("data.train=nowhere/train", "model.tokenizer=none"), "there is no tokenizer folder none;")
    tokenizer = f"model.tokenizer={world}/data/tokenizer"
    refuses(configure("data.train=nowhere/train", tokenizer), "nowhere/train holds no complete token store")
    refuses(configure("data.seq_len=16384", "batch.global_batch_tokens=65536"), "less than one window of 16,384 + 1")
    refuses(configure("model.rope_theta=2e6"), "has no layer with rotary positions; remove it")
    refuses(configure("batch.micro_batch_windows=3"), "a step of 8 windows")


def test_things_that_are_not_what_they_should_be_are_named(configure, world, tmp_path, monkeypatch):
    refuses(configure(f"model.config={tmp_path}/settings.yaml"), "settings.yaml cannot be used: It looks like")
    architecture = json.loads((world / "gdn.json").read_text())
    for name, changes, message in (
        ("dtype", {"dtype": "bf17"}, "dtype.json cannot be used: module 'torch' has no attribute 'bf17'"),
        ("key", {"second_key": 2}, "key.json cannot be used: TriadicConfig has no field 'second_key'"),
        ("llama", {"model_type": "llama"}, "llama.json is a llama model, only triadic models are trained here"),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(architecture | changes))
        refuses(configure(f"model.config={tmp_path}/{name}.json"), message)
    refuses(configure(f"model.tokenizer={world}"), f"no tokenizer can be loaded from {world}")
    refuses(configure(f"run.output_dir={tmp_path}/settings.yaml/run"), "cannot be written to: Not a directory")
    absent = f"model.config={world}/hybrid.json", "model.attn_implementation=flash_attention_4"
    refuses(configure(*absent), "model.attn_implementation cannot be used: ")
    monkeypatch.setattr("triadic.training.parallel.get_available_trackers", list)
    refuses(configure("run.trackers=[wandb]"), "run.trackers asks for wandb, which is not installed")


def test_data_of_another_tokenizer_is_refused(configure, world, tmp_path):
    (tmp_path / "text.txt").write_text("an entirely different corpus " * 99)
    (tmp_path / "held.txt").write_text("held out")
    source = {"files": [str(tmp_path / "*.txt")], "validation": {"documents": 1}}
    tree = {"output": str(tmp_path / "other"), "workers": 1, "source": source}
    prepare(from_dict(DataConfig, tree | {"tokenizer": {"train": {"vocab_size": 280}}}))
    refuses(configure(f"data.validation={tmp_path}/other/validation"), "was made with another tokenizer")
    refuses(configure(f"model.tokenizer={tmp_path}/other/tokenizer"), "was made with another tokenizer")


def test_a_vocabulary_that_is_too_small_is_refused(configure, world, tmp_path):
    architecture = json.loads((world / "gdn.json").read_text())
    (tmp_path / "small.json").write_text(json.dumps(architecture | {"vocab_size": 299}))
    refuses(configure(f"model.config={tmp_path}/small.json"), "has 300 entries but")


def test_init_from_takes_weights_alone_and_a_new_rope_base(configure, world, tmp_path, rows):
    hybrid = f"model.config={world}/hybrid.json"
    first = configure(hybrid, f"run.output_dir={tmp_path}/short")
    train(first)
    weights = Path(first.run.output_dir) / "final"
    longer = (
        "data.seq_len=64",
        "model.rope_theta=2e6",
        "optimizer.learning_rate=1e-9",
        f"run.output_dir={tmp_path}/long",
    )
    train(configure(hybrid, f"model.init_from={weights}", "run.steps=3", *longer))
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (weights, tmp_path / "long" / "final"))
    assert after.config.rope_parameters["rope_theta"] == 2e6
    assert before.config.rope_parameters["rope_theta"] == 10000.0
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(old, new, atol=1e-7, rtol=0, msg=name)
    losses = [row["loss"] for row in rows(tmp_path / "long") if "loss" in row]
    assert losses[0] < rows(first.run.output_dir)[0]["loss"] - 0.1


def test_the_state_grows_at_the_extension(configure, world, tmp_path, rows):
    """Three slices at 32 tokens, six at 64: the run begins as upcycling leaves the model, learns, and resumes."""
    short = configure(f"run.output_dir={tmp_path}/short")
    train(short)
    weights = Path(short.run.output_dir) / "final"
    longer = (f"model.init_from={weights}", "model.second_key_dim=6", "data.seq_len=64", "run.seed=5")
    train(configure(*longer, "run.steps=3", "optimizer.learning_rate=1e-9", f"run.output_dir={tmp_path}/still"))
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "still" / "final")
    expected = upcycle(AutoModelForCausalLM.from_pretrained(weights), 6, seed=5)
    assert grown.config.second_key_dim == 6
    for (name, new), old in zip(grown.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(new, old, atol=1e-7, rtol=0, msg=name)
    train(configure(*longer, "run.steps=4", "schedule.decay_steps=8", f"run.output_dir={tmp_path}/long"))
    train(configure(*longer, "run.steps=8", f"run.output_dir={tmp_path}/long"))
    losses = [row["loss"] for row in rows(tmp_path / "long") if "loss" in row]
    assert len(losses) == 8
    assert losses[0] < rows(tmp_path / "short")[0]["loss"] - 0.1
    assert losses[-1] < losses[0]


def test_a_state_that_cannot_grow_is_refused(configure, world, tmp_path):
    refuses(
        configure("model.second_key_dim=6"), "model.second_key_dim grows the state of model.init_from, which is not"
    )
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(world / "gdn.json")).save_pretrained(tmp_path / "gdn")
    for wanted in (3, 4):
        settings = configure(f"model.init_from={tmp_path}/gdn", f"model.second_key_dim={wanted}")
        refuses(settings, f"model.init_from: second_key_dim {wanted} is no larger multiple of the model's 3: give 6, 9")


def test_init_from_that_cannot_be_used_is_refused(configure, world, tmp_path):
    refuses(configure(f"model.init_from={tmp_path}/nowhere"), f"model.init_from: {tmp_path}/nowhere cannot be loaded")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(world / "gdn.json"))
    model.save_pretrained(tmp_path / "gdn")
    other = (f"model.config={world}/hybrid.json", f"model.init_from={tmp_path}/gdn")
    refuses(configure(*other), f"model.init_from: the weights in {tmp_path}/gdn do not fit the model's config; missing")
    (tmp_path / "wide.json").write_text(
        (world / "gdn.json").read_text().replace('"hidden_size": 32', '"hidden_size": 64')
    )
    other = (f"model.config={tmp_path}/wide.json", f"model.init_from={tmp_path}/gdn")
    refuses(configure(*other), "do not fit the model's config; of another shape: lm_head.weight")
    shutil.copytree(tmp_path / "gdn", tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes((tmp_path / "gdn" / "model.safetensors").read_bytes()[:-9])
    refuses(configure(f"model.init_from={tmp_path}/torn"), f"model.init_from: {tmp_path}/torn cannot be loaded")
    (tmp_path / "pickled").mkdir()
    shutil.copy(tmp_path / "gdn" / "config.json", tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    refuses(configure(f"model.init_from={tmp_path}/pickled"), "safetensors")
