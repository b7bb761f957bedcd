#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

python kernels/benchmarks/bench.py --shapes 4x4096 4x8192 4x16384 4x32768 4x65536 --E 1 2 4 8 --H 16 --D 128 \
    --impl triadic fla flashqla sdpa_flash --out recipes/figure4_efficiency/results/paper/op.json
blocks="python scripts/benchmark_block.py --B 4 --T 4096 8192 16384 32768 65536 --E 1 2 4 8 16 --what block"
$blocks --out recipes/figure4_efficiency/results/paper/block.json
$blocks --compile --out recipes/figure4_efficiency/results/paper/block_compiled.json
collect figure4_efficiency
