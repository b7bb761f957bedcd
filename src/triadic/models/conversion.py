"""Public Gated DeltaNet checkpoints as models of ours with one slice; `upcycling` gives them more.

Two routes. flash-linear-attention's GatedDeltaNet is our decoder with other names: it becomes a TriadicForCausalLM.
transformers' hybrids (`families`) keep their own decoder, and our mixer takes the place of their GatedDeltaNet layers.
Either way the function stays the same.
"""

import copy
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from .configuration_triadic import TriadicConfig
from .families import FAMILIES
from .loading import load_weights
from .modeling_triadic import TriadicForCausalLM

FLA = "gated_deltanet"  # the model_type of flash-linear-attention's class
FAMILY_NAMES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # multimodal: their text model


def load_any(folder: str | Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, bool]:
    """The model in a folder (config.json, *.safetensors) and whether it had to be converted (then E = 1); on the CPU.

    Raises ValueError for a model_type that cannot be converted, settings that our mixer does not have, and weights
    that are missing, unknown or of another shape.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    kind = config.get("model_type")
    if kind == TriadicConfig.model_type or kind in (family.config.model_type for family in FAMILIES.values()):
        return load_weights(AutoModelForCausalLM, folder, dtype=dtype), False
    if kind == FLA:
        return convert_fla(config, {name: weight.to(dtype) for name, weight in _read(folder).items()}), True
    if FAMILY_NAMES.get(kind, kind) in FAMILIES:
        return convert_family(load_weights(AutoModelForCausalLM, folder, dtype=dtype)), True
    known = ", ".join(sorted({TriadicConfig.model_type, FLA, *FAMILIES, *FAMILY_NAMES}))
    raise ValueError(f"{folder} holds a model of type {kind!r}; those that are read are {known}")


def _read(folder: Path) -> dict[str, torch.Tensor]:
    try:
        files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
    return {name: weight for weights in files for name, weight in weights.items()}


@torch.no_grad()
def convert_fla(config: dict, weights: dict[str, torch.Tensor]) -> TriadicForCausalLM:
    """flash-linear-attention's GatedDeltaNetForCausalLM (its config as a dictionary, its state dict) in our decoder.

    The result has the weights' dtype; A_log and dt_bias are float32. Source: fla/layers/gated_deltanet.py and
    fla/models/gated_deltanet, release 0.6.0.

    Raises ValueError for softmax layers or attention residuals between blocks (config.attn, attnres_block_size), an
    activation other than swish, and weights that do not fit.
    """
    wanted = fla_config(config)
    model = TriadicForCausalLM(wanted)
    rest = dict(weights)
    names = {
        "model.embed_tokens": "model.embeddings",
        "model.norm": "model.norm",
        "lm_head": "model.embeddings" if wanted.tie_word_embeddings else "lm_head",
    }
    new = {f"{ours}.weight": _take(rest, f"{theirs}.weight") for ours, theirs in names.items() if ours != "lm_head"}
    new["lm_head.weight"] = rest.pop("lm_head.weight", new["model.embed_tokens.weight"])
    for i in range(wanted.num_hidden_layers):
        ours, theirs = f"model.layers.{i}.", f"model.layers.{i}."
        new[f"{ours}input_layernorm.weight"] = _take(rest, f"{theirs}attn_norm.weight")
        new[f"{ours}post_attention_layernorm.weight"] = _take(rest, f"{theirs}mlp_norm.weight")
        for name in ("gate_proj", "up_proj", "down_proj"):
            new[f"{ours}mlp.{name}.weight"] = _take(rest, f"{theirs}mlp.{name}.weight")
        mixer = {name.removeprefix(f"{theirs}attn."): rest.pop(name) for name in list(rest) if f"{theirs}attn." in name}
        new |= {f"{ours}mixer.{name}": weight for name, weight in _fla_mixer(mixer, i).items()}
    if rest:
        raise ValueError(f"the checkpoint holds weights that {FLA} does not have, such as {min(rest)}")
    _fill(model, new)
    return model


def fla_config(config: dict) -> TriadicConfig:
    """Our configuration of flash-linear-attention's GatedDeltaNetConfig, given as a dictionary."""
    for name in ("attn", "attnres_block_size"):
        if config.get(name) is not None:
            raise ValueError(f"{name} is {config[name]!r}, but only models of GatedDeltaNet layers alone are converted")
    if config.get("hidden_act", "swish") not in ("swish", "silu"):
        raise ValueError(f"hidden_act is {config['hidden_act']!r}, but only swish is converted")
    hidden, heads = config["hidden_size"], config["num_heads"]
    size, intermediate = config["head_dim"], config.get("intermediate_size")
    if intermediate is None:  # two thirds of hidden_ratio, up to a multiple of 256
        intermediate = -(-int(hidden * (config.get("hidden_ratio") or 4) * 2 / 3) // 256) * 256
    gated, gates = config.get("use_gate", True), {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
    return TriadicConfig(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=config["num_hidden_layers"],
        rms_norm_eps=config.get("norm_eps", 1e-6),
        initializer_range=config.get("initializer_range", 0.02),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        num_attention_heads=heads,
        linear_num_key_heads=heads,
        linear_num_value_heads=config.get("num_v_heads") or heads,
        linear_key_head_dim=size,
        linear_value_head_dim=int(size * config.get("expand_v", 2.0)),
        linear_conv_kernel_dim=config.get("conv_size", 4) if config.get("use_short_conv", True) else 0,
        allow_neg_eigval=config.get("allow_neg_eigval", False),
        output_gate_activation=gates[config.get("output_gate_activation", "swish")] if gated else "none",
        output_gate_rank=None,
        position_embedding="none",  # there are no softmax layers
        **{f"{name}_token_id": config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")},
    )


@torch.no_grad()
def convert_family(model: PreTrainedModel) -> PreTrainedModel:
    """A hybrid of transformers with our mixer, E = 1, in the place of its own; `model` is left unchanged.

    Raises ValueError for a class that is in none of `families.FAMILIES`.
    """
    family = next((f for f in FAMILIES.values() if type(model) is f.source), None)
    if family is None:
        names = ", ".join(family.source.__name__ for family in FAMILIES.values())
        raise ValueError(f"{type(model).__name__} is not one of the classes that can be converted: {names}")
    fields = model.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "dtype"):
        fields.pop(name, None)
    wide = family.causal(family.config(**fields))
    new = {}
    for name, weight in model.state_dict().items():
        if ".linear_attn." not in name:
            new[name] = weight
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer, "linear_attn"):
            parts = PARTS[model.config.model_type](layer.linear_attn.state_dict(), model.config)
            new |= {f"model.layers.{i}.linear_attn.{name}": weight for name, weight in _mixer(**parts).items()}
    _fill(wide, new)
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.train(model.training)


def _mixer(q, k, v, conv, decay, write, A_log, dt_bias, gate, norm, out) -> dict[str, torch.Tensor]:
    """Our mixer's weights from its parts: projections [rows, D], conv [channels, 1, W] or None, gate or None."""
    weights = {
        "in_proj_qkv.weight": torch.cat([q, k, v]),
        "in_proj_gates.weight": torch.cat([decay, write]),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "o_norm.weight": norm,
        "o_proj.weight": out,
    }
    if conv is not None:
        weights["conv1d.weight"] = conv.squeeze(1)
    if gate is not None:
        weights |= {"g_proj.weight": gate, "g_proj.bias": gate.new_zeros(len(gate))}
    return weights


def _fla_mixer(w: dict, layer: int) -> dict[str, torch.Tensor]:
    q, k, v, decay, write, out = (
        _take(w, f"{name}_proj.weight", layer) for name in ("q", "k", "v", "a", "b", "o")
    )  # fmt: skip
    conv = None
    if "q_conv1d.weight" in w:
        conv = torch.cat([_take(w, f"{name}_conv1d.weight", layer) for name in "qkv"])
    own = (_take(w, name, layer) for name in ("A_log", "dt_bias"))
    weights = _mixer(q, k, v, conv, decay, write, *own, w.pop("g_proj.weight", None), _take(w, "o_norm.weight"), out)
    if w:
        raise ValueError(f"layer {layer} holds {min(w)}, which is not converted")
    return weights


def _olmo_hybrid(w: dict, config) -> dict:
    q, k, v, decay, write, gate, out = (w[f"{name}_proj.weight"] for name in ("q", "k", "v", "a", "b", "g", "o"))
    return dict(q=q, k=k, v=v, decay=decay, write=write, gate=gate, out=out, norm=w["o_norm.weight"], **_same(w))


def _qwen3_5(w: dict, config) -> dict:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    rows = w["in_proj_qkv.weight"]
    q, k, v = rows.split([keys, keys, len(rows) - 2 * keys])
    decay, write, gate = (w[f"in_proj_{name}.weight"] for name in ("a", "b", "z"))
    return dict(
        q=q, k=k, v=v, decay=decay, write=write, gate=gate, out=w["out_proj.weight"], norm=w["norm.weight"], **_same(w)
    )  # fmt: skip


def _qwen3_next(w: dict, config) -> dict:
    """Rows of in_proj_qkvz and in_proj_ba lie by key head: its q, k, the v and z of its value heads; their b and a."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // heads
    values = group * config.linear_value_head_dim
    rows = w["in_proj_qkvz.weight"]
    parts = rows.view(heads, -1, rows.shape[1]).split([size, size, values, values], dim=1)
    q, k, v, gate = (part.flatten(0, 1) for part in parts)
    rows = w["in_proj_ba.weight"]
    write, decay = (part.flatten(0, 1) for part in rows.view(heads, -1, rows.shape[1]).split(group, dim=1))
    return dict(
        q=q, k=k, v=v, decay=decay, write=write, gate=gate, out=w["out_proj.weight"], norm=w["norm.weight"], **_same(w)
    )  # fmt: skip


def _same(w: dict) -> dict:
    return dict(conv=w["conv1d.weight"], A_log=w["A_log"], dt_bias=w["dt_bias"])


PARTS = {  # model_type -> (state dict of a GatedDeltaNet layer, config) to the arguments of _mixer
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
}


def _take(weights: dict, name: str, layer: int | None = None) -> torch.Tensor:
    if name not in weights:
        place = "the checkpoint" if layer is None else f"layer {layer}"
        raise ValueError(f"{place} lacks {name}")
    return weights.pop(name)


def _fill(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Give `model` these weights and their dtypes (A_log and dt_bias stay float32), all of them and no others."""
    own = model.state_dict(keep_vars=True)
    unlike = sorted(own.keys() ^ weights.keys()) or sorted(n for n in own if own[n].shape != weights[n].shape)
    if unlike:
        raise ValueError(f"the weights do not fit the config: {unlike[0]}")
    for name, parameter in own.items():
        kept = name.endswith(("A_log", "dt_bias"))
        parameter.data = weights[name].detach().to(torch.float32 if kept else weights[name].dtype, copy=True).cpu()
    model.tie_weights()


__all__ = ["convert_family", "convert_fla", "fla_config", "load_any"]
