"""Why a run failed: which worker's failure tells it, and whether a restart can mend it.

Ray Train restarts the workers whatever the cause; :class:`RetryPolicy` looks on in its controller, and ends the run at once where
each restart would meet the same exception again.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train import UserCallback

from ..checkpoint import CheckpointError
from ..run.backend import CHECKPOINT
from ..run.failure import lines_of, place_of, traceback_of, was_beginning
from .driver_channel import DriverClient

__all__ = ["RepeatedMistake", "RetryPolicy", "failure_in_words", "is_rays", "whole_failure", "worker_failure"]

_BETWEEN_WORKERS = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|ProcessGroup|TCPStore")
_RAYS_ADVICE = re.compile(r" (Worker exit type: \w+ Worker exit detail:|Some common causes include:).*")
_STORAGE_TRIES = 3


def is_rays(error: Exception) -> bool:
    """Whether it is an exception of Ray's own, around what happened elsewhere."""
    return type(error).__module__.partition(".")[0] == "ray"


def _is_between_workers(error: Exception) -> bool:
    """Whether it says that another worker is gone, and not what happened to it."""
    return isinstance(error, RuntimeError | ConnectionError) and _BETWEEN_WORKERS.search(str(error)) is not None


def worker_failure(error: BaseException) -> tuple[int, Exception] | None:
    """The worker's rank and its failure that say best why a run failed; None where no worker did."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})

    def order(item: tuple[int, Exception]) -> tuple[bool, bool, int]:
        # One that died, of which Ray tells, is the cause; and not those that then found its connection closed.
        return not is_rays(item[1]), _is_between_workers(item[1]), item[0]

    return min(failures.items(), key=order, default=None)


def failure_in_words(error: BaseException, *, lines: bool = True) -> str:
    """What the worker said whose failure tells best why a run failed; what Ray says where no worker failed.

    Args:
        error: What ``fit()`` raised.
        lines: Add the user's lines in which it was raised.
    """
    found = worker_failure(error)
    if found is None:
        return str(error)
    rank, failure = found
    text = _RAYS_ADVICE.sub("", str(failure).strip())
    if is_rays(failure) and text:
        # A remote traceback, or a long description of the worker, lies between what happened and what a user can act on.
        told = text.splitlines()
        short = f"{told[0]} {told[-1]}" if len(told) > 1 and told[0].endswith(".") else told[-1]
        return f"Worker {rank}: {short}"
    kind = type(failure).__name__  # without which a KeyError's text says nothing
    said = f"Worker {rank}: {kind}: {text}" if text else f"Worker {rank}: {kind}"
    return "\n".join([said, lines_of(failure)] if lines and lines_of(failure) else [said])


def whole_failure(error: BaseException) -> str:
    """All that is known of why a run failed: the tracebacks of all workers that did."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    parts = [f"Worker {rank}:\n{traceback_of(failure)}" for rank, failure in sorted(failures.items())]
    return "\n\n".join(map(str, [error, *parts])) + "\n"


# ---- in Ray Train's controller ---------------------------------------------------------------------------------------


class RepeatedMistake(Exception):
    """A run ends since each restart would fail as this one did.

    Args:
        failures: Of the workers, by rank.
        why: How one knows.
    """

    def __init__(self, failures: dict[int, Exception], why: str) -> None:
        super().__init__(why)
        self.failures = failures
        self.why = why

    def __reduce__(self) -> Any:
        return type(self), (self.failures, self.why)


class RetryPolicy(UserCallback):
    """Says a line about each failure, and ends the run at one that every restart would repeat.

    That is an exception of the user's own, or of ours, while the workload is built or before a start's first optimizer step,
    and one that came after the same step before. What goes on is for Ray's ``FailureConfig`` to count: lost workers, lost
    nodes, and storage that fails (which three starts that stop at the same step settle, too).

    Args:
        max_failures: Ray Train's, to be named.
    """

    def __init__(self, max_failures: int) -> None:
        self.board: Any = None
        """Where it is told; see ``board``."""
        self._max_failures = max_failures
        self._restarts = 0
        self._seen: Counter[str] = Counter()

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Ray Train's: all workers have reported, and stored what belongs to it."""
        if checkpoint is not None:
            steps, effective = metrics[0].get("optimizer_steps", 0), metrics[0].get("effective_steps", 0.0)
            DriverClient(self.board).say(logging.INFO, CHECKPOINT % (steps, effective))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Ray Train's: one or more workers have failed."""
        failed = ray.train.WorkerGroupError("", dict(worker_exceptions))
        found = worker_failure(failed)
        assert found is not None
        why = self._repeats(found[1])
        if why is not None:
            raise RepeatedMistake(dict(worker_exceptions), why)
        self._restarts += 1
        if self._max_failures < 0 or self._restarts <= self._max_failures:
            of = "" if self._max_failures < 0 else f" of {self._max_failures}"
            text = failure_in_words(failed, lines=False).rstrip(".")
            DriverClient(self.board).restarting(f"{text}. Restart {self._restarts}{of}, from the last checkpoint.")

    def _repeats(self, error: Exception) -> str | None:
        """Why each restart would meet this error again; None where that is not known."""
        if is_rays(error) or _is_between_workers(error):
            return None
        # Without a note it did not come from the loop: nothing is known of its place.
        place = place_of(error)
        of_storage = isinstance(error, CheckpointError) or (
            isinstance(error, OSError)
            and not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        )
        if was_beginning(error) and not of_storage:
            return place
        key = f"{place} {type(error).__name__}"
        self._seen[key] += 1
        if place and self._seen[key] >= (_STORAGE_TRIES if of_storage else 2):
            return f"{place} The same in {self._seen[key]} starts."
        return None
