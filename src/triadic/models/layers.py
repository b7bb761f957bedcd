"""The small parts every decoder shares: norms, feed-forward, rotary positions, short convolution, and document layout."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from triadic_kernels.conv import causal_conv1d

L2_NORM_EPS = 1e-6


def at_least_fp32(x):
    """`x` in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2_normalize(x):
    """x / sqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


class TriadicRMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight over the last dimension; sums in float32 at least."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states):
        normed = F.rms_norm(hidden_states, self.weight.shape, self.weight.to(hidden_states.dtype), self.eps)
        return normed.to(hidden_states.dtype)

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class TriadicMLP(nn.Module):
    """SwiGLU: down(act(gate x) * up x)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states):
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution without bias over `[B, T, D]`; a state holds the last `width - 1` inputs."""

    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))

    def reset_parameters(self):
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x, state=None, output_state=False, cu_seqlens=None):
        weight = self.weight.to(x.dtype)
        return causal_conv1d(
            x, weight, initial_state=state, output_final_state=output_state, cu_seqlens=cu_seqlens
        )  # [B, T, D], [N, D, W - 1] | None

    def extra_repr(self):
        return "{}, width={}".format(*self.weight.shape)


def rotary_cos_sin(config, position_ids):
    """Cosine and sine of RoPE at `position_ids` [B, T]: two `[B, T, head_dim]` float32 tensors."""
    parameters, device = config.rope_parameters, position_ids.device
    if parameters["rope_type"] == "default":
        even = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
        inv_freq, scale = parameters["rope_theta"] ** -(even / config.head_dim), 1.0
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)
    angles = position_ids[..., None].float() * inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x, cos, sin):
    """RoPE in transformers' half-split convention: `x` [B, T, H, D], `cos` and `sin` [B, T, D]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos[:, :, None] + turned * sin[:, :, None]).to(x.dtype)


@dataclasses.dataclass
class Layout:
    """Where documents begin and which tokens are padding, found once per forward and shared by all layers.

    packed: `cu_seqlens` [N + 1] int32 are the document bounds of ONE row of tokens; `max_seqlen` their longest.
    padded: `valid` [n] are the flat positions of the real tokens of B rows, `cu_seqlens` [B + 1] the bounds of the
        rows among those n tokens.
    neither: every row is one document (or continues the one in its cache).
    """

    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    valid: torch.Tensor | None = None

    @property
    def packed(self):
        return self.cu_seqlens is not None and self.valid is None

    def gather(self, x):
        """[B, T, D] -> [1, n, D] without the padding (unchanged if there is none)."""
        return x if self.valid is None else x.flatten(0, 1).index_select(0, self.valid)[None]

    def scatter(self, x, like):
        """The inverse of `gather` onto the shape of `like` [B, T, D]; padding becomes zero."""
        if self.valid is None:
            return x
        flat = x.new_zeros(like.shape[0] * like.shape[1], x.shape[-1])
        return flat.index_copy(0, self.valid, x[0]).view(*like.shape[:2], -1)


def find_layout(batch, length, attention_mask, position_ids, cu_seqlens, max_seqlen, past_length):
    """Read packing and padding off the arguments of a forward.

    Packing is `cu_seqlens`, or `position_ids` that restart; padding is a zero in the `[B, past + T]` attention mask.
    A mask of ones changes nothing. Reading values stalls a GPU, so `cu_seqlens` is the way to train.

    Raises:
        ValueError: packing together with padding, with more than one row (cu_seqlens) or with a filled cache.
    """
    padded = _find_padding(batch, length, attention_mask)
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q describes one packed row, but the batch has {batch}: flatten it to one.")
        if padded is not None:
            raise ValueError("cu_seq_lens_q and an attention_mask with zeros exclude each other: give one of them.")
        return Layout(cu_seqlens.to(torch.int32), max_seqlen)
    restarts = None
    if position_ids is not None and length > 1 and isinstance(past_length, int) and past_length == 0:
        positions = position_ids.expand(batch, -1)
        if padded is None:
            restarts = positions[:, 1:] != positions[:, :-1] + 1
        else:
            real = attention_mask[:, -length:].bool()
            restarts = (positions[:, 1:] <= positions[:, :-1]) & real[:, 1:] & real[:, :-1]
        restarts = restarts if bool(restarts.any()) else None
    if restarts is None:
        return padded or Layout()
    if padded is not None:
        raise ValueError("position_ids restart inside a padded row: give packed rows without padding.")
    starts = F.pad(restarts, (1, 0), value=True).flatten().nonzero().flatten()
    end = starts.new_full((1,), batch * length)
    return Layout(torch.cat([starts, end]).to(torch.int32), max_seqlen)


def _find_padding(batch, length, attention_mask):
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    if attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns for {length} tokens: it covers the cached tokens "
            "and the new ones."
        )
    real = attention_mask[:, -length:].bool().expand(batch, -1)
    if bool(real.all()):
        return None
    counts = real.sum(-1, dtype=torch.int32)
    return Layout(F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)), None, real.flatten().nonzero().flatten())


def document_positions(layout, length, past_length, device):
    """Positions [1, T] that count from each packed document's start, or go on after `past_length` tokens."""
    tokens = torch.arange(length, device=device)
    if not layout.packed:
        return (tokens + past_length)[None]
    bounds = layout.cu_seqlens
    return (tokens - bounds[torch.searchsorted(bounds, tokens, right=True) - 1])[None]
