"""One rank of a model whose window lies spread over processes, against the same model on one process.

A program of its own, started once for each rank: python tests/models/context_cases.py RANK RANKS STORE_FILE [--compile]
Rank 0 prints a JSON row for each kind of model: losses, and the relative l2 errors of the gradients: the worst of a
tensor, and of all together. With --device cuda each rank takes a GPU (NCCL); --kinds also takes model configs, whose
first --layers layers are taken.
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from triadic.models import TriadicConfig, TriadicForCausalLM
from triadic.models.context import Context, spread_context
from triadic.origin import origin, versions

LINEAR, FULL = "linear_attention", "full_attention"
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "initializer_range": 0.25,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "output_gate_rank": 6,
    "pad_token_id": 0,
}
KINDS = {
    "gdn_e8": {"layer_types": [LINEAR] * 2, "second_key_dim": 8},
    "gdn_e1": {"layer_types": [LINEAR] * 2, "second_key_dim": 1, "linear_num_value_heads": 8},
    "sgla_tied": {
        "layer_types": [LINEAR] * 2,
        "second_key_dim": 8,
        "tie_second_key": True,
        "linear_mixer": "sgla",
        "decay_gate": "head",
        "write_gate": False,
    },
    "hybrid_nope": {"layer_types": [LINEAR, FULL, LINEAR], "second_key_dim": 2, "position_embedding": "none"},
    "transformer_gqa": {"layer_types": [FULL] * 2, "num_key_value_heads": 1},
}
BOUNDS = [0, 5, 13, 31, 50, 62, 64]  # documents that cross each boundary between 2 and 4 ranks


def config_of(kind, layers):
    """A kind of KINDS, or the beginning of a model of a config file."""
    if kind not in KINDS:
        fields = TriadicConfig.from_pretrained(kind).to_dict()
        fields["layer_types"] = fields["layer_types"][:layers]
        return TriadicConfig(**fields | {"num_hidden_layers": len(fields["layer_types"])})
    fields = {**BASE, **KINDS[kind]}
    return TriadicConfig(**fields, num_hidden_layers=len(fields["layer_types"]))


def build(config, dtype, device):
    torch.manual_seed(0)
    model = TriadicForCausalLM(config).to(dtype)
    if config.vocab_size > BASE["vocab_size"]:
        return model.to(device).train()  # as training begins
    with torch.no_grad():  # decays that are felt within a few tokens, norms away from 1, biases away from 0
        for name, parameter in model.named_parameters():
            if "dt_bias" in name:
                parameter.add_(3.0)
            elif parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(device).train()


def gradients(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def relative(x, y):
    return ((x - y).norm() / y.norm().clamp(min=1e-12)).item()


def compare(kind, context, a):
    """The model on one process and spread over the ranks: losses and gradient errors, equal on all ranks."""
    config, generator = config_of(kind, a.layers), torch.Generator().manual_seed(1)
    bounds = BOUNDS
    if a.tokens > BOUNDS[-1]:
        bounds = sorted({0, a.tokens, *random.Random(0).choices(range(a.tokens), k=a.tokens // 2048)})
    device = torch.device(a.device, a.rank) if a.device == "cuda" else torch.device("cpu")
    ids = torch.randint(1, config.vocab_size, (1, a.tokens), generator=generator).to(device)
    labels = ids.roll(-1, 1)
    labels[0, [3, 40, 41]] = -100
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    packed = {"cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32, device=device), "max_length_q": longest}
    half = a.dtype == "bfloat16"
    dtype = torch.float32 if half else getattr(torch, a.dtype)
    whole, spread = build(config, dtype, device), build(config, dtype, device)
    spread_context(spread, context)
    if a.checkpoint:  # transformers 5.24 renamed the method
        enable = getattr(spread, "activation_checkpointing_enable", spread.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    run = torch.compile(spread, fullgraph=True, backend="aot_eager") if a.compile else spread
    with torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext():
        expected = whole(ids, shift_labels=labels, **packed).loss
        loss = run(context.slice(ids), shift_labels=context.slice(labels), **packed).loss
    theirs, ours = gradients(whole, expected), gradients(spread, loss)
    total = context.total(loss.detach())
    ours = {name: context.total(gradient) for name, gradient in ours.items()}
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    worst = max(errors, key=errors.get)
    both = (torch.cat([gradients[name].flatten() for name in theirs]) for gradients in (ours, theirs))
    return {
        "what": "context", "model": kind.split("/")[-1], "ranks": context.degree, "tokens": a.tokens,
        "dtype": a.dtype, "device": a.device, "loss": total.item(), "expected": expected.item(),
        "worst": errors[worst], "tensor": worst, "all": relative(*both),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("store")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=BOUNDS[-1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float64", help="bfloat16: autocast over float32 weights")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--out", help="result file (JSON)")
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.device == "cuda":
        torch.cuda.set_device(a.rank)
    backend = "nccl" if a.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{a.store}", rank=a.rank, world_size=a.ranks)
    context = Context(dist.group.WORLD, a.rank, a.ranks)
    rows = []
    for kind in a.kinds:
        rows.append(compare(kind, context, a))
        if a.rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    if a.out and a.rank == 0:
        command = f"python tests/models/context_cases.py RANK {a.ranks} STORE {' '.join(sys.argv[4:])}"
        found = origin(command.replace(f" --out {a.out}", "")) | {"versions": versions(), "rows": rows}
        Path(a.out).write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
