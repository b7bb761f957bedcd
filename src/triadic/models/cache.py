"""The memory of linear-attention layers inside transformers' caches.

transformers' own `LinearAttentionLayer` does not count tokens, so a cache of linear layers alone has no length, and it
fixes its dtype by the first write. `RecurrentLayer` is that layer with a state of its own dtype and a length;
`StaticRecurrentLayer` keeps both at fixed addresses, for compiled steps and CUDA graphs.
"""

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers 5.18 and later call the cache `cache`, before that `past_key_values`, in arguments and outputs alike.
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
RECURRENT = ("linear_attention",)  # layer types that remember a RecurrentLayer; the others, keys and values


class RecurrentLayer(LinearAttentionLayer, CacheLayerMixin):
    """One layer's recurrent state [B, HV, E, K, V] of `state_dtype`, last W - 1 convolution inputs and token count."""

    is_compileable = False
    in_place = False  # whether a step may overwrite the states that `read` gave

    def __init__(self, state_dtype=torch.float32, **kwargs):
        super().__init__(**kwargs)
        self.state_dtype = state_dtype
        self.keys = self.values = None
        self.is_initialized = False
        self.num_tokens = 0

    def read(self):
        """(convolution state, recurrent state), both None before the first write."""
        return (self.conv_states[0], self.recurrent_states[0]) if self.has_previous_state[0] else (None, None)

    def write(self, conv_state, recurrent_state, num_tokens):
        """Replace the states by those after `num_tokens` more tokens (padding included, as in key/value caches)."""
        if recurrent_state.dtype != torch.float64:  # a float64 model keeps float64
            recurrent_state = recurrent_state.to(self.state_dtype)
        self._place(conv_state, recurrent_state)
        self.is_conv_states_initialized[0] = conv_state is not None
        self.is_recurrent_states_initialized[0] = self.has_previous_state[0] = self.is_initialized = True
        self.dtype, self.device = recurrent_state.dtype, recurrent_state.device
        self.num_tokens += num_tokens

    def _place(self, conv_state, recurrent_state):
        self.conv_states[0], self.recurrent_states[0] = conv_state, recurrent_state

    def update(self, *args, **kwargs):
        raise NotImplementedError("A linear-attention layer keeps no keys and values: use write().")

    def crop(self, tokens_to_remove):
        raise ValueError("a recurrent state cannot forget its last tokens: keep a copy_cache() of what it was before.")

    def get_seq_length(self):
        return self.num_tokens

    def get_mask_sizes(self, query_length):
        return self.num_tokens + query_length, 0

    def reset(self):
        self.conv_states[0] = self.recurrent_states[0] = None
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
        self.has_previous_state[0] = self.is_initialized = False
        self.num_tokens = 0

    def batch_repeat_interleave(self, repeats):
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._apply(lambda state: state[indices])

    def _apply(self, change):
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0] = change(states[0])


class StaticRecurrentLayer(RecurrentLayer):
    """A RecurrentLayer whose tensors keep their addresses from the first write on: every later one copies into them.
    Gradients do not flow through what is overwritten.
    """

    is_compileable = True
    in_place = True

    def __init__(self, max_cache_len=-1, **kwargs):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len  # of the softmax layers beside it; a state has no limit
        self.num_tokens = torch.tensor(0)  # a tensor: a number would be compiled into the graph

    def _place(self, conv_state, recurrent_state):
        if self.recurrent_states[0] is None:
            self.num_tokens = self.num_tokens.to(recurrent_state.device)
            conv_state = None if conv_state is None else _own(conv_state)
            super()._place(conv_state, _own(recurrent_state))
            self._mark()
            return
        if conv_state is not None:
            self.conv_states[0].copy_(conv_state.detach())
        if recurrent_state is not self.recurrent_states[0]:
            self.recurrent_states[0].copy_(recurrent_state.detach())

    def _mark(self):
        """Tell the compiler that these addresses stay: CUDA graphs may then write there."""
        if not torch.compiler.is_compiling():
            for tensor in (self.num_tokens, self.conv_states[0], self.recurrent_states[0]):
                if tensor is not None:
                    torch._dynamo.mark_static_address(tensor)

    def get_mask_sizes(self, query_length):
        return (self.num_tokens + query_length if self.max_cache_len < 0 else self.max_cache_len), 0

    def reset(self):
        for tensor in (self.num_tokens, self.conv_states[0], self.recurrent_states[0]):
            if tensor is not None:
                tensor.zero_()  # zero states and no states are the same memory of nothing

    def reorder_cache(self, beam_idx):
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0].copy_(states[0].index_select(0, beam_idx.to(states[0].device)))

    def _apply(self, change):
        super()._apply(change)  # another number of rows: other addresses
        self._mark()


def _own(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def adopt(cache, config):
    """Give every recurrent layer of `cache` a RecurrentLayer (in place) and return the cache.

    Args:
        cache: a transformers `DynamicCache`, made with or without the model's config; an empty one may lack layers. Or
            a `StaticCache`: its layers become StaticRecurrentLayers. A model of softmax layers alone takes any `Cache`.

    Raises:
        ValueError: another kind of cache, or one that holds another model's memory.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"the cache is a {type(cache).__name__} but must be a transformers Cache.")
    recurrent = any(layer_type in RECURRENT for layer_type in config.layer_types)
    if recurrent and (not isinstance(cache, (DynamicCache, StaticCache)) or cache.offloading):
        kind = "an offloaded cache" if cache.offloading else f"a {type(cache).__name__}"
        raise ValueError(f"{kind} cannot hold recurrent states: use a DynamicCache or StaticCache without offloading.")
    count, given = len(config.layer_types), len(cache.layers)
    if given > count or (0 < given < count and cache.get_seq_length() > 0):
        raise ValueError(f"the cache has {given} layers, but the model has {count}: it is another model's.")
    for index, layer_type in enumerate(config.layer_types):
        if index == len(cache.layers):
            cache.layers.append(_recurrent(cache, config) if layer_type in RECURRENT else DynamicLayer())
        layer = cache.layers[index]
        if layer_type in RECURRENT and not isinstance(layer, RecurrentLayer):
            if getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values()):
                raise ValueError(f"layer {index} of the cache holds another model's {type(layer).__name__}.")
            cache.layers[index] = _recurrent(cache, config)
        else:
            _check_layer(layer, index, layer_type, config)
    return cache


def _check_layer(layer, index, layer_type, config):
    """Raise ValueError for a layer of another kind or that holds tensors of another model's shape."""
    if layer_type == "linear_attention":
        state, conv = layer.recurrent_states[0], layer.conv_states[0]
        if state is None:
            return
        found = *state.shape[1:], 0 if conv is None else conv.shape[-1]
        expected = (
            config.linear_num_value_heads, config.second_key_dim, config.linear_key_head_dim,
            config.linear_value_head_dim, max(config.linear_conv_kernel_dim - 1, 0),
        )  # fmt: skip
        names = "value heads, slices, key size, value size, convolution inputs"
    elif layer_type in RECURRENT:
        return
    elif isinstance(layer, LinearAttentionLayer) and not isinstance(layer, (DynamicLayer, StaticLayer)):
        raise ValueError(f"layer {index} of the cache holds another model's {type(layer).__name__}.")
    else:
        keys = getattr(layer, "keys", None)
        if keys is None or keys.ndim != 4:
            return
        found, expected = (keys.shape[1], keys.shape[3]), (config.num_key_value_heads, config.head_dim)
        names = "key/value heads, size"
    if found != expected:
        raise ValueError(
            f"layer {index} of the cache holds {list(found)}, but the model's are {list(expected)} ({names})."
        )


def check_rows(cache, batch):
    """Raise ValueError where the cache holds another number of rows than the batch."""
    states = (layer.recurrent_states[0] for layer in cache.layers if isinstance(layer, RecurrentLayer))
    rows = next((len(state) for state in states if state is not None), batch)
    if rows != batch:
        raise ValueError(f"the cache holds {rows} rows, but the batch has {batch}: give as many, or select_rows().")


def refuse_read_prompt(input_ids, generation_config, model_kwargs):
    """Raise ValueError where generate() gets a whole text without a token beyond those its cache has read: transformers
    would then read it once more.
    """
    cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
    whole = input_ids if model_kwargs.get("inputs_embeds") is None else model_kwargs["inputs_embeds"]
    covered = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    if cache is None or covered != whole.shape[1]:  # a longer mask: these are the new tokens alone
        return
    read, length = int(cache.get_seq_length()), whole.shape[1]
    if read >= length:
        raise ValueError(
            f"the cache has read {read} tokens, and the text has {length}: give the text with at least one token more."
        )


def _recurrent(cache, config):
    """An empty layer for this kind of cache."""
    state_dtype = getattr(torch, config.linear_state_dtype)
    if not isinstance(cache, StaticCache):
        return RecurrentLayer(state_dtype)
    lengths = [getattr(layer, "max_cache_len", -1) for layer in cache.layers]
    return StaticRecurrentLayer(max(lengths, default=-1), state_dtype=state_dtype)


def new_cache(config):
    """An empty DynamicCache for a model of this config."""
    return adopt(DynamicCache(config=config), config)


def one_cache(cache, past_key_values):
    """The cache among its two names (see CACHE_NAME)."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: give one of them.")
    return past_key_values if cache is None else cache
