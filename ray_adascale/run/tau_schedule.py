"""TauSchedule: the base run's LR schedule as one of torch's schedulers, for loops that others own."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..batch_policy import BatchPlan
from ..optim.adascale import AdaScale
from .schedule import BaseSchedule, EffectiveSchedule, SchedulerUnit

__all__ = ["TauSchedule"]


class TauSchedule(LRScheduler):
    """Drives any LR scheduler by the effective steps τ of an :class:`ray_adascale.AdaScale`; itself one of torch's, by its face.

    Hand it to the loop that owns the training in the scheduler's place. After each optimizer step the learning rates (and
    momenta) are those of base step ⌊τ⌋, whatever the loop calls: :meth:`step` may come once a step, once an epoch, several
    times (Accelerate), or never. With a fused optimizer on a GPU they follow when the host hears of the step: in :meth:`step`
    of the next one at the latest, and at once where they are asked for (:meth:`get_last_lr`).

    At T and beyond it stays where the base run's last step was.

    Args:
        optimizer: The AdaScale that τ is of.
        scheduler: A fresh scheduler on that optimizer or on the one that it wraps: one of torch's, one of timm's (anything
            with ``step_update(num_updates)`` and ``step(epoch)``), or None for constant learning rates.
        unit: What one ``scheduler.step()`` meant in the base run, "step" or "epoch". Of timm's: "step" for those that count
            updates (``t_in_epochs=False``).
        base_steps_per_epoch: Optimizer steps in an epoch of the base run, ``len(dataset) / B0``; for ``unit="epoch"``.
        total_steps: T. Without it :attr:`finished` is never True, and a scheduler of a length of its own (OneCycleLR) raises
            beyond it.
        base_batch_size: B0, for :attr:`base_schedule`.

    Raises:
        ValueError: The unit is missing, or the scheduler follows a metric, was stepped already, or drives another optimizer.
    """

    def __init__(
        self,
        optimizer: AdaScale,
        scheduler: Any,
        unit: SchedulerUnit | None = None,
        *,
        base_steps_per_epoch: float | None = None,
        total_steps: float | None = None,
        base_batch_size: int | None = None,
    ) -> None:
        if not isinstance(optimizer, AdaScale):
            raise ValueError(
                f"Invalid optimizer of type {type(optimizer).__name__}. Must be the AdaScale whose effective steps are the "
                "clock: AdaScale(optimizer, ...), or what attach() returns. Build it before the loop wraps it in turn."
            )
        # Not LRScheduler's own __init__, which takes a first step and counts the optimizer's calls.
        self.optimizer: Optimizer = optimizer
        self._total_steps = total_steps
        self._base_batch_size = base_batch_size
        self._unit = unit
        self._base_steps_per_epoch = base_steps_per_epoch
        made = None if scheduler is None else _as_torchs(scheduler, unit)
        self.scheduler = scheduler
        """What it drives; never step that yourself."""
        self._schedule = EffectiveSchedule(
            optimizer, made, unit=unit, base_steps_per_epoch=base_steps_per_epoch, total_steps=total_steps
        )
        self.base_lrs = list(self._schedule.lrs)
        self.plan: BatchPlan | None = None
        """How a step's batch is made up, where :func:`ray_adascale.attach` was told."""
        self._step_count = 0
        self._advance()
        ref = weakref.ref(self)

        def before(*_: Any) -> None:
            if (schedule := ref()) is not None:
                schedule._advance()

        def after(*_: Any) -> None:
            if (schedule := ref()) is not None and schedule._adascale.last_step_known:
                schedule._advance()

        # The step before tells what LR this one has; where the host knows it already, so do those who ask between them.
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    @property
    def _adascale(self) -> AdaScale:
        assert isinstance(self.optimizer, AdaScale)
        return self.optimizer

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Calls of ``scheduler.step()`` that the base run has made by now: steps, or epochs."""
        return self._schedule.calls

    @property
    def effective_steps(self) -> float:
        """τ."""
        return self._adascale.effective_steps

    @property
    def finished(self) -> bool:
        """Whether τ has reached T, so that the run is at its end. It waits for the device only near T."""
        total = self._total_steps
        if total is None:
            return False
        adascale = self._adascale
        furthest = adascale.known_effective_steps
        if not adascale.last_step_known:
            furthest += max(adascale.scale, 1.0)
        return furthest >= total and adascale.effective_steps >= total

    @property
    def base_schedule(self) -> BaseSchedule:
        """The schedule of the base run, as a recipe has it; needs T and B0.

        Raises:
            ValueError: ``total_steps`` or ``base_batch_size`` was not given.
        """
        if self._total_steps is None or self._base_batch_size is None:
            raise ValueError(
                "The base run's schedule is known with TauSchedule(..., total_steps=T, base_batch_size=B0) only."
            )
        return BaseSchedule(
            base_batch_size=self._base_batch_size,
            total_steps=int(self._total_steps),
            scheduler_unit=self._unit if self.scheduler is not None else None,
            base_steps_per_epoch=self._base_steps_per_epoch,
            lr_curve=self._schedule.curve(self._total_steps),
        )

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing that τ has not said: brings the learning rates to ⌊τ⌋, where that waits for nothing. Arguments are ignored."""
        self._step_count += 1
        if self._adascale.last_step_known:
            self._advance()

    step_update = step
    """timm's loops call this one."""

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rate of each parameter group at ⌊τ⌋, before the gain."""
        self._advance()
        return list(self._schedule.lrs)

    get_lr = get_last_lr

    def _advance(self) -> None:
        self._schedule.advance_to(self._adascale.effective_steps)

    def state_dict(self) -> dict[str, Any]:
        """``{"calls": n}``: the scheduler is a function of the number of its calls, and τ is in AdaScale's own state."""
        self._advance()
        return {**self._schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fast-forwards a fresh schedule, before or after the optimizer's state is loaded.

        Raises:
            ValueError: This schedule has advanced already, or the state is another scheduler's.
        """
        if self._schedule.calls == 0 or self._schedule.calls != state_dict.get("calls"):
            self._schedule.load_state_dict(state_dict)


class _Counted(LRScheduler):
    """One of timm's schedulers, which are told the time, as one of torch's, which count it."""

    def __init__(self, scheduler: Any, unit: SchedulerUnit | None) -> None:
        self.optimizer = scheduler.optimizer
        self.last_epoch = 0
        self._timms, self._unit = scheduler, unit

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        if self._unit == "epoch":
            self._timms.step(self.last_epoch)
        else:
            self._timms.step_update(self.last_epoch)


def _as_torchs(scheduler: Any, unit: SchedulerUnit | None) -> Any:
    if isinstance(scheduler, LRScheduler | ReduceLROnPlateau) or not callable(getattr(scheduler, "step_update", None)):
        return scheduler  # which is checked where it is taken
    kind = type(scheduler).__name__
    if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
        raise ValueError(
            f"{kind} is not supported: it follows a metric, so its curve can't be replayed on another number of workers."
        )
    in_epochs = getattr(scheduler, "t_in_epochs", None)
    if unit is not None and in_epochs is not None and in_epochs != (unit == "epoch"):
        right = "epoch" if in_epochs else "step"
        raise ValueError(
            f"Invalid {unit=}: this {kind} has t_in_epochs={in_epochs}, so its unit is {right!r}. In the other it would stand "
            "still."
        )
    return _Counted(scheduler, unit)
