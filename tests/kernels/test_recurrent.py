"""`recurrent_triadic` without gradients: states in place and in bfloat16 with every back end, the Triton kernel in
Triton's interpreter and the Gluon kernel in its emulator, both compiled without a GPU, and on one.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triadic_kernels import chunk_triadic, dispatch, explain, recurrent_triadic

PROGRAM = Path(__file__).with_name("decode_cases.py")
EMULATOR = Path(__file__).with_name("gluon_emulator.py")
OFFLINE = Path(__file__).parents[2] / "kernels" / "benchmarks" / "offline.py"
POSITIONAL = ("q", "k", "v", "q2", "k2", "g", "beta", "initial_state")
STEP = dispatch.Problem(
    B=2, T=1, H=2, HV=4, K=128, V=128, E=8, N=2, dtype=torch.bfloat16, device_type="cuda", capability=(9, 0),
    delta_rule=True, scale=0.1, has_q2=True, gate="slice", has_beta=True, state=torch.float32, output_final=True,
    varlen=False,
)  # fmt: skip


def rows(tolerance, *arguments, program=PROGRAM, **environment):
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, env=dict(os.environ, **environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    for row in found:
        exact = tolerance[getattr(torch, row["dtype"])]
        assert max(error for name, error in row["errors"].items() if name != "ht") < exact, row
        # the final state is float32 whatever the inputs, or rounded once
        assert row["errors"]["ht"] < tolerance[getattr(torch, row["state"])], row
        wrong = [name for name, value in row.items() if value is False]
        assert not wrong, row


@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "state"), [("float32", "float32"), ("float16", "bfloat16")])
def test_interpreted(dtype, state, tolerance):
    rows(tolerance, "small", "--dtypes", dtype, "--states", state, TRITON_INTERPRET="1")


@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "state"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_emulated(dtype, state, tolerance):
    case = ("hopper", "--recurrent", "--backend", "gluon_hopper", "--dtypes", dtype, "--states", state)
    rows(tolerance, *case, program=EMULATOR, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon_hopper"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_on_a_gpu(backend, dtype, state, tolerance):
    case = ("--dtypes", dtype, "--states", state, "--backend", backend, "--only-supported")
    rows(tolerance, "small", "large", "hopper", "--device", "cuda", *case)


def step_of(B, state):
    """Inputs of one token on a GPU for 16 heads, and a state of E = 8."""
    gen = torch.Generator("cuda").manual_seed(0)

    def rand(*shape):
        return torch.rand(B, 1, 16, *shape, generator=gen, device="cuda")

    q, k, v = ((rand(128) - 0.5).bfloat16() for _ in range(3))
    x = dict(q=q, k=k, v=v, q2=rand(8), k2=rand(8), g=-rand(8), beta=rand())
    return x, torch.randn(B, 16, 8, 128, 128, generator=gen, device="cuda", dtype=state)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon_hopper"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_replayed_from_a_graph(backend, state):
    """Three tokens of the same state in place, by a CUDA graph and without one."""
    x, start = step_of(3, state)
    eager, replayed = start.clone(), start.clone()
    expected = [recurrent_triadic(**x, initial_state=eager, inplace_state=True, backend=backend)[0] for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = recurrent_triadic(**x, initial_state=replayed, inplace_state=True, backend=backend)
    assert torch.equal(replayed, start), "a capture computes nothing"
    for want in expected:
        graph.replay()
        assert torch.equal(o, want)
    assert torch.equal(replayed, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon_hopper"])
def test_states_of_more_than_2_to_the_31_numbers(backend):
    """5 GB; and no sequence's numbers depend on the others."""
    x, state = step_of(1100, torch.bfloat16)
    assert state.numel() > 2**31
    last = {name: y[-2:].clone() for name, y in x.items()}
    expected, final = recurrent_triadic(
        **last, initial_state=state[-2:].clone(), output_final_state=True, backend=backend
    )
    o, _ = recurrent_triadic(**x, initial_state=state, inplace_state=True, backend=backend)
    assert torch.equal(o[-2:], expected)
    assert torch.equal(state[-2:], final)


def compiled(folder, *arguments):
    env = dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache"))
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, OFFLINE, "--recurrent", "--json", folder / "out.json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "out.json").read_text())["rows"]
    assert {row["kernel"] for row in found} == {"recurrent_kernel"}
    return found


@pytest.mark.triton
@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_compiled_it_never_spills_a_state(architecture, tmp_path):
    found = compiled(tmp_path, "--arch", architecture, "--state", "float32", "bfloat16", "--E", "8")
    assert len(found) == 4, "one token and several, in two dtypes, each compiled once"
    assert all(row["spill_bytes"] <= 16 for row in found), found  # a thread holds 256 bytes of the state or more


@pytest.mark.triton
def test_compiled_with_16_slices_it_never_spills_a_state(tmp_path):
    found = compiled(tmp_path, "--E", "16", "--K", "64", "--V", "16")
    assert len(found) == 2
    assert all(row["spill_bytes"] <= 16 for row in found), found


@pytest.mark.triton
def test_tiles_are_those_measured_but_where_newer_compilers_spill(monkeypatch):
    decode = dispatch.load("decode")
    cases = [*itertools.product((1, 2, 3, 4, 8, 16, 32), (16, 32, 64, 128, 256), (128,), (2, 4))]
    chosen = {}
    for spills in (False, True):
        monkeypatch.setattr(decode, "SPILLS", spills)
        chosen[spills] = {case: decode.tile.__wrapped__(*case) for case in cases}
    assert chosen[False][16, 128, 128, 4] == (16, 8)
    assert chosen[False][8, 128, 128, 4] == (16, 4)
    changed = {case: chosen[True][case] for case in cases if chosen[True][case] != chosen[False][case]}
    assert changed == dict.fromkeys(
        [(16, 64, 128, 4), (16, 128, 128, 4), (32, 32, 128, 4), (32, 64, 128, 4), (32, 64, 128, 2)], (8, 8)
    )


@pytest.mark.triton
def test_compiled_in_gluon_it_never_spills(tmp_path):
    found = compiled(tmp_path, "--backend", "gluon_hopper", "--state", "float32", "bfloat16", "--E", "8")
    assert len(found) == 2, "one token, in two dtypes, each compiled once"
    for row in found:
        assert row["spill_bytes"] == 0, row
        assert (row["UTMALDG"], row["UTMASTG"]) == (12, 4), row  # boxes of three tiles, of one tile
        assert row["shared_bytes"] <= 227 << 10, row


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(16, 256), (64, 64), (128, 128), (256, 16), (256, 256)])
def test_compiled_for_all_shapes(K, V, tmp_path):
    shape = ("--K", str(K), "--V", str(V), "--E", "1", "2", "3", "4", "16", "32")
    found = compiled(tmp_path, "--state", "float32", "bfloat16", *shape)
    assert all(row["spill_bytes"] <= 64 for row in found), found


@pytest.mark.triton
@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("triton", {}, None),
        ("triton", dict(dtype=torch.float32, capability=(8, 0), K=16, V=256, E=32, delta_rule=False), None),
        ("triton", dict(needs_grad=True), "has no backward"),
        ("triton", dict(capability=(7, 5)), "compute capability 8.0 or newer, this device has 7.5"),
        ("triton", dict(dtype=torch.float64), "not torch.float64"),
        ("triton", dict(K=96), "K=96"),
        ("triton", dict(E=33), "E=33"),
        ("triton", dict(device_type="cpu", capability=None), "needs a CUDA device, the tensors are on cpu"),
        ("gluon_hopper", {}, None),
        ("gluon_hopper", dict(state=torch.bfloat16, delta_rule=False, gate="head", has_beta=False, HV=6), None),
        ("gluon_hopper", dict(dtype=torch.float16, gate=None), None),
        ("gluon_hopper", dict(needs_grad=True), "has no backward"),
        ("gluon_hopper", dict(capability=(8, 0)), "compute capability 9.0"),
        ("gluon_hopper", dict(capability=(10, 0)), "compute capability 9.0"),
        ("gluon_hopper", dict(device_type="cpu", capability=None), "compute capability 9.0"),
        ("gluon_hopper", dict(dtype=torch.float64, state=torch.float64), "not torch.float64"),
        ("gluon_hopper", dict(V=64), "V=64"),
        ("gluon_hopper", dict(E=4), "takes 8 slices, not E=4"),
        ("gluon_hopper", dict(T=2), "one token"),
        ("gluon_hopper", dict(B=1, varlen=True), "one token"),
        ("gluon_hopper", dict(B=0, N=0), "one token"),
        ("gluon_hopper", dict(state=None), "initial state"),
        ("gluon_hopper", dict(output_final=False), "output_final_state=True"),
    ],
)
def test_support(backend, change, reason):
    refusal = dispatch.refusal(dispatch.RECURRENT[backend], STEP._replace(**change))
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.triton
@pytest.mark.parametrize(
    ("change", "selected"),
    [
        ({}, "gluon_hopper"),
        (dict(E=4), "triton"),
        (dict(capability=(8, 0)), "triton"),
        (dict(needs_grad=True), "torch"),
    ],
)
def test_auto(change, selected):
    lines = dispatch.report(STEP._replace(**change), dispatch.RECURRENT).splitlines()
    assert [line for line in lines if line.endswith(": selected")] == [f"{selected}: selected"]


def test_explain(inputs):
    lines = explain(**inputs(T=1), recurrent=True).splitlines()
    assert [line.split(":")[0] for line in lines] == list(dispatch.RECURRENT)
    assert "needs a CUDA device of compute capability 9.0" in lines[0] or "not installed" in lines[0]
    assert "has no backward" in lines[1] or "not installed" in lines[1]
    assert lines[-1] == "torch: selected"


@pytest.mark.triton
def test_a_named_back_end_never_gives_way(inputs):
    x = {name: y.detach() for name, y in inputs(B=1, T=1, states=1, dtype=torch.float32).items()}
    state = x["initial_state"].clone()
    message = "backend='gluon_hopper' cannot run this call: needs a CUDA device of compute capability 9.0; backend="
    for options in ({}, dict(inplace_state=True)):
        with pytest.raises(ValueError, match=message):
            recurrent_triadic(**x, **options, backend="gluon_hopper")
    assert torch.equal(x["initial_state"], state)


@pytest.mark.parametrize("packed", [True, False])
def test_state_in_place(packed, inputs):
    x = {name: y.detach() for name, y in inputs(T=5, states=2 if packed else 1, dtype=torch.float32).items()}
    cu_seqlens = torch.tensor([0, 2, 5]) if packed else None
    o, ht = recurrent_triadic(**x, cu_seqlens=cu_seqlens, output_final_state=True)
    state = x["initial_state"].clone()
    given = {**x, "initial_state": state}
    inplace, final = recurrent_triadic(**given, cu_seqlens=cu_seqlens, inplace_state=True)
    assert final is state
    assert torch.equal(inplace, o)
    assert torch.equal(state, ht)
    assert not torch.equal(state, x["initial_state"])


def test_autograd_notices_an_overwritten_state(inputs, monkeypatch):
    """Also where a kernel overwrites it, of which torch knows nothing."""
    reference = dispatch.load("reference")
    step = reference.recurrent
    monkeypatch.setattr(reference, "recurrent", lambda p, *given: step(p, *given[:-1], given[-1].data))
    x = {name: y.detach() for name, y in inputs(T=1, states=1, dtype=torch.float32).items()}
    weight = torch.ones((), requires_grad=True)
    product = weight * x["initial_state"]
    recurrent_triadic(**x, inplace_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_many_steps_equal_chunks(inputs):
    """4,096 tokens, one at a time into the same float32 state."""
    x = inputs(T=4096, H=1, HV=1, K=8, V=8, E=4, states=1, dtype=torch.float32, strongest=0.5)
    x = {name: y.detach() for name, y in x.items()}
    state = x.pop("initial_state")
    expected, final = chunk_triadic(**x, initial_state=state, output_final_state=True)
    steps = [
        recurrent_triadic(**{n: y[:, t : t + 1] for n, y in x.items()}, initial_state=state, inplace_state=True)[0]
        for t in range(4096)
    ]
    assert (state - final).norm() < 1e-5 * final.norm()
    assert (torch.cat(steps, 1) - expected).norm() < 1e-5 * expected.norm()


def test_bfloat16_state(inputs, close, tolerance):
    """Rounded once a call: that of the float32 state."""
    x = {name: y.detach() for name, y in inputs(B=2, T=4, states=2, dtype=torch.float32).items()}
    half = x["initial_state"].bfloat16()
    o, ht = recurrent_triadic(**{**x, "initial_state": half}, output_final_state=True)
    exact, state = recurrent_triadic(**{**x, "initial_state": half.float()}, output_final_state=True)
    assert ht.dtype == torch.bfloat16
    assert torch.equal(o, exact)
    assert torch.equal(ht, state.bfloat16())


def test_no_token_leaves_the_state(inputs):
    x = {name: y.detach() for name, y in inputs(T=0, states=1).items()}
    _, ht = recurrent_triadic(**x, output_final_state=True)
    assert torch.equal(ht, x["initial_state"])
    assert ht.data_ptr() != x["initial_state"].data_ptr()


def test_refusals(inputs):
    x = inputs(T=2, states=1)
    with pytest.raises(ValueError, match=r"would overwrite what autograd needs; use torch.no_grad\(\)"):
        recurrent_triadic(**x, inplace_state=True)
    with torch.no_grad():
        with pytest.raises(ValueError, match="initial_state is missing; pass a contiguous state"):
            recurrent_triadic(**{**x, "initial_state": None}, inplace_state=True)
        with pytest.raises(ValueError, match="initial_state is not contiguous; pass a contiguous state"):
            recurrent_triadic(**{**x, "initial_state": x["initial_state"].mT.contiguous().mT}, inplace_state=True)
        with pytest.raises(ValueError, match=r"initial_state has dtype torch.bfloat16; pass torch.float64"):
            recurrent_triadic(**{**x, "initial_state": x["initial_state"].bfloat16()})


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_opcheck(state, inputs):
    x = {name: y.detach() for name, y in inputs(B=2, T=3, states=2, dtype=torch.float32).items()}
    x["initial_state"] = x["initial_state"].to(state)
    arguments = (*(x[name] for name in POSITIONAL), None, 0.5, True, True, "auto", False)
    torch.library.opcheck(torch.ops.triadic_kernels.recurrent_step.default, arguments)
    torch.library.opcheck(torch.ops.triadic_kernels.recurrent_step_.default, arguments)


def test_compiled_it_is_one_node_and_copies_no_state(inputs):
    """The state is overwritten where it stands, also by the compiled graph."""
    x = {name: y.detach() for name, y in inputs(B=2, T=1, states=2, dtype=torch.float32).items()}
    graphs = []

    def record(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    expected, ht = recurrent_triadic(**x, output_final_state=True)
    step = torch.compile(lambda **x: recurrent_triadic(**x, inplace_state=True)[0], fullgraph=True, backend=record)
    assert torch.equal(step(**x), expected)
    assert torch.equal(x["initial_state"], ht)
    assert sum("recurrent_step_" in name for name in graphs[0]) == 1
