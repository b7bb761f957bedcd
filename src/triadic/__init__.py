"""Pretraining for linear-attention language models with a third-order recurrent state.

Importing this package registers the model with transformers: AutoModelForCausalLM loads its checkpoints.
"""

from .models import TriadicConfig, TriadicForCausalLM, TriadicModel

__all__ = ["TriadicConfig", "TriadicForCausalLM", "TriadicModel"]
