"""Whether compiled layers train as plain ones do: compilers change from release to release, and a wrong gradient shows
in no error message.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from triadic.training import engines, parallel

if TYPE_CHECKING:
    from triadic.training.assemble import Run

# Relative l2 distance of all gradients together, above which they are not the same up to rounding.
LIMITS = {"bf16": 0.2, "fp32": 1e-2}


def check_gradients(run: "Run", batch: dict) -> str:
    """Compare the gradients of a batch (on the device) with those of the same layers uncompiled; every rank calls this.

    Leaves no gradients behind. Returns what was found, for the log. Raises ValueError if they differ by more than
    rounding.
    """
    name = engines.name_of(run.accelerator)
    if name.startswith("zero"):  # which hands out no gradients of single parameters
        return f"model.torch_compile: gradients are not compared with those of plain layers under {name}"
    if run.bare.config.attention_dropout > 0 and "full_attention" in run.bare.config.layer_types:
        return "model.torch_compile: gradients are not compared with those of plain layers, attention_dropout differs"
    compiled = _gradients(run, batch, [])
    with torch.compiler.set_stance("force_eager"):
        sums = _gradients(run, batch, compiled)
    squares = torch.tensor(sums, dtype=torch.float64).sum(0)
    difference, norm = parallel.total(run.accelerator, *squares).sqrt().tolist()
    if not math.isfinite(norm):  # which is not the compiler's doing: the loop says where, and what to do
        return "model.torch_compile: gradients are not compared, those of plain layers are not finite"
    found, limit = difference / norm if norm else difference, LIMITS[run.config.run.precision]
    if not found <= limit:
        raise ValueError(
            f"model.torch_compile gives other gradients than plain layers on this machine (relative l2 distance "
            f"{found:.2g}, rounding explains {limit:g}; torch {torch.__version__}); set model.torch_compile=false"
        )
    return f"model.torch_compile: gradients are those of plain layers (relative l2 distance {found:.1g})"


def _gradients(run, batch, others: list) -> list:
    """The batch's gradients, on the CPU; or with `others` of the same model, for each the squared norms of its distance
    and of itself.
    """
    engine = engines.of(run.accelerator)
    with torch.random.fork_rng(), engine.micro_batch(run.accelerator, run.model, False):
        engine.backward(run.accelerator, run.model, run.model(**batch, use_cache=False).loss)
    gradients = [p.grad for p in run.bare.parameters() if p.grad is not None]
    gradients = [(g.to_local() if isinstance(g, DTensor) else g).float().cpu() for g in gradients]
    run.optimizer.zero_grad()
    if not others:
        return gradients
    return [
        ((g.double() - h).square().sum(), g.double().square().sum()) for g, h in zip(gradients, others, strict=True)
    ]
