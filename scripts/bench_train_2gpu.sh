#!/bin/sh
# Two GPUs: data parallelism against one GPU, context parallelism against one GPU (loss and gradients, bf16), and a
# window of 262,144 tokens spread over both. About four minutes; JSON files in $OUT (default results/bench_train_2gpu).
#   MODEL, LONG_MODEL, LONG  model configs and the window; TRAIN_ARGS  for scripts/benchmark_training.py
#   CONTEXT_ARGS  for tests/models/context_cases.py
set -e
if test -z "$MODEL$LONG_MODEL$CONTEXT_ARGS" && ! python3 -c "import torch; exit(torch.cuda.device_count() < 2)"; then
    echo "error: this times two CUDA devices, and torch sees fewer here; run it where there are two, or try a small model" \
        "on the CPU: ACCELERATE_USE_CPU=true MODEL=configs/model/demo.json LONG_MODEL=configs/model/demo.json LONG=1024" \
        "TRAIN_ARGS='--pass-tokens 4096 --accumulation 1 --eager'" \
        "CONTEXT_ARGS='--tokens 256 --kinds configs/model/demo.json' scripts/bench_train_2gpu.sh" >&2
    exit 1
fi
OUT=${OUT:-results/bench_train_2gpu}
M=configs/model
MODEL=${MODEL:-$M/gdn_1.3b.json}
LONG_MODEL=${LONG_MODEL:-$M/triadic_gdn_1.3b_e8.json}
LONG=${LONG:-262144}
CONTEXT_ARGS=${CONTEXT_ARGS:-"--device cuda --dtype bfloat16 --tokens 16384 --kinds $LONG_MODEL $M/transformer_1.3b.json $M/hybrid_triadic_400m_e4_gqa8.json"}
mkdir -p "$OUT"
store=$(mktemp -u)
python3 tests/models/context_cases.py 1 2 "$store" $CONTEXT_ARGS &
python3 tests/models/context_cases.py 0 2 "$store" $CONTEXT_ARGS --out "$OUT/context_2gpu.json"
wait $!
python3 scripts/benchmark_training.py $MODEL $TRAIN_ARGS --out "$OUT/train_1gpu.json"
python3 -m torch.distributed.run --standalone --nproc_per_node 2 scripts/benchmark_training.py $MODEL $TRAIN_ARGS \
    --out "$OUT/train_2gpu.json"
python3 -m torch.distributed.run --standalone --nproc_per_node 2 scripts/benchmark_training.py $LONG_MODEL \
    --lengths $LONG --context 2 --checkpoint on --steps 2 --out "$OUT/window_$LONG.json" $TRAIN_ARGS
