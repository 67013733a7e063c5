"""TauSchedule: the base run's LR schedule as a torch scheduler, for the training
loops of other libraries.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .._torch import called_to_make_state
from .._warn import warn_on_first_worker
from ..batch import StepPlan
from .adascale import AdaScaleOptimizer
from .schedule import BaseSchedule, EffectiveSchedule, SchedulerUnit, dry_copy


@dataclass(slots=True)
class _Progress:
    """How far a schedule with a T has come. It outlives the schedule.

    Attributes:
        schedule: The schedule, while the program has it.
        total: T.
        tau: τ as the host has last read it.
        advance: By how much τ grew then.
    """

    schedule: weakref.ref[TauSchedule]
    total: float
    tau: float = 0.0
    advance: float = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether the program still has the schedule, and has begun but not ended it."""
        return 0 < self.tau < self.total and self.schedule() is not None


_SCHEDULES: list[_Progress] = []
"""The progress of each schedule of this process that has a T."""

_STILL = 20
"""Steps past T after which another schedule that has not advanced meanwhile is taken for
that of a loop that was left.
"""


@atexit.register
def _warn_of_early_end() -> None:
    """Warn of the last schedule that was stepped and dropped before T, unless an
    exception has ended the process.
    """
    early = [
        each
        for each in _SCHEDULES
        if 0 < each.tau < each.total - max(each.advance, 1.0)
    ]
    if early and not hasattr(sys, "last_value"):
        warn_on_first_worker(
            f"The training loop has ended at effective step {early[-1].tau:.0f} of "
            f"{early[-1].total:g}, so the learning rate has not reached the end of its "
            "schedule. With larger batches T takes more epochs. Loop until T, with a "
            "last evaluation after the loop: while not schedule.finished."
        )


class TauSchedule(LRScheduler):
    """Drives any LR scheduler by the effective steps τ of an
    :class:`ray_adascale.AdaScale`. It is a torch scheduler itself.

    Pass it to the loop in place of the scheduler. After each optimizer step the
    learning rates (and momenta) are those of base step ⌊τ⌋, whenever the loop calls
    :meth:`step`: once a step, once an epoch, several times (Accelerate), or never. With
    a fused optimizer on a GPU they change once the host has read the step: before the
    next optimizer step at the latest, and at once in :meth:`get_last_lr`.

    At T and beyond they stay those of the base run's last step. If a step begins at T
    or later, and no other schedule of the process is before its T, there is a warning;
    so there is if the process ends before T. Names that this class lacks are the user's
    scheduler's.

    Args:
        optimizer: The AdaScale with the clock τ.
        scheduler: A fresh scheduler on that optimizer or on the one it wraps: a torch
            scheduler, a timm scheduler (any object with ``step_update(num_updates)``
            and ``step(epoch)``), or None for constant learning rates.
        unit: The unit of one ``scheduler.step()`` in the base run, "step" or "epoch".
            For a timm scheduler that counts updates (``t_in_epochs=False``) it is
            "step".
        base_steps_per_epoch: Optimizer steps in an epoch of the base run,
            ``len(dataset) / B0``; for ``unit="epoch"``.
        total_steps: T. Without it :attr:`finished` is never True, and a scheduler with
            a length (OneCycleLR) raises beyond it.
        base_batch_size: B0, for :attr:`base_schedule`.

    Raises:
        ValueError: The unit is missing, or the scheduler follows a metric, was stepped
            already, or drives another optimizer.
    """

    def __init__(
        self,
        optimizer: AdaScaleOptimizer,
        scheduler: Any,
        unit: SchedulerUnit | None = None,
        *,
        base_steps_per_epoch: float | None = None,
        total_steps: float | None = None,
        base_batch_size: int | None = None,
    ) -> None:
        if not isinstance(optimizer, AdaScaleOptimizer):
            raise ValueError(
                f"Invalid optimizer of type {type(optimizer).__name__}. Must be the "
                "AdaScale with the effective steps: AdaScale(optimizer, ...), or the "
                "optimizer that attach() returns. Build the schedule before the loop "
                "wraps it."
            )
        # LRScheduler.__init__ is not called, because it takes a first step and counts
        # the optimizer's calls.
        self.optimizer: Optimizer = optimizer
        self._total_steps = total_steps
        self._base_batch_size = base_batch_size
        self._unit = unit
        self._base_steps_per_epoch = base_steps_per_epoch
        made = None if scheduler is None else _as_torchs(scheduler, unit)
        self.scheduler = scheduler
        """The scheduler that this one drives. Never step it yourself."""
        self._schedule = EffectiveSchedule(
            optimizer,
            made,
            unit=unit,
            base_steps_per_epoch=base_steps_per_epoch,
            total_steps=total_steps,
        )
        self.base_lrs = list(self._schedule.lrs)
        self.plan: StepPlan | None = None
        """The batch of a step; None unless :func:`ray_adascale.attach` has set it."""
        self._step_count = 0
        self._progress = _Progress(weakref.ref(self), total_steps or 0.0)
        if total_steps:
            _SCHEDULES.append(self._progress)
        self._was_loaded = False  # since the last step
        self._warned_past_end = False
        self._others: dict[int, float] = {}
        """τ of the other schedules under way, as it last changed past T."""
        self._others_stood = 0  # steps since then
        self._advance()
        ref = weakref.ref(self)

        makes_state = False  # torch then steps with LRs of zero, which it restores

        def before(*_: Any) -> None:
            nonlocal makes_state
            makes_state = called_to_make_state(optimizer.wrapped)
            if not makes_state and (schedule := ref()) is not None:
                schedule._advance()

        def check(*_: Any) -> None:
            if not makes_state and (schedule := ref()) is not None:
                schedule._check_step()

        def after(*_: Any) -> None:
            if (
                not makes_state
                and (schedule := ref()) is not None
                and schedule._adascale.last_step_known
            ):
                schedule._advance()

        # The LR of a step depends on the previous step. It is set after that step if
        # the host has read it, for readers of the LR between steps, else before the
        # next step.
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_pre_hook(check)
        optimizer.register_step_post_hook(after)

        def loaded(*_: Any) -> None:
            if (schedule := ref()) is not None:
                schedule._was_loaded = True
                schedule._schedule.restore(
                    schedule._schedule.due(schedule._adascale.effective_steps)
                )

        # The LR in a state is that of its τ. One that was saved without this hook may
        # have the LR of the step before.
        optimizer.register_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(loaded)

    @property
    def _adascale(self) -> AdaScaleOptimizer:
        assert isinstance(self.optimizer, AdaScaleOptimizer)
        return self.optimizer

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Calls of ``scheduler.step()`` in the base run up to τ: steps, or epochs."""
        return self._schedule.calls

    @property
    def effective_steps(self) -> float:
        """τ."""
        return self._adascale.effective_steps

    @property
    def finished(self) -> bool:
        """Whether τ has reached T, the end of the run. Waits for the device only
        near T.
        """
        total = self._total_steps
        if total is None:
            return False
        adascale = self._adascale
        return (
            adascale.furthest_effective_steps >= total
            and adascale.effective_steps >= total
        )

    @property
    def base_schedule(self) -> BaseSchedule:
        """The schedule of the base run, as in a recipe. Needs T and B0.

        Raises:
            ValueError: ``total_steps`` or ``base_batch_size`` was not given.
        """
        if self._total_steps is None or self._base_batch_size is None:
            raise ValueError(
                "The schedule needs T and B0: TauSchedule(..., total_steps=T, "
                "base_batch_size=B0)."
            )
        return BaseSchedule(
            base_batch_size=self._base_batch_size,
            total_steps=int(self._total_steps),
            scheduler_unit=self._unit if self.scheduler is not None else None,
            base_steps_per_epoch=self._base_steps_per_epoch,
            lr_curve=self._schedule.curve(self._total_steps),
        )

    def step(self, *args: Any, **named: Any) -> None:
        """Set the learning rates of ⌊τ⌋, unless that would wait for the device.
        Arguments are ignored: timm's loops pass the number of updates or the epoch.

        Raises:
            ValueError: The argument is a part of an epoch.
        """
        epoch = args[0] if args else named.get("epoch")
        if isinstance(epoch, float) and not epoch.is_integer():
            raise ValueError(
                f"scheduler.step({epoch:g}): parts of an epoch can't be driven by τ. "
                "Make the scheduler in steps of the base run "
                "(CosineAnnealingWarmRestarts(optimizer, T_0=epochs * steps_per_epoch)"
                '), with scheduler_unit="step", and call step() without an argument.'
            )
        self._step_count += 1
        if self._adascale.last_step_known:
            self._advance()

    step_update = step
    """The name that timm's loops call."""

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group at ⌊τ⌋, before the gain."""
        self._advance()
        return list(self._schedule.lrs)

    get_lr = get_last_lr

    def _advance(self) -> None:
        tau = self._adascale.effective_steps
        progress = self._progress
        if tau > progress.tau:
            progress.advance = tau - progress.tau
        progress.tau = tau
        self._schedule.advance_to(tau)

    def __getattr__(self, name: str) -> Any:
        scheduler = self.__dict__.get("scheduler")
        if scheduler is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}",
                name=name,
                obj=self,
            )
        return getattr(scheduler, name)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"calls": n}``. The scheduler is a function of the number of its
        calls, and τ is in AdaScale's state.
        """
        self._advance()
        return {**self._schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fast-forward a fresh schedule, before or after the optimizer's state is
        loaded.

        Raises:
            ValueError: This schedule has advanced already, or the state is another
                scheduler's, as in the checkpoint of a run without AdaScale.
        """
        if "calls" not in state_dict:
            raise ValueError(
                "This is the checkpoint of a run without AdaScale: the scheduler's "
                "state has no number of calls, so the effective step is unknown. "
                "Finish that run without AdaScale, or load its weights alone and "
                "begin a new run. To go on at its step k, load it in a loop of your "
                "own, before ray_adascale.attach(..., starting_step=k)."
            )
        if self._schedule.calls == 0 or self._schedule.calls != state_dict.get("calls"):
            self._schedule.load_state_dict(state_dict)
        self._was_loaded = True

    def _check_step(self) -> None:
        """Check, as a step begins, that τ was loaded with this schedule's state, and
        warn of the first step that begins at τ ≥ T.

        Raises:
            RuntimeError: τ was not loaded.
        """
        if self._was_loaded:
            self._was_loaded = False
            self._check_loaded_clock()
        progress = self._progress
        if self._warned_past_end or not 0 < progress.total <= progress.tau:
            return
        if self._others_advance():
            return
        self._warned_past_end = True
        warn_on_first_worker(
            f"A step begins at effective step {progress.tau:.0f}, and the schedule has "
            f"ended at {progress.total:g}. This step and later ones have the "
            "schedule's last learning rate, times the gain. End the loop at T: while "
            "not schedule.finished, and after each step: if schedule.finished: break. "
            "(Lightning goes on past T for min_epochs and min_steps, or if a callback "
            "clears should_stop.)"
        )

    def _others_advance(self) -> bool:
        """Return whether another schedule of the program is on its way to its T: a loop
        of two networks, as of a GAN, goes on until both have ended.

        The schedule of a loop that was interrupted, which a notebook keeps, stands.
        """
        others = {id(each): each.tau for each in _SCHEDULES if each.is_under_way}
        if others != self._others:
            self._others = others
            self._others_stood = 0
        self._others_stood += 1
        return bool(others) and self._others_stood <= _STILL

    def _check_loaded_clock(self) -> None:
        tau = self._adascale.effective_steps
        due = self._schedule.due(tau)
        if self._schedule.calls > due:
            raise RuntimeError(
                f"The scheduler is at call {self._schedule.calls}, and the "
                f"optimizer's effective step is {tau:.2f}, at which {due} are due. "
                "Load both states of one checkpoint, into an optimizer and a schedule "
                "that were just built: τ is in the optimizer's. With "
                'scheduler_unit="epoch", dataset_length and the base batch must be '
                "those of the checkpoint."
            )


class _Counted(LRScheduler):
    """A timm scheduler as a torch scheduler: it counts its calls, which timm's
    scheduler takes as an argument.
    """

    def __init__(self, scheduler: Any, unit: SchedulerUnit | None) -> None:
        self.optimizer = scheduler.optimizer
        self.last_epoch = 0
        self._timms = scheduler
        self._unit = unit

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        if self._unit == "epoch":
            self._timms.step(self.last_epoch)
        else:
            self._timms.step_update(self.last_epoch)


def _as_torchs(scheduler: Any, unit: SchedulerUnit | None) -> Any:
    if isinstance(scheduler, LRScheduler | ReduceLROnPlateau) or not callable(
        getattr(scheduler, "step_update", None)
    ):
        return scheduler  # EffectiveSchedule checks it
    kind = type(scheduler).__name__
    if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
        raise ValueError(
            f"{kind} is not supported: it follows a metric, so its curve can't be "
            "replayed on another number of workers."
        )
    in_epochs = getattr(scheduler, "t_in_epochs", None)
    if unit is not None and in_epochs is not None and in_epochs != (unit == "epoch"):
        right = "epoch" if in_epochs else "step"
        raise ValueError(
            f"Invalid {unit=}: this {kind} has t_in_epochs={in_epochs}, so its unit is "
            f"{right!r}. With the other unit it would never change the learning rate."
        )
    counted = _Counted(scheduler, unit)
    fresh = dry_copy(counted)
    fresh.last_epoch = -1
    fresh.step()
    now, first = (
        [group["lr"] for group in each.optimizer.param_groups]
        for each in (counted, fresh)
    )
    # a tanh does not begin exactly at the base LR
    if not np.allclose(now, first, rtol=1e-5, atol=0):
        raise ValueError(
            f"The {kind} was stepped already: the LRs are {now}, and {first} at its "
            "first step. Give a fresh scheduler and never call its step(). The "
            "schedule calls it by τ, also after a resume."
        )
    return counted
