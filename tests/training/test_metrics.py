import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from triadic.models import flops_per_token
from triadic.training import metrics, train
from triadic.training.metrics import mfu, peak_flops


def test_mfu_by_hand():
    # 50,000 tokens/s x 8.4e9 FLOPs on two devices of 989e12 FLOP/s
    assert mfu(50_000, 8.4e9, 989e12, 2) == pytest.approx(0.42e15 / 1.978e15)
    assert mfu(50_000, 8.4e9, None, 2) is None


def test_peaks_come_from_the_table_or_the_settings_and_absence_has_a_reason(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    names = {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H20": 148e12}
    for name, peak in (names | {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA GB200": 2250e12}).items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, "bf16", None) == (peak, "")
    assert peak_flops(cpu, "bf16", 1.5) == (1.5e12, "")
    assert "no peak is known for the device cpu" in peak_flops(cpu, "bf16", None)[1]
    assert "for bf16" in peak_flops(cuda, "fp32", None)[1]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Novel Device")
    assert "no peak is known for 'Novel Device'" in peak_flops(cuda, "bf16", None)[1]


def test_a_run_reports_every_column_and_draws_its_plot(configure, capsys):
    config = configure("run.steps=4", "run.trackers=[tensorboard]", "run.peak_tflops=1e-3", "data.num_workers=1")
    assert train(config).finished
    folder = Path(config.run.output_dir)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    columns = ["step", "tokens", "epoch", "loss", "lr", "grad_norm", "skipped_steps"]
    assert all(list(row) == [*columns, "tokens_per_s", "mfu", "peak_gib", "eta_s"] for row in training)
    assert [(row["step"], row["tokens"]) for row in training] == [(1, 256), (2, 512), (3, 768), (4, 1024)]
    assert [row["step"] for row in lines if "val_loss" in row] == [4]
    assert all(0 < row["peak_gib"] < 64 and row["tokens_per_s"] > 0 for row in training)
    assert training[-1]["eta_s"] == 0 < training[0]["eta_s"]
    flops = flops_per_token(AutoConfig.from_pretrained(config.model.config), 32)
    assert [row["mfu"] / row["tokens_per_s"] for row in training] == pytest.approx([flops / 1e9] * 4)

    printed = capsys.readouterr().out
    assert f"step 3/4 | 0.00M tokens | epoch {training[2]['epoch']:.2f} | loss {training[2]['loss']:.4f}" in printed
    assert "| mfu " in printed
    assert "step 4/4 | validation loss" in printed
    with open(folder / "loss.png", "rb") as file:
        assert struct.unpack(">8x4x4sII", file.read(24)) == (b"IHDR", 960, 540)
    events = list((folder / "tensorboard").rglob("events*"))
    assert any(b"grad_norm" in path.read_bytes() for path in events)


def test_on_a_cpu_the_missing_mfu_has_a_reason(configure, capsys, rows):
    config = configure("run.steps=1", "schedule.warmup_steps=0")
    train(config)
    printed = capsys.readouterr().out
    assert printed.count("MFU is not reported: no peak is known for the device cpu; set run.peak_tflops") == 1
    assert "| mfu" not in printed


def test_a_failing_tracker_is_dropped_and_the_run_goes_on(configure, monkeypatch, capsys, rows):
    from accelerate.tracking import TensorBoardTracker

    def broken(self, values, step=None, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(TensorBoardTracker, "log", broken)
    config = configure("run.steps=3", "run.trackers=[tensorboard]")
    assert train(config).finished
    assert capsys.readouterr().out.count("the tracker tensorboard failed and is off from here: ConnectionError") == 1
    assert [row["step"] for row in rows(config.run.output_dir) if "loss" in row] == [1, 2, 3]


def test_the_plot_shows_both_curves(tmp_path):
    log = [{"step": s, "tokens": s * 10, "loss": 8 - s} for s in range(4)]
    metrics.plot_losses(log, tmp_path / "a.png")
    metrics.plot_losses([*log, {"step": 4, "tokens": 40, "val_loss": 3.0}], tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_garbage_in_the_log_is_left_out(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n\xff\x00{"st\n3\n{"step": 2}\n')
    assert metrics.read_log(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_torn_last_line_is_left_out(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert metrics.read_log(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_loss_far_above_those_before_is_a_spike():
    spikes = metrics.Spikes(window=50)
    curve = [3.0 + 0.1 * (-1) ** i for i in range(50)]  # mean 3, standard deviation 0.1
    assert not any(spikes.look(loss) for loss in curve)
    assert spikes.look(3.55) == ""
    said = spikes.look(3.9)
    assert said.startswith("loss 3.9000 lies ")
    assert "standard deviations above the mean 3.0" in said
    assert spikes.look(2.0) == ""
    flat = metrics.Spikes()
    assert not any(flat.look(2.0) for _ in range(100))
    assert flat.look(2.1) == ""  # 5 %, a wobble
    assert "above the mean 2.00" in flat.look(2.2)


def test_a_spike_is_reported_with_its_documents(configure, monkeypatch, capsys):
    monkeypatch.setattr(metrics.Spikes, "look", lambda self, loss: "loss 9 stands out")
    assert train(configure("run.steps=2", "schedule.warmup_steps=0")).finished
    assert "step 2: loss 9 stands out, window positions 8 (document" in capsys.readouterr().out
