#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

python recipes/figure1_mqar/run.py --config recipes/figure1_mqar/paper.yaml --output recipes/figure1_mqar/results/paper/mqar.json
collect figure1_mqar
