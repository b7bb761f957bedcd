"""DDP, ZeRO and FSDP2 on a CPU: the training of one process, from checkpoints that are the same under each."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn

from triadic.training import engines, train
from triadic.training.parallel import _ready_deepspeed, _settle_deepspeed

slow = pytest.mark.slow
STATE = ("hf/model.safetensors", "state/optimizer.safetensors")


def dtypes(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)


def close(ours: list[dict], theirs: list[dict]) -> None:
    """The same rows, their numbers within 1e-5."""
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(abs(mine[key] - other[key]) < 1e-5 * max(1, abs(other[key])) for key in mine), (mine, other)


@pytest.mark.parametrize(
    "engine",
    ["fsdp2", "zero2", *(pytest.param(engine, marks=slow) for engine in ("ddp", "zero1", "zero3"))],
)
def test_an_engine_takes_over_one_process_saves_the_same_bytes_and_trains_on(
    engine, launched, stand_at, templates, tmp_path, rows
):
    folder = stand_at(8)
    overrides = ("batch.micro_batch_windows=2", f"parallel.engine={engine}", "parallel.processes=2")
    launched(engine, *overrides, script="tests/training/resave.py", leading=[str(tmp_path / "again")])
    for file in STATE:
        saved = tmp_path / "again" / "step-00000008" / file
        assert saved.read_bytes() == (templates[8] / "checkpoints" / "step-00000008" / file).read_bytes()
    close(rows(folder), rows(templates[12]))
    newest = folder / "checkpoints" / "step-00000012"
    assert json.loads((newest / "state" / "trainer.json").read_text())["engine"] == engine
    for file in (newest / STATE[0], newest / STATE[1], folder / "final" / "model.safetensors"):
        found = dtypes(file)
        assert set(found.values()) == {"F32"}
        assert sum("A_log" in name for name in found) == (6 if "optimizer" in file.name else 2)


@slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_twenty_steps_equal_those_of_one_process(engine, launched, configure, rows, tmp_path):
    overrides = ("run.steps=20", "batch.micro_batch_windows=2", "data.mask_boundary_targets=true")
    overrides += ("run.validation_windows=5",)  # two batches for one rank, one for the other
    alone = configure(*overrides, f"run.output_dir={tmp_path}/alone")
    train(alone)
    launched(engine, *overrides, f"parallel.engine={engine}")
    losses = [
        [{key: row[key] for key in ("step", "loss", "val_loss") if key in row} for row in rows(folder)]
        for folder in (tmp_path / "run", alone.run.output_dir)
    ]
    close(*losses)


@slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_one_process_takes_over_an_engine_that_was_resumed_twice(
    engine, launched, configure, rows, tmp_path, templates
):
    overrides = ("batch.micro_batch_windows=2", "schedule.decay_steps=12")
    for steps in (3, 5):
        launched(engine, *overrides, f"run.steps={steps}", "run.validate_every=100")
    assert train(configure(*overrides)).finished
    ours = [row for row in rows(tmp_path / "run") if "loss" in row]
    close(ours, [row for row in rows(templates[12]) if "loss" in row])


@slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_a_loss_that_is_not_finite_on_one_rank_leaves_no_trace(engine, launched, tmp_path):
    overrides = ("run.on_nonfinite=skip", "run.save_every=1", "run.keep_last=9", "run.steps=5")
    output = launched(engine, *overrides, "batch.micro_batch_windows=2", script="tests/training/infinite.py")
    assert output.count("step 4 is skipped (1 so far): loss inf") == 1
    states = {
        step: [(tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / file).read_bytes() for file in STATE]
        for step in (3, 4, 5)
    }
    assert states[3] == states[4]
    assert states[4] != states[5]


def test_autocast_alone_is_bfloat16(configure):
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    x = torch.randn(2, 2)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with engines.autocast(accelerator, precision):
            assert (x @ x).dtype == dtype


def test_parameters_that_are_not_float32_are_named():
    model = nn.Linear(2, 2)
    engines.check_float32(model.named_parameters(), "here")
    model.bias.data = model.bias.data.bfloat16()
    with pytest.raises(RuntimeError, match=r"1 tensors are not float32 here: bias is torch.bfloat16"):
        engines.check_float32(model.named_parameters(), "here")


def test_without_deepspeed_its_launch_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.ops", None)
    with pytest.raises(ValueError, match=r"DeepSpeed cannot be imported \(.*\); pip install -e"):
        _ready_deepspeed()


def plugin(**settings) -> SimpleNamespace:
    zero = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 1}
    return SimpleNamespace(deepspeed_config=zero | settings, zero3_init_flag=True, dschf=object())


def test_deepspeed_gets_the_runs_settings(configure):
    given = plugin(fp16={"enabled": False}, train_batch_size="auto", gradient_clipping="auto")
    _settle_deepspeed(given, configure("optimizer.clip_norm=0.5", "batch.micro_batch_windows=2"))
    assert given.deepspeed_config["gradient_clipping"] == 0.5
    assert given.deepspeed_config["train_micro_batch_size_per_gpu"] == 2
    assert "train_batch_size" not in given.deepspeed_config
    assert given.zero3_init_flag is False
    assert given.dschf is None
    _settle_deepspeed(given, configure("optimizer.clip_norm=0.5", "batch.micro_batch_windows=2"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16": {"enabled": True}}, "the DeepSpeed settings have bf16, which run.precision decides"),
        ({"optimizer": {"type": "Adam"}}, "the DeepSpeed settings have optimizer, which optimizer.* decides"),
        (
            {"gradient_clipping": 0.3},
            "the DeepSpeed settings have gradient_clipping, which optimizer.clip_norm decides",
        ),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps, which batch.* decides"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device nvme is not supported, only cpu and none",
        ),
    ],
)
def test_deepspeed_settings_that_the_run_decides_are_refused(configure, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _settle_deepspeed(plugin(**settings), configure())
