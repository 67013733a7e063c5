"""The policy of a given schedule of batches, and Seesaw's schedule, which follows from a recipe's learning-rate curve."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ._errors import SettingError
from .batch_policy import BatchController, BatchLimits, BatchPlan, BatchPolicy, Position

if TYPE_CHECKING:
    from .recipe import Recipe

Unit = Literal["share", "steps", "examples"]


class BatchSchedule(Protocol):
    """Says which batch a run has when."""

    def with_recipe(self, recipe: Recipe) -> BatchSchedule:
        """Return the schedule of a run of this recipe.

        Raises:
            ValueError: The recipe has no such schedule.
        """
        ...

    def batches(self, base_batch_size: int, largest: float = math.inf) -> GivenBatches:
        """Return the batches and their starts.

        Args:
            base_batch_size: B0.
            largest: Examples of the largest batch that a schedule chooses which is not given batch by batch.

        Raises:
            ValueError: The schedule has no batches for this B0.
        """
        ...


@dataclass(frozen=True)
class GivenBatches(BatchSchedule):
    """Batches and their starts.

    Attributes:
        unit: Unit of the starts: shares of T, effective steps, or examples that the run has taken.
        starts: Where each batch begins, ascending from 0.
        sizes: Examples of each batch.
    """

    unit: Unit
    starts: tuple[float, ...]
    sizes: tuple[int, ...]

    def with_recipe(self, recipe: Recipe) -> GivenBatches:
        return self

    def batches(self, base_batch_size: int, largest: float = math.inf) -> GivenBatches:
        if min(self.sizes) < base_batch_size:
            raise SettingError(
                f"Invalid {{}}: the batch of {min(self.sizes)} is smaller than base_batch_size={base_batch_size}, so the scale "
                "would be below 1.",
                batch_schedule=str(self),
            )
        return self

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


@dataclass(frozen=True)
class Seesaw(BatchSchedule):
    """Double the batch each time the base schedule has halved its learning rate.

    Seesaw decides the batch only. The scaling rule multiplies the base schedule's LR: "adascale" by the measured gain, which a
    doubling raises by a factor between 1 and 2. Under the published rule the LR falls by √2 at a doubling for Adam, which is
    ``rule="sqrt"``, and stays for SGD, which is ``rule=LinearRule(warmup=0)``. Source: Meterez et al., *Seesaw: Accelerating
    Training by Balancing Learning Rate and Batch Size Scheduling*, 2025 (arXiv 2510.14717).

    Attributes:
        halvings: Effective steps at which the batch doubles, ascending. Two equal ones double it twice at once. None:
            those of the run's recipe, see :meth:`of`.

    Raises:
        ValueError: The halvings are not positive and ascending.
    """

    halvings: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.halvings is None:
            return
        halvings = tuple(self.halvings)
        if not halvings or not halvings[0] > 0 or not all(a <= b for a, b in itertools.pairwise(halvings)):
            raise ValueError(
                f"Invalid Seesaw(halvings={self.halvings!r}). Must be positive effective steps, ascending."
            )
        object.__setattr__(self, "halvings", halvings)

    @classmethod
    def of(cls, recipe: Recipe) -> Seesaw:
        """Return the halvings of a recipe: where the LR of the first parameter group first is 1/2, 1/4, 1/8, ... of its peak.

        Only LRs after the peak count. An LR that rises again does not make the batch smaller. An LR of 0 is no halving.

        Raises:
            ValueError: The LR never falls to half of its peak.
        """
        curve = recipe.lr_curve[0]
        steps_per_call = recipe.base_steps_per_epoch if recipe.scheduler_unit == "epoch" else 1.0
        assert steps_per_call is not None
        peak = max(curve)
        halvings: list[float] = []
        for call in range(curve.index(peak), len(curve)):
            if curve[call] > 0:
                # An LR that rounding leaves just above one half counts as one half.
                count = math.floor(math.log2(peak / curve[call]) + 1e-9)
                halvings += [call * steps_per_call] * (count - len(halvings))
        if not halvings:
            raise SettingError(
                "Invalid {}: the learning rate of the recipe never falls to half of its peak, so the batch would never change. "
                "Leave it out, or give the batches and their starts.",
                batch_schedule="seesaw",
            )
        return cls(tuple(halvings))

    def with_recipe(self, recipe: Recipe) -> Seesaw:
        return Seesaw.of(recipe) if self.halvings is None else self

    def batches(self, base_batch_size: int, largest: float = math.inf) -> GivenBatches:
        if self.halvings is None:
            raise SettingError(
                "{} needs a recipe, whose learning-rate curve says where the batch doubles. Give one, or Seesaw(halvings=...) "
                "with the effective steps.",
                batch_schedule="seesaw",
            )
        starts, sizes = [0.0], [base_batch_size]
        for tau in self.halvings:
            if 2 * sizes[-1] > largest:
                break
            if tau == starts[-1]:
                sizes[-1] *= 2
            else:
                starts.append(tau)
                sizes.append(2 * sizes[-1])
        return GivenBatches("steps", tuple(starts), tuple(sizes))


def read_schedule(given: object) -> BatchSchedule:
    """Return the schedule of ``AdaScaleConfig(batch_schedule=...)``.

    Args:
        given: "seesaw", a schedule, pairs of start and batch, or such pairs as text, "0:32,20%:128".

    Raises:
        SettingError: It is none of these, or its starts or batches are out of their range.
    """

    def invalid(why: str) -> SettingError:
        return SettingError(
            f"Invalid {{}}: {why} Must be pairs of start and batch, as [(0, 32), (0.2, 128)] or '0:32,20%:128'. The first start "
            "is 0. The others ascend, and are all shares of the run (0.2, or '20%'), all effective steps (300), or all examples "
            "('5000 examples'). Or 'seesaw', with a recipe.",
            batch_schedule=given,
        )

    if isinstance(given, GivenBatches | Seesaw):
        return given
    if given == "seesaw":
        return Seesaw()
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
    schedule: BatchSchedule

    @property
    def changes_batch(self) -> bool:
        return True

    def plan(self, world_size: int) -> BatchPlan:
        return self.plans(world_size, self.schedule.batches(self.limits.base_batch_size))[0]

    def plans(self, world_size: int, batches: GivenBatches) -> list[BatchPlan]:
        """Return the plan of each batch.

        Raises:
            SettingError: The bounds leave no batch.
        """
        limits = self.limits
        fewest = self._fewest(world_size, batches)
        limits.smallest(world_size, fewest, batch_schedule=str(batches))  # refuses bounds that leave no batch
        return [limits.bounded_plan(size, world_size, fewest) for size in batches.sizes]

    def _fewest(self, world_size: int, batches: GivenBatches) -> int:
        """Return the fewest passes of a step in a run with these batches."""
        return 2 if world_size == 1 and max(batches.sizes) > self.limits.base_batch_size else 1

    def controller(
        self, world_size: int, *, total_steps: float, window: float, largest: float = math.inf
    ) -> ScheduleController:
        base = self.limits.base_batch_size
        batches = self.schedule.batches(base, self.limits.largest_choice(window, largest))
        return ScheduleController(batches, self.plans(world_size, batches), total_steps)

    def largest_pass(self, world_size: int, *, window: float, largest: int) -> int:
        batches = self.schedule.batches(self.limits.base_batch_size, self.limits.largest_choice(window, largest))
        return self.limits.largest_pass(max(batches.sizes), world_size, self._fewest(world_size, batches))


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

    def after_step(
        self,
        at: Position,
        moments: Callable[[], tuple[float, float]],
        seconds: float = 0.0,
        agree: Callable[[tuple[float, ...]], tuple[float, ...]] = tuple,
    ) -> BatchPlan:
        self._phase = self._batches.phase(at, self._total_steps)
        self.plan = self.plans[self._phase]
        return self.plan

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, state: Mapping[str, Any], at: Position, moments: tuple[float, float]) -> None:
        self.after_step(at, lambda: moments)
