"""What is due at a step boundary by the clock: a report, a checkpoint, a look for preemption notices."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from ..config import AdaScaleConfig
from .backend import Backend

__all__ = ["Clocks", "Due"]

_log = logging.getLogger(__name__)


class Due(NamedTuple):
    """What is due at a step boundary: above zero for yes. The workers' are summed, so that all of them decide alike.

    Attributes:
        report: A report to the backend.
        checkpoint: A checkpoint.
        poll: A look for preemption notices.
        busy: Whether some worker still writes or uploads the checkpoint before.
        stop: The end of this start, as somebody asked for it.
    """

    report: float
    checkpoint: float
    poll: float
    busy: float
    stop: float = 0.0

    @property
    def anything(self) -> bool:
        """Whether there is something to do, now or as soon as nobody is busy."""
        return max(self.report, self.checkpoint, self.poll, self.stop) > 0

    def together_with(self, other: Due) -> Due:
        """What is due by either."""
        return Due(*map(max, self, other))


class Clocks:
    """One worker's clocks. Rank 0's decide for all: workers that each went by their own would wait in other collectives.

    Args:
        config: Seconds between reports and between checkpoints.
        backend: Seconds between looks for a notice, and the notice.
    """

    def __init__(self, config: AdaScaleConfig, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._notice: str | None = None
        self._reported = self._saved = self._polled = time.monotonic()
        self._examples = 0

    def due(self, *, in_flight: bool, busy: bool) -> Due:
        """This worker's part of what is due now.

        Args:
            in_flight: A checkpoint is; none other is due then.
            busy: This worker still writes or uploads one.
        """
        if self._backend.rank != 0:
            return Due(report=0.0, checkpoint=0.0, poll=0.0, busy=float(busy))
        now = time.monotonic()
        return Due(
            report=float(now - self._reported >= self._config.report_every_s),
            checkpoint=float(not in_flight and now - self._saved >= self._config.checkpoint_every_s),
            poll=float(now - self._polled >= self._backend.preemption_poll_s),
            busy=float(busy),
            stop=float(self._backend.stop_requested),
        )

    def reported(self) -> None:
        """A report was made just now."""
        self._reported = time.monotonic()
        self._examples = 0

    def saved(self) -> None:
        """A checkpoint was written, or begun, just now."""
        self._saved = time.monotonic()

    def took(self, examples: int) -> None:
        """A step over so many examples has ended."""
        self._examples += examples

    @property
    def examples_per_s(self) -> float:
        """Since the last report."""
        return self._examples / max(time.monotonic() - self._reported, 1e-9)

    def preempted(self, step: int) -> bool:
        """Whether there is a new notice. All workers together.

        Args:
            step: Optimizer steps so far, for the log.
        """
        self._polled = time.monotonic()
        notice, before = self._backend.preemption_notice(), self._notice
        self._notice = notice
        new = notice is not None and notice != before
        if new and self._backend.rank == 0:
            _log.warning("Preemption notice: %s. Writing a checkpoint at step %d.", notice, step)
        return new
