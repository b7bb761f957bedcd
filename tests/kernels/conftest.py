"""What the kernel tests share: the one tolerance table, random problems, and gradients of a whole call."""

import importlib.util
import platform

import pytest
import torch
import torch.nn.functional as F

# Cannot be imported without Triton; that it is missing is then what test_triton_support.py reports.
TRITON = importlib.util.find_spec("triton") is not None
collect_ignore = [] if TRITON else ["test_chunk_tables.py", "test_fakes.py", "test_launch.py", "test_triton_offline.py"]


def pytest_collection_modifyitems(config, items):
    """Where there is no Triton to install (pyproject.toml asks for it on Linux, x86-64), its tests are not run."""
    if TRITON or (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return
    unable = [item for item in items if item.get_closest_marker("triton")]
    config.hook.pytest_deselected(items=unable)
    items[:] = [item for item in items if item not in unable]


# Relative l2 error that every back end must stay below, by the dtype of q, k and v.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-2,
}
# The Triton kernels take a decay between two tokens as a difference of float32 sums: digits are lost at strong decays.
TRITON_TOLERANCE = TOLERANCE | {torch.float32: 1e-4}


@pytest.fixture(scope="session")
def judge():
    """judge(rows): asserts what the rows of triton_cases.py must show."""

    def check(rows: list[dict]) -> None:
        assert rows
        for row in rows:
            assert row["worst"] < TRITON_TOLERANCE[getattr(torch, row["dtype"])], row
            assert row["absent"], f"a gradient is given for an absent input, or missing for one that is there: {row}"
            assert row["repeatable"], f"two runs differ: {row}"
            assert row["inference"], f"the output changes when nothing is kept for the backward: {row}"
            assert row["isolated"], f"a document changes another one: {row}"

    return check


def relative_error(x, reference):
    """||x - reference|| / ||reference|| in float64; the norm itself where the reference is zero; inf for NaN."""
    x, reference = x.double(), reference.double()
    norm = reference.norm()
    error = (x - reference).norm() / (norm if norm > 0 else 1.0)
    return error.item() if torch.isfinite(error) else float("inf")


def make_inputs(
    B=1,
    T=10,
    H=2,
    HV=4,
    K=5,
    V=7,
    E=3,
    gate="slice",
    strongest=3.0,
    beta=True,
    states=None,
    dtype=torch.float64,
    seed=0,
):
    """Leaf tensors of a call by argument name. E=None: no second keys; states: N of an initial state, None: none.

    Log decays spread over many magnitudes from exactly 0 to exactly -strongest.
    """
    generator = torch.Generator().manual_seed(seed)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def unit(x):
        return F.normalize(x, dim=-1)

    decays = (B, T, HV, E or 1) if gate == "slice" else (B, T, HV)
    g = -strongest * (1.2 * torch.rand(decays, generator=generator, dtype=torch.float64) - 0.1).clamp(0, 1) ** 4
    inputs = {
        "q": unit(normal(B, T, H, K)).to(dtype),
        "k": unit(normal(B, T, H, K)).to(dtype),
        "v": normal(B, T, HV, V).to(dtype),
        "q2": None if E is None else unit(F.softplus(normal(B, T, H, E))).to(state_dtype),
        "k2": None if E is None else unit(F.softplus(normal(B, T, H, E))).to(state_dtype),
        "g": None if gate is None else g.to(state_dtype),
        "beta": torch.sigmoid(normal(B, T, HV)).to(state_dtype) if beta else None,
        "initial_state": None if states is None else normal(states, HV, E or 1, K, V).to(state_dtype),
    }
    return {name: None if x is None else x.requires_grad_() for name, x in inputs.items()}


def weight_of(x, seed):
    """A fixed random weight for an output, whatever its memory layout."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def differentiate(op, inputs, **options):
    """Output, final state and the gradient of a random functional of both with respect to every input, by name."""
    given = {name: x for name, x in inputs.items() if x is not None}
    o, ht = op(**inputs, output_final_state=True, **options)
    gradients = torch.autograd.grad([o, ht], list(given.values()), [weight_of(o, 1), weight_of(ht, 2)])
    return {"o": o, "ht": ht, **{f"d{name}": x for name, x in zip(given, gradients, strict=True)}}


def assert_close(results, reference, tolerance):
    """Every named tensor within the tolerance, in shape and in relative l2."""
    assert results.keys() == reference.keys()
    errors = {}
    for name, x in results.items():
        assert x.shape == reference[name].shape, name
        errors[name] = relative_error(x, reference[name])
    assert max(errors.values()) < tolerance, {name: f"{error:.1e}" for name, error in errors.items()}


@pytest.fixture(scope="session")
def tolerance():
    return TOLERANCE


@pytest.fixture(scope="session")
def inputs():
    return make_inputs


@pytest.fixture(scope="session")
def gradients():
    return differentiate


@pytest.fixture(scope="session")
def close():
    return assert_close


@pytest.fixture(scope="session")
def relative():
    return relative_error
