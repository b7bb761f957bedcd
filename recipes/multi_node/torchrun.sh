#!/usr/bin/env bash
# One run over several machines without a scheduler, started on each of them:
#   HEAD=host0 NODES=2 NODE=0 [ENGINE=fsdp2] recipes/multi_node/torchrun.sh --config configs/train/X.yaml
# ENGINE is ddp (the default), fsdp2, zero1, zero2 or zero3.
set -euo pipefail
ENGINE=${ENGINE:-ddp}
GPUS=${GPUS:-8}
PORT=${PORT:-29500}
case $ENGINE in
ddp) ;;
fsdp2) export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 ;;
zero[123]) export ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_CONFIG_FILE=configs/deepspeed/$ENGINE.json ;;
*) echo "ENGINE is $ENGINE; it must be ddp, fsdp2, zero1, zero2 or zero3" >&2 && exit 1 ;;
esac
exec torchrun --nnodes "$NODES" --node_rank "$NODE" --nproc_per_node "$GPUS" --master_addr "$HEAD" --master_port "$PORT" \
    scripts/pretrain.py "$@" "parallel.processes=$((NODES * GPUS))" "parallel.engine=$ENGINE"
