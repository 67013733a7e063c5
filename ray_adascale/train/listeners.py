"""Listeners of a run on Ray workers: Ray's gauges, and the driver."""

from __future__ import annotations

import re

from ray.util.metrics import Gauge

from ..run.eta import EtaTracker
from ..run.metrics import METRICS
from ..run.step import IntervalTimer, Listener, Step
from .driver_channel import DriverClient

__all__ = ["DriverUpdates", "Gauges"]

_GAUGES = ("gain", "scale", "effective_steps", "efficiency", "lr", "loss", "steps_left", "seconds_left")
_MOST_GAUGES = 50
"""Largest number of gauges of one run, with the user's metrics. Each gauge is a time series in the metrics store."""
_INTERVAL_S = 1.0


class Gauges(Listener):
    """Sets Ray's gauges once a second.

    Args:
        run_name: The run's name, a tag of each gauge.
        rank: The worker's number, a tag of each gauge.
        tracker: Estimates the time left.
    """

    def __init__(self, run_name: str, rank: int, tracker: EtaTracker) -> None:
        # Ray's own dashboards filter by these tags.
        self._tags = {"ray_train_run_name": run_name, "ray_train_worker_world_rank": str(rank)}
        self._tracker = tracker
        self._gauges: dict[str, Gauge] = {}
        self._timer: IntervalTimer | None = None

    def after_step(self, step: Step) -> None:
        """Set the gauges, if the last values are old enough."""
        if self._timer is not None and not self._timer.due:
            return
        self._timer = IntervalTimer(_INTERVAL_S)
        eta = self._tracker.eta
        values = {**step.metrics, "steps_left": eta.steps, "seconds_left": eta.seconds}
        own = [key for key, value in step.metrics.items() if key not in METRICS and isinstance(value, int | float)]
        for name in [*_GAUGES, *own][:_MOST_GAUGES]:
            if name not in self._gauges:
                allowed = re.sub(r"\W", "_", name, flags=re.ASCII)  # names that Prometheus allows
                self._gauges[name] = Gauge(f"adascale_{allowed}", f"ray_adascale: {name}", tuple(self._tags))
            self._gauges[name].set(float(values[name]), self._tags)


class DriverUpdates(Listener):
    """Sends the latest metrics to the driver once a second, and reads whether the driver requests a stop.

    Args:
        client: The connection to the driver.
        tracker: Estimates the time left.

    Attributes:
        stop_requested: Whether the driver requests a stop of this start.
    """

    def __init__(self, client: DriverClient, tracker: EtaTracker) -> None:
        self._client = client
        self._tracker = tracker
        self._timer: IntervalTimer | None = None
        self.stop_requested = False

    def after_step(self, step: Step) -> None:
        """Send the metrics, if the last message is old enough or the run has reached T."""
        if self._timer is not None and not self._timer.due and step.tau < step.total_steps:
            return
        self._timer = IntervalTimer(_INTERVAL_S)
        self._client.put({**step.metrics, "total_steps": step.total_steps, **self._tracker.eta.as_metrics()})
        self.stop_requested = self._client.look()
