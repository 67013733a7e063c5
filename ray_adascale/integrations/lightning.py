"""Lightning: a callback that wraps a ``Trainer``'s optimizer in AdaScale, and ends
training at τ ≥ T.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        BackboneFinetuning,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ModuleNotFoundError:  # the older name of the package
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import (
        BackboneFinetuning,
        StochasticWeightAveraging,
    )
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from .._warn import warn_at_user
from ..chain import SEVERAL_OPTIMIZERS
from ..config import AdaScaleConfig
from ..optim.adascale import AdaScaleOptimizer
from ..optim.tau_schedule import TauSchedule
from ..recipe import Recipe
from ..run.base.attach import attach
from .client import (
    Epoch,
    RecipeRecorder,
    StepLog,
    early_step_end,
    epoch_of,
    follow_batch,
    parts_of,
    require_samples,
    with_clients_batch,
)

_IN_PLACE: dict[type[Callback], str] = {
    StochasticWeightAveraging: "average the weights with Lightning's WeightAveraging",
    BackboneFinetuning: (
        "give the backbone a parameter group of its own, with a scheduler whose factor "
        "for it is 0 at first"
    ),
}
_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class AdaScaleCallback(Callback):
    """A callback for the ``Trainer``. The module stays that of the base batch.

    When training begins, the callback wraps the one optimizer that
    ``configure_optimizers`` returns in AdaScale, and replaces its scheduler by a
    :class:`ray_adascale.TauSchedule`. The scheduler's unit is the ``"interval"`` that
    ``configure_optimizers`` returns with it. S and n follow from the dataloader's batch
    size, the number of processes and ``accumulate_grad_batches``, and change with them
    between epochs (``GradientAccumulationScheduler``,
    ``reload_dataloaders_every_n_epochs``). The last step of an epoch counts for the
    passes that it has. Gain, scale and τ are logged. ``trainer.should_stop`` is set at
    τ ≥ T, so leave ``max_epochs`` large enough (-1). Lightning's checkpoints have the
    statistics and τ in the optimizer's state. A callback is for one run: a second
    ``fit()`` resumes from a checkpoint (``ckpt_path``), or raises an error.

    Strategies: one device, ``"ddp"`` and Ray's ``RayDDPStrategy``; others raise an
    error. With manual optimization the module sets the number of passes: with
    ``accumulation`` in the settings, and :meth:`~ray_adascale.AdaScaleOptimizer.expect_passes`.

    Args:
        config: See :func:`ray_adascale.attach`. Settings of the trainer, the dataloader
            and ``configure_optimizers`` may be left out.
        recipe: The result of a search, or of a base run that was recorded through this
            callback.
        trace: Folder of the run, in which rank 0 writes the trace for
            ``ray-adascale report``.
        recorder: Records the recipe of this run, which must be a base run.
        log: Log gain, scale, τ, noise scale and efficiency after each optimizer step.

    Attributes:
        schedule: The schedule; None before training begins.
    """

    def __init__(
        self,
        config: AdaScaleConfig,
        recipe: Recipe | None = None,
        *,
        trace: str | Path | None = None,
        recorder: RecipeRecorder | None = None,
        log: bool = True,
    ) -> None:
        self.schedule: TauSchedule | None = None
        self._config = config
        self._recipe = recipe
        self._trace = trace
        self._recorder = recorder
        self._log = log
        self._steps: StepLog | None = None
        self._batch_idx = 0
        self._warned_within_step = False
        self._losses: list[Tensor] = []  # of the present step

    # ---- set-up ----------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach AdaScale. The model is on its device and wrapped, and no state is
        restored yet.

        Raises:
            ValueError: A setting of the trainer or the module can't work, or this
                callback has trained before.
        """
        _check(trainer)
        if (
            self.schedule is not None
            and self.schedule.effective_steps > 0
            and trainer.ckpt_path is None
        ):
            raise ValueError(
                "This AdaScaleCallback has trained before, to effective step "
                f"{self.schedule.effective_steps:.0f} of "
                f"{self.schedule.base_schedule.total_steps}. A second fit() would "
                "begin the schedule anew, on trained weights. To resume, call fit(..., "
                "ckpt_path=...). To train anew, build a new module, a new callback and "
                "a new Trainer."
            )
        trainer.fit_loop.setup_data()
        loader: Any = trainer.train_dataloader
        batch = _batch_size_of(loader)
        passes = trainer.accumulate_grad_batches
        if not pl_module.automatic_optimization:
            passes = self._config.accumulation
        config = with_clients_batch(
            self._config,
            accumulation=(passes, "Trainer(accumulate_grad_batches=...)"),
            per_worker_batch_size=(batch, "the dataloader's batch_size"),
            epoch=_epoch_of(trainer, batch or self._config.per_worker_batch_size),
            recipe=self._recipe,
        )
        precision = _PRECISIONS.get(str(trainer.precision))
        of_norm = trainer.gradient_clip_algorithm in (None, "norm")
        config = replace(
            config,
            precision=precision or config.precision,  # type: ignore[arg-type]
            grad_clip=config.grad_clip
            or (trainer.gradient_clip_val if of_norm else None)
            or None,
        )
        (optimizer,) = trainer.optimizers
        configs = trainer.lr_scheduler_configs
        if configs and pl_module.automatic_optimization:
            config = replace(
                config, scheduler_unit=_unit_of(configs[0], config, self._recipe)
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        adascale, schedule = attach(
            pl_module,
            optimizer,
            configs[0].scheduler if configs else None,
            config,
            self._recipe,
            grad_scaler=scaler,
        )
        _check_minimum(trainer, schedule)
        self._losses.clear()
        adascale.step_end = early_step_end(
            adascale, lambda: self._ends_step(trainer, pl_module)
        )
        adascale.saves_within_step = pl_module.automatic_optimization
        trainer.optimizers = [adascale]
        if configs:
            configs[0].scheduler = schedule
        self.schedule, self._steps = schedule, StepLog(schedule, self._trace)
        if self._recorder is not None:
            if trainer.ckpt_path is None:
                self._recorder.reset()
            self._recorder.begin(schedule, config.with_recipe(self._recipe))

    @property
    def _adascale(self) -> AdaScaleOptimizer:
        return parts_of(self.schedule)[0]

    def _follow_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update passes and batch size: a GradientAccumulationScheduler or a
        reloaded dataloader may have changed them.
        """
        if self.schedule is None or not self._adascale.at_boundary:
            return
        plan = parts_of(self.schedule)[1]
        passes = (
            trainer.accumulate_grad_batches
            if pl_module.automatic_optimization
            else plan.passes
        )
        batch = (
            _batch_size_of(trainer.train_dataloader)
            or plan.global_batch_size // plan.num_samples
        )
        if (
            follow_batch(self.schedule, passes=passes, per_worker_batch_size=batch)
            and self._recorder is not None
        ):
            self._recorder.check_base_run(self.schedule)

    # ---- a step ----------------------------------------------------------------------

    def _ends_step(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Return whether Lightning steps after this batch, even if passes of the step
        are missing.

        They are missing at the end of an epoch, and after a resume from a checkpoint
        that was saved between the passes of a step.
        """
        last = (
            trainer.is_last_batch or self._batch_idx + 1 >= trainer.num_training_batches
        )
        due = (self._batch_idx + 1) % trainer.accumulate_grad_batches == 0
        return pl_module.automatic_optimization and (last or due)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop training if the loaded checkpoint is at the end of its run."""
        assert self.schedule is not None
        if self.schedule.finished:
            trainer.should_stop = True
            if trainer.is_global_zero:
                warn_at_user(
                    "The checkpoint is at effective step "
                    f"{self.schedule.effective_steps:.0f} of "
                    f"{self.schedule.base_schedule.total_steps}, the schedule's end: "
                    "nothing is trained."
                )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_idx = batch_idx
        self._follow_batch(trainer, pl_module)
        assert self.schedule is not None
        passes = "Trainer(accumulate_grad_batches=2)"
        if not pl_module.automatic_optimization:
            passes = "AdaScaleConfig(accumulation=2), each loss divided by 2,"
        require_samples(
            self.schedule, f"{passes} and a dataloader with batch_size={{half}}"
        )
        if self._recorder is not None:
            self._recorder.before_step(pl_module, batch)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self.schedule is not None
        assert self._steps is not None
        if self._trace is not None and isinstance(outputs, dict) and "loss" in outputs:
            # Lightning has divided the loss by the declared number of passes.
            divisor = (
                trainer.accumulate_grad_batches
                if pl_module.automatic_optimization
                else 1
            )
            self._losses.append(outputs["loss"].detach() * divisor)
        if not self._adascale.at_boundary:
            return
        losses = self._losses
        self._losses = []
        if losses:
            self._steps.record(loss=float(torch.stack(losses).mean()))
        if self._log:
            pl_module.log_dict(self._steps.metrics(), on_step=True, on_epoch=False)
        if self.schedule.finished:
            trainer.should_stop = True

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Warn once of a checkpoint between the passes of a step, as one after a
        validation every few batches may be.
        """
        if (
            self.schedule is None
            or self._adascale.at_boundary
            or self._warned_within_step
        ):
            return
        self._warned_within_step = True
        if trainer.is_global_zero:
            warn_at_user(
                f"A checkpoint was saved after batch {self._batch_idx + 1} of an "
                f"epoch, between the {trainer.accumulate_grad_batches} passes of an "
                "optimizer step. It has the state of the step before. A resume from it "
                "drops the passes after that step, as Lightning does, and its first "
                "step has those that are left. To avoid this, make val_check_interval "
                "a multiple of accumulate_grad_batches."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps is not None:
            self._steps.close()
        schedule = self.schedule
        if schedule is None or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        tau = schedule.effective_steps
        total = schedule.base_schedule.total_steps
        ended = (
            f"Training ended at effective step {tau:.0f} of {total}, before the "
            "schedule's end"
        )
        limited = trainer.max_epochs != -1 or trainer.max_steps != -1
        if not schedule.finished and limited:
            warn_at_user(
                f"{ended}: max_epochs={trainer.max_epochs}, "
                f"max_steps={trainer.max_steps}, or training was stopped. Leave "
                "max_steps out and set max_epochs=-1: this callback stops at T."
            )
        elif not schedule.finished:
            warn_at_user(
                f"{ended}: a callback (EarlyStopping), max_time or the user stopped "
                "it. The learning rate has not reached the end of its curve. To train "
                "to T, leave out what stops it; this callback stops at T."
            )


def _batch_size_of(loader: Any) -> int | None:
    """Return the examples of a pass on one worker; None if the loader has no batch
    size.
    """
    return getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )


def _epoch_of(trainer: Trainer, batch: int | None) -> Epoch:
    """Return what the trainer reads in an epoch: less than its loader has with
    ``limit_train_batches``.

    Args:
        trainer: The trainer, with its data.
        batch: Examples of a pass on one worker, None if unknown.
    """
    loader: Any = trainer.train_dataloader
    epoch = epoch_of(loader, workers=trainer.world_size)
    batches = trainer.num_training_batches
    if not isinstance(loader, DataLoader) or batch is None or trainer.fast_dev_run:
        return epoch
    try:
        all_batches: float = len(loader)
    except TypeError:  # a stream
        all_batches = math.inf
    if batches >= all_batches:
        return epoch
    return replace(epoch, examples=int(batches) * batch * trainer.world_size)


def _unit_of(scheduler: Any, config: AdaScaleConfig, recipe: Recipe | None) -> Any:
    """Return the unit of a scheduler, "step" or "epoch": the ``interval`` that
    ``configure_optimizers`` returned.

    Args:
        scheduler: Lightning's configuration of the scheduler.
        config: The user's settings.
        recipe: The user's recipe.

    Raises:
        ValueError: The settings or the recipe have another unit, or ``frequency`` is
            not 1.
    """
    unit = scheduler.interval
    units = {"AdaScaleConfig(scheduler_unit=...)": config.scheduler_unit}
    if recipe is not None and recipe.scheduler_unit is not None:
        units["the recipe's scheduler_unit"] = recipe.scheduler_unit
    for where, other in units.items():
        if other is not None and other != unit:
            raise ValueError(
                f"The scheduler of configure_optimizers has interval={unit!r}, and "
                f"{where} is {other!r}. Lightning's default is "
                f'"epoch". Return {{"optimizer": ..., "lr_scheduler": {{"scheduler": '
                f'..., "interval": "{other}"}}}} if it is '
                "stepped once "
                f"{'an optimizer step' if other == 'step' else 'an epoch'} in the base "
                "run; else leave "
                "scheduler_unit out."
            )
    if scheduler.frequency != 1:
        raise ValueError(
            "The scheduler of configure_optimizers has "
            f"frequency={scheduler.frequency}, which Lightning counts in batches or "
            "epochs of this run; the schedule counts those of the base run. Leave "
            "frequency out and put it into the scheduler: LambdaLR(optimizer, lambda "
            f"i: factor(i // {scheduler.frequency})), or "
            f"StepLR(step_size={scheduler.frequency})."
        )
    return unit


def _check_minimum(trainer: Trainer, schedule: TauSchedule) -> None:
    """Refuse a minimum length of training that may exceed T, because Lightning does
    not stop before it.
    """
    assert schedule.plan is not None
    total = schedule.base_schedule.total_steps
    # optimizer steps, with a gain of S in each
    fewest = math.ceil(total / schedule.plan.scale)
    minima = {"min_steps": trainer.min_steps or 0.0, "min_epochs": 0.0}
    if trainer.min_epochs and math.isfinite(trainer.num_training_batches):
        minima["min_epochs"] = (
            trainer.min_epochs * trainer.num_training_batches / schedule.plan.passes
        )
    for name, steps in minima.items():
        if steps > fewest:
            raise ValueError(
                f"Trainer({name}={getattr(trainer, name)}) makes Lightning train for "
                f"at least {steps:g} optimizer steps. The schedule may end after "
                f"{fewest}, at {total} effective steps and scale "
                f"{schedule.plan.scale:g}. Leave {name} out: training ends at T."
            )


def _check(trainer: Trainer) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise ValueError(
            f"Lightning's {type(strategy).__name__} is not supported: each worker must "
            "have the whole model. Use strategy='ddp' (RayDDPStrategy on Ray). For a "
            "model that is sharded with fully_shard use ray_adascale.Run and "
            "AdaScaleConfig(sharding='fsdp2')."
        )
    for callback in trainer.callbacks:
        for kind, instead in _IN_PLACE.items():
            if isinstance(callback, kind):
                raise ValueError(
                    f"Lightning's {kind.__name__} sets learning rates of its own, "
                    "which would not follow τ. Take it out of Trainer(callbacks=...), "
                    f"and {instead}."
                )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"configure_optimizers returned {len(trainer.optimizers)} optimizers. Must "
            f"be one. {SEVERAL_OPTIMIZERS}"
        )
    if len(trainer.lr_scheduler_configs) > 1:
        raise ValueError(
            f"configure_optimizers returned {len(trainer.lr_scheduler_configs)} "
            "schedulers. Combine them into one, with SequentialLR or ChainedScheduler."
        )
