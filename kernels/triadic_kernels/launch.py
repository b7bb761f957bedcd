"""How kernels are launched: `bound` makes the launchers, `launch` gives the configurations of the plain Triton kernels.

Configurations are functions of the problem's head dims and dtype alone, so equal on every rank and for every length.
"""

import contextlib
from functools import lru_cache, wraps
from typing import NamedTuple

import torch
import triton
from triton.runtime import driver

from .dispatch import Problem

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = triton.knobs.runtime.interpret  # Triton's interpreter runs on the CPU


def unsupported(p) -> str | None:
    """Why the plain Triton kernels cannot run problem p, in one sentence; None if they can."""
    if p.device_type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, the tensors are on {p.device_type}"
    if p.device_type == "cuda" and p.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, this device has {p.capability[0]}.{p.capability[1]}"
    if p.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32, not {p.dtype}"
    if p.K not in HEAD_DIMS or p.V not in HEAD_DIMS:
        return f"takes head dims {HEAD_DIMS}, not K={p.K}, V={p.V}"
    if p.E > 32:
        return f"takes at most 32 slices, not E={p.E}"
    return None


class Launcher:
    """A kernel with its constants on one device. The first launch goes through Triton's JIT, which takes 20 to 40 us to
    find out which compiled kernel fits the arguments; the following ones start the kernel that it found.

    So every launch must bring arguments of the same types, None in the same places and pointers aligned to 16 bytes
    (`aligned`), while the device is the current one (`current`).
    """

    def __init__(self, kernel, device, constants: dict):
        self.kernel, self.device, self.constants = kernel, device, constants
        self.compiled, self.values, self.start = None, (), None

    def __call__(self, grid: tuple[int, int, int], *arguments):
        hooks = triton.knobs.runtime
        if self.compiled is None:
            self.first(grid, arguments)
        elif hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
            self.compiled[grid](*arguments, *self.values)
        else:
            run, function, metadata = self.start
            stream = driver.active.get_current_stream(self.device.index)
            run(*grid, stream, function, metadata, None, None, None, *arguments, *self.values)

    def first(self, grid, arguments):
        # a product and a sum in one instruction: Triton's default until 3.9, no longer from 3.10
        kernel = self.kernel[grid](*arguments, enable_fp_fusion=True, **self.constants)
        if kernel is None:  # by Triton's interpreter
            return
        self.values = tuple(self.constants[name] for name in self.kernel.arg_names[len(arguments) :])
        self.start = kernel.run, kernel.function, kernel.packed_metadata
        self.compiled = kernel


def bound(kernel):
    """Decorates constants(p, *flags) -> keyword arguments of the kernel; called with (p, device, *flags) the result is
    the Launcher, made once for each kind of problem, device and flags.
    """

    def decorate(constants):
        @lru_cache(None)
        def make(kind, device, *flags):
            return Launcher(kernel, device, constants(Problem(0, 0, 0, 0.0, *kind), *flags))

        @wraps(constants)
        def launcher(p, device, *flags) -> Launcher:
            return make(p.kind, device, *flags)

        return launcher

    return decorate


def aligned(x):
    """x, or where its first element is not at a multiple of 16 bytes, a copy."""
    return x if x is None or x.data_ptr() % 16 == 0 else x.clone()


def current(device):
    """A context in which this is the current CUDA device, where Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@lru_cache
def processors(device_index: int) -> int:
    """Multiprocessors of a device."""
    return driver.active.utils.get_device_properties(device_index)["multiprocessor_count"]


class Launch(NamedTuple):
    """Keyword arguments of each kernel. PREC is the precision of float32 products; those of 16-bit operands are
    exact.
    """

    gates: dict
    masks: dict
    recurrence: dict
    state_gradients: dict
    mask_gradients: dict


def launch(p) -> Launch:
    if p.dtype.itemsize == 4:
        return _float32(p.E, p.K, p.V)
    if p.capability == (9, 0):
        return _hopper(p.E, p.K, p.V)
    # With a warpgroup of four, Triton 3.6 to 3.9 fail to compile the recurrences for compute capability 10.0.
    return _any(p.E, p.K, p.V, recurrence_warps=2 if p.capability and p.capability[0] == 10 else 4)


@lru_cache
def _any(E: int, K: int, V: int, recurrence_warps: int) -> Launch:
    """bfloat16 and float16 on Ampere, Ada and Blackwell: tiles that fit registers and shared memory; not measured."""
    return Launch(
        gates=dict(num_warps=1 if E < 4 else 4),
        masks=dict(BK=min(K, 128), PREC="tf32", PREC_INV="tf32x3", num_warps=8 if E > 8 else 4, num_stages=1),
        recurrence=dict(BK=min(K, 128), BV=min(V, 32), PREC="tf32", num_warps=recurrence_warps, num_stages=1),
        state_gradients=dict(BK=min(K, 32), BV=min(V, 64), PREC="tf32", num_warps=4, num_stages=1),
        mask_gradients=dict(BD=min(K, V, 32), BK=min(K, 64), PREC="tf32", STAGES=1, num_warps=8, num_stages=1),
    )


@lru_cache
def _hopper(E: int, K: int, V: int) -> Launch:
    """bfloat16 and float16 on an H200, measured with K = V = 128."""
    # Where tiles of the recurrence are narrower than 64 columns and its key tiles as long as a chunk, ptxas 12.8
    # miscompiles wgmma addresses for sm_90 (benchmarks/offline.py finds them: wrong_addresses).
    keys = min(K, 128) if V >= 64 else min(K, 32)
    warps = 8 if V >= 64 else 4
    # Key tiles of kernel 6's last products as wide as can be: with 32 columns they race on Hopper (Triton 3.6).
    sums = dict(BD=min(K, V, 32), BK=min(K, 128), PREC="tf32", STAGES=2, num_warps=8, num_stages=1)
    if (K, V) == (128, 128) and E <= 8:  # two programs on a multiprocessor: 1.02 ms instead of 1.89 at E = 8
        sums |= dict(BD=64, num_warps=4)
    return Launch(
        gates=dict(num_warps=1 if E < 4 else 4),
        masks=dict(BK=min(K, 128), PREC="tf32", PREC_INV="tf32x3", num_warps=8 if E > 8 else 4, num_stages=1),
        recurrence=dict(BK=keys, BV=min(V, 64), PREC="tf32", num_warps=warps, num_stages=1),
        state_gradients=dict(BK=min(K, 64), BV=min(V, 64), PREC="tf32", num_warps=8, num_stages=1),
        mask_gradients=sums,
    )


@lru_cache
def _float32(E: int, K: int, V: int) -> Launch:
    """float32: exact products where they fit registers, else three tf32 products each, on two warps.

    With a warpgroup of four, Triton 3.6 makes wgmma of them, and those kernels crash or go wrong on an H200.
    """
    masks = dict(PREC="tf32x3", num_warps=2, num_stages=1)
    return Launch(
        gates=dict(num_warps=1 if E < 4 else 4),
        masks=dict(BK=min(K, 32), PREC_INV="tf32x3", **masks),
        recurrence=dict(
            BK=min(K, 64 if V >= 64 else 32), BV=min(V, 32), PREC="ieee", num_warps=8 if V >= 64 else 4, num_stages=1
        ),
        state_gradients=dict(BK=min(K, 32), BV=min(V, 32), PREC="ieee", num_warps=8, num_stages=1),
        mask_gradients=dict(BD=min(K, V, 32), BK=min(K, 32), STAGES=1, **masks),
    )
