"""What the workers and the controller of a run tell the driver, and what it asks of them: by one small actor.

Nobody waits for it. What can't be told is dropped, and a run goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..run.failure import is_users

__all__ = ["DriverChannel", "DriverClient", "News", "forward_warnings", "make_channel"]

_MOST_EVENTS = 1_000
"""Events that wait for the driver, at most."""

_package = logging.getLogger(__package__.partition(".")[0])


class News(NamedTuple):
    """What there is to know of a run.

    Attributes:
        metrics: The newest, with ``total_steps``; None before the first step, and after a failure.
        running: Whether the workers are in their loop.
        events: What happened since one asked last: (level of ``logging``, text of one line).
        told: Events so far.
    """

    metrics: dict[str, Any] | None
    running: bool
    events: list[tuple[int, str]]
    told: int


@ray.remote(num_cpus=0, max_restarts=0)
class DriverChannel:
    """Holds the newest metrics, what happened, and whether the run is to stop."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] | None = None
        self._running = False
        self._events: list[tuple[int, str]] = []
        self._told = 0
        self._stop = False
        self._said: set[str] = set()

    def put(self, metrics: dict[str, Any]) -> None:
        """The newest metrics."""
        self._metrics = metrics
        self._running = True

    def set_running(self, running: bool) -> None:
        """The workers are in their loop, or no longer."""
        self._running = running
        if not running:
            self._metrics = None

    def say(self, level: int, text: str, once: bool) -> None:
        """Something happened; ``once``: which is said once in a run, whoever says it again after a restart."""
        if once and text in self._said:
            return
        if once and len(self._said) < _MOST_EVENTS:
            self._said.add(text)
        self._events = [*self._events, (level, text)][-_MOST_EVENTS:]
        self._told += 1

    def news(self, since: int) -> News:
        """Everything, and the events after the first ``since``."""
        return News(
            self._metrics, self._running, self._events[max(len(self._events) - self._told + since, 0) :], self._told
        )

    def ask_to_stop(self) -> None:
        """The workers are to stop at the next step boundary."""
        self._stop = True

    def asked_to_stop(self) -> bool:
        """Whether they are."""
        return self._stop


def make_channel() -> Any:
    """A board on this node, since what it is for ends with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    # Calls that nobody takes must not pile up in a worker.
    return DriverChannel.options(scheduling_strategy=here, max_pending_calls=_MOST_EVENTS).remote()  # type: ignore[attr-defined]


class DriverClient:
    """A worker's or the controller's way to the board; None says nothing."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self._asked: Any = None
        self._stop = False

    def say(self, level: int, text: str, *, once: bool = False) -> bool:
        """Tell of something that happened, in one line. Whether somebody could be told.

        Args:
            level: As ``logging`` has it.
            text: What happened.
            once: It is said once in a run, and not again by each start.
        """
        return self._send("say", level, " ".join(text.split()), once)

    def put(self, metrics: dict[str, Any]) -> None:
        """Show these metrics."""
        self._send("put", metrics)

    def running(self) -> None:
        """Say that the loop begins."""
        self._send("set_running", True)

    def restarting(self, why: str) -> None:
        """Say that the workers begin anew, and why."""
        self._send("set_running", False)
        self.say(logging.WARNING, why)

    def look(self) -> bool:
        """Whether the run is to stop, as was known by the time of the call before this one; it waits for nothing."""
        if self._board is None or self._stop:
            return self._stop
        with contextlib.suppress(Exception):
            if self._asked is None:
                self._asked = self._board.asked_to_stop.remote()
            elif ray.wait([self._asked], timeout=0)[0]:
                asked, self._asked = self._asked, None
                self._stop = ray.get(asked)
        return self._stop

    def _send(self, method: str, *arguments: Any) -> bool:
        if self._board is None:
            return False
        try:
            getattr(self._board, method).remote(*arguments)
        except Exception:  # it is gone, or takes nothing: of whatever kind, the run goes on
            return False
        return True


class _ToBoard(logging.Handler):
    def __init__(self, teller: DriverClient) -> None:
        super().__init__(logging.INFO)
        self._teller = teller

    def emit(self, record: logging.LogRecord) -> None:
        self._teller.say(record.levelno, record.getMessage())


@contextlib.contextmanager
def forward_warnings(teller: DriverClient) -> Iterator[None]:
    """Have the warnings of this process, whoever's they are, and what this package logs go to the driver, once each."""
    shown_before, level = warnings.showwarning, _package.level

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        place = f" ({os.path.basename(filename)}:{lineno})" if is_users(filename) else ""
        text = f"{category.__name__}: {message}{place}"
        if file is not None or not teller.say(logging.WARNING, text, once=True):
            shown_before(message, category, filename, lineno, file, line)

    handler = _ToBoard(teller)
    warnings.showwarning = show
    _package.addHandler(handler)
    _package.setLevel(logging.INFO)
    try:
        yield
    finally:
        warnings.showwarning = shown_before
        _package.removeHandler(handler)
        _package.setLevel(level)
