# ruff: noqa: RUF005 - Gluon compiles tuple sums, not unpacking
"""Names of Gluon that moved between Triton 3.6 and 3.9, and what the Gluon kernels here share."""

from functools import lru_cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory under another shape and layout."""
    if RENAMED:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@lru_cache
def tile_layout(columns, bits, rank):
    """Shared memory of a tile of so many columns, swizzled as wgmma wants 16-bit tiles."""
    swizzle = min(128, columns * 2) if bits == 16 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def descriptor(x, shape, block, bits=16):
    """TMA descriptor of a contiguous tensor x viewed as `shape` (2 or 3 sizes), moved in tiles `block`.

    Made without TensorDescriptor's own checks, which take as long as a launch; what they check holds here: x aligned to
    16 bytes (`launch.aligned`), rows of a multiple of 16 bytes, blocks of powers of two.
    """
    d = TensorDescriptor.__new__(TensorDescriptor)
    d.base, d.shape, d.block_shape, d.layout = x, shape, block, tile_layout(block[-1], bits, len(block))
    d.strides = (shape[1], 1) if len(shape) == 2 else (shape[1] * shape[2], shape[2], 1)
    return d


@gluon.jit
def to_bf16(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def to_bf16_again(x):
    """The same value, but the largest number for infinity; .satfinite keeps ptxas from merging it with to_bf16 of the
    same x, whose copy would stay live.
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def to_f32(x):
    """bfloat16 to float32, one instruction each: Triton's own takes two for every second number."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def scale_rows(acc, table, EG: gl.constexpr, BV: gl.constexpr, C: gl.constexpr):
    """acc [(EG, BV), C] times table [EG, C], which is read from shared memory in the matching register layout."""
    x = acc.reshape([EG, BV, C])
    layout: gl.constexpr = x.type.layout
    x = x * gl.expand_dims(table.load(gl.SliceLayout(1, layout)), 1)
    return gl.convert_layout(x.reshape([EG * BV, C]), acc.type.layout, assert_trivial=True)


@gluon.jit
def load_decays(p_dec, S, NG: gl.constexpr, EG: gl.constexpr, BV: gl.constexpr, K: gl.constexpr):
    """Decays of the EG slices of each state tile S[g] [(EG, BV), K] over the chunk, as a tuple."""
    layout: gl.constexpr = S[0].reshape([EG, BV, K]).type.layout
    e = gl.arange(0, EG, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    decays = ()
    for g in gl.static_range(NG):
        decays = decays + (gl.load(p_dec + g * EG + e),)
    return decays


@gluon.jit
def decayed(S, dec, EG: gl.constexpr, BV: gl.constexpr, K: gl.constexpr):
    x = S.reshape([EG, BV, K]) * gl.expand_dims(gl.expand_dims(dec, 1), 2)
    return gl.convert_layout(x.reshape([EG * BV, K]), S.type.layout, assert_trivial=True)


@gluon.jit
def wait_with_state(acc, S, g: gl.constexpr):
    """Wait for acc; S[g] is tied to the wait, so that its conversion is not hoisted above it."""
    acc, s = mma_wait(0, deps=[acc, S[g]])
    return acc, S[:g] + (s,) + S[g + 1 :]


@gluon.jit
def slice_selector(layout: gl.constexpr, M: gl.constexpr, BV: gl.constexpr, z=0):
    """0/1 matrix [M, BV]: row (e, v), column v. Its products add the slices, or repeat a row for each slice."""
    m = gl.arange(0, M, layout=gl.SliceLayout(1, layout)) + z
    v = gl.arange(0, BV, layout=gl.SliceLayout(0, layout))
    return gl.where((m[:, None] % BV) == v[None, :], 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def state_offsets(layout: gl.constexpr, i_v, M: gl.constexpr, BV: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Offsets of tile [(EG, BV), K] in a state [E, K, V]."""
    m = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    return (m // BV * (K * V) + i_v * BV + m % BV)[:, None] + (k * V)[None, :]


@gluon.jit
def store_tail(p, x, rows, row0, stride, column, layout: gl.constexpr, C: gl.constexpr, BV: gl.constexpr):
    """The first `rows` rows of x [C, BV] to rows row0.. of a matrix (a TMA store would write all C)."""
    t = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    v = gl.arange(0, BV, layout=gl.SliceLayout(0, layout))
    offsets = ((row0 + t).to(gl.int64) * stride)[:, None] + (column + v)[None, :]
    gl.store(p + offsets, x.to(gl.bfloat16), mask=(t < rows)[:, None] & (v >= 0)[None, :])


@gluon.jit
def wait_all(tiles, NG: gl.constexpr):
    """Wait for all products; their accumulators as a tuple."""
    if NG == 1:
        return (mma_wait(0, deps=[tiles[0]]),)
    else:
        a, b = mma_wait(0, deps=[tiles[0], tiles[1]])
        return (a, b)


@gluon.jit
def new_barriers(N: gl.constexpr, arrivals: gl.constexpr):
    """N mbarriers [N, 1]; each phase ends after `arrivals` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def new_barrier(arrivals: gl.constexpr):
    """One mbarrier in an allocation of its own: Triton guards parts of one allocation from one another by bar.sync."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=arrivals)
    return bar
