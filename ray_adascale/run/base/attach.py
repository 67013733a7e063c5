"""attach: build AdaScale and its schedule for the training loop of another library,
checked against the recipe.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..._errors import SettingError, check_count, clip_multiple
from ..._torch import is_dtensor, uncompiled
from ...config import AdaScaleConfig, read_settings
from ...data.source import base_steps_per_epoch
from ...optim.adascale import AdaScaleOptimizer
from ...optim.scheduler_checks import check_initial_rates
from ...optim.tau_schedule import TauSchedule
from ...recipe import Recipe
from ...sharding.kinds.zero2 import ShardedDataParallel
from ..build import adascale_of, check_built, check_schedule
from ..guards import attached_loop

_log = logging.getLogger(__name__)


@uncompiled
def attach(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    config: AdaScaleConfig,
    recipe: Recipe | None = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    starting_step: int = 0,
) -> tuple[AdaScaleOptimizer, TauSchedule]:
    """Build AdaScale and its schedule for the training loop of another library, with
    the checks of :class:`ray_adascale.Run`.

    Call it in each process, after ``init_process_group``. Then pass the two to the loop
    in place of the optimizer and the scheduler. The loop wraps the model
    (``DistributedDataParallel``), steps and saves. It ends when the schedule is
    :attr:`~TauSchedule.finished`, at τ ≥ T::

        optimizer, schedule = attach(model, optimizer, scheduler, AdaScaleConfig(base_batch_size=32, ...), recipe)
        while not schedule.finished: ...

    The loop has to do the rest of a Run's work: the division of each loss by
    ``accumulation``, the order of examples, unequal micro-batches
    (:attr:`AdaScaleOptimizer.sample_weights`, set before a step's last backward pass),
    steps with fewer passes (:meth:`AdaScaleOptimizer.expect_passes`), and resuming. τ
    is in the state of the returned optimizer, so save and load that one: call attach
    before anything gets the bare optimizer.

    Args:
        model: The model, bare or in DistributedDataParallel.
        optimizer: One bare optimizer, with the LRs of the base batch.
        scheduler: A fresh scheduler of torch or timm on the optimizer, or None.
        config: ``base_batch_size``, ``per_worker_batch_size`` and ``accumulation`` are
            the loop's batch: S and n follow from them and the number of workers.
            ``total_steps``, or ``total_epochs`` with ``dataset_length``, is T.
            ``rule``, ``averaging_window`` and ``scheduler_unit`` have their usual
            meaning. ``precision`` and ``grad_clip`` say what the loop does, and are
            compared with the recipe's: this function neither casts nor clips. Settings
            of a Run alone cause a warning.
        recipe: The result of a search. Base batch, T and LR curve must be the recipe's.
        grad_scaler: The loop's scaler of the loss, for fp16.
        starting_step: τ at which the loop begins, if weights and optimizer were trained
            up to there with a batch of B0.

    Raises:
        ValueError: A setting, the model, the optimizer or the scheduler can't work. The
            message names it and a remedy.
        RuntimeError: There are several processes, and no process group yet.
    """
    config = read_settings(config)
    attached_loop.warn_of_unused(config)
    config = config.with_recipe(recipe)
    workers = _workers()
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    _check_model(bare)
    config = check_built(bare, optimizer, config, recipe)
    if config.sharding not in ("auto", "none"):
        raise SettingError(
            "Invalid {}: the loop that owns the model decides how it is sharded. "
            "Leave it out; sharding by this package needs ray_adascale.Run.",
            sharding=config.sharding,
        )
    if clip_multiple(config.grad_clip) is not None:
        raise SettingError(
            "Invalid {}: here the loop clips, and it does not know the expected "
            "norm. Clip at a number in the loop and give that number, or use "
            "ray_adascale.Run.",
            grad_clip=config.grad_clip,
        )
    if config.global_batch_size is not None or config.elastic:
        raise ValueError(
            "AdaScaleConfig(global_batch_size=..., elastic=...) need ray_adascale.Run, "
            "which makes the batches by them. Give the loop's per_worker_batch_size "
            "and accumulation."
        )
    if config.batch.changes:
        chosen = {
            "target_efficiency": config.target_efficiency,
            "batch_schedule": config.batch_schedule,
        }
        raise SettingError(
            "Invalid {}: it changes the batch as the run goes on, and here the loop "
            "that owns the data loader decides the batch. Leave it out, or use "
            "ray_adascale.Run.",
            **{name: value for name, value in chosen.items() if value is not None},
        )
    check_count("starting_step", starting_step, 0)
    if starting_step and isinstance(scheduler, LRScheduler):
        check_initial_rates(optimizer, scheduler)
    elif not starting_step and any(map(_has_stepped, optimizer.state.values())):
        raise ValueError(
            "The optimizer has state of earlier steps, and τ would begin at 0. Call "
            "attach() before the loop loads a checkpoint, and save and load the "
            "optimizer that it returns, which has τ. In timm's train.py attach above "
            "resume_checkpoint() and CheckpointSaver(). If another program has trained "
            "k base steps: attach(..., starting_step=k)."
        )
    # the loop makes the passes
    plan = replace(config.batch.plan(workers), passes=config.accumulation)
    if plan.passes > 1 and (workers == 1 or dist.get_rank() == 0):
        _log.info(
            "Each step has %d backward passes: the loop or its library must divide "
            "each loss by them.",
            plan.passes,
        )
    per_epoch, total_steps = base_length(config)
    if starting_step >= total_steps:
        raise ValueError(
            f"Invalid {starting_step=}: the run has {total_steps} effective steps."
        )
    adascale = adascale_of(
        optimizer,
        config,
        plan,
        total_steps=total_steps,
        grad_scaler=grad_scaler,
        model=bare,
    )
    if plan.num_samples == 1:
        attached_loop.refuse_uncounted_passes(adascale)
    schedule = TauSchedule(
        adascale,
        scheduler,
        config.scheduler_unit if scheduler is not None else None,
        base_steps_per_epoch=per_epoch,
        total_steps=total_steps,
        base_batch_size=plan.base_batch_size,
    )
    schedule.plan = plan
    attached_loop.warn_of_no_gradient(adascale.wrapped)
    attached_loop.warn_of_other_batch(bare, schedule)
    attached_loop.refuse_changed_model(bare, adascale)
    attached_loop.refuse_plain_state(adascale)
    if config.grad_clip is not None and math.isfinite(float(config.grad_clip)):
        attached_loop.warn_of_unclipped(adascale.wrapped, float(config.grad_clip))
    if starting_step:
        adascale.effective_steps = starting_step
        schedule.step()
    check_schedule(
        scheduler, schedule.base_schedule, config, recipe, plan.global_batch_size
    )
    return adascale, schedule


def base_length(config: AdaScaleConfig) -> tuple[float | None, int]:
    """Return the base run's steps per epoch, None if they are unknown, and T, both
    by the settings alone.
    """
    per_epoch = base_steps_per_epoch(
        config.dataset_length, config.batch.base_batch_size, drop_last=config.drop_last
    )
    return per_epoch, config.resolve_total_steps(per_epoch)


def _has_stepped(state: Any) -> bool:
    """Return whether the state of a parameter is of a step. Some optimizers make one
    when they are built.
    """
    return bool(state) and (
        not isinstance(state, dict) or bool(state.get("step", 1) > 0)
    )


def _workers() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    # Set by torchrun and similar launchers, so it shows that there are workers, which
    # can't reduce gradients yet.
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise RuntimeError(
            f"There are {announced} processes (WORLD_SIZE) and no process group yet, "
            "so S and n would be those of one worker. Call attach() after "
            "init_process_group(): after Accelerator(), in Lightning's on_fit_start, "
            "or use the adapters of ray_adascale.integrations."
        )
    return 1


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DataParallel | ShardedDataParallel):
        raise ValueError(
            f"Invalid model: a {type(model).__name__}. Must be the bare model, or a "
            "torch.nn.parallel.DistributedDataParallel."
        )
    # By name, because importing FSDP takes half a second.
    if any(
        type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()
    ):
        raise ValueError(
            "The model is in FullyShardedDataParallel (FSDP1). AdaScale can't measure "
            "its flat parameters. Use DistributedDataParallel, or ray_adascale.Run "
            "with AdaScaleConfig(sharding='fsdp2')."
        )
    if any(is_dtensor(p) for p in model.parameters()):
        raise ValueError(
            "The model's parameters are DTensors (fully_shard, or tensor parallelism). "
            "attach() is for models that are whole on each worker. With fully_shard "
            "use ray_adascale.Run with AdaScaleConfig(sharding='fsdp2'), or build "
            "AdaScale(optimizer, model=model) and TauSchedule yourself."
        )
