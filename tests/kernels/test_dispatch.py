"""The table of back ends: order, refusal, and what `explain` says."""

import re
import types

import pytest
import torch
from torch.autograd import forward_ad
from triadic_kernels import chunk_triadic, dispatch, explain, recurrent_triadic, reference


def fake(reason, marker=None):
    """A back end that refuses with a reason, or answers with a constant."""

    def forward(p, q, k, v, *_):
        return torch.full_like(v, marker), None, []

    def recurrent(p, q, k, v, *_):
        return torch.full_like(v, marker), None

    return types.SimpleNamespace(unsupported=lambda p: reason, forward=forward, recurrent=recurrent)


@pytest.fixture
def table():
    """Replace the rows of both tables by these modules, or texts of failed imports."""
    tables = (dispatch.CHUNK, dispatch.RECURRENT, dispatch._loaded)
    before = [dict(whole) for whole in tables]

    def install(**backends):
        for whole in tables[:2]:
            whole.clear()
            whole.update({name: f"fake_{name}" for name in backends})
        dispatch._loaded.update({f"fake_{name}": backend for name, backend in backends.items()})

    yield install
    for whole, rows in zip(tables, before, strict=True):
        whole.clear()
        whole.update(rows)


def test_auto_takes_the_first_that_can(table, inputs):
    table(a=fake("it is Sunday"), b=fake(None, 1.0), c=fake(None, 2.0))
    x = inputs()
    with torch.no_grad():
        assert (chunk_triadic(**x)[0] == 1.0).all()
        assert (chunk_triadic(**x, backend="c")[0] == 2.0).all()
    assert explain(**x).splitlines() == ["a: it is Sunday", "b: selected", "c: can run"]


def test_explain_knows_how_recurrent_triadic_is_called(table, inputs):
    """In place the final state is wanted; where forward mode follows, only a differentiable back end runs."""
    final, other = fake(None), fake(None)
    final.unsupported = lambda p: None if p.output_final else "gives the final state"
    other.unsupported = lambda p: "has no derivatives" if p.needs_grad else None
    table(final=final, other=other, last=fake(None))
    x = inputs()

    def selected(**options):
        return re.search(r"(\w+): selected", explain(**x, recurrent=True, **options))[1]

    with torch.no_grad():
        assert selected() == "other"
        assert selected(inplace_state=True) == selected(output_final_state=True) == "final"
        with forward_ad.dual_level():
            x["v"] = forward_ad.make_dual(x["v"], torch.ones_like(x["v"]))
            assert selected() == "last"


def test_an_output_can_be_changed_in_place(inputs):
    x = inputs()
    x["v"].requires_grad_()
    o = chunk_triadic(**x, backend="torch")[0]
    (doubled,) = torch.autograd.grad(o.sum() * 2, x["v"], retain_graph=True)
    (grad,) = torch.autograd.grad(o.mul_(2).sum(), x["v"])
    torch.testing.assert_close(grad, doubled, rtol=0, atol=0)


def test_a_named_back_end_never_gives_way(table, inputs):
    table(a=fake("it is Sunday"), b=fake(None, 1.0))
    with pytest.raises(ValueError, match="backend='a' cannot run this call: it is Sunday"):
        chunk_triadic(**inputs(), backend="a")


def test_no_back_end_left(table, inputs):
    table(a=fake("it is Sunday"), b="not installed (no module)")
    with pytest.raises(
        ValueError, match=r"No back end can run this call:\na: it is Sunday\nb: not installed \(no module\)"
    ):
        chunk_triadic(**inputs())


class CompilationError(Exception):
    """Stands for Triton's, by the package it comes from."""

    __module__ = "triton.compiler.errors"


def broken(saved_like):
    def fail(*_):
        raise CompilationError("at 12:3:\nname is gone")

    return types.SimpleNamespace(unsupported=lambda p: None, forward=fail, recurrent=fail, saved_like=saved_like)


@pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic])
def test_what_does_not_compile_gives_way_and_says_so_once(op, table, inputs, recwarn):
    a, b = broken(object()), fake(None, 1.0)
    if op is chunk_triadic:
        b.saved_like = a.saved_like
    else:
        del a.saved_like  # a decoding step keeps nothing,
        b.saved_like = object()  # though the module may keep something of chunks
    table(a=a, b=b)
    x = inputs()
    with torch.no_grad():
        for _ in range(2):
            assert (op(**x)[0] == 1.0).all()
    message = r"a: does not compile here \(name is gone\); a slower back end runs in its place"
    assert [bool(re.match(message, str(w.message))) for w in recwarn] == [True]
    assert explain(**x).splitlines() == ["a: does not compile here (name is gone)", "b: selected"]


@pytest.mark.parametrize(("name", "other"), [("a", True), ("auto", False)], ids=["named", "another kind of memory"])
def test_what_does_not_compile_raises(name, other, table, inputs):
    kept = object()
    table(a=broken(kept), b=types.SimpleNamespace(**vars(fake(None, 1.0)), saved_like=kept if other else object()))
    for _ in range(2):
        with torch.no_grad(), pytest.raises(CompilationError, match="name is gone"):
            chunk_triadic(**inputs(), backend=name)


def test_another_thread_may_have_met_it_first(table, inputs):
    kept = object()

    def forward(*_):
        dispatch._loaded["fake_a"] = "does not compile here (name is gone)"
        raise CompilationError("name is gone")

    a = types.SimpleNamespace(unsupported=lambda p: None, forward=forward, saved_like=kept)
    table(a=a, b=types.SimpleNamespace(**vars(fake(None, 1.0)), saved_like=kept))
    with torch.no_grad():
        assert (chunk_triadic(**inputs())[0] == 1.0).all()


def test_a_step_that_another_thread_met_first_stays_a_step(table, inputs):
    def recurrent(*_):
        dispatch._loaded["fake_a"] = "does not compile here (name is gone)"
        raise CompilationError("name is gone")

    table(a=types.SimpleNamespace(unsupported=lambda p: None, recurrent=recurrent), b=fake(None, 1.0))
    dispatch.CHUNK.clear()
    with torch.no_grad():
        assert (recurrent_triadic(**inputs())[0] == 1.0).all()


def test_other_errors_of_a_back_end_are_raised(table, inputs):
    def forward(*_):
        raise RuntimeError("out of memory")

    kept = object()
    table(
        a=types.SimpleNamespace(unsupported=lambda p: None, forward=forward, saved_like=kept),
        b=types.SimpleNamespace(**vars(fake(None, 1.0)), saved_like=kept),
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        chunk_triadic(**inputs())


def test_a_missing_module_is_not_installed(monkeypatch, inputs):
    monkeypatch.setitem(dispatch.CHUNK, "nothing", "no_such_module")
    assert "torch: selected\nnothing: not installed (No module named" in explain(**inputs())
    with pytest.raises(ValueError, match="backend='nothing' cannot run this call: not installed"):
        chunk_triadic(**inputs(), backend="nothing")


def test_a_cpu_is_served_by_torch(inputs):
    lines = explain(**inputs()).splitlines()
    assert [line.split(":")[0] for line in lines] == list(dispatch.CHUNK)
    assert lines[-1] == "torch: selected"
    for name in list(dispatch.CHUNK)[:-1]:
        with pytest.raises(ValueError, match=f"backend='{name}' cannot run this call: "):
            chunk_triadic(**inputs(), backend=name)


@pytest.fixture
def spy(table):
    """The torch back end, which here is the only one, noting what it is called with."""
    calls = []

    def forward(p, *arguments):
        calls.append(("forward", arguments))
        return reference.forward(p, *arguments)

    def backward(p, *arguments):
        calls.append(("backward", arguments))
        return reference.backward(p, *arguments)

    table(spy=types.SimpleNamespace(unsupported=reference.unsupported, forward=forward, backward=backward))
    return calls


def test_back_ends_receive_contiguous_tensors(spy, inputs):
    x = inputs(B=2, T=40, states=2)
    x = {name: y.detach().mT.contiguous().mT.requires_grad_() for name, y in x.items()}
    assert not any(y.is_contiguous() for y in x.values())
    o, ht = chunk_triadic(**x, output_final_state=True)
    (o.sum() + ht.mT.contiguous().square().sum()).backward()  # gradients: one expanded, one transposed
    assert [name for name, _ in spy] == ["forward", "backward"]
    for _, arguments in spy:
        tensors = [y for y in arguments if isinstance(y, torch.Tensor)]
        assert len(tensors) in (8, 10)
        assert all(y.is_contiguous() for y in tensors)


def test_back_ends_keep_only_what_a_backward_needs(spy, inputs):
    x = inputs(T=40, states=1)
    chunk_triadic(**x)
    chunk_triadic(**{name: y.detach() for name, y in x.items()})
    with torch.no_grad():
        chunk_triadic(**x)
    assert [arguments[-1] for _, arguments in spy] == [True, False, False]


def test_gradients_that_do_not_exist_are_not_made_up(spy, inputs):
    x = inputs(T=40, states=1)
    o, ht = chunk_triadic(**x, output_final_state=True)
    o.sum().backward(retain_graph=True)
    ht.sum().backward()
    (do, dht), (no_do, state_gradient) = (arguments[-2:] for name, arguments in spy if name == "backward")
    assert do.min() == 1
    assert dht is None
    assert no_do.abs().max() == 0
    assert state_gradient.min() == 1


def test_named_torch_is_what_auto_takes_here(inputs):
    x = inputs()
    for op in (chunk_triadic, recurrent_triadic):
        assert torch.equal(op(**x)[0], op(**x, backend="torch")[0])


def test_problem_describes_the_call(inputs):
    x = inputs(B=1, T=9, H=2, HV=4, K=5, V=7, E=3, gate="head", beta=False, states=2, dtype=torch.float32)
    given = [x[name] for name in ("q", "k", "v", "q2", "g", "beta", "initial_state")]
    p = dispatch.problem(*given, torch.tensor([0, 4, 9]), scale=0.5, delta_rule=False, output_final=True)
    assert p == dispatch.Problem(
        B=1, T=9, H=2, HV=4, K=5, V=7, E=3, N=2, dtype=torch.float32, device_type="cpu", capability=None,
        delta_rule=False, scale=0.5, has_q2=True, gate="head", has_beta=False, state=torch.float32, output_final=True,
        varlen=True,
    )  # fmt: skip
