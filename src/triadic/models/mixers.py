"""Token mixers: each owns its parameters and their initialisation, its state size and its forward FLOPs.

A mixer is a module `Mixer(config, layer_idx)` with
    forward(hidden_states [B, T, D], layout, cache, position_embeddings, attention_mask) -> (output [B, T, D], weights)
    reset_parameters()                      its own direct parameters (submodules initialise themselves)
    state_entries(config, context_length)   numbers that decoding keeps per sequence
    forward_flops(config, context_length)   per token, beyond its matrices of parameters
and one line in MIXERS.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from triadic_kernels.features import conv_features, refusal
from triadic_kernels.op import chunk_triadic
from triadic_kernels.recurrent import recurrent_triadic

from .attention import attend
from .householder import read_last, spread_writes
from .layers import ShortConvolution, TriadicRMSNorm, at_least_fp32, l2_normalize, rotary_cos_sin, rotate

ACTIVATIONS = {
    "silu": F.silu,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}
A_MAX = 16.0  # exp(A_log), the decay rate, is drawn from U(0, 16)
FEW = 8  # new tokens of a sequence that go through the recurrence one by one, more through chunks
DELTA_RULE = {"gdn": True, "sgla": False}  # of each linear_mixer: a write erases what its key reads
DT_MIN, DT_MAX = 1e-3, 1e-1  # the decay bias is softplus^-1 of a log-uniform step in this range


class TriadicLinearAttention(nn.Module):
    """Linear attention whose state per value head is E x K x V: GDN or sGLA with second keys and queries.

    q, k, v = act(conv(W u)), q', k' = act'(conv(W' u)), all keys and queries L2-normalised;
    log decay g_e = -exp(A_e) softplus(W_a,e u + b_e); beta = sigmoid(W_b u); y = W_o (RMSNorm(o) * gate(u)).
    `in_proj_qkv` holds the rows of q, k, v, q', k' in this order, `in_proj_gates` those of decay, beta and the
    output gate's low-rank half; with n = num_householder writes a token, k, v, k' and beta have n rows for each of a
    head, one after another (see householder.py). q', k', decay and beta are float32 at least; A_log and dt_bias stay
    float32.
    """

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        slices = config.second_key_dim if config.has_second_projections else 0
        key_size, value_size = heads * config.linear_key_head_dim, value_heads * config.linear_value_head_dim
        writes = config.num_householder
        num_decays = {"slice": value_heads * config.second_key_dim, "head": value_heads, "none": 0}[config.decay_gate]
        gated = config.output_gate_activation != "none"
        rank = config.output_gate_rank if gated and config.output_gate_rank else 0
        self.qkv_sizes = [key_size, writes * key_size, writes * value_size, heads * slices, writes * heads * slices]
        self.gate_sizes = [num_decays, writes * value_heads if config.write_gate else 0, rank]
        self.head_dims = [config.linear_key_head_dim] * 2 + [config.linear_value_head_dim] + [config.second_key_dim] * 2
        unit = [*self.head_dims[:2], 0, *self.head_dims[3:]] if config.linear_qk_norm else [0] * 5
        activations = [config.linear_activation] * 3 + [config.second_key_activation] * 2
        self.parts = [unit, activations, [config.tie_second_key] * 2 + [False, True, True]]  # see conv_features

        self.in_proj_qkv = nn.Linear(config.hidden_size, sum(self.qkv_sizes), bias=False)
        if config.linear_conv_kernel_dim:
            self.conv1d = ShortConvolution(sum(self.qkv_sizes), config.linear_conv_kernel_dim)
        if sum(self.gate_sizes):
            self.in_proj_gates = nn.Linear(config.hidden_size, sum(self.gate_sizes), bias=False)
        if num_decays:
            self.A_log = nn.Parameter(torch.empty(num_decays, dtype=torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(num_decays, dtype=torch.float32))
        if gated:
            self.g_proj = nn.Linear(rank or config.hidden_size, value_size)
        self.o_norm = TriadicRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(value_size, config.hidden_size, bias=False)

    def reset_parameters(self):
        if not self.gate_sizes[0]:
            return
        uniform = torch.rand(2, *self.A_log.shape, device=self.A_log.device, dtype=torch.float32)
        init.copy_(self.A_log, torch.log(A_MAX * (1 - uniform[0])))  # 1 - [0, 1) is never 0
        dt = torch.exp(math.log(DT_MIN) + uniform[1] * math.log(DT_MAX / DT_MIN))
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))

    def forward(self, hidden_states, layout, cache=None, position_embeddings=None, attention_mask=None):
        memory = None if cache is None else cache.layers[self.layer_idx]
        conv_state, state = (None, None) if memory is None else memory.read()
        x = layout.gather(hidden_states)  # [B, T, D]
        q, k, v, q2, k2, conv_state = self.keys_and_values(x, conv_state, memory is not None, layout)
        g, beta, gate = self.gates(x)
        if layout.context is not None:
            g, beta = self.gates_to_heads(layout.context, g, beta)
        writes = self.config.num_householder
        q, k, v, q2, k2, g, beta = spread_writes(writes, q, k, v, q2, k2, g, beta)
        settings = {"delta_rule": DELTA_RULE[self.config.linear_mixer], "cu_seqlens": layout.bounds(writes)}
        if hidden_states.shape[1] == 1 or (memory is not None and hidden_states.shape[1] <= FEW):
            op = recurrent_triadic
            settings["inplace_state"] = state is not None and memory.in_place and not torch.is_grad_enabled()
        else:
            op, state = chunk_triadic, None if state is None else at_least_fp32(state)
        o, state = op(
            q,
            k,
            v,
            q2=q2,
            k2=k2,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=memory is not None,
            **settings,
        )  # [B, T, HV, V], [N, HV, E, K, V]
        if memory is not None:
            memory.write(conv_state, state, layout.longest() if layout.packed else hidden_states.shape[1])
        o = read_last(writes, o)
        if layout.context is not None:
            o = _heads(layout.context.to_tokens(o.flatten(2)), self.config.linear_value_head_dim)
        o = self.o_norm(o)
        if gate is not None:
            o = o * ACTIVATIONS[self.config.output_gate_activation](gate).view_as(o)
        return layout.scatter(self.o_proj(o.flatten(2)), like=hidden_states), None

    def keys_and_values(self, x, conv_state, output_state, layout):
        """q, k [B,T,H,K], v [B,T,HV,V], q', k' [B,T,H,E] (None: they are 1) and the next convolution state.

        With n writes a token k, v and k' have n times the heads, those of a head one after another. Where the context
        is spread over ranks: all T tokens, this rank's heads.
        """
        config, context = self.config, layout.context
        x, sizes = self.in_proj_qkv(x), self.qkv_sizes
        if context is not None:
            x = torch.cat(context.to_heads(*x.split(sizes, dim=-1)), dim=-1)
            sizes = [size // context.degree for size in sizes]
        if config.linear_conv_kernel_dim:
            weight = self.conv1d.weight if context is None else context.mine(self.conv1d.weight, self.qkv_sizes)
            if conv_state is None and not output_state and self.in_one_pass(x):
                return *self.features(conv_features(x, weight, sizes, *self.parts, layout.cu_seqlens)), None
            x, conv_state = self.conv1d(x, conv_state, output_state, layout.cu_seqlens, weight)
        q, k, v, q2, k2 = x.split(sizes, dim=-1)
        activation, norm = ACTIVATIONS[config.linear_activation], l2_normalize if config.linear_qk_norm else _same
        q, k = (norm(_heads(at_least_fp32(activation(t)), config.linear_key_head_dim)) for t in (q, k))
        if config.tie_second_key:
            q2, k2 = q, k
        elif config.has_second_projections:
            activation = ACTIVATIONS[config.second_key_activation]
            q2, k2 = (norm(_heads(activation(at_least_fp32(t)), config.second_key_dim)) for t in (q2, k2))
        else:
            q2 = k2 = None
        v = _heads(ACTIVATIONS[config.linear_activation](v), config.linear_value_head_dim)
        return q.to(v.dtype), k.to(v.dtype), v, q2, k2, conv_state

    def in_one_pass(self, x):
        """Whether to make keys, queries and values of `x` by one kernel, where there is one (see features.py)."""
        config = self.config
        kind = x.device.type, x.dtype, tuple(self.parts[0]), config.linear_conv_kernel_dim
        return config.linear_fused_inputs and refusal(*kind) is None

    def features(self, parts):
        """The outputs of `conv_features` as `keys_and_values` returns them."""
        config = self.config
        q, k, v, q2, k2 = (
            _heads(x, size) if x.shape[-1] else None for x, size in zip(parts, self.head_dims, strict=True)
        )
        if config.tie_second_key:
            q2, k2 = q, k  # float32, before q and k are rounded
        return q.to(v.dtype), k.to(v.dtype), v, q2, k2

    def gates(self, x):
        """Log decay [B,T,HV,E] or [B,T,HV], write strength [B,T,HV], output gate's logits; each None if absent.

        With n writes a token the strength is [B,T,HV,n].
        """
        config = self.config
        g = beta = None
        if sum(self.gate_sizes):
            decay, write, low_rank = self.in_proj_gates(x).split(self.gate_sizes, dim=-1)
        if self.gate_sizes[0]:
            g = -at_least_fp32(self.A_log).exp() * F.softplus(at_least_fp32(decay) + self.dt_bias)
            g = _heads(g, config.second_key_dim) if config.decay_gate == "slice" else g
        if self.gate_sizes[1]:
            beta = torch.sigmoid(at_least_fp32(write)) * (2.0 if config.allow_neg_eigval else 1.0)
            beta = beta if config.num_householder == 1 else _heads(beta, config.num_householder)
        if config.output_gate_activation == "none":
            return g, beta, None
        return g, beta, self.g_proj(low_rank if self.gate_sizes[2] else x)

    @staticmethod
    def gates_to_heads(context, g, beta):
        """Decay and write strength of all heads of this rank's tokens -> of this rank's heads of all tokens."""
        given = [x for x in (g, beta) if x is not None]
        shapes = iter(context.to_heads(*(x.flatten(2) for x in given)) if given else ())
        heads = [None if x is None else next(shapes).unflatten(-1, (-1, *x.shape[3:])) for x in (g, beta)]
        return heads

    @staticmethod
    def state_entries(config, context_length):
        slices = config.second_key_dim * config.linear_key_head_dim
        return config.linear_num_value_heads * slices * config.linear_value_head_dim

    @staticmethod
    def forward_flops(config, context_length):
        """Products with the state: K S (delta rule only), Q S and K^T U, 2 E K V each; work inside chunks is extra."""
        products = 3 if DELTA_RULE[config.linear_mixer] else 2
        return config.num_householder * products * 2 * TriadicLinearAttention.state_entries(config, context_length)


class TriadicAttention(nn.Module):
    """Causal softmax attention with grouped key/value heads, QK-norm per head, and RoPE or no positions at all."""

    is_causal = True

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        query_size, key_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = TriadicRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = TriadicRMSNorm(self.head_dim, config.rms_norm_eps)

    def reset_parameters(self):
        pass  # it has no parameters beside its submodules'

    def forward(self, hidden_states, layout, cache=None, position_embeddings=None, attention_mask=None):
        x = layout.one_row(hidden_states)  # [B, T, D]
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))  # [B, T, H, D]
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if position_embeddings is not None:
            q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        if layout.context is not None:
            q, k, v = self.to_heads(layout.context, q.to(v.dtype), k.to(v.dtype), v)
        q, k, v = (x.transpose(1, 2) for x in (q.to(v.dtype), k.to(v.dtype), v))  # [B, H, T, D]
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        o, weights = attend(self, q, k, v, attention_mask, layout)  # [B, T, H, D]
        o = o.flatten(2) if layout.context is None else layout.context.to_tokens(o.flatten(2))
        return self.o_proj(o).view_as(hidden_states), weights

    def to_heads(self, context, q, k, v):
        """All heads of this rank's tokens -> this rank's heads of all tokens; too few key/value heads are repeated."""
        copies = max(context.degree // self.config.num_key_value_heads, 1)
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
        return (x.unflatten(-1, (-1, self.head_dim)) for x in context.to_heads(*(x.flatten(2) for x in (q, k, v))))

    @staticmethod
    def state_entries(config, context_length):
        return 2 * config.num_key_value_heads * config.head_dim * context_length

    @staticmethod
    def forward_flops(config, context_length):
        """Q K^T and P V over the causal half: 2 * 2 * (T / 2) * H * D."""
        return 2 * context_length * config.num_attention_heads * config.head_dim


def _heads(x, size):
    return x.unflatten(-1, (-1, size))


def _same(x):
    return x


MIXERS = {"linear_attention": TriadicLinearAttention, "full_attention": TriadicAttention}


def position_embeddings(config, position_ids):
    """(cos, sin) for the softmax layers, or None if there are none or they have no positions (NoPE)."""
    if config.position_embedding == "none" or "full_attention" not in config.layer_types:
        return None
    return rotary_cos_sin(config, position_ids)
