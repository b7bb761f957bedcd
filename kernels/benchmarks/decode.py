"""Times one decoding step of the op and of its peers against the memory's bandwidth, and writes one result file.

    python kernels/benchmarks/decode.py --B 1 16 64 256 --E 1 2 4 8 16 --state float32 bfloat16

A step reads and writes every state once; tbps counts these bytes alone, of_copy divides by what a large copy on the
device reaches in the same run. As in a model, every call of a CUDA graph has a state of its own and finds the L2 cache
cold. host_ms is the time to issue one call without a graph. A peer or back end that cannot run leaves a row that says
why. --backend gluon_hopper triton times both; a row names the one that ran. --backend triton --tiles 8x4 16x8 tries
those columns and warps of a program instead of the shipped table.
"""

import argparse
import itertools
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench import header, host_ms, need_gpu

ROTATE_BYTES = 1 << 30  # states of a graph, far beyond the L2 cache
SHIPPED = {}  # the op's own choice of a tile


def inputs(B, H, D, E, T):
    """Random inputs of a step, like those of a trained layer: unit keys and queries, decays from slow to fast."""
    rand, randn = partial(torch.rand, device="cuda"), partial(torch.randn, device="cuda")
    rates = torch.logspace(-4, 0.8, E, device="cuda") if E > 1 else torch.full((1,), 0.05, device="cuda")
    return dict(
        q=F.normalize(randn(B, T, H, D), dim=-1).bfloat16(),
        k=F.normalize(randn(B, T, H, D), dim=-1).bfloat16(),
        v=randn(B, T, H, D).bfloat16(),
        q2=F.normalize(rand(B, T, H, E) + 0.05, dim=-1),
        k2=F.normalize(rand(B, T, H, E) + 0.05, dim=-1),
        g=-rates * rand(B, T, H, E),
        beta=rand(B, T, H),
    )


def triadic(x, state, mixer, backend):
    from triadic_kernels import recurrent_triadic

    return recurrent_triadic(**x, initial_state=state, delta_rule=mixer == "gdn", inplace_state=True, backend=backend)


def selected(x, state, mixer):
    """The back end that "auto" takes for this call."""
    from triadic_kernels import explain

    call = dict(initial_state=state, delta_rule=mixer == "gdn", inplace_state=True, recurrent=True)
    lines = explain(**x, **call).splitlines()
    return next(line.split(":")[0] for line in lines if line.endswith(": selected"))


def fla(x, state, mixer, backend):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    return fused_recurrent_gated_delta_rule(
        q, k, v, g[..., 0], beta.to(q.dtype), initial_state=state[:, :, 0], output_final_state=True
    )


IMPLEMENTATIONS = {"triadic": triadic, "fla": fla}


def graph_ms(calls, repeats):
    """Milliseconds of one of these calls, captured together: the median over replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_ms(graph.replay, repeats) / len(calls)


def median_ms(call, repeats):
    """Milliseconds of one call between events: the median, a first call left out."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[repeats // 2]


def copy_tbps(repeats):
    """What a copy of 4 GiB reaches, bytes read and written counted, in TB/s; outside a graph, whose copies
    are left to the copy engines, slower than a kernel."""
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / median_ms(lambda: y.copy_(x), repeats) / 1e9


def choose(tile):
    """Columns and warps "8x4", or "shipped", for every call from now on."""
    from triadic_kernels import decode

    SHIPPED.setdefault("tile", decode.tile)
    decode.tile = SHIPPED["tile"] if tile == "shipped" else lambda *_: tuple(map(int, tile.split("x")))


def measure(impl, mixer, B, E, state, backend, tile, a, copy):
    """One row of the result file."""
    from triton.runtime.errors import OutOfResources

    row = dict(what="decode", impl=impl, backend=backend, mixer=mixer, H=a.H, K=a.D, V=a.D, E=E, B=B, T=a.T)
    row |= dict(state=state, tile=tile)
    try:
        dtype = getattr(torch, state)
        first = torch.randn(B, a.H, E, a.D, a.D, device="cuda").to(dtype)
        count = max(2, min(64, ROTATE_BYTES // first.nbytes))
        states = [first, *(first.clone() for _ in range(count - 1))]
        x = inputs(B, a.H, a.D, E, a.T)
        if backend == "auto":
            row["backend"] = backend = selected(x, first, mixer)
        if backend == "triton":
            choose(tile)
        calls = [partial(IMPLEMENTATIONS[impl], x, s, mixer, backend) for s in states]
        calls[0]()
        ms = graph_ms(calls, a.repeats)
        host = host_ms(calls[0])
    except (ImportError, RuntimeError, ValueError, NotImplementedError, OutOfResources) as error:
        return row | dict(error=f"{type(error).__name__}: {error}"[:300])
    tbps = 2 * first.nbytes / ms / 1e9
    return row | dict(ms=round(ms, 5), tbps=round(tbps, 3), of_copy=round(tbps / copy, 3), host_ms=round(host, 4))


def main():
    from triadic_kernels.dispatch import RECURRENT

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--B", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--E", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--T", type=int, default=1, help="tokens of a sequence in one call")
    parser.add_argument("--H", type=int, default=16)
    parser.add_argument("--D", type=int, default=128)
    parser.add_argument("--state", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--mixer", nargs="+", default=["gdn"], choices=["gdn", "sgla"])
    parser.add_argument("--impl", nargs="+", default=["triadic", "fla"], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--backend", nargs="+", default=["auto"], choices=["auto", *RECURRENT], help="of the op")
    parser.add_argument("--tiles", nargs="+", default=["shipped"], help="COLUMNSxWARPS, of --backend triton")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", help="where the repository's history is not at hand")
    parser.add_argument("--out", help="result file; default results/decode_<gpu>_<date>.json beside this program")
    a = parser.parse_args()
    if a.tiles != ["shipped"] and a.backend != ["triton"]:
        parser.error("--tiles are those of decode.py; add --backend triton")
    need_gpu()
    copy = copy_tbps(a.repeats)
    result = header(a.commit) | dict(copy_tbps=round(copy, 3), rows=[])
    print(f"copy {copy:.3f} TB/s", flush=True)
    gpu = result["gpu"].replace("NVIDIA ", "").replace(" ", "-").lower()
    path = Path(a.out or Path(__file__).parent / "results" / f"decode_{gpu}_{result['date']}.json")
    path.parent.mkdir(exist_ok=True)
    ours = itertools.product(["triadic"], a.mixer, a.B, a.E, a.state, a.backend, a.tiles)
    others = [impl for impl in a.impl if impl != "triadic"]
    peers = itertools.product(others, ["gdn"], a.B, [1], ["float32"], [None], [None])
    for case in [*(ours if "triadic" in a.impl else ()), *peers]:
        result["rows"].append(measure(*case, a, copy))
        print(json.dumps(result["rows"][-1]), flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
