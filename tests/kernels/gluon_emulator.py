"""Runs the Gluon kernels of the back end "gluon_hopper" on a CPU: their Python with a stand-in for Gluon's language.

Registers are torch tensors without layouts, a program runs alone from start to end, on the machine of gluon_machine.py,
which says what faults it sees. Not seen: what the layouts do (Triton checks those when it compiles).

    TRITON_INTERPRET=1 python tests/kernels/gluon_emulator.py hopper
    TRITON_INTERPRET=1 python tests/kernels/gluon_emulator.py hopper --recurrent

The cases and the judgement are triton_cases.py's, with --recurrent decode_cases.py's; kernel 1, plain Triton, runs in
Triton's interpreter.
"""

import inspect
import math
import sys
import threading
import types

import gluon_machine as machine
import torch
from gluon_machine import tile


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


def warp_specialize(partitions, worker_num_warps=None, worker_num_regs=None):
    """Each partition in a thread, one running at a time."""
    failed = []

    def run(function, arguments):
        with machine.block.turn:
            try:
                function(*arguments)
            except BaseException as error:
                failed.append(error)
            machine.block.turn.notify_all()

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
        args = [argument(x) for x in args]
        known = {name: value for name, value in constants.items() if name in self.names}
        for i in range(math.prod(grid)):
            ids = (i % grid[0], i // grid[0] % grid[1], i // (grid[0] * grid[1]))
            machine.block = machine.Block(ids, grid, constants["num_warps"])
            self.function(*args, **known)
            assert all(not barrier.loads for barrier in machine.block.barriers.values()), (
                "a load that nothing waits for"
            )


def argument(x):
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0, "a tensor off the alignment that launches promise"
        return Pointer(x.view(-1))
    if hasattr(x, "block_shape"):
        assert x.base.data_ptr() % 16 == 0, "a TMA descriptor of a tensor off alignment"
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
        num_warps=lambda: machine.block.num_warps,
        program_id=lambda axis: tile(machine.block.ids[axis]),
        num_programs=lambda axis: machine.block.grid[axis],
        load=load,
        store=store,
        allocate_shared_memory=machine.Shared.allocate,
        shared_memory_descriptor=machine.Shared,
        barrier=machine.thread_barrier,
        arange=lambda start, end, layout=None: tile(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout=None: tile(torch.zeros(tuple(shape), dtype=dtype)),
        zeros_like=torch.zeros_like,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        broadcast=lambda x, y: torch.broadcast_tensors(x, y),
        cast=lambda x, dtype: tile(torch.as_tensor(x)).to(dtype),
        where=lambda condition, x, y: tile(torch.where(torch.as_tensor(condition), x, y)),
        sum=lambda x, axis: x.sum(axis),
        exp=lambda x: x.exp(),
        exp2=lambda x: x.exp2(),
        minimum=lambda x, y: x.clamp(max=y),
        inline_asm_elementwise=inline_asm_elementwise,
        associative_scan=associative_scan,
        warp_specialize=warp_specialize,
        **dtypes,
        **dict.fromkeys(layouts, Layout),
    )
    mbarrier = types.SimpleNamespace(
        init=machine.init, expect=machine.expect, wait=machine.wait, arrive=machine.arrive, MBarrierLayout=Layout
    )
    tma = types.SimpleNamespace(
        async_load=machine.async_load, async_store=machine.async_store, store_wait=machine.store_wait
    )
    named(gluon, jit=jit, constexpr_function=lambda f: f, language=language)
    named(f"{gluon}.language.nvidia")
    named(f"{gluon}.language.nvidia.ampere", mma_v2=lambda a, b, acc: acc + tile(a.float() @ b.float()))
    named(
        f"{gluon}.language.nvidia.hopper",
        fence_async_shared=machine.fence_async_shared,
        mbarrier=mbarrier,
        tma=tma,
        warpgroup_mma=machine.warpgroup_mma,
        warpgroup_mma_wait=machine.warpgroup_mma_wait,
    )
    named(f"{gluon}.nvidia")
    named(f"{gluon}.nvidia.hopper", TensorDescriptor=type("TensorDescriptor", (), {}))
    return modules


def main():
    import decode_cases
    import triton_cases
    from triadic_kernels import dispatch, recurrent

    stands = stand_in()
    sys.modules.update(stands)
    from triadic_kernels import gluon_decode, gluon_hopper

    for name in stands:  # Triton's interpreter needs the real ones
        del sys.modules[name]
    real = dispatch.problem
    for module in (dispatch, recurrent):
        module.problem = lambda *a, **k: real(*a, **k)._replace(device_type="cuda", capability=(9, 0))
    for module in (gluon_hopper, gluon_decode):
        module.processors = lambda device_index: 3
    if "--recurrent" in sys.argv:
        sys.argv.remove("--recurrent")
        decode_cases.main()
    else:
        triton_cases.main()


if __name__ == "__main__":
    main()
