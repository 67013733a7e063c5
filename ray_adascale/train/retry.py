"""The cause of a failed run, and whether a restart can help.

Ray Train restarts the workers after any failure. :class:`RetryPolicy` runs in Ray
Train's controller, and ends the run at once if each restart would raise the same
exception. tests/whole/faults.py kills workers and fills disks, and
tests/train/test_trainer.py has workers raise.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train import UserCallback

from .._errors import SettingError
from .._files import without_credentials
from ..run.boundary.backend import CHECKPOINT
from ..run.observe.failure import lines_of, raised_when, traceback_of, was_beginning
from .causes import (
    LIMITS,
    Cause,
    cause_of,
    is_between_workers,
    is_rays,
    preemption_of,
)
from .cluster import node_of
from .driver_channel import DriverClient

_RAYS_ADVICE = re.compile(
    r" (Worker exit type: \w+ Worker exit detail:|Some common causes include:).*"
)


def bad_nodes(failure: RepeatedFailure) -> dict[str, str] | None:
    """Return the nodes whose workers have raised before their first step: host name
    and address by Ray's id; None if one is unknown, or another failure was first.
    """
    own = [
        error
        for error in failure.failures.values()
        if cause_of(error) not in (Cause.LOST, Cause.PREEMPTED)
    ]
    nodes = [node_of(error) for error in own if was_beginning(error)]
    if len(nodes) < len(own) or None in nodes:
        return None
    return {node.id: node.name for node in nodes if node is not None}


def rays_words(error: BaseException) -> str:
    """Return the message of an exception of Ray's own in one line."""
    text = _RAYS_ADVICE.sub("", str(error).strip())
    if not text:
        return type(error).__name__
    # The first and last lines are useful; between them is a remote traceback or a
    # description of the worker.
    first, *rest = text.splitlines()
    short = (
        (f"{first} {rest[-1]}" if first.endswith(".") else rest[-1]) if rest else first
    )
    process, node = (
        re.search(rf"^\s*{key}: (\S+)$", text, re.MULTILINE) for key in ("pid", "ip")
    )
    if process is not None and node is not None:
        short = f"{short.rstrip('.')} (process {process[1]} on {node[1]})."
    # gRPC's words for a connection that was cut off.
    return re.sub(
        "Socket closed$",
        "Socket closed: its node, or the network to it, is lost.",
        short,
    )


def worker_failure(error: BaseException) -> tuple[int, Exception] | None:
    """Return rank and failure of the worker that best explains why a run failed;
    None if no worker failed.
    """
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})

    def order(item: tuple[int, Exception]) -> tuple[bool, bool, int]:
        # A worker that died is the cause, not the workers that then lost the connection
        # to it.
        return not is_rays(item[1]), is_between_workers(item[1]), item[0]

    return min(failures.items(), key=order, default=None)


def failure_message(error: BaseException, *, lines: bool = True) -> str:
    """Return the message of the worker's failure that best explains why a run failed;
    Ray's message if no worker failed.

    Args:
        error: The exception from ``fit()``.
        lines: Add the user's lines in which it was raised.
    """
    return without_credentials(_failure_message(error, lines=lines))


def _failure_message(error: BaseException, *, lines: bool) -> str:
    found = worker_failure(error)
    if found is None:
        return "\n".join(filter(None, [str(error), *getattr(error, "__notes__", ())]))
    rank, failure = found
    who = _worker_in_words(rank, failure)
    if is_rays(failure):
        return f"{who}: {rays_words(failure)}"
    # a KeyError's text alone means little
    text = str(failure).strip()
    kind = type(failure).__name__
    message = f"{who}: {kind}: {text}" if text else f"{who}: {kind}"
    return "\n".join(
        [message, lines_of(failure)] if lines and lines_of(failure) else [message]
    )


def _worker_in_words(rank: int, failure: Exception) -> str:
    node = node_of(failure)
    return f"Worker {rank}" if node is None else f"Worker {rank} on node {node.name}"


def whole_failure(error: BaseException) -> str:
    """Return the tracebacks of all workers that failed."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    parts = [
        f"{_worker_in_words(rank, failure)}:\n{traceback_of(failure)}"
        for rank, failure in sorted(failures.items())
    ]
    return "\n\n".join(map(str, [error, *parts])) + "\n"


def _one_sentence(failures: Mapping[int, Exception]) -> str:
    """Return a sentence about the failure that explains the others, without lines of
    the user's code.
    """
    return (
        failure_message(
            ray.train.WorkerGroupError("", dict(failures)), lines=False
        ).rstrip(".")
        + "."
    )


# ---- in Ray Train's controller -------------------------------------------------------


class RepeatedFailure(Exception):
    """A run ends because each restart would fail in the same way.

    Args:
        failures: The workers' failures by rank.
        why: The reason to expect the same failure.
    """

    def __init__(self, failures: dict[int, Exception], why: str) -> None:
        super().__init__(why)
        self.failures = failures
        self.why = why

    def __reduce__(self) -> Any:
        return type(self), (self.failures, self.why)


class RetryPolicy(UserCallback):
    """Logs a line about each failure, and ends the run at a failure that every restart
    would repeat.

    These failures are those of :data:`~ray_adascale.train.causes.LIMITS`. Ray's
    ``FailureConfig`` counts the others.

    Ray counts preemptions apart from failures. From the death of a preempted worker to
    the end of the notice, Ray goes on polling, and calls :meth:`after_exception` at
    each poll. The first of these calls is logged.

    Args:
        max_failures: Ray Train's, for the log.
        restarts: Number of restarts so far.
        saved: Whether there is a checkpoint.

    Raises:
        ValueError: ``max_failures`` is below −1.
    """

    def __init__(
        self, max_failures: int, restarts: int = 0, saved: bool = False
    ) -> None:
        if max_failures < -1:
            raise SettingError(
                "Invalid {}. Must be a number of restarts; 0 for none, or -1 for any "
                "number.",
                "FailureConfig",
                max_failures=max_failures,
            )
        self.channel: Any = None
        """The driver's channel, see :mod:`ray_adascale.train.driver_channel`."""
        self._max_failures = max_failures
        self._restarts = restarts
        # else: whether a checkpoint was reported since this driver began
        self._saved = saved
        # ids of the actors of preempted workers
        self._taken_away: set[str | None] = set()
        self._seen: Counter[str] = Counter()

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """Ray Train's callback: all workers have reported, and their checkpoint is
        stored.
        """
        if checkpoint is not None:
            self._saved = True
            steps = metrics[0].get("optimizer_steps", 0)
            effective = metrics[0].get("effective_steps", 0.0)
            DriverClient(self.channel).log(
                logging.INFO, CHECKPOINT % (steps, effective)
            )

    def after_exception(
        self, run_context: Any, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Ray Train's callback: one or more workers have failed."""
        driver = DriverClient(self.channel)
        gone = {
            rank: found
            for rank, error in worker_exceptions.items()
            if (found := preemption_of(error)) is not None
        }
        if gone:
            actors = {error.actor_id for error in gone.values()} - {None}
            if actors.isdisjoint(self._taken_away):
                text = _one_sentence({rank: worker_exceptions[rank] for rank in gone})
                driver.restarting(f"{text} Its node was preempted.")
                driver.awaits(
                    "Ray waits for the end of the notice, and restarts the workers then"
                )
            self._taken_away |= actors
            return
        found = worker_failure(ray.train.WorkerGroupError("", dict(worker_exceptions)))
        assert found is not None
        why = self._repeats(found[1])
        if why is not None:
            raise RepeatedFailure(dict(worker_exceptions), why)
        self._restarts += 1
        if self._max_failures < 0 or self._restarts <= self._max_failures:
            driver.restarting(
                f"{_one_sentence(worker_exceptions)} {self.restart}", self._restarts
            )

    @property
    def restart(self) -> str:
        """The restart that follows, in words."""
        of = "" if self._max_failures < 0 else f" of {self._max_failures}"
        otherwise = "" if self._saved else ", or from the beginning if there is none"
        return f"Restart {self._restarts}{of}, from the last checkpoint{otherwise}."

    def _repeats(self, error: Exception) -> str | None:
        """Return why each restart would raise this error again; None if that is
        unknown.
        """
        cause = cause_of(error)
        limit = LIMITS[cause]
        most = limit.beginning if was_beginning(error) else limit.later
        when = raised_when(error)
        if not when and cause is Cause.FORBIDDEN:
            when = "It is not permitted."
        # An exception without a note is not from the loop, so its step is unknown.
        if most is None or not when:
            return None
        if most == 1:
            return when
        key = f"{when} {type(error).__name__}"
        self._seen[key] += 1
        if self._seen[key] < most:
            return None
        return f"{when} The same in {self._seen[key]} starts."
