import pytest
import torch

from triadic.models import TriadicConfig, TriadicForCausalLM


@pytest.fixture
def make_model():
    """A tiny model: 2 layers, 2 heads of 4 slices, state 4 x 8 x 8."""

    def make(seed=0, **changes):
        fields = {
            "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "second_key_dim": 4,
            "output_gate_rank": 4, "initializer_range": 0.2,
        }  # fmt: skip
        torch.manual_seed(seed)
        return TriadicForCausalLM(TriadicConfig(**{**fields, **changes})).eval()

    return make


@pytest.fixture
def tokens():
    def draw(*shape, seed=1):
        return torch.randint(0, 53, shape, generator=torch.Generator().manual_seed(seed))

    return draw
