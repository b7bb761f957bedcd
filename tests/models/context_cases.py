"""One rank of a model whose window lies spread over gloo processes, against the same model on one process.

A program of its own, started once for each rank: python tests/models/context_cases.py RANK RANKS STORE_FILE [--compile]
Rank 0 prints a JSON row for each kind of model: losses, and the worst relative l2 error of a gradient.
"""

import argparse
import json

import torch
import torch.distributed as dist

from triadic.models import TriadicConfig, TriadicForCausalLM
from triadic.models.context import Context, spread_context

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
TOKENS = 64
BOUNDS = [0, 5, 13, 31, 50, 62, 64]  # documents that cross each boundary between 2 and 4 ranks


def build(kind, dtype):
    torch.manual_seed(0)
    fields = {**BASE, **KINDS[kind]}
    model = TriadicForCausalLM(TriadicConfig(**fields, num_hidden_layers=len(fields["layer_types"]))).to(dtype)
    with torch.no_grad():  # decays that are felt within a few tokens, norms away from 1, biases away from 0
        for name, parameter in model.named_parameters():
            if "dt_bias" in name:
                parameter.add_(3.0)
            elif parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


def gradients(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def relative(x, y):
    return ((x - y).norm() / y.norm().clamp(min=1e-12)).item()


def compare(kind, dtype, context, compiled, checkpointed):
    """The model on one process and spread over the ranks: losses and the worst gradient error, equal on all ranks."""
    ids = torch.randint(1, BASE["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[0, [3, 40, 41]] = -100
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "max_length_q": 19}
    whole, spread = build(kind, dtype), build(kind, dtype)
    expected = whole(ids, shift_labels=labels, **packed).loss
    spread_context(spread, context)
    if checkpointed:  # transformers 5.24 renamed the method
        enable = getattr(spread, "activation_checkpointing_enable", spread.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    run = torch.compile(spread, fullgraph=True, backend="aot_eager") if compiled else spread
    loss = run(context.slice(ids), shift_labels=context.slice(labels), **packed).loss
    theirs, ours = gradients(whole, expected), gradients(spread, loss)
    total = context.total(loss.detach())
    worst = max(relative(context.total(ours[name]), theirs[name]) for name in theirs)
    return {"kind": kind, "loss": total.item(), "expected": expected.item(), "worst": worst}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("store")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{a.store}", rank=a.rank, world_size=a.ranks)
    context = Context(dist.group.WORLD, a.rank, a.ranks)
    for kind in a.kinds:
        row = compare(kind, getattr(torch, a.dtype), context, a.compile, a.checkpoint)
        if a.rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
