#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

python kernels/benchmarks/bench.py --shapes 4x4096 4x8192 4x16384 4x32768 4x65536 --E 1 2 4 8 --H 16 --D 128 \
    --impl triadic fla flashqla sdpa_flash --out recipes/figure4_efficiency/results/paper/op.json
collect figure4_efficiency
