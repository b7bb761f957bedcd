"""The speed benchmark at its smallest: the bytes it counts, and rows of every kind."""

import json
from pathlib import Path

import pytest
import torch

from triadic.evaluation.speed import decoding_speed, measure, random_model
from triadic.models import TriadicConfig, state_bytes
from triadic.models.cache import CACHE_NAME

FIELDS = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "second_key_dim": 2, "output_gate_rank": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_bytes(state):
    config = TriadicConfig(**FIELDS, linear_state_dtype=state)
    model = random_model(config, torch.device("cpu"), torch.bfloat16)
    (row,) = decoding_speed(model, 3, [10**6], 1e12, steps=9)
    full = TriadicConfig(**{**FIELDS, "layer_types": ["full_attention"] * 2})
    linear = TriadicConfig(**{**FIELDS, "layer_types": ["linear_attention"] * 2})
    assert row["keys_values_gb"] == pytest.approx(3 * state_bytes(full, 10**6) / 2 / 1e9, rel=1e-6)
    states = 2 * 3 * state_bytes(linear, 1, 4 if state == "float32" else 2) / 2 / 1e9
    assert row["states_gb"] == pytest.approx(states, rel=1e-6)
    assert row["tokens_per_s"] == pytest.approx(3e3 / row["ms_per_step"], rel=0.01)
    moved = sum(row[f"{name}_gb"] for name in ("weights", "states", "keys_values"))
    assert row["roofline"] == pytest.approx(moved / row["ms_per_step"], abs=1e-3)  # GB at 1e12 bytes a second


def test_contexts_of_a_recurrent_model_take_turns(monkeypatch):
    """Each round times every context once, at its own positions, and the caches know them."""
    config = TriadicConfig(**{**FIELDS, "layer_types": ["linear_attention"] * 2})
    model, seen = random_model(config, torch.device("cpu"), torch.float32), []
    forward = model.forward

    def spy(*args, position_ids=None, **kwargs):
        if position_ids is not None:
            seen.append((position_ids[0, 0].item(), int(kwargs[CACHE_NAME].get_seq_length())))
        return forward(*args, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    rows = decoding_speed(model, 2, [10, 700], 1e12, steps=14)
    assert [row["context"] for row in rows] == [10, 700]
    assert seen == [(c + i, c + i) for c, count in [(10, 4), *[(10, 2), (700, 2)] * 5] for i in range(count)]
    assert rows[0]["states_gb"] == rows[1]["states_gb"]
    assert rows[0]["keys_values_gb"] == rows[1]["keys_values_gb"] == 0


def test_result_file(tmp_path):
    TriadicConfig(**FIELDS).save_pretrained(tmp_path / "tiny")
    *_, result = measure(
        [str(tmp_path / "tiny")], [1, 2], [30], [20], "float32", "float32", 9, "cpu", "benchmark_decoding.py"
    )
    assert {"commit", "date", "gpu", "gpu_count", "versions", "command", "copy_tbps", "rows"} <= result.keys()
    assert [row["what"] for row in result["rows"]] == ["decode_model", "decode_model", "prefill_model"]
    assert [row["B"] for row in result["rows"]] == [1, 2, 1]
    assert result["copy_tbps"] is None, "a CPU has no roofline: its caches hold what a small model reads"
    assert [row.get("roofline") for row in result["rows"]] == [None] * 3
    json.dumps(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 8}, "steps at least 9: 4 untimed ones and 5 rounds"),
        ({"batch": [1, 0]}, "batch, context and prefill must be at least 1"),
        ({"models": ["no/such/config.json"]}, "no/such/config.json cannot be read as a model config"),
        (
            {"models": [str(Path(__file__).parent)]},
            "evaluation/config.json cannot be read as a model config: there is no such file",
        ),
        ({"device": "gpu"}, "gpu is no device; give --device cuda or cpu"),
        (
            {"device": f"cuda:{torch.cuda.device_count()}"},
            r"there is no device cuda:\d; torch sees \d CUDA devices here",
        ),
        ({"state": "float16"}, "linear_state_dtype is 'float16' but must be one of"),
    ],
)
def test_refusals(change, message, tmp_path):
    TriadicConfig(**FIELDS).save_pretrained(tmp_path / "tiny")
    call = dict(models=[str(tmp_path / "tiny")], batch=[1], context=[30], prefill=[], state="float32", dtype="float32")
    with pytest.raises(ValueError, match=message):
        list(measure(**{**call, "steps": 9, "device": "cpu", "command": "", **change}))
