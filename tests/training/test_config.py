import json
import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from triadic.settings import SettingsError
from triadic.training import load_config

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs" / "train").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_loads_splits_over_gpus_and_names_a_model_that_exists(path):
    config = load_config(path)
    assert (ROOT / config.model.config).is_file()
    for gpus in (1,) if path.stem == "demo" else (1, 2, 4, 8):
        assert config.accumulation(gpus) >= 1
    assert config.run.output_dir == f"runs/{path.stem}"


def test_the_papers_lengths():
    """Steps and tokens a step as the paper gives them: 20B, 65B, 2.0B and 6.8B tokens."""
    tokens = {}
    for name in ("400m_e8", "1.3b_e8", "400m_e8_extend64k", "1.3b_e8_extend64k"):
        config = load_config(ROOT / "configs" / "train" / f"triadic_gdn_{name}.yaml")
        tokens[name] = config.run.steps * config.batch.global_batch_tokens / 1e9
    assert {name: round(value, 1) for name, value in tokens.items()} == {
        "400m_e8": 20.0,
        "1.3b_e8": 65.0,
        "400m_e8_extend64k": 2.0,
        "1.3b_e8_extend64k": 6.8,
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rat=1", "unknown key optimizer.learning_rat; did you mean optimizer.learning_rate?"),
        ("run.steps=many", "run.steps must be a whole number"),
        ("run.precision=bf61", "run.precision must be one of bf16, fp32, not 'bf61'; did you mean bf16?"),
        ("run.trackers=[tensorbored]", "did you mean tensorboard?"),
        ("batch.global_batch_tokens=250", "must be a multiple of data.seq_len (32); the nearest is 256"),
        ("schedule.warmup_steps=13", "schedule.warmup_steps (13) must not exceed the schedule's length (12 steps)"),
        ("schedule.min_lr_fraction=1.5", "schedule.min_lr_fraction must lie in [0, 1]"),
        ("optimizer.betas=[0.9]", "optimizer.betas must be two numbers in [0, 1)"),
        ("run.milestones=[4, 0]", "run.milestones must be steps from 1 on, not [4, 0]"),
        ("run.seed=9223372036854775808", "run.seed must be less than 2^63"),
        ("run.save_every=0", "run.save_every must be greater than 0, not 0"),
        ("data.num_workers=-1", "data.num_workers must be 0 or greater, not -1"),
        ("optimizer.clip_norm=0", "optimizer.clip_norm must be greater than 0"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(configure, override, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        configure(override)


def test_the_accumulation_follows_from_batch_and_world_size(configure):
    config = configure("batch.global_batch_tokens=1024", "batch.micro_batch_windows=4")  # 32 windows a step
    assert [config.accumulation(ranks) for ranks in (1, 2, 8)] == [8, 4, 1]
    with pytest.raises(ValueError, match=r"a step of 32 windows .* cannot be split over 3 processes"):
        config.accumulation(3)


def test_a_resolved_config_reads_back_equal(configure, tmp_path):
    from triadic.training.run_folder import settings_text

    config = configure("run.milestones=[3, 9]", "run.peak_tflops=1.5")
    (tmp_path / "copy.yaml").write_text(settings_text(config))
    assert load_config(tmp_path / "copy.yaml") == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_load_and_leave_precision_and_batch_to_the_run(path):
    launch = load_config_from_file(str(path))
    engine, _, size = path.stem.rpartition("_") if path.stem != "single" else ("single", "", "")
    assert launch.num_processes == {"": 1, "8gpu": 8, "2x8gpu": 16}[size]
    assert launch.num_machines == (2 if size == "2x8gpu" else 1)
    text = re.sub(r"#.*", "", path.read_text())
    if engine.startswith("zero"):
        assert launch.distributed_type == "DEEPSPEED"
        assert "mixed_precision" not in text  # accelerate refuses it beside a DeepSpeed file
        text = (ROOT / launch.deepspeed_config["deepspeed_config_file"]).read_text()
        (zero,) = json.loads(text).values()
        assert engine == f"zero{zero['stage']}" + ("_offload" if "offload_optimizer" in zero else "")
    else:
        assert launch.mixed_precision == "no"
        assert launch.distributed_type == {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}[engine]
    assert not re.search(r"batch|accumulation|learning|bf16|fp16|clipping", text)
