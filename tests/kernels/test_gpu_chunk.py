"""The GPU back ends against the token recurrence in float64: output, final state, every gradient, twice; and that they
compile for no new length.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triadic_kernels import chunk_triadic

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("triton_cases.py")


@pytest.fixture
def measured(judge, tmp_path):
    """measured(argument, ...): runs triton_cases.py on the GPU, in so many processes, and judges its rows."""

    def run(*arguments, processes=1):
        command, started = [sys.executable, PROGRAM, "--device", "cuda", *arguments], []
        for i in range(processes):
            with (tmp_path / f"{i}.jsonl").open("w") as out, (tmp_path / f"{i}.err").open("w") as err:
                started.append(subprocess.Popen([*command, "--shard", f"{i}/{processes}"], stdout=out, stderr=err))
        codes = [process.wait() for process in started]
        assert not any(codes), [(tmp_path / f"{i}.err").read_text()[-3000:] for i, code in enumerate(codes) if code]
        lines = [line for i in range(processes) for line in (tmp_path / f"{i}.jsonl").read_text().splitlines()]
        judge([json.loads(line) for line in lines])

    return run


@pytest.mark.parametrize("cases", ["small", "slow", "large"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_triton(cases, dtype, measured):
    measured(cases, "--backend", "triton", "--dtypes", dtype)


def test_gluon_hopper(measured):
    measured("large", "--backend", "gluon_hopper", "--dtypes", "bfloat16", "--only-supported")


@pytest.mark.timeout(3600)  # seconds, most of them for compilation
@pytest.mark.parametrize(
    ("backend", "dtype"), [("gluon_hopper", "bfloat16"), ("triton", "bfloat16"), ("triton", "float32")]
)
def test_pairwise(backend, dtype, measured):
    measured("pairwise", "--backend", backend, "--dtypes", dtype, "--only-supported", processes=8)


def leaves(B, T):
    """Tensors of a call."""
    H, E, D = 2, 8, 128

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(B, T, H, *shape, device="cuda", dtype=dtype)

    x = dict(q=normal(D), k=normal(D), v=normal(D))
    x |= dict(q2=normal(E, dtype=torch.float32), k2=normal(E, dtype=torch.float32))
    x |= dict(g=-normal(E, dtype=torch.float32).abs(), beta=normal(dtype=torch.float32).sigmoid())
    return {
        name: (t / t.norm(dim=-1, keepdim=True) if name[0] in "qk" else t).requires_grad_() for name, t in x.items()
    }


def on_gpu(bounds):
    return None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")


def outcome(function, x, *arguments):
    """Its output and the gradients of x."""
    o = function(x, *arguments)
    return [o, *torch.autograd.grad(o, list(x.values()), torch.ones_like(o))]


def forward_and_backward(backend, T, bounds=None):
    """One call with gradients, all T tokens in one document or in those between the bounds."""
    found = outcome(packed, leaves(1 if bounds else 2, T), on_gpu(bounds), backend)
    assert all(t.isfinite().all() for t in found)


def packed(x, cu_seqlens, backend="auto"):
    return chunk_triadic(**x, cu_seqlens=cu_seqlens, backend=backend)[0]


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_no_compilation_and_no_tuning_for_50_other_lengths(backend, monkeypatch):
    import triton

    def refuse(self, *arguments, **options):
        raise AssertionError(f"{self.fn.__name__} goes through the compiler again")

    forward_and_backward(backend, 100)
    forward_and_backward(backend, 100, [0, 30, 100])
    monkeypatch.setattr(triton.JITFunction, "run", refuse)
    lengths = random.Random(0)
    for T in [1, 64, *lengths.sample(range(2, 6000), 48)]:
        forward_and_backward(backend, T)
        forward_and_backward(backend, T, [0, *sorted(lengths.choices(range(T + 1), k=lengths.randrange(4))), T])


def two_packings(x, cu_seqlens):
    """The second one's bounds come when the first's are no longer needed: Inductor puts them in the same tensor."""
    o = packed(x, cu_seqlens + 0)
    later = 64 * (o.float().abs().max() >= 0) * (cu_seqlens > 0) * (cu_seqlens < o.shape[1])
    return o + packed(x, (cu_seqlens + later).int())


@pytest.mark.parametrize("grad", [True, False])
def test_one_tensor_with_the_bounds_of_two_packings(grad):
    x, cu_seqlens = leaves(1, 1000), on_gpu([0, 70, 333, 1000])
    with torch.set_grad_enabled(grad):
        run = outcome if grad else lambda function, *arguments: [function(*arguments)]
        found, wanted = (run(function, x, cu_seqlens) for function in (torch.compile(two_packings), two_packings))
    assert all(map(torch.equal, found, wanted))


def test_a_cuda_graph_replayed_with_other_bounds():
    x, static, stream = leaves(1, 1000), on_gpu([0, 70, 333, 1000]), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        outcome(packed, x, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outcome(packed, x, static)
    for bounds in ([0, 70, 333, 1000], [0, 500, 501, 1000]):
        static.copy_(on_gpu(bounds))
        graph.replay()
        assert all(map(torch.equal, found, outcome(packed, x, on_gpu(bounds))))


@pytest.mark.parametrize("bounds", [None, [0, 70, 333, 1000]])
def test_compiled_into_cuda_graphs(bounds):
    """Nothing that the op keeps lies in the graphs' memory, which Inductor would refuse."""
    x, compiled = leaves(1, 1000), torch.compile(packed, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in outcome(compiled, x, on_gpu(bounds))]
    assert all(map(torch.equal, found, outcome(packed, x, on_gpu(bounds))))
