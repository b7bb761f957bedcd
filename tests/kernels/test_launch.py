"""Launches after the first: the same as Triton's own, shared by no two problems that need different kernels, never a
compilation. The driver is a stand-in that writes down what it is asked to start.
"""

import importlib
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triadic_kernels import chunk_triadic, chunks, decode, dispatch, gluon_compat, launch, op, triton_chunk
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "benchmarks"))  # as for the program itself
offline = importlib.import_module("offline")
CPU = torch.device("cpu")
SMALL = dispatch.Problem(
    B=1, T=70, N=1, scale=0.25, H=1, HV=2, K=16, V=16, E=1, dtype=torch.bfloat16, device_type="cuda",
    capability=(9, 0), delta_rule=True, has_q2=True, gate="slice", has_beta=True, state=None,
    output_final=False, varlen=False,
)  # fmt: skip


class Recorder(offline.StandIn):
    """Keeps (name of the kernel, everything its launcher is given) of every start."""

    def __init__(self, arch):
        super().__init__(arch)
        self.started = []

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.started.append((source.fn.__name__, arguments))


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(driver, "_active", Recorder(90))
        yield driver.active


@pytest.fixture
def started(recorder):
    recorder.started.clear()
    return recorder.started


@triton.jit(do_not_specialize=["n"])
def scaled(p_x, p_bias, p_y, scale, n, BLOCK: tl.constexpr, BIASED: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o, mask=o < n)
    if BIASED:
        x += tl.load(p_bias + o, mask=o < n)
    tl.store(p_y + o, scale * x, mask=o < n)


def plain(x):
    """Tensors by what Triton knows of them; descriptors by their contents."""
    if isinstance(x, TensorDescriptor):
        return plain(x.base), tuple(x.shape), tuple(x.strides), x.block_shape, x.layout
    return (x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else x


def assert_same_starts(first, later):
    """Grid, stream, function, metadata and arguments in order; hooks only where there are any."""
    for (name, a), (again, b) in zip(first, later, strict=True):
        assert name == again
        assert list(map(plain, a[:6] + a[9:])) == list(map(plain, b[:6] + b[9:]))
        assert b[6:9] == (None, None, None)


def test_later_launches_are_those_of_triton(started, monkeypatch):
    launcher = launch.Launcher(scaled, CPU, dict(BIASED=False, BLOCK=16, num_warps=1))
    x, y = torch.zeros(64), torch.zeros(64)
    launcher((2, 3, 1), x, None, y, 0.5, 60)
    monkeypatch.setattr(triton.JITFunction, "run", None)  # no more of it
    launcher((2, 3, 1), x, None, y, 0.5, 60)
    launcher((1, 1, 1), y, None, x, 0.25, 1)
    assert_same_starts(started[:1], started[1:2])
    _, arguments = started[2]
    assert arguments[:3] == (1, 1, 1)
    assert arguments[9] is y
    assert arguments[10:] == (None, x, 0.25, 1, 16, False)


@pytest.mark.parametrize(("dtype", "known"), [(torch.int32, "*i32"), (torch.int64, "*i64")])
def test_tables_of_packed_documents_are_launched_again(dtype, known, started, monkeypatch):
    """For any number of documents and rows, for bounds of either dtype, off alignment too."""
    cu_seqlens = torch.tensor([0, 1008, 0, 5, 70], dtype=dtype)
    chunks._launcher.cache_clear()
    chunks.tables(1, 1008, cu_seqlens[:2], CPU)  # a document and 16 rows: neither may be built into the kernel
    source = chunks._launcher(CPU, dtype).compiled.src
    assert [source.signature[name] for name in ("p_cu", "T", "N", "NC")] == [known, "i32", "i32", "i32"]
    assert not {(4,), (5,), (6,)} & set(source.attrs), "they are not taken for multiples of 16"
    monkeypatch.setattr(triton.JITFunction, "run", None)
    made = chunks.tables(1, 1008, cu_seqlens[:2], CPU)
    chunks.tables(1, 3000, cu_seqlens[2:], CPU)
    assert_same_starts(started[:1], started[1:2])
    assert all(x is y for x, y in zip(made, started[1][1][10:13], strict=True))
    _, arguments = started[2]
    assert arguments[:3] == (2, 1, 1)
    assert arguments[9].data_ptr() % 16 == 0
    assert arguments[9].tolist() == [0, 5, 70]
    assert arguments[13:16] == (3000, 2, 3000 // 64 + 2)


def test_a_profiler_sees_every_launch(started):
    launcher = launch.Launcher(scaled, CPU, dict(BIASED=False, BLOCK=32, num_warps=1))
    hooks = triton.knobs.runtime.launch_enter_hook
    x, calls = torch.zeros(64), []
    launcher((2, 1, 1), x, None, x, 0.5, 60)
    hooks.add(calls.append)
    try:
        launcher((2, 1, 1), x, None, x, 0.5, 60)
    finally:
        hooks.remove(calls.append)
    assert [arguments[7] is hooks for _, arguments in started] == [True, True]
    assert started[1][1][6] is not None, "what the hook is told"
    launcher((2, 1, 1), x, None, x, 0.5, 60)
    assert started[2][1][6:9] == (None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "gluon_hopper"])
def test_back_ends_launch_again_what_triton_launched(backend, recorder, started, monkeypatch):
    """The launches of an inference, a forward and a backward; then 50 other lengths without any
    compilation.
    """
    module = dispatch.load(dispatch.CHUNK[backend])
    p = SMALL._replace(K=128, V=128, E=2, capability=(9, 0)) if backend == "gluon_hopper" else SMALL
    offline.run_backend(module, p)
    first = list(started)
    assert [name for name, _ in first] == [
        *("tables_kernel", "gates_kernel", "masks_kernel", "forward_kernel") * 2,
        *("tables_kernel", "reverse_kernel", "state_gradients_kernel", "mask_gradients_kernel"),
    ]
    monkeypatch.setattr(triton.JITFunction, "run", None)
    started.clear()
    offline.run_backend(module, p)
    assert_same_starts(first[4:], started[4:])
    lengths = (dict(T=T) for T in random.Random(0).sample(range(2, 3000), 50))
    for change in (dict(T=1), dict(B=3, N=3, T=65), dict(scale=2.0), dict(B=2, N=2), *lengths):
        offline.run_backend(module, p._replace(**change))


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_steps_launch_again_what_triton_launched(state, recorder, started, monkeypatch):
    """Of the Gluon kernel: one program per multiprocessor and no more than tiles, whatever the batch."""
    module, p = dispatch.load(dispatch.RECURRENT["gluon_hopper"]), SMALL._replace(K=128, V=128, E=8)
    devices, current = [], module.current
    monkeypatch.setattr(module, "current", lambda device: (devices.append(device), current(device))[1])
    offline.run_recurrent(module, p, [state])
    monkeypatch.setattr(triton.JITFunction, "run", None)
    offline.run_recurrent(module, p, [state])
    assert_same_starts(started[:1], started[1:])
    for B in (3, 40):
        offline.run_recurrent(module, p._replace(B=B, N=B), [state])
    tiles = {"float32": 16, "bfloat16": 8}[state]  # of a sequence: two heads
    assert [arguments[0] for _, arguments in started] == [min(B * tiles, 132) for B in (1, 1, 3, 40)]
    assert devices == [CPU] * 4, "each on the device of its tensors"


def test_kinds_of_problems_and_devices_share_no_launcher():
    changes = [
        dict(H=2), dict(HV=1), dict(K=32), dict(V=32), dict(E=2), dict(dtype=torch.float16), dict(delta_rule=False),
        dict(capability=(8, 0)), dict(has_q2=False), dict(gate="head"), dict(gate=None), dict(has_beta=False),
        dict(state=torch.float32), dict(state=torch.bfloat16),
    ]  # fmt: skip
    problems = [SMALL, *(SMALL._replace(**change) for change in changes)]
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    kernels = (triton_chunk.gates, True), (triton_chunk.masks,), (triton_chunk.partial_gradients,)
    for kernel, *flags in (*kernels, (decode.step, 16, 4, True, False, None)):
        made = [kernel(p, device, *flags) for p, device in itertools.product(problems, devices)]
        assert len(set(map(id, made))) == len(made)
        assert kernel(SMALL._replace(B=4, T=9, N=4, scale=1.0), devices[1], *flags) is made[1]
    keeps = [triton_chunk.forward_recurrence(SMALL, CPU, keep) for keep in (True, False)]
    assert [x.constants["KEEP"] for x in keeps] == [True, False]


def shifted(x):
    """The same values 2 or 4 bytes off alignment."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def test_inputs_off_alignment_are_copied(monkeypatch):
    """A launcher's pointers are all at multiples of 16 bytes, wherever the inputs lie."""
    calls = []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, grid, *arguments: calls.append(arguments))
    q, k, v, do = (shifted(torch.randn(1, 70, heads, 16).bfloat16()) for heads in (1, 1, 2, 2))
    q2, k2, g, beta = (shifted(torch.randn(1, 70, *rest)) for rest in ((1, 1), (1, 1), (2, 1), (2,)))
    given = q, k, v, q2, k2, g, beta
    assert all(x.data_ptr() % 16 for x in (*given, do))
    saved = triton_chunk.forward(SMALL, *given, None, None, True)[2]
    triton_chunk.backward(SMALL, *given, None, None, list(map(shifted, saved)), do, None)
    calls = [arguments for arguments in calls if arguments[0] is not None]  # of bounds: not of the tables of a batch
    assert len(calls) == 6
    assert all(x.data_ptr() % 16 == 0 for arguments in calls for x in arguments if isinstance(x, torch.Tensor))
    assert all(map(torch.equal, (*calls[1][:2], calls[2][2], *calls[0][:4]), given))
    assert torch.equal(calls[3][2], do)


def test_tables_are_not_among_what_is_kept(monkeypatch):
    """Nor do the two ways share them: each makes its own, from the bounds that autograd watches over."""
    calls = []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, grid, *rest: calls.append((self.kernel, grid, rest)))
    q, k, v, do = (torch.randn(1, 70, heads, 16).bfloat16() for heads in (1, 1, 2, 2))
    given, cu_seqlens = (q, k, v, None, None, None, None, None), torch.tensor([0, 5, 70])
    p = SMALL._replace(N=2, varlen=True, has_q2=False, gate=None, has_beta=False)
    saved = triton_chunk.forward(p, *given, cu_seqlens, True)[2]
    triton_chunk.backward(p, *given, cu_seqlens, saved, do, None)
    (_, _, first), (_, _, second) = [call for call in calls if call[0].__name__ == "tables_kernel"]
    assert first[0] is second[0] is cu_seqlens
    tables = [{x.data_ptr() for x in filled} for filled in (first[1:4], second[1:4])]
    read = [{x.data_ptr() for x in rest if isinstance(x, torch.Tensor)} for _, _, rest in calls]
    assert [len(mine & tables[0]) for mine in read] == [3, 1, 1, 3, 0, 0, 0, 0], "tables, kernels 1 to 3 | 4 to 6"
    assert [len(mine & tables[1]) for mine in read] == [0, 0, 0, 0, 3, 3, 1, 1]
    assert not {x.data_ptr() for x in saved} & (tables[0] | tables[1])
    assert len(saved) == len(triton_chunk.saved_like(p, q, cu_seqlens)) == len(triton_chunk.saved_like(SMALL, q, None))


def test_gates_made_again_come_from_the_same_inputs(monkeypatch):
    """From 8 slices on the backward runs kernel 1 once more, on what the forward gave it, before kernel 6."""
    calls = []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, grid, *rest: calls.append((self.kernel, grid, rest)))
    q, k, v, do = (torch.randn(1, 70, heads, 16).bfloat16() for heads in (1, 1, 2, 2))
    given = q, k, v, torch.rand(1, 70, 1, 8), torch.rand(1, 70, 1, 8), -torch.rand(1, 70, 2, 8), torch.rand(1, 70, 2)
    p = SMALL._replace(E=8)
    saved = triton_chunk.forward(p, *given, None, None, True)[2]
    triton_chunk.backward(p, *given, None, None, saved, do, None)
    assert [kernel.__name__ for kernel, _, _ in calls[-3:]] == [
        *("state_gradients_kernel", "gates_kernel", "mask_gradients_kernel")
    ]
    first, again, last = calls[1], calls[-2], calls[-1]
    assert first[:2] == again[:2]
    assert all(map(torch.equal, first[2][:4], again[2][:4])), "q2, k2, g, beta"
    assert again[2][4] is calls[4][2][1], "chunks, of the backward"
    assert first[2][-2:] == again[2][-2:]
    tables_of_gates = {x.data_ptr() for x in again[2][7:11]}
    assert {x.data_ptr() for x in last[2][5:9]} == tables_of_gates, "kernel 6 reads what was made again"
    kept = {x.data_ptr() for x in saved}
    assert again[2][5:7] == (None, None), "tab and dec are those that were kept"
    assert not kept & tables_of_gates, "nothing that autograd keeps is written to"


@pytest.mark.parametrize(
    ("shape", "block", "bits"),
    [((130, 256), [64, 128], 16), ((130, 256), [64, 16], 16), ((6, 64), [2, 64], 32), ((4, 16, 128), [2, 16, 128], 16)],
)
def test_descriptors_are_those_of_triton(shape, block, bits):
    x = torch.zeros(shape, dtype=torch.bfloat16 if bits == 16 else torch.float32)
    made = gluon_compat.descriptor(x.flatten(), shape, block, bits)
    checked = TensorDescriptor.from_tensor(x, block, made.layout)
    assert made.base.data_ptr() != 0
    for name in ("shape", "strides", "block_shape", "layout", "padding"):
        assert getattr(made, name) == getattr(checked, name)
    assert made.layout.swizzle_byte_width == {(16, 128): 128, (16, 16): 32, (32, 64): 0}[bits, block[-1]]


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names = [*getattr(self, "names", []), str(function)]
        return function(*arguments, **(options or {}))


def test_the_op_is_there_for_those_who_look(inputs, gradients):
    """A dispatch mode sees one op each way; without one the same functions run directly, bit for bit the same."""
    x = inputs(T=70, states=1, dtype=torch.float32)
    assert "ChunkTriadic" in chunk_triadic(**x)[0].grad_fn.name()
    direct = gradients(chunk_triadic, x)
    with Seen() as seen:
        looked_at = gradients(chunk_triadic, x)
    own = [name for name in seen.names if name.startswith(op.NAMESPACE)]
    assert own == [f"{op.NAMESPACE}.chunk_forward.default", f"{op.NAMESPACE}.chunk_backward.default"]
    assert all(torch.equal(direct[name], looked_at[name]) for name in direct)


def test_aligned_copies_only_what_is_not():
    x = torch.arange(9.0)
    assert launch.aligned(x) is x
    assert launch.aligned(None) is None
    assert torch.equal(launch.aligned(x[1:]), x[1:])
    assert launch.aligned(x[1:]).data_ptr() % 16 == 0


def test_launches_go_to_the_device_of_the_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not isinstance(launch.current(torch.device("cuda", 1)), torch.cuda.device)
    assert not isinstance(launch.current(CPU), torch.cuda.device)
    other = launch.current(torch.device("cuda", 0))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 0
