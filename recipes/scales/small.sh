# Models of 56M parameters, half the width and depth of the 400M ones: 0.3B tokens at 2k, then 34M at 16k. One GPU, and
# about ten minutes a model. The corpus: recipes/scales/small/text.sh
SCALE=small MODELS=recipes/scales/small/models SETTINGS=recipes/scales/small PRETRAIN=pretrain EXTEND=extend
LAUNCH="--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config recipes/scales/small/data.yaml
}
