"""Pretraining with Accelerate: `train(load_config(path, overrides))`. The loop is in loop.py.

Names are imported when they are asked for, so that the parts which need no data (speed.py) load without its packages.
"""

import importlib

_HOME = {
    "NonFiniteError": "loop",
    "Outcome": "loop",
    "TrainConfig": "config",
    "TrainingError": "errors",
    "load_config": "config",
    "train": "loop",
}

__all__ = ["NonFiniteError", "Outcome", "TrainConfig", "TrainingError", "load_config", "train"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
