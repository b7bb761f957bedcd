"""Autograd functions as torch 2.11 can compile them: it drops, in silence, the gradient of a tensor that `forward` has
changed in place and then returns. Held here on every release; test_training_modes.py compiles them.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triadic.models import context

UNSEEN = {"ChunkTriadic", "Transformable"}  # by compilers, which are given the op that they stand for


def functions():
    """Every autograd function of the packages."""
    found = (f for f in torch.autograd.Function.__subclasses__() if f.__module__.startswith("triadic"))
    return [f for f in found if f.__name__ not in UNSEEN]


class Writes(TorchDispatchMode):
    """Keeps the tensors that operators write to."""

    def __init__(self):
        super().__init__()
        self.written = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | (kwargs or {})
        changed = {a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        self.written += [given[name] for name in changed & given.keys()]
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def returned(monkeypatch):
    """Name of a function -> for every tensor that its forward returns, whether an operator inside has written to it."""
    results = {}

    def watched(name, forward):
        def call(*arguments):
            with Writes() as writes:
                y = forward(*arguments)
            results.setdefault(name, []).append(any(y is x for x in writes.written))
            return y

        return staticmethod(call)

    for function in functions():
        monkeypatch.setattr(function, "forward", watched(function.__name__, function.forward))
    return results


def test_no_function_returns_what_it_changed_in_place(make_model, tokens, returned, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda y, x, group: y.copy_(x))
    ids = tokens(1, 10)
    make_model("gdn").train()(ids, labels=ids).loss.backward()
    context._Exchange.apply(torch.randn(1, 2, 3, requires_grad=True), None).sum().backward()
    assert set(returned) == {f.__name__ for f in functions()}
    assert not any(any(found) for found in returned.values()), returned


def test_it_would_notice():
    with Writes() as writes:
        y = torch.ones(3).mul_(2)
        view = y.detach()
    assert [any(result is x for x in writes.written) for result in (y, view)] == [True, False]
