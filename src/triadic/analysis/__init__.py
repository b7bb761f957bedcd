"""What a trained model does with its state: half-lives, write strengths, use of context, rank of the state."""

from triadic.analysis.context import tail_loss
from triadic.analysis.figures import draw, write_table
from triadic.analysis.gates import half_lives, observe_gates, write_strengths
from triadic.analysis.state import effective_rank, state_ranks
from triadic.analysis.suite import AnalysisConfig, analyse

__all__ = [
    "AnalysisConfig",
    "analyse",
    "draw",
    "effective_rank",
    "half_lives",
    "observe_gates",
    "state_ranks",
    "tail_loss",
    "write_strengths",
    "write_table",
]
