"""Effective rank of states whose rank is known, and of states that the token recurrence leaves."""

import math

import pytest
import torch

from triadic.analysis import effective_rank, state_ranks
from triadic.analysis.state import UNFOLDINGS, _singular_values


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_equal_singular_values_count_themselves(rank):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64))[0] for n in (20, 8))
    assert float(effective_rank(left @ right.T)) == pytest.approx(rank)


def test_unequal_singular_values_by_the_formula():
    shares = [0.7, 0.2, 0.1]
    expected = math.exp(-sum(p * math.log(p) for p in shares))
    matrix = torch.diag(5 * torch.tensor(shares, dtype=torch.float64))
    assert float(effective_rank(matrix)) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (7, 7)])
def test_any_matrix_as_by_its_singular_values(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    shares = torch.linalg.svdvals(matrices.double())
    shares = shares / shares.sum(-1, keepdim=True)
    expected = torch.exp(-(shares * shares.log()).sum(-1))
    torch.testing.assert_close(effective_rank(matrices), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6)])
def test_small_singular_values_and_what_rounding_leaves(shape):
    """1e-5 of the largest is found at any scale, beside any other matrix; what is 0 but for rounding is 0."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 2, dtype=torch.float64))[0] for n in shape)
    values = torch.tensor([1e-5, 1], dtype=torch.float64)
    matrix = left * values @ right.T
    found = _singular_values(torch.stack([matrix, 1e9 * matrix]))
    assert found.shape == (2, 6)
    assert not found[:, :4].any()
    torch.testing.assert_close(found[:, 4:], values * torch.tensor([[1], [1e9]]), rtol=1e-5, atol=0)


def test_zero_has_rank_zero_and_batches_are_independent():
    batch = torch.stack([torch.zeros(4, 4), torch.eye(4)])
    assert effective_rank(batch).tolist() == pytest.approx([0.0, 4.0])


def test_unfoldings_of_a_state_with_known_ranks():
    """sum of two orthonormal k (x) v in each of three slices with different keys: 6 joint keys, 2 values, 3 slices."""
    eye = torch.eye(8, dtype=torch.float64)
    state = torch.zeros(3, 8, 8, dtype=torch.float64)  # [E, K, V]
    for e in range(3):
        for j in range(2):
            state[e] += torch.outer(eye[2 * e + j], eye[j])
    ranks = {name: float(effective_rank(unfold(state))) for name, unfold in UNFOLDINGS.items()}
    assert ranks == pytest.approx({"EK x V": 2.0, "K x EV": 6.0, "E x KV": 3.0})


def test_state_of_one_token_has_rank_one_and_grows(make_model, tokens):
    model = make_model()
    rows = state_ranks(model, [tokens(2, 40)], [1, 5, 40])
    overall = {(r["unfolding"], r["position"]): r["value"] for r in rows if r["metric"] == "state_rank"}
    for name in UNFOLDINGS:
        assert overall[name, 1] == pytest.approx(1.0, abs=1e-4)
    assert 1.5 < overall["EK x V", 5] <= 5.0
    assert overall["EK x V", 40] > overall["EK x V", 5]
    layers = [r["value"] for r in rows if r["metric"] == "state_rank_by_layer" and r["position"] == 40]
    assert len(layers) == 3 * 2
    assert sum(layers[:2]) / 2 == pytest.approx(overall["EK x V", 40])


def test_positions_continue_one_another(make_model, tokens):
    """Reading in pieces leaves the state of reading at once."""
    model, ids = make_model(), tokens(1, 30)
    whole, pieces = (state_ranks(model, [ids], positions)[-3:] for positions in ([30], [7, 12, 30]))
    assert pieces[0]["position"] == whole[0]["position"] == 30
    assert [r["value"] for r in pieces] == pytest.approx([r["value"] for r in whole], rel=1e-3)


@pytest.mark.parametrize(
    ("length", "positions", "message"),
    [(10, [5, 11], "shorter than the position 11"), (10, [5, 5], "must rise"), (10, [0, 5], "at least 1")],
)
def test_bad_positions_are_refused(length, positions, message, make_model, tokens):
    with pytest.raises(ValueError, match=message):
        state_ranks(make_model(), [tokens(1, length)], positions)
