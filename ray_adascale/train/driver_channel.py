"""Messages from the workers and the controller of a run to the driver, and its request
to stop, through one small actor.

No message waits for the actor. A message that can't be sent is dropped, and the run
goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._files import without_credentials
from ..run.boundary.storing import Storing
from ..run.observe.failure import is_users
from .hangs import Beat, Beats, Hang

_MOST_EVENTS = 1_000
"""Largest number of events that wait for the driver."""
_ANSWER_S = 10.0
"""Time limit for an answer."""

_package = logging.getLogger(__package__.partition(".")[0])


class Awaited(NamedTuple):
    """What a run without a loop waits for.

    Attributes:
        what: In words.
        seconds: Seconds so far.
        limit_s: Seconds after which Ray gives up; None if there is no limit.
    """

    what: str
    seconds: float = 0.0
    limit_s: float | None = None


_ROOM = (
    "Ray ends the last workers, if there are any, reads its record in the storage, "
    "looks for room, and starts the workers' processes"
)


class Status(NamedTuple):
    """Status of a run.

    Attributes:
        metrics: The newest metrics, with ``total_steps``; None before the first step
            and after a failure.
        running: Whether the workers are in their loop.
        events: The events since the last call: (level of ``logging``, text of one
            line).
        sent: Number of events so far.
        hang: The hang of the run, as far as the heartbeats show; None without one.
        quiet: A worker that sends no heartbeats, see
            :meth:`ray_adascale.train.hangs.Beats.quiet`.
        awaited: What is waited for while the workers are not in their loop.
        slow: A step that does not end, see
            :meth:`ray_adascale.train.hangs.Beats.slow`.
        storing: The checkpoint's share that has been stored for longest; None if none
            is stored now.
    """

    metrics: dict[str, Any] | None
    running: bool
    events: list[tuple[int, str]]
    sent: int
    hang: Hang | None = None
    quiet: tuple[Beat, float] | None = None
    awaited: Awaited = Awaited(_ROOM)
    slow: Hang | None = None
    storing: Storing | None = None


@ray.remote(num_cpus=0, max_restarts=0)
class DriverChannel:
    """Holds the newest metrics, the events, and the request to stop."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] | None = None
        self._running = False
        self._notes: dict[str, Any] = {
            "placed": None,
            "restarts": 0,
            "loops": 0,
            "stepped": set(),
        }
        self.set_awaited(_ROOM, None)
        self._events: list[tuple[int, str]] = []
        self._sent = 0
        self._stop = False
        self._sent_once: set[str] = set()
        self._beats = Beats()
        self._storing: dict[int, tuple[Storing, float]] = {}

    def storing(self, rank: int, storing: Storing | None) -> None:
        """Set how far a worker is with the storing of its share; None at its end."""
        self._storing.pop(rank, None)
        if storing is not None:
            self._storing[rank] = storing, time.monotonic()

    def beat(self, beat: Beat) -> bool:
        """Add a worker's heartbeat. Return whether a stop was requested."""
        self._beats.add(beat, time.monotonic())
        if beat.limit_s is not None:  # it has taken a step
            self._notes["stepped"].add(beat.node)
        return self._stop

    def put(self, metrics: dict[str, Any]) -> None:
        """Set the newest metrics."""
        self._metrics = metrics
        self._running = True

    def set_running(self, running: bool) -> None:
        """Set whether the workers are in their loop."""
        self._running = running
        self._notes["loops"] += running
        if not running:
            self._metrics = None
            self._beats.clear()
            self._storing.clear()
            self.set_awaited(_ROOM, None)

    def set_ended(self) -> None:
        """Set that Ray ends the workers: for others, unless the run has come to its
        end.
        """
        if self._metrics is None or "stopped" not in self._metrics:
            self.set_running(False)

    def set_awaited(self, what: str, limit_s: float | None) -> None:
        """Set what is waited for from now on, and for how long at most."""
        self._awaited, self._awaited_since = (
            Awaited(what, limit_s=limit_s),
            time.monotonic(),
        )

    def note(self, name: str, value: Any) -> None:
        """Set one of the :meth:`notes`."""
        self._notes[name] = value

    def notes(self) -> dict[str, Any]:
        """Return "placed", the placement group of the last start; "restarts" after a
        failure; "loops", the loops that began; "stepped", the nodes whose workers
        have taken a step.
        """
        return self._notes

    def log(self, level: int, text: str, once: bool) -> None:
        """Add an event. With ``once`` the same text is added once in a run, also
        after restarts.
        """
        if once and text in self._sent_once:
            return
        if once and len(self._sent_once) < _MOST_EVENTS:
            self._sent_once.add(text)
        self._events = [*self._events, (level, text)][-_MOST_EVENTS:]
        self._sent += 1

    def status(self, since: int) -> Status:
        """Return the status, with the events after the first ``since``."""
        events = self._events[max(len(self._events) - self._sent + since, 0) :]
        now = time.monotonic()
        hang = self._beats.hang(now)
        quiet = self._beats.quiet(now)
        awaited = self._awaited._replace(seconds=now - self._awaited_since)
        shares = [share.after(now - came) for share, came in self._storing.values()]
        return Status(
            self._metrics,
            self._running,
            events,
            self._sent,
            hang,
            quiet,
            awaited,
            self._beats.slow(now),
            max(shares, key=lambda share: share.seconds, default=None),
        )

    def request_stop(self) -> None:
        """Request that the workers stop at the next step boundary."""
        self._stop = True


def make_channel() -> Any:
    """Return a channel on this node, which ends with the driver."""
    # With soft=True Ray also places the actor on other nodes. If such a node is lost,
    # so are all messages and Ctrl-C.
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    # Calls that the actor does not answer must not pile up in a worker.
    options = DriverChannel.options  # type: ignore[attr-defined]
    return options(scheduling_strategy=here, max_pending_calls=_MOST_EVENTS).remote()


class DriverClient:
    """A worker's or the controller's connection to the channel; with None it sends
    nothing.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.connected = channel is not None
        """Whether the last message could be sent."""

    def log(self, level: int, text: str, *, once: bool = False) -> bool:
        """Send an event, as one line without credentials. Return whether it was sent.

        Args:
            level: A level of ``logging``.
            text: The event.
            once: Log it once in a run, not at each start.
        """
        line = without_credentials(" ".join(text.split()))
        return self._send("log", level, line, once) is not None

    def put(self, metrics: dict[str, Any]) -> None:
        """Send the newest metrics."""
        self._send("put", metrics)

    def beat(self, beat: Beat, *, wait: bool) -> bool:
        """Send a heartbeat. With ``wait`` return whether a stop was requested; False
        if the answer is late.
        """
        sent = self._send("beat", beat)
        if not wait or sent is None:
            return False
        try:
            return bool(ray.get(sent, timeout=_ANSWER_S))
        except ray.exceptions.RayActorError:
            self.connected = False
        except Exception:  # late: the next beat asks again
            pass
        return False

    def storing(self, rank: int, storing: Storing | None) -> None:
        """Send how far the storing of a checkpoint is; None at its end."""
        self._send("storing", rank, storing)

    def note(self, name: str, value: Any) -> None:
        """Send a note, see :meth:`DriverChannel.notes`."""
        self._send("note", name, value)

    def ended(self) -> None:
        """Send that Ray ends the workers."""
        self._send("set_ended")

    def awaits(self, what: str, limit_s: float | None = None) -> None:
        """Send what is waited for before the loop begins, and the limit in seconds."""
        self._send("set_awaited", what, limit_s)

    def running(self) -> None:
        """Send that the loop begins."""
        self._send("set_running", True)

    def restarting(self, why: str, restarts: int | None = None) -> None:
        """Send that the workers restart, why, and how often they have after a
        failure; None if this one does not count.
        """
        self._send("set_running", False)
        if restarts is not None:
            self.note("restarts", restarts)
        self.log(logging.WARNING, why)

    def _send(self, method: str, *arguments: Any) -> Any:
        """Return the reference of the answer; None if the message could not be sent."""
        if self._channel is None:
            return None
        try:
            return getattr(self._channel, method).remote(*arguments)
        except ray.exceptions.RayActorError:
            self.connected = False
        except Exception:  # the actor is full; the run goes on
            pass
        return None


class _ToDriver(logging.Handler):
    def __init__(self, driver: DriverClient) -> None:
        super().__init__(logging.INFO)
        self._driver = driver

    def emit(self, record: logging.LogRecord) -> None:
        self._driver.log(record.levelno, record.getMessage())


@contextlib.contextmanager
def forward_warnings(driver: DriverClient) -> Iterator[None]:
    """Send all warnings of this process and the package's log to the driver, once
    each.
    """
    shown_before = warnings.showwarning
    level = _package.level

    def show(
        message: Any,
        category: Any,
        filename: str,
        lineno: int,
        file: Any = None,
        line: Any = None,
    ) -> None:
        where = (
            f" ({os.path.basename(filename)}:{lineno})" if is_users(filename) else ""
        )
        text = f"{category.__name__}: {message}{where}"
        if file is not None or not driver.log(logging.WARNING, text, once=True):
            shown_before(message, category, filename, lineno, file, line)

    handler = _ToDriver(driver)
    warnings.showwarning = show
    _package.addHandler(handler)
    _package.setLevel(logging.INFO)
    try:
        yield
    finally:
        warnings.showwarning = shown_before
        _package.removeHandler(handler)
        _package.setLevel(level)
