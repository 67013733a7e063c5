"""The newest metrics of a run, for the driver."""

from __future__ import annotations

from ..run.boundary.stage import IntervalTimer
from ..run.observe.eta import EtaTracker
from ..run.observe.step import Listener, Step
from .driver_channel import DriverClient

_INTERVAL_S = 1.0


class DriverUpdates(Listener):
    """Sends the latest metrics to the driver once a second.

    Args:
        client: The connection to the driver.
        tracker: Estimates the time left.
    """

    def __init__(self, client: DriverClient, tracker: EtaTracker) -> None:
        self._client = client
        self._tracker = tracker
        self._timer: IntervalTimer | None = None

    def after_step(self, step: Step) -> None:
        """Send the metrics, if the last message is old enough or the run has reached T."""
        if self._timer is not None and not self._timer.due and step.tau < step.total_steps:
            return
        self._timer = IntervalTimer(_INTERVAL_S)
        self._client.put({**step.metrics, "total_steps": step.total_steps, **self._tracker.eta.as_metrics()})
