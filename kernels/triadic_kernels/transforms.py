"""The ops under torch.func (grad, vjp, jacrev, vmap, jvp and what they make together), for which torch.library has no
rules: an autograd.Function in the form that these ask for.
"""

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)


def active() -> bool:
    """Whether a transform follows or maps tensors now. A compiler sees to its own."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return any(level.key() != TransformType.Functionalize for level in get_interpreter_stack())


def mapped_by_autograd(tensors) -> bool:
    """Whether torch.autograd maps over one of them by itself (is_grads_batched, vectorize), without torch.func."""
    compiling = torch.compiler.is_compiling()
    return not compiling and any(x is not None and is_legacy_batchedtensor(x) for x in tensors)


def everything(x: Tensor | None) -> Tensor | None:
    """The plain tensor under a transformed one: of `vmap`, all that is mapped over."""
    while x is not None and is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def transformable(call, keep, differentiate, no_tangent: str):
    """An autograd.Function of call(*arguments) -> tensors.

    Args:
        keep, differentiate: its setup_context, and its backward with the gradients as one argument.
        no_tangent: what to say where forward-mode derivatives are asked for.

    `vmap` calls it once for each element, since its inputs are batches already, which a caller can fold into one.
    """

    class Transformable(torch.autograd.Function):
        @staticmethod
        def forward(*arguments):
            return tuple(call(*arguments))

        @staticmethod
        def setup_context(ctx, inputs, output):
            keep(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *gradients):
            return differentiate(ctx, gradients)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(no_tangent)

        @staticmethod
        def vmap(info, in_dims, *arguments):
            places = list(zip(arguments, in_dims, strict=True))
            results = []
            for i in range(info.batch_size):
                one = (x.select(at, i) if isinstance(x, Tensor) and at is not None else x for x, at in places)
                results.append(Transformable.apply(*one))
            return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return Transformable
