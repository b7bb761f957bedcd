"""What a model costs by its config alone: parameters, training FLOPs per token, memory that decoding keeps."""

import math

import torch

from .mixers import MIXERS
from .modeling_triadic import TriadicForCausalLM

CPU_PARAMETERS = 10**8  # a benchmark on a CPU takes hours for more


def count_parameters(config):
    """(all parameters, those that multiply every token: all but the input embedding, tied or not)."""
    with torch.device("meta"):
        model = TriadicForCausalLM(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = 0 if config.tie_word_embeddings else model.model.embed_tokens.weight.numel()
    return total, total - embedding


def flops_per_token(config, seq_len):
    """Training FLOPs per token (multiply-adds count 2, forward + backward = 3 x forward) at a window of `seq_len`.

    6 x parameters that multiply a token + 3 x the mixers' own work: the products with the recurrent state, or the
    causal half of the softmax products (see `forward_flops` of each mixer).
    """
    mixing = sum(MIXERS[layer_type].forward_flops(config, seq_len) for layer_type in config.layer_types)
    return float(6 * count_parameters(config)[1] + 3 * mixing)


def state_bytes(config, context_length, bytes_per_entry=2):
    """Bytes that decoding keeps per sequence after `context_length` tokens: recurrent states and key/value caches.

    The convolutions' last inputs (a few kilobytes) are left out, as in the paper's tables.
    """
    entries = sum(MIXERS[layer_type].state_entries(config, context_length) for layer_type in config.layer_types)
    return entries * bytes_per_entry


def check_timeable(config, name, trial):
    """Raise ValueError if the model is too large to be timed on a CPU and there is nothing else; `trial`: what to pass
    instead."""
    total, _ = count_parameters(config)
    if total > CPU_PARAMETERS and not torch.cuda.is_available():
        raise ValueError(
            f"{name} has {total / 1e9:.2g}B parameters: it is timed on a CUDA device, and torch sees none here; "
            f"run it on a GPU, or try a small model on the CPU: {trial}"
        )


def figure(value, digits):
    """`value` in so many decimal places; where that is zero, in two digits that count."""
    if value and abs(value) < 10**-digits:
        digits = 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits}f}"
