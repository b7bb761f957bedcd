# The paper's 400M models: 20B tokens of FineWeb-Edu, then 2B at 64k. 8 GPUs of 80 GB.
SCALE=paper MODELS=configs/model SETTINGS=recipes/scales/paper PRETRAIN=pretrain_400m EXTEND=extend_400m
LAUNCH="--multi_gpu --num_processes 8 --num_machines 1 --mixed_precision no --dynamo_backend no"
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config configs/data/fineweb_edu.yaml
    python scripts/prepare_data.py --config configs/data/pg19.yaml
    python scripts/prepare_data.py --config configs/data/extend64k.yaml
}
