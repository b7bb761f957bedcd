"""Every committed result file says where its figures come from."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("recipes/*/results/*.json"), *ROOT.glob("kernels/benchmarks/results/*.json")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_origin(path):
    found = json.loads(path.read_text())
    assert found.keys() >= {"commit", "date", "gpu", "gpu_count", "versions", "command"}
    assert found["versions"].keys() >= {"python", "torch"}
    assert all(found[name] for name in ("commit", "date", "command"))
    assert found["gpu"] or "CPU" in found["device"]
