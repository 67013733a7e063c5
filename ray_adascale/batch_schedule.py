"""The policy of a given schedule of batches."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ._errors import SettingError
from .batch_policy import BatchController, BatchLimits, BatchPlan, BatchPolicy, Position

Unit = Literal["share", "steps", "examples"]


@dataclass(frozen=True)
class GivenBatches:
    """Batches and their starts.

    Attributes:
        unit: Unit of the starts: shares of T, effective steps, or examples that the run has taken.
        starts: Where each batch begins, ascending from 0.
        sizes: Examples of each batch.
    """

    unit: Unit
    starts: tuple[float, ...]
    sizes: tuple[int, ...]

    def check(self, base_batch_size: int) -> None:
        """Check that no batch is smaller than the base batch.

        Raises:
            SettingError: One is.
        """
        if min(self.sizes) < base_batch_size:
            raise SettingError(
                f"Invalid {{}}: the batch of {min(self.sizes)} is smaller than base_batch_size={base_batch_size}, so the scale "
                "would be below 1.",
                batch_schedule=str(self),
            )

    def phase(self, at: Position, total_steps: float) -> int:
        """Return the number of the batch at a step boundary, from 0 on.

        Args:
            at: The step boundary.
            total_steps: T.
        """
        now = {
            "share": at.effective_steps / total_steps,
            "steps": at.effective_steps,
            "examples": at.examples,
        }[self.unit]
        return bisect.bisect_right(self.starts, now) - 1

    def __str__(self) -> str:
        """Return the schedule as the command line reads it."""
        scale, end = {"share": (100, "%"), "steps": (1, ""), "examples": (1, "examples")}[self.unit]
        starts = ["0", *(f"{start * scale:.10g}{end}" for start in self.starts[1:])]
        return ",".join(f"{start}:{size}" for start, size in zip(starts, self.sizes, strict=True))


def read_schedule(given: object) -> GivenBatches:
    """Return the schedule of ``AdaScaleConfig(batch_schedule=...)``.

    Args:
        given: Pairs of start and batch, or such pairs as text, "0:32,20%:128".

    Raises:
        SettingError: It is neither, or its starts or batches are out of their range.
    """

    def invalid(why: str) -> SettingError:
        return SettingError(
            f"Invalid {{}}: {why} Must be pairs of start and batch, as [(0, 32), (0.2, 128)] or '0:32,20%:128'. The first start "
            "is 0. The others ascend, and are all shares of the run (0.2, or '20%'), all effective steps (300), or all examples "
            "('5000 examples').",
            batch_schedule=given,
        )

    pairs: list[Any] = []
    if isinstance(given, str):
        pairs = [pair.rpartition(":")[::2] for pair in given.split(",")]
    elif isinstance(given, Sequence):
        pairs = list(given)
    if not pairs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise invalid("it has no pairs.")
    starts, sizes = [], []
    units = set()
    for start, size in pairs:
        found = _read_start(start)
        if found is None:
            raise invalid(f"{start!r} is no start.")
        number, unit = found
        starts.append(number)
        if number > 0:
            units.add(unit)
        sizes.append(int(size) if isinstance(size, str) and size.strip().isdecimal() else size)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise invalid(f"{size!r} is no batch, a positive number of examples.")
    if starts[0] != 0:
        raise invalid(f"the first batch begins at {pairs[0][0]}.")
    if len(units) > 1:
        raise invalid("its starts have several units.")
    if any(a >= b for a, b in itertools.pairwise(starts)):
        raise invalid("its starts do not ascend.")
    return GivenBatches(units.pop() if units else "steps", tuple(starts), tuple(sizes))


def _read_start(start: object) -> tuple[float, Unit] | None:
    """Return number and unit of a start; None if it has no valid form."""
    if isinstance(start, str):
        parts = re.fullmatch(r"\s*(\d*\.?\d+)\s*(%|examples)?\s*", start)
        if parts is None:
            return None
        digits, end = parts.groups()
        if end == "%":
            start = float(digits) / 100
        elif digits.isdecimal():
            return int(digits), "steps" if end is None else "examples"
        else:
            start = float(digits) if end is None else None
    if isinstance(start, bool):
        return None
    if isinstance(start, float):
        return (start, "share") if 0 <= start < 1 else None
    return (start, "steps") if isinstance(start, int) and start >= 0 else None


@dataclass(frozen=True, kw_only=True)
class ScheduledBatch(BatchPolicy):
    """The policy of a schedule of batches. Each begins at the first step boundary that has reached its start.

    A batch is made in as few passes as possible. It is larger than in the schedule where a pass would be too small for the
    workers, and smaller where the bounds say so. Where the scale is above 1 at some time, each step has at least two gradient
    samples, since one sample tells nothing about the noise.

    Attributes:
        limits: The batches that workers can make, and the bounds of the largest one.
        schedule: The schedule.
    """

    limits: BatchLimits
    schedule: GivenBatches

    @property
    def changes_batch(self) -> bool:
        return True

    def plan(self, world_size: int) -> BatchPlan:
        return self.plans(world_size)[0]

    def plans(self, world_size: int) -> list[BatchPlan]:
        """Return the plan of each batch.

        Raises:
            SettingError: The bounds leave no batch, or a batch is smaller than the base batch.
        """
        fewest = self._fewest(world_size)
        return [self.limits.bounded_plan(size, world_size, fewest) for size in self.schedule.sizes]

    def _fewest(self, world_size: int) -> int:
        """Return the fewest passes of a step, after a check that the workers can make the batches."""
        base = self.limits.base_batch_size
        self.schedule.check(base)
        fewest = 2 if world_size == 1 and max(self.schedule.sizes) > base else 1
        self.limits.smallest(world_size, fewest, batch_schedule=str(self.schedule))
        return fewest

    def controller(
        self, world_size: int, *, total_steps: float, window: float, largest: float = math.inf
    ) -> ScheduleController:
        return ScheduleController(self.schedule, self.plans(world_size), total_steps)


class ScheduleController(BatchController):
    """Chooses the batch of each step by a schedule. The choice depends on the run's position alone, so there is no state.

    Args:
        batches: The batches and their starts.
        plans: The plan of each batch.
        total_steps: T.

    Attributes:
        plans: The plan of each batch.
        plan: The plan of the next step.
    """

    def __init__(self, batches: GivenBatches, plans: Sequence[BatchPlan], total_steps: float) -> None:
        self._batches = batches
        self.plans = plans
        self._total_steps = total_steps
        self._phase = 0
        self.plan = plans[0]

    def due_by(self, at: Position) -> bool:
        return self._batches.phase(at, self._total_steps) != self._phase

    def after_step(self, at: Position, moments: Callable[[], tuple[float, float]]) -> BatchPlan:
        self._phase = self._batches.phase(at, self._total_steps)
        self.plan = self.plans[self._phase]
        return self.plan

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, state: Mapping[str, Any], at: Position, moments: tuple[float, float]) -> None:
        self.after_step(at, lambda: moments)
