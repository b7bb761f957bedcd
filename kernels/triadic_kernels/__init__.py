"""Triadic linear attention: the operations, without any model."""

from .conv import causal_conv1d
from .features import conv_features
from .op import chunk_triadic, explain
from .recurrent import recurrent_triadic

__all__ = ["causal_conv1d", "chunk_triadic", "conv_features", "explain", "recurrent_triadic"]
