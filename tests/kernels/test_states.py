"""A sequence in segments, chained by their states, is the sequence in one pass."""

from itertools import pairwise

import pytest
import torch
from triadic_kernels import chunk_triadic, recurrent_triadic

PER_TOKEN = ("q", "k", "v", "q2", "k2", "g", "beta")


def chained(ops, bounds):
    """An op that runs each segment of T with the next op of `ops`, handing the state on."""

    def run(initial_state, output_final_state, **inputs):
        o, state = [], initial_state
        for i, (start, end) in enumerate(pairwise(bounds)):
            segment = {name: inputs[name][:, start:end] for name in PER_TOKEN}
            part, state = ops[i % len(ops)](**segment, initial_state=state, output_final_state=True)
            o.append(part)
        return torch.cat(o, 1), state

    return run


@pytest.mark.parametrize("delta_rule_op", [chunk_triadic, recurrent_triadic])
@pytest.mark.parametrize("split", [1, 31, 64, 129])
def test_two_segments(delta_rule_op, split, inputs, gradients, close, tolerance):
    x = inputs(B=2, T=130, E=3, states=2)
    whole = gradients(delta_rule_op, x)
    close(gradients(chained([delta_rule_op], [0, split, 130]), x), whole, tolerance[torch.float64])


def test_prefill_then_decode(inputs, gradients, close, tolerance):
    x = inputs(B=2, T=70, E=3, states=2)
    segments = chained([chunk_triadic, recurrent_triadic], [0, 65, *range(66, 71)])
    close(gradients(segments, x), gradients(recurrent_triadic, x), tolerance[torch.float64])


def test_an_empty_segment_hands_the_state_through(inputs, gradients, close, tolerance):
    x = inputs(B=2, T=40, E=3, states=2)
    segments = chained([chunk_triadic, recurrent_triadic], [0, 0, 40, 40, 40])
    close(gradients(segments, x), gradients(chunk_triadic, x), tolerance[torch.float64])


@pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic])
def test_initial_state_is_left_as_it_was(op, inputs):
    x = inputs(B=2, T=40, states=2)
    before = x["initial_state"].clone()
    with torch.no_grad():
        _, ht = op(**x, output_final_state=True)
    assert torch.equal(x["initial_state"], before)
    assert not torch.equal(ht, before)
