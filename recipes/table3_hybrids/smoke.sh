#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/smoke.sh

prepare
for model in gdn hybrid_kv1 hybrid_triadic_e4_kv1; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

# the Transformer takes another RoPE base in the extension
pretrain transformer transformer
extend transformer model.rope_theta=2e5
evaluate transformer
collect table3_hybrids
