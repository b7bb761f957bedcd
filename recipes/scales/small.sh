# Models of 56M parameters, half the width and depth of the 400M ones: 31M tokens at 2k, then 8.4M at 16k. One GPU, and
# about two minutes a model. The corpus: recipes/scales/small/text.sh
SCALE=small MODELS=recipes/scales/small/models SETTINGS=recipes/scales/small LAUNCH=configs/accelerate/single.yaml
PRETRAIN=recipes/scales/small/pretrain.yaml
EXTEND=recipes/scales/small/extend.yaml
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config recipes/scales/small/data.yaml
}
