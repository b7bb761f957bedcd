# Every step runs, nothing is learnt: models of 0.3M parameters, a few steps. Seconds a model on a CPU.
SCALE=smoke MODELS=recipes/scales/smoke/models SETTINGS=recipes/scales/smoke LAUNCH=configs/accelerate/single.yaml
PRETRAIN=recipes/scales/smoke/pretrain.yaml
EXTEND=recipes/scales/smoke/extend.yaml
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config recipes/scales/smoke/data.yaml
}
