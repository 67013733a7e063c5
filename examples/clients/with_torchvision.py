"""Digits in a loop in the way of torchvision's ``references/classification``: warm-up and schedule are stepped once an epoch.

No adapter and no torchvision either: its reference scripts are files to copy, of which this is the loop. How to call it:
``digits_data.py``. The base run's schedule counts epochs of 150 steps, so that T is twelve of them.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from digits_data import BASE_BATCH, TOTAL_STEPS, batch_size, build, loss_of, main, splits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler

from ray_adascale import AdaScale, AdaScaleConfig, Recipe, TauSchedule, attach
from ray_adascale.integrations.client import RecipeRecorder, StepLog, with_clients_batch

WARMUP_EPOCHS = 1


def train_one_epoch(
    model: nn.Module,
    optimizer: AdaScale,
    loader: DataLoader[Any],
    schedule: TauSchedule,
    steps: StepLog,
    recorder: RecipeRecorder | None,
) -> None:
    model.train()
    for batch in loader:
        if recorder is not None:
            recorder.before_step(model, batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        steps.record(loss=loss.item())
        if schedule.finished:  # this line is ours
            break


def train(
    lr: float, config: AdaScaleConfig, recipe: Recipe | None, recorder: RecipeRecorder | None, folder: str
) -> tuple[nn.Module, AdaScale]:
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    dataset = splits()[0]
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=workers, rank=dist.get_rank() if workers > 1 else 0
    )
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=batch_size(), sampler=sampler, drop_last=True)
    bare, sgd, _ = build(lr)
    epochs = TOTAL_STEPS * BASE_BATCH // len(dataset)
    main_scheduler = CosineAnnealingLR(sgd, T_max=epochs - WARMUP_EPOCHS)
    warmup = LinearLR(sgd, start_factor=0.1, total_iters=WARMUP_EPOCHS)
    lr_scheduler = SequentialLR(sgd, [warmup, main_scheduler], milestones=[WARMUP_EPOCHS])
    model = DistributedDataParallel(bare) if workers > 1 else bare

    if recipe is None:
        config = AdaScaleConfig(base_batch_size=BASE_BATCH, total_epochs=epochs, scheduler_unit="epoch")
    config = with_clients_batch(config, accumulation=(1, ""), per_worker_batch_size=(batch_size(), ""), dataset=dataset)
    optimizer, schedule = attach(model, sgd, lr_scheduler, config, recipe)
    steps = StepLog(schedule, f"{folder}/trace.jsonl")
    if recorder is not None:
        recorder.begin(schedule, config)
    epoch = 0
    while not schedule.finished:
        sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, loader, schedule, steps, recorder)
        schedule.step()  # as it was; τ has said what there is to say
        epoch += 1
    steps.close()
    return bare, optimizer


if __name__ == "__main__":
    main(train)
