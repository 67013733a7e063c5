"""A search with Optuna and ASHA at the base batch, then the found schedule on two
workers.

    python examples/tune_asha_optuna.py            # 16 trials
    python examples/tune_asha_optuna.py --smoke    # the same, short

Optuna proposes hyperparameters from the scores of earlier trials. ASHA stops trials
that fall behind, compared at equal effective steps. The same two arguments accept any
other searcher and scheduler of Ray Tune.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from optuna.samplers import TPESampler
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleTrainer,
    Recipe,
    Search,
    Workload,
    tune_recipe,
)

BASE_BATCH = 8

param_space = {
    "lr": tune.loguniform(0.001, 0.3),
    "momentum": tune.choice([0.0, 0.8, 0.9]),
    "warmup": tune.uniform(0.0, 0.2),  # a share of the run
}


def workload(config: dict[str, Any]) -> Workload:
    """Return a small network for scikit-learn's digits; warm-up, then a cosine, in
    steps of the base batch.
    """
    images, labels = load_digits(return_X_y=True)
    x, y = torch.as_tensor(images, dtype=torch.float32) / 16, torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1400], order[1400:]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=config["momentum"]
    )
    total_steps: int = config["total_steps"]
    warmup = max(1, round(config["warmup"] * total_steps))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(
                optimizer, start_factor=1 / (warmup + 1), total_iters=warmup
            ),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=total_steps - warmup
            ),
        ],
        milestones=[warmup],
    )

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        right = model(x[validation].to(device)).argmax(1) == y[validation].to(device)
        return {"accuracy": right.float().mean().item()}

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=TensorDataset(x[train], y[train]),
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="accuracy",
        mode="max",
    )


def search(total_steps: int, num_samples: int, storage: str) -> Recipe:
    """Search with Optuna and ASHA; return the best trial's recipe."""
    # the first few at random
    proposals = OptunaSearch(sampler=TPESampler(seed=0, n_startup_trials=4))
    asha = ASHAScheduler(
        time_attr="effective_steps",
        grace_period=total_steps // 8,
        max_t=total_steps,
        reduction_factor=4,
    )
    trials = Search(
        workload,
        {**param_space, "total_steps": total_steps},
        config=AdaScaleConfig(base_batch_size=BASE_BATCH, total_steps=total_steps),
        num_samples=num_samples,
        search_alg=proposals,  # metric and mode are the workload's
        scheduler=asha,
        # with fewer at a time, Optuna has more scores for each proposal
        max_concurrent_trials=2,
        storage_path=storage,
    )
    return tune_recipe(trials)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--storage", type=Path, help="folder for results; default: a temporary one"
    )
    parser.add_argument("--smoke", action="store_true", help="4 short trials")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        storage = (args.storage or Path(scratch)).resolve()
        storage.mkdir(parents=True, exist_ok=True)
        recipe = search(
            400 if args.smoke else 1800, 4 if args.smoke else 16, str(storage)
        )
        recipe.save(storage / "recipe.json")
        print(f"found at batch {BASE_BATCH}: {recipe.describe()}", flush=True)
        result = AdaScaleTrainer(
            workload,
            recipe=recipe,
            config=AdaScaleConfig(per_worker_batch_size=4 * BASE_BATCH),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="scaled", storage_path=str(storage)),
            progress=False,
        ).fit()
    end = result.metrics
    assert end is not None
    print(
        f"at batch {BASE_BATCH * end['scale']:g} (S = {end['scale']:g}): accuracy "
        f"{end['accuracy']:.3f} after {end['optimizer_steps']} optimizer steps for "
        f"{end['effective_steps']:.0f} effective ones"
    )


if __name__ == "__main__":
    main()
