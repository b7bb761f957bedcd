#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/smoke.sh

python recipes/figure1_mqar/run.py --config recipes/figure1_mqar/smoke.yaml --output recipes/figure1_mqar/results/smoke/mqar.json
collect figure1_mqar
