#!/usr/bin/env bash
# One run over several machines under Slurm, from the repository:
#   sbatch recipes/multi_node/slurm.sh --config configs/train/X.yaml [a.b=value ...]
# The launcher runs once a machine; LAUNCH names its file. Requeued or submitted again, the job resumes the run.
#SBATCH --job-name=triadic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# SIGTERM comes 120 seconds before the time limit; the run then saves and stops.
set -euo pipefail
LAUNCH=${LAUNCH:-configs/accelerate/zero2_2x8gpu.yaml}
GPUS=${SLURM_GPUS_PER_NODE:-8}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head LAUNCH GPUS
# shellcheck disable=SC2016 # expanded on each machine
exec srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$LAUNCH" \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * GPUS))" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$head" --main_process_port 29500 scripts/pretrain.py "$@"' launch \
    "$@" "parallel.processes=$((SLURM_NNODES * GPUS))"
