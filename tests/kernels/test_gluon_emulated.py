"""The Gluon kernels on a CPU, run by gluon_emulator.py, against the token recurrence in float64; and the faults that
its machine, gluon_machine.py, is there to see.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EMULATOR = Path(__file__).with_name("gluon_emulator.py")
BF16 = torch.bfloat16


def emulate(*cases):
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, EMULATOR, *cases, "--backend", "gluon_hopper", "--dtypes", "bfloat16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.triton
def test_small_problems(judge):
    judge(emulate("hopper"))


@pytest.mark.triton
def test_inverse_is_as_exact_as_pairs_of_bfloat16():
    """A single bfloat16 in the place of a pair gives 1e-3, which the results of small problems do not tell."""
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, EMULATOR.with_name("gluon_inverse_cases.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [json.loads(line)["error"] for line in done.stdout.splitlines()]
    assert len(errors) == 2
    assert max(errors) < 1e-4, errors


@pytest.mark.slow
@pytest.mark.triton
def test_every_number_of_slices_and_every_feature(judge):
    judge(emulate("hopper_slow"))


@pytest.fixture
def hopper():
    """The emulator's machine as a module, within a program that runs."""
    spec = importlib.util.spec_from_file_location("gluon_machine", EMULATOR.with_name("gluon_machine.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.block = module.Block((0, 0, 0), (1, 1, 1), 4)
    return module


def stored(hopper, x):
    """x in shared memory, where wgmma and TMA may read it."""
    memory = hopper.Shared.allocate(x.dtype, list(x.shape))
    memory.store(hopper.tile(x))
    hopper.fence_async_shared()
    hopper.thread_barrier()
    return memory


def arrival(hopper, count=1):
    bar = hopper.Shared.allocate(torch.int64, [1])
    hopper.init(bar, count)
    return bar


def descriptor(x, block):
    return type("Descriptor", (), dict(base=x, shape=tuple(x.shape), block_shape=block))


def test_product_of_what_is_not_fenced(hopper):
    a = hopper.tile(torch.ones(64, 16, dtype=BF16))
    memory = hopper.Shared.allocate(BF16, [16, 8])
    zero = torch.zeros(64, 8)
    memory.store(hopper.tile(torch.ones(16, 8, dtype=BF16)))
    for step in (hopper.thread_barrier, hopper.fence_async_shared):  # the barrier must come behind the fence
        step()
        with pytest.raises(AssertionError, match="has not been fenced"):
            hopper.warpgroup_mma(a, memory, zero)
    hopper.thread_barrier()
    assert torch.equal(hopper.warpgroup_mma(a, memory, zero), torch.full((64, 8), 16.0))


def test_wait_that_does_not_cover(hopper):
    a, b = hopper.tile(torch.randn(64, 16).to(BF16)), stored(hopper, torch.randn(16, 8).to(BF16))
    zero = torch.zeros(64, 8)
    first, second = (hopper.warpgroup_mma(a, b, zero, is_async=True) for _ in range(2))
    with pytest.raises(TypeError):
        first + 1
    assert torch.equal(hopper.warpgroup_mma_wait(1, deps=[first]), a.float() @ b.read().float())
    with pytest.raises(AssertionError, match="does not cover"):
        hopper.warpgroup_mma_wait(1, deps=[second])


def test_memory_that_changes_under_a_product(hopper):
    b = stored(hopper, torch.randn(16, 8).to(BF16))
    x = hopper.warpgroup_mma(hopper.tile(torch.ones(64, 16, dtype=BF16)), b, torch.zeros(64, 8), is_async=True)
    b.store(b.load(None) + 1)
    hopper.fence_async_shared()
    hopper.thread_barrier()
    with pytest.raises(AssertionError, match="changed under it"):
        hopper.warpgroup_mma_wait(0, deps=[x])


def test_loads_arrive_at_their_barrier_and_not_before(hopper):
    x, bar = torch.randn(5, 8).to(BF16), arrival(hopper)
    memory = hopper.Shared.allocate(BF16, [4, 8])
    hopper.expect(bar, 4 * 8 * 2)
    hopper.async_load(descriptor(x, [4, 8]), [3, 0], bar, memory)
    assert memory.load(None).isnan().all()
    hopper.wait(bar, 0)
    assert torch.equal(memory.load(None), torch.cat([x[3:], torch.zeros(2, 8, dtype=BF16)]))  # beyond the end: zero


@pytest.mark.parametrize("size", [0, 62, 66])
def test_wait_that_never_ends(hopper, size):
    bar, memory = arrival(hopper), hopper.Shared.allocate(BF16, [4, 8])
    if size:
        hopper.expect(bar, size)
        hopper.async_load(descriptor(torch.ones(4, 8, dtype=BF16), [4, 8]), [0, 0], bar, memory)
    with pytest.raises(AssertionError, match="never ends"):
        hopper.wait(bar, 0)


def test_store_whose_memory_changes(hopper):
    out = torch.zeros(6, 8, dtype=BF16)
    memory = stored(hopper, torch.ones(4, 8, dtype=BF16))
    hopper.async_store(descriptor(out, [4, 8]), [4, 0], memory)
    assert out.sum(1).tolist() == [0, 0, 0, 0, 8, 8]  # what lies beyond the end is not written
    memory.store(memory.load(None) + 1)
    with pytest.raises(AssertionError, match="changed under it"):
        hopper.store_wait(0)
