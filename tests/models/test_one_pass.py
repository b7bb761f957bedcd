"""Keys, queries and values by one kernel (in Triton's interpreter) change neither the loss nor a gradient."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch
from triadic.models import TriadicConfig, TriadicForCausalLM
from triadic.models.mixers import TriadicLinearAttention
from triadic_kernels import dispatch

for name in ("gluon_hopper", "triton"):
    dispatch.CHUNK.pop(name)  # the recurrence in plain torch: it is not what is compared
fields = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
          "initializer_range": 0.25, "linear_fused_inputs": True, "layer_types": ["linear_attention"],
          "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 16, "linear_value_head_dim": 16, "second_key_dim": 4, "output_gate_rank": 6}
ids = torch.arange(24)[None] % 61
bounds = torch.tensor([0, 3, 4, 24], dtype=torch.int32)
for changes in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    model = TriadicForCausalLM(TriadicConfig(**fields | changes)).train()
    calls, results = [], []
    for able in (lambda self, x: calls.append(1) or usual(self, x), lambda self, x: False):
        usual = globals().get("usual") or TriadicLinearAttention.in_one_pass
        TriadicLinearAttention.in_one_pass = able
        model.zero_grad()
        loss = model(ids, shift_labels=ids, cu_seq_lens_q=bounds).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    mixer = model.model.layers[0].mixer
    assert calls and usual(mixer, torch.zeros(1))
    mixer.config.linear_conv_kernel_dim = 9
    assert not usual(mixer, torch.zeros(1))
    mixer.config.linear_conv_kernel_dim = 4
    mixer.config.linear_fused_inputs = False
    assert not usual(mixer, torch.zeros(1))
    print(max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(*results)))
"""
CHANGES = [
    {},
    {"second_key_dim": 1},
    {"second_key_dim": 16, "tie_second_key": True, "linear_mixer": "sgla"},
    {"second_key_activation": "none", "decay_gate": "head"},
]


@pytest.mark.triton
def test_one_kernel_equals_single_operations():
    command = [sys.executable, "-c", PROGRAM, json.dumps(CHANGES)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == len(CHANGES)
    assert max(errors) < 1e-5
