#!/bin/sh
set -eu
cd "$(dirname "$0")/../.."
. recipes/scales/small.sh

prepare
for model in gdn triadic_gdn_e8 sgla triadic_sgla_e8; do
    pretrain "$model" "$model"
    extend "$model"
    evaluate "$model"
done

upcycle gdn triadic_gdn_e8_upcycled 8
extend triadic_gdn_e8_upcycled
evaluate triadic_gdn_e8_upcycled

upcycle sgla triadic_sgla_e8_upcycled 8
extend triadic_sgla_e8_upcycled
evaluate triadic_sgla_e8_upcycled

# the same with second projections that start at zero: the old function exactly, but equal slices
upcycle gdn triadic_gdn_e8_upcycled_exact 8 --start exact
extend triadic_gdn_e8_upcycled_exact
evaluate triadic_gdn_e8_upcycled_exact

# a second seed
for model in gdn triadic_gdn_e8; do
    pretrain "$model-s1" "$model" run.seed=1
    extend "$model-s1" run.seed=2
    evaluate "$model-s1"
done
collect table2_upcycling
