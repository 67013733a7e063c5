"""Recipes by hand, and a small workload whose base run makes one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import Recipe, Workload
from ray_adascale.recipe import NoiseProbe


def recipe(noise: list[tuple[float, float, float]], total_steps: int = 100, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "hyperparameters": {},
        "base_batch_size": 8,
        "total_steps": total_steps,
        "base_steps_per_epoch": None,
        "scheduler_unit": None,
        "metric": "loss",
        "mode": "min",
        "score": 0.5,
        "lr_curve": [[0.1]],
        "noise": probes(noise),
        "seed": 0,
        "search": {},
        "workload": "",
        "versions": {},
        "created": "2026-11-21",
    }
    return Recipe(**fields | changes)


def probes(noise: list[tuple[float, float, float]]) -> list[NoiseProbe]:
    return [NoiseProbe(effective_steps=tau, sigma2=sigma2, mu2=mu2) for tau, sigma2, mu2 in noise]


def regression(config: dict[str, Any]) -> Workload:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 10, generator=generator)
    y = x @ torch.linspace(-1, 1, 10).unsqueeze(1) + 2 * torch.randn(512, 1, generator=generator)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"error": (model(x) - y).square().mean().item()}

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400),
        scheduler_unit="step",
        train_dataset=TensorDataset(x, y),
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="error",
    )
