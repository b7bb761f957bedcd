"""What the GPU back ends hand out is what their ops' fakes promise a compiler: dtypes, shapes, strides, and memory that
nothing else has. Only the kernels themselves do not run, so no GPU is needed.
"""

import itertools
from collections import defaultdict

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map
from triadic_kernels import dispatch, launch, op, recurrent

pytestmark = pytest.mark.triton
SIZES = dict(T=70, H=2, HV=4, K=128, V=128, E=8, dtype=torch.bfloat16)
NAMES = ("q", "k", "v", "q2", "k2", "g", "beta", "initial_state")


@pytest.fixture
def back_end(monkeypatch):
    """A module that takes tensors of the CPU for those of a Hopper GPU and launches nothing."""

    def load(row):
        module = dispatch.load(row)
        monkeypatch.setattr(module, "unsupported", lambda p: None)
        monkeypatch.setattr(launch.Launcher, "__call__", lambda *arguments: None)
        if hasattr(module, "processors"):
            monkeypatch.setattr(module, "processors", lambda index: 132)
        for caller in (op, recurrent):
            monkeypatch.setattr(
                caller, "problem", lambda *a, **k: dispatch.problem(*a, **k)._replace(capability=(9, 0))
            )

    return load


def gaps(x):
    """The same shape, as a compiler may lay it out: rows further apart than they are long."""
    return None if x is None else torch.nn.functional.pad(x.detach(), (0, 3))[..., : x.shape[-1]]


def far(x):
    """The same shape, contiguous, but where a dimension has size 1, or the tensor no element, with any stride."""
    if x is None:
        return None
    strides = [999 if x.numel() == 0 or n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    return x.detach().as_strided(x.shape, strides)


LAYOUTS = pytest.mark.parametrize("layout", [gaps, far])


def described(tensors):
    return [(x.dtype, x.shape, x.stride(), x.device) for x in tensors]


def promised(call, given, *options):
    """What `call` returns for fakes of the given tensors, None and lists of tensors."""
    with FakeTensorMode() as mode:
        fakes = tree_map(lambda x: x if x is None else mode.from_tensor(x), given)
        return described(call(*fakes, *options))


def own_memory(outputs, inputs):
    """Whether no output shares memory with another one or with an input."""
    places = [x.untyped_storage().data_ptr() for x in outputs if x.numel()]
    given = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
    return len(set(places)) == len(places) and not given & set(places)


@LAYOUTS
@pytest.mark.parametrize("row", ["triton", "gluon_hopper"])
@pytest.mark.parametrize(("packed", "states"), itertools.product([False, True], repeat=2))
@pytest.mark.parametrize("changes", [{}, {"E": None, "gate": None, "beta": False}, {"E": 2, "gate": "head"}])
def test_chunks(row, packed, states, changes, layout, inputs, back_end):
    back_end(dispatch.CHUNK[row])
    x = inputs(**SIZES | changes, B=1 if packed else 2, states=(3 if packed else 2) if states else None)
    cu_seqlens = torch.tensor([0, 1, 1, 70]) if packed else None
    tensors = [*(layout(x[name]) for name in NAMES), cu_seqlens]
    call, back = (getattr(torch.ops.triadic_kernels, f"chunk_{way}") for way in ("forward", "backward"))
    for keep in (False, True):
        options = (0.5, True, states, keep, row, False, "x")
        outputs = call(*tensors, *options)
        assert described(outputs) == promised(call, tensors, *options)
        assert own_memory(outputs, tensors)
    do, saved = layout(outputs[0]), outputs[1 + states :]
    dht = layout(outputs[1]) if states else None
    options = (0.5, True, states, row)
    gradients = back(*tensors, saved, do, dht, *options)
    assert described(gradients) == promised(back, [*tensors, saved, do, dht], *options)
    assert described(gradients) == described(y.new_empty(y.shape) for y in tensors[:8] if y is not None)
    assert own_memory(gradients, [*tensors, *saved, do, dht])


@LAYOUTS
@pytest.mark.parametrize(
    ("row", "packed", "states", "final"),
    [*itertools.product(["triton"], *[[False, True]] * 3), ("gluon_hopper", False, True, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps(row, packed, states, final, dtype, layout, inputs, back_end):
    """States in both dtypes, new ones and in place."""
    back_end(dispatch.RECURRENT[row])
    x = inputs(**SIZES | {"T": 4 if row == "triton" else 1}, B=1 if packed else 2, states=2 if states else None)
    x["initial_state"] = x["initial_state"].to(dtype) if states else None
    tensors = [*(layout(x[name]) for name in NAMES), torch.tensor([0, 1, 4]) if packed else None]
    options = (0.5, True, final, row, False)
    outputs = torch.ops.triadic_kernels.recurrent_step(*tensors, *options)
    assert described(outputs) == promised(torch.ops.triadic_kernels.recurrent_step, tensors, *options)
    assert own_memory(outputs, tensors)
    if states:
        tensors[7] = tensors[7].contiguous() if layout is gaps else tensors[7]
        output = torch.ops.triadic_kernels.recurrent_step_(*tensors, *options)
        promise = promised(lambda *a: [torch.ops.triadic_kernels.recurrent_step_(*a)], tensors, *options)
        assert described([output]) == promise
        assert own_memory([output], tensors)


@LAYOUTS
@pytest.mark.parametrize("packed", [False, True])
def test_keys_and_values_in_one_pass(packed, layout, monkeypatch):
    kernels = dispatch.load("conv_triton")
    monkeypatch.setattr(kernels, "kernel", defaultdict(lambda: lambda *arguments, **options: None))
    rows, sizes, wide = (1 if packed else 2), [256, 0, 16], [False, False, True]
    x, weight = torch.randn(rows, 40, 272).bfloat16(), torch.randn(272, 4)
    cu_seqlens = torch.tensor([0, 3, 40]) if packed else None
    options = (sizes, [128, 0, 8], "silu,none,softplus")
    tensors = [layout(x), layout(weight), cu_seqlens]
    outputs = torch.ops.triadic_kernels.conv_features(*tensors, *options, wide)
    assert described(outputs) == promised(torch.ops.triadic_kernels.conv_features, tensors, *options, wide)
    assert own_memory(outputs, tensors)
    tensors.append([layout(y) for y in outputs])
    gradients = torch.ops.triadic_kernels.conv_features_backward(*tensors, *options)
    assert described(gradients) == promised(torch.ops.triadic_kernels.conv_features_backward, tensors, *options)
    assert described(gradients) == described([x, weight])
    assert own_memory(gradients, [*tensors[:3], *tensors[3]])
