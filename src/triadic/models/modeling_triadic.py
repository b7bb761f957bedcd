"""One pre-norm decoder for every mixer: TriadicModel (hidden states), TriadicForCausalLM (logits, loss, generation)."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .cache import CACHE_NAME, RECURRENT, adopt, check_rows, new_cache, one_cache, refuse_read_prompt
from .configuration_triadic import TriadicConfig
from .layers import ShortConvolution, TriadicMLP, TriadicRMSNorm
from .layout import document_positions, find_layout
from .losses import IGNORE_INDEX, LanguageModelHead, shift
from .mixers import MIXERS, TriadicAttention, position_embeddings


class TriadicDecoderLayer(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = TriadicRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = MIXERS[config.layer_types[layer_idx]](config, layer_idx)
        self.post_attention_layernorm = TriadicRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = TriadicMLP(config)

    def forward(self, hidden_states, layout, cache=None, position_embeddings=None, attention_mask=None):
        mixed, _ = self.mixer(self.input_layernorm(hidden_states), layout, cache, position_embeddings, attention_mask)
        hidden_states = hidden_states + mixed  # [B, T, D]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TriadicPreTrainedModel(PreTrainedModel):
    config_class = TriadicConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["TriadicDecoderLayer"]
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["A_log", "dt_bias"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": TriadicDecoderLayer,
        "attentions": TriadicAttention,
    }
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _is_stateful = True  # a recurrent state cannot be rolled back, so no assisted decoding

    def _init_weights(self, module):
        super()._init_weights(module)  # matrices N(0, initializer_range), biases 0, norms 1
        if isinstance(module, (*MIXERS.values(), ShortConvolution)):
            module.reset_parameters()


class TriadicModel(TriadicPreTrainedModel):
    """The decoder without its head: token ids or embeddings to hidden states."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TriadicDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = TriadicRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.context = None  # the ranks that a window is spread over, see context.py
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        cu_seq_lens_q=None,
        max_length_q=None,
        cache=None,
        **kwargs,
    ):
        """Hidden states [B, T, D] of tokens [B, T]; see TriadicForCausalLM.forward for the arguments."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # [B, T, D]
        batch, length = x.shape[:2]
        cache = one_cache(cache, past_key_values)
        if cache is not None:
            adopt(cache, self.config)
        past_length = 0 if cache is None else cache.get_seq_length()
        padding = attention_mask["full_attention"] if isinstance(attention_mask, dict) else attention_mask
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim != 2:
            self._refuse_mask(attention_mask.ndim)
        layout = find_layout(
            batch, length, padding, position_ids, cu_seq_lens_q, max_length_q, past_length, self.context
        )
        cache = self._choose_cache(cache, use_cache, layout, batch)

        if layout.packed and batch > 1:
            position_ids = position_ids.expand(batch, -1).flatten()[None]  # [1, B T], as the mixers see them
        if position_ids is None:
            position_ids = document_positions(layout, length, past_length, x.device)
        attention_mask = self._softmax_mask(x, attention_mask, layout, cache)
        positions = position_embeddings(self.config, position_ids)
        for layer in self.layers:
            x = layer(x, layout=layout, cache=cache, position_embeddings=positions, attention_mask=attention_mask)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE_NAME: cache})

    def _refuse_mask(self, dimensions):
        if set(RECURRENT) & set(self.config.layer_types):
            raise ValueError(
                f"attention_mask has {dimensions} dimensions, but linear attention takes [B, past + T] alone."
            )

    def _choose_cache(self, cache, use_cache, layout, batch):
        replays = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if self.context is not None and (cache is not None or use_cache):
            raise ValueError("a context spread over ranks fills no cache: generate on one device.")
        if layout.packed and (cache is not None or use_cache):
            if "full_attention" in self.config.layer_types:
                raise ValueError("packed documents cannot fill the cache of softmax layers: pass one document per row.")
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError("packed documents cannot continue those of a filled cache: give an empty one.")
        if cache is not None and not layout.packed:
            check_rows(cache, batch)
        if replays and (cache is not None or use_cache):
            raise ValueError("gradient checkpointing would write the cache twice: turn one of them off.")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not layout.packed
        return new_cache(self.config) if use_cache and cache is None else cache

    def _softmax_mask(self, x, attention_mask, layout, cache):
        """The mask of the softmax layers; None where the back end needs none."""
        if isinstance(attention_mask, dict):
            return attention_mask["full_attention"]
        if layout.packed or "full_attention" not in self.config.layer_types:
            return None
        return create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, **{CACHE_NAME: cache}
        )


class TriadicForCausalLM(TriadicPreTrainedModel, GenerationMixin):
    """The decoder with an output head over the vocabulary."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan: ClassVar[dict[str, Any]] = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config):
        super().__init__(config)
        self.model = TriadicModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.vocab_size = config.vocab_size
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        cu_seq_lens_q=None,
        max_length_q=None,
        num_items_in_batch=None,
        cache=None,
        **kwargs,
    ):
        """Logits, and with targets the loss (in training the loss alone, so that full logits never exist).

        Args:
            input_ids: [B, T] int64, or inputs_embeds [B, T, D].
            attention_mask: [B, past + T], zero at padding, which may stand on either side: it writes nothing, decays
                nothing and stays out of the convolution.
            position_ids: [B, T]; where they do not go up by one, a packed document begins.
            cu_seq_lens_q: [N + 1] int32, bounds of the documents packed in the one row (B = 1); max_length_q: the
                longest of them, an int (softmax layers on a GPU read it from the bounds if it is not given).
            past_key_values, cache: a transformers Cache, under either of its names. Packed documents fill an empty one
                with a row each (linear attention alone): prompts of any lengths, read without padding.
            labels: [B, T], shifted here; or, by keyword, shift_labels [B, T], already shifted. -100 is ignored.
                (shift_labels stays out of the signature: transformers' Trainer takes every argument named like a label
                for one that each evaluation batch must hold.)
            num_items_in_batch: the loss is the sum over targets divided by it (default: the number of targets).
            logits_to_keep: only the last n positions' logits, or those at the given indices.

        Raises:
            ValueError: packing together with padding, several rows (cu_seq_lens_q), or a cache that cannot hold it.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seq_lens_q=cu_seq_lens_q,
            max_length_q=max_length_q,
            cache=one_cache(cache, past_key_values),
            **{**kwargs, "return_dict": True},
        )
        hidden_states, logits, loss = outputs.last_hidden_state, None, None
        has_targets = labels is not None or shift_labels is not None
        if not (self.training and has_targets):
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, keep])
        if has_targets:
            loss = self._loss(hidden_states, logits, labels, shift_labels, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
        )

    def _loss(self, hidden_states, logits, labels, shift_labels, num_items_in_batch):
        """transformers' loss of the logits, or the same from the hidden states in chunks."""
        targets = shift(labels) if shift_labels is None else shift_labels
        if logits is not None:
            counted = {"shift_labels": targets.contiguous(), "num_items_in_batch": num_items_in_batch}
            return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        count = num_items_in_batch
        if count is None:
            scored = (targets != IGNORE_INDEX).sum()
            count = (scored if self.model.context is None else self.model.context.total(scored)).clamp(min=1)
        return self.lm_head(hidden_states, targets) / count

    @torch.no_grad()
    def token_losses(self, input_ids, shift_labels, **kwargs):
        """Negative log-likelihood in nats of each target, float32 [B, T] (0 where -100); logits exist in chunks only.

        Args:
            input_ids, shift_labels: [B, T]; further arguments as in `forward`.
        """
        hidden_states = self.model(input_ids, use_cache=False, **kwargs).last_hidden_state
        return self.lm_head(hidden_states, shift_labels, reduction="none")

    def set_output_embeddings(self, new_embeddings):
        self.lm_head = LanguageModelHead.like(new_embeddings)

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, is_first_iteration=False, **kwargs):
        """What generate() gives a forward with a static cache: prompts their 2-D mask, since recurrent layers skip
        padding; later single tokens, never padding, what the softmax layers need, so that nothing depends on values.
        """
        if is_first_iteration or inputs_embeds.shape[1] > 1:
            return attention_mask
        if "full_attention" not in config.layer_types:
            return None
        cache = {CACHE_NAME: kwargs[CACHE_NAME]}
        mask = create_causal_mask(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **cache)
        return {"full_attention": mask}

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        """Prompts are never compiled, in chunks neither: every length would be, and padding is read on the host."""
        refuse_read_prompt(input_ids, generation_config, model_kwargs)
        disabled, generation_config.disable_compile = generation_config.disable_compile, True
        try:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            generation_config.disable_compile = disabled

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if model_kwargs.get(CACHE_NAME) is not None:
            adopt(model_kwargs[CACHE_NAME], self.config)


def compile_layers(model, **options):
    """Compile each layer of a decoder for itself (`torch.compile`'s options), in place.

    Layers of one kind share their code, so a model of any depth compiles as fast as one or two layers, and gradients
    come layer by layer, which lets data parallelism send them while the backward still runs.
    """
    for layer in model.base_model.layers:
        layer.compile(**options)


__all__ = ["TriadicConfig", "TriadicForCausalLM", "TriadicModel", "TriadicPreTrainedModel"]
