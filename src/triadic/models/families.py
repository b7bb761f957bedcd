"""transformers' hybrids of Gated DeltaNet and softmax attention, with our mixer in the place of theirs.

OLMo-Hybrid, Qwen3-Next and Qwen3.5 differ from our decoder outside the mixer (post-norms, gated softmax attention,
partial rotary positions, zero-centred norms, experts), so each keeps its own decoder and only its GatedDeltaNet layers
become `InPlaceMixer`s, with E slices. A family is three classes, made from transformers' own: config, decoder, causal
model; importing this module registers them with the Auto classes as triadic_<model_type>. They load, save, generate
and train as any transformers model does. `conversion` brings the weights.
"""

from typing import Any, ClassVar, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from .cache import adopt, one_cache
from .configuration_triadic import TriadicConfig
from .layers import ShortConvolution
from .layout import find_layout
from .mixers import TriadicLinearAttention

FIELDS = {  # what a family's config gains, as in TriadicConfig
    "second_key_dim": (int, 1),
    "second_key_activation": (str, "softplus"),
    "decay_gate": (str, "slice"),
    "linear_state_dtype": (str, "float32"),
}
OUTPUT_NORM_EPS = {"olmo_hybrid": 1e-5}  # where it is not the config's rms_norm_eps


class InPlaceMixer(TriadicLinearAttention):
    """TriadicLinearAttention, called as transformers' GatedDeltaNet layers are: hidden states [B, T, D] to [B, T, D].

    attention_mask [B, T] is zero at padding; documents of one row are packed by cu_seq_lens_q [N + 1]. The cache, or
    cache_params before transformers 5.18, gets recurrent layers of ours.
    """

    def forward(
        self, hidden_states, cache=None, attention_mask=None, cu_seq_lens_q=None, max_length_q=None, cache_params=None,
        **kwargs,
    ):  # fmt: skip
        cache, past_length = one_cache(cache, cache_params), 0
        if cache is not None:
            past_length = adopt(cache, self.config).layers[self.layer_idx].get_seq_length()
        layout = find_layout(
            *hidden_states.shape[:2], attention_mask, None, cu_seq_lens_q, max_length_q, past_length
        )  # fmt: skip
        return super().forward(hidden_states, layout, cache)[0]


def mixer_config(config) -> TriadicConfig:
    """The TriadicConfig of the mixers in a model of a family's `config` (extended by FIELDS or not).

    Raises ValueError for an activation other than SiLU.
    """
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act is {config.hidden_act!r}, but the mixer's activation in its place is 'silu'.")
    same = ("hidden_size", "num_hidden_layers", "layer_types", "initializer_range", "vocab_size")
    same += ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    same += ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    return TriadicConfig(
        **{name: getattr(config, name) for name in same},
        **{name: getattr(config, name, default) for name, (_, default) in FIELDS.items()},
        head_dim=getattr(config, "head_dim", None),
        rms_norm_eps=OUTPUT_NORM_EPS.get(config.model_type.removeprefix("triadic_"), config.rms_norm_eps),
        allow_neg_eigval=getattr(config, "linear_allow_neg_eigval", False),
        output_gate_activation="silu",
        output_gate_rank=None,
        position_embedding="none",  # the softmax layers are the family's own
    )


class _Mixers:
    """What a family's decoder and causal model have in common."""

    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["A_log", "dt_bias"]

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, (InPlaceMixer, ShortConvolution)):
            module.reset_parameters()


class _Decoder(_Mixers):
    def __init__(self, config):
        super().__init__(config)
        settings = mixer_config(config)
        for index, layer in enumerate(self.layers):
            if config.layer_types[index] == "linear_attention":
                layer.linear_attn = InPlaceMixer(settings, index)
        self.post_init()


class _Causal(_Mixers):
    decoder_class: ClassVar[Any] = None

    def __init__(self, config):
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.post_init()


class Family(NamedTuple):
    """Three classes with our mixer, and the causal model of transformers that they come from."""

    config: type
    decoder: type
    causal: type
    source: type


def _family(source: type, decoder: type) -> Family:
    """Make and register the classes of the family whose causal model and decoder are given."""
    base, name = source.config_class, source.config_class.model_type
    here = {"__module__": __name__}
    plan = {key: value for key, value in (base.base_model_tp_plan or {}).items() if "linear_attn" not in key}
    fields = {key: default for key, (_, default) in FIELDS.items()}
    kinds = {"__annotations__": {key: kind for key, (kind, _) in FIELDS.items()}, "base_model_tp_plan": plan}
    config = strict(
        type(f"Triadic{base.__name__}", (base,), here | kinds | fields | {"model_type": f"triadic_{name}"})
    )  # fmt: skip
    here = here | {"config_class": config}
    decoder = type(f"Triadic{decoder.__name__}", (_Decoder, decoder), here)
    causal = type(f"Triadic{source.__name__}", (_Causal, source), here | {"decoder_class": decoder})
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, decoder, exist_ok=True)
    AutoModelForCausalLM.register(config, causal, exist_ok=True)
    globals().update({made.__name__: made for made in (config, decoder, causal)})  # where pickle looks for them
    return Family(config, decoder, causal, source)


FAMILIES = {  # by the model_type of transformers
    source.config_class.model_type: _family(source, decoder)
    for source, decoder in (
        (olmo_hybrid.OlmoHybridForCausalLM, olmo_hybrid.OlmoHybridModel),
        (qwen3_next.Qwen3NextForCausalLM, qwen3_next.Qwen3NextModel),
        (qwen3_5.Qwen3_5ForCausalLM, qwen3_5.Qwen3_5TextModel),
        (qwen3_5_moe.Qwen3_5MoeForCausalLM, qwen3_5_moe.Qwen3_5MoeTextModel),
    )
}

__all__ = ["FAMILIES", "Family", "InPlaceMixer", "mixer_config"]
