"""Pretraining with Accelerate: `train(load_config(path, overrides))`. The loop is in loop.py."""

from triadic.training.checkpoint import SaveError
from triadic.training.config import TrainConfig, load_config
from triadic.training.loop import NonFiniteError, Outcome, train

__all__ = ["NonFiniteError", "Outcome", "SaveError", "TrainConfig", "load_config", "train"]
