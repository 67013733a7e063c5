"""Parts that the examples of this folder share: scikit-learn's digits, a small network,
and the command line.

Each file has the training loop of a library, with the lines that AdaScale adds. At the
base batch of 8, one process tries three learning rates and saves the best one's recipe;
two processes then run it at S = 8:

    python examples/clients/with_accelerate.py base recipe.json
    torchrun --nproc-per-node 2 examples/clients/with_accelerate.py scaled recipe.json
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, AdaScaleOptimizer, Recipe, seed_everything
from ray_adascale.integrations.client import RecipeRecorder

BASE_BATCH, TOTAL_STEPS = 8, 1800
PER_WORKER_BATCH = 32
"""Batch of each of two workers: S = 8."""

Train = Callable[
    [float, AdaScaleConfig, "Recipe | None", "RecipeRecorder | None", str],
    tuple[nn.Module, AdaScaleOptimizer],
]
"""From (learning rate, settings, recipe, recorder, folder) to the trained, unwrapped
model and its optimizer.
"""


def batch_size() -> int:
    """Return the examples of a pass on one worker; with one worker, the base batch."""
    return BASE_BATCH if os.environ.get("WORLD_SIZE", "1") == "1" else PER_WORKER_BATCH


def splits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Split 1,797 images of 8×8 pixels: 1,200 for training, 250 for the choice of
    the learning rate, 347 for the comparison.
    """
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = order[:1200], order[1200:1450], order[1450:]
    train, search, test = (TensorDataset(x[part], y[part]) for part in parts)
    return train, search, test


def build(
    lr: float, total_steps: int = TOTAL_STEPS
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return model, optimizer and scheduler in plain torch, as at the base batch."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps),
    )


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the share of correct answers."""
    x, y = dataset.tensors
    model.eval()
    with torch.no_grad():
        right: Tensor = model(x).argmax(1) == y
    return right.float().mean().item()


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the loss of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def main(train: Train, loss_fn: Callable[[nn.Module, Any], Tensor] = loss_of) -> None:
    parser = argparse.ArgumentParser(
        description="Digits at the base batch, or on two workers at S = 8."
    )
    parser.add_argument("what", choices=["base", "scaled"])
    parser.add_argument("recipe", help="a file: written by base, read by scaled")
    parser.add_argument(
        "--lrs",
        type=float,
        nargs="+",
        default=[0.01, 0.03, 0.1],
        help="learning rates to choose from",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        help="seeds of the comparison",
    )
    parser.add_argument(
        "--folder",
        default="runs/clients",
        help="folder for traces (default: %(default)s)",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    _, search, test = splits()
    if args.what == "base":
        choose(train, loss_fn, args.lrs, search, args.folder).save(args.recipe)
    recipe = Recipe.load(args.recipe)
    scores = []
    for seed in args.seeds:
        seed_everything(seed)
        name = f"{args.folder}/{args.what}-{seed}"
        model, optimizer = train(
            recipe.hyperparameters["lr"],
            AdaScaleConfig(grad_clip=math.inf),
            recipe,
            None,
            name,
        )
        scores.append(accuracy(model, test))
        if int(os.environ.get("RANK", "0")) == 0:
            print(
                f"{args.what}, seed {seed}: accuracy {scores[-1]:.3f} in "
                f"{optimizer.steps} optimizer steps for "
                f"{optimizer.effective_steps:.0f} effective ones; so far "
                f"{sum(scores) / len(scores):.3f} on average",
                flush=True,
            )


def choose(
    train: Train, loss_fn: Any, lrs: list[float], search: TensorDataset, folder: str
) -> Recipe:
    """Run the base run with each learning rate; return the recipe of the best."""
    recipes = []
    for lr in lrs:
        seed_everything(0)
        config = AdaScaleConfig(
            base_batch_size=BASE_BATCH, total_steps=TOTAL_STEPS, scheduler_unit="step"
        )
        recorder = RecipeRecorder(loss_fn)
        model, _ = train(lr, config, None, recorder, f"{folder}/search-{lr:g}")
        score = accuracy(model, search)
        print(
            f"learning rate {lr:g}: accuracy {score:.3f} on the validation images",
            flush=True,
        )
        recipes.append(
            recorder.recipe(
                {"lr": lr}, metric="accuracy", mode="max", score=score, workload=build
            )
        )
    return max(recipes, key=lambda recipe: recipe.score)
