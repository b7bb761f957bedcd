#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

fetch
prepare
for model in triadic_gdn_400m_e8_headgate triadic_gdn_400m_dk64_e16_headgate \
    triadic_gdn_400m_dk32_e32_headgate triadic_gdn_400m_dk32_e32_tied triadic_gdn_400m_e8 \
    triadic_gdn_400m_e8_sigmoid triadic_gdn_400m_e8_silu triadic_gdn_400m_e8_none; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done
collect table4_key_dimensions
