"""Keys, queries and values in one pass: convolution, activation, unit length of every head, and its backward in two.

Legend: B batch, T time, C channels of x, D channels of a part, W kernel width, G size of a head that is scaled to unit
length (0: none is), N packed documents; BT tokens and BD channels of a program, NT token tiles; z convolution, a
activation, y = a / |a|; p_x pointer, b_x block, m_x mask. A token reads its own document only; its bounds are found by
bisection, so nothing is made for the packing.
"""

import torch
import triton
import triton.language as tl

from .launch import INTERPRETED, current

EPS = 1e-6  # under the root of the length
BT = 32
LARGEST = 512  # head size


def unsupported(device_type: str, dtype: torch.dtype, groups) -> str | None:
    """Why these kernels cannot take an x there, with heads of these sizes, in one sentence; None if they can."""
    if device_type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, x is on {device_type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 or float32, not {dtype}"
    for size in groups:
        if size & (size - 1) or size > LARGEST:
            return f"takes heads of a power of two up to {LARGEST}, not {size}"
    return None


@triton.jit
def document(t, cu_seqlens, T, N, STEPS):
    """First token of each token's document, and the one behind its last."""
    if cu_seqlens is None:
        low = t // T * T
        high = low + T
    else:
        i_low, i_high = t * 0, t * 0 + N  # cu_seqlens[i_low] <= t < cu_seqlens[i_high]
        i = 0
        while i < STEPS:
            i_mid = (i_low + i_high) // 2
            right = tl.load(cu_seqlens + i_mid).to(tl.int32) <= t
            i_low, i_high = tl.where(right, i_mid, i_low), tl.where(right, i_high, i_mid)
            i += 1
        low = tl.load(cu_seqlens + i_low).to(tl.int32)
        high = tl.load(cu_seqlens + i_low + 1).to(tl.int32)
    return low, high


@triton.jit
def per_group(b, G: tl.constexpr):
    """Sums over groups of G neighbouring channels, at every channel: [BT, BD] -> [BT, BD]."""
    grouped = tl.reshape(b, (b.shape[0], b.shape[1] // G, G))
    total = tl.broadcast_to(tl.sum(grouped, 2)[:, :, None], (b.shape[0], b.shape[1] // G, G))
    return tl.reshape(total, (b.shape[0], b.shape[1]))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation of z and its derivative."""
    s = 1.0 / (1.0 + tl.exp(-tl.abs(z)))
    s = tl.where(z >= 0, s, 1.0 - s)  # sigmoid
    if ACTIVATION == "silu":
        a, da = z * s, s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "softplus":
        a, da = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))), s
    elif ACTIVATION == "sigmoid":
        a, da = s, s * (1.0 - s)
    else:
        a, da = z, z * 0.0 + 1.0
    return a, da


@triton.jit
def convolve(x, weight, t, r_d, m_d, low, TOKENS, C, W: tl.constexpr):
    """sum_w weight[d, w] x[t - (W - 1) + w, d] within the document: [BT, BD]."""
    z = tl.zeros([t.shape[0], r_d.shape[0]], tl.float32)
    for w in tl.static_range(W):
        s = t - (W - 1) + w
        m = ((s >= low) & (t < TOKENS))[:, None] & m_d[None, :]
        b_x = tl.load(x + s[:, None].to(tl.int64) * C + r_d[None, :], mask=m, other=0.0).to(tl.float32)
        z += b_x * tl.load(weight + r_d * W + w, mask=m_d, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=["T", "TOKENS", "N", "STEPS"])
def features_kernel(
    x,  # [TOKENS, C], moved to the first channel of the part
    weight,  # [D, W], likewise
    cu_seqlens,  # [N + 1]
    y,  # [TOKENS, D]
    T,
    TOKENS,
    N,
    STEPS,
    C: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EPS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    r_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = r_d < D
    low, _ = document(tl.minimum(t, TOKENS - 1), cu_seqlens, T, N, STEPS)
    z = convolve(x, weight, t, r_d, m_d, low, TOKENS, C, W)
    b_y, _ = activate(z, ACTIVATION)
    if G:
        b_y = b_y * tl.rsqrt(per_group(b_y * b_y, G) + EPS)
    m = (t < TOKENS)[:, None] & m_d[None, :]
    tl.store(y + t[:, None].to(tl.int64) * D + r_d[None, :], b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "TOKENS", "N", "STEPS"])
def slopes_kernel(
    x,  # [TOKENS, C], moved to the first channel of the part
    weight,  # [D, W], likewise
    cu_seqlens,  # [N + 1]
    dy,  # [TOKENS, D]
    dz,  # [TOKENS, C], moved likewise: gradient of the convolution
    dweight,  # [NT, C, W], moved likewise: a share of each token tile
    T,
    TOKENS,
    N,
    STEPS,
    C: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EPS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    i_t = tl.program_id(1)
    t = i_t * BT + tl.arange(0, BT)
    r_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = r_d < D
    m = (t < TOKENS)[:, None] & m_d[None, :]
    low, _ = document(tl.minimum(t, TOKENS - 1), cu_seqlens, T, N, STEPS)
    z = convolve(x, weight, t, r_d, m_d, low, TOKENS, C, W)
    a, slope = activate(z, ACTIVATION)
    b_d = tl.load(dy + t[:, None].to(tl.int64) * D + r_d[None, :], mask=m, other=0.0).to(tl.float32)
    if G:
        r = tl.rsqrt(per_group(a * a, G) + EPS)
        b_y = a * r
        b_d = r * (b_d - b_y * per_group(b_d * b_y, G))
    b_d = tl.where(m, b_d * slope, 0.0)
    tl.store(dz + t[:, None].to(tl.int64) * C + r_d[None, :], b_d.to(dz.dtype.element_ty), mask=m)
    for w in tl.static_range(W):
        s = t - (W - 1) + w
        m_x = ((s >= low) & (t < TOKENS))[:, None] & m_d[None, :]
        b_x = tl.load(x + s[:, None].to(tl.int64) * C + r_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        tl.store(dweight + (i_t.to(tl.int64) * C + r_d) * W + w, tl.sum(b_d * b_x, 0), mask=m_d)


@triton.jit(do_not_specialize=["T", "TOKENS", "N", "STEPS"])
def inputs_kernel(
    dz,  # [TOKENS, C]
    weight,  # [C, W]
    cu_seqlens,  # [N + 1]
    dx,  # [TOKENS, C]
    T,
    TOKENS,
    N,
    STEPS,
    C: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    r_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = r_d < C
    _, high = document(tl.minimum(t, TOKENS - 1), cu_seqlens, T, N, STEPS)
    b_d = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(W):
        s = t + j
        m = ((s < high) & (t < TOKENS))[:, None] & m_d[None, :]
        b_z = tl.load(dz + s[:, None].to(tl.int64) * C + r_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_d += b_z * tl.load(weight + r_d * W + (W - 1 - j), mask=m_d, other=0.0).to(tl.float32)[None, :]
    m = (t < TOKENS)[:, None] & m_d[None, :]
    tl.store(dx + t[:, None].to(tl.int64) * C + r_d[None, :], b_d.to(dx.dtype.element_ty), mask=m)


def columns(group: int) -> int:
    """Channels of a program: whole heads."""
    return max(group, 128)


def places(x, cu_seqlens) -> tuple[int, int, int, int]:
    """T, tokens of all rows, documents, steps of a bisection among them."""
    N = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.shape[1], x.shape[0] * x.shape[1], N, max(N, 1).bit_length()


def parts(sizes):
    """(index, first channel, channels) of those that have any."""
    first = 0
    for i, size in enumerate(sizes):
        if size:
            yield i, first, size
        first += size


def forward(x, weight, cu_seqlens, sizes, groups, activations, dtypes):
    """Each part of x [B, T, C]: [B, T, size] in its dtype."""
    C, W, place = x.shape[2], weight.shape[1], places(x, cu_seqlens)
    outputs = [x.new_empty(*x.shape[:2], size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    with current(x.device):
        for i, first, size in parts(sizes):
            BD = columns(groups[i])
            grid = (triton.cdiv(size, BD), triton.cdiv(place[1], BT))
            features_kernel[grid](
                x[..., first:], weight[first:], cu_seqlens, outputs[i], *place, C, size, W, groups[i], activations[i],
                EPS, BT, BD, num_warps=8, enable_fp_fusion=True,
            )  # fmt: skip
    return outputs


def backward(x, weight, cu_seqlens, dys, sizes, groups, activations):
    """Gradients of x and weight, in their dtypes."""
    C, W, place = x.shape[2], weight.shape[1], places(x, cu_seqlens)
    tiles = triton.cdiv(place[1], BT)
    dz, dx = torch.empty_like(x), torch.empty_like(x)
    dweight = x.new_empty(tiles, C, W, dtype=torch.float32)
    with current(x.device):
        for i, first, size in parts(sizes):
            BD = columns(groups[i])
            slopes_kernel[(triton.cdiv(size, BD), tiles)](
                x[..., first:], weight[first:], cu_seqlens, dys[i].contiguous(), dz[..., first:], dweight[:, first:],
                *place, C, size, W, groups[i], activations[i], EPS, BT, BD, num_warps=8, enable_fp_fusion=True,
            )  # fmt: skip
        inputs_kernel[(triton.cdiv(C, 128), tiles)](
            dz, weight, cu_seqlens, dx, *place, C, W, BT, 128, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype)
