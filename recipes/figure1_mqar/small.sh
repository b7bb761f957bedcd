#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/small.sh

python recipes/figure1_mqar/run.py --config recipes/figure1_mqar/small.yaml --output recipes/figure1_mqar/results/small/mqar.json
collect figure1_mqar
