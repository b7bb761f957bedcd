"""Chunk tables are kept between calls only where they stay true: against tables built anew."""

import pytest
import torch
from triadic_kernels import chunks
from triadic_kernels.dispatch import directly

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    for name in ("_latest", "_batches", "_captured"):
        monkeypatch.setattr(chunks, name, {})


def packed(cu_seqlens):
    return directly(chunks.tables, 1, 130, cu_seqlens, CPU)


def right(found, bounds):
    made = chunks._build(torch.tensor(bounds), chunks.count(1, 130, len(bounds) - 1, True))
    return all(map(torch.equal, found, made))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.copy_(torch.tensor([0, 100, 130])),
        lambda x: x[1:2].fill_(100),
        lambda x: setattr(x, "data", torch.tensor([0, 100, 130])),
        lambda x: x.set_(torch.tensor([0, 100, 130])),
    ],
)
def test_a_changed_tensor_is_read_again(change):
    cu_seqlens = torch.tensor([0, 20, 130])
    first = packed(cu_seqlens)
    assert right(first, [0, 20, 130])
    assert packed(cu_seqlens) is first
    change(cu_seqlens)
    assert right(packed(cu_seqlens), [0, 100, 130])


def test_inference_mode_leaves_nothing_behind():
    cu_seqlens = torch.tensor([0, 20, 130])
    with torch.inference_mode():
        assert right(packed(cu_seqlens), [0, 20, 130])
    assert not any(x.is_inference() for x in packed(cu_seqlens)), "autograd could not save them"


def test_a_cuda_graph_keeps_the_tables_it_read(monkeypatch):
    warm = chunks.tables(2, 70, None, CPU)
    monkeypatch.setattr(chunks, "_capturing", lambda device: True)
    assert chunks.tables(2, 70, None, CPU) is warm
    recorded = chunks.tables(2, 80, None, CPU)
    monkeypatch.setattr(chunks, "_capturing", lambda device: False)
    assert chunks.tables(2, 80, None, CPU) is not recorded, "it is filled by replays alone"
    for length in range(1, 2 * chunks.MANY):
        chunks.tables(1, length, None, CPU)
    assert len(chunks._batches) == chunks.MANY
    assert chunks.tables(2, 70, None, CPU) is warm


def test_a_stream_reads_no_tables_that_another_may_still_be_filling(monkeypatch):
    stream = ["first"]
    monkeypatch.setattr(chunks, "_place", lambda device: (device, stream[0]))
    made = {name: (stream.__setitem__(0, name), chunks.tables(2, 70, None, CPU))[1] for name in ("first", "second")}
    assert made["first"] is not made["second"]
    for name, tables in made.items():
        stream[0] = name
        assert chunks.tables(2, 70, None, CPU) is tables
    stream[0] = "a graph's"
    monkeypatch.setattr(chunks, "_capturing", lambda device: True)
    assert chunks.tables(2, 70, None, CPU) is made["first"]
