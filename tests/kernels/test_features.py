"""conv_features in Triton's interpreter against the definition in float64; what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triadic_kernels import conv_features
from triadic_kernels.features import refusal

PROGRAM = Path(__file__).with_name("features_cases.py")


@pytest.mark.triton
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_equals_the_definition(dtype, tolerance):
    env = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, PROGRAM, "--dtypes", dtype], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    for row in rows:
        assert max(row["errors"].values()) < tolerance[getattr(torch, dtype)], row
        assert row["dtypes"], row
        assert row["repeatable"], row


@pytest.mark.triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float64}, "takes bfloat16, float16 or float32, not torch.float64"),
        ({"groups": (128, 96)}, "takes heads of a power of two up to 512, not 96"),
        ({"width": 9}, "takes kernels of at most 8 tokens, not 9"),
    ],
)
def test_what_the_kernels_take(changes, reason):
    kind = {"device_type": "cuda", "dtype": torch.bfloat16, "groups": (128, 0), "width": 8}
    assert refusal(*(kind | changes).values()) == reason


@pytest.mark.triton
def test_devices_before_ampere_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, capability=capability: capability)
        reason = refusal("cuda", torch.bfloat16, (128, 0), 4)
        assert reason == ("needs compute capability 8.0 or newer" if capability < (8, 0) else None)


@pytest.mark.gpu
def test_beyond_2_to_the_31_elements():
    """A document behind so many gives what it gives alone."""
    T, tail, options = 350_000, 100, ([6144], [128], ["silu"], [False])
    x, weight = torch.randn(1, T, 6144, device="cuda", dtype=torch.bfloat16), torch.randn(6144, 4, device="cuda")
    results = []
    for inputs, bounds in ((x, [0, T - tail, T]), (x[:, -tail:], [0, tail])):
        inputs = inputs.clone().requires_grad_()
        y = conv_features(inputs, weight, *options, torch.tensor(bounds, device="cuda"))[0]
        results.append((y.detach()[:, -tail:], torch.autograd.grad(y, inputs, y.detach())[0][:, -tail:]))
    for long, short in zip(*results, strict=True):
        assert torch.equal(long, short)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu(dtype, tolerance):
    command = [sys.executable, PROGRAM, "--device", "cuda", "--large", "--dtypes", dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in map(json.loads, done.stdout.splitlines()):
        assert max(row["errors"].values()) < tolerance[getattr(torch, dtype)], row
        assert row["dtypes"], row
        assert row["repeatable"], row


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "conv_features cannot run this call: "),
        ({"sizes": [4, 4]}, "x has shape [1, 3, 12], weight [12, 4] and parts [4, 4]"),
        ({"groups": [3]}, "2 parts need as many groups"),
        ({"groups": [3, 0]}, "a part of 8 channels with heads of 3"),
        ({"activations": ["relu", "silu"]}, "activations are silu, softplus, sigmoid, none"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens ends at 2, but the input has 3 tokens"),
    ],
)
def test_bad_calls_are_refused(changes, message):
    given = {"sizes": [8, 4], "groups": [8, 0], "activations": ["silu", "none"], "wide": [False, True]}
    with pytest.raises(ValueError, match=re.escape(message)):
        conv_features(torch.zeros(1, 3, 12), torch.zeros(12, 4), **given | changes)
