# Every step runs, nothing is learnt: models of 0.3M parameters, a few steps. Seconds a model on a CPU.
SCALE=smoke MODELS=recipes/scales/smoke/models SETTINGS=recipes/scales/smoke PRETRAIN=pretrain EXTEND=extend
LAUNCH="--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
. recipes/scales/stages.sh

prepare() {
    python scripts/prepare_data.py --config recipes/scales/smoke/data.yaml
}
