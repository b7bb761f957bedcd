"""The model: configuration, decoder, accounting; importing it registers `triadic` with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .accounting import check_timeable, count_parameters, flops_per_token, state_bytes
from .configuration_triadic import TriadicConfig
from .modeling_triadic import TriadicForCausalLM, TriadicModel, TriadicPreTrainedModel
from .snapshots import copy_cache, load_cache, save_cache, select_rows

AutoConfig.register("triadic", TriadicConfig, exist_ok=True)
AutoModel.register(TriadicConfig, TriadicModel, exist_ok=True)
AutoModelForCausalLM.register(TriadicConfig, TriadicForCausalLM, exist_ok=True)

__all__ = [
    "TriadicConfig",
    "TriadicForCausalLM",
    "TriadicModel",
    "TriadicPreTrainedModel",
    "check_timeable",
    "copy_cache",
    "count_parameters",
    "flops_per_token",
    "load_cache",
    "save_cache",
    "select_rows",
    "state_bytes",
]
