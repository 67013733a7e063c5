"""The stages that process notices: an interrupt by the user, and the preemption of a
worker.
"""

from __future__ import annotations

import logging

from .backend import Backend
from .stage import ALWAYS, BoundaryFlags, IntervalTimer, RunAtBoundary, Stage
from .train_state import INTERRUPTED

_log = logging.getLogger(__name__)


class Interrupt(Stage):
    """Ends this start of the run if the backend requests it. A later start resumes
    the run.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        if type(backend).stop_requested is not Backend.stop_requested:
            self.timer = ALWAYS

    def flags(self) -> int:
        if self._backend.stop_requested:
            return BoundaryFlags.STOP
        return BoundaryFlags.NONE

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        # A stalled run ends for good: it must not be resumed.
        if not flags & BoundaryFlags.STOP or flags & BoundaryFlags.STALLED:
            return None
        if self._backend.rank == 0:
            _log.info(
                "Stopped after optimizer step %s. Its checkpoint is being written.",
                f"{run.state.iterations:,}",
            )
        return INTERRUPTED


class Preemption(Stage):
    """Saves a checkpoint, with a report, if there is a new preemption notice."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._notice: str | None = None
        self.timer = IntervalTimer(backend.preemption_poll_s)

    def flags(self) -> int:
        return BoundaryFlags.POLL if self.timer.due else BoundaryFlags.NONE

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        if not flags & BoundaryFlags.POLL:
            return None
        self.timer.restart()
        notice = self._backend.preemption_notice()
        before = self._notice
        self._notice = notice
        if notice is not None and notice != before:
            step = run.state.iterations
            if self._backend.rank == 0:
                _log.warning(
                    "Preemption notice: %s. Writing a checkpoint at step %d.",
                    notice,
                    step,
                )
            run.report(save=True)
        return None
