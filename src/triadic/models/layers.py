"""The small parts that decoders share: norms, feed-forward, short convolution, rotary positions."""

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

    def forward(self, x, state=None, output_state=False, cu_seqlens=None, weight=None):
        """weight: the rows of `self.weight` for the channels of `x` (None: all of them)."""
        weight = (self.weight if weight is None else weight).to(x.dtype)
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
