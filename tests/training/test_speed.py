"""The benchmark of training: what its rows say, and that it needs none of the packages that read data."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from triadic.models import TriadicConfig
from triadic.training import speed

CELL = speed.Cell("", 16, windows=2, accumulation=2, checkpointed=False, compiled=False, documents=2, precision="fp32")


@pytest.fixture
def cell(world):
    return replace(CELL, model=str(world / "hybrid.json"))


def test_a_row_tells_speed_and_where_time_goes(cell, monkeypatch):
    monkeypatch.setattr(speed.metrics, "peak_flops", lambda *_: (1e9, ""))
    row = speed.measure(cell, steps=3)
    tokens, seconds = 2 * 2 * 16, row["step_ms"] / 1e3
    assert row["tokens_per_s"] == pytest.approx(tokens / seconds, rel=1e-2)
    config = TriadicConfig.from_pretrained(cell.model)
    assert row["mfu"] == pytest.approx(speed.flops_per_token(config, 16) * tokens / seconds / 1e9, rel=1e-2)
    phases = sum(row[f"{phase}_ms"] for phase in speed.PHASES)
    assert 0.5 * row["step_ms"] < phases < 1.01 * row["step_ms"]
    assert row["loss"] == pytest.approx(math.log(config.vocab_size), rel=0.1)  # random tokens: nothing to learn
    assert (row["model"], row["T"], row["gpus"], row["engine"]) == ("hybrid", 16, 1, "single")


def test_a_profile_names_the_longest(cell, monkeypatch):
    row = speed.measure(cell, steps=1, profile=True)
    spent = row["kernels_ms"]
    assert list(spent.values()) == sorted(spent.values(), reverse=True)
    assert {"aten::mm", "ChunkTriadic"} <= spent.keys()
    assert sum(spent.values()) <= row["busy_ms"] * 1.01
    assert 0.02 * row["step_ms"] < row["busy_ms"] < 50 * row["step_ms"]  # a step that is watched takes longer
    monkeypatch.setattr(speed, "LONGEST", 5)
    row = speed.measure(cell, steps=1, profile=True)
    assert len(row["kernels_ms"]) == 5
    assert sum(row["kernels_ms"].values()) < row["busy_ms"]
    assert "busy_ms" not in speed.measure(cell, steps=1)


def test_windows_are_cut_into_documents_and_parts(cell):
    whole = next(iter(speed.RandomWindows(300, cell, seed=0, part=0, parts=1)))
    assert whole["cu_seq_lens_q"].tolist() == [0, 8, 16, 24, 32]
    assert whole["max_length_q"] == 8
    assert whole["position_ids"].tolist() == [list(range(8)) * 4]
    assert whole["shift_labels"][0, :-1].tolist() == whole["input_ids"][0, 1:].tolist()
    second = next(iter(speed.RandomWindows(300, cell, seed=0, part=1, parts=2)))
    assert second["input_ids"].tolist() == whole["input_ids"][:, 16:].tolist()
    assert second["cu_seq_lens_q"].tolist() == whole["cu_seq_lens_q"].tolist()


def test_the_file_holds_rows_errors_and_what_was_left_out(cell, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(speed, "measure", fail)
    out = tmp_path / "x.json"
    speed.run([cell], 1, None, out, "python x")
    found = json.loads(out.read_text())
    assert found["rows"][0]["error"] == "RuntimeError: out of memory"
    assert {"commit", "date", "gpu", "gpu_count", "versions", "command", "rows"} <= found.keys()
    speed.run([cell, cell], 1, -1.0, out, "python x")
    assert json.loads(out.read_text())["left_out"] == ["hybrid at 16", "hybrid at 16"]


def test_no_package_that_reads_data_is_needed():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('pyarrow', 'datasets')))\n"
        "import triadic.training.speed, triadic.training\n"
        "assert 'triadic.data' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [0]}, "seq_len must be at least 1, not 0"),
        ({"accumulation": 0}, "accumulation must be at least 1, not 0"),
        ({"documents": 0}, "documents must be at least 1, not 0"),
        ({"documents": 7}, "7 documents of equal length do not fill 16 tokens"),
        ({"context": 0}, "context must be at least 1, not 0"),
    ],
)
def test_cells_that_cannot_be_measured_are_refused(changes, message):
    options = dict(models=["a"], lengths=[16], pass_tokens=32, accumulation=2, checkpoint="auto", compiled=False)
    (cell,) = speed.make_cells(**options)
    assert (cell.windows, cell.checkpointed) == (2, False)
    with pytest.raises(ValueError, match=message):
        speed.make_cells(**options | changes)


def test_nothing_is_measured_for_no_steps_or_into_a_folder(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        speed.run([cell], 0, None, tmp_path / "x.json", "")
    with pytest.raises(IsADirectoryError):
        speed.run([cell], 1, None, tmp_path, "")
