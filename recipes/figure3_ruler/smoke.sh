#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/smoke.sh

prepare
for model in gdn triadic_gdn_e8; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

# the Transformer takes another RoPE base in the extension
pretrain transformer transformer
extend transformer model.rope_theta=2e5
evaluate transformer
collect figure3_ruler
