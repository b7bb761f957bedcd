#!/bin/sh
# How training speed grows with GPUs, under each engine: tokens/s, MFU, peak memory and scaling efficiency (tokens/s over
# those of one GPU times the number of GPUs); then windows that all GPUs share (context parallelism). JSON files in $OUT
# (default results/bench_train_gpus); about a minute for each engine and number of GPUs.
#   GPUS     numbers of processes, the first is what the others are compared with; default "1 2 4"
#   ENGINES  of ddp, zero1, zero2, zero3, fsdp2 (configs/accelerate); one process runs ddp alone
#   MODELS, TRAIN_ARGS             for scripts/benchmark_training.py
#   LONG_MODELS, LONG, LONG_ARGS   the same for the shared window: LONG tokens for each process, "" for none
set -e
if test -z "$MODELS" && ! python3 -c "import torch; exit(torch.cuda.device_count() < 2)"; then
    echo "error: this compares several CUDA devices, and torch sees fewer here; run it where there are some, or try a small" \
        "model on the CPU: ACCELERATE_USE_CPU=true GPUS='1 2' ENGINES=ddp MODELS=configs/model/demo.json" \
        "TRAIN_ARGS='--lengths 256 --pass-tokens 1024 --steps 2 --eager' LONG= scripts/bench_train_gpus.sh" >&2
    exit 1
fi
OUT=${OUT:-results/bench_train_gpus}
M=configs/model
MODELS=${MODELS:-"$M/gdn_400m.json $M/triadic_gdn_400m_e8.json $M/gdn_1.3b.json $M/triadic_gdn_1.3b_e8.json"}
mkdir -p "$OUT"
launch() { # ENGINE PROCESSES ARGUMENTS
    config=configs/accelerate/$1_8gpu.yaml number=$2
    test "$number" -gt 1 || config=configs/accelerate/single.yaml
    shift 2
    python3 -m accelerate.commands.launch --config_file $config --num_processes $number scripts/benchmark_training.py "$@"
}
for number in ${GPUS:-1 2 4}; do
    engines=${ENGINES:-ddp zero1 zero2 fsdp2}
    test "$number" -gt 1 || engines=ddp
    for engine in $engines; do
        launch $engine $number $MODELS $TRAIN_ARGS --out "$OUT/train_${number}_$engine.json"
    done
    test -z "${LONG-131072}" || launch ddp $number ${LONG_MODELS-$M/triadic_gdn_1.3b_e8.json} --context $number \
        --lengths $((${LONG-131072} * number)) --checkpoint on --steps 2 $LONG_ARGS --out "$OUT/window_$number.json"
done
python3 - "$OUT" <<'P'
import json, pathlib, sys
files = sorted(pathlib.Path(sys.argv[1]).glob("train_*.json"))
rows = [row for file in files for row in json.loads(file.read_text())["rows"] if "tokens_per_s" in row]
fewest = min(row["gpus"] for row in rows)
each = {row["model"]: row["tokens_per_s"] / row["gpus"] for row in rows if row["gpus"] == fewest}
print("| model | GPUs | engine | tokens/s | MFU | GiB | efficiency |\n|---|---|---|---|---|---|---|")
for row in sorted(rows, key=lambda row: (row["model"], row["gpus"], row["engine"])):
    share = row["tokens_per_s"] / row["gpus"] / each[row["model"]] if row["model"] in each else float("nan")
    cells = [row["model"], row["gpus"], row["engine"], f"{row['tokens_per_s']:.0f}", row["mfu"], row["peak_gib"], f"{share:.3f}"]
    print("|", " | ".join(map(str, cells)), "|")
P
