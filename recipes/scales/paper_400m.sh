# The paper's 400M models: 20B tokens of FineWeb-Edu, then 2B at 64k. 8 GPUs of 80 GB.
SCALE=paper MODELS=configs/model SETTINGS=recipes/scales/paper LAUNCH=configs/accelerate/ddp_8gpu.yaml
PRETRAIN=configs/train/gdn_400m.yaml
EXTEND=configs/train/gdn_400m_extend64k.yaml
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config configs/data/fineweb_edu.yaml
    python scripts/prepare_data.py --config configs/data/pg19.yaml
    python scripts/prepare_data.py --config configs/data/extend64k.yaml
}
