#!/bin/sh
# Training speed on one GPU, random tokens: windows of 4,096 tokens, then of 65,536 (their blocks recomputed; their peak
# memory is to stay below 80 GB). About a minute for each model and length; JSON files in $OUT (default
# results/bench_train). At 4,096 the largest model fills 118 GiB; on a smaller GPU: TRAIN_ARGS="--pass-tokens 8192"
#   MODELS_4K, MODELS_64K  model configs, "" for none; TRAIN_ARGS, LONG_ARGS  for scripts/benchmark_training.py
set -e
if test -z "${MODELS_4K+x}${MODELS_64K+x}" && ! python3 -c "import torch; exit(not torch.cuda.is_available())"; then
    echo "error: the 1.3B and 400M models are timed on a CUDA device, and torch sees none here; run it on a GPU, or try a" \
        "small model on the CPU: MODELS_4K=configs/model/demo.json MODELS_64K=" \
        "TRAIN_ARGS='--lengths 256 --pass-tokens 1024 --steps 2 --eager' scripts/bench_train.sh" >&2
    exit 1
fi
OUT=${OUT:-results/bench_train}
M=configs/model
ALL="$M/gdn_1.3b.json $M/triadic_gdn_1.3b_e8.json $M/transformer_1.3b.json $M/triadic_gdn_400m_e8.json $M/gdn_400m.json \
    $M/hybrid_triadic_400m_e4_gqa8.json $M/transformer_400m.json"
for length in 4096 65536; do
    case $length in
    4096) models=${MODELS_4K-$ALL} arguments="--pass-tokens 24576 --accumulation 8 $TRAIN_ARGS" ;;
    65536) models=${MODELS_64K-$ALL} arguments="--steps 2 $LONG_ARGS" ;;
    esac
    test -z "$models" || python3 scripts/benchmark_training.py $models --lengths $length $arguments \
        --out "$OUT/train_$length.json"
done
