"""Times the mixer layer and the decoder block of the 1.3B model beside a Transformer's, in one process on one GPU:

    python scripts/benchmark_block.py --T 4096 16384 65536 --E 1 2 4 8 16 --out block.json

A layer is the token mixer with its projections, convolution, gates and norms; a block is layer and feed-forward, both
with their norms and residuals, as in training: the code of `triadic.models`, random weights, bfloat16. Measured as by
kernels/benchmarks/bench.py: medians of event-timed calls, L2 flushed, peak memory above weights and inputs. fwdbwd ends
with the gradients of the input and of every parameter. `fla` and `flashqla` are our E = 1 layer around their op,
`fla_layer` is their whole GatedDeltaNet in its place. What cannot run here leaves a row that says why.
"""

import argparse
import importlib
import json
import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from triadic.models import TriadicConfig, TriadicModel, mixers
from triadic.models.layout import Layout
from triadic.models.loading import load_config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "kernels" / "benchmarks"))
import bench  # noqa: E402

MODELS = f"{ROOT}/configs/model/"
DEVICE, DTYPE = "cuda", torch.bfloat16
SDPA = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
SOFTMAX = (*SDPA, "flex_attention")
OPS = {"fla": "fla.ops.gated_delta_rule", "flashqla": "flash_qla"}  # a peer's op and the module that brings it
IMPLEMENTATIONS = ("triadic", *OPS, "fla_layer", *SOFTMAX)
SAME = ("what", "B", "T", "pass", "compiled")  # rows that agree in these are divided by each other
OVER = {  # name in a row of ours -> the rows whose fastest is the divisor
    "over_e1": lambda row: row["impl"] == "triadic" and row["E"] == 1,
    "over_gdn": lambda row: row["impl"] in (*OPS, "fla_layer"),
    "over_transformer": lambda row: row["impl"] in SDPA,
}


class FlaLayer(nn.Module):
    """flash-linear-attention's GatedDeltaNet of the same sizes, called like one of our mixers."""

    def __init__(self, config):
        super().__init__()
        from fla.layers import GatedDeltaNet

        self.mixer = GatedDeltaNet(
            hidden_size=config.hidden_size,
            num_heads=config.linear_num_key_heads,
            head_dim=config.linear_key_head_dim,
            expand_v=config.linear_value_head_dim / config.linear_key_head_dim,
            conv_size=config.linear_conv_kernel_dim,
            norm_eps=config.rms_norm_eps,
            output_gate_activation=config.output_gate_activation,
        )

    def forward(self, hidden_states, layout, cache=None, position_embeddings=None, attention_mask=None):
        return self.mixer(hidden_states)[:2]


def peer_op(impl, q, k, v, *, g, beta, **_):
    """A peer's op in the place of `chunk_triadic` with E = 1: (o, no state)."""
    return bench.IMPLEMENTATIONS[impl](dict(q=q, k=k, v=v, g=g, beta=beta), None), None


def config_of(impl, E, a) -> TriadicConfig:
    """The model's config, cut to one layer."""
    fields = load_config(a.transformer if impl in SOFTMAX else a.linear).to_dict()
    fields |= dict(num_hidden_layers=1, layer_types=fields["layer_types"][:1], vocab_size=8)
    if impl not in SOFTMAX:
        fields |= dict(second_key_dim=E, linear_fused_inputs=a.fused_inputs)
    return TriadicConfig(**fields)


def make_module(what, impl, config):
    """(layer or block, the model it belongs to)."""
    attention = "flex_attention" if impl == "flex_attention" else "sdpa"
    with torch.device(DEVICE):
        model = TriadicModel._from_config(config, attn_implementation=attention, dtype=DTYPE).train()
        if impl == "fla_layer":
            model.layers[0].mixer = FlaLayer(config).to(DTYPE)
    return {"layer": model.layers[0].mixer, "block": model.layers[0]}[what], model


def make_step(what, impl, E, T, a):
    """(step, x, parameters): step(x [B, T, D]) is one forward of the layer or block."""
    if impl in OPS:
        importlib.import_module(OPS[impl])  # here, where its absence has a clear message
    module, model = make_module(what, impl, config_of(impl, E, a))
    x = torch.randn(a.B, T, model.config.hidden_size, device=DEVICE, dtype=DTYPE, requires_grad=True)
    layout, positions = Layout(), mixers.position_embeddings(model.config, torch.arange(T, device=DEVICE)[None])
    mask = model._softmax_mask(x, None, layout, None)
    if a.compile:
        torch.compiler.reset()
        module.compile(dynamic=False)

    def step(x):
        y = module(x, layout, None, positions, mask)
        return y if isinstance(y, torch.Tensor) else y[0]

    return step, x, list(module.parameters())


def forward(step, x, parameters):
    with torch.no_grad():
        step(x)


def forward_backward(step, x, parameters):
    y = step(x)
    torch.autograd.grad(y, [x, *parameters], y.detach())


PASSES = {"fwd": forward, "fwdbwd": forward_backward}


def surroundings(impl):
    """A context in which the layer takes the named implementation."""
    if impl in SDPA:
        return sdpa_kernel(SDPA[impl])
    return mock.patch.object(mixers, "chunk_triadic", partial(peer_op, impl)) if impl in OPS else nullcontext()


def describe(what, impl, E, T, a):
    """What a row says beside its figures."""
    config, softmax = config_of(impl, E, a), impl in SOFTMAX
    sizes = dict(
        H=config.num_attention_heads if softmax else config.linear_num_key_heads,
        K=config.head_dim if softmax else config.linear_key_head_dim,
        V=config.head_dim if softmax else config.linear_value_head_dim,
    )
    return dict(
        what=what,
        impl=impl,
        backend=None,  # of our op, known once it has run
        model=Path(a.transformer if softmax else a.linear).stem,
        mixer="softmax" if softmax else config.linear_mixer,
        **sizes,
        E=None if softmax else E,
        B=a.B,
        T=T,
        dtype=str(DTYPE).removeprefix("torch."),
        compiled=a.compile,
        fused_inputs=a.fused_inputs and not softmax and impl != "fla_layer",
    )


def measure(what, impl, E, T, a):
    """A row for each pass."""
    rows = [describe(what, impl, E, T, a) | {"pass": which} for which in a.passes]
    recorded = bench.PEER_ERRORS if impl != "triadic" else torch.OutOfMemoryError  # ours may only be too large
    try:
        made = make_step(what, impl, E, T, a)
    except recorded as error:
        return [row | failure(error) for row in rows]
    for i, row in enumerate(rows):
        call = partial(PASSES[row["pass"]], *made)
        try:
            with surroundings(impl):
                row["backend"] = bench.back_ends(call)
                rows[i] = row | figures(call, a)
        except recorded as error:
            rows[i] = row | failure(error)
    return rows


def figures(call, a):
    ms, sm_mhz = bench.timed(call, a.repeats, a.rest)
    found = dict(
        ms=round(ms, 4),
        sm_mhz=sm_mhz,
        rest=a.rest,
        peak_gib=round(bench.peak_gib(call), 3),
        host_ms=round(bench.host_ms(call, repeats=5), 3),
    )
    return found | (dict(kernels=bench.kernels_ms(call)) if a.profile else {})


def failure(error):
    return dict(error=f"{type(error).__name__}: {error}"[:300])


def compare(rows):
    """Put into each of our rows its time over that of E = 1, of a GatedDeltaNet and of the Transformer (see OVER)."""
    timed = [row for row in rows if "ms" in row]
    for row in timed:
        if row["impl"] == "triadic":
            peers = [other for other in timed if all(other[name] == row[name] for name in SAME)]
            for name, chosen in OVER.items():
                found = [other["ms"] for other in peers if chosen(other)]
                row |= {name: round(row["ms"] / min(found), 4)} if found else {}


def table(rows):
    """Markdown: ms (GiB) of forward and of forward + backward."""
    lines = ["| | " + " | ".join(["fwd", "fwdbwd", *OVER]) + " |", "|---" * (3 + len(OVER)) + "|"]
    cells = {}
    for row in rows:
        name = row["impl"] if row["E"] is None else f"{row['impl']} E={row['E']}"
        cells.setdefault((row["what"], row["B"], row["T"], name), {})[row["pass"]] = row
    for (what, B, T, name), passes in cells.items():
        shown = [
            f"{row['ms']:.4g} ({row['peak_gib']:.3g})" if "ms" in row else "-"
            for row in (passes.get(which, {}) for which in PASSES)
        ]
        last = next(reversed(passes.values()))
        ratios = [f"{last.get(over, math.nan):.3f}".replace("nan", "") for over in OVER]
        lines.append(f"| {what} ({B}, {T}) {name} | " + " | ".join(shown + ratios) + " |")
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--linear", default=str(ROOT / "configs/model/gdn_1.3b.json"), help="config of the linear model"
    )
    parser.add_argument("--transformer", default=str(ROOT / "configs/model/transformer_1.3b.json"))
    parser.add_argument("--B", type=int, default=4)
    parser.add_argument("--T", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--E", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--what", nargs="+", default=["block", "layer"], choices=["layer", "block"])
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=list(PASSES))
    parser.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--compile", action="store_true", help="layers under torch.compile, as run.torch_compile does")
    parser.add_argument(
        "--fused-inputs", action=argparse.BooleanOptionalAction, default=True, help="linear_fused_inputs of the config"
    )
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--rest", type=float, default=0.05, help="seconds before each call, for a cool GPU")
    parser.add_argument("--profile", action="store_true", help="add time per kernel")
    parser.add_argument("--commit", help="where the repository's history is not at hand")
    parser.add_argument("--out", help="result file; default kernels/benchmarks/results/block_<gpu>_<date>.json")
    return parser.parse_args()


def main():
    a = arguments()
    bench.need_gpu()
    result = bench.header(a.commit, (*bench.PACKAGES, "transformers")) | dict(rows=[])
    path = Path(a.out or bench.default_path("block", result))
    path.parent.mkdir(parents=True, exist_ok=True)
    for T in a.T:
        for what in a.what:
            for impl in a.impl:
                for E in a.E if impl == "triadic" else [1]:
                    rows = measure(what, impl, E, T, a)
                    print(*map(json.dumps, rows), sep="\n", flush=True)
                    result["rows"] += rows
                    compare(result["rows"])
                    path.write_text(json.dumps(result, indent=1) + "\n")
                    torch.cuda.empty_cache()
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
