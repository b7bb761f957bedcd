#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

prepare
for model in gdn_400m triadic_gdn_400m_e8; do
    pretrain "$model" "$model"
    extend "$model"
    analyse "$model"
done
collect figure5_analysis
