"""TriadicConfig: every architectural choice of a model, as Hugging Face configs keep them (one JSON)."""

import difflib
import functools
import math
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

LAYER_TYPES = ("linear_attention", "full_attention")
CHOICES = {
    "linear_mixer": ("gdn", "sgla"),
    "decay_gate": ("slice", "head", "none"),
    "linear_activation": ("silu", "none"),
    "second_key_activation": ("softplus", "sigmoid", "silu", "none"),
    "output_gate_activation": ("sigmoid", "silu", "none"),
    "position_embedding": ("rope", "none"),
    "linear_state_dtype": ("float32", "bfloat16"),
    "hidden_act": ("silu", "gelu", "relu"),
}
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
ROPE_KEYS = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "truncate")
ROPE_KEYS += ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor")

# Keys that transformers itself writes into a config or passes to its constructor, beside the declared fields.
TRANSFORMERS_KEYS = {
    *GenerationConfig().to_dict(),
    "_attn_implementation",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "loss_type",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "tie_last_hidden_states",
    "torch_dtype",
}


def _one_sentence_errors(cls):
    """Turn the two-line errors of `huggingface_hub.dataclasses.strict` into a ValueError of one sentence."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self, **kwargs):
        try:
            construct(self, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"{cls.__name__}: {error.__cause__ or error}") from error
        except KeyError as error:  # transformers', for incomplete rope_parameters
            raise ValueError(f"{cls.__name__}: {error.args[0]}") from error

    cls.__init__ = __init__
    return cls


@_one_sentence_errors
@strict
class TriadicConfig(PreTrainedConfig):
    """Configuration of a decoder whose layers mix tokens by linear attention with a third-order state or by softmax.

    Sizes and counts follow transformers' names; the letters of the equations in brackets.

    Args:
        layer_types: one of "linear_attention" | "full_attention" per layer; default all linear.
        num_attention_heads, num_key_value_heads, head_dim: softmax attention (query heads, key/value heads, size).
        position_embedding: "rope" | "none" (NoPE) for the softmax layers; `rope_parameters` holds the RoPE base.
        qk_norm: RMSNorm on every query and key head of the softmax layers.
        linear_num_key_heads [H], linear_num_value_heads [HV, a multiple of H], linear_key_head_dim [K],
            linear_value_head_dim [V]: linear attention.
        linear_conv_kernel_dim: width of the causal depthwise convolution on q, k, v, q', k'; 0 leaves it out.
        linear_mixer: "gdn" (the delta rule erases what the key already reads) | "sgla" (it only adds).
        linear_activation: activation of q, k, v after the convolution.
        linear_qk_norm: L2 norm of q, k, q', k'.
        second_key_dim [E]: size of the second key and query, the number of slices of a head's state. With E = 1 and
            `linear_qk_norm` they would be 1, so that they have no parameters and the layer is its base mixer.
        second_key_activation: activation of q' and k' (before their L2 norm).
        tie_second_key: k' = k and q' = q, which needs second_key_dim = linear_key_head_dim.
        decay_gate: one forget gate per "slice" of a head, one per "head", or "none".
        num_householder [n]: writes of a token, each with its own k, v, k' and beta; the state decays before the first,
            the query reads after the last (Gated DeltaProduct, arXiv 2502.10297).
        write_gate: whether a token's write is scaled by beta = sigmoid(.) in (0, 1).
        allow_neg_eigval: beta in (0, 2).
        linear_state_dtype: "float32" | "bfloat16", what a cache keeps states in; bfloat16 halves the memory, and the
            state is rounded at every step.
        linear_fused_inputs: q, k, v, q' and k' from one kernel on a GPU (`conv_features`) instead of single operations,
            where nothing is cached (README of kernels/ has the times).
        output_gate_activation, output_gate_rank: gate on the read-out; null rank means a full projection.

    Raises:
        ValueError: unknown key, wrong type or impossible combination, one sentence.
    """

    model_type = "triadic"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    base_model_tp_plan: ClassVar[dict[str, Any]] = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    use_cache: bool = True

    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    position_embedding: str = "rope"
    rope_parameters: dict | None = None
    qk_norm: bool = True
    attention_dropout: float = 0.0

    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_mixer: str = "gdn"
    linear_activation: str = "silu"
    linear_qk_norm: bool = True
    second_key_dim: int = 1
    second_key_activation: str = "softplus"
    tie_second_key: bool = False
    decay_gate: str = "slice"
    num_householder: int = 1
    write_gate: bool = True
    allow_neg_eigval: bool = False
    output_gate_activation: str = "sigmoid"
    output_gate_rank: int | None = 128
    linear_state_dtype: str = "float32"
    linear_fused_inputs: bool = True

    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        self._refuse_unknown(kwargs)
        self._derive_missing()
        super().__post_init__(**kwargs)
        if self.position_embedding == "none":
            self.rope_parameters = None  # transformers fills it with the default base

    def _refuse_unknown(self, kwargs):
        fields = type(self).__dataclass_fields__
        for key in kwargs:
            if key not in fields and key not in TRANSFORMERS_KEYS:
                raise ValueError(f"TriadicConfig has no field {key!r}; the nearest is {_nearest(key, fields)!r}.")

    def _derive_missing(self):
        def default(name, value):
            if getattr(self, name) is None:
                setattr(self, name, value)

        default("layer_types", ["linear_attention"] * self.num_hidden_layers)
        default("num_key_value_heads", self.num_attention_heads)
        default("linear_num_key_heads", self.num_attention_heads)
        default("linear_num_value_heads", self.linear_num_key_heads)
        default("head_dim", self._split_evenly("full_attention", "num_attention_heads", "head_dim"))
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            default(name, self._split_evenly("linear_attention", "linear_num_key_heads", name))

    def _split_evenly(self, layer_type, heads_name, size_name):
        heads = getattr(self, heads_name)
        if heads < 1:
            raise ValueError(f"{heads_name} is {heads} but must be at least 1.")
        if getattr(self, size_name) is None and layer_type in self.layer_types and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of {heads_name} {heads}: change one of them, "
                f"or give {size_name}."
            )
        return max(self.hidden_size // heads, 1)

    @property
    def has_second_projections(self) -> bool:
        """Whether q' and k' come from projections of their own (see `second_key_dim` and `tie_second_key`)."""
        return not self.tie_second_key and (self.second_key_dim > 1 or not self.linear_qk_norm)

    def validate_architecture(self):
        """Part of the validation that `strict` runs: impossible combinations, each refused in one sentence."""
        for message in _contradictions(self):
            raise ValueError(message)


def _nearest(name, names):
    return difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)[0]


def _contradictions(c):
    """Yield a sentence for everything in config `c` that cannot be built."""
    for name, allowed in CHOICES.items():
        if getattr(c, name) not in allowed:
            yield f"{name} is {getattr(c, name)!r} but must be one of {', '.join(map(repr, allowed))}."
    for name in POSITIVE:
        if getattr(c, name) < 1:
            yield f"{name} is {getattr(c, name)} but must be at least 1."
    if c.linear_conv_kernel_dim < 0:
        yield f"linear_conv_kernel_dim is {c.linear_conv_kernel_dim} but must be 0 (no convolution) or more."
    if c.output_gate_rank is not None and c.output_gate_rank < 1:
        yield f"output_gate_rank is {c.output_gate_rank} but must be at least 1, or null for a full projection."
    if not c.rms_norm_eps > 0:
        yield f"rms_norm_eps {c.rms_norm_eps} must lie above 0."
    if not c.initializer_range >= 0:
        yield f"initializer_range {c.initializer_range} must lie at or above 0."
    if not 0 <= c.attention_dropout < 1:
        yield f"attention_dropout {c.attention_dropout} must lie in [0, 1)."
    yield from _layer_contradictions(c)
    yield from _head_contradictions(c)


POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "second_key_dim",
    "num_householder",
)


def _layer_contradictions(c):
    unknown = sorted(set(c.layer_types) - set(LAYER_TYPES))
    if unknown:
        yield f"layer_types holds {unknown[0]!r} but only {' and '.join(map(repr, LAYER_TYPES))} exist."
    if len(c.layer_types) != c.num_hidden_layers:
        yield (
            f"layer_types has {len(c.layer_types)} entries but num_hidden_layers is {c.num_hidden_layers}: "
            "give one entry per layer."
        )


def _rope_contradictions(rope):
    if rope["rope_type"] not in ROPE_TYPES:
        yield f"rope_type is {rope['rope_type']!r} but must be one of {', '.join(ROPE_TYPES)}."
    for key in rope:
        if key not in ROPE_KEYS:
            yield f"rope_parameters has no key {key!r}; the nearest is {_nearest(key, ROPE_KEYS)!r}."
    theta = rope["rope_theta"]
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        yield f"rope_theta is {theta!r} but must be a number above 0."


def _head_contradictions(c):
    if "full_attention" in c.layer_types:
        if c.num_attention_heads % c.num_key_value_heads:
            yield (
                f"num_attention_heads {c.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{c.num_key_value_heads}: every key/value head serves the same number of query heads."
            )
        if c.position_embedding == "rope" and c.head_dim % 2:
            yield f"head_dim is {c.head_dim} but RoPE rotates pairs: make it even, or position_embedding 'none'."
        if c.position_embedding == "rope":
            yield from _rope_contradictions(c.rope_parameters)
    if "linear_attention" in c.layer_types:
        if c.linear_num_value_heads % c.linear_num_key_heads:
            yield (
                f"linear_num_value_heads {c.linear_num_value_heads} is not a multiple of linear_num_key_heads "
                f"{c.linear_num_key_heads}: every key head serves the same number of value heads."
            )
        if c.num_householder > 1 and c.linear_mixer != "gdn":
            yield (
                f"num_householder is {c.num_householder}, but linear_mixer is {c.linear_mixer!r}: only the delta rule "
                "('gdn') erases what an earlier write left, so set one of them back."
            )
        if c.tie_second_key and c.second_key_dim != c.linear_key_head_dim:
            yield (
                f"tie_second_key needs second_key_dim = linear_key_head_dim, but they are {c.second_key_dim} and "
                f"{c.linear_key_head_dim}."
            )


__all__ = ["TriadicConfig"]
