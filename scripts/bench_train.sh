#!/bin/sh
# Training speed on one GPU, random tokens: 4k windows with and without compiled layers, then 64k windows (recomputed
# blocks; their peak memory is to stay below 80 GB). About four minutes; JSON files in $OUT (default results/bench_train).
#   MODELS_4K, MODELS_64K  model configs; TRAIN_ARGS, LONG_ARGS  further arguments of scripts/benchmark_training.py
set -e
OUT=${OUT:-results/bench_train}
M=configs/model
MODELS_4K=${MODELS_4K:-"$M/gdn_1.3b.json $M/triadic_gdn_1.3b_e8.json $M/transformer_1.3b.json $M/triadic_gdn_400m_e8.json $M/gdn_400m.json $M/hybrid_triadic_400m_e4_gqa8.json $M/transformer_400m.json"}
MODELS_64K=${MODELS_64K:-"$M/triadic_gdn_1.3b_e8.json $M/triadic_gdn_400m_e8.json $M/hybrid_triadic_400m_e4_gqa8.json $M/transformer_1.3b.json"}
python3 scripts/benchmark_training.py $MODELS_4K --lengths 4096 --seconds 120 --out "$OUT/train_4k.json" $TRAIN_ARGS
python3 scripts/benchmark_training.py $MODELS_64K --lengths 65536 --steps 2 --seconds 60 --out "$OUT/train_64k.json" \
    $LONG_ARGS
