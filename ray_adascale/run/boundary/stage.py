"""Values and interfaces of a step boundary: the stages that act there, and what a
stage reads of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ...batch import StepPlan
from ...optim.schedule import BaseSchedule, EffectiveSchedule


@dataclass
class LoopState:
    """Numbers and metrics of the loop itself, stored in a checkpoint's state under
    these names.

    Attributes:
        iterations: Optimizer steps, including steps that were skipped for a non-finite
            gradient.
        progress: Σ r over the steps.
        scales: Σ S over the steps, including skipped ones.
        clipped: Steps that were clipped at a multiple of the expected norm.
        attempt: Number of this start of the run, from 0: that of its trace. On other
            workers than rank 0, which store and observe nothing, it may be too low.
        recorded: The user's metrics, each as last recorded.
        metrics: The last step's metrics and the user's.
        stopped: The reason for the end of the loop, or None.
    """

    iterations: int = 0
    progress: float = 0.0
    scales: float = 0.0
    clipped: int = 0
    attempt: int = 0
    recorded: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """State of a run at a step boundary, to be reported.

    Attributes:
        metrics: The last step's metrics and the user's.
        effective_steps: τ.
        schedule: The schedule of the base run, with T.
        stopped: The reason for the end of the run; None before the end.
        evaluated: Whether the model was evaluated at this τ.
        user_keys: Names of the user's metrics, which are those of the last evaluation.
    """

    metrics: Mapping[str, Any]
    effective_steps: float
    schedule: BaseSchedule
    stopped: str | None = None
    evaluated: bool = False
    user_keys: Collection[str] = ()


class BoundaryFlags:
    """Actions that are due at a step boundary: the bits of one number, which is summed
    over the workers.

    Rank 0 alone measures intervals: if each worker went by its own clock, workers would
    wait in different collectives. So only rank 0 sends the bits below BUSY, and each
    worker may send BUSY.
    """

    NONE: Final = 0
    REPORT: Final = 1
    CHECKPOINT: Final = 2
    POLL: Final = 4
    """Check for a preemption notice."""
    STOP: Final = 8
    """End this start of the run, with a checkpoint."""
    STALLED: Final = 16
    """End the run: the evaluations have stopped improving."""
    BUSY: Final = 32
    """A worker is still writing or uploading the previous checkpoint."""

    @classmethod
    def from_sum(cls, total: float) -> int:
        """Return the flags of all workers together, from the sum of each worker's
        number.
        """
        busy, bits = divmod(int(total), cls.BUSY)
        return bits | (cls.BUSY if busy else cls.NONE)


class IntervalTimer:
    """Measures whether an interval has passed.

    Args:
        seconds: The interval; inf for one that never passes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now."""
        self._began = time.monotonic()
        self.ends_at = self._began + self._seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the interval began."""
        return time.monotonic() - self._began

    @property
    def due(self) -> bool:
        """Whether the interval has passed."""
        return time.monotonic() >= self.ends_at


NEVER = IntervalTimer(math.inf)
ALWAYS = IntervalTimer(-math.inf)


class RunAtBoundary(Protocol):
    """The part of :class:`ray_adascale.Run` that stages use."""

    state: LoopState
    schedule: EffectiveSchedule
    plan: StepPlan
    base_schedule: BaseSchedule

    @property
    def effective_steps(self) -> float: ...

    @property
    def reported(self) -> bool: ...

    def set_plan(self, plan: StepPlan) -> None: ...

    def record(self, **metrics: Any) -> None: ...

    def step_report(self) -> StepReport: ...

    def report(self, *, save: bool) -> Path | None: ...


class HasState(Protocol):
    """A part of a run with a state of its own in the checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Stage:
    """Base class of the objects that act at step boundaries, on all workers together
    and in one fixed order.
    """

    timer: IntervalTimer = NEVER
    """From its end on the stage is asked for its :meth:`flags`."""

    def next_tau(self) -> float:
        """Return a τ before which this stage does not have to act for τ's sake."""
        return math.inf

    def flags(self) -> int:
        """Return this worker's :class:`BoundaryFlags`. Of other workers than rank 0
        only BUSY counts.
        """
        return BoundaryFlags.NONE

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        """Act at a step boundary. Collective.

        Args:
            run: The run. The host has read all of its steps.
            flags: The flags of all workers together, the same on all of them.

        Returns:
            The reason to end the run; None to go on.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this stage's part of a checkpoint: JSON values, the same on all
        workers.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of a checkpoint's state."""


class Stages:
    """All stages of a run, as the loop asks and runs them.

    Args:
        stages: In the order in which they act.
        rank: This worker's.

    Attributes:
        sent: The flags of all workers in the steps that were read since the stages last
            acted.
    """

    def __init__(self, stages: Sequence[Stage], rank: int) -> None:
        self._stages = stages
        self.sent = BoundaryFlags.NONE
        self._counted = ~BoundaryFlags.NONE if rank == 0 else BoundaryFlags.BUSY
        self._next_tau = min(stage.next_tau() for stage in stages)

    def flags(self) -> int:
        """Return this worker's flags. Other workers than rank 0 send BUSY only."""
        now = time.monotonic()
        flags = BoundaryFlags.NONE
        for stage in self._stages:
            if now >= stage.timer.ends_at:
                flags |= stage.flags()
        return flags & self._counted

    def due(self, tau: float) -> bool:
        """Return whether a stage may have to act by τ, or by the flags that were
        read.
        """
        return tau >= self._next_tau or bool(self.sent & ~BoundaryFlags.BUSY)

    def act(self, run: RunAtBoundary, tau: float) -> str | None:
        """Let the stages act at τ, if one may have to, until one returns a reason to
        end the run. Collective.

        From T on they don't act: the loop ends the run.
        """
        due = not run.base_schedule.ended_at(tau) and self.due(tau)
        flags = self.sent
        self.sent = BoundaryFlags.NONE
        if not due:
            return None
        for stage in self._stages:
            if (reason := stage.act(run, flags)) is not None:
                return reason
        self._next_tau = min(stage.next_tau() for stage in self._stages)
        return None
