"""A workload of seconds, its recipe: for tests of Ray Train and of the command line.

The command line loads this file by its path, outside its package, so it imports nothing relative to it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import Recipe, Workload


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + 0.5 * torch.randn(60, generator=generator) > 0).long())


def workload(config: dict[str, Any]) -> Workload:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    steps = [0]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        steps[0] += 1
        if steps[0] == config.get("fail_at") and not Path(config["flag"]).exists():
            Path(config["flag"]).touch()
            if config.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the cat sat on the switch")
        if config.get("pause_s"):
            time.sleep(config["pause_s"])
        return F.cross_entropy(model(batch[0]), batch[1]) * config.get("factor", 1.0)

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
        scheduler_unit=config.get("unit", "step"),
        train_dataset=data(),
        loss_fn=loss_fn,
        evaluate=lambda model: {"spread": float(model[0].weight.std())},
        metric="spread",
    )


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[key].reshape(-1) for key in sorted(state)])


def spread_recipe(**changes: Any) -> Recipe:
    curve = [0.1 * 0.98**t for t in range(60)]
    fields: dict[str, Any] = {
        "hyperparameters": {"lr": 0.1},
        "base_batch_size": 4,
        "total_steps": 60,
        "base_steps_per_epoch": 15.0,
        "scheduler_unit": "step",
        "metric": "spread",
        "mode": "min",
        "score": 0.1,
        "lr_curve": [curve],
        "noise": [],
        "seed": 0,
        "search": {},
        "workload": "tests",
        "versions": {},
        "created": "2026-11-21",
    }
    return Recipe(**(fields | changes))
