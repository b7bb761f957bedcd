"""Every misuse of the ops raises ValueError with a sentence that names the argument and what is allowed."""

import pytest
import torch
from triadic_kernels import causal_conv1d, chunk_triadic, explain, recurrent_triadic

OPS = pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic])
B, T, H, HV, K, V, E = 2, 10, 2, 4, 5, 7, 3


def changed(inputs, **replacements):
    return {name: replacements.get(name, x) for name, x in inputs(B=B, T=T, states=B).items()} | {
        name: x for name, x in replacements.items() if name in ("cu_seqlens", "backend")
    }


BAD_METADATA = {
    "q without dimensions": (dict(q=torch.tensor(1.0).double()), r"q has shape \[\] and v .* pass \[B, T, H, K\]"),
    "q as a list": (dict(q=[1.0]), "q is of type list; pass a torch.Tensor"),
    "no k": (dict(k=None), "k is of type NoneType; pass a torch.Tensor"),
    "cu_seqlens as a list": (dict(cu_seqlens=[0, 10]), "cu_seqlens is of type list; pass a torch.Tensor"),
    "q2 without dimensions": (dict(q2=torch.tensor(1.0).double()), r"q2 has shape \[\]; pass \[B, T, H, E\]"),
    "K of 0": (dict(q=torch.zeros(B, T, H, 0).double()), "heads and head sizes must be at least 1"),
    "HV of 0": (dict(v=torch.zeros(B, T, 0, V).double()), "heads and head sizes must be at least 1"),
    "V of 0": (dict(v=torch.zeros(B, T, HV, 0).double()), "heads and head sizes must be at least 1"),
    "q of 3 dimensions": (dict(q=torch.zeros(B, T, K).double()), r"q has shape \[2, 10, 5\].* pass \[B, T, H, K\]"),
    "v of 3 dimensions": (dict(v=torch.zeros(B, T, V).double()), r"v \[2, 10, 7\].* \[B, T, HV, V\]"),
    "k of another size": (dict(k=torch.zeros(B, T, H, K + 1).double()), r"k has shape .* pass \[B, T, H, K\], here"),
    "v of another length": (dict(v=torch.zeros(B, T + 1, HV, V).double()), r"v has shape .* pass \[B, T, HV, V\]"),
    "HV no multiple of H": (
        dict(v=torch.zeros(B, T, 3, V).double()),
        "v has 3 heads, which is not a multiple of the 2",
    ),
    "q2 without k2": (dict(k2=None), "q2 was given without the other; pass both"),
    "k2 without q2": (dict(q2=None), "k2 was given without the other; pass both"),
    "k2 with another E": (dict(k2=torch.zeros(B, T, H, E + 1).double()), r"k2 has shape .* pass \[B, T, H, E\], here"),
    "E of 0": (dict(q2=torch.zeros(B, T, H, 0).double(), k2=torch.zeros(B, T, H, 0).double()), "size 0; pass E >= 1"),
    "g with another E": (dict(g=torch.zeros(B, T, HV, E + 1).double()), r"g has shape .* pass \[B, T, HV, E\] or"),
    "g with key heads": (dict(g=torch.zeros(B, T, H).double()), r"g has shape .* pass \[B, T, HV, E\] or \[B, T, HV\]"),
    "g of 2 dimensions": (dict(g=torch.zeros(B, T).double()), r"g has shape \[2, 10\]; pass"),
    "beta with a last dimension": (
        dict(beta=torch.zeros(B, T, HV, 1).double()),
        r"beta has shape .* \[B, T, HV\], here",
    ),
    "state of another N": (
        dict(initial_state=torch.zeros(3, HV, E, K, V).double()),
        r"initial_state has .* \[N, HV, E, K",
    ),
    "state with K and V exchanged": (
        dict(initial_state=torch.zeros(B, HV, E, V, K).double()),
        "initial_state has shape",
    ),
    "q of integers": (
        dict(q=torch.zeros(B, T, H, K).long()),
        "q has dtype torch.int64; pass float64, float32, bfloat16",
    ),
    "k of another dtype": (dict(k=torch.zeros(B, T, H, K)), "k has dtype torch.float32; pass torch.float64, as q"),
    "v of another dtype": (dict(v=torch.zeros(B, T, HV, V).half()), "v has dtype torch.float16; pass torch.float64"),
    "g in single precision": (dict(g=torch.zeros(B, T, HV, E)), "g has dtype torch.float32; pass torch.float64, as q"),
    "state in single precision": (dict(initial_state=torch.zeros(B, HV, E, K, V)), "initial_state has dtype .*float32"),
    "beta elsewhere": (dict(beta=torch.zeros(B, T, HV, device="meta").double()), "beta is on meta, but q is on cpu"),
    "k elsewhere": (dict(k=torch.zeros(B, T, H, K, device="meta").double()), "k is on meta, but q is on cpu; move it"),
    "cu_seqlens with a batch": (dict(cu_seqlens=torch.tensor([0, 20])), "one packed row, but the batch size is 2"),
    "cu_seqlens of floats": (
        dict(cu_seqlens=torch.tensor([0.0, 10.0])),
        "cu_seqlens has dtype torch.float32; pass int32",
    ),
    "cu_seqlens of one bound": (dict(cu_seqlens=torch.tensor([0])), r"cu_seqlens has shape \[1\]; pass \[N \+ 1\]"),
    "cu_seqlens of 2 dimensions": (dict(cu_seqlens=torch.tensor([[0, 10]])), r"cu_seqlens has shape \[1, 2\]; pass"),
}


@pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic, explain])
@pytest.mark.parametrize(("replacements", "message"), BAD_METADATA.values(), ids=BAD_METADATA.keys())
def test_bad_metadata(op, replacements, message, inputs):
    with pytest.raises(ValueError, match=message):
        op(**changed(inputs, **replacements))


@OPS
def test_gates_of_low_precision_inputs_are_float32(op, inputs):
    x = inputs(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"q2 has dtype torch.bfloat16; pass torch.float32, as q is torch.bfloat16"):
        op(**{**x, "q2": x["q2"].bfloat16()})


BAD_BOUNDS = {
    "late start": ([1, 10], "cu_seqlens starts at 1, but the first document starts at token 0"),
    "decreasing": ([0, 6, 4, 10], "cu_seqlens decreases from 6 to 4 at document 1"),
    "short": ([0, 4, 9], "cu_seqlens ends at 9, but the input has 10 tokens"),
    "long": ([0, 4, 11], "cu_seqlens ends at 11, but the input has 10 tokens"),
}


@OPS
@pytest.mark.parametrize(("bounds", "message"), BAD_BOUNDS.values(), ids=BAD_BOUNDS.keys())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_boundaries(op, bounds, message, dtype, inputs):
    with pytest.raises(ValueError, match=message):
        op(**inputs(T=10), cu_seqlens=torch.tensor(bounds, dtype=dtype))


@pytest.mark.parametrize(("bounds", "message"), BAD_BOUNDS.values(), ids=BAD_BOUNDS.keys())
def test_bad_boundaries_of_the_convolution(bounds, message):
    with pytest.raises(ValueError, match=message):
        causal_conv1d(torch.zeros(1, 10, 3), torch.zeros(3, 4), cu_seqlens=torch.tensor(bounds))


@OPS
@pytest.mark.parametrize("gate", ["slice", "head"])
def test_growing_gate(op, gate, inputs):
    x = inputs(gate=gate)
    x["g"] = x["g"].detach()
    x["g"].view(-1)[7] = 0.25
    with pytest.raises(ValueError, match=r"g reaches 0.25, but log decays must be <= 0; pass log\(alpha\)"):
        op(**x)


@OPS
def test_unknown_backend(op, inputs):
    with pytest.raises(ValueError, match=r"backend='cuda' is unknown; choose one of auto, .*torch"):
        op(**inputs(), backend="cuda")


BAD_CONVOLUTIONS = {
    "x of 2 dimensions": (dict(x=torch.zeros(10, 3)), r"x has shape \[10, 3\]; pass \[B, T, D\]"),
    "x of integers": (dict(x=torch.zeros(2, 10, 3).long()), "x has dtype torch.int64; pass a floating dtype"),
    "weight of conv1d's shape": (dict(weight=torch.zeros(3, 1, 4)), r"weight has shape \[3, 1, 4\]; pass \[D, W\]"),
    "weight of other channels": (
        dict(weight=torch.zeros(4, 4)),
        r"weight has shape \[4, 4\]; pass \[D, W\], here \[3, W\]",
    ),
    "weight of integers": (
        dict(weight=torch.zeros(3, 4).long()),
        "weight has dtype torch.int64; pass a floating dtype",
    ),
    "weight elsewhere": (dict(weight=torch.zeros(3, 4, device="meta")), "weight is on meta, but x is on cpu"),
    "state of full width": (
        dict(initial_state=torch.zeros(2, 3, 4)),
        r"initial_state has .* \[N, D, W - 1\], here \[2, 3",
    ),
    "state elsewhere": (dict(initial_state=torch.zeros(2, 3, 3, device="meta")), "initial_state is on meta, but x is"),
    "unknown activation": (dict(activation="swish"), "activation='swish' is unknown; choose one of .*'silu'"),
    "cu_seqlens with a batch": (dict(cu_seqlens=torch.tensor([0, 20])), "one packed row, but the batch size is 2"),
}


@pytest.mark.parametrize(("replacements", "message"), BAD_CONVOLUTIONS.values(), ids=BAD_CONVOLUTIONS.keys())
def test_bad_convolutions(replacements, message):
    arguments = dict(x=torch.zeros(2, 10, 3), weight=torch.zeros(3, 4)) | replacements
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**arguments)


def test_values_on_other_devices_are_read_on_request_only(inputs, monkeypatch):
    """With check=False nothing that is not on the CPU is read: meta tensors have no values."""
    x = {name: y.detach().to("meta") for name, y in inputs(T=10).items() if y is not None}
    cu_seqlens = torch.tensor([0, 4, 10], device="meta")
    o, ht = chunk_triadic(**x, cu_seqlens=cu_seqlens, output_final_state=True)
    assert o.shape == (1, 10, 4, 7)
    assert ht.shape == (2, 4, 3, 5, 7)
