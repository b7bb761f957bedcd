"""Every shipped kernel configuration compiles without a GPU: few spills, asynchronous wgmma, sound addresses."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

OFFLINE = Path(__file__).parents[2] / "kernels" / "benchmarks" / "offline.py"
# Bytes that a thread may spill, by kernel; the recurrences of gluon_hopper hold the whole state in registers, and its
# kernel 5 is held to 128 by its sixteen warps, its kernel 2 to 168 so that three programs fit a multiprocessor.
BUDGET = {
    "masks_kernel": 96,
    "forward_kernel": 80,
    "reverse_kernel": 80,
    "state_gradients_kernel": 32,
    "mask_gradients_kernel": 200,
}
GROUPED = BUDGET | {"mask_gradients_kernel": 432, "state_gradients_kernel": 48}  # loops over the heads of a group
ELSEWHERE = {"forward_kernel": 96, "reverse_kernel": 192, "state_gradients_kernel": 96, "mask_gradients_kernel": 96}
if version("triton").startswith("3.6."):  # compute capability 10.0
    ELSEWHERE |= {"forward_kernel": 168, "reverse_kernel": 232}


def compiled(folder, *arguments):
    """Rows of offline.py for these arguments."""
    env = dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache"))
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, OFFLINE, "--json", folder / "out.json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())["rows"]


def judge(rows, budget):
    names = {row["kernel"] for row in rows}
    assert names == {"tables_kernel", "gates_kernel", *BUDGET}
    for row in rows:
        assert row["spill_bytes"] <= budget.get(row["kernel"], 0), row
        assert not row["serialised_wgmma"], row
        assert not row["wrong_addresses"], f"ptxas miscompiled an address: {row}"


@pytest.mark.parametrize("backend", ["triton", "gluon_hopper"])
def test_hopper(backend, tmp_path):
    rows = compiled(tmp_path, "--backend", backend, "--E", "8")
    judge(rows, BUDGET)
    assert all(row["HGMMA"] > 2 * row["WARPGROUP.ARRIVE"] for row in rows if row["HGMMA"])
    if backend == "gluon_hopper":
        assert all(row["UTMALDG"] for row in rows if row["kernel"] in ("forward_kernel", "reverse_kernel"))


@pytest.mark.parametrize("architecture", ["80", "100"])
def test_ampere_and_blackwell(architecture, tmp_path):
    rows = compiled(tmp_path, "--arch", architecture, "--E", "4")
    judge(rows, ELSEWHERE)
    assert all(row["shared_bytes"] <= 99 << 10 for row in rows), "more shared memory than Ada has"


@pytest.mark.parametrize(
    "architecture", ["90", pytest.param("80", marks=pytest.mark.slow), pytest.param("100", marks=pytest.mark.slow)]
)
def test_keys_and_values_in_one_pass(architecture, tmp_path):
    rows = compiled(tmp_path, "--features", "--E", "8", "--arch", architecture)
    assert {row["kernel"] for row in rows} == {"features_kernel", "gradients_kernel"}
    assert all(row["spill_bytes"] == 0 and row["registers"] <= 136 and row["BAR.SYNC"] == 0 for row in rows), rows


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [[], ["--linear"]])
def test_hopper_all_slice_counts(mixer, tmp_path):
    judge(compiled(tmp_path, "--backend", "gluon_hopper", "--E", "1", "2", "4", "16", *mixer), BUDGET)
    judge(compiled(tmp_path, "--backend", "triton", "--E", "1", "2", "3", "4", "16", *mixer), BUDGET)


@pytest.mark.slow
def test_hopper_value_heads_in_groups(tmp_path):
    judge(compiled(tmp_path, "--backend", "gluon_hopper", "--group", "2", "--E", "1", "4", "8", "16"), GROUPED)


@pytest.mark.slow
@pytest.mark.parametrize("K", [16, 32, 64, 256])
@pytest.mark.parametrize("V", [16, 32, 64, 256])
def test_hopper_all_head_dims(K, V, tmp_path):
    judge(compiled(tmp_path, "--K", str(K), "--V", str(V), "--E", "1", "4"), BUDGET)
