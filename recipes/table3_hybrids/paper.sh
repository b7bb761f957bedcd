#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

fetch
prepare
for model in gdn_400m hybrid_400m_gqa8 hybrid_400m_gqa4 hybrid_triadic_400m_e4_gqa8; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

# the Transformer takes another RoPE base at 64k
pretrain transformer_400m transformer_400m
extend transformer_400m model.rope_theta=2e6
evaluate transformer_400m
collect table3_hybrids
