"""Runs the Gluon kernels of the back end "gluon_hopper" on a CPU: their Python with a stand-in for Gluon's language.

Registers are torch tensors without layouts, a program runs alone from start to end. What can go wrong is made to: TMA
loads arrive at the wait for their barrier and shared memory is NaN until then; a product is computed when it is issued
and again when it is waited for, and both must agree; accumulators cannot be read before a wait that covers them; what
threads stored to shared memory needs a fence and a barrier before wgmma or TMA may read it; a TMA store's source must
not change before store_wait; barriers count arrivals and bytes, and a wait that cannot end is an error. Not seen: races
between the warps of a program, and what the layouts do (Triton checks those when it compiles).

    TRITON_INTERPRET=1 python tests/kernels/gluon_emulator.py hopper

The cases and the judgement are triton_cases.py's; kernel 1, plain Triton, runs in Triton's interpreter.
"""

import inspect
import math
import sys
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


class Layout:
    """Any layout; none of them means anything here."""

    def __init__(self, *args, **kwargs):
        pass


class Pointer:
    """A pointer or a tensor of pointers into one tensor of numbers."""

    def __init__(self, numbers, offset=0):
        self.numbers, self.offset = numbers, offset

    def __add__(self, offset):
        return Pointer(self.numbers, self.offset + offset)

    def __sub__(self, offset):
        return self + -offset

    def places(self, mask):
        places = torch.as_tensor(self.offset).long()
        if mask is not None:
            places, mask = torch.broadcast_tensors(places, mask)
            places = places.where(mask, 0)
        assert ((places >= 0) & (places < self.numbers.numel())).all(), "a pointer leaves its tensor"
        return places


def load(pointer, mask=None, other=None):
    x = pointer.numbers[pointer.places(mask)]
    return tile(x if mask is None else x.where(mask, math.nan if other is None else other))


def store(pointer, x, mask=None):
    places = pointer.places(mask)
    x = torch.as_tensor(x).to(pointer.numbers.dtype).expand(places.shape)
    if mask is not None:
        mask = torch.as_tensor(mask).expand(places.shape)
        places, x = places[mask], x[mask]
    pointer.numbers[places] = x.as_subclass(torch.Tensor)


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


block: Block = None

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


def warp_specialize(partitions, worker_num_warps=None, worker_num_regs=None):
    """Each partition in a thread, one running at a time."""
    failed = []

    def run(function, arguments):
        with block.turn:
            try:
                function(*arguments)
            except BaseException as error:
                failed.append(error)
            block.turn.notify_all()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


ASSEMBLY = {
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda x: x.to(torch.bfloat16),
    "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;": lambda x: x.to(torch.bfloat16).clamp(
        torch.finfo(torch.bfloat16).min, torch.finfo(torch.bfloat16).max
    ),
    "cvt.rn.bf16x2.f32 $0, $1, $2;": lambda high, low: (
        torch.stack([low, high], -1).to(torch.bfloat16).view(torch.int32)[..., 0]
    ),
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": lambda x: x.to(torch.float32),
}


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    return ASSEMBLY[asm](*args)


def associative_scan(x, axis, combine, reverse=False):
    assert (combine.function.__name__, reverse) == ("plus", True)
    return x.flip(axis).cumsum(axis).flip(axis)


class Kernel:
    """A function under @gluon.jit: called by others, or launched over a grid."""

    def __init__(self, function):
        self.function, self.names = function, list(inspect.signature(function).parameters)

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launch(grid, args, constants)

    def launch(self, grid, args, constants):
        global block
        args = [argument(x) for x in args]
        known = {name: value for name, value in constants.items() if name in self.names}
        for i in range(math.prod(grid)):
            ids = (i % grid[0], i // grid[0] % grid[1], i // (grid[0] * grid[1]))
            block = Block(ids, grid, constants["num_warps"])
            self.function(*args, **known)
            assert all(not barrier.loads for barrier in block.barriers.values()), "a load that nothing waits for"


def argument(x):
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        return Pointer(x.view(-1))
    return tile(x) if isinstance(x, int) else x


def jit(function=None, **options):
    return Kernel(function) if function else Kernel


def stand_in() -> dict[str, types.ModuleType]:
    """The modules that the kernels import Gluon from, by name."""
    gluon, modules = "triton.experimental.gluon", {}

    def named(name, **members):
        modules[name] = types.ModuleType(name)
        modules[name].__dict__.update(members)
        return modules[name]

    layouts = ("NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "BlockedLayout", "SliceLayout",
               "DotOperandLayout")  # fmt: skip
    dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float32", "int32", "int64")}
    language = named(
        f"{gluon}.language",
        constexpr=lambda x: x,
        static_range=range,
        num_warps=lambda: block.num_warps,
        program_id=lambda axis: tile(block.ids[axis]),
        num_programs=lambda axis: block.grid[axis],
        load=load,
        store=store,
        allocate_shared_memory=Shared.allocate,
        shared_memory_descriptor=Shared,
        barrier=thread_barrier,
        arange=lambda start, end, layout=None: tile(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout=None: tile(torch.zeros(tuple(shape), dtype=dtype)),
        zeros_like=torch.zeros_like,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        broadcast=lambda x, y: torch.broadcast_tensors(x, y),
        where=lambda condition, x, y: tile(torch.where(torch.as_tensor(condition), x, y)),
        sum=lambda x, axis: x.sum(axis),
        exp2=lambda x: x.exp2(),
        minimum=lambda x, y: x.clamp(max=y),
        inline_asm_elementwise=inline_asm_elementwise,
        associative_scan=associative_scan,
        warp_specialize=warp_specialize,
        **dtypes,
        **dict.fromkeys(layouts, Layout),
    )
    mbarrier = types.SimpleNamespace(init=init, expect=expect, wait=wait, arrive=arrive, MBarrierLayout=Layout)
    tma = types.SimpleNamespace(async_load=async_load, async_store=async_store, store_wait=store_wait)
    named(gluon, jit=jit, constexpr_function=lambda f: f, language=language)
    named(f"{gluon}.language.nvidia")
    named(
        f"{gluon}.language.nvidia.hopper",
        fence_async_shared=fence_async_shared,
        mbarrier=mbarrier,
        tma=tma,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    )
    named(f"{gluon}.nvidia")
    named(f"{gluon}.nvidia.hopper", TensorDescriptor=type("TensorDescriptor", (), {}))
    return modules


def main():
    import triton_cases
    from triadic_kernels import dispatch

    stands = stand_in()
    sys.modules.update(stands)
    from triadic_kernels import gluon_hopper

    for name in stands:  # Triton's interpreter needs the real ones
        del sys.modules[name]
    real = dispatch.problem
    dispatch.problem = lambda *a, **k: real(*a, **k)._replace(device_type="cuda", capability=(9, 0))
    gluon_hopper.processors = lambda device_index: 3
    triton_cases.main()


if __name__ == "__main__":
    main()
