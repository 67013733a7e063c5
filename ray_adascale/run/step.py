"""Values and interfaces of the training loop: one optimizer step, the stages that act after it, the listeners that watch it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from ..batch_policy import BatchPlan

if TYPE_CHECKING:
    from .loop import Run

__all__ = ["BoundaryFlags", "IntervalTimer", "Listener", "Stage", "Step"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, with its numbers on the host.

    Attributes:
        number: Optimizer steps of the run so far, with this one and the skipped ones.
        plan: The step's batch.
        total_steps: T.
        tau_before: τ before the step.
        tau: τ after the step.
        gain: r.
        skipped: Whether a gradient was not finite, so that weights and τ stayed.
        sigma2: σ² of this step alone, not averaged; NaN where the step had one gradient sample or was skipped.
        mu2: μ² of this step alone, likewise.
        metrics: The metrics to report: the run's, and the user's as last recorded. A listener may add keys.
        row: The step's row in the trace. A listener may add keys.
    """

    number: int
    plan: BatchPlan
    total_steps: int
    tau_before: float
    tau: float
    gain: float
    skipped: bool
    sigma2: float
    mu2: float
    metrics: dict[str, Any]
    row: dict[str, Any]


class Listener:
    """Base class of the objects that watch a run on rank 0. A listener decides nothing and waits for no other worker."""

    def after_step(self, step: Step) -> None:
        """Process an optimizer step. Called once for each, in order."""

    def recorded(self, metrics: Mapping[str, Any]) -> None:
        """Process metrics that the user recorded for the last step."""

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Process the end of the run.

        Args:
            why: The reason, as in :attr:`ray_adascale.Run.stopped`.
            metrics: The last report's.
        """


class BoundaryFlags(IntFlag):
    """Actions that are due at a step boundary, as one number that is summed over the workers.

    Intervals are measured by rank 0 alone, because workers with clocks of their own would wait in different collectives. So only
    rank 0 sends the bits below BUSY, and every worker may add BUSY.
    """

    REPORT = 1
    CHECKPOINT = 2
    POLL = 4
    """Poll for preemption notices."""
    STOP = 8
    """End this start of the run, with a checkpoint."""
    STALLED = 16
    """End the run: the evaluations have stopped improving."""
    BUSY = 32
    """A worker still writes or uploads the previous checkpoint."""

    @classmethod
    def from_sum(cls, total: float) -> BoundaryFlags:
        """Return the flags that all workers share, from the sum of their numbers."""
        busy, bits = divmod(int(total), cls.BUSY.value)
        return cls(bits) | (cls.BUSY if busy else cls(0))


class IntervalTimer:
    """Measures whether an interval has passed.

    Args:
        seconds: The interval; inf for never.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now."""
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the interval began."""
        return time.monotonic() - self._began

    @property
    def due(self) -> bool:
        """Whether the interval has passed."""
        return self.elapsed >= self._seconds


class Stage:
    """Base class of the objects that act at step boundaries, on all workers together and in one fixed order."""

    def due_by(self, effective_steps: float) -> bool:
        """Return whether this stage may have to act once τ has reached this value, so that the host must read the step now."""
        return False

    def flags(self) -> BoundaryFlags:
        """Return what is due by this worker. Only rank 0's flags count, except BUSY."""
        return BoundaryFlags(0)

    def act(self, run: Run, flags: BoundaryFlags) -> str | None:
        """Do what is due. Collective.

        Args:
            run: At a step boundary; all its steps have been read.
            flags: What is due by all workers, the same on all of them.

        Returns:
            The reason to end the run; None to go on.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this stage's part of a checkpoint: JSON values, the same on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of a checkpoint's state."""
