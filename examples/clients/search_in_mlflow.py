"""A search logged to MLflow: each trial is a run of an experiment, in a local folder,
with the metrics of each evaluation.

    python examples/clients/search_in_mlflow.py            # needs: pip install mlflow
    mlflow ui --backend-store-uri sqlite:///runs/mlflow.db

For Weights & Biases use ``ray.air.integrations.wandb.WandbLoggerCallback``. Tested with
MLflow 3.17.2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ray import tune
from ray.air.integrations.mlflow import MLflowLoggerCallback

from ray_adascale import AdaScaleConfig, Search, tune_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from digits import workload


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--smoke", action="store_true", help="two short trials")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    search = Search(
        workload,
        {"lr": tune.loguniform(0.005, 0.2), "momentum": 0.9},
        config=AdaScaleConfig(
            base_batch_size=8, total_steps=60 if args.smoke else 1800
        ),
        num_samples=2 if args.smoke else 8,
        storage_path=folder,
        callbacks=[
            MLflowLoggerCallback(
                tracking_uri=f"sqlite:///{folder}/mlflow.db",
                experiment_name="digits at batch 8",
            )
        ],
    )
    recipe = tune_recipe(search)
    print(f"best: {recipe.hyperparameters}, {recipe.metric} {recipe.score:.3f}")


if __name__ == "__main__":
    main()
