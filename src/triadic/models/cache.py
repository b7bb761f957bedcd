"""The memory of linear-attention layers inside transformers' caches.

transformers' own `LinearAttentionLayer` does not count tokens, so a cache of linear layers alone has no length, and it
fixes its dtype by the first write. `RecurrentLayer` is that layer with a float32 state and a length.
"""

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers 5.18 and later call the cache `cache`, before that `past_key_values`, in arguments and outputs alike.
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
RECURRENT = ("linear_attention",)  # layer types that remember a RecurrentLayer; the others, keys and values


class RecurrentLayer(LinearAttentionLayer, CacheLayerMixin):
    """One layer's recurrent state [B, HV, E, K, V] float32, its last W - 1 convolution inputs and its token count."""

    is_compileable = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.keys = self.values = None
        self.is_initialized = False
        self.num_tokens = 0

    def read(self):
        """(convolution state, recurrent state), both None before the first write."""
        return (self.conv_states[0], self.recurrent_states[0]) if self.has_previous_state[0] else (None, None)

    def write(self, conv_state, recurrent_state, num_tokens):
        """Replace the states by those after `num_tokens` more tokens (padding included, as in key/value caches)."""
        self.conv_states[0], self.recurrent_states[0] = conv_state, recurrent_state
        self.is_conv_states_initialized[0] = conv_state is not None
        self.is_recurrent_states_initialized[0] = self.has_previous_state[0] = self.is_initialized = True
        self.dtype, self.device = recurrent_state.dtype, recurrent_state.device
        self.num_tokens += num_tokens

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


def adopt(cache, config):
    """Give every recurrent layer of `cache` a RecurrentLayer (in place) and return the cache.

    Args:
        cache: a transformers `DynamicCache`, made with or without the model's config; an empty one may lack layers.
            A model of softmax layers alone takes any `Cache`.

    Raises:
        ValueError: another kind of cache, or one whose layer already holds something else.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"the cache is a {type(cache).__name__} but must be a transformers Cache.")
    recurrent = any(layer_type in RECURRENT for layer_type in config.layer_types)
    if recurrent and (not isinstance(cache, DynamicCache) or cache.offloading):
        kind = "an offloaded cache" if cache.offloading else f"a {type(cache).__name__}"
        raise ValueError(f"{kind} cannot hold recurrent states: use a DynamicCache without offloading.")
    for index, layer_type in enumerate(config.layer_types):
        if index == len(cache.layers):
            cache.layers.append(RecurrentLayer() if layer_type in RECURRENT else DynamicLayer())
        layer = cache.layers[index]
        if layer_type not in RECURRENT or isinstance(layer, RecurrentLayer):
            continue
        if getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values()):
            raise ValueError(f"layer {index} of the cache holds another model's {type(layer).__name__}.")
        cache.layers[index] = RecurrentLayer()
    return cache


def new_cache(config):
    """An empty DynamicCache for a model of this config."""
    return adopt(DynamicCache(config=config), config)


def one_cache(cache, past_key_values):
    """The cache among its two names (see CACHE_NAME)."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: give one of them.")
    return past_key_values if cache is None else cache
