"""Digits in a loop with an ``Accelerator``. Commands: ``digits_data.py``."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from digits_data import batch_size, build, loss_of, main, splits
from torch import nn
from torch.utils.data import DataLoader

from ray_adascale import AdaScaleConfig, AdaScaleOptimizer, Recipe
from ray_adascale.integrations.accelerate import prepare
from ray_adascale.integrations.client import RecipeRecorder, StepLog


def train(
    lr: float,
    config: AdaScaleConfig,
    recipe: Recipe | None,
    recorder: RecipeRecorder | None,
    folder: str,
) -> tuple[nn.Module, AdaScaleOptimizer]:
    """Train with an ``Accelerator``."""
    accelerator = Accelerator(cpu=True)
    bare, sgd, cosine = build(lr)
    data = DataLoader(
        splits()[0], batch_size=batch_size(), shuffle=True, drop_last=True
    )
    model, optimizer, loader, schedule = prepare(
        accelerator, bare, sgd, data, cosine, config, recipe
    )
    steps = StepLog(schedule, folder)
    if recorder is not None:
        recorder.begin(schedule, config)
    while not schedule.finished:
        for batch in loader:
            if recorder is not None:
                recorder.before_step(bare, batch)
            with accelerator.accumulate(model):
                loss: Any = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            steps.record(loss=loss.item())
            if schedule.finished:
                break
    steps.close()
    accelerator.free_memory()
    assert isinstance(schedule.optimizer, AdaScaleOptimizer)
    return bare, schedule.optimizer


if __name__ == "__main__":
    main(train)
