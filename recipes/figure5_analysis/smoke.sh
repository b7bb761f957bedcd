#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/smoke.sh

prepare
for model in gdn triadic_gdn_e8; do
    pretrain "$model" "$model"
    extend "$model"
    analyse "$model"
done
collect figure5_analysis
