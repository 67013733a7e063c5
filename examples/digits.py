"""A workload: handwritten digits, a small convolutional network, momentum SGD and a
cosine schedule.

    ray-adascale tune  examples/digits.py:workload --base-batch-size 8 \
        --total-steps 1800 --num-samples 8 -o recipe.json
    ray-adascale train examples/digits.py:workload --recipe recipe.json \
        --num-workers 2 --per-worker-batch-size 32

``split=test`` after the workload's name scores on the test split, which the search does
not use.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from ray import tune
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import Workload

param_space = {"lr": tune.loguniform(0.005, 0.2), "momentum": tune.choice([0.8, 0.9])}


def splits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Split 1,797 images of 8×8 pixels: 1,200 for training, 250 for the search, 347
    for the test.
    """
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, search, test = order[:1200], order[1200:1450], order[1450:]
    return (
        TensorDataset(x[train], y[train]),
        TensorDataset(x[search], y[search]),
        TensorDataset(x[test], y[test]),
    )


def workload(config: dict[str, Any]) -> Workload:
    """Return a small convolutional network with momentum SGD and a cosine schedule
    over the base run's steps.
    """
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
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=config["momentum"]
    )
    # The library adds T to the config, from --total-steps or the recipe.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=config.get("total_steps", 1800)
    )
    train, search, test = splits()
    # The search scores on another split than the test.
    x, y = (test if config.get("split") == "test" else search).tensors

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {
            "accuracy": (model(x.to(device)).argmax(1) == y.to(device))
            .float()
            .mean()
            .item()
        }

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="accuracy",
        mode="max",
    )
