"""The LR schedule of the base run, driven by τ instead of by steps.

The base run takes step ``t`` (0-based) after a certain number of ``scheduler.step()``
calls. At scale, the optimizer step that begins at effective step τ must have the
learning rates (and momenta) of base step ⌊τ⌋, so it needs the same number of calls. The
scheduler itself is never changed, replaced or restarted: it is only called more often
than once a step.
"""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._errors import noted
from ..gain import whole_number
from .scheduler_checks import check_scheduler, nested_schedulers

SchedulerUnit = Literal["step", "epoch"]

# torch's two warnings about the order of optimizer.step() and scheduler.step(). Both
# check the first call only, and both are wrong here: calls are due by τ, and an
# optimizer is usually wrapped after the scheduler was built.
_ORDER_WARNINGS = (
    r"Detected call of `lr_scheduler\.step\(\)` before",
    r"Seems like `optimizer\.step\(\)` has been overridden",
)


_COMPARED = 2000
"""Calls of a scheduler that are made twice, to see that its functions depend on their
argument alone. A call takes some microseconds.
"""


class LRCurves(Sequence[list[float]]):
    """``curves[group][call]``: learning rates after ``call`` scheduler calls. Groups
    with proportional curves share one.

    A shared curve times a group's factor is right to 10⁻¹² of its peak; equal curves
    are equal to the last bit.

    Attributes:
        rows: The curves, of shape ``(rows, calls)``.
        groups: For each parameter group the index of its row, and the factor on it.
    """

    def __init__(self, rows: np.ndarray, groups: Sequence[tuple[int, float]]) -> None:
        self.rows = rows
        self.groups = groups

    @classmethod
    def of(cls, rates: np.ndarray) -> LRCurves:
        """Return the curves of learning rates of shape ``(calls, groups)``."""
        rows: list[np.ndarray] = []
        groups: list[tuple[int, float]] = []
        some = slice(None, None, len(rates) // 16 + 1)
        whole = slice(None)
        for curve in rates.T:
            at = int(np.argmax(np.abs(curve)))
            peak = float(curve[at]) or 1.0
            for row, other in enumerate(rows):  # noqa: B007 (used after the loop)
                factor = peak / (float(other[at]) or 1.0)
                if all(
                    np.abs(factor * other[part] - curve[part]).max()
                    <= 1e-12 * abs(peak)
                    for part in (some, whole)
                ):
                    break
            else:
                row = len(rows)
                factor = 1.0
                rows.append(curve)
            groups.append((row, factor))
        return cls(np.array(rows), groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, group: Any) -> Any:
        row, factor = self.groups[group]
        return (factor * self.rows[row]).tolist()


@dataclass(frozen=True, kw_only=True)
class BaseSchedule:
    """The schedule of the base run. A run at any scale follows it; recipe and
    checkpoint must agree with it.

    Attributes:
        base_batch_size: B0, examples.
        total_steps: T.
        scheduler_unit: The unit of one ``scheduler.step()``; None without a scheduler.
        base_steps_per_epoch: Optimizer steps in an epoch of the base run; None if the
            dataset has no length.
        lr_curve: ``lr_curve[group][call]``, the learning rate after ``call`` scheduler
            calls.
    """

    base_batch_size: int
    total_steps: int
    scheduler_unit: SchedulerUnit | None
    base_steps_per_epoch: float | None
    lr_curve: Sequence[Sequence[float]]

    @property
    def highest_at(self) -> float:
        """τ at which the first parameter group first has its highest learning rate."""
        curve = self.lr_curve[0]
        return curve.index(max(curve)) * (self.steps_per_call or 1)

    @property
    def steps_per_call(self) -> float | None:
        """Base steps from one scheduler call to the next; None if an epoch's number
        of steps is unknown.
        """
        return self.base_steps_per_epoch if self.scheduler_unit == "epoch" else 1.0

    def ended_at(self, effective_steps: float) -> bool:
        """Return whether a run is at its end: τ ≥ T."""
        return effective_steps >= self.total_steps


class EffectiveSchedule:
    """Drives a torch LR scheduler by effective steps τ.

    Args:
        optimizer: The optimizer with the learning rates, or a wrapper that shares its
            ``param_groups``.
        scheduler: A fresh scheduler (never stepped), or None for constant learning
            rates.
        unit: The unit of one ``scheduler.step()`` in the base run: an optimizer
            ``"step"`` or an ``"epoch"``. Required with a scheduler.
        base_steps_per_epoch: Optimizer steps in an epoch of the base run,
            ``len(dataset) / B0``; need not be whole. Required for ``unit="epoch"``.
        total_steps: T, effective steps in the run. The last optimizer step may end as
            far as S beyond T. With T given, no more calls are made than before the base
            run's last step (OneCycleLR raises beyond its end).

    Raises:
        ValueError: If the unit is missing or unknown, or if the scheduler is not an
            ``LRScheduler``, follows a metric, was stepped already, drives another
            optimizer or cannot be copied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        unit: SchedulerUnit | None = None,
        base_steps_per_epoch: float | None = None,
        total_steps: float | None = None,
    ) -> None:
        if unit is not None and unit not in get_args(SchedulerUnit):
            raise ValueError(
                f'Invalid {unit=}. Must be "step" or "epoch": the unit of '
                "scheduler.step() at base batch."
            )
        for name, value in (
            ("base_steps_per_epoch", base_steps_per_epoch),
            ("total_steps", total_steps),
        ):
            if value is not None and not (0 < value < math.inf):
                raise ValueError(
                    f"Invalid {name}={value!r}. Must be positive and finite."
                )
        if scheduler is not None:
            check_scheduler(optimizer, scheduler)
            if unit is None:
                raise ValueError(
                    "Missing unit (scheduler_unit) of the learning-rate scheduler. "
                    "Give the unit of one scheduler.step() at "
                    'the base batch: "step" if it was called after each optimizer '
                    'step, "epoch" if once an epoch. It is '
                    "not guessed, because a wrong guess gives a wrong schedule without "
                    "an error."
                )
            if unit == "epoch" and base_steps_per_epoch is None:
                raise ValueError(
                    'unit="epoch" needs base_steps_per_epoch, the optimizer steps in '
                    "an epoch at the base batch:"
                    " len(dataset) / base_batch_size. Give the dataset's length: "
                    "AdaScaleConfig(dataset_length=...)."
                )
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._unit = unit
        self._base_steps_per_epoch = base_steps_per_epoch
        self._calls = 0
        self._parts = [] if scheduler is None else list(nested_schedulers(scheduler))
        self._composite = len(self._parts) > 1
        self._left_at = self._counts()
        self._left_lrs = self.lrs
        # Copied while the scheduler is fresh, because a curve may be computed later and
        # begins at call 0.
        self._fresh = None if scheduler is None else dry_copy(scheduler)
        if total_steps is None:
            self._last_call = None
        else:
            self._last_call = self._calls_before(_last_step(total_steps))

    @property
    def calls(self) -> int:
        """Number of ``scheduler.step()`` calls so far."""
        return self._calls

    @property
    def lrs(self) -> list[float]:
        """The current learning rate of each parameter group, without the gain."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def due(self, effective_steps: float) -> int:
        """Return the number of scheduler calls in the base run before base step ⌊τ⌋
        (0-based).

        Args:
            effective_steps: τ ≥ 0. Beyond ``total_steps`` the number stays that of the
                last base step.
        """
        if not (0 <= effective_steps < math.inf):
            raise ValueError(
                f"Invalid {effective_steps=}. Must be finite and not negative."
            )
        calls = self._calls_before(math.floor(effective_steps))
        return calls if self._last_call is None else min(calls, self._last_call)

    def advance_to(self, effective_steps: float) -> None:
        """Call ``scheduler.step()`` until ``calls`` is ``due(effective_steps)``. The
        schedule never goes back.

        Raises:
            RuntimeError: As for :meth:`check`.
        """
        self.check()
        self._replay(self.due(effective_steps))

    def check(self) -> None:
        """Check that nobody but this schedule has changed the learning rates.

        Raises:
            RuntimeError: The loop has called ``scheduler.step()``, or has set a
                learning rate.
        """
        if self._counts() != self._left_at:
            raise RuntimeError(
                f"{type(self._scheduler).__name__}.step() was called beside the "
                f"{self._calls} calls due by τ, so the learning rate is not the "
                "schedule's. Remove scheduler.step() from the loop: run.step() calls "
                "it. In the loop of another library pass the TauSchedule in place of "
                "the scheduler."
            )
        lrs = self.lrs
        if lrs == self._left_lrs:
            return
        # a group may have been added
        for group, (lr, left) in enumerate(zip(lrs, self._left_lrs, strict=False)):
            # a curve within this tolerance is the same in a resume
            if not math.isclose(lr, left, rel_tol=1e-6):
                raise RuntimeError(
                    f"The learning rate of parameter group {group} is {lr:g}, and the "
                    f"schedule set {left:g}. An LR that the loop "
                    "sets would not follow τ. Delete the line, or the second "
                    "scheduler, that sets it, and give "
                    "the schedule as a scheduler: "
                    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: "
                    "get_lr(step) / base_lr) with "
                    'scheduler_unit="step".'
                )

    def _counts(self) -> list[int | None]:
        """Return each part's own count of its steps."""
        return [getattr(part, "last_epoch", None) for part in self._parts]

    def curve(self, total_steps: float) -> LRCurves:
        """Return the learning rates of the whole base run, ``curve[group][call]`` for
        calls 0 ... ``due(total_steps − 1)``.

        They come from a dry run on copies, from call 0 on. The live scheduler and
        optimizer do not change, and no parameter or optimizer state is copied.
        Functions that the scheduler calls (LambdaLR) are shared and must depend on
        their argument alone.

        Args:
            total_steps: T.
        """
        if not (0 < total_steps < math.inf):
            raise ValueError(f"Invalid {total_steps=}. Must be positive and finite.")
        return LRCurves.of(self._rates(total_steps))

    def _rates(self, total_steps: float) -> np.ndarray:
        """Return the learning rates of the base run, of shape ``(calls, groups)``."""
        if self._fresh is None:
            return np.array([self.lrs])
        calls = self._calls_before(_last_step(total_steps))
        rates = self._dry_run(self._fresh, calls)
        again = self._dry_run(self._fresh, min(calls, _COMPARED))
        alike = np.isclose(again, rates[: len(again)], rtol=0, atol=0, equal_nan=True)
        differs = np.flatnonzero(~alike.all(axis=1))
        if len(differs):
            call = int(differs[0])
            raise ValueError(
                f"The {type(self._fresh).__name__} gives another learning rate when it "
                f"is asked again: {rates[call].tolist()} and {again[call].tolist()} "
                f"after {call} calls. A function of a scheduler must depend on its "
                "argument alone: not on a count of its own calls, on random numbers or "
                "on what the loop changes."
            )
        return rates

    def _dry_run(self, fresh: LRScheduler, calls: int) -> np.ndarray:
        """Return the learning rates of a copy after 0 ... ``calls`` calls."""
        scheduler = dry_copy(fresh)
        groups = scheduler.optimizer.param_groups
        rates = np.empty((calls + 1, len(self.lrs)))
        with warnings.catch_warnings():
            _ignore_order_warnings()
            for call in range(calls + 1):
                if call:
                    with noted(lambda call=call: self._call_note(call - 1, calls)):  # type: ignore[misc]
                        scheduler.step()
                rates[call] = [float(group["lr"]) for group in groups]
        return rates

    def state_dict(self) -> dict[str, int]:
        """Return ``{"calls": number of scheduler calls}``. A scheduler, also a
        LambdaLR, is a function of this number.
        """
        return {"calls": self._calls}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Fast-forward a fresh schedule call by call, bit-identically, before or after
        the optimizer's state is loaded.

        A call takes a few microseconds. Nothing is unpickled.

        Raises:
            ValueError: This schedule has advanced already, or the state is not that of
                ``state_dict()``.
        """
        calls = state_dict.get("calls")
        if not isinstance(calls, int) or isinstance(calls, bool) or calls < 0:
            raise ValueError(
                f"Invalid schedule state {state_dict!r}. Expected {{'calls': number of "
                "scheduler calls}."
            )
        if self._calls:
            raise ValueError(
                f"The schedule has made {self._calls} calls. Load its state into a "
                "fresh scheduler."
            )
        if self._scheduler is None or self._fresh is None:
            if calls:
                raise ValueError(
                    f"The checkpoint's scheduler had made {calls} calls, but this run "
                    "has no scheduler. Give it the same one."
                )
            return
        self.restore(calls)

    def restore(self, calls: int) -> None:
        """Set the groups to the schedule's values and make the calls that are missing,
        after the optimizer's state was loaded.

        Its groups may have the values of an earlier or a later call, and most
        schedulers compute the next LR from the current one. Only what the schedule
        changes (LR, momentum, betas) is set. All other hyperparameters stay the
        checkpoint's.

        Args:
            calls: Number of calls that are due. If more were made, the values are those
                after the calls so far.
        """
        if self._scheduler is None or self._fresh is None:
            self._left_lrs = self.lrs  # the state's
            return
        dry = dry_copy(self._fresh)
        start = self._fresh.optimizer.param_groups
        now = dry.optimizer.param_groups
        constant = [group.keys() - {"params"} for group in start]
        values: list[dict[str, Any]] = []
        with warnings.catch_warnings():
            _ignore_order_warnings()
            for call in range(max(calls, self._calls) + 1):
                if call:
                    dry.step()
                constant = [
                    {k for k in keys if before[k] == after[k]}
                    for keys, before, after in zip(constant, start, now, strict=True)
                ]
                if call == self._calls:
                    values = [
                        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
                        for group in now
                    ]
        for group, keys, at in zip(
            self._scheduler.optimizer.param_groups, constant, values, strict=True
        ):
            for key in at.keys() - keys:
                _restore(group, key, at[key])
        self._left_lrs = self.lrs
        self._replay(calls)

    def _replay(self, calls: int) -> None:
        if self._scheduler is None or calls <= self._calls:
            return
        # torch warns in a scheduler's first step() only. The parts of a composite
        # scheduler may begin at any time.
        may_warn = self._calls == 0 or self._composite
        with warnings.catch_warnings() if may_warn else nullcontext():
            if may_warn:
                _ignore_order_warnings()
            with noted(lambda: self._call_note(self._calls, calls)):
                while self._calls < calls:
                    self._scheduler.step()
                    self._calls += 1
        self._left_at = self._counts()
        self._left_lrs = self.lrs

    def _call_note(self, call: int, calls: int) -> str:
        length = "T"
        if self._last_call is not None:
            length = f"{self._last_call + 1} {self._unit}s"
        return (
            f"In call {call + 1} of {type(self._scheduler).__name__}.step(), of "
            f"{calls} that are due. Make the scheduler for the length of the base run, "
            f"{length}: a workload reads T as config['total_steps']."
        )

    def _calls_before(self, step: int) -> int:
        """Return the scheduler calls in the base run before step ``step``, counted
        from 0; not bounded by T.
        """
        if self._scheduler is None:
            return 0
        if self._unit == "step":
            return step
        assert self._base_steps_per_epoch is not None
        return whole_number(step / self._base_steps_per_epoch)


class _Standin(Optimizer):
    """The optimizer of a dry run: it has its own parameter groups and no state.

    The parameters in the groups are the real optimizer's, because schedulers don't use
    them. ``Optimizer.__init__`` is not called, because it adds hooks and a patched
    ``step`` only. A user's scheduler reads other attributes from the real optimizer,
    and writes them to this object.
    """

    def __init__(self, optimizer: Optimizer, memo: dict[int, Any]) -> None:
        self._real = optimizer
        self.defaults = dict(optimizer.defaults)
        self.state = {}  # type: ignore[assignment]
        self.param_groups = [
            {
                key: list(value) if key == "params" else copy.deepcopy(value, memo)
                for key, value in group.items()
            }
            for group in optimizer.param_groups
        ]

    def __getattr__(self, name: str) -> Any:
        if name == "_real":
            raise AttributeError(name)
        return getattr(self._real, name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("a dry run takes no optimizer step")


def dry_copy(scheduler: LRScheduler) -> LRScheduler:
    """Return a copy of the scheduler that drives a stand-in for its optimizer.

    Raises:
        ValueError: The scheduler can't be copied.
    """
    optimizer = scheduler.optimizer
    # deepcopy does not copy the objects in its memo: the parameters, and the optimizer,
    # which becomes the stand-in.
    memo: dict[int, Any] = {
        id(p): p for group in optimizer.param_groups for p in group["params"]
    }
    memo[id(optimizer)] = _Standin(optimizer, memo)
    parts = list(nested_schedulers(scheduler))
    for part in parts:
        for value in vars(part).values():
            for item in value if isinstance(value, list | tuple) else (value,):
                # LambdaLR(optimizer, trainer.lr_at): a copy of the bound method would
                # copy the trainer and its model.
                if isinstance(item, types.MethodType) and not any(
                    item.__self__ is p for p in parts
                ):
                    memo[id(item)] = item
    try:
        return copy.deepcopy(scheduler, memo)
    except Exception as error:
        raise ValueError(
            f"Cannot copy the {type(scheduler).__name__} for a dry run ({error!r}). A "
            "scheduler must be deep-copyable: keep file handles, locks and the like "
            "out of its attributes and its callable objects."
        ) from error


def _restore(group: dict[str, Any], key: str, value: Any) -> None:
    # a tensor LR is changed in place, because captured graphs refer to it
    if hasattr(group.get(key), "fill_"):
        group[key].fill_(float(value))
    else:
        group[key] = copy.deepcopy(value)


def _ignore_order_warnings() -> None:
    for message in _ORDER_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def _last_step(total_steps: float) -> int:
    """Return the last step of the base run, counted from 0: ⌈T⌉ − 1."""
    return -whole_number(-total_steps) - 1
