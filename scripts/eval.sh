#!/bin/sh
# Evaluate a checkpoint with one process for each visible GPU: scripts/eval.sh CHECKPOINT --suite NAME --output DIR
# NAME: a file of configs/eval, or the path of another; without --suite, demo.
set -eu
script="$(dirname "$0")/evaluate.py"
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -gt 1 ]; then
    exec accelerate launch --multi_gpu --num_processes "$gpus" --num_machines 1 --mixed_precision no \
        --dynamo_backend no "$script" "$@"
fi
exec python "$script" "$@"
