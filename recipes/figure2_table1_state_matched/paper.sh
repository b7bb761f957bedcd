#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

fetch
prepare
for model in gdn_400m gdn_400m_d256 gdn_400m_gva2 gdn_400m_dv256 gdn_400m_h16 triadic_gdn_400m_e2 \
    gdn_400m_d512 gdn_400m_gva4 gdn_400m_dv512 triadic_gdn_400m_e4 sgla_400m sgla_400m_d256 \
    sgla_400m_gva2 sgla_400m_dv256 sgla_400m_h16 triadic_sgla_400m_e2 sgla_400m_d512 sgla_400m_gva4 \
    sgla_400m_dv512 triadic_sgla_400m_e4; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

# the Transformer takes another RoPE base at 64k
pretrain transformer_400m transformer_400m
extend transformer_400m model.rope_theta=2e6
evaluate transformer_400m
collect figure2_table1_state_matched
