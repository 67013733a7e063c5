"""Lightning: a callback that puts AdaScale under a ``Trainer``'s optimizer, and ends training at τ ≥ T."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ModuleNotFoundError:  # the same, under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from .._warn import warn_at_user
from ..config import AdaScaleConfig
from ..optim.adascale import AdaScale
from ..recipe import Recipe
from ..run.attach import attach
from ..run.tau_schedule import TauSchedule
from .client import RecipeRecorder, StepWatch, with_clients_batch

__all__ = ["AdaScaleCallback"]

_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class AdaScaleCallback(Callback):
    """Give it to the ``Trainer``; the module stays as it is at the base batch.

    When training begins it puts AdaScale over the one optimizer that ``configure_optimizers`` returns, and a
    :class:`ray_adascale.TauSchedule` in the place of its scheduler. S and n follow from the dataloader's batch size, the
    number of processes and ``accumulate_grad_batches``, also where that changes between epochs
    (``GradientAccumulationScheduler``); the last step of an epoch counts for the passes that it has. Gain, scale and τ are
    logged; ``trainer.should_stop`` is set at τ ≥ T, so leave ``max_epochs`` large enough (-1). Lightning's checkpoints hold
    the statistics and τ with the optimizer's state.

    Strategies: one device, ``"ddp"`` and Ray's ``RayDDPStrategy``; others are refused. With manual optimization the module says
    how many passes a step has: ``accumulation`` in the settings, and :meth:`~ray_adascale.AdaScale.expect_passes`.

    Args:
        config: See :func:`ray_adascale.attach`. What the trainer and the dataloader know may be left out.
        recipe: The outcome of a search, or of a base run that was recorded through this callback.
        trace: A file for the trace that ``ray-adascale report`` reads, written by rank 0.
        recorder: Records the recipe of this run, which is then a base run.
        log: Log gain, scale, τ, noise scale and efficiency after each optimizer step.

    Attributes:
        schedule: The schedule, once training has begun.
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
        self._config, self._recipe, self._trace, self._recorder, self._log = config, recipe, trace, recorder, log
        self._watch: StepWatch | None = None
        self._batch_idx = 0

    # ---- set-up --------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is on its device and wrapped, and no state is restored yet."""
        _check(trainer)
        trainer.fit_loop.setup_data()
        loader: Any = trainer.train_dataloader
        batch = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        passes = trainer.accumulate_grad_batches
        if not pl_module.automatic_optimization:
            passes = self._config.accumulation
        config = with_clients_batch(
            self._config,
            accumulation=(passes, "Trainer(accumulate_grad_batches=...)"),
            per_worker_batch_size=(batch, "the dataloader's batch_size"),
            dataset=getattr(loader, "dataset", None),
        )
        precision = _PRECISIONS.get(str(trainer.precision))
        config = replace(
            config,
            precision=precision or config.precision,  # type: ignore[arg-type]
            grad_clip=config.grad_clip or trainer.gradient_clip_val or None,
        )
        (optimizer,) = trainer.optimizers
        configs = trainer.lr_scheduler_configs
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        adascale, schedule = attach(
            pl_module, optimizer, configs[0].scheduler if configs else None, config, self._recipe, grad_scaler=scaler
        )
        adascale.ends_early = lambda: self._ends_epoch(trainer, pl_module)
        trainer.optimizers = [adascale]
        if configs:
            configs[0].scheduler = schedule
        self.schedule, self._watch = schedule, StepWatch(schedule, self._trace)
        if self._recorder is not None:
            self._recorder.begin(schedule, config.with_recipe(self._recipe))

    @property
    def _adascale(self) -> AdaScale:
        assert self.schedule is not None
        assert isinstance(self.schedule.optimizer, AdaScale)
        return self.schedule.optimizer

    def _follow_accumulation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A ``GradientAccumulationScheduler`` may have spoken."""
        adascale, passes = self._adascale, trainer.accumulate_grad_batches
        assert self.schedule is not None
        plan = self.schedule.plan
        assert plan is not None
        if not pl_module.automatic_optimization or passes == plan.accumulation or not adascale.at_boundary:
            return
        batch = plan.global_batch_size // plan.accumulation * passes
        self.schedule.plan = plan = replace(plan, accumulation=passes, global_batch_size=batch)
        adascale.set_num_gradients_to_accumulate(passes)
        adascale.set_scale(plan.scale)
        if self._watch is not None:
            self._watch.plan = plan

    # ---- a step --------------------------------------------------------------------------------------------------

    def _ends_epoch(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether Lightning steps after this batch though its passes are not complete."""
        last = trainer.is_last_batch or self._batch_idx + 1 >= trainer.num_training_batches
        return pl_module.automatic_optimization and last

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_idx = batch_idx
        self._follow_accumulation(trainer, pl_module)
        if self._recorder is not None:
            self._recorder.before_step(pl_module, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.schedule is not None
        assert self._watch is not None
        if not self._adascale.at_boundary:
            return
        if self._trace is not None:
            loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else None
            if loss is not None:
                self._watch.note(loss=float(loss))
        if self._log:
            pl_module.log_dict(self._watch.metrics(), on_step=True, on_epoch=False)
        if self.schedule.finished:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None:
            self._watch.close()
        schedule = self.schedule
        if schedule is not None and not schedule.finished and trainer.is_global_zero:
            warn_at_user(
                f"Training ended at effective step {schedule.effective_steps:.0f} of "
                f"{schedule.base_schedule.total_steps}, before the schedule's end: max_epochs={trainer.max_epochs}, "
                f"max_steps={trainer.max_steps}, or somebody stopped it. Give max_epochs=-1: this callback stops at T."
            )


def _check(trainer: Trainer) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise ValueError(
            f"Lightning's {type(strategy).__name__} is not supported: each worker must hold the whole model. Use "
            "strategy='ddp' (RayDDPStrategy on Ray); a model that is sharded with fully_shard trains with ray_adascale.Run and "
            "AdaScaleConfig(sharding='fsdp2')."
        )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"configure_optimizers returned {len(trainer.optimizers)} optimizers. Only one is supported: there is one gain and "
            "one clock. Make one optimizer with several parameter groups."
        )
    if len(trainer.lr_scheduler_configs) > 1:
        raise ValueError(
            f"configure_optimizers returned {len(trainer.lr_scheduler_configs)} schedulers. Make one of them: SequentialLR or "
            "ChainedScheduler."
        )
