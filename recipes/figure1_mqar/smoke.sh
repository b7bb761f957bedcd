#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/smoke.sh

rm -f recipes/figure1_mqar/results/smoke/mqar.json # or it would go on with it
python recipes/figure1_mqar/run.py --config recipes/figure1_mqar/smoke.yaml --output recipes/figure1_mqar/results/smoke/mqar.json
collect figure1_mqar
