"""The machine that gluon_emulator.py runs Gluon kernels on: shared memory, products (wgmma), barriers, TMA.

What can go wrong is made to: TMA loads arrive at the wait for their barrier and shared memory is NaN until then; a
product is computed when it is issued and again when it is waited for, and both must agree; accumulators cannot be read
before a wait that covers them; what threads stored to shared memory needs a fence and a barrier before wgmma or TMA may
read it; a TMA store's source must not change before store_wait; barriers count arrivals and bytes, and a wait that
cannot end is an error. Not seen: races between the warps of a program.
"""

import math
import threading
import types

import torch

WAIT_SECONDS = 60


class Tile(torch.Tensor):
    """A tensor in registers."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None, shape=self.shape, element_ty=self.dtype)

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def tile(x) -> Tile:
    return torch.as_tensor(x).as_subclass(Tile)


class Block:
    """What one running program has: its ids, products in flight, stores in flight, barriers; and the lock that lets one
    of its partitions run at a time."""

    def __init__(self, ids, grid, num_warps):
        self.ids, self.grid, self.num_warps = ids, grid, num_warps
        self.turn = threading.Condition()
        self.barriers, self.allocations, self.stores = {}, [], []
        self.partition = threading.local()

    @property
    def products(self) -> list:
        if not hasattr(self.partition, "products"):
            self.partition.products = []
        return self.partition.products


block: Block = None  # the program that runs

STORED, FENCED = 1, 2  # what a thread wrote to shared memory and wgmma and TMA may not see yet


class Shared:
    """Shared memory: bytes, and which byte each number of this view begins at."""

    def __init__(self, data, state, dtype, places):
        self.data, self.state, self.dtype, self.places = data, state, dtype, places
        self.shape, self.layout = list(places.shape), None

    @classmethod
    def allocate(cls, dtype, shape, layout=None):
        size = math.prod(shape) * dtype.itemsize
        data = torch.full((size,), 255, dtype=torch.uint8)  # NaN in every floating-point dtype
        block.allocations.append((data, torch.zeros(size, dtype=torch.uint8)))
        return cls(*block.allocations[-1], dtype, torch.arange(0, size, dtype.itemsize).view(shape))

    def view(self, places):
        return Shared(self.data, self.state, self.dtype, places)

    def index(self, i):
        return self.view(self.places[int(i)])

    def slice(self, start, length, dim=0):
        assert int(start) + length <= self.shape[dim], "a slice leaves its tile"
        return self.view(self.places.narrow(dim, int(start), length))

    def permute(self, order):
        return self.view(self.places.permute(order))

    def reinterpret(self, dtype, shape, layout):
        start, size = int(self.places.min()), self.places.numel() * self.dtype.itemsize
        assert math.prod(shape) * dtype.itemsize <= size, "a reinterpreted tile is larger than its memory"
        places = start + torch.arange(0, math.prod(shape) * dtype.itemsize, dtype.itemsize)
        return Shared(self.data, self.state, dtype, places.view(shape))

    def read(self):
        return self.data.view(self.dtype)[self.places // self.dtype.itemsize]

    def load(self, layout):
        return tile(self.read())

    def write(self, x, state=0):
        assert list(x.shape) == self.shape, f"{list(x.shape)} to a tile of {self.shape}"
        assert x.dtype == self.dtype, f"{x.dtype} to a tile of {self.dtype}"
        self.data.view(self.dtype)[self.places // self.dtype.itemsize] = x.as_subclass(torch.Tensor)
        self.state[self.places] = state

    def store(self, x):
        self.write(x, STORED)

    def visible(self):
        assert not self.state[self.places].any(), "wgmma or TMA reads what has not been fenced and passed a barrier"
        return self.read()


def fence_async_shared():
    for _, state in block.allocations:
        state[state == STORED] = FENCED


def thread_barrier():
    for _, state in block.allocations:
        state[state == FENCED] = 0


def same(x, y) -> bool:
    return torch.equal(x.nan_to_num(7), y.nan_to_num(7))


class Product:
    """A wgmma in flight, the `number`-th of its partition."""

    def __init__(self, a, b, acc):
        self.a, self.b, self.acc, self.done = a, b, acc, False
        self.value = self.compute()
        self.number = len(block.products)
        block.products.append(self)

    def compute(self):
        a = self.a.visible() if isinstance(self.a, Shared) else self.a
        start = self.acc.value if isinstance(self.acc, Product) else self.acc
        x = a.float() @ self.b.visible().float()
        return tile(x if start is None else start + x)

    def finish(self):
        assert torch.equal(self.value.nan_to_num(7), self.compute().nan_to_num(7)), (
            "a product's memory changed under it"
        )
        self.done = True


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    assert not any((a.shape[0] % 64, a.shape[1] % 16, b.shape[1] % 8)), "no wgmma has this shape"
    assert list(acc.value.shape if isinstance(acc, Product) else acc.shape) == [a.shape[0], b.shape[1]]
    product = Product(a, b, acc if use_acc else None)
    if is_async:
        return product
    return warpgroup_mma_wait(0, [product])


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    products = block.products
    for product in products[: len(products) - num_outstanding]:
        if not product.done:
            product.finish()
    for x in deps:
        assert not isinstance(x, Product) or x.done, "a product is used that the wait does not cover"
    values = [x.value if isinstance(x, Product) else x for x in deps]
    return values[0] if len(values) == 1 else tuple(values)


class Barrier:
    """An mbarrier: a phase ends when `count` arrivals and all expected bytes have come."""

    def __init__(self, count):
        self.count = self.left = count
        self.phase = self.bytes = 0
        self.loads = []

    def advance(self):
        while self.loads:
            target, x = self.loads.pop(0)
            target.write(x)
            self.bytes -= x.numel() * x.element_size()
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count


def barrier_of(memory) -> Barrier:
    return block.barriers[memory.data.data_ptr(), int(memory.places.flatten()[0])]


def init(memory, count):
    block.barriers[memory.data.data_ptr(), int(memory.places.flatten()[0])] = Barrier(count)


def arrive(memory, count=1, pred=True):
    if pred:
        barrier = barrier_of(memory)
        barrier.left -= count
        assert barrier.left >= 0, "more arrivals than a barrier counts"
        barrier.advance()
        with block.turn:
            block.turn.notify_all()


def expect(memory, size, pred=True):
    if pred:
        barrier_of(memory).bytes += size
        arrive(memory)


def wait(memory, phase):
    barrier = barrier_of(memory)

    def over():
        barrier.advance()
        return barrier.phase % 2 != int(phase)

    alone = threading.current_thread() is threading.main_thread()
    assert over() if alone else block.turn.wait_for(over, WAIT_SECONDS), "a wait that never ends"


def window(descriptor, corner):
    """The part of a tensor that a TMA moves, and its shape; what lies outside is read as zero and not written."""
    x = descriptor.base.view(-1)[: math.prod(descriptor.shape)].view(descriptor.shape)
    parts = [slice(int(c), int(c) + size) for c, size in zip(corner, descriptor.block_shape, strict=True)]
    return x[tuple(parts)]


def async_load(descriptor, corner, memory, target, pred=True):
    if not pred:
        return
    part = window(descriptor, corner)
    x = part.new_zeros(tuple(descriptor.block_shape))
    x[tuple(slice(0, size) for size in part.shape)] = part
    target.write(torch.full_like(x, math.nan))
    barrier_of(memory).loads.append((target, x.view(target.shape)))


def async_store(descriptor, corner, source):
    x = source.visible()
    part = window(descriptor, corner)
    part.copy_(x.view(tuple(descriptor.block_shape))[tuple(slice(0, size) for size in part.shape)])
    block.stores.append((source, x))


def store_wait(pendings):
    while len(block.stores) > pendings:
        source, x = block.stores.pop(0)
        assert same(source.read(), x), "a store's memory changed under it"
