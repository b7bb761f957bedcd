"""torch.func on the ops: derivatives and maps against the token recurrence and plain autograd, or one sentence."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from triadic_kernels import causal_conv1d, chunk_triadic, explain, recurrent_triadic

NO_TANGENT = "chunk_triadic has no forward-mode derivative; recurrent_triadic has one"
OPS = pytest.mark.parametrize("op", [chunk_triadic, recurrent_triadic])
CU_SEQLENS = torch.tensor([0, 3, 3, 40])


def plain(inputs, **sizes):
    """(k, the other inputs), nothing of them followed by autograd."""
    x = {name: None if y is None else y.detach() for name, y in inputs(**{"T": 40} | sizes).items()}
    return x.pop("k"), x


def loss_of(op, x, **options):
    """A function of k alone, that weighs outputs and final states."""

    def loss(k):
        o, ht = op(k=k, **x, output_final_state=True, **options)
        return o.square().sum() + ht.sin().sum()

    return loss


def gradient(f, k):
    """By plain autograd."""
    k = k.clone().requires_grad_()
    return torch.autograd.grad(f(k), k)[0]


@OPS
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_and_maps(op, packed, inputs, close, tolerance):
    k, x = plain(inputs, B=1 if packed else 2, states=3 if packed else 2)
    options = dict(cu_seqlens=CU_SEQLENS) if packed else {}
    f, definition = loss_of(op, x, **options), loss_of(recurrent_triadic, x, **options)
    many = torch.stack([k, k.flip(1), -k])
    one = gradient(definition, k)
    each = torch.stack([gradient(definition, k) for k in many])
    found = {
        "grad": grad(f)(k),
        "vjp": vjp(f, k)[1](torch.tensor(2.0).double())[0] / 2,
        "jacrev": jacrev(lambda k: torch.stack([f(k), 3 * f(k)]))(k)[1] / 3,
        "vmap": vmap(f)(many),
        "vmap of grad": vmap(grad(f))(many),
        "grad of vmap": grad(lambda many: vmap(f)(many).sum())(many),
        "vmap without gradients": torch.no_grad()(vmap(f, in_dims=1))(many.transpose(0, 1)),
    }
    values = torch.stack([definition(k) for k in many])
    wanted = [one, one, one, values, each, each, values]
    close(found, dict(zip(found, wanted, strict=True)), tolerance[torch.float64])


@OPS
def test_every_input_and_maps_over_some(op, inputs, gradients, close, tolerance):
    """Of grad: all inputs at once. Of vmap: gates alone, the other inputs shared; and float32."""
    x = inputs(T=40, states=1, dtype=torch.float32)
    detached = {name: y.detach() for name, y in x.items()}

    def loss(x):
        o, ht = op(**x, use_qk_l2norm_in_kernel=True)
        assert ht is None
        return o.square().sum()

    found = grad(loss)(detached)
    o, _ = recurrent_triadic(**{name: y.double() for name, y in x.items()}, use_qk_l2norm_in_kernel=True)
    wanted = torch.autograd.grad(o.square().sum(), list(x.values()))
    close(found, dict(zip(x, wanted, strict=True)), tolerance[torch.float32])
    gates = torch.stack([detached["g"], 2 * detached["g"]])
    each = vmap(lambda g: op(**{**detached, "g": g})[0])(gates)
    torch.testing.assert_close(each, torch.stack([op(**{**detached, "g": g})[0] for g in gates]))


def test_what_the_chunks_refuse(inputs):
    k, x = plain(inputs, B=2)
    f, many = loss_of(chunk_triadic, x), torch.stack([k, k])
    for call in (
        lambda: jvp(f, (k,), (k,)),
        lambda: vmap(lambda k: jvp(f, (k,), (k,))[1])(many),
        lambda: jvp(vmap(f), (many,), (many,)),
        lambda: hessian(f)(k),
    ):
        with pytest.raises(NotImplementedError, match=NO_TANGENT):
            call()
    with pytest.raises(NotImplementedError, match="has no second derivative; recurrent_triadic can be differentiated"):
        grad(lambda k: grad(f)(k).sum())(k)
    with pytest.raises(NotImplementedError, match=r"segment_size is 16 under a transform of torch.func.* leave it out"):
        grad(loss_of(chunk_triadic, x, segment_size=16))(k)
    k.requires_grad_()
    o = chunk_triadic(k=k, **x)[0]
    with pytest.raises(NotImplementedError, match=r"is_grads_batched=True or vectorize=True.*take torch.func.vjp and"):
        torch.autograd.grad(o, k, torch.stack([o, o]).detach(), is_grads_batched=True)


def test_what_steps_refuse(inputs):
    k, x = plain(inputs, states=3)
    many = torch.stack([k, k])
    with pytest.raises(ValueError, match=r"overwrites a state, which torch.func does not follow; leave it out"):
        vmap(lambda k: recurrent_triadic(k=k, **x, cu_seqlens=CU_SEQLENS, inplace_state=True)[0])(many)
    with pytest.raises(ValueError, match=r"cu_seqlens differs between elements of torch.func.vmap"):
        vmap(lambda k, cu: recurrent_triadic(k=k, **x, cu_seqlens=cu)[0])(many, torch.stack([CU_SEQLENS] * 2))
    with pytest.raises(ValueError, match="log decays must be <= 0"):
        vmap(lambda g: recurrent_triadic(k=k, **{**x, "g": g}, cu_seqlens=CU_SEQLENS)[0])(-torch.stack([x["g"]] * 2))


def test_derivatives_of_every_kind_of_the_recurrence(inputs, close, tolerance):
    k, x = plain(inputs, T=5)
    f, many = loss_of(recurrent_triadic, x), torch.stack([k, 2 * k])
    tangents = torch.stack([jvp(f, (k,), (k,))[1] for k in many])
    torch.testing.assert_close(tangents, torch.stack([(gradient(f, k) * k).sum() for k in many]))
    torch.testing.assert_close(vmap(lambda k: jvp(f, (k,), (k,))[1])(many), tangents)
    torch.testing.assert_close(jvp(vmap(f), (many,), (many,))[1], tangents)
    square = torch.autograd.functional.hessian(f, k)
    close({"hessian": hessian(f)(k)}, {"hessian": square}, tolerance[torch.float64])


def test_explain_within_transforms(inputs):
    k, x = plain(inputs)
    lines = []
    jvp(vmap(lambda k: (lines.append(explain(k=k, **x, recurrent=True)), k)[1]), (k[None],), (k[None],))
    assert lines[0].endswith("torch: selected")


@pytest.mark.parametrize("of", ["x", "weight", "initial_state"])
def test_convolution(of):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(2, 9, 6), weight=(6, 4), initial_state=(2, 6, 3))
    given = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}

    def found(y):
        y, final = causal_conv1d(**{**given, of: y}, activation="silu", output_final_state=True)
        return y.sin().sum() + final.cos().sum()

    def wanted(y):
        x, weight, past = ({**given, of: y}[name] for name in shapes)
        stream = torch.cat([past.mT, x], 1)
        y = F.silu(sum(stream[:, w : w + 9] * weight[:, w] for w in range(4)))
        return y.sin().sum() + stream[:, 9:].cos().sum()

    x = given[of]
    many, direction = torch.stack([x, 2 * x]), torch.flip(x, (0, 1))
    for transform in (
        lambda f: grad(f)(x),
        lambda f: vmap(grad(f))(many),
        lambda f: jvp(f, (x,), (direction,))[1],
        lambda f: hessian(f)(x),
        lambda f: jvp(lambda x: jvp(f, (x,), (direction,))[1], (x,), (direction,))[1],
    ):
        torch.testing.assert_close(transform(found), transform(wanted))
