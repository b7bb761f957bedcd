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

upcycle gdn triadic_gdn_e8_upcycled 8
extend triadic_gdn_e8_upcycled
evaluate triadic_gdn_e8_upcycled

upcycle gdn triadic_gdn_e8_upcycled_exact 8 --start exact
extend triadic_gdn_e8_upcycled_exact
evaluate triadic_gdn_e8_upcycled_exact
collect table2_upcycling
