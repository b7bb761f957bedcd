"""Keys, queries and values in one pass: convolution, activation, unit length of every head; the backward in one too.

A program walks along a run of tokens with BD channels, four to a thread, and keeps in registers what the convolution
needs of the past: the last W tokens of x, and in the backward the unfinished gradients of these. So memory is read and
written once, the sum over a head stays within a warp, and dweight is summed over the run before it is stored. Runs know
nothing of documents (where nothing is packed, rows): at each first token of one a walk begins anew, with an empty past.

Legend: B batch, T time, C channels of x, D channels of a part, W kernel width, G size of a head that is scaled to unit
length (0: none is), N packed documents, whose bounds are found by bisection; L tokens of a run, NR runs, U tokens that
are loaded together, BD channels of a program; t token, r_d channels; z convolution, a activation, y = a / |a|; p_x
pointer, b_x block.
"""

import torch
import triton
import triton.language as tl

from .launch import INTERPRETED, current

EPS = 1e-6  # under the root of the length
RUN, RUN_BACK = 64, 128  # tokens of a walk
U = 4
LARGEST, WIDEST = 512, 8  # head, kernel: the registers
SILU, SOFTPLUS, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ACTIVATIONS = {"silu": 0, "softplus": 1, "sigmoid": 2, "none": 3}


def unsupported(device_type: str, dtype: torch.dtype, groups, width: int) -> str | None:
    """Why these kernels cannot take an x there, with heads of these sizes and a kernel of this width, in one sentence;
    None if they can.
    """
    if device_type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, x is on {device_type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 or float32, not {dtype}"
    for size in groups:
        if size & (size - 1) or size > LARGEST:
            return f"takes heads of a power of two up to {LARGEST}, not {size}"
    if width > WIDEST:
        return f"takes kernels of at most {WIDEST} tokens, not {width}"
    return None


@triton.jit
def first_document(t, cu_seqlens, T, N, STEPS):
    """Index of the document of token t: the last that begins at or before it."""
    if cu_seqlens is None:
        i = t // T
    else:
        i, i_high = t * 0, t * 0 + N  # cu_seqlens[i] <= t < cu_seqlens[i_high]
        step = 0
        while step < STEPS:
            i_mid = (i + i_high) // 2
            right = tl.load(cu_seqlens + i_mid).to(tl.int32) <= t
            i, i_high = tl.where(right, i_mid, i), tl.where(right, i_high, i_mid)
            step += 1
    return i


@triton.jit
def bounds(i, cu_seqlens, T, TOKENS, N):
    """First token of document i, and the one behind its last. The last document has all that is left."""
    if cu_seqlens is None:
        low, high = i * T, i * T + T
    else:
        low = tl.load(cu_seqlens + i).to(tl.int32)
        high = tl.load(cu_seqlens + i + 1, mask=i + 1 < N, other=TOKENS).to(tl.int32)
    return low, tl.minimum(high, TOKENS)


@triton.jit
def channels(r_d, D: tl.constexpr, ok):
    """Mask of the channels r_d that there are, of none unless ok: [BD]."""
    return (r_d < D) & (r_d * 0 < ok.to(tl.int32))  # the interpreter cannot spread a scalar truth value


@triton.jit
def token(x, t, C: tl.constexpr, r_d, D: tl.constexpr, ok):
    """x[t, r_d] as it lies in memory, 0 unless ok: [BD]."""
    return tl.load(x + tl.cast(t, tl.int64) * C + r_d, mask=channels(r_d, D, ok), other=0.0)


@triton.jit
def nothing(r_d, W: tl.constexpr):
    """W times zeros, [BD]."""
    zeros = ()
    for _ in tl.static_range(W):
        zeros += (tl.zeros([r_d.shape[0]], tl.float32),)
    return zeros


@triton.jit
def per_group(b, G: tl.constexpr):
    """Sums over groups of G neighbouring channels, at every channel: [BD] -> [BD]."""
    total = tl.sum(tl.reshape(b, (b.shape[0] // G, G)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (b.shape[0] // G, G)), (b.shape[0],))


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) with two special instructions, a few units in the last place off (about |z| where z < -4)."""
    r = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return r * r


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation of z and its derivative."""
    if ACTIVATION == SILU:
        s = sigmoid(z)
        a = z * s
        da = s + a * (1.0 - s)
    elif ACTIVATION == SOFTPLUS:
        a, da = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))), sigmoid(z)
    elif ACTIVATION == SIGMOID:
        a = sigmoid(z)
        da = a * (1.0 - a)
    else:
        a, da = z, z * 0.0 + 1.0
    return a, da


@triton.jit
def walk(
    x, weight, cu_seqlens, y, dx, dweight, i_d, i_t, T, TOKENS, N, STEPS, C: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, ACTIVATION: tl.constexpr, EPS: tl.constexpr, L: tl.constexpr, U: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """A run of one part, whose first channel the pointers are moved to: y, or from dy in its place dx and dweight."""
    AFTER: tl.constexpr = 0 if dx is None else W - 1  # tokens beyond the run that have a share in its dx
    r_d = i_d * BD + tl.arange(0, BD)
    taps = ()  # the j-th meets the j-th token back
    for j in tl.static_range(W):
        taps += (tl.load(weight + r_d * W + (W - 1 - j), mask=r_d < D, other=0.0).to(tl.float32),)
    sums = nothing(r_d, W)  # of the taps' gradients
    start = i_t * L
    end = tl.minimum(start + L, TOKENS)
    i = first_document(start, cu_seqlens, T, N, STEPS)
    while start < end:
        low, high = bounds(i, cu_seqlens, T, TOKENS, N)
        stop = tl.maximum(tl.minimum(high, end), start)
        last = tl.minimum(high, stop + AFTER)
        past = ()  # the W - 1 tokens before, the newest first
        for j in tl.static_range(1, W):
            past += (token(x, start - j, C, r_d, D, start - j >= low).to(tl.float32),)
        pending = nothing(r_d, W)  # the j-th: gradient so far of the j-th token back
        for t in range(start, stop + AFTER, U):
            b_x, b_dy = (), ()
            for u in tl.static_range(U):
                b_x += (token(x, t + u, C, r_d, D, t + u < last),)
                if dx is not None:
                    b_dy += (token(y, t + u, D, r_d, D, t + u < last),)
            for u in tl.static_range(U):
                window = (b_x[u].to(tl.float32),)
                window += past
                past = window[: W - 1]
                z = window[0] * taps[0]
                for j in tl.static_range(1, W):
                    z += window[j] * taps[j]
                a, slope = activate(z, ACTIVATION)
                if G:
                    r = tl.rsqrt(per_group(a * a, G) + EPS)
                if dx is None:
                    b_y = (a * r if G else a).to(y.dtype.element_ty)
                    tl.store(y + tl.cast(t + u, tl.int64) * D + r_d, b_y, mask=channels(r_d, D, t + u < stop))
                else:
                    b_d = b_dy[u].to(tl.float32)
                    if G:
                        b_d = r * (b_d - a * (r * r * per_group(a * b_d, G)))
                    b_d *= slope
                    b_own = tl.where(t + u < stop, b_d, 0.0)
                    old_sums, sums, old, pending = sums, (), pending, (b_d * taps[0],)
                    for j in tl.static_range(W):
                        sums += (old_sums[j] + b_own * window[j],)
                    for j in tl.static_range(1, W):
                        pending += (old[j - 1] + b_d * taps[j],)
                    s = t + u - (W - 1)  # the token whose gradient is complete
                    b_dx = pending[W - 1].to(dx.dtype.element_ty)
                    mask = channels(r_d, D, (s >= start) & (s < stop))
                    tl.store(dx + tl.cast(s, tl.int64) * C + r_d, b_dx, mask=mask)
        start = stop
        i += 1
    if dx is not None:
        for j in tl.static_range(W):
            tl.store(dweight + (i_t.to(tl.int64) * W + (W - 1 - j)) * C + r_d, sums[j], mask=r_d < D)


def named(specialization) -> str:
    """The kernel's name in profiles."""
    return "features_kernel" if "dx" in specialization.constants else "gradients_kernel"


@triton.jit(repr=named, do_not_specialize=["T", "TOKENS", "N", "STEPS"])
def kernel(
    x,  # [TOKENS, C]
    weight,  # [C, W]
    cu_seqlens,  # [N + 1]
    ys,  # of each part y, or dy where there is a dx: [TOKENS, D]
    dx,  # [TOKENS, C]
    dweight,  # [NR, W, C]: a share of each run
    T,
    TOKENS,
    N,
    STEPS,
    C: tl.constexpr,
    W: tl.constexpr,
    SIZES: tl.constexpr,  # D of each part, and so on
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,  # of activations
    TILES: tl.constexpr,  # of BD channels
    EPS: tl.constexpr,
    L: tl.constexpr,
    U: tl.constexpr,
    BD: tl.constexpr,
):
    # Programs of one part run side by side: mixed, a backward with second keys took a fifth longer on an H200. The
    # last parts, which have the longest walks, begin first.
    i, runs = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0) // TILES
    for p in tl.static_range(len(SIZES)):
        if (i >= 0) & (i < runs * tl.cdiv(SIZES[p], BD)):
            walk(
                x, weight, cu_seqlens, ys[p], dx, dweight, i % tl.cdiv(SIZES[p], BD), i // tl.cdiv(SIZES[p], BD),
                T, TOKENS, N, STEPS, C, SIZES[p], W, GROUPS[p], CODES[p], EPS, L, U, BD,
            )  # fmt: skip
        i -= runs * tl.cdiv(SIZES[p], BD)
        x, weight = x + SIZES[p], weight + SIZES[p] * W
        if dx is not None:
            dx, dweight = dx + SIZES[p], dweight + SIZES[p]


def launch(x, weight, cu_seqlens, ys, dx, dweight, L, sizes, groups, activations):
    """A program for each run and each tile of whole heads."""
    (B, T, C), N = x.shape, 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if not x.numel():
        return
    codes = [ACTIVATIONS[name] for name in activations]
    ys, sizes, groups, codes = zip(*(row for row in zip(ys, sizes, groups, codes, strict=True) if row[1]), strict=True)
    BD = max(128, *groups)
    tiles = sum(triton.cdiv(size, BD) for size in sizes)
    with current(x.device):
        kernel[(tiles * triton.cdiv(B * T, L),)](
            x, weight, cu_seqlens, ys, dx, dweight, T, B * T, N, max(N, 1).bit_length(), C, weight.shape[1], sizes,
            groups, codes, tiles, EPS, L, U, BD, num_warps=BD // 128, enable_fp_fusion=True,
        )  # fmt: skip


def forward(x, weight, cu_seqlens, sizes, groups, activations, dtypes):
    """Each part of x [B, T, C]: [B, T, size] in its dtype."""
    ys = [x.new_empty(*x.shape[:2], size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    launch(x, weight, cu_seqlens, ys, None, None, RUN, sizes, groups, activations)
    return ys


def backward(x, weight, cu_seqlens, dys, sizes, groups, activations):
    """Gradients of x and weight, in their dtypes."""
    (B, T, C), W = x.shape, weight.shape[1]
    L = RUN_BACK - (W - 1)  # with the tokens beyond it a run has RUN_BACK
    dx, dweight = torch.empty_like(x), x.new_empty(triton.cdiv(B * T, L), W, C, dtype=torch.float32)
    dys = [dy.contiguous() for dy in dys]
    launch(x, weight, cu_seqlens, dys, dx, dweight, L, sizes, groups, activations)
    return dx, dweight.sum(0).t().contiguous().to(weight.dtype)
