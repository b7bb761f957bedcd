"""Data: text to token stores (`prepare`), stores to windows, windows to batches."""

from .config import DataConfig
from .mixture import MixtureStore
from .preparation import prepare
from .store import TokenStore, check_tokenizer, open_store
from .tokenizer import tokenizer_hash
from .windows import Windows, collate, step_indices

__all__ = [
    "DataConfig",
    "MixtureStore",
    "TokenStore",
    "Windows",
    "check_tokenizer",
    "collate",
    "open_store",
    "prepare",
    "step_indices",
    "tokenizer_hash",
]
