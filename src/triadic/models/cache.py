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
        if recurrent_state.dtype == torch.float32:  # a float64 model keeps float64
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
    """A RecurrentLayer whose tensors keep their addresses from the first write on: every later one copies into them."""

    is_compileable = True
    in_place = True

    def __init__(self, max_cache_len=-1, **kwargs):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len  # of the softmax layers beside it; a state has no limit
        self.num_tokens = torch.tensor(0)  # a tensor: a number would be compiled into the graph

    def _place(self, conv_state, recurrent_state):
        if self.recurrent_states[0] is None:
            self.num_tokens = self.num_tokens.to(recurrent_state.device)
            conv_state = None if conv_state is None else conv_state.clone(memory_format=torch.contiguous_format)
            super()._place(conv_state, recurrent_state.clone(memory_format=torch.contiguous_format))
            self._mark()
            return
        if conv_state is not None:
            self.conv_states[0].copy_(conv_state)
        if recurrent_state is not self.recurrent_states[0]:
            self.recurrent_states[0].copy_(recurrent_state)

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


def adopt(cache, config):
    """Give every recurrent layer of `cache` a RecurrentLayer (in place) and return the cache.

    Args:
        cache: a transformers `DynamicCache`, made with or without the model's config; an empty one may lack layers. Or
            a `StaticCache`: its layers become StaticRecurrentLayers. A model of softmax layers alone takes any `Cache`.

    Raises:
        ValueError: another kind of cache, or one whose layer already holds something else.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"the cache is a {type(cache).__name__} but must be a transformers Cache.")
    recurrent = any(layer_type in RECURRENT for layer_type in config.layer_types)
    if recurrent and (not isinstance(cache, (DynamicCache, StaticCache)) or cache.offloading):
        kind = "an offloaded cache" if cache.offloading else f"a {type(cache).__name__}"
        raise ValueError(f"{kind} cannot hold recurrent states: use a DynamicCache or StaticCache without offloading.")
    for index, layer_type in enumerate(config.layer_types):
        if index == len(cache.layers):
            cache.layers.append(_recurrent(cache, config) if layer_type in RECURRENT else DynamicLayer())
        layer = cache.layers[index]
        if layer_type not in RECURRENT or isinstance(layer, RecurrentLayer):
            continue
        if getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values()):
            raise ValueError(f"layer {index} of the cache holds another model's {type(layer).__name__}.")
        cache.layers[index] = _recurrent(cache, config)
    return cache


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
