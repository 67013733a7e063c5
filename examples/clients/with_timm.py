"""Digits in a loop like timm's: the schedule receives the number of updates, and an
epoch's last step has fewer passes.

There is no adapter: ``attach`` accepts timm's scheduler, and the loop declares the
number of passes of the last step. Commands: ``digits_data.py``.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from digits_data import (
    PER_WORKER_BATCH,
    TOTAL_STEPS,
    batch_size,
    build,
    loss_of,
    main,
    splits,
)
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ray_adascale import AdaScaleConfig, AdaScaleOptimizer, Recipe, attach
from ray_adascale.integrations.client import (
    RecipeRecorder,
    StepLog,
    epoch_of,
    with_clients_batch,
)


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
    accum_steps = 1 if batch_size() != PER_WORKER_BATCH else 2
    examples = batch_size() // accum_steps
    dataset = splits()[0]
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=workers, rank=dist.get_rank() if workers > 1 else 0
    )
    loader = DataLoader(dataset, batch_size=examples, sampler=sampler, drop_last=True)
    bare, sgd, _ = build(lr)
    cosine = CosineLRScheduler(sgd, t_initial=TOTAL_STEPS, t_in_epochs=False)
    model = DistributedDataParallel(bare) if workers > 1 else bare

    config = with_clients_batch(
        config,
        accumulation=(accum_steps, ""),
        per_worker_batch_size=(examples, ""),
        epoch=epoch_of(loader),
        recipe=recipe,
    )
    optimizer, lr_scheduler = attach(model, sgd, cosine, config, recipe)
    steps = StepLog(lr_scheduler, folder)
    if recorder is not None:
        recorder.begin(lr_scheduler, config)

    epoch = num_updates = 0
    last_accum_steps = len(loader) % accum_steps
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    while not lr_scheduler.finished:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch_idx, batch in enumerate(loader):
            need_update = (
                batch_idx == len(loader) - 1 or (batch_idx + 1) % accum_steps == 0
            )
            passes = (
                last_accum_steps
                if batch_idx >= last_batch_idx_to_accum
                else accum_steps
            )
            if batch_idx == last_batch_idx_to_accum and last_accum_steps:
                optimizer.expect_passes(last_accum_steps)  # AdaScale needs this line
            if recorder is not None:
                recorder.before_step(bare, batch)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = need_update
            loss = loss_of(model, batch)
            (loss / passes).backward()
            if not need_update:
                continue
            optimizer.step()
            optimizer.zero_grad()
            num_updates += 1
            lr_scheduler.step_update(num_updates=num_updates)
            steps.record(loss=loss.item())
            if lr_scheduler.finished:
                break
    steps.close()
    return bare, optimizer


if __name__ == "__main__":
    main(train)
