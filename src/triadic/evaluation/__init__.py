"""Evaluate a checkpoint: perplexity by position, needle tests, text samples, each from one suite file."""

from triadic.evaluation.config import SuiteConfig
from triadic.evaluation.loading import load_checkpoint
from triadic.evaluation.sampling import complete
from triadic.evaluation.suite import evaluate, fetch

__all__ = ["SuiteConfig", "complete", "evaluate", "fetch", "load_checkpoint"]
