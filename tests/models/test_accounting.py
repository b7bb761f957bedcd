"""FLOPs and memory against numbers counted by hand."""

from pathlib import Path

import pytest

from triadic.models import TriadicConfig, count_parameters, flops_per_token, state_bytes

CONFIGS = Path(__file__).parents[2] / "configs" / "model"


def load(name):
    return TriadicConfig.from_pretrained(CONFIGS / f"{name}.json")


def test_flops_of_the_papers_models():
    """E=8, K=V=128: 0.79 MFLOP per token and head forward and three times that in training; 24 layers of 8 heads."""
    config, embedding = load("triadic_gdn_400m_e8"), 32000 * 1024
    total = count_parameters(config)[0]
    assert total == 385_412_096
    heads, head = 24 * 8, 3 * 2 * 8 * 128 * 128
    assert head == 786_432
    assert flops_per_token(config, 4096) == 6 * (total - embedding) + 3 * heads * head
    assert flops_per_token(config, 65536) == flops_per_token(config, 4096)
    sgla = load("triadic_sgla_400m_e8")  # no product K S
    assert flops_per_token(config, 1) - flops_per_token(sgla, 1) == 3 * heads * 2 * 8 * 128 * 128


@pytest.mark.parametrize("length", [1024, 65536])
def test_flops_of_softmax(length):
    """Causal half of Q K^T and P V, forward and twice that backward: 6 T H D per token and layer."""
    config = load("transformer_400m")
    weights = 6 * (377_019_392 - 32000 * 1024)
    assert flops_per_token(config, length) == weights + 24 * 6 * length * 8 * 128


def test_hybrid_is_the_sum_of_its_layers():
    config = load("hybrid_400m_gqa8")
    linear, softmax = 18 * 8 * 3 * 2 * 128 * 128, 6 * 2 * 4096 * 8 * 128
    assert flops_per_token(config, 4096) == 6 * count_parameters(config)[1] + 3 * (linear + softmax)
    assert state_bytes(config, 4096) == 2 * (18 * 8 * 128 * 128 + 6 * 2 * 128 * 4096)


def test_tied_embeddings_still_multiply(make_config):
    tied, untied = make_config(tie_word_embeddings=True), make_config()
    assert count_parameters(untied)[0] - count_parameters(tied)[0] == 61 * 32
    assert count_parameters(untied)[1] == count_parameters(tied)[1]


def test_state_bytes_are_what_a_cache_holds(kind, make_model, tokens, cache_tensors):
    """Entries counted from a real cache (float32: 4 bytes), its convolution inputs left out."""
    model = make_model(kind)
    outputs = model(tokens(1, 9), use_cache=True)
    entries = sum(x.numel() for x in cache_tensors(outputs) if not (x.ndim == 2 and x.shape[-1] == 3))
    assert state_bytes(model.config, 9, bytes_per_entry=4) == 4 * entries
