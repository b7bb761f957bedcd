"""The pairwise list of problems for the GPU kernels: what it covers, that references agree, how processes share it."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch
from triadic_kernels import dispatch

FOLDER = Path(__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pairwise():
    return load("pairwise")


@pytest.fixture(scope="module")
def triton_cases():
    return load("triton_cases")


WANTED = {  # what the kernels are accepted for
    "E": {1, 2, 3, 4, 8, 12, 16},
    "K": {64, 128},
    "V": {64, 128},
    "tokens": {1, 63, 64, 65, 127, 1000, 4096, 65537},
    "packed": {False, True},
    "decay": {"none", "weak", "mixed", "strong"},
    "delta": {False, True},
    "gate": {"slice", "head"},
    "groups": {1, 2},
    "h0": {False, True},
    "dht": {False, True},
}


def values(c):
    """A problem of the list by the names of WANTED."""
    lens = c.get("lens")
    return c | {"tokens": sum(lens) if lens else c["T"], "packed": lens is not None, "groups": c["HV"] // c["H"]}


def missing(cases, wanted):
    """Pairs of values that occur in no problem."""
    seen = {((a, c[a]), (b, c[b])) for c in map(values, cases) for a, b in itertools.combinations(wanted, 2)}
    return [
        pair for a, b in itertools.combinations(wanted, 2) for x, y in itertools.product(wanted[a], wanted[b])
        if (pair := ((a, x), (b, y))) not in seen
    ]  # fmt: skip


def test_the_committed_list_is_the_one_that_is_made(pairwise):
    assert json.loads((FOLDER / "pairwise.json").read_text()) == pairwise.cases()


def test_every_pair_of_values_occurs(triton_cases):
    assert missing(triton_cases.PAIRWISE, WANTED) == []
    hopper = WANTED | {"E": {1, 2, 4, 8, 16}, "K": {128}, "V": {128}}
    gluon = [c for c in triton_cases.PAIRWISE if c["K"] == c["V"] == 128 and c["E"] in hopper["E"]]
    assert missing(gluon, hopper) == []
    assert missing(gluon[::2], hopper) != []
    lens = [c["lens"] for c in triton_cases.PAIRWISE if c.get("lens")]
    assert sum({0, 1, 2} <= set(x) for x in lens) > 20
    assert len(triton_cases.PAIRWISE) < 120


@pytest.mark.triton
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_launch_configuration_of_plain_triton_occurs(capability, dtype, triton_cases):
    from triadic_kernels import launch

    def of(E, K, V):
        p = dispatch.Problem(*[None] * 19)._replace(E=E, K=K, V=V, dtype=dtype, capability=capability)
        return {(kernel, *sorted(constants.items())) for kernel, constants in launch.launch(p)._asdict().items()}

    shipped = {
        x for E, K, V in itertools.product(range(1, 33), launch.HEAD_DIMS, launch.HEAD_DIMS) for x in of(E, K, V)
    }
    listed = {x for c in triton_cases.PAIRWISE for x in of(c["E"], c["K"], c["V"])}
    assert listed == shipped
    assert len(shipped) > 10


@pytest.mark.triton
def test_every_tile_of_the_hopper_kernels_occurs(triton_cases):
    from triadic_kernels import gluon_hopper

    kinds = {(c["E"], c["delta"], c["gate"], c["h0"]) for c in triton_cases.PAIRWISE if c["K"] == c["V"] == 128}
    for E in gluon_hopper.TILES:
        mine = {kind for kind in kinds if kind[0] == E}
        assert [{kind[i] for kind in mine} for i in (1, 2, 3)] == [{True, False}, {"slice", "head"}, {True, False}]


@pytest.mark.parametrize("change", [{}, dict(lens=[22, 1, 2, 0, 40]), dict(gate="head", q2=False, h0=False, E=1)])
def test_long_problems_are_judged_by_an_equal_reference(change, triton_cases, monkeypatch):
    """The chunkwise form instead of the recurrence: outputs and every gradient."""
    c = triton_cases.DEFAULT | dict(T=65, H=2, HV=4, K=8, V=16, E=3, decay="mixed") | change
    x, cu = triton_cases.make(c, torch.float64, "cpu")
    by_token = triton_cases.expected(c, x, cu, 0.3)
    monkeypatch.setattr(triton_cases, "STEPS", 0)
    in_chunks = triton_cases.expected(c, x, cu, 0.3)
    assert by_token.keys() == in_chunks.keys() >= {"o", "ht", "dq", "dk", "dv", "dg", "dbeta"}
    for name, want in by_token.items():
        assert triton_cases.relative(in_chunks[name], want) < 1e-10, name


def test_shards_share_the_list(triton_cases):
    jobs = list(range(10))
    parts = [triton_cases.sharded(jobs, f"{i}/3") for i in range(3)]
    assert sorted(itertools.chain(*parts)) == jobs
    assert max(map(len, parts)) == 4
    with pytest.raises(ValueError, match="0 <= i < n"):
        triton_cases.sharded(jobs, "3/3")
