"""Digits in a loop like torchvision's ``references/classification``: warm-up and
schedule are stepped once an epoch.

There is no adapter, and torchvision is not imported: its reference scripts are files to
copy, and this file has their loop. Commands: ``digits_data.py``. The base run's
schedule counts epochs of 150 steps, and T is twelve of them.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from digits_data import (
    BASE_BATCH,
    TOTAL_STEPS,
    batch_size,
    build,
    loss_of,
    main,
    splits,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler

from ray_adascale import AdaScaleConfig, AdaScaleOptimizer, Recipe, TauSchedule, attach
from ray_adascale.integrations.client import (
    RecipeRecorder,
    StepLog,
    epoch_of,
    with_clients_batch,
)

WARMUP_EPOCHS = 1


def train_one_epoch(
    model: nn.Module,
    optimizer: AdaScaleOptimizer,
    loader: DataLoader[Any],
    schedule: TauSchedule,
    steps: StepLog,
    recorder: RecipeRecorder | None,
) -> None:
    """Train one epoch, or to the end of the schedule."""
    model.train()
    for batch in loader:
        if recorder is not None:
            recorder.before_step(model, batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        steps.record(loss=loss.item())
        if schedule.finished:  # AdaScale needs this line
            break


def train(
    lr: float,
    config: AdaScaleConfig,
    recipe: Recipe | None,
    recorder: RecipeRecorder | None,
    folder: str,
) -> tuple[nn.Module, AdaScaleOptimizer]:
    """Train, as one of the workers that torchrun started."""
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    dataset = splits()[0]
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=workers, rank=dist.get_rank() if workers > 1 else 0
    )
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=batch_size(), sampler=sampler, drop_last=True
    )
    bare, sgd, _ = build(lr)
    epochs = TOTAL_STEPS * BASE_BATCH // len(dataset)
    main_scheduler = CosineAnnealingLR(sgd, T_max=epochs - WARMUP_EPOCHS)
    warmup = LinearLR(sgd, start_factor=0.1, total_iters=WARMUP_EPOCHS)
    lr_scheduler = SequentialLR(
        sgd, [warmup, main_scheduler], milestones=[WARMUP_EPOCHS]
    )
    model = DistributedDataParallel(bare) if workers > 1 else bare

    if recipe is None:
        config = AdaScaleConfig(
            base_batch_size=BASE_BATCH, total_epochs=epochs, scheduler_unit="epoch"
        )
    config = with_clients_batch(
        config,
        accumulation=(1, ""),
        per_worker_batch_size=(batch_size(), ""),
        epoch=epoch_of(loader),
        recipe=recipe,
    )
    optimizer, schedule = attach(model, sgd, lr_scheduler, config, recipe)
    steps = StepLog(schedule, folder)
    if recorder is not None:
        recorder.begin(schedule, config)
    epoch = 0
    while not schedule.finished:
        sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, loader, schedule, steps, recorder)
        schedule.step()  # unchanged; the schedule itself follows τ
        epoch += 1
    steps.close()
    return bare, optimizer


if __name__ == "__main__":
    main(train)
