#!/bin/sh
# Every recipe at its smallest, from nothing.
set -eu
cd "$(dirname "$0")/.."
rm -rf runs/smoke data/smoke recipes/*/results/smoke
for recipe in recipes/figure*/smoke.sh recipes/table*/smoke.sh; do
    "$recipe"
done
