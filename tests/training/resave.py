"""Under a launcher: resume the run of a settings file, save its state untouched as OUTPUT, train on to the end.

python resave.py OUTPUT --config settings.yaml [a.b=value ...]
"""

import sys
from pathlib import Path

import torch

from triadic.group import leaving_group
from triadic.training import assemble, checkpoint, load_config, parallel, train

with leaving_group():
    output, _, settings, *overrides = sys.argv[1:]
    config = load_config(settings, overrides)
    run = assemble.assemble(config)
    assert {p.dtype for p in run.bare.parameters()} == {torch.float32}
    snapshot = checkpoint.take(run.accelerator, run.model, run.optimizer, run.progress)
    parallel.on_main(run.accelerator, checkpoint.write, Path(output), snapshot, run.bare, run.tokenizer, config)
    run.claim.release()
    run.accelerator.wait_for_everyone()
    train(config)
