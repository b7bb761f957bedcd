#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/small.sh

prepare
for model in gdn gdn_d256 gdn_gva2 gdn_dv256 gdn_h8 triadic_gdn_e2 gdn_d512 gdn_gva4 gdn_dv512 \
    triadic_gdn_e4 sgla triadic_sgla_e2 triadic_sgla_e4; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

# the Transformer takes another RoPE base in the extension
pretrain transformer transformer
extend transformer model.rope_theta=2e5
evaluate transformer

# a second seed of the two ends of the comparison
for model in gdn triadic_gdn_e4; do
    pretrain "$model-s1" "$model" run.seed=1
    extend "$model-s1" run.seed=2
    evaluate "$model-s1"
done
collect figure2_table1_state_matched
