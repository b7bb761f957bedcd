"""Runs conv_features on a list of problems and prints every error against the definition in float64.

A program of its own: Triton's interpreter must be switched on before its kernels are imported.
    TRITON_INTERPRET=1 python tests/kernels/features_cases.py
    python tests/kernels/features_cases.py --device cuda --dtypes bfloat16,float32 --large
"""

import argparse
import json
from itertools import pairwise

import torch
from triadic_kernels.features import conv_features

# rows, tokens, documents, kernel width, and of each part: channels, head size (0: no unit length), activation, float32
PLAIN = dict(B=1, T=40, bounds=None, W=4)
SMALL = [
    dict(B=2, T=37, parts=[(32, 16, "silu", False), (24, 0, "silu", False), (12, 4, "softplus", True)]),
    dict(bounds=[0, 1, 3, 3, 12, 40], parts=[(64, 64, "silu", False), (8, 8, "sigmoid", True), (5, 1, "none", False)]),
    dict(  # across runs, forward and backward, at their ends
        T=130, bounds=[0, 62, 63, 65, 123, 124, 126, 130], parts=[(128, 128, "silu", False), (8, 8, "softplus", True)]
    ),
    dict(B=3, T=2, parts=[(10, 2, "softplus", True)]),
    dict(T=1, W=1, parts=[(16, 0, "none", False), (0, 8, "softplus", True), (16, 16, "softplus", False)]),
    dict(T=3, bounds=[0, 2, 3], W=7, parts=[(130, 2, "silu", True)]),
]
LARGE = [
    dict(B=2, T=1000, parts=[(2048, 128, "silu", False)] * 2 + [(2048, 0, "silu", False), (128, 8, "softplus", True)]),
    dict(
        T=5000, bounds=[0, 1, 3, 1000, 1001, 4097, 5000], parts=[(512, 256, "silu", False), (64, 32, "softplus", True)]
    ),
]
ACTIVATIONS = {
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "softplus": lambda z: torch.log1p(torch.exp(z)),
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "none": lambda z: z,
}


def definition(x, weight, parts, bounds):
    """Token by token, channel groups by themselves."""
    W = weight.shape[1]
    documents = [(b, s, e) for b in range(len(x)) for s, e in pairwise(bounds or [0, x.shape[1]])]
    z = torch.zeros_like(x)
    for b, start, end in documents:
        for w in range(W):
            shift = W - 1 - w
            if end - start > shift:
                z[b, start + shift : end] += weight[:, w] * x[b, start : end - shift]
    outputs = []
    for part, (size, group, activation, _) in zip(z.split([p[0] for p in parts], -1), parts, strict=True):
        y = ACTIVATIONS[activation](part)
        if group and size:
            heads = y.unflatten(-1, (-1, group))
            y = (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)
        outputs.append(y)
    return outputs


def relative(x, y):
    return ((x.double() - y).norm() / y.norm().clamp(min=1e-9)).item() if y.numel() else 0.0


def check(case, dtype, device, compiled):
    case = PLAIN | case
    generator = torch.Generator().manual_seed(0)
    parts, bounds = case["parts"], case["bounds"]
    C = sum(part[0] for part in parts)
    x = torch.randn(case["B"], case["T"], C, generator=generator, dtype=torch.float64).to(dtype).to(device)
    weight = (torch.rand(C, case["W"], generator=generator) - 0.5).to(device)
    dys = [torch.randn(*x.shape[:2], part[0], generator=generator).to(device) for part in parts]
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    dys = [dy.to(torch.float32 if part[3] else dtype) for dy, part in zip(dys, parts, strict=True)]

    def step(x, weight, f, dys):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        ys = f(x, weight)
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, (x, weight), dys)]

    columns = [[part[i] for part in parts] for i in range(4)]
    got = step(x, weight, lambda x, weight: conv_features(x, weight, *columns, cu), dys)
    if compiled:
        graph = torch.compile(
            lambda x, weight: conv_features(x, weight, *columns, cu), fullgraph=True, backend="aot_eager"
        )
        again = step(x, weight, graph, dys)
    else:
        ys, back = torch.func.vjp(lambda x, weight: tuple(conv_features(x, weight, *columns, cu)), x, weight)
        again = [*ys, *back(tuple(dys))]
    exact = [dy.double() for dy in dys]
    want = step(x.double(), weight.double(), lambda x, weight: definition(x, weight, parts, bounds), exact)
    names = [*(f"y{i}" for i in range(len(parts))), "dx", "dweight"]
    return {
        "case": {name: value for name, value in case.items() if name != "parts"},
        "dtype": str(dtype).split(".")[1],
        "errors": {name: relative(a, b) for name, a, b in zip(names, got, want, strict=True)},
        "dtypes": [y.dtype for y in got[:-2]] == [torch.float32 if part[3] else dtype for part in parts],
        "repeatable": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float32,float16")
    parser.add_argument("--large", action="store_true")
    a = parser.parse_args()
    for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, poisoned(getattr(owner, name)))
    for dtype in a.dtypes.split(","):
        for i, case in enumerate(SMALL + (LARGE if a.large else [])):
            row = check(case, getattr(torch, dtype), a.device, compiled=i == 1)
            print(json.dumps(row), flush=True)


def poisoned(empty):
    """Fresh memory, filled with NaN: what a kernel leaves unwritten shows."""

    def filled(*arguments, **options):
        x = empty(*arguments, **options)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    return filled


if __name__ == "__main__":
    main()
