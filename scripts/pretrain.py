"""Pretrain, extend or resume: accelerate launch scripts/pretrain.py --config configs/train/demo.yaml [a.b=value ...]

Exit code 0: finished, or stopped by SIGTERM or Ctrl-C after saving (RUN/final exists only once a run has finished; the
same command resumes; a run that goes on keeps its earlier end as RUN/earlier-final-STEP). 1: settings, data or folders
that cannot be used, or training that had to stop; the line
`error: ...` says why (above the launcher's own report, if there is one).
"""

import argparse

from transformers.utils.logging import disable_progress_bar

from triadic.group import end, leaving_group
from triadic.launch import refuse
from triadic.training import TrainingError, load_config, train

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a file of configs/train")
    parser.add_argument("settings", nargs="*", metavar="a.b=value", help="settings to change")
    args = parser.parse_intermixed_args()
    disable_progress_bar()  # transformers' own, one a checkpoint
    with leaving_group():
        try:
            train(load_config(args.config, args.settings))
        except (ValueError, TrainingError) as error:
            refuse(error)
    end()
