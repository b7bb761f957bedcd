"""Under a launcher: pretrain, noting in RUN/stream/STEP.RANK.RANKS what each rank trained on in each step."""

import hashlib
import json
import sys
from pathlib import Path

from triadic.group import leaving_group
from triadic.training import load_config, loop, train
from triadic.training.run_folder import write_atomically

step_of = loop.train_step


def train_step(run, batches):
    windows = [row for batch in batches for row in batch["input_ids"].view(-1, run.config.data.seq_len)]
    digests = [hashlib.sha256(window.numpy().tobytes()).hexdigest() for window in windows]
    folder = Path(run.config.run.output_dir) / "stream"
    folder.mkdir(exist_ok=True)
    rank, ranks = run.accelerator.process_index, run.accelerator.num_processes
    note = folder / f"{run.progress.step}.{rank}.{ranks}"
    if note.exists():  # a step that was taken before and lost: the same again
        assert json.loads(note.read_text()) == digests
    write_atomically(note, json.dumps(digests))
    return step_of(run, batches)


loop.train_step = train_step
with leaving_group():
    train(load_config(sys.argv[2], sys.argv[3:]))
