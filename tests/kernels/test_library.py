"""The ops as torch sees them: registration, compilation, autocast, dtypes, layouts, copies of the package."""

import importlib
import importlib.util
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
import triadic_kernels
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from triadic_kernels import causal_conv1d, chunk_triadic, dispatch, op, recurrent, recurrent_triadic

FOLDER = Path(triadic_kernels.__file__).parent
OPS = pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic])
POSITIONAL = ("q", "k", "v", "q2", "k2", "g", "beta", "initial_state")


def called(graph):
    """Names of the operators of a graph, those of this package and the others."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    own = [name.split(".")[1] for name in names if name.startswith("triadic_kernels.")]
    return own, [name for name in names if not name.startswith("triadic_kernels.") and "getitem" not in name]


def test_compiled_it_is_one_node_each_way(inputs, gradients, close, tolerance):
    """fullgraph=True: no break, chunk_forward in the forward graph, chunk_backward in the backward graph, no more."""
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    x = inputs(T=70, states=3)
    cu_seqlens = torch.tensor([0, 1, 3, 70])
    compiled = torch.compile(
        lambda **inputs: chunk_triadic(**inputs, cu_seqlens=cu_seqlens),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=record, bw_compiler=record),
    )
    close(gradients(compiled, x), gradients(chunk_triadic, x, cu_seqlens=cu_seqlens), tolerance[torch.float64])
    assert [called(graph) for graph in graphs] == [(["chunk_forward"], []), (["chunk_backward"], [])]


def test_a_decoding_step_compiles_without_breaks(inputs):
    x = inputs(B=2, T=1, states=2)
    taps, past = torch.randn(28, 4).double(), torch.randn(2, 28, 3).double()

    def step(**inputs):
        v, window = causal_conv1d(
            inputs["v"].flatten(2), taps, activation="silu", initial_state=past, output_final_state=True
        )
        o, state = recurrent_triadic(**{**inputs, "v": v.view(2, 1, 4, 7)}, output_final_state=True)
        return o, state, window

    with torch.no_grad():
        results = torch.compile(step, fullgraph=True, backend="aot_eager")(**x)
        for result, expected in zip(results, step(**x), strict=True):
            torch.testing.assert_close(result, expected)


@pytest.fixture
def other_back_end(monkeypatch):
    """Called, it makes "auto" take a back end that keeps one more tensor for the backward, as another process might."""
    reference = dispatch.load("reference")

    def forward(*arguments):
        o, ht, saved = reference.forward(*arguments)
        return o, ht, [*saved, torch.zeros(3)] if arguments[-1] else saved

    def saved_like(p, q, cu_seqlens):
        return [*reference.saved_like(p, q, cu_seqlens), q.new_empty(3, dtype=torch.float32)]

    def backward(p, *given):
        *tensors, saved, do, dht = given
        return reference.backward(p, *tensors, saved[:-1], do, dht)

    module = types.SimpleNamespace(
        __name__="other", unsupported=lambda p: None, forward=forward, saved_like=saved_like, backward=backward
    )

    def take():
        monkeypatch.setitem(dispatch._loaded, "other", module)
        for row in [*dispatch.CHUNK]:
            monkeypatch.setitem(dispatch.CHUNK, row, "other")

    return take


def test_a_compiled_graph_tells_back_ends_apart(inputs, gradients, other_back_end, monkeypatch):
    """Inductor keeps graphs on disk, by their text: where another process keeps other tensors for the backward (Triton
    was installed, or the op is of another release), it must not be given this one's.
    """
    lines = []

    def record(graph, _):
        lines.extend(line for line in graph.code.splitlines() if "chunk_forward.default" in line)
        return make_boxed_func(graph.forward)

    def compiled():
        torch.compiler.reset()
        gradients(torch.compile(chunk_triadic, fullgraph=True, backend=aot_autograd(fw_compiler=record)), inputs())

    compiled()
    compiled()
    with monkeypatch.context() as another:
        another.setattr(dispatch, "_sources", lambda: "of another release")
        compiled()
    other_back_end()
    compiled()
    assert len(lines) == 4
    assert lines[0] == lines[1]
    assert len(set(lines)) == 3


@pytest.mark.slow
def test_inductor_keeps_graphs_of_back_ends_apart(
    inputs, gradients, close, tolerance, other_back_end, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = inputs(B=2, T=70, states=2, dtype=torch.float32)
    expected = gradients(chunk_triadic, x)
    for change in (lambda: None, other_back_end):
        change()
        torch.compiler.reset()
        results = gradients(torch.compile(chunk_triadic), x)
        close(results, expected, tolerance[torch.float32])


@pytest.mark.slow
def test_inductor_equals_eager(inputs, gradients, close, tolerance, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what it compiles now, not what it kept
    x = inputs(B=2, T=70, states=2, dtype=torch.float32)

    def layer(**inputs):
        v, _ = causal_conv1d(inputs["v"].flatten(2), taps, activation="silu")
        return chunk_triadic(**{**inputs, "v": v.view(2, 70, 4, 7)}, use_qk_l2norm_in_kernel=True)

    taps = torch.randn(28, 4)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    close(gradients(compiled, x), gradients(layer, x), tolerance[torch.float32])


@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_opcheck_forward(packed, delta_rule, inputs):
    x = inputs(T=40, states=2 if packed else 1)
    cu_seqlens = torch.tensor([0, 3, 40]) if packed else None
    arguments = (*(x[name] for name in POSITIONAL), cu_seqlens, 0.5, delta_rule, True)
    torch.library.opcheck(torch.ops.triadic_kernels.chunk_forward.default, (*arguments, True, "auto", False, "x"))
    with torch.no_grad():
        detached = tuple(y.detach() if isinstance(y, torch.Tensor) else y for y in arguments)
        torch.library.opcheck(torch.ops.triadic_kernels.chunk_forward.default, (*detached, False, "auto", False, "x"))


def test_opcheck_backward(inputs):
    x = inputs(T=40, E=None, gate=None, beta=False)
    arguments = [None if x[name] is None else x[name].detach() for name in POSITIONAL] + [None]
    outputs = torch.ops.triadic_kernels.chunk_forward(*arguments, 0.5, True, False, True, "auto", False, "x")
    do = torch.randn_like(outputs[0])
    torch.library.opcheck(
        torch.ops.triadic_kernels.chunk_backward.default,
        (*arguments, outputs[1:], do, None, 0.5, True, False, "auto"),
        test_utils=("test_schema", "test_faketensor"),
    )


def gaps(x):
    """The same values, as a compiler may lay them out: rows further apart than they are long."""
    return torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]]


@pytest.mark.parametrize("name", ["chunk_forward", "recurrent_step", "recurrent_step_"])
def test_back_ends_are_given_contiguous_tensors(name, inputs, monkeypatch):
    """Kernels count on it, and what an op returns has the strides of its fake."""
    x = [inputs(T=3, states=1)[key].detach() for key in POSITIONAL]
    chunks = name == "chunk_forward"
    options = (None, 0.5, True, True, *([True] if chunks else []), "auto", False, *(["x"] if chunks else []))
    call, given = getattr(torch.ops.triadic_kernels, name), []
    expected = call(*x[:7], x[7].clone(), *options)
    for module in (op, recurrent):
        chosen = module.problem
        monkeypatch.setattr(module, "problem", lambda *a, f=chosen, **k: given.extend(a) or f(*a, **k))
    final = gaps(x[7])
    results = call(*map(gaps, x[:7]), final, *options)
    assert len(given) == 8
    assert all(y is None or y.is_contiguous() for y in given)
    if name == "recurrent_step_":
        assert torch.equal(final, torch.ops.triadic_kernels.recurrent_step(*x, *options)[1])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = call(*(mode.from_tensor(gaps(y)) for y in x[:7]), mode.from_tensor(x[7]), *options)
    for result, fake, want in zip(
        *([y] if name == "recurrent_step_" else y for y in (results, fakes, expected)), strict=True
    ):
        assert torch.equal(result, want)
        assert result.stride() == fake.stride()


def far(x):
    """The same values where a dimension of size 1 lies as far apart as a compiler likes: contiguous all the same."""
    return x.as_strided(x.shape, [999 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)])


@pytest.mark.parametrize("layout", [gaps, far, torch.clone], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "sizes", [dict(), dict(B=2, T=6, H=1, HV=1, K=3, V=1), dict(T=0), dict(T=1, E=1, K=1)], ids=str
)
def test_results_have_the_strides_that_were_promised(sizes, layout, inputs):
    x = inputs(**sizes, states=sizes.get("B", 1), dtype=torch.float32)
    x = [layout(x[key].detach()) for key in POSITIONAL]
    ops, ends = torch.ops.triadic_kernels, (0.5, True, True)

    def strides(x):
        forward = ops.chunk_forward(*x, None, *ends, True, "torch", False, "x")
        o, ht, *saved = forward
        backward = ops.chunk_backward(*x, None, saved, layout(o), layout(ht), *ends, "torch")
        steps = ops.recurrent_step(*x, None, *ends, "torch", False)
        inplace = ops.recurrent_step_(*x, None, *ends, "torch", False)
        return [y.stride() for y in (*forward, *backward, *steps, inplace)]

    with FakeTensorMode() as mode:
        promised = strides([mode.from_tensor(y) for y in x])
    assert strides(x) == promised


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OPS
def test_low_precision_inputs(op, dtype, inputs, gradients, close, tolerance):
    """Computed in float32 and rounded once, output and gradients in the dtypes of what they belong to."""
    x = inputs(B=2, T=130, H=2, HV=4, K=16, V=24, E=3, states=2, dtype=dtype)
    exact = {name: y.detach().double().requires_grad_() for name, y in x.items()}
    results = gradients(op, x)
    assert results["o"].dtype == results["dq"].dtype == results["dk"].dtype == results["dv"].dtype == dtype
    assert {results[name].dtype for name in ("ht", "dq2", "dk2", "dg", "dbeta", "dinitial_state")} == {torch.float32}
    close(results, gradients(recurrent_triadic, exact), tolerance[dtype])
    once_rounded = {name: y.float() for name, y in x.items()}
    assert torch.equal(results["o"], op(**once_rounded)[0].to(dtype))


@OPS
def test_autocast_changes_nothing(op, inputs):
    x = inputs(T=70, states=1, dtype=torch.float32)
    expected = op(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = op(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)
    assert all(torch.equal(result, y) for result, y in zip(results, expected, strict=True))


def test_autocast_changes_no_gradient(inputs, gradients):
    x = inputs(T=70, states=1, dtype=torch.float32)
    expected = gradients(chunk_triadic, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = gradients(chunk_triadic, x)
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")
@OPS
def test_a_tracer_sees_the_op(op, inputs):
    """Kernels that run directly would leave no trace but their empty outputs."""
    x = {name: None if y is None else y.detach() for name, y in inputs(T=70).items()} | {"scale": 0.5}
    traced = torch.jit.trace(lambda q, k: op(**{**x, "q": q, "k": k})[0], (x["q"], x["k"]), check_trace=False)
    assert "triadic_kernels::" in str(traced.graph)
    assert torch.equal(traced(x["k"], x["q"]), op(**{**x, "q": x["k"], "k": x["q"]})[0])


def test_forward_mode(inputs, close, tolerance):
    """The recurrence follows it; the chunks, whose op would drop the tangent in silence, refuse it."""
    x = {name: None if y is None else y.detach() for name, y in inputs(T=5).items()}
    k, direction = x.pop("k"), torch.randn_like(x["q"])
    found = torch.func.jvp(lambda k: recurrent_triadic(k=k, **x)[0], (k,), (direction,))[1]
    after, before = (recurrent_triadic(k=k + step * direction, **x)[0] for step in (1e-6, -1e-6))
    close({"o": found}, {"o": (after - before) / 2e-6}, 1e-7)
    with pytest.raises(NotImplementedError, match="chunk_triadic has no forward-mode derivative"):
        torch.func.jvp(lambda k: chunk_triadic(k=k, **x)[0], (k,), (direction,))


@OPS
def test_layouts_do_not_matter(op, inputs, gradients, close, tolerance):
    """Transposed, sliced and expanded inputs and output gradients."""
    x = inputs(B=2, T=40, H=2, HV=4, states=2)
    odd = {name: y.detach().clone() for name, y in x.items()}
    odd["q"] = odd["q"].transpose(1, 3).contiguous().transpose(1, 3)
    odd["v"] = torch.stack([odd["v"], odd["v"]], -1)[..., 0]
    odd["beta"] = odd["beta"][:1, :1].expand(2, 40, 4)
    odd["g"] = odd["g"][..., :1].expand(2, 40, 4, 3)
    odd["initial_state"] = odd["initial_state"].mT.contiguous().mT
    assert not any(odd[name].is_contiguous() for name in ("q", "v", "beta", "g", "initial_state"))
    plain = {name: y.contiguous().requires_grad_() for name, y in odd.items()}
    odd = {name: y.requires_grad_() for name, y in odd.items()}

    def transposed(**inputs):
        o, ht = op(**inputs)
        return o.transpose(1, 2).contiguous().transpose(1, 2), ht.mT.contiguous().mT

    close(gradients(transposed, odd), gradients(op, plain), tolerance[torch.float64])
    o, ht = op(**odd, output_final_state=True)
    (expanded,) = torch.autograd.grad([o.sum(), ht.sum()], odd["k"])
    o, ht = op(**plain, output_final_state=True)
    (dense,) = torch.autograd.grad([o, ht], plain["k"], [torch.ones_like(o), torch.ones_like(ht)])
    close({"dk": expanded}, {"dk": dense}, tolerance[torch.float64])


@pytest.mark.gpu
@OPS
def test_torch_back_end_on_a_gpu(op, inputs, gradients, close, tolerance):
    x = inputs(T=140, states=3)
    cu_seqlens = torch.tensor([0, 1, 71, 140])
    on_gpu = {name: y.detach().cuda().requires_grad_() for name, y in x.items()}
    results = gradients(op, on_gpu, cu_seqlens=cu_seqlens.cuda(), backend="torch")
    expected = gradients(op, x, cu_seqlens=cu_seqlens)
    close({name: y.cpu() for name, y in results.items()}, expected, tolerance[torch.float64])


def test_results_repeat_to_the_bit(inputs, gradients):
    x = inputs(T=140, states=2, dtype=torch.float32)
    first, second = (gradients(chunk_triadic, x, cu_seqlens=torch.tensor([0, 99, 140])) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_uninitialised_memory_is_never_read(inputs, gradients, monkeypatch):
    x = inputs(T=140, states=2, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, 96, 140])  # fewer chunks than there is room for
    expected = gradients(chunk_triadic, x, cu_seqlens=cu_seqlens)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        results = gradients(chunk_triadic, x, cu_seqlens=cu_seqlens)
        arguments = (*(x[name].detach() for name in POSITIONAL), cu_seqlens, 0.5, True, True, True, "torch", False, "x")
        outputs = torch.ops.triadic_kernels.chunk_forward(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert all(y.isfinite().all() for y in outputs), "what is kept for the backward is defined to the last row"


def test_importing_a_module_twice_leaves_both_working(inputs, gradients, close, tolerance):
    spec = importlib.util.spec_from_file_location("triadic_kernels.op", op.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    x = inputs(T=40)
    close(gradients(again.chunk_triadic, x), gradients(op.chunk_triadic, x), tolerance[torch.float64])


def test_a_copy_of_nine_files_is_enough(tmp_path, monkeypatch, inputs, gradients, close, tolerance):
    """Remote code of an exported model: no GPU back ends beside it, its own package name, its own registration."""
    package = tmp_path / "flat-copy.of_ops"
    package.mkdir()
    for name in ("op", "checks", "recurrent", "segments", "dispatch", "transforms", "reference", "packing", "conv"):
        shutil.copy(FOLDER / f"{name}.py", package)
    spec = importlib.util.spec_from_loader("flat_copy", loader=None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setitem(sys.modules, "flat_copy", importlib.util.module_from_spec(spec))
    copy = importlib.import_module("flat_copy.op")
    try:
        assert copy.NAMESPACE == "flat_copy"
        x = inputs(T=40)
        close(gradients(copy.chunk_triadic, x), gradients(chunk_triadic, x), tolerance[torch.float64])
        lines = copy.explain(**x).splitlines()
        assert all("not installed" in line for line in lines[:-1])
        assert lines[-1] == "torch: selected"
    finally:
        for name in [name for name in sys.modules if name.startswith("flat_copy.")]:
            del sys.modules[name]
