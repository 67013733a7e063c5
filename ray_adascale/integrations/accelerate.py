"""Hugging Face's Accelerate: ``prepare`` with AdaScale, for a loop that is written around an ``Accelerator``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..config import AdaScaleConfig
from ..recipe import Recipe
from ..run.attach import attach
from ..run.tau_schedule import TauSchedule
from .client import early_step_end, with_clients_batch

__all__ = ["prepare"]

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    dataloader: DataLoader[Any],
    scheduler: Any,
    config: AdaScaleConfig,
    recipe: Recipe | None = None,
) -> tuple[Any, Any, Any, TauSchedule]:
    """``accelerator.prepare(model, optimizer, dataloader, scheduler)`` with AdaScale under the optimizer.

    The loop stays what it was, but for where it ends::

        model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, scheduler, config)
        while not schedule.finished:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(model, batch))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if schedule.finished:
                    break

    The last step of an epoch, which ``accumulate()`` takes with the passes that there are, counts for those alone; its
    gradient, which Accelerate divides by ``gradient_accumulation_steps`` all the same, is made a mean again.
    ``accelerator.save_state`` and ``load_state`` hold the statistics, τ and the schedule with the rest.

    Args:
        accelerator: Its ``gradient_accumulation_steps`` are the passes of a step.
        model: Bare.
        optimizer: Bare, with the LRs of the base batch.
        dataloader: Its ``batch_size`` is that of a pass on one worker (over all of them with ``split_batches``).
        scheduler: On the optimizer, fresh; or None.
        config: See :func:`ray_adascale.attach`. What the accelerator and the dataloader know may be left out: passes, batch
            size, length of the dataset.
        recipe: The outcome of a search.

    Returns:
        Model, optimizer and dataloader as Accelerate prepares them, and the schedule itself.

    Raises:
        ValueError: A setting can't work, or says otherwise than the accelerator.
    """
    if accelerator.distributed_type not in _PLAIN:
        raise ValueError(
            f"Accelerate's {accelerator.distributed_type} is not supported: each worker must hold the whole model. Use "
            "plain data parallelism (accelerate launch --multi_gpu, or --cpu), or ray_adascale.Run with its own sharding."
        )
    batch = getattr(dataloader, "batch_size", None) or getattr(dataloader.batch_sampler, "batch_size", None)
    if batch is not None and accelerator.split_batches:
        batch //= accelerator.num_processes
    config = with_clients_batch(
        config,
        accumulation=(accelerator.gradient_accumulation_steps, "Accelerator(gradient_accumulation_steps=...)"),
        per_worker_batch_size=(batch, "the dataloader's batch_size"),
        dataset=dataloader.dataset,
    )
    if accelerator.mixed_precision in ("bf16", "fp16"):
        config = replace(config, precision=accelerator.mixed_precision)
    adascale, schedule = attach(model, optimizer, scheduler, config, recipe, grad_scaler=accelerator.scaler)
    adascale.step_end = early_step_end(adascale, lambda: accelerator.sync_gradients)
    model, optimizer, dataloader = accelerator.prepare(model, adascale, dataloader)
    accelerator.prepare_scheduler(schedule)  # so that its state is saved and loaded
    return model, optimizer, dataloader, schedule
