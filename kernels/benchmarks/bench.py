"""Times the op and its peers in one process on the same inputs, and writes one result file.

    python kernels/benchmarks/bench.py --shapes 4x8192 1x65536 --E 1 2 4 8 16 --impl triadic fla sdpa_flash sdpa_cudnn

Medians of event-timed calls with the L2 cache flushed before each; fwdbwd is forward and backward together; peak memory
is counted above the inputs. A peer that cannot run here leaves a row that says why; a row of ours names the back end
that ran. --profile adds time per kernel.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LEAD = 20_000_000  # clock cycles, about 10 ms: more than the host needs for a call, even after a rest
CLOCK = 2_000_000  # clock cycles, about 1 ms
PACKAGES = ("torch", "triton", "fla-core", "flash-qla")
PEER_ERRORS = (
    ImportError,
    RuntimeError,
    ValueError,
    NotImplementedError,
)  # absent, too large or refusing


def inputs(B, T, H, D, E, dtype=torch.bfloat16):
    """Random inputs of the op, like those of a trained layer: unit keys and queries, decays from slow to fast."""
    rand, randn = partial(torch.rand, device="cuda"), partial(torch.randn, device="cuda")
    rates = torch.logspace(-4, 0.8, E, device="cuda") if E > 1 else torch.full((1,), 0.05, device="cuda")
    return dict(
        q=F.normalize(randn(B, T, H, D), dim=-1).to(dtype),
        k=F.normalize(randn(B, T, H, D), dim=-1).to(dtype),
        v=randn(B, T, H, D).to(dtype),
        q2=F.normalize(rand(B, T, H, E) + 0.05, dim=-1),
        k2=F.normalize(rand(B, T, H, E) + 0.05, dim=-1),
        g=-rates * rand(B, T, H, E),
        beta=rand(B, T, H),
    )


def triadic(x, backend, segment_size=None):
    from triadic_kernels import chunk_triadic

    return chunk_triadic(**x, backend=backend, segment_size=segment_size)[0]


def fla(x, backend):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"][..., 0], x["beta"].to(x["q"].dtype))[0]


def flashqla(x, backend):
    from flash_qla import chunk_gated_delta_rule

    return chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"][..., 0], x["beta"].to(x["q"].dtype))[0]


def sdpa(which, x, backend):
    with sdpa_kernel(which):
        q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


IMPLEMENTATIONS = {
    "triadic": triadic,
    "fla": fla,
    "flashqla": flashqla,
    "sdpa_flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
}


def forward(f, x, backend):
    with torch.no_grad():
        f(x, backend)


def forward_backward(f, x, backend):
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o = f(leaves, backend)
    torch.autograd.grad(o, list(leaves.values()), o.detach(), allow_unused=True)


PASSES = {"fwd": forward, "fwdbwd": forward_backward}


def timed(call, repeats, rest=0.0):
    """(ms, MHz): medians over repeats of the time of one call and of the multiprocessors' clock just before and after.

    L2 is flushed before each call, and the host is LEAD clock cycles ahead, which tell the clock. The GPU rests for
    `rest` seconds before each: calls of 10 ms and more, with 1 ms between them, drive an H200 to its power limit within
    a second, and then down from 1980 to 1700 MHz.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for before, start, end, after in events:
        if rest:
            torch.cuda.synchronize()
            time.sleep(rest)
        flush.zero_()
        before.record()
        torch.cuda._sleep(LEAD)
        start.record()
        call()
        end.record()
        torch.cuda._sleep(CLOCK)
        after.record()
    torch.cuda.synchronize()
    middle, clocks = repeats // 2, [LEAD / b.elapsed_time(s) / 1e3 for b, s, _, _ in events]
    clocks += [CLOCK / e.elapsed_time(a) / 1e3 for _, _, e, a in events]
    return sorted(s.elapsed_time(e) for _, s, e, _ in events)[middle], round(sorted(clocks)[repeats])


def host_ms(call, repeats=20):
    """Time on the host to issue one call."""
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
    return sorted(times)[repeats // 2]


def peak_gib(call):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def kernels_ms(call):
    """Time of each kernel of one call, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = {e.key[:60]: round(e.device_time_total / 1e3, 4) for e in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda row: -row[1]))


def back_ends(call):
    """Call it, and name the back ends of `triadic_kernels` that ran; None where none did. Asked once it has run: one
    that does not compile here gives way to the next.
    """
    from triadic_kernels import dispatch, op, recurrent

    names = []

    def noted(backend, p, *arguments, table=dispatch.CHUNK):
        result = dispatch.run(backend, p, *arguments, table=table)
        module = dispatch.select(backend, p, table)
        names.append(next(name for name, file in table.items() if dispatch.load(file) is module))
        return result

    with mock.patch.object(op, "run", noted), mock.patch.object(recurrent, "run", noted):
        call()
    return ", ".join(dict.fromkeys(names)) or None


def measure(impl, B, T, E, which, a):
    """One row of the result file."""
    backend = a.backend if impl == "triadic" else None
    row = dict(what="op", impl=impl, backend=backend, mixer="gdn", H=a.H, K=a.D, V=a.D, E=E, B=B, T=T)
    row["pass"] = which
    x, f = inputs(B, T, a.H, a.D, E), IMPLEMENTATIONS[impl]
    if impl == "triadic" and a.segment_size:
        row["segment_size"] = a.segment_size
        f = partial(f, segment_size=a.segment_size)
    call = partial(PASSES[which], f, x, a.backend)
    recorded = PEER_ERRORS if impl != "triadic" else (ValueError, torch.OutOfMemoryError)  # ours: refused or too large
    try:
        row["backend"] = back_ends(call)
    except recorded as error:
        return row | dict(error=f"{type(error).__name__}: {error}"[:300])
    ms, sm_mhz = timed(call, a.repeats, a.rest)
    row |= dict(
        ms=round(ms, 4), sm_mhz=sm_mhz, rest=a.rest, peak_gib=round(peak_gib(call), 3), host_ms=round(host_ms(call), 3)
    )
    return row | (dict(kernels=kernels_ms(call)) if a.profile else {})


def need_gpu():
    """Exit with one sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark times kernels on a CUDA device, and torch sees none here; run it on a GPU")


def default_path(what, result):
    """The result file beside this program, named after its contents, GPU and date."""
    gpu = result["gpu"].replace("NVIDIA ", "").replace(" ", "-").lower()
    return Path(__file__).parent / "results" / f"{what}_{gpu}_{result['date']}.json"


def header(commit, packages=PACKAGES):
    """What the result file says about where its numbers come from."""
    versions = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return dict(
        commit=commit or (git.stdout.strip() if git.returncode == 0 else None),
        date=time.strftime("%Y-%m-%d"),
        gpu=torch.cuda.get_device_name(),
        gpu_count=1,
        versions=versions,
        command=" ".join(["python", *sys.argv]),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4x8192"], help="BxT")
    parser.add_argument("--E", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--H", type=int, default=16)
    parser.add_argument("--D", type=int, default=128)
    parser.add_argument("--passes", nargs="+", default=["fwd", "fwdbwd"], choices=list(PASSES))
    parser.add_argument("--impl", nargs="+", default=["triadic", "fla"], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--segment-size", type=int, help="of chunk_triadic: less memory for more time")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--rest", type=float, default=0.05, help="seconds before each call, for a cool GPU")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--commit", help="where the repository's history is not at hand")
    parser.add_argument("--out", help="result file; default results/op_<gpu>_<date>.json beside this program")
    a = parser.parse_args()
    need_gpu()
    result = header(a.commit) | dict(rows=[])
    path = Path(a.out or default_path("op", result))
    path.parent.mkdir(exist_ok=True)
    for shape in a.shapes:
        B, T = map(int, shape.split("x"))
        for impl in a.impl:
            for E in a.E if impl == "triadic" else [1]:
                for which in a.passes:
                    result["rows"].append(measure(impl, B, T, E, which, a))
                    print(json.dumps(result["rows"][-1]), flush=True)
                    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
