"""The driver's thread beside a run: what happens is logged, missing resources are
named, and Ctrl-C is handled.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util import remove_placement_group

from .._files import ANSWER_LIMIT_S, in_thread
from .cluster import alive_nodes, lacking, lost_nodes, start_message
from .driver_channel import Status
from .hangs import HangWatch
from .run_lock import RunLock

_log = logging.getLogger(__name__)

_POLL_S = 0.5
ANSWER_S = 5.0
"""Time limit of the driver for an answer of the channel. It tries again."""
_ROOM_S = 5.0, 30.0
"""Seconds of the workers' start before the driver logs the resources that the
cluster lacks, and between repetitions.
"""
_STOP_S = 60.0
"""Time limit for the workers' checkpoint after Ctrl-C. While it is stored, the limit of
the time without progress.
"""
_STORING_S = 30.0
"""Seconds of a checkpoint's storing before the driver logs it, and between
repetitions.
"""


class DriverMonitor:
    """The driver's thread beside a run: keeps the newest metrics, logs events and
    missing resources, and handles Ctrl-C.

    Args:
        channel: The channel of the workers' messages.
        needs: Resources of one worker, and the fewest workers.
        lock: The lock on the run's folder. The run ends if another process has taken
            the lock over.
        on_start: Called once, in a thread of its own, when the workers are in their
            loop. The end of the context waits for it for a few seconds.
    """

    def __init__(
        self,
        channel: Any,
        needs: tuple[dict[str, float], int],
        lock: RunLock,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.status = Status(None, False, [], 0)
        """The newest status of the workers."""
        self.interrupts = 0
        """Number of Ctrl-C so far."""
        self.controller: Any = None
        """Ray Train's controller, to be killed after Ctrl-C."""
        self._channel = channel
        self._needs = needs
        self._lock = lock
        self._on_start = on_start
        self._after_start: concurrent.futures.Future[None] | None = None
        self._nodes: dict[str, str] = {}
        self._answered = 0
        self._ends_at: float | None = None
        self._waiting_since = time.monotonic()
        self._logged_at: float | None = None
        self._storing_again = -math.inf
        self._wake = threading.Event()
        self._done = False
        self._hangs = HangWatch()
        self._thread = threading.Thread(
            target=self._run, name="ray_adascale-listener", daemon=True
        )

    def interrupt(self) -> None:
        """Register a Ctrl-C in the main thread. The monitor's thread handles it, at its
        next look.

        A signal's handler must not wait for a lock: a second signal may come while the
        first one's handler has it.
        """
        self.interrupts += 1

    @property
    def ends(self) -> bool:
        """Whether the run is to end."""
        return self.interrupts > 0 or self._lock.lost is not None

    def end_controller(self, placed: Any) -> None:
        """Kill a controller that has failed, and remove its placement group, which
        Ray keeps to the end of the job.
        """
        if self.controller is not None:
            ray.kill(self.controller)
        if placed is not None:
            remove_placement_group(placed)
        self.controller = None

    def __enter__(self) -> DriverMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done = True
        self._wake.set()
        self._thread.join(ANSWER_S + 1)
        if self._after_start is not None:
            concurrent.futures.wait([self._after_start], ANSWER_LIMIT_S)

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait(_POLL_S)
            self._wake.clear()
            last = self._done
            # A failure here must not fail the run, and Ray reports its own failures.
            with contextlib.suppress(Exception):
                self._answer_interrupts()
            with contextlib.suppress(Exception):
                self._apply(
                    ray.get(
                        self._channel.status.remote(self.status.sent), timeout=ANSWER_S
                    )
                )
            with contextlib.suppress(Exception):
                self._log_missing_resources()

    def _apply(self, status: Status) -> None:
        before = self.status
        self.status = status
        if before.running and not status.running:
            self._waiting_since = time.monotonic()
            self._logged_at = None
        for level, text in status.events:
            _log.log(level, "%s", text)
        self._hangs.log_quiet(status.quiet, time.monotonic())
        if status.quiet is None:
            self._hangs.log_slow(status.slow, time.monotonic())
        self._log_storing(time.monotonic())
        if status.running and not before.running:
            self._nodes = alive_nodes()
        if status.running and self._on_start is not None:
            # it may write to storage, which may hang
            self._after_start = in_thread(_with_a_warning(self._on_start))
            self._on_start = None
        self._hangs.look(status.hang)

    def _log_storing(self, now: float) -> None:
        """Log a checkpoint that takes long to store, every half minute."""
        storing = self.status.storing
        if storing is None or storing.seconds < _STORING_S:
            self._storing_again = -math.inf
        elif now >= self._storing_again:
            self._storing_again = now + _STORING_S
            _log.warning("%s.", storing.description())

    def _log_missing_resources(self) -> None:
        now = time.monotonic()
        patience, every = _ROOM_S
        if self.status.running or self._done or now - self._waiting_since < patience:
            return
        if self._logged_at is not None and now - self._logged_at < every:
            return
        short = lacking(*self._needs)
        if short is None:
            lost = lost_nodes(self._nodes)
            if not lost and now - self._waiting_since < every:
                return
            text = start_message(*self.status.awaited, lost)
            _log.info(
                "Still starting after %.0f s: %s Ctrl-C ends the run.",
                now - self._waiting_since,
                text,
            )
        else:
            _log.warning(
                "Waiting for nodes: the run needs %s. It begins when there is room; "
                "Ctrl-C ends it.",
                short,
            )
        self._logged_at = now

    def _answer_interrupts(self) -> None:
        now = time.monotonic()
        if self.interrupts > self._answered:
            first = self._answered == 0
            self._answered = self.interrupts
            if first and self.status.running:
                self._ends_at = now + _STOP_S
                self._channel.request_stop.remote()
                _log.warning(
                    "Interrupted: a checkpoint is written at the next step boundary. "
                    "Ctrl-C again ends at once."
                )
            else:
                self._ends_at = now
        if self._lock.lost is not None and self._ends_at is None:
            self._ends_at = now
        storing = self.status.storing
        if self.interrupts == 1 and self._ends_at is not None and storing is not None:
            # what has been stored so far would be lost
            left = _STOP_S - storing.still_s
            self._ends_at = max(self._ends_at, now + left)
        if (
            self._ends_at is not None
            and now >= self._ends_at
            and self.controller is not None
        ):
            ray.kill(self.controller)
            self._ends_at = math.inf


def _with_a_warning(on_start: Callable[[], None]) -> Callable[[], None]:
    """Return a function that logs an error of another one."""

    def call() -> None:
        try:
            on_start()
        except Exception as e:
            _log.warning("After the run's start: %s: %s", type(e).__name__, e)

    return call
