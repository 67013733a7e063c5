"""Why a start of a run failed, and how often that may happen: one table for all who
decide on restarts.

:class:`~ray_adascale.train.retry.RetryPolicy` decides for failures in the workers'
loops, :class:`~ray_adascale.train.failed_starts.FailedStarts` for those of a start, and
a search for its trials. A hang needs no decision: the driver ends the process of the
worker that holds up the others, which is then lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

import torch.distributed as dist
from ray.exceptions import RayActorError, RayError, RayTaskError

from ..checkpoint import CheckpointError
from ..checkpoint.files import NotPermitted
from ..run.observe.failure import was_beginning

_BETWEEN_WORKERS = re.compile(
    r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|ProcessGroup|TCPStore"
)
_NOT_STARTED = "WorkerGroupStartupFailedError"
_NO_ROOM = "WorkerGroupStartupTimeoutError"
"""Ray Train's exceptions of a start that failed, and of one for which there was no
room in time. The names are private to Ray.
"""


class Cause(Enum):
    """Why a start failed."""

    NO_ROOM = auto()
    """The cluster had no room for the workers in time."""
    PREEMPTED = auto()
    """A node was taken away after a notice."""
    LOST = auto()
    """A process, a node, or the connection to another worker was lost."""
    STORAGE = auto()
    """A checkpoint or a file could not be written or read."""
    FORBIDDEN = auto()
    """A file must not be written or read."""
    PROGRAM = auto()
    """The user's code, or this package, has raised."""


@dataclass(frozen=True)
class Limit:
    """After how many starts that fail for one cause at the same place each further one
    would fail too; None: that can't be told, so the number of restarts decides.

    Attributes:
        beginning: Starts that fail during the build, or before the start's first
            optimizer step.
        later: Starts that fail at the same step.
        repeats_a_trial: Whether a trial of a search that fails later starts again.
    """

    beginning: int | None
    later: int | None
    repeats_a_trial: bool


LIMITS = {
    Cause.NO_ROOM: Limit(None, None, repeats_a_trial=True),
    Cause.PREEMPTED: Limit(None, None, repeats_a_trial=True),
    Cause.LOST: Limit(None, None, repeats_a_trial=True),
    Cause.STORAGE: Limit(3, 3, repeats_a_trial=True),
    Cause.FORBIDDEN: Limit(1, 1, repeats_a_trial=False),
    Cause.PROGRAM: Limit(1, 2, repeats_a_trial=False),
}


class ProcessGroupFailed(Exception):
    """The workers' processes run, and can't reach each other."""


def cause_of(error: Exception) -> Cause:
    """Return the cause of what a worker's loop, or a trial, has raised."""
    if preemption_of(error) is not None:
        return Cause.PREEMPTED
    if isinstance(error, NotPermitted | PermissionError):
        return Cause.FORBIDDEN
    if type(error) is RayError:  # it stands for an exception that can't be pickled
        return Cause.PROGRAM
    if is_rays(error) or is_between_workers(error):
        return Cause.LOST
    wrong_path = isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError
    )
    if isinstance(error, CheckpointError):
        return Cause.STORAGE
    if isinstance(error, OSError) and not wrong_path:
        return Cause.STORAGE
    return Cause.PROGRAM


def cause_of_start(error: Exception) -> Cause:
    """Return the cause of what Ray Train's controller has raised while it started the
    workers.
    """
    name = type(error).__name__
    if name == _NO_ROOM:
        return Cause.NO_ROOM
    if preemption_of(error) is not None:
        return Cause.PREEMPTED
    if isinstance(error, RayTaskError):  # such as a workload that can't be imported
        return Cause.PROGRAM
    if isinstance(error, RayActorError):
        # an exception in a constructor: the controller's
        return Cause.PROGRAM if "creation task" in str(error) else Cause.LOST
    if isinstance(error, PermissionError):
        return Cause.FORBIDDEN
    if isinstance(error, OSError):
        return Cause.STORAGE
    if isinstance(error, ProcessGroupFailed) or name == _NOT_STARTED:
        return Cause.LOST
    return Cause.PROGRAM


def repeats_trial(error: Exception) -> bool:
    """Return whether a trial of a search starts again after this failure, because it
    is nobody's mistake.
    """
    cause = cause_of(error)
    if was_beginning(error) and LIMITS[cause].beginning is not None:
        return False
    return LIMITS[cause].repeats_a_trial


def is_rays(error: Exception) -> bool:
    """Return whether an exception is Ray's own, around a cause elsewhere."""
    return type(error).__module__.partition(".")[0] == "ray"


def preemption_of(error: Exception) -> RayActorError | None:
    """Return the error of a worker that died with a node that was taken away after a
    notice, which Ray may have wrapped.
    """
    found = (
        each
        for each in (error, *vars(error).values())
        if isinstance(each, RayActorError) and each.preempted
    )
    return next(found, None)


def is_between_workers(error: BaseException) -> bool:
    """Return whether an exception only shows that another worker is gone, or can't
    be reached.
    """
    if isinstance(error, dist.DistError):
        return True
    return (
        isinstance(error, RuntimeError | ConnectionError)
        and _BETWEEN_WORKERS.search(str(error)) is not None
    )
