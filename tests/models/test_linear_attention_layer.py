"""The linear-attention layer against the paper's equations, written out token by token in float64 from its weights."""

import math

import pytest
import torch

from triadic.models import TriadicConfig, TriadicForCausalLM, mixers
from triadic.models.layout import Layout

PLAIN = {  # the recurrence alone, as in the paper's associative-recall task
    "linear_mixer": "sgla",
    "linear_conv_kernel_dim": 0,
    "linear_activation": "none",
    "linear_qk_norm": False,
    "second_key_activation": "none",
    "decay_gate": "none",
    "write_gate": False,
    "output_gate_activation": "none",
}
CASES = {
    "gdn E=3": {},
    "gdn E=1": {"second_key_dim": 1},
    "gdn E=8 head gate": {"second_key_dim": 8, "decay_gate": "head"},
    "sgla": {"linear_mixer": "sgla"},
    "sgla without write gate": {"linear_mixer": "sgla", "write_gate": False},
    "gdn without write gate": {"write_gate": False},
    "gdn without decay": {"decay_gate": "none"},
    "grouped values": {"linear_num_value_heads": 4},
    "grouped values, head gate": {"linear_num_value_heads": 6, "decay_gate": "head"},
    "tied keys": {"tie_second_key": True, "second_key_dim": 8},
    "negative eigenvalues": {"allow_neg_eigval": True},
    "sigmoid second keys": {"second_key_activation": "sigmoid"},
    "silu second keys": {"second_key_activation": "silu"},
    "plain second keys": {"second_key_activation": "none"},
    "full-rank silu output gate": {"output_gate_rank": None, "output_gate_activation": "silu"},
    "low-rank silu output gate": {"output_gate_activation": "silu"},
    "no output gate": {"output_gate_activation": "none"},
    "no convolution": {"linear_conv_kernel_dim": 0},
    "convolution of 2": {"linear_conv_kernel_dim": 2},
    "plain E=4": {**PLAIN, "second_key_dim": 4},
    "plain E=1": {**PLAIN, "second_key_dim": 1},
    "epsilon": {"rms_norm_eps": 0.1},
}


def silu(x):
    return x / (1 + math.exp(-x))


def softplus(x):
    return math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


ACTIVATIONS = {"silu": silu, "softplus": softplus, "sigmoid": sigmoid, "none": float}


def every(function, x):
    return x.clone().apply_(lambda value: ACTIVATIONS[function](value))


def rows(matrix, *sizes):
    return matrix.split(list(sizes), dim=0)


def unit(x):
    return x / math.sqrt(float(x @ x) + 1e-6)


class ByHand:
    """One sequence through the layer, a head and a token at a time."""

    def __init__(self, config, weights):
        self.c, self.w = config, {name: value.detach().double() for name, value in weights.items()}
        self.H, self.HV = config.linear_num_key_heads, config.linear_num_value_heads
        self.K, self.V, self.E = config.linear_key_head_dim, config.linear_value_head_dim, config.second_key_dim

    def convolved(self, u, name, weight, conv, activation):
        """activation(conv(W u)) for every token, [T, channels]."""
        x = u @ weight.T
        if conv is not None:
            width = conv.shape[1]
            past = torch.cat([torch.zeros(width - 1, x.shape[1], dtype=x.dtype), x])
            x = torch.stack([sum(conv[:, i] * past[t + i] for i in range(width)) for t in range(len(x))])
        return every(activation, x)

    def projections(self, u):
        c, key, value = self.c, self.H * self.K, self.HV * self.V
        second = self.H * self.E if "in_proj_qkv.weight" in self.w and c.has_second_projections else 0
        sizes = {"q": key, "k": key, "v": value, "q2": second, "k2": second}
        weights = dict(zip(sizes, rows(self.w["in_proj_qkv.weight"], *sizes.values()), strict=True))
        convs = dict.fromkeys(sizes)
        if c.linear_conv_kernel_dim:
            convs = dict(zip(sizes, rows(self.w["conv1d.weight"], *sizes.values()), strict=True))
        acts = {"q2": c.second_key_activation, "k2": c.second_key_activation}
        return {n: self.convolved(u, n, weights[n], convs[n], acts.get(n, c.linear_activation)) for n in sizes}

    def gates(self, u):
        """Decay factor [T, HV, E], write strength [T, HV], the output gate's inputs [T, rank or D]."""
        c, T = self.c, len(u)
        count = {"slice": self.HV * self.E, "head": self.HV, "none": 0}[c.decay_gate]
        rank = (c.output_gate_rank or 0) if c.output_gate_activation != "none" else 0
        write = self.HV if c.write_gate else 0
        alpha, beta = torch.ones(T, self.HV, self.E, dtype=u.dtype), torch.ones(T, self.HV, dtype=u.dtype)
        low = u
        if count + write + rank:
            decay_rows, write_rows, low_rows = rows(self.w["in_proj_gates.weight"], count, write, rank)
            if count:
                a = (u @ decay_rows.T + self.w["dt_bias"]).apply_(softplus)
                alpha = torch.exp(-self.w["A_log"].exp() * a).view(T, self.HV, -1).expand(T, self.HV, self.E)
            if write:
                beta = (u @ write_rows.T).apply_(sigmoid) * (2 if c.allow_neg_eigval else 1)
            if rank:
                low = u @ low_rows.T
        return alpha, beta, low

    def second(self, p, name, head, t, first):
        if self.c.tie_second_key:
            return first
        if not self.c.has_second_projections:
            return torch.ones(1, dtype=torch.float64)
        x = p[name][t, head * self.E : (head + 1) * self.E]
        return unit(x) if self.c.linear_qk_norm else x

    def __call__(self, u):
        p, (alpha, beta, low) = self.projections(u), self.gates(u)
        norm = unit if self.c.linear_qk_norm else (lambda x: x)
        out = torch.zeros(len(u), self.HV * self.V, dtype=u.dtype)
        for h in range(self.HV):
            S = torch.zeros(self.E, self.K, self.V, dtype=u.dtype)
            kh = h // (self.HV // self.H)
            for t in range(len(u)):
                q = norm(p["q"][t, kh * self.K : (kh + 1) * self.K])
                k = norm(p["k"][t, kh * self.K : (kh + 1) * self.K])
                v = p["v"][t, h * self.V : (h + 1) * self.V]
                q2, k2 = self.second(p, "q2", kh, t, q), self.second(p, "k2", kh, t, k)
                S = S * alpha[t, h][:, None, None]
                if self.c.linear_mixer == "gdn":
                    v = v - sum(k2[e] * (k @ S[e]) for e in range(self.E))
                S = S + beta[t, h] * torch.einsum("e,k,v->ekv", k2, k, v)
                o = self.K**-0.5 * sum(q2[e] * (q @ S[e]) for e in range(self.E))
                o = o / math.sqrt(float(o @ o) / self.V + self.c.rms_norm_eps) * self.w["o_norm.weight"]
                out[t, h * self.V : (h + 1) * self.V] = o
        if self.c.output_gate_activation != "none":
            gate = low @ self.w["g_proj.weight"].T + self.w["g_proj.bias"]
            out = out * every(self.c.output_gate_activation, gate)
        return out @ self.w["o_proj.weight"].T


@pytest.mark.parametrize("case", CASES)
def test_layer_equals_the_equations(make_model, case, close):
    model = make_model("gdn", **CASES[case])
    mixer = model.model.layers[1].mixer
    by_hand = ByHand(model.config, mixer.state_dict())
    u = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = torch.stack([by_hand(row.double()) for row in u])
        close(mixer(u, Layout())[0], expected.float(), 2e-5)
        close(mixer.double()(u.double(), Layout())[0], expected, 1e-10)
    assert expected.abs().mean() > 0.01


def test_associative_recall_model_has_the_papers_size():
    """3.51 to 3.54 million parameters for E = 1 to 16, 3.15 of them in the 64-wide embeddings and the output head."""
    for E, millions in ((1, 3.51), (16, 3.54)):
        config = TriadicConfig(
            vocab_size=16384,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            second_key_dim=E,
            **PLAIN,
        )
        with torch.device("meta"):
            model = TriadicForCausalLM(config)
        embedding = model.model.embed_tokens.weight.numel()
        total = sum(p.numel() for p in model.parameters()) - embedding + 16384 * 64
        assert round(total / 1e6, 2) == millions


def test_gates_are_float32_under_autocast(make_model):
    """Second keys, decay and write strength reach the op in float32, queries, keys and values in bfloat16."""
    seen = {}
    mixer = make_model("gdn").model.layers[0].mixer
    op = mixers.chunk_triadic

    def spy(q, k, v, **kwargs):
        seen.update(q=q.dtype, k=k.dtype, v=v.dtype, **{n: kwargs[n].dtype for n in ("q2", "k2", "g", "beta")})
        return op(q, k, v, **kwargs)

    mixers.chunk_triadic = spy
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            mixer(torch.randn(1, 4, 32), Layout())
    finally:
        mixers.chunk_triadic = op
    half = dict.fromkeys(("q", "k", "v"), torch.bfloat16)
    assert seen == half | dict.fromkeys(("q2", "k2", "g", "beta"), torch.float32)
