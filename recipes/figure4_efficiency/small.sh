#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/small.sh

python kernels/benchmarks/bench.py --shapes 1x4096 1x16384 1x65536 --E 1 2 4 8 --H 16 --D 128 \
    --impl triadic fla sdpa_flash --out recipes/figure4_efficiency/results/small/op.json
python scripts/benchmark_block.py --B 1 --T 4096 16384 65536 --E 1 2 4 8 --what block --passes fwdbwd \
    --out recipes/figure4_efficiency/results/small/block.json
collect figure4_efficiency
