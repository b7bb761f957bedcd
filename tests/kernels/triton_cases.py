"""Runs a back end on a list of problems and prints every error against the token recurrence in float64 (above 1,000
tokens: the chunkwise form in float64, which other tests hold to the recurrence within 1e-10).

A program of its own: Triton's interpreter must be switched on before its kernels are imported.
    TRITON_INTERPRET=1 python tests/kernels/triton_cases.py small
    python tests/kernels/triton_cases.py slow --device cuda --dtypes bfloat16,float32 --backend triton
    python tests/kernels/triton_cases.py pairwise --device cuda --dtypes bfloat16 --shard 0/8    # one process of eight
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from triadic_kernels import chunk_triadic, dispatch

NAMES = ("o", "ht", "dq", "dk", "dv", "dq2", "dk2", "dg", "dbeta", "dh0")
DEFAULT = dict(
    lens=None,
    B=1,
    T=64,
    H=1,
    HV=1,
    K=32,
    V=32,
    E=2,
    delta=True,
    gate="slice",
    q2=True,
    beta=True,
    h0=True,
    dht=True,
    decay="mixed",
    shifted=False,  # every input 2 or 4 bytes off alignment
)

# Every value at least once and every feature beside a tail: what the interpreter manages in CI.
SMALL = [
    dict(T=65, E=4, H=1, HV=2),
    dict(T=1, E=3, gate="head"),
    dict(T=63, E=1, K=16, V=64, shifted=True),
    dict(B=2, T=66, E=1, q2=False, h0=False, dht=False, H=2, HV=2, K=16, V=16),
    dict(lens=[1, 70, 2, 0, 64], E=8, K=32, V=16),
    dict(lens=[67, 3], E=2, delta=False, H=1, HV=3),
    dict(T=40, E=2, gate=None, beta=False, delta=False),
    dict(T=70, E=2, gate=None, K=64, V=32, beta=False, decay="none"),
    dict(T=130, E=12, K=16, V=16, decay="strong"),
    dict(T=20, E=32, K=16, V=16),
]
SLOW = [
    dict(T=1, K=256, V=256, E=1, decay="weak"),
    dict(T=130, K=128, V=256, E=2),
    dict(T=70, K=256, V=64, E=3, gate="head"),
    dict(lens=[1] * 7, E=16, K=64, V=64),
    dict(lens=[100, 1, 63, 129], E=8, H=2, HV=4, K=64, V=32),
    dict(T=300, E=16, K=32, V=32, decay="strong"),
    dict(T=200, E=32, K=32, V=32, delta=False, gate="head"),
]

# Sizes that only a GPU manages.
LARGE = [
    *(dict(T=1000, H=2, HV=2, K=128, V=128, E=E) for E in (1, 2, 4, 8, 16)),
    *(dict(T=1000, H=2, HV=2, K=128, V=128, E=E, delta=False) for E in (1, 8)),
    *(dict(B=2, T=127, H=2, HV=4, K=128, V=128, E=E, gate="head") for E in (4, 8)),
    *(dict(lens=[100, 1, 2, 0, 63, 257], H=2, HV=4, K=128, V=128, E=E, decay="weak") for E in (1, 2, 4, 8, 16)),
    dict(T=1000, H=1, HV=1, K=128, V=128, E=8, decay="strong"),
    dict(B=2, T=70, H=2, HV=2, K=128, V=128, E=2, shifted=True),
    dict(T=1, H=2, HV=2, K=128, V=128, E=8, h0=False, dht=False),
    dict(T=1000, H=1, HV=1, K=64, V=64, E=8, q2=True, beta=False, gate=None, decay="none"),
    dict(T=300, H=1, HV=1, K=256, V=256, E=4),
    dict(T=300, H=1, HV=1, K=64, V=128, E=3),
    dict(T=300, H=1, HV=1, K=128, V=64, E=12),
]
# The Gluon kernels in the emulator: every E, mixer and gate, groups, packed documents, tails.
D = dict(K=128, V=128)
HOPPER = [
    dict(T=65, E=1, H=1, HV=2, **D),
    dict(lens=[3, 65], E=8, decay="weak", **D),
    dict(T=3, E=2, H=2, HV=4, **D),
    dict(T=3, E=4, H=2, HV=2, delta=False, gate="head", shifted=True, **D),
]
HOPPER_SLOW = [
    *(dict(T=130, E=E, **D) for E in (1, 2, 4, 8, 16)),
    *(dict(lens=[66, 1, 2, 0, 63, 64], E=E, H=2, HV=4, decay="weak", **D) for E in (1, 2, 4, 8, 16)),
    dict(T=100, E=2, delta=False, gate="head", **D),
    dict(B=2, T=127, E=4, H=1, HV=3, gate="head", decay="strong", **D),
    dict(T=70, E=8, delta=False, q2=True, beta=False, gate=None, decay="none", **D),
    dict(T=1, E=8, h0=False, dht=False, shifted=True, **D),
]
PAIRWISE = json.loads(Path(__file__).with_name("pairwise.json").read_text())  # made by pairwise.py, for a GPU
LISTS = {
    "small": SMALL, "slow": SLOW, "large": LARGE, "hopper": HOPPER, "hopper_slow": HOPPER_SLOW, "pairwise": PAIRWISE,
}  # fmt: skip
STEPS = 1000  # tokens up to which the reference is the token recurrence


def make(c, dtype, device, seed=0):
    """Random inputs of a case, already rounded to the dtypes that the op takes: (tensors by name, cu_seqlens)."""
    gen = torch.Generator().manual_seed(seed)
    lens = c["lens"]
    B, T = (1, sum(lens)) if lens else (c["B"], c["T"])
    N = len(lens) if lens else B
    H, HV, K, V, E = (c[x] for x in ("H", "HV", "K", "V", "E"))

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=gen, dtype=torch.float64)

    def unit(x):
        return x / x.norm(dim=-1, keepdim=True)

    rate = {"weak": 0.02, "none": 0.0, "strong": 50.0}.get(c["decay"])
    rates = (
        torch.logspace(-4, 0.8, E, dtype=torch.float64) if rate is None else torch.full((E,), rate, dtype=torch.float64)
    )
    g = -rates * uniform(B, T, HV, E)
    if rate is None:
        g = torch.where(uniform(B, T, HV, E) < 0.02, -50.0, g)
    beta = torch.sigmoid(normal(B, T, HV) + 1)
    beta[uniform(B, T, HV) < 0.05] = 0.0
    k = normal(B, T, H, K)
    x = dict(
        q=unit(normal(B, T, H, K)).to(dtype),
        k=unit(k + 0.5 * k.mean(1, keepdim=True) * T**0.5).to(dtype),
        v=normal(B, T, HV, V).to(dtype),
        q2=unit(uniform(B, T, H, E) + 0.05).float() if c["q2"] else None,
        k2=unit(uniform(B, T, H, E) + 0.05).float() if c["q2"] else None,
        g={"slice": g, "head": g[..., 0].contiguous(), None: None}[c["gate"]],
        beta=beta.float() if c["beta"] else None,
        h0=(0.3 * normal(N, HV, E, K, V) / E**0.5).float() if c["h0"] else None,
        do=normal(B, T, HV, V).to(dtype),
        dht=(0.1 * normal(N, HV, E, K, V)).float() if c["dht"] else None,
    )
    x["g"] = None if x["g"] is None else x["g"].float()
    cu = torch.tensor([0, *lens]).cumsum(0).int().to(device) if lens else None
    x = {name: None if t is None else t.to(device) for name, t in x.items()}
    if c["shifted"]:
        x = {n: None if t is None else t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t) for n, t in x.items()}
    return x, cu


def recurrence(x, scale, delta):
    """The definition, token by token: q, k [B, T, HV, K] and so on, h0 [B, HV, E, K, V] -> (o, ht)."""
    S, out = x["h0"], []
    for t in range(x["q"].shape[1]):
        q, k, v, q2, k2, g, beta = (x[name][:, t] for name in ("q", "k", "v", "q2", "k2", "g", "beta"))
        S = g.exp()[..., None, None] * S
        r = v - torch.einsum("bhe,bhk,bhekv->bhv", k2, k, S) if delta else v
        S = S + torch.einsum("bhe,bhk,bhv->bhekv", k2, k, beta[..., None] * r)
        out.append(scale * torch.einsum("bhe,bhk,bhekv->bhv", q2, q, S))
    return torch.stack(out, 1) if out else x["v"], S


def chunked(c, leaves, cu, scale):
    """(o, ht) of the chunkwise form in plain torch, in the dtype of the leaves."""
    options = {name: leaves.get(name) for name in ("q2", "k2", "g", "beta")}
    return chunk_triadic(
        leaves["q"], leaves["k"], leaves["v"], **options, delta_rule=c["delta"], scale=scale, cu_seqlens=cu,
        initial_state=leaves.get("h0"), output_final_state=True, backend="torch",
    )  # fmt: skip


def outputs(c, leaves, cu, scale):
    """(o, ht) of the recurrence; what is absent spelt out, heads repeated, documents one by one."""
    B, T, HV, E = *leaves["v"].shape[:3], c["E"]
    full = dict(leaves)
    ones = torch.ones(B, T, HV, E, dtype=torch.float64, device=leaves["v"].device)
    for name in ("q", "k", "q2", "k2"):
        full[name] = full[name].repeat_interleave(HV // c["H"], 2) if name in full else ones
    g = full.get("g")
    full["g"] = ones * 0 if g is None else g if g.ndim == 4 else g[..., None] * ones
    full["beta"] = full.get("beta", ones[..., 0])
    N = B if cu is None else len(cu) - 1
    h0 = full.get("h0", torch.zeros(N, HV, E, c["K"], c["V"], dtype=torch.float64, device=ones.device))
    full.pop("h0", None)
    if cu is None:
        return recurrence(dict(full, h0=h0), scale, c["delta"])
    spans = enumerate(itertools.pairwise(cu.tolist()))
    parts = [
        recurrence(dict({n: t[:, a:b] for n, t in full.items()}, h0=h0[i : i + 1]), scale, c["delta"])
        for i, (a, b) in spans
    ]
    o, ht = (torch.cat(p, d) for p, d in zip(zip(*parts, strict=True), (1, 0), strict=True))
    return o, ht


def expected(c, x, cu, scale):
    """Outputs and gradients by autograd in float64."""
    leaves = {name: t.double().requires_grad_() for name, t in x.items() if t is not None and name not in ("do", "dht")}
    o, ht = (chunked if leaves["q"].shape[1] > STEPS else outputs)(c, leaves, cu, scale)
    loss = (o * x["do"].double()).sum()
    if x["dht"] is not None:
        loss = loss + (ht * x["dht"].double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(o=o.detach(), ht=ht.detach(), **{"d" + name: d for name, d in zip(leaves, grads, strict=True)})


def run(backend, p, x, cu):
    """(everything the back end returns by name, the same outputs without keeping anything for a backward)."""
    args = [x[name] for name in ("q", "k", "v", "q2", "k2", "g", "beta", "h0")] + [cu]
    o, ht, saved = backend.forward(p, *args, True)
    shapes = [(t.shape, t.dtype) for t in backend.saved_like(p, x["q"], cu)]
    assert shapes == [(t.shape, t.dtype) for t in saved], "saved_like differs from what the forward saves"
    grads = backend.backward(p, *args, saved, x["do"], x["dht"])
    got = dict(zip(NAMES, (o, ht, *(grads[i] for i in (0, 1, 2, 3, 4, 5, 6, 7))), strict=True))
    return got, backend.forward(p, *args, False)[0]


def relative(a, b):
    """Relative l2 error; a truth that is nothing beside rounding (no decay reaches it) is judged against 1."""
    norm = b.norm().item()
    return (a.double() - b).norm().item() / (norm if norm > 1e-6 else 1.0)


def isolated(module, p, x, cu, got, finite):
    """Whether NaN, or `finite` other numbers, in every second document leave all results of the others the same to the
    bit."""
    odd = torch.arange(cu.numel() - 1, device=cu.device) % 2 == 1
    rows = odd.repeat_interleave(cu.diff())
    bad = {name: None if t is None else t.clone() for name, t in x.items()}
    for name, t in bad.items():
        if name != "g" and t is not None:
            at = odd if name in ("h0", "dht") else (slice(None), rows)
            t[at] = 1 - 2 * t[at] if finite else torch.nan
    dirty, _ = run(module, p, bad, cu)
    assert not torch.equal(dirty["o"][:, rows], got["o"][:, rows])
    picked = {name: ~odd if name in ("ht", "dh0") else (slice(None), ~rows) for name in NAMES}
    return all(torch.equal(dirty[name][at], got[name][at]) for name, at in picked.items() if got[name] is not None)


def check(c, dtype, device, backend, only_supported=False):
    c = {**DEFAULT, **c}
    x, cu = make(c, dtype, device)
    scale = c["K"] ** -0.5
    p = dispatch.problem(
        x["q"],
        x["k"],
        x["v"],
        x["q2"],
        x["g"],
        x["beta"],
        x["h0"],
        cu,
        scale=scale,
        delta_rule=c["delta"],
        output_final=True,
    )
    if only_supported and dispatch.refusal(dispatch.CHUNK[backend], p):
        return None
    module = dispatch.select(backend, p)
    got, inference = run(module, p, x, cu)
    again, _ = run(module, p, x, cu)
    want = expected(c, x, cu, scale)
    errors = {name: relative(got[name], d) for name, d in want.items() if d is not None}
    row = dict(
        case=c,
        dtype=str(dtype).split(".")[1],
        errors=errors,
        absent=sorted(n for n in NAMES if got[n] is None) == sorted(n for n in NAMES if n not in want),
        differ=[n for n in NAMES if got[n] is not None and not torch.equal(got[n], again[n])],
        inference=torch.equal(got["o"], inference),
        # gluon_hopper promises it for finite numbers alone
        isolated=cu is None or isolated(module, p, x, cu, got, finite=backend == "gluon_hopper"),
        worst=max(errors.values()),
    )
    return row | dict(repeatable=not row["differ"])


def sharded(jobs: list, shard: str) -> list:
    """Part i of n of the jobs for "i/n", i from 0: every n-th, so that large ones spread."""
    i, n = map(int, shard.split("/"))
    if not 0 <= i < n:
        raise ValueError(f"--shard {shard} is no part: give i/n with 0 <= i < n, such as 0/8")
    return jobs[i::n]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", choices=list(LISTS))
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--only-supported", action="store_true", help="leave out what the back end refuses")
    parser.add_argument("--shard", default="0/1", help="i/n: part i (from 0) of n, for processes side by side")
    a = parser.parse_args()
    jobs = [(dtype, c) for dtype in a.dtypes.split(",") for name in a.cases for c in LISTS[name]]
    worst, count, odd = {}, 0, 0
    for dtype, c in sharded(jobs, a.shard):
        start = time.time()
        row = check(c, getattr(torch, dtype), a.device, a.backend, a.only_supported)
        if a.device != "cpu":
            torch.cuda.empty_cache()  # for the processes beside this one
        if row is None:
            continue
        print(json.dumps(row | {"seconds": round(time.time() - start, 1)}), flush=True)
        worst[dtype], count = max(worst.get(dtype, 0.0), row["worst"]), count + 1
        odd += not all(row[name] for name in ("absent", "repeatable", "inference", "isolated"))
    print(f"{count} problems, largest errors {worst}, {odd} with another fault", file=sys.stderr)


if __name__ == "__main__":
    main()
