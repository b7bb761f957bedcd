# The paper's 1.3B models: 65B tokens of FineWeb-Edu, then 6.8B at 64k. 8 GPUs of 80 GB.
SCALE=paper MODELS=configs/model SETTINGS=recipes/scales/paper PRETRAIN=pretrain_1.3b EXTEND=extend_1.3b
LAUNCH="--multi_gpu --num_processes 8 --num_machines 1 --mixed_precision no --dynamo_backend no"
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config configs/data/fineweb_edu.yaml \
        output=data/fineweb_edu_65b source.max_tokens=65_300_000_000
    python scripts/prepare_data.py --config configs/data/pg19.yaml
    python scripts/prepare_data.py --config configs/data/extend64k.yaml \
        output=data/extend64k_7b mixture.tokens=7_200_000_000 mixture.parts.fineweb_edu.store=data/fineweb_edu_65b/train \
        tokenizer.pretrained=data/fineweb_edu_65b/tokenizer
}
