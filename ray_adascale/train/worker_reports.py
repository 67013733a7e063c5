"""What a worker of a run sends while it trains: its newest metrics, to the driver
and as Ray's gauges, and its heartbeats.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
import weakref

import ray
from ray.util.metrics import Gauge

from ..run.boundary.stage import IntervalTimer
from ..run.observe.eta import EtaTracker
from ..run.observe.metrics import METRICS
from ..run.observe.pulse import Phase, Pulse
from ..run.observe.step import Listener, Step
from .driver_channel import DriverClient
from .hangs import Beat

_METRICS_S = 1.0
_ASK_S = 0.5
_BEAT_S = 5.0
"""Most seconds between beats of one worker: a thousand workers then send 200
messages a second.
"""

GAUGES = (
    "gain",
    "scale",
    "effective_steps",
    "efficiency",
    "lr",
    "loss",
    "steps_left",
    "seconds_left",
)
GAUGE_TAGS = ("ray_train_run_name", "ray_train_worker_world_rank")
"""Ray's own dashboards filter by these tags."""
_MOST_GAUGES = 50
"""Largest number of gauges of one run, with the user's metrics. Each gauge is a time
series in the metrics store.
"""


class LiveMetrics(Listener):
    """Sends the newest metrics once a second and at T: to the driver, and as gauges for
    Prometheus and Grafana.

    Args:
        run_name: The run's name, a tag of each gauge.
        rank: The worker's number, a tag of each gauge.
        client: The connection to the driver.
        tracker: Estimates the time left.
    """

    def __init__(
        self, run_name: str, rank: int, client: DriverClient, tracker: EtaTracker
    ) -> None:
        self._tags = dict(zip(GAUGE_TAGS, (run_name, str(rank)), strict=True))
        self._client = client
        self._tracker = tracker
        self._gauges: dict[str, Gauge] = {}
        self._timer: IntervalTimer | None = None

    def after_step(self, step: Step) -> None:
        """Send the metrics, if the last ones are old enough or the run has reached
        T.
        """
        if (
            self._timer is not None
            and not self._timer.due
            and step.result.effective_steps < step.total_steps
        ):
            return
        self._timer = IntervalTimer(_METRICS_S)
        values = {**step.metrics, **self._tracker.eta.as_metrics()}
        self._client.put({**values, "total_steps": step.total_steps})
        own = [
            key
            for key, value in step.metrics.items()
            if key not in METRICS and isinstance(value, int | float)
        ]
        for name in [*GAUGES, *own][:_MOST_GAUGES]:
            if name not in self._gauges:
                # names that Prometheus allows
                allowed = re.sub(r"\W", "_", name, flags=re.ASCII)
                self._gauges[name] = Gauge(
                    f"adascale_{allowed}", f"ray_adascale: {name}", GAUGE_TAGS
                )
            self._gauges[name].set(float(values[name]), self._tags)


class Heartbeat:
    """Sends the position of this worker every few seconds, from a thread: no step waits
    for an answer.

    Rank 0 sends it twice a second, and learns from the answer whether the driver
    requests a stop.

    Args:
        client: The connection to the driver.
        pulse: The position.
        rank: This worker's number.
        world_size: Number of workers.

    Attributes:
        stop_requested: Whether the driver requests a stop of this start.
    """

    def __init__(
        self, client: DriverClient, pulse: Pulse, rank: int, world_size: int
    ) -> None:
        self.stop_requested = False
        self._client = client
        self._pulse = pulse
        self._rank = rank
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        self._beat = functools.partial(
            Beat,
            rank=rank,
            world_size=world_size,
            node=node,
            host=host,
            pid=os.getpid(),
        )
        self._ended = threading.Event()
        self.thread = threading.Thread(
            target=self._run, name="ray_adascale-heartbeat", daemon=True
        )
        self.thread.start()
        _heartbeats.add(self)

    def stop(self) -> None:
        """Send a last beat, and end the thread."""
        self._ended.set()

    def _run(self) -> None:
        last = False
        while not last and self._client.connected:
            last = self._ended.is_set()
            position = self._pulse.position
            limit_s = self._pulse.limit_s
            seconds = time.monotonic() - position.since
            phase = Phase.ENDED if last else position.phase
            beat = self._beat(
                steps=position.steps, phase=phase, seconds=seconds, limit_s=limit_s
            )
            self.stop_requested |= self._client.beat(beat, wait=self._rank == 0)
            if not last:
                most = _ASK_S if self._rank == 0 else _BEAT_S
                self._ended.wait(most if limit_s is None else min(most, limit_s / 4))


_heartbeats: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def end_heartbeats() -> None:
    """Stop the heartbeats of this process, which Ray is about to end."""
    for heartbeat in list(_heartbeats):
        heartbeat.stop()
