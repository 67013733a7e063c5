"""The driver's request to stop, as rank 0 of a run sees it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ..run.observe.step import Listener
from .driver_channel import DriverClient

_INTERVAL_S = 0.5


class StopRequest(Listener):
    """Asks the driver's channel twice a second whether a stop is requested, in a thread: no step waits for an answer.

    The thread ends at a request, at the end of the run, or when the channel is gone.

    Args:
        client: The connection to the driver.

    Attributes:
        requested: Whether the driver requests a stop of this start.
    """

    def __init__(self, client: DriverClient) -> None:
        self.requested = False
        self._client = client
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="ray_adascale-stop-request", daemon=True)
        self._thread.start()

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """End the thread."""
        self._ended.set()

    def _ask(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            asked = self._client.stop_requested()
            if asked is None:
                return
            if asked:
                self.requested = True
                return
