"""The causes of failed starts, and the table of what follows from each."""

from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from ray_adascale.checkpoint import CheckpointError
from ray_adascale.checkpoint.files import NotPermitted
from ray_adascale.train.causes import (
    LIMITS,
    Cause,
    ProcessGroupFailed,
    cause_of,
    cause_of_start,
    repeats_trial,
)

PREEMPTED = RayActorError(None, "it died", preempted=True)
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


def at_the_build(error: Exception) -> Exception:
    error.add_note("Raised while the workload was built.")
    return error


@pytest.mark.parametrize(
    ("error", "cause", "trial"),
    [
        (PREEMPTED, Cause.PREEMPTED, True),
        (RayActorError(None, "it died"), Cause.LOST, True),
        (OutOfMemoryError("low on memory"), Cause.LOST, True),
        (CLOSED, Cause.LOST, True),
        (ConnectionResetError("Connection reset by peer"), Cause.LOST, True),
        (OSError(30, "Read-only file system"), Cause.STORAGE, True),
        (CheckpointError("cut"), Cause.STORAGE, True),
        (at_the_build(OSError("can't connect")), Cause.STORAGE, False),
        (PermissionError("data"), Cause.FORBIDDEN, False),
        (NotPermitted("a checkpoint"), Cause.FORBIDDEN, False),
        (ValueError("mine"), Cause.PROGRAM, False),
        (FloatingPointError("error is nan"), Cause.PROGRAM, False),
        (FileNotFoundError("data"), Cause.PROGRAM, False),
        (RayError("Exception Mine isn't serializable"), Cause.PROGRAM, False),
    ],
)
def test_a_failure_in_the_loop_has_one_cause_and_a_trial_repeats_what_is_nobodys_mistake(
    error: Exception, cause: Cause, trial: bool
) -> None:
    assert cause_of(error) is cause
    assert repeats_trial(error) is trial


class WorkerGroupStartupFailedError(Exception):
    """Stands for Ray's, which is private."""


class WorkerGroupStartupTimeoutError(Exception):
    """Stands for Ray's, which is private."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (WorkerGroupStartupTimeoutError(), Cause.NO_ROOM),
        (WorkerGroupStartupFailedError(), Cause.LOST),
        (ProcessGroupFailed("no peer"), Cause.LOST),
        (PREEMPTED, Cause.PREEMPTED),
        (RayActorError(None, "it died"), Cause.LOST),
        (RayActorError(None, "died in its creation task"), Cause.PROGRAM),
        (RayTaskError("f", "", ImportError("theirs")), Cause.PROGRAM),
        (OSError("disk full"), Cause.STORAGE),
        (PermissionError("the folder"), Cause.FORBIDDEN),
        (ValueError("mine"), Cause.PROGRAM),
    ],
)
def test_a_failure_to_start_has_one_cause(error: Exception, cause: Cause) -> None:
    assert cause_of_start(error) is cause


def test_each_cause_has_its_limits() -> None:
    assert set(LIMITS) == set(Cause)
