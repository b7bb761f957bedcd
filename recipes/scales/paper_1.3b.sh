# The paper's 1.3B models: 65B tokens of FineWeb-Edu, then 6.8B at 64k. 8 GPUs of 80 GB. Its stores stand beside those of
# the 400M models.
SCALE=paper MODELS=configs/model SETTINGS=recipes/scales/paper LAUNCH=configs/accelerate/ddp_8gpu.yaml
PRETRAIN="configs/train/gdn_1.3b.yaml data.train=data/fineweb_edu_65b/train data.validation=data/fineweb_edu_65b/validation"
EXTEND="configs/train/gdn_1.3b_extend64k.yaml data.train=data/extend64k_7b/train"
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config configs/data/fineweb_edu.yaml \
        output=data/fineweb_edu_65b source.max_tokens=65_300_000_000
    python scripts/prepare_data.py --config configs/data/pg19.yaml
    python scripts/prepare_data.py --config configs/data/extend64k.yaml \
        output=data/extend64k_7b mixture.tokens=7_200_000_000 mixture.parts.fineweb_edu.store=data/fineweb_edu_65b/train \
        tokenizer.pretrained=data/fineweb_edu_65b/tokenizer
}
