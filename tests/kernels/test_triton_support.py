"""Chunk tables against a plain enumeration; which problems the GPU back ends take, and why not the others."""

import pytest
import torch
from triadic_kernels import chunks, dispatch

pytestmark = pytest.mark.triton

HOPPER = dispatch.Problem(
    B=2, T=65, H=2, HV=4, K=128, V=128, E=8, N=2, dtype=torch.bfloat16, device_type="cuda", capability=(9, 0),
    delta_rule=True, scale=0.1, has_q2=True, gate="slice", has_beta=True, state=None, output_final=False,
    varlen=False,
)  # fmt: skip


def enumerate_chunks(lengths):
    """[(sequence, first row, rows)] of every chunk, in order."""
    table, start = [], 0
    for n, length in enumerate(lengths):
        table += [(n, start + i, min(64, length - i)) for i in range(0, length, 64)]
        start += length
    return table


@pytest.mark.parametrize("lengths", [[1], [64], [65, 1], [1, 70, 2, 0, 64], [0, 0, 130, 0], [3] * 100])
def test_packed_tables(lengths):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    table, sequences, order = chunks.tables(1, sum(lengths), cu, cu.device)
    want = enumerate_chunks(lengths)
    assert table.shape[0] == sum(lengths) // 64 + len(lengths)
    assert table[: len(want)].tolist() == [list(row) for row in want]
    assert table[len(want) :, 2].eq(0).all(), "chunks beyond the last one hold no rows"
    for n, length in enumerate(lengths):
        first, count = sequences[n].tolist()
        assert count == -(-length // 64)
        assert all(row[0] == n for row in want[first : first + count])
    assert [lengths[n] for n in order.tolist()] == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 64), (2, 130)])
def test_batch_tables_are_those_of_equal_documents(B, T):
    cu = torch.arange(B + 1) * T
    batch = chunks.tables(B, T, None, cu.device)
    packed = chunks.tables(1, B * T, cu, cu.device)
    exact = chunks.count(B, T, B, varlen=False)
    assert torch.equal(batch[0], packed[0][:exact])
    assert torch.equal(batch[1], packed[1])
    assert torch.equal(batch[2], packed[2])


def test_layers_share_the_tables_of_their_documents(monkeypatch):
    """One build for the same unchanged tensor; none shared by equal tensors, changed ones or other lengths, nor through
    torch.library.
    """
    cu = torch.tensor([0, 70, 100])
    assert chunks.tables(1, 100, cu, cu.device) is not chunks.tables(1, 100, cu, cu.device)
    monkeypatch.setattr(dispatch.CALL, "direct", True)
    first = chunks.tables(1, 100, cu, cu.device)
    assert chunks.tables(1, 100, cu, cu.device) is first
    cu[1] = 30
    changed = chunks.tables(1, 100, cu, cu.device)
    assert changed[0][:3].tolist() == [[0, 0, 30], [1, 30, 64], [1, 94, 6]]
    assert first[0][:3].tolist() == [[0, 0, 64], [0, 64, 6], [1, 70, 30]], "what the first caller holds stays"
    assert chunks.tables(1, 100, cu.clone(), cu.device) is not changed
    longer = chunks.tables(1, 300, cu, cu.device)
    assert longer[0].shape[0] == chunks.count(1, 300, 2, varlen=True)
    with torch.inference_mode():
        unversioned = torch.tensor([0, 70, 100])
        chunks.tables(1, 100, unversioned, cu.device)
        unversioned[1] = 30
        assert torch.equal(chunks.tables(1, 100, unversioned, cu.device)[0], changed[0])


@pytest.mark.parametrize("kept", [True, False])
def test_one_packed_batch_is_not_mistaken_for_another(kept, monkeypatch):
    """Whether the other is still there, or gone and its address taken again."""
    monkeypatch.setattr(dispatch.CALL, "direct", True)
    others = []
    for first in range(1, 50):
        cu = torch.tensor([0, first, 100])
        table, _, _ = chunks.tables(1, 100, cu, cu.device)
        others += [cu] * kept
        assert table[:, 2].sum() == 100
        assert table[0].tolist() == [0, 0, first]


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
