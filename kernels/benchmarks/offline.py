"""Compiles every kernel that a back end launches, for a GPU that need not be there, and reports what the compiler made.

    python kernels/benchmarks/offline.py --backend triton --arch 90 --E 1 8 --dtype bfloat16 --json out.json
    python kernels/benchmarks/offline.py --recurrent --state bfloat16
    python kernels/benchmarks/offline.py --features --E 8

A stand-in driver names the architecture, every launch becomes a compilation, and the back end runs forward and backward
on CPU tensors of the right shapes: so exactly the shipped configurations are compiled. One row per kernel: registers,
spilled bytes (ptxas -v), stack, shared memory, tensor core instructions, and whether ptxas serialised wgmma (warnings
C7511 and C7512; then the count of WARPGROUP.ARRIVE equals that of HGMMA), and which wgmma have a wrong address
(`sass.wrong_addresses`): ptxas 12.8, which Triton 3.6 brings along, loses some.
"""

import argparse
import itertools
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import triton
from sass import wrong_addresses
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COUNTED = ("HGMMA", "HMMA", "WARPGROUP.ARRIVE", "UTMALDG", "UTMASTG", "LDL", "STL", "BAR.SYNC")


class StandIn:
    """A driver that launches nothing and says that the architecture is there."""

    def __init__(self, arch):
        self.arch = arch
        self.utils = self

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_device_capability(self, device=0):
        return divmod(self.arch, 10)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None

    def load_binary(self, name, binary, shared, device):
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, device):
        return dict(max_shared_mem=232448, max_num_regs=65536, multiprocessor_count=132, warpSize=32)


def record_compilations():
    """Turn every launch into a compilation; returns the list that collects (name, compiled kernel, seconds)."""
    compiled, run = [], triton.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        start = time.time()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if not any(kernel is k for _, k, _ in compiled):
            compiled.append((kernel.metadata.name, kernel, time.time() - start))
        return kernel

    triton.JITFunction.run = compile_only
    return compiled


def describe(kernel, arch) -> dict:
    """Resources of a compiled kernel, from its cubin and a second pass of ptxas over its PTX."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "k.cubin"), Path(folder, "k.ptx")
        cubin.write_bytes(kernel.asm["cubin"])
        ptx.write_text(kernel.asm["ptx"])

        def tool(name, *arguments):
            done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
            return done.stdout + done.stderr

        usage = tool("cuobjdump", "--dump-resource-usage", cubin)
        sass = tool("nvdisasm", "-c", cubin)
        target = re.search(r"\.target (\w+)", kernel.asm["ptx"])[1]
        verbose = tool(get_ptxas(arch).path, "-v", f"--gpu-name={target}", ptx, "-o", Path(folder, "again.cubin"))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", verbose)]
    return dict(
        registers=registers,
        spill_bytes=max(spills, default=0),
        stack_bytes=stack,
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        serialised_wgmma="C7511" in verbose or "C7512" in verbose,
        wrong_addresses=wrong_addresses(sass, kernel.asm["ptx"]) if arch == 90 else None,
        **{name: len(re.findall(rf"\b{re.escape(name)}\b", sass)) for name in COUNTED},
    )


def run_backend(backend, p):
    """Forward, inference and backward of problem p on uninitialised CPU tensors."""
    dtype = p.dtype
    q, k = (torch.empty(p.B, p.T, p.H, p.K, dtype=dtype) for _ in range(2))
    v, do = (torch.empty(p.B, p.T, p.HV, p.V, dtype=dtype) for _ in range(2))
    q2, k2 = (torch.empty(p.B, p.T, p.H, p.E) for _ in range(2))
    g, beta = torch.empty(p.B, p.T, p.HV, p.E), torch.empty(p.B, p.T, p.HV)
    args = (p, q, k, v, q2, k2, g, beta, None, None)
    backend.forward(*args, False)
    saved = backend.forward(*args, True)[2]
    backend.backward(*args, saved, do, None)


def run_recurrent(backend, p, states):
    """One decoding step, and where the back end takes that too several tokens of packed sequences, of problem p with
    states of these dtypes in place.
    """
    for T, state in itertools.product((1, 4), states):
        p = p._replace(T=T, varlen=T > 1, state=getattr(torch, state), output_final=True)
        reason = backend.unsupported(p)
        if reason and T > 1:
            continue
        if reason:
            raise SystemExit(f"E={p.E}: {reason}")
        q, k = (torch.empty(p.B, T, p.H, p.K, dtype=p.dtype) for _ in range(2))
        v = torch.empty(p.B, T, p.HV, p.V, dtype=p.dtype)
        q2, k2 = (torch.empty(p.B, T, p.H, p.E) for _ in range(2))
        g, beta = torch.empty(p.B, T, p.HV, p.E), torch.empty(p.B, T, p.HV)
        h0 = torch.empty(p.N, p.HV, p.E, p.K, p.V, dtype=p.state)
        cu_seqlens = torch.tensor([0, T]) if p.varlen else None
        backend.recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, h0)


def run_features(kernels, p):
    """Keys, queries and values of problem p in one pass, forward and backward."""
    sizes, groups = [p.H * p.K, p.H * p.K, p.HV * p.V, p.H * p.E, p.H * p.E], [p.K, p.K, 0, p.E, p.E]
    activations = ["silu"] * 3 + ["softplus"] * 2
    dtypes = [p.dtype] * 3 + [torch.float32] * 2
    x, weight = torch.empty(1, p.T, sum(sizes), dtype=p.dtype), torch.empty(sum(sizes), 4)
    cu_seqlens = torch.tensor([0, p.T], dtype=torch.int32)
    dys = kernels.forward(x, weight, cu_seqlens, sizes, groups, activations, dtypes)
    kernels.backward(x, weight, cu_seqlens, dys, sizes, groups, activations)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--E", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--K", type=int, default=128)
    parser.add_argument("--V", type=int, default=128)
    parser.add_argument("--group", type=int, default=1, help="value heads per key head")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--linear", action="store_true", help="sGLA: no delta rule")
    parser.add_argument("--recurrent", action="store_true", help="the kernel of recurrent_triadic")
    parser.add_argument("--features", action="store_true", help="the kernels of conv_features")
    parser.add_argument("--state", nargs="+", default=["float32"], help="dtypes of its state")
    parser.add_argument("--json")
    a = parser.parse_args()
    driver.set_active(StandIn(a.arch))
    compiled, rows = record_compilations(), []
    from triadic_kernels import dispatch  # after the driver: importing kernels may ask for it

    table = dispatch.RECURRENT if a.recurrent else dispatch.CHUNK
    backend = dispatch.load("conv_triton" if a.features else table[a.backend])
    if isinstance(backend, str):
        raise SystemExit(f"{a.backend}: {backend}")
    for E in a.E:
        p = dispatch.Problem(
            B=1, T=256, H=2, HV=2 * a.group, K=a.K, V=a.V, E=E, N=1, dtype=getattr(torch, a.dtype), device_type="cuda",
            capability=divmod(a.arch, 10), delta_rule=not a.linear, scale=a.K**-0.5, has_q2=True, gate="slice",
            has_beta=True, state=None, output_final=False, varlen=False,
        )  # fmt: skip
        if reason := None if a.features or a.recurrent else backend.unsupported(p):
            raise SystemExit(f"{a.backend} with E={E}: {reason}")
        done = len(compiled)
        if a.features:
            run_features(backend, p)
        else:
            run_recurrent(backend, p, a.state) if a.recurrent else run_backend(backend, p)
        for name, kernel, seconds in compiled[done:]:
            row = dict(
                kernel=name, E=E, K=a.K, V=a.V, group=a.group, dtype=a.dtype, arch=a.arch, delta_rule=not a.linear
            )
            rows.append(row | describe(kernel, a.arch) | dict(seconds=round(seconds, 1)))
            print(" ".join(f"{n}={len(v) if isinstance(v, list) else v}" for n, v in rows[-1].items()), flush=True)
    if a.json:
        Path(a.json).write_text(json.dumps(dict(triton=triton.__version__, rows=rows), indent=1))


if __name__ == "__main__":
    main()
