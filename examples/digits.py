"""Handwritten digits: a schedule found at batch 8, carried to two workers with batch 64.

``workload`` and ``param_space`` are what the command line and the API are given::

    ray-adascale tune  examples/digits.py:workload --base-batch-size 8 --total-steps 1800 --num-samples 8 -o recipe.json
    ray-adascale train examples/digits.py:workload --recipe recipe.json --num-workers 2 --per-worker-batch-size 32

``python examples/digits.py recipe.json`` compares the transferred run with the base run and with two other ways to use
the same two workers, over three seeds that the search never saw, on a test split that it never saw. ``make demo`` runs
all three.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray_adascale import (
    AdaScaleConfig,
    AdaScaleTrainer,
    LinearRule,
    Recipe,
    UnscaledRule,
    Workload,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

param_space: dict[str, Any] = {}  # filled below, so that the file can be read without Ray


def splits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """1,797 images of 8×8 pixels: 1,200 to train on, 250 for the search to compare trials, 347 for the final table."""
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, search, test = order[:1200], order[1200:1450], order[1450:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[search], y[search]), TensorDataset(x[test], y[test])


def workload(config: dict[str, Any]) -> Workload:
    """A small convolutional net with momentum SGD and a cosine schedule. ``split`` is "search" or "test"."""
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
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1800)
    train, search, test = splits()
    x, y = (test if config.get("split") == "test" else search).tensors

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {"accuracy": (model(x.to(device)).argmax(1) == y.to(device)).float().mean().item()}

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
