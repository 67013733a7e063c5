"""The batch of a step: which batches a number of workers can make, and which of them a
run takes.

A run may follow the gradient noise, or a given schedule. It decides at step boundaries,
from τ and the averages of σ² and μ² alone. So all ranks decide alike without a further
collective, and a resumed run decides like one that was never stopped.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ._errors import SettingError, check_count
from ._fields import COUNT, MAYBE_COUNT, by, check_fields, optional, within

# the settings, and with them the options of the command line, load no torch
if TYPE_CHECKING:
    from .data.order import BatchSplit

_RATIO = 2**0.25
"""Ratio of neighbouring pass sizes: few sizes, and one of them near to any wanted
size.
"""
_NEAR = 2**0.125
"""Smallest ratio of neighbouring batches."""
_ROOM = 8.0
"""Scales up to this one are allowed in any run, however short."""
_INTERVAL = 0.25
"""Effective steps between decisions, as a share of the averages' window: the
averages change no faster.
"""
_STEADY = 1.2
"""Smallest ratio of the wanted batch to the present one at which the batch changes."""
_BELOW = 1 - 1e-12
_GROWTH = 2.0
"""Largest ratio by which one decision enlarges the batch, since the averages still
hold the noise of the smaller one.
"""


@dataclass(frozen=True)
class StepPlan:
    """What one optimizer step consists of. It is replaced whole, at a step boundary.

    Attributes:
        base_batch_size: B0, examples.
        global_batch_size: B, examples.
        workers: Workers that share the batch.
        passes: Backward passes of each worker.
        loss_divisor: Number that the loss of each pass is divided by. Default: the
            passes.
        given_scale: S where a loop gives S alone, and B0 and B are unknown. Default: B
            / B0.

    Raises:
        ValueError: A number is out of its range.
    """

    base_batch_size: int = 1
    global_batch_size: int = 1
    workers: int = 1
    passes: int = 1
    loss_divisor: int | None = None
    given_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "passes", "loss_divisor"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"Invalid scale={self.scale}. Must be positive: global batch size / "
                "base batch size."
            )

    @cached_property
    def scale(self) -> float:
        """S."""
        return (
            self.global_batch_size / self.base_batch_size
            if self.given_scale is None
            else self.given_scale
        )

    @cached_property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step."""
        return self.workers * self.passes

    @property
    def largest_pass(self) -> int:
        """Examples in the largest micro-batch of the step."""
        return math.ceil(self.global_batch_size / self.num_samples)

    def loss_factor(self, share: float, whole: float = 1) -> float:
        """Return c, the factor on the mean loss of a micro-batch of weight w =
        ``share`` / ``whole``: n·w/passes.

        The reduction takes the mean over workers, and passes add up, so ḡ = Σ w_i g_i
        needs it. A loop may divide by another number than the passes
        (:attr:`loss_divisor`).
        """
        divisor = self.loss_divisor or self.passes
        return self.num_samples * share / (whole * divisor)

    @cached_property
    def multiple_of_mean(self) -> float:
        """The gradient that the passes add up to, divided by ḡ."""
        return 1.0 if self.loss_divisor is None else self.passes / self.loss_divisor

    def at_scale(self, scale: float) -> StepPlan:
        """Return the plan at another S."""
        return replace(self, given_scale=float(scale))

    def shortened(
        self, passes: int, scale: float | None = None, loss_divisor: int | None = None
    ) -> StepPlan:
        """Return the plan of a step that ends after fewer passes, as the last step of
        an epoch may.

        Args:
            passes: At most the passes of this plan.
            scale: S of the shorter step. Default: in proportion to the passes.
            loss_divisor: Number that the loss was divided by. Default: as in this plan.

        Raises:
            ValueError: ``passes`` is out of its range.
        """
        if not 1 <= passes <= self.passes:
            raise ValueError(
                f"Invalid {passes=}. Must be between 1 and {self.passes}, the passes "
                "of a full step."
            )
        divisor = self.loss_divisor if loss_divisor is None else loss_divisor
        if scale is not None or passes < self.passes:
            plan = self.at_scale(
                self.scale * passes / self.passes if scale is None else scale
            )
            return replace(plan, passes=passes, loss_divisor=divisor)
        return replace(self, loss_divisor=divisor)

    def split(self, rank: int) -> BatchSplit:
        """Return the micro-batches of one worker."""
        from .data.order import BatchSplit

        return BatchSplit(
            self.global_batch_size,
            rank=rank,
            world_size=self.workers,
            accumulation=self.passes,
        )


# ---- a given schedule ----------------------------------------------------------------


@dataclass(frozen=True)
class BatchSchedule:
    """Batches and their starts. Each begins at the first step boundary that has reached
    its start.

    Attributes:
        starts: Where each batch begins, ascending from 0: shares of T, or effective
            steps.
        sizes: Examples of each batch.
        shares: Whether the starts are shares.
    """

    starts: tuple[float, ...]
    sizes: tuple[int, ...]
    shares: bool

    def phase(self, tau: float, total_steps: float) -> int:
        """Return the number of the batch at τ, from 0 on."""
        return (
            bisect.bisect_right(self.starts, tau / total_steps if self.shares else tau)
            - 1
        )

    def __str__(self) -> str:
        """Return the schedule as the command line reads it."""
        starts = [
            "0",
            *(
                f"{start * 100:.10g}%" if self.shares else f"{start:g}"
                for start in self.starts[1:]
            ),
        ]
        return ",".join(
            f"{start}:{size}" for start, size in zip(starts, self.sizes, strict=True)
        )


def read_schedule(given: Any) -> BatchSchedule:
    """Return the schedule of ``AdaScaleConfig(batch_schedule=...)``: pairs of start and
    batch, or such pairs as text.

    Raises:
        SettingError: It is neither, or its starts or batches are out of their range.
    """

    def invalid(why: str) -> SettingError:
        return SettingError(
            f"Invalid {{}}: {why} Must be pairs of start and batch, as [(0, 32), (0.2, "
            "128)] or '0:32,20%:128'. The first start is 0. The others ascend, and are "
            "all shares of the run (0.2, or '20%') or all effective steps (300).",
            batch_schedule=given,
        )

    pairs = (
        [pair.rpartition(":")[::2] for pair in given.split(",")]
        if isinstance(given, str)
        else given
    )
    if not isinstance(pairs, Sequence) or not all(
        isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs
    ):
        raise invalid("it has no pairs.")
    sizes: list[Any] = [
        int(size) if isinstance(size, str) and size.strip().isdecimal() else size
        for _, size in pairs
    ]
    starts = [_read_start(start) for start, _ in pairs]
    for (start, _), number, size in zip(pairs, starts, sizes, strict=True):
        if math.isnan(number):
            raise invalid(f"{start!r} is no start.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise invalid(f"{size!r} is no batch, a positive number of examples.")
    if not starts or starts[0] != 0:
        raise invalid(
            f"the first batch begins at {pairs[0][0]}." if pairs else "it has no pairs."
        )
    if len({type(start) for start in starts[1:]}) > 1:
        raise invalid("its starts have several units.")
    if any(a >= b for a, b in itertools.pairwise(starts)):
        raise invalid("its starts do not ascend.")
    return BatchSchedule(tuple(starts), tuple(sizes), isinstance(starts[-1], float))


def _read_start(start: object) -> float:
    """Return effective steps as an int, a share of the run as a float, and NaN for
    anything else.
    """
    if isinstance(start, str):
        parts = re.fullmatch(r"\s*(\d*\.?\d+)\s*(%?)\s*", start)
        if parts is None:
            return math.nan
        number, percent = parts.groups()
        start = (
            float(number) / 100
            if percent
            else int(number)
            if number.isdecimal()
            else float(number)
        )
    if isinstance(start, float):
        return start if 0 <= start < 1 else math.nan
    return (
        start
        if isinstance(start, int) and not isinstance(start, bool) and start >= 0
        else math.nan
    )


# ---- which batches the workers can make ----------------------------------------------


_TARGET = within(
    "a number above 0 and at most 1 (0.6: the progress of a step is to be 60 % of the "
    "progress that its examples make at the base batch), or None",
    lambda target: 0 < target <= 1,
)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The fields of :class:`ray_adascale.AdaScaleConfig` that decide the batch, with
    their meanings there.

    Attributes:
        schedule: ``batch_schedule`` as it was read; None without one.

    Raises:
        SettingError: A field is out of its range, or two fields contradict each other.
    """

    base_batch_size: int = field(metadata=COUNT)
    per_worker_batch_size: int | None = field(default=None, metadata=MAYBE_COUNT)
    accumulation: int = field(default=1, metadata=COUNT)
    global_batch_size: int | None = field(default=None, metadata=MAYBE_COUNT)
    target_efficiency: float | None = field(
        default=None, metadata=by(optional(_TARGET))
    )
    batch_schedule: Any = None
    max_global_batch_size: int | None = field(default=None, metadata=MAYBE_COUNT)
    elastic: bool = False
    schedule: BatchSchedule | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_fields(self, "AdaScaleConfig")
        own = {
            name: getattr(self, name)
            for name in ("target_efficiency", "batch_schedule", "global_batch_size")
        }
        decide = {name: value for name, value in own.items() if value is not None}
        if len(decide) > 1:
            raise SettingError(
                "Invalid {}. Give one of them, not both: each decides the batch of a "
                "step. max_global_batch_size bounds the batch of target_efficiency and "
                "of batch_schedule.",
                **decide,
            )
        if self.max_global_batch_size is not None and not decide.keys() & {
            "target_efficiency",
            "batch_schedule",
        }:
            raise SettingError(
                "Invalid {}: it bounds the batch that target_efficiency chooses. "
                "Give target_efficiency as well, or batch_schedule, or "
                "per_worker_batch_size, accumulation or global_batch_size instead.",
                max_global_batch_size=self.max_global_batch_size,
            )
        object.__setattr__(
            self,
            "schedule",
            None if self.batch_schedule is None else read_schedule(self.batch_schedule),
        )

    @property
    def changes(self) -> bool:
        """Whether the batch may change while the number of workers stays."""
        return self.target_efficiency is not None or self.schedule is not None

    def plan(self, workers: int) -> StepPlan:
        """Return the batch of this number of workers at the start of a run.

        Raises:
            SettingError: The workers can't make the batch.
        """
        return self.first_of(self.plans(workers))

    def first_of(self, plans: Sequence[StepPlan]) -> StepPlan:
        """Return the first plan of a run: while the noise is unknown, the batch that
        reaches the target without any noise.
        """
        if self.target_efficiency is None:
            return plans[0]
        return nearest_plan(plans, self.base_batch_size / self.target_efficiency)

    def plans(
        self, workers: int, *, window: float = math.inf, largest: float = math.inf
    ) -> list[StepPlan]:
        """Return the plans that a run on this number of workers chooses from.

        A fixed batch is one plan, and a schedule has a plan for each of its batches. A
        run that follows the noise has plans from the smallest batch on, each about a
        fifth larger than the one before. Where the scale may be above 1, each of
        several plans has at least two gradient samples, since one sample tells nothing
        about the noise.

        Args:
            workers: Workers.
            window: Effective steps that the averages of σ² and μ² reach back over.
            largest: Examples of the largest sensible batch: those of an epoch.

        Raises:
            SettingError: The workers can't make a batch.
        """
        if self.schedule is not None:
            sizes = self.schedule.sizes
            if min(sizes) < self.base_batch_size:
                raise SettingError(
                    f"Invalid {{}}: the batch of {min(sizes)} is smaller than "
                    f"base_batch_size={self.base_batch_size}, so the scale would be "
                    "below 1.",
                    batch_schedule=str(self.schedule),
                )
            fewest = 2 if workers == 1 and max(sizes) > self.base_batch_size else 1
            self._smallest(workers, fewest)
            return [self._bounded(size, workers, fewest) for size in sizes]
        if self.target_efficiency is None:
            return [self._fixed(workers)]
        if self.target_efficiency == 1:
            return [self._smallest(workers, 1)]
        smallest = self._smallest(workers, 2 if workers == 1 else 1)
        if self.max_global_batch_size is None:
            # No step advances the clock by more than the averages reach back, because r
            # ≤ S.
            largest = min(largest, max(window, _ROOM) * self.base_batch_size)
        return self._grid(smallest, largest)

    @property
    def _per_pass(self) -> int:
        """Most examples of one pass on one worker."""
        return (
            self.base_batch_size
            if self.per_worker_batch_size is None
            else self.per_worker_batch_size
        )

    @property
    def _bound(self) -> float:
        """Examples of the largest batch."""
        return (
            math.inf
            if self.max_global_batch_size is None
            else self.max_global_batch_size
        )

    def _made(self, batch: int, workers: int, fewest: int = 1) -> StepPlan:
        """Return the plan of this batch in as few passes as possible; of a larger
        batch where a pass would have no example.
        """
        passes = max(
            self.accumulation, fewest, math.ceil(batch / (self._per_pass * workers))
        )
        return StepPlan(
            self.base_batch_size, max(batch, workers * passes), workers, passes
        )

    def _fixed(self, workers: int) -> StepPlan:
        base = self.base_batch_size
        per_pass = self._per_pass
        passes = self.accumulation
        if self.global_batch_size is not None:
            if self.global_batch_size < base:
                raise SettingError(
                    f"Invalid {{}}: smaller than base_batch_size={base}, so the scale "
                    "would be below 1.",
                    global_batch_size=self.global_batch_size,
                )
            return _with_two_samples(self._made(self.global_batch_size, workers))
        if self.elastic:
            passes = max(passes, math.ceil(base / (per_pass * workers)))
        batch = per_pass * workers * passes
        if batch < base:
            raise SettingError(
                f"Invalid {{}}: the global batch of {batch} = {per_pass} per worker × "
                f"{workers} workers × {passes} passes is smaller than the base batch "
                f"of {base}. Raise it, accumulation or num_workers, so that the scale "
                "is at least 1.",
                per_worker_batch_size=per_pass,
            )
        return _with_two_samples(StepPlan(base, batch, workers, passes))

    def halves(self, plan: StepPlan) -> bool:
        """Whether the plan has two passes in place of the one that the settings
        give.
        """
        alone = (
            not self.changes
            and plan.workers == self.accumulation == 1
            and plan.passes == 2
        )
        return alone and plan.global_batch_size <= self._per_pass

    def _smallest(self, workers: int, fewest: int) -> StepPlan:
        """Return the plan of the base batch, or of the next larger batch that the
        workers can make.

        Raises:
            SettingError: The bound leaves no batch.
        """
        plan = self._made(self.base_batch_size, workers, fewest)
        if plan.global_batch_size > self._bound:
            raise SettingError(
                f"Invalid {{}}: it leaves no batch on {workers} workers. Their "
                f"smallest is {plan.global_batch_size} examples in {plan.passes} "
                f"passes a worker (base_batch_size={self.base_batch_size}, "
                f"per_worker_batch_size={self._per_pass}, "
                f"accumulation={self.accumulation}). Raise the bound to it, or use "
                "fewer workers or passes.",
                max_global_batch_size=self.max_global_batch_size,
            )
        return plan

    def _bounded(self, batch: int, workers: int, fewest: int) -> StepPlan:
        """Return the plan of this batch, or of the largest one within the bound. The
        smallest plan is within it.
        """
        plan = self._made(int(min(batch, self._bound)), workers, fewest)
        if plan.global_batch_size <= self._bound:
            return plan
        # Passes of one example: some workers had none in the last pass, and the batch
        # has grown. Leave out the last pass.
        return self._made(workers * (plan.passes - 1), workers, fewest)

    def _grid(self, smallest: StepPlan, largest: float) -> list[StepPlan]:
        """Return plans from the smallest one on. A larger batch takes larger passes
        first, and then more of them.

        Each batch is made in as few passes as ``per_worker_batch_size`` allows. The
        sizes of a pass lie on a grid of their own, so that few of them occur.
        """
        base = self.base_batch_size
        size = self._per_pass
        workers = smallest.workers
        # no run reaches a millionfold batch
        largest = min(largest, self._bound, base * 1e6)
        sizes = [size]
        while sizes[-1] > 1:
            sizes.append(min(round(size / _RATIO ** len(sizes)), sizes[-1] - 1))
        plans = [smallest]
        passes = smallest.passes
        while plans[-1].global_batch_size * _NEAR < largest:
            for batch in (each * workers * passes for each in reversed(sizes)):
                if plans[-1].global_batch_size * _NEAR < batch <= largest:
                    plans.append(StepPlan(base, batch, workers, passes))
            if passes * workers * size >= largest:
                break
            passes = (
                max(
                    passes,
                    math.floor(plans[-1].global_batch_size * _NEAR / (workers * size)),
                )
                + 1
            )
        return plans


def _with_two_samples(plan: StepPlan) -> StepPlan:
    """Return the plan with two passes where it has one gradient sample at S > 1,
    which tells nothing of the noise.
    """
    return replace(plan, passes=2) if plan.num_samples == 1 and plan.scale > 1 else plan


def nearest_plan(plans: Sequence[StepPlan], batch: float) -> StepPlan:
    """Return the plan with the nearest batch by ratio; of two at the same distance, the
    smaller one.

    Args:
        plans: Smallest batch first.
        batch: Examples; may be infinite.
    """
    wanted = min(batch, plans[-1].global_batch_size)
    return min(plans, key=lambda plan: abs(math.log(plan.global_batch_size / wanted)))


# ---- which of them a run takes -------------------------------------------------------


class BatchFollower:
    """Chooses the batch of each step of one run, and resumes. With one plan there is
    nothing to choose.

    Args:
        settings: The settings.
        workers: Workers.
        total_steps: T.
        window: Effective steps that the averages of σ² and μ² reach back over.
        base_steps_per_epoch: Optimizer steps in an epoch of the base run, whose
            examples are the largest sensible batch. None if they are unknown.

    Attributes:
        plans: The plans to choose from.
        plan: The plan of the next step.
    """

    def __init__(
        self,
        settings: BatchSettings,
        workers: int,
        *,
        total_steps: float,
        window: float,
        base_steps_per_epoch: float | None = None,
    ) -> None:
        largest = (
            math.inf
            if base_steps_per_epoch is None
            else base_steps_per_epoch * settings.base_batch_size
        )
        self._settings = settings
        self._total_steps = total_steps
        self._interval = _INTERVAL * window
        self.plans = settings.plans(workers, window=window, largest=largest)
        self.plan = settings.first_of(self.plans)
        self._wanted: float = settings.base_batch_size / (
            settings.target_efficiency or 1
        )
        # the interval of the last decision, or the phase of the schedule
        self._mark = 0

    def _mark_at(self, tau: float) -> int:
        schedule = self._settings.schedule
        return (
            math.floor(tau / self._interval)
            if schedule is None
            else schedule.phase(tau, self._total_steps)
        )

    def due_by(self, tau: float) -> bool:
        """Return whether a decision is due at a boundary with this τ."""
        return len(self.plans) > 1 and self._mark_at(tau) != self._mark

    def next_tau(self) -> float:
        """Return a τ before which no decision is due."""
        schedule = self._settings.schedule
        if len(self.plans) == 1 or (
            schedule is not None and self._mark + 1 == len(schedule.starts)
        ):
            return math.inf
        if schedule is None:
            return (self._mark + 1) * self._interval * _BELOW
        return (
            schedule.starts[self._mark + 1]
            * (self._total_steps if schedule.shares else 1)
            * _BELOW
        )

    def next_plan(
        self, tau: float, moments: Callable[[], tuple[float, float]]
    ) -> StepPlan:
        """Return the plan of the next step.

        Args:
            tau: τ after the last step.
            moments: Returns the averaged σ² and μ²; NaN where they are unknown.
        """
        if self.due_by(tau):
            self._mark = self._mark_at(tau)
            self._decide(moments)
        return self.plan

    def _decide(self, moments: Callable[[], tuple[float, float]]) -> None:
        if self._settings.schedule is not None:
            self.plan = self.plans[self._mark]
            return
        wanted = self.wanted(*moments())
        if wanted != self.plan.global_batch_size:
            self._wanted, self.plan = wanted, nearest_plan(self.plans, wanted)

    def wanted(self, sigma2: float, mu2: float) -> float:
        """Return the examples of the next steps at a noise: the present batch,
        unless there is enough reason for another one.
        """
        batch = self.plan.global_batch_size
        target = self._settings.target_efficiency
        if (
            target is None
            or len(self.plans) == 1
            or math.isnan(sigma2)
            or math.isnan(mu2)
        ):
            return batch
        from .gain import scale_at_efficiency

        scale = scale_at_efficiency(sigma2, mu2, target)
        wanted = min(
            scale * self.plan.base_batch_size,
            self.plans[-1].global_batch_size,
            _GROWTH * batch,
        )
        wanted = max(wanted, self.plans[0].global_batch_size)
        return wanted if max(wanted / batch, batch / wanted) >= _STEADY else batch

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, the same on every worker: the wanted
        batch of a run that follows the noise.
        """
        return (
            {"batch": self._wanted}
            if self._settings.target_efficiency is not None
            else {}
        )

    def resume(
        self,
        state: Mapping[str, Any],
        tau: float,
        moments: Callable[[], tuple[float, float]],
    ) -> None:
        """Continue from a checkpoint, also on another number of workers: towards the
        same batch.

        Args:
            state: The result of :meth:`state`; empty where the run did not follow the
                noise so far.
            tau: τ of the checkpoint.
            moments: Returns the averages in the checkpoint.
        """
        self._mark = self._mark_at(tau)
        if state and self._settings.target_efficiency is not None:
            self._wanted = state["batch"]
            self.plan = nearest_plan(self.plans, self._wanted)
        elif len(self.plans) > 1:
            self._decide(moments)
