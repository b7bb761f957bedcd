"""Which problems the GPU back ends take, and why not the others."""

import pytest
import torch
from triadic_kernels import dispatch

pytestmark = pytest.mark.triton

HOPPER = dispatch.Problem(
    B=2, T=65, H=2, HV=4, K=128, V=128, E=8, N=2, dtype=torch.bfloat16, device_type="cuda", capability=(9, 0),
    delta_rule=True, scale=0.1, has_q2=True, gate="slice", has_beta=True, state=None, output_final=False,
    varlen=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("gluon_hopper", {}, None),
        ("gluon_hopper", dict(capability=(8, 0)), "compute capability 9.0"),
        ("gluon_hopper", dict(capability=(10, 0)), "compute capability 9.0"),
        ("gluon_hopper", dict(dtype=torch.float16), "bfloat16"),
        ("gluon_hopper", dict(K=64), "K=64"),
        ("gluon_hopper", dict(E=3), "E=3"),
        ("gluon_hopper", dict(T=0), "at least one token"),
        ("triton", dict(E=3, K=64, V=256, dtype=torch.float32, capability=(8, 9)), None),
        ("triton", dict(capability=(7, 5)), "8.0"),
        ("triton", dict(dtype=torch.float64), "float64"),
        ("triton", dict(V=96), "V=96"),
        ("triton", dict(E=33), "E=33"),
        ("triton", dict(device_type="cpu", capability=None), "CUDA device"),
    ],
)
def test_support(backend, change, reason):
    refusal = dispatch.refusal(dispatch.CHUNK[backend], HOPPER._replace(**change))
    assert refusal is None if reason is None else reason in refusal
