#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

fetch
prepare
for model in gdn_400m triadic_gdn_400m_e2 triadic_gdn_400m_e4 triadic_gdn_400m_e8; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

# the Transformer takes another RoPE base at 64k
pretrain transformer_400m transformer_400m
extend transformer_400m model.rope_theta=2e6
evaluate transformer_400m
collect figure3_ruler
