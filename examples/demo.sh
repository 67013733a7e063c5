#!/usr/bin/env bash
# The whole workflow as commands of a user: a search at batch 8, the schedule on two workers at batch 128, and a comparison over
# three seeds. Needs ray-adascale[plots]; `make demo` installs it.
set -euo pipefail
folder=$(realpath -m "${1:-runs/demo}")
cd "$(dirname "$0")/.."
mkdir -p "$folder"
# Ray polls its workers every 2 s by default. Runs of a few seconds start and end faster with a shorter interval.
export RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.5

echo "== 1. Search for a schedule at batch 8 =="
ray-adascale tune examples/language_model.py:workload --base-batch-size 8 --total-steps 1500 --num-samples 8 \
    --storage-path "$folder" -o "$folder/recipe.json"

echo
echo "== 2. The same schedule on two workers, batch 128 =="
ray-adascale train examples/language_model.py:workload --recipe "$folder/recipe.json" --num-workers 2 \
    --per-worker-batch-size 64 --storage-path "$folder"

echo
echo "== 3. Against the base run and three other rules, three seeds, on text that the search did not use =="
python examples/demo.py "$folder/recipe.json" --folder "$folder"
