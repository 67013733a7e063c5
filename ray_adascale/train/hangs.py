"""A run without steps: which worker holds up the others, by the heartbeats of all, and
the end of that worker's process.

A stopped worker sends no beats. A worker on an unreachable node sends none either. A
worker with a stuck loader sends the same position in each beat.
tests/train/test_hang.py stops a worker, has a loader wait for ever, and overloads a
machine; tests/project/test_machines.py turns a machine off.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..run.observe.pulse import Phase

_log = logging.getLogger(__name__)

_SURE_S = 15.0
"""Seconds for which a hang must be seen without a break: beats may be late on a busy
machine.
"""
_SILENT_S = 60.0
"""Seconds without a beat after which a worker counts as silent in the description of
a hang.
"""
_QUIET_S = 10.0
_REPEAT_S = 30.0
"""Seconds without a beat after which the driver logs it, and between repetitions."""


@dataclass(frozen=True)
class Beat:
    """One heartbeat of one worker.

    Attributes:
        rank: The worker's number.
        world_size: Number of workers.
        steps: Optimizer steps of the run so far.
        phase: What the worker does.
        seconds: Seconds in this phase so far.
        limit_s: Seconds that its step may take; None before the first step of this
            start has ended.
        node: The node's id in Ray.
        host: The node's address.
        pid: The worker's process.
    """

    rank: int
    world_size: int
    steps: int
    phase: Phase
    seconds: float
    limit_s: float | None
    node: str
    host: str
    pid: int


@dataclass(frozen=True)
class Hang:
    """A run that makes no step.

    Attributes:
        seconds: Seconds without a change of any worker's position.
        limit_s: The limit.
        steps: Optimizer steps that the furthest worker has taken.
        held_up_by: The last beats of the workers that the others wait for; all workers,
            if no one is behind.
        silent: Whether those workers send no beats.
        others: The last beat of one worker that waits; None if none is ahead.
    """

    seconds: float
    limit_s: float
    steps: int
    held_up_by: tuple[Beat, ...]
    silent: bool
    others: Beat | None

    def description(self) -> str:
        """Return the hang as sentences, without what is done about it."""
        first = self.held_up_by[0]
        count = len(self.held_up_by)
        who = f"Worker {first.rank} on node {first.host} (process {first.pid})"
        if count > 1:
            who += f" and {count - 1} more"
        does = (
            "sends no heartbeat: it is stopped, or its node can't be reached"
            if self.silent
            else first.phase.value
        )
        if self.others is None and first.world_size > 1:
            who = "No worker"
            does = (
                f"is behind, and each of them {first.phase.value}: the network may be "
                "down"
            )
        text = (
            f"The run has made no step for {self.seconds:.0f} s, after step "
            f"{self.steps}. {who} {does}."
        )
        if self.others is not None:
            text += f" Worker {self.others.rank} {self.others.phase.value}."
        return text


@dataclass
class Beats:
    """The last beat of each worker of a run, and when it came."""

    _last: dict[int, tuple[Beat, float]] = field(default_factory=dict)

    def add(self, beat: Beat, now: float) -> None:
        """Add a beat.

        Args:
            beat: The beat.
            now: The present time, in seconds.
        """
        self._last[beat.rank] = beat, now
        # of a start with more workers
        for rank in [rank for rank in self._last if rank >= beat.world_size]:
            del self._last[rank]

    def clear(self) -> None:
        """Remove all beats, as when the workers start anew."""
        self._last.clear()

    def quiet(self, now: float) -> tuple[Beat, float] | None:
        """Return the last beat of the worker that has sent none for longest, and the
        seconds since; None if all send beats.
        """
        last = [
            item for item in self._last.values() if item[0].phase is not Phase.ENDED
        ]
        beat, came = min(last, key=lambda item: item[1], default=(None, now))
        return None if beat is None or now - came < _QUIET_S else (beat, now - came)

    def hang(self, now: float) -> Hang | None:
        """Return the hang of the run; None if there is none, as far as the beats show.

        No worker may have changed its position for longer than the limit. A worker that
        evaluates, writes a checkpoint, prepares its first step or has ended may take
        any time, as long as it sends beats.

        Args:
            now: The present time, as for :meth:`add`.
        """
        limit = self._limit
        return None if limit is None else self._standing(now, limit, limit)

    def slow(self, now: float) -> Hang | None:
        """Return a step that does not end, long before its limit: after 30 s, or a
        quarter of the limit if that is longer; None without one.

        Args:
            now: The present time, as for :meth:`add`.
        """
        limit = self._limit
        if limit is None:
            return None
        return self._standing(now, max(_REPEAT_S, limit / 4), limit)

    @property
    def _limit(self) -> float | None:
        """Seconds that the present step may take; None if it is not known for it."""
        beats = [beat for beat, _ in self._last.values()]
        limits = [beat.limit_s for beat in beats if beat.limit_s is not None]
        if not limits or len(beats) < max(beat.world_size for beat in beats):
            return None
        return max(limits)

    def _standing(self, now: float, seconds: float, limit: float) -> Hang | None:
        """Return the run that has stood still for so long; None if it has not."""
        beats = [beat for beat, _ in self._last.values()]
        silence = {beat.rank: now - came for beat, came in self._last.values()}
        stands = {beat.rank: beat.seconds + silence[beat.rank] for beat in beats}
        for beat in beats:
            if beat.phase is Phase.ENDED or stands[beat.rank] < seconds:
                return None
            if silence[beat.rank] < seconds and not beat.phase.timed:
                return None
        silent = [
            beat for beat in beats if silence[beat.rank] >= min(_SILENT_S, seconds)
        ]
        ahead = [beat for beat in beats if beat not in silent]
        behind = silent or _behind(beats)
        others = [beat for beat in ahead if beat not in behind]
        return Hang(
            min(stands.values()),
            limit,
            max(beat.steps for beat in beats),
            tuple(sorted(behind, key=lambda beat: beat.rank)),
            bool(silent),
            min(others, key=lambda beat: beat.rank, default=None),
        )


def _behind(beats: list[Beat]) -> list[Beat]:
    """Return the workers that are furthest behind in the order of a step."""
    order = (Phase.DATA, Phase.PASS, Phase.REDUCTION)

    def position(beat: Beat) -> tuple[int, int]:
        return beat.steps, order.index(beat.phase) if beat.phase in order else 0

    last = min(map(position, beats))
    return [beat for beat in beats if position(beat) == last]


# ---- on the driver -------------------------------------------------------------------


def _end_process(pid: int) -> None:
    """Kill a process on this node."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill(worker: Beat) -> Any:
    """Kill a worker's process by a task on its node, since a process that is stopped
    answers no message. Does not wait.
    """
    there = NodeAffinitySchedulingStrategy(worker.node, soft=False)
    task = ray.remote(_end_process).options(
        num_cpus=0, max_retries=0, scheduling_strategy=there
    )
    return task.remote(worker.pid)


class HangWatch:
    """Ends the process of a worker that holds up the run. Ray Train then restarts
    the workers, as after any lost worker.
    """

    def __init__(self) -> None:
        self._quiet_again = -math.inf  # time of the next line about a quiet worker
        self._slow_again = -math.inf  # and about a step that does not end
        self._since: float | None = None
        self._killed: tuple[str, int] | None = None  # node and process
        self._killed_at = -math.inf
        # kept, since Ray prints an error that is never fetched, such as of a lost node
        self._task: Any = None

    def log_quiet(self, quiet: tuple[Beat, float] | None, now: float) -> None:
        """Log that a worker sends no beats, once at first and then every half minute.

        Args:
            quiet: See :meth:`Beats.quiet`.
            now: The present time, in seconds.
        """
        if quiet is None:
            self._quiet_again = -math.inf
        elif now >= self._quiet_again:
            self._quiet_again = now + _REPEAT_S
            beat, seconds = quiet
            limit = (
                ""
                if beat.limit_s is None
                else f" The run itself ends a worker after {beat.limit_s:.0f} s "
                "without a step."
            )
            _log.warning(
                "No heartbeat of worker %d on node %s for %.0f s. Ray takes about a "
                "minute to notice that a node is lost.%s",
                beat.rank,
                beat.host,
                seconds,
                limit,
            )

    def log_slow(self, slow: Hang | None, now: float) -> None:
        """Log that a step does not end, once at first and then every half minute.

        Args:
            slow: See :meth:`Beats.slow`.
            now: The present time, in seconds.
        """
        if slow is None:
            self._slow_again = -math.inf
        elif now >= self._slow_again:
            self._slow_again = now + _REPEAT_S
            worker = slow.held_up_by[0]
            if self._killed == (worker.node, worker.pid):
                _log.warning(
                    "%s Process %d of worker %d on node %s was killed %.0f s ago, and "
                    "has not ended: it may wait for a driver or a disk. The workers "
                    "restart once it has ended. Reboot that node, or remove it from "
                    "the cluster.",
                    slow.description(),
                    worker.pid,
                    worker.rank,
                    worker.host,
                    now - self._killed_at,
                )
                return
            _log.warning(
                "%s The limit is %.0f s; then the worker that is behind is killed.",
                slow.description(),
                slow.limit_s,
            )

    def look(self, hang: Hang | None) -> None:
        """Process the hang that the channel reports. Call it often; it waits for
        nothing.

        Args:
            hang: The hang; None if there is none.
        """
        now = time.monotonic()
        if hang is None:
            self._since = None
            return
        if self._since is None:
            self._since = now
        worker = hang.held_up_by[0]
        # A process that was just killed may still be found, and a node that can't be
        # reached is Ray's to notice.
        if now - self._since < min(_SURE_S, hang.limit_s) or self._killed == (
            worker.node,
            worker.pid,
        ):
            return
        self._killed = worker.node, worker.pid
        self._killed_at = now
        self._task = _kill(worker)
        _log.warning(
            "%s is ended, if its node can be reached, so that the workers restart from "
            "the last checkpoint. If such steps are expected, set "
            "AdaScaleConfig(step_timeout_s=...), now %.0f s.",
            f"{hang.description()} Process {worker.pid} of worker {worker.rank} on "
            f"node {worker.host}",
            hang.limit_s,
        )
