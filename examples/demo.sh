#!/usr/bin/env bash
# The whole workflow as commands of a user: a search at batch 8, the found schedule on two workers, and a comparison over
# three fresh seeds. Needs ray-adascale[examples]; `make demo` installs it.
set -euo pipefail
folder=$(realpath -m "${1:-runs/demo}")
cd "$(dirname "$0")/.."
mkdir -p "$folder"
# Ray polls its workers every 2 s by default. Runs of a few seconds start and end faster with a shorter interval.
export RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.5

echo "== 1. Search for a schedule at batch 8 =="
ray-adascale tune examples/digits.py:workload --base-batch-size 8 --total-steps 1800 --num-samples 8 \
    --storage-path "$folder" -o "$folder/recipe.json"

echo
echo "== 2. The same schedule on two workers, batch 64 =="
ray-adascale train examples/digits.py:workload --recipe "$folder/recipe.json" --num-workers 2 \
    --per-worker-batch-size 32 --storage-path "$folder"

echo
echo "== 3. Against the base run and two other ways, three seeds, on data that the search never saw =="
python examples/digits.py "$folder/recipe.json" --folder "$folder"
