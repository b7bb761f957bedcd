"""Converted models against the models they come from: transformers' own classes, and a plain statement of fla's."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from triadic.models import TriadicForCausalLM
from triadic.models.conversion import convert_family, convert_fla, fla_config, load_any
from triadic.models.families import FAMILIES
from triadic.models.upcycling import upcycle

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "initializer_range": 0.05,
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
OWN = {
    "olmo_hybrid": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "qwen3_next": {"head_dim": 16, **EXPERTS},
    "qwen3_5_text": {"head_dim": 16},
    "qwen3_5_moe_text": {"head_dim": 16, **EXPERTS},
}


@pytest.fixture(params=FAMILIES)
def source(request):
    """A random model of the family, norms and biases away from their start, decays felt within a few tokens."""
    torch.manual_seed(0)
    family = FAMILIES[request.param]
    model = family.source(family.source.config_class(**SIZES, **OWN[request.param])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def logits(model, x, **arguments):
    with torch.no_grad():
        return model(x, **arguments).logits


def train(model, x, steps=20):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = model(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_family_computes_what_its_source_computes(source, tokens):
    model = convert_family(source)
    assert model.config.second_key_dim == 1
    x = tokens(2, 150)
    torch.testing.assert_close(logits(model, x), logits(source, x), rtol=1e-5, atol=1e-5)
    mask = torch.ones_like(x)
    mask[0, :40] = 0
    real = mask.bool()
    found, expected = (logits(m, x, attention_mask=mask)[real] for m in (model, source))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_family_generates_what_its_source_generates(source, tokens):
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    settings["attention_mask"][1, :6] = 0
    x = tokens(2, 20)
    assert torch.equal(convert_family(source).generate(x, **settings), source.generate(x, **settings))


def test_mixers_in_place_pack_documents(source, tokens):
    mixer, x = upcycle(convert_family(source), 4).model.layers[0].linear_attn, torch.randn(1, 50, 32)
    with torch.no_grad():
        packed = mixer(x, cu_seq_lens_q=torch.tensor([0, 13, 50]))
        apart = torch.cat([mixer(x[:, :13]), mixer(x[:, 13:])], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


def test_a_wide_family_is_saved_loaded_and_decodes(source, tokens, tmp_path):
    wide = upcycle(convert_family(source), 4)
    wide.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(wide)
    assert again.config.second_key_dim == 4
    x = tokens(2, 30)
    whole = logits(wide, x)
    assert torch.equal(logits(again, x), whole)
    with torch.no_grad():
        first = again(x[:, :20], use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"
        assert first[name].layers[0].recurrent_states[0].shape == (2, 4, 4, 8, 12)
        second = again(x[:, 20:], use_cache=True, **{name: first[name]})
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=1e-4)


def test_a_family_begins_as_its_source_and_learns(source, tokens):
    wide = upcycle(convert_family(source), 4, start="exact")
    x = tokens(2, 64)
    expected = logits(source, x)
    assert (logits(wide, x) - expected).norm() < 1e-4 * expected.norm()  # the 1e-6 in the L2 norm's root
    for model in (convert_family(source), upcycle(convert_family(source), 4)):
        losses = train(model, x)
        assert losses[-1] < losses[0] - 0.3


def test_fresh_models_of_a_family_are_initialised(source):
    """As in `from_pretrained` for what a checkpoint lacks: nothing is left as memory was."""
    model = type(convert_family(source))(convert_family(source).config)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    mixer = model.model.layers[0].linear_attn
    steps = F.softplus(mixer.dt_bias)
    assert steps.min() >= 0.001 - 1e-6
    assert steps.max() <= 0.1 + 1e-6
    assert mixer.conv1d.weight.abs().max() <= 0.5
    assert mixer.A_log.exp().max() <= 16


FLA = {
    "model_type": "gated_deltanet", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2,
    "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5, "intermediate_size": 48, "norm_eps": 1e-5, "conv_size": 4,
    "use_short_conv": True, "use_gate": True, "allow_neg_eigval": False, "output_gate_activation": "swish",
    "tie_word_embeddings": False, "attn": None, "hidden_act": "swish", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def fla_weights(config):
    """Random weights under the names and in the shapes of fla 0.6.0's GatedDeltaNetForCausalLM."""
    generator = torch.Generator().manual_seed(0)
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_v_heads", "conv_size"))
    keys, values = config["num_heads"] * config["head_dim"], int(heads * config["head_dim"] * config["expand_v"])
    shapes = {"model.embeddings.weight": (61, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (61, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "attn_norm.weight": (hidden,), "mlp_norm.weight": (hidden,), "attn.o_proj.weight": (hidden, values),
            "attn.q_proj.weight": (keys, hidden), "attn.k_proj.weight": (keys, hidden),
            "attn.v_proj.weight": (values, hidden), "attn.g_proj.weight": (values, hidden),
            "attn.a_proj.weight": (heads, hidden), "attn.b_proj.weight": (heads, hidden),
            "attn.A_log": (heads,), "attn.dt_bias": (heads,),
            "attn.q_conv1d.weight": (keys, 1, width), "attn.k_conv1d.weight": (keys, 1, width),
            "attn.v_conv1d.weight": (values, 1, width), "attn.o_norm.weight": (values // heads,),
            "mlp.gate_proj.weight": (48, hidden), "mlp.up_proj.weight": (48, hidden),
            "mlp.down_proj.weight": (hidden, 48),
        }  # fmt: skip
        if not config["use_gate"]:
            del layer["attn.g_proj.weight"]
        if not config["use_short_conv"]:
            layer = {name: shape for name, shape in layer.items() if "conv1d" not in name}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    weights = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + w if "norm" in name else w for name, w in weights.items()}


def fla_logits(c, w, x):
    """fla's GatedDeltaNetForCausalLM as its source states it, token by token in float64."""
    w = {name: weight.double() for name, weight in w.items()}

    def norm(x, weight):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + c["norm_eps"]) * weight

    def l2(x):
        return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def short(x, weight):
        if not c["use_short_conv"]:
            return F.silu(x)
        padded = F.pad(x, (0, 0, c["conv_size"] - 1, 0))
        taps = [padded[:, i : i + x.shape[1]] * weight[:, 0, i] for i in range(c["conv_size"])]
        return F.silu(sum(taps))

    h = w["model.embeddings.weight"][x]
    for i in range(c["num_hidden_layers"]):
        p = {name.removeprefix(f"model.layers.{i}."): weight for name, weight in w.items()}
        u = norm(h, p["attn_norm.weight"])
        q, k, v = (
            short(u @ p[f"attn.{n}_proj.weight"].T, p.get(f"attn.{n}_conv1d.weight")).unflatten(-1, (heads, -1))
            for n, heads in (("q", c["num_heads"]), ("k", c["num_heads"]), ("v", c["num_v_heads"]))
        )
        q, k = (l2(t).repeat_interleave(c["num_v_heads"] // c["num_heads"], dim=2) for t in (q, k))
        beta = torch.sigmoid(u @ p["attn.b_proj.weight"].T) * (2 if c["allow_neg_eigval"] else 1)
        decay = torch.exp(
            -p["attn.A_log"].exp() * F.softplus(u @ p["attn.a_proj.weight"].T + p["attn.dt_bias"])
        )  # fmt: skip
        state, reads = u.new_zeros(len(x), c["num_v_heads"], k.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, None, None]
            old = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], v[:, t] - old)
            reads.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * c["head_dim"] ** -0.5)
        o = norm(torch.stack(reads, 1), p["attn.o_norm.weight"])
        if c["use_gate"]:
            gate = (u @ p["attn.g_proj.weight"].T).view_as(o)
            o = o * (F.silu(gate) if c["output_gate_activation"] == "swish" else torch.sigmoid(gate))
        h = h + o.flatten(2) @ p["attn.o_proj.weight"].T
        u = norm(h, p["mlp_norm.weight"])
        h = (
            h
            + (F.silu(u @ p["mlp.gate_proj.weight"].T) * (u @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        )
    return norm(h, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"allow_neg_eigval": True, "num_v_heads": 2, "expand_v": 2.0},
        {"output_gate_activation": "sigmoid", "use_short_conv": False},
        {"use_gate": False},
    ],
)
def test_fla_computes_what_its_source_states(changes, tokens):
    config = FLA | changes
    weights, x = fla_weights(config), tokens(2, 70)
    model = convert_fla(config, weights).eval()
    assert type(model) is TriadicForCausalLM
    expected = fla_logits(config, weights, x)
    torch.testing.assert_close(logits(model, x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model.double(), x), expected, rtol=1e-9, atol=1e-9)


def test_fla_models_learn(tokens):
    same = convert_fla(FLA, fla_weights(FLA))
    for model in (same, upcycle(same, 4)):
        losses = train(model, tokens(2, 64))
        assert losses[-1] < losses[0] - 0.3


def test_fla_defaults_are_its_own():
    """fla's default config: 21 layers of 6 heads, 256 wide, values twice that, SwiGLU of 5632."""
    config = fla_config(dict(hidden_size=2048, num_heads=6, head_dim=256, num_hidden_layers=21, vocab_size=9))
    assert (config.linear_value_head_dim, config.intermediate_size, config.rms_norm_eps) == (512, 5632, 1e-6)
    assert (config.output_gate_activation, config.linear_conv_kernel_dim, config.linear_num_value_heads) == (
        "silu",
        4,
        6,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn": {"layers": [1]}}, r"attn is \{'layers': \[1\]\}"),
        ({"attnres_block_size": 4}, "attnres_block_size is 4"),
        ({"hidden_act": "powlu"}, "only swish"),
    ],
)
def test_fla_models_that_differ_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        fla_config(FLA | changes)


def test_weights_that_do_not_fit_are_named():
    weights = fla_weights(FLA)
    with pytest.raises(ValueError, match="layer 1 lacks A_log"):
        convert_fla(FLA, {n: w for n, w in weights.items() if n != "model.layers.1.attn.A_log"})
    with pytest.raises(ValueError, match=r"layer 0 holds D, which is not converted"):
        convert_fla(FLA, weights | {"model.layers.0.attn.D": torch.ones(4)})
    with pytest.raises(ValueError, match=r"such as model\.other"):
        convert_fla(FLA, weights | {"model.other": torch.ones(4)})
    with pytest.raises(ValueError, match="do not fit the config"):
        convert_fla(FLA, weights | {"lm_head.weight": torch.ones(4)})


def test_of_a_multimodal_checkpoint_the_text_model_is_read(tokens, tmp_path):
    torch.manual_seed(0)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = Qwen3_5Config(text_config=SIZES | OWN["qwen3_5_text"], vision_config=vision)
    source = Qwen3_5ForConditionalGeneration(config).eval()
    source.save_pretrained(tmp_path)
    model, converted = load_any(tmp_path)
    assert converted
    x = tokens(2, 50)
    torch.testing.assert_close(logits(model.eval(), x), logits(source, x), rtol=1e-5, atol=1e-5)
