#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/paper_400m.sh

fetch
prepare
for model in gdn_400m triadic_gdn_400m_e8 sgla_400m triadic_sgla_400m_e8; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

upcycle gdn_400m triadic_gdn_400m_e8_upcycled 8
extend triadic_gdn_400m_e8_upcycled
evaluate triadic_gdn_400m_e8_upcycled

upcycle sgla_400m triadic_sgla_400m_e8_upcycled 8
extend triadic_sgla_400m_e8_upcycled
evaluate triadic_sgla_400m_e8_upcycled

# the same with second projections that start at zero: the old function exactly, but equal slices
upcycle gdn_400m triadic_gdn_400m_e8_upcycled_exact 8 --start exact
extend triadic_gdn_400m_e8_upcycled_exact
evaluate triadic_gdn_400m_e8_upcycled_exact

. recipes/scales/paper_1.3b.sh
prepare
for model in gdn_1.3b triadic_gdn_1.3b_e8 sgla_1.3b triadic_sgla_1.3b_e8; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

upcycle gdn_1.3b triadic_gdn_1.3b_e8_upcycled 8
extend triadic_gdn_1.3b_e8_upcycled
evaluate triadic_gdn_1.3b_e8_upcycled

upcycle sgla_1.3b triadic_sgla_1.3b_e8_upcycled 8
extend triadic_sgla_1.3b_e8_upcycled
evaluate triadic_sgla_1.3b_e8_upcycled
collect table2_upcycling
