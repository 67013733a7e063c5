"""Where a worker is in its loop, for a watch that finds a worker which hangs."""

from __future__ import annotations

import time
from collections import deque
from enum import Enum
from typing import NamedTuple

_LAST_STEPS = 20
"""Number of steps whose slowest sets the limit."""
_TIMES = 10.0
"""A step may take this many times as long as the slowest of the last steps."""
_AT_LEAST_S = 120.0
"""Least limit."""


class Phase(Enum):
    """A part of a worker's loop. The value completes the sentence "Worker 1 ..."."""

    START = "prepares its first step"
    DATA = "waits for its next batch"
    PASS = "computes a pass"
    REDUCTION = "waits for the gradients of the other workers"
    BOUNDARY = "evaluates, reports or writes a checkpoint"
    BETWEEN = "runs code of the loop between two steps"
    ENDED = "has ended"

    def __init__(self, text: str) -> None:
        self.timed = text.startswith(("waits", "computes"))
        """Whether this phase is part of a step's time."""


class Position(NamedTuple):
    """Where a worker is.

    Attributes:
        steps: Optimizer steps of the run so far.
        phase: What the worker does.
        since: Time at which the phase began, in seconds of ``time.monotonic()`` on the
            worker.
    """

    steps: int
    phase: Phase
    since: float


class Pulse:
    """The position of a worker. Its main thread writes it, and any thread may read it.

    Args:
        timeout_s: The limit of a step in seconds; None: ten times the slowest of the
            last 20 steps of this start, at least 120.

    Attributes:
        limit_s: Seconds that the present step may take; None before the first step of
            this start has ended.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._spent = 0.0  # in timed phases of the present step
        self._last: deque[float] = deque(maxlen=_LAST_STEPS)
        # replaced as a whole
        self._position: tuple[int, Phase, float] = 0, Phase.START, time.monotonic()
        self.limit_s: float | None = None

    @property
    def position(self) -> Position:
        """Where the worker is."""
        return Position(*self._position)

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        now = time.monotonic()
        steps, before, since = self._position
        if before.timed:
            self._spent += now - since
        self._position = steps, phase, now

    def end_step(self, steps: int) -> None:
        """End an optimizer step.

        Args:
            steps: Optimizer steps of the run so far.
        """
        self.enter(Phase.BOUNDARY)
        self._last.append(self._spent)
        self._spent = 0.0
        self._position = steps, Phase.BOUNDARY, self._position[2]
        limit = max(_AT_LEAST_S, _TIMES * max(self._last))
        self.limit_s = limit if self._timeout_s is None else self._timeout_s
