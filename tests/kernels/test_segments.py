"""segment_size changes what the backward keeps, and nothing that comes out."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from triadic_kernels import chunk_triadic, recurrent_triadic


@pytest.mark.parametrize("size", [1, 64, 100, 129])
def test_a_batch(size, inputs, gradients, close, tolerance):
    x = inputs(B=2, T=130, states=2)
    found = gradients(chunk_triadic, x, segment_size=size)
    close(found, gradients(recurrent_triadic, x), tolerance[torch.float64])


@pytest.mark.parametrize("size", [7, 64])
@pytest.mark.parametrize("bounds", [[0, 1, 3, 60, 60, 130], [0, 64, 128, 130], [0, 130]])
def test_packed_documents(bounds, size, inputs, gradients, close, tolerance):
    x, cu_seqlens = inputs(T=130, states=len(bounds) - 1), torch.tensor(bounds)
    found = gradients(chunk_triadic, x, cu_seqlens=cu_seqlens, segment_size=size)
    close(found, gradients(recurrent_triadic, x, cu_seqlens=cu_seqlens), tolerance[torch.float64])


def test_absent_inputs_and_no_final_state(inputs, close, tolerance):
    x = inputs(T=130, E=None, gate=None, beta=False)

    def outcome(**options):
        o, ht = chunk_triadic(**x, delta_rule=False, use_qk_l2norm_in_kernel=True, scale=0.3, **options)
        assert ht is None
        return {"o": o, "dq": torch.autograd.grad(o.square().sum(), x["q"])[0]}

    close(outcome(segment_size=64), outcome(), tolerance[torch.float64])


def test_less_is_kept(inputs):
    x = inputs(T=1024, K=16, V=16)

    def kept(**options):
        sizes = {}
        with saved_tensors_hooks(
            lambda t: sizes.setdefault(t.untyped_storage().data_ptr(), t.nbytes) and t, lambda t: t
        ):
            chunk_triadic(**x, **options)
        return sum(sizes.values())

    inputs_alone = sum(t.nbytes for t in x.values() if t is not None)
    assert kept(segment_size=128) - inputs_alone < 0.5 * (kept() - inputs_alone)


def test_without_gradients_nothing_is_cut(inputs, monkeypatch):
    monkeypatch.setattr("triadic_kernels.op.in_segments", None)
    x = inputs(T=130)
    with torch.no_grad():
        assert torch.equal(chunk_triadic(**x, segment_size=64)[0], chunk_triadic(**x)[0])


@pytest.mark.parametrize("size", [0, -64, 64.0, True, torch.tensor(64)])
def test_bad_size(size, inputs):
    with pytest.raises(
        ValueError, match=r"segment_size is .*; pass a number of tokens >= 1, best a multiple of 64, or None"
    ):
        chunk_triadic(**inputs(), segment_size=size)
