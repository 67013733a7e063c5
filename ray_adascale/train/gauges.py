"""Ray's gauges of a run, for Prometheus and Grafana: names, tags, and how often they are set."""

from __future__ import annotations

import re

from ray.util.metrics import Gauge

from ..run.boundary.stage import IntervalTimer
from ..run.observe.eta import EtaTracker
from ..run.observe.metrics import METRICS
from ..run.observe.step import Listener, Step

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
