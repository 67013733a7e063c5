"""The thread of a worker that sends its position in the loop to the driver's channel."""

from __future__ import annotations

import os
import threading
import time

import ray

from ..run.observe.pulse import Phase, Pulse
from .beats import Beat
from .driver_channel import DriverClient

_INTERVAL_S = 5.0
"""Most seconds between beats of one worker: a thousand workers then send 200 messages a second."""


class Heartbeat:
    """Sends the position of this worker every few seconds, from a thread.

    Args:
        client: The connection to the driver.
        pulse: The position.
        rank: This worker's number.
        world_size: Number of workers.
    """

    def __init__(self, client: DriverClient, pulse: Pulse, rank: int, world_size: int) -> None:
        self._client, self._pulse = client, pulse
        self._rank, self._world_size = rank, world_size
        self._node, self._host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray_adascale-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send a last beat, and end the thread."""
        self._pulse.enter(Phase.ENDED)
        self._ended.set()

    def _run(self) -> None:
        while True:
            self._client.beat(self._beat())
            if self._ended.is_set() or not self._client.connected:
                return
            limit_s = self._pulse.limit_s
            self._ended.wait(_INTERVAL_S if limit_s is None else min(_INTERVAL_S, limit_s / 4))

    def _beat(self) -> Beat:
        position, limit_s = self._pulse.position, self._pulse.limit_s
        seconds = time.monotonic() - position.since
        return Beat(
            self._rank,
            self._world_size,
            position.steps,
            position.phase,
            seconds,
            limit_s,
            self._node,
            self._host,
            os.getpid(),
        )
