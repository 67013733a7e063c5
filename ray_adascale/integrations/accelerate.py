"""Hugging Face's Accelerate: ``prepare`` with AdaScale, for a loop with an
``Accelerator``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..batch import StepPlan
from ..config import AdaScaleConfig
from ..optim.tau_schedule import TauSchedule
from ..recipe import Recipe
from ..run.base.attach import attach
from .client import (
    early_step_end,
    epoch_of,
    follow_batch,
    parts_of,
    require_samples,
    with_clients_batch,
)

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
    """Call ``accelerator.prepare(model, optimizer, dataloader, scheduler)`` with
    AdaScale as the optimizer.

    Only the end of the loop changes::

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

    The last step of an epoch may have fewer passes under ``accumulate()``. It counts
    for these passes alone. Accelerate divides its gradient by
    ``gradient_accumulation_steps`` nevertheless; AdaScale turns it back into a mean,
    unless the loop has set ``schedule.optimizer.sample_weights``: then its losses are
    shares of the whole step's.
    ``accelerator.save_state`` and ``load_state`` include the statistics, τ and the
    schedule. From the second epoch on a resume is exact only with
    ``Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))``
    and with ``loader.set_epoch(epoch)`` before each epoch: otherwise Accelerate
    shuffles the epoch in another order.

    Args:
        accelerator: Its ``gradient_accumulation_steps`` is the number of passes of a
            step. It may change between two steps.
        model: The bare model.
        optimizer: The bare optimizer, with the LRs of the base batch.
        dataloader: Its ``batch_size`` is that of a pass on one worker (with
            ``split_batches``: on all workers).
        scheduler: A fresh scheduler on the optimizer, or None.
        config: See :func:`ray_adascale.attach`. Passes, batch size and length of the
            dataset may be left out: they are those of the accelerator and the
            dataloader.
        recipe: The result of a search.

    Returns:
        Model, optimizer and dataloader as Accelerate prepares them, and the schedule
        itself.

    Raises:
        ValueError: A setting can't work, or contradicts the accelerator.
    """
    if accelerator.distributed_type not in _PLAIN:
        raise ValueError(
            f"Accelerate's {accelerator.distributed_type} is not supported: each "
            "worker must have the whole model. Use plain data parallelism (accelerate "
            "launch --multi_gpu, or --cpu), or ray_adascale.Run with its own sharding."
        )
    for name, given, prepared in (
        ("optimizer", optimizer, AcceleratedOptimizer),
        ("scheduler", scheduler, AcceleratedScheduler),
    ):
        if isinstance(given, prepared):
            raise ValueError(
                f"Invalid {name}: an {prepared.__name__}, which accelerator.prepare() "
                f"returned. Pass the bare {name}: this function wraps it in AdaScale "
                "first, and then calls accelerator.prepare() itself."
            )
    batch = getattr(dataloader, "batch_size", None) or getattr(
        dataloader.batch_sampler, "batch_size", None
    )
    if batch is not None and accelerator.split_batches:
        batch //= accelerator.num_processes
    config = with_clients_batch(
        config,
        accumulation=(
            accelerator.gradient_accumulation_steps,
            "Accelerator(gradient_accumulation_steps=...)",
        ),
        per_worker_batch_size=(batch, "the dataloader's batch_size"),
        # One loader is for all workers: Accelerate gives each its batches.
        epoch=epoch_of(dataloader),
        recipe=recipe,
    )
    if accelerator.mixed_precision in ("bf16", "fp16"):
        config = replace(config, precision=accelerator.mixed_precision)
    adascale, schedule = attach(
        model, optimizer, scheduler, config, recipe, grad_scaler=accelerator.scaler
    )
    require_samples(
        schedule,
        "Accelerator(gradient_accumulation_steps=2) and a dataloader with "
        "batch_size={half}",
    )
    ends_early = early_step_end(adascale, lambda: accelerator.sync_gradients)

    def step_end(number: int) -> StepPlan | None:
        if number == 1:
            _follow_passes(accelerator, schedule)
        return ends_early(number)

    adascale.step_end = step_end
    model, optimizer, dataloader = accelerator.prepare(model, adascale, dataloader)
    adascale.register_step_pre_hook(lambda *_: _refuse_settings_of(optimizer))
    adascale.register_step_pre_hook(lambda *_: _check_passes(accelerator, schedule))
    accelerator.prepare_scheduler(schedule)  # so that its state is saved and loaded
    return model, optimizer, dataloader, schedule


def _follow_passes(accelerator: Accelerator, schedule: TauSchedule) -> None:
    """Update the passes of the steps from this one on, at the beginning of its first
    pass: the loop may have set ``gradient_accumulation_steps``.

    A step of one gradient sample is not watched, so it can't be begun within a pass.
    """
    adascale, plan = parts_of(schedule)
    passes = accelerator.gradient_accumulation_steps
    watched = passes * plan.workers > 1
    if passes != plan.passes and watched and adascale.at_boundary:
        follow_batch(
            schedule,
            passes=passes,
            per_worker_batch_size=plan.global_batch_size // plan.num_samples,
        )


def _check_passes(accelerator: Accelerator, schedule: TauSchedule) -> None:
    """Check that Accelerate has divided the losses of the step by the passes of the
    plan.

    Raises:
        ValueError: ``gradient_accumulation_steps`` was set within the step, or was or
            is 1, so that no beginning of a step was seen.
    """
    _, plan = parts_of(schedule)
    passes = accelerator.gradient_accumulation_steps
    if passes != plan.passes:
        batch = plan.global_batch_size // plan.num_samples
        raise ValueError(
            f"accelerator.gradient_accumulation_steps is now {passes}, and was "
            f"{plan.passes} as this step began. Set it between two steps. If it was or "
            "is 1, write after the line that sets it: "
            "ray_adascale.integrations.client.follow_batch(schedule, "
            f"passes={passes}, per_worker_batch_size={batch})."
        )


def _refuse_settings_of(optimizer: Any) -> None:
    """Raise if AdaScale's settings were set on Accelerate's wrapper, which does not
    pass them on.

    Raises:
        AttributeError: They were.
    """
    for name in ("sample_weights", "effective_steps"):
        if name in vars(optimizer):
            raise AttributeError(
                f"optimizer.{name} was set on Accelerate's {type(optimizer).__name__}, "
                f"which does not pass it on. Set schedule.optimizer.{name}; schedule "
                "is what prepare() returned last."
            )
