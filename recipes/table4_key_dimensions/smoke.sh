#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/smoke.sh

prepare
for model in triadic_gdn_e8 triadic_gdn_e8_headgate triadic_gdn_dk32_e32_tied; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done
collect table4_key_dimensions
