"""Why a run failed, told from what the workers raised; and which failures a restart
can mend.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from ray_adascale import AdaScaleConfig, AdaScaleTrainer
from ray_adascale.checkpoint import CheckpointError
from ray_adascale.checkpoint.files import NotPermitted
from ray_adascale.run.observe.failure import (
    annotate_exceptions,
    lines_of,
    users_lines,
    was_building,
)
from ray_adascale.train import cluster
from ray_adascale.train import retry as module
from ray_adascale.train.causes import is_rays
from ray_adascale.train.retry import (
    RepeatedFailure,
    RetryPolicy,
    failure_message,
    whole_failure,
    worker_failure,
)

CLOSED = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
    "peer"
)
# As Ray Train hands them on: the first holds what Ray says of the actor.
DIED = WorkerHealthCheckFailedError(
    "A worker health check failed.",
    RayActorError(
        None,
        "The actor is dead because its worker process has died. Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection "
        "error code 2. End of file. Some common causes include: (1) the process was "
        "killed",
    ),
)


FROM = "from the last checkpoint, or from the beginning if there is none"


class Failed(Exception):
    """As Ray Train's, which hold what each worker failed with."""

    def __init__(self, **failures: Exception) -> None:
        self.worker_failures = {
            int(rank[1:]): error for rank, error in failures.items()
        }


def test_the_worker_that_died_is_told_before_those_that_lost_it() -> None:
    died, lost, wrong = (
        RayActorError(None, "the actor is dead"),
        CLOSED,
        ValueError("mine"),
    )
    assert worker_failure(Failed(w0=lost, w2=died, w3=RayActorError(None, "too"))) == (
        2,
        died,
    )
    # and so is one's own mistake
    assert worker_failure(Failed(w3=wrong, w1=lost)) == (3, wrong)
    assert worker_failure(Failed(w3=lost, w1=lost)) == (1, lost)
    assert worker_failure(Failed()) is None
    assert worker_failure(ValueError("none of a worker")) is None
    assert [is_rays(error) for error in (died, lost)] == [True, False]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            Failed(w0=CLOSED, w1=DIED),
            "Worker 1: A worker health check failed. The actor is dead because its "
            "worker process has died.",
        ),
        (
            Failed(
                w1=WorkerHealthCheckFailedError(
                    "A worker health check failed.",
                    RayActorError(None, "Socket closed"),
                )
            ),
            "Worker 1: A worker health check failed. Socket closed: its node, or the "
            "network to it, is lost.",
        ),
        (Failed(w1=KeyError("lr")), "Worker 1: KeyError: 'lr'"),
        (Failed(w1=MemoryError()), "Worker 1: MemoryError"),
        (ValueError("of the driver"), "of the driver"),
    ],
)
def test_a_failure_is_told_in_a_line(error: Exception, said: str) -> None:
    assert failure_message(error) == said


USERS = """
import json
def lines(text): return json.loads(text)
def workload(text):
    return lines(text)
"""


def raised(write: Any, steps: Any) -> Exception:
    """What a worker's noted failure in a user's file is, when it has come to the
    driver.
    """
    space: dict[str, Any] = {}
    path = write("mine.py", USERS)
    exec(compile(USERS, str(path), "exec"), space)
    try:
        with annotate_exceptions(steps):
            space["workload"]("no JSON")
    except ValueError as error:
        at_controller = cloudpickle.dumps(error)
    script = (
        "import pickle, sys; from ray import cloudpickle as c; "
        "sys.stdout.buffer.write(c.dumps(c.load(sys.stdin.buffer)))"
    )
    passed_on = subprocess.run(
        [sys.executable, "-c", script],
        input=at_controller,
        capture_output=True,
        check=True,
    )
    return pickle.loads(passed_on.stdout)


def test_the_users_own_lines_come_along(write: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    expected = [
        f"  {mine}:5, in workload",
        "    return lines(text)",
        f"  {mine}:3, in lines",
        "    def lines(text): return json.loads(text)",
    ]
    error = raised(write, lambda: (3, 7))
    # This very file is a user's as well.
    assert lines_of(error).splitlines()[0] == "In your files:"
    assert lines_of(error).splitlines()[-4:] == expected
    assert "json/decoder.py" not in lines_of(error)
    assert "ray_adascale/run/observe/failure.py" not in lines_of(error)
    assert (
        failure_message(Failed(w1=error))
        .splitlines()[0]
        .startswith("Worker 1: JSONDecodeError: Expecting value")
    )
    assert failure_message(Failed(w1=error)).splitlines()[-4:] == expected
    assert failure_message(Failed(w1=error), lines=False).count("\n") == 0
    whole = whole_failure(Failed(w1=error, w0=CLOSED))
    assert "json/decoder.py" in whole
    assert "Connection closed by peer" in whole
    assert users_lines(ValueError("never raised")) == ""
    assert lines_of(None) == ""


def test_only_a_mistake_in_building_was_one(write: Any) -> None:
    assert was_building(raised(write, lambda: None))
    assert not was_building(raised(write, lambda: (0, 0)))
    assert not was_building(None)
    with pytest.raises(OSError) as caught, annotate_exceptions():
        raise OSError("a disk may come back")
    assert not was_building(caught.value)


def test_the_innermost_note_stays() -> None:
    with (
        pytest.raises(ValueError) as caught,
        annotate_exceptions(lambda: (0, 4)),
        annotate_exceptions(),
    ):
        raise ValueError("built in the loop")
    assert was_building(caught.value)
    assert sum(note.startswith("Raised ") for note in caught.value.__notes__) == 1


class Told:
    """A board's stand-in."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def restarting(self, why: str, restarts: int | None = None) -> None:
        self.lines.append(why)

    def log(self, level: int, text: str) -> None:
        """A line about a checkpoint."""

    def awaits(self, what: str) -> None:
        self.lines[-1] += f" {what}."


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Told:
    driver = Told()
    monkeypatch.setattr(module, "DriverClient", lambda board: driver)
    return driver


@pytest.fixture
def told(board: Told) -> list[str]:
    return board.lines


def after(error: Exception, before: int | None, now: int) -> Exception:
    """The error, noted as one raised in a start that began at the step ``before``;
    None: while building.
    """
    try:
        with annotate_exceptions(lambda: None if before is None else (before, now)):
            raise error
    except Exception as e:
        return e


def fails(restarts: RetryPolicy, **failures: Exception) -> str | None:
    """How the run ends; None if it restarts."""
    try:
        restarts.after_exception(None, Failed(**failures).worker_failures)
    except RepeatedFailure as e:
        again = pickle.loads(pickle.dumps(e))
        assert list(again.failures) == [int(rank[1:]) for rank in failures]
        return again.why
    return None


def test_what_every_restart_would_repeat_ends_the_run_at_once(told: list[str]) -> None:
    for kind, text in (
        (KeyError, "lr"),
        (RuntimeError, "mat1 and mat2 cannot be multiplied"),
        (FileNotFoundError, "data"),
    ):
        assert (
            fails(RetryPolicy(20), w0=after(kind(text), None, 0))
            == "Raised while the workload was built."
        )
        assert "before this start's first" in str(
            fails(RetryPolicy(20), w1=after(kind(text), 30, 30), w0=CLOSED)
        )
    assert told == []


def test_lost_workers_and_storage_are_retried_with_a_line_each(told: list[str]) -> None:
    restarts = RetryPolicy(3)
    assert fails(restarts, w0=CLOSED, w1=DIED) is None
    # Ray did not yet know of the one that died
    assert fails(restarts, w0=CLOSED) is None
    assert fails(restarts, w0=after(CheckpointError("no room"), 3, 3)) is None
    assert told == [
        "Worker 1: A worker health check failed. The actor is dead because its worker "
        f"process has died. Restart 1 of 3, {FROM}.",
        f"Worker 0: RuntimeError: {CLOSED}. Restart 2 of 3, {FROM}.",
        f"Worker 0: CheckpointError: no room. Restart 3 of 3, {FROM}.",
    ]
    assert fails(restarts, w1=DIED) is None  # for Ray to end, which has counted, too
    assert len(told) == 3
    unlimited = RetryPolicy(-1)
    assert fails(unlimited, w1=DIED) is None
    assert told[-1].endswith(f"died. Restart 1, {FROM}.")
    unlimited.after_report(None, [{}], None)
    assert fails(unlimited, w1=DIED) is None
    assert told[-1].endswith(f"died. Restart 2, {FROM}.")
    unlimited.after_report(None, [{}], object())
    assert fails(unlimited, w1=DIED) is None
    assert told[-1].endswith("died. Restart 3, from the last checkpoint.")


def taken_away(actor: str | None) -> Exception:
    return WorkerHealthCheckFailedError(
        "A worker health check failed.", RayActorError(actor, "Gone", preempted=True)
    )


def test_a_preemption_is_told_once_and_is_no_failure(board: Told) -> None:
    """Ray counts it apart, and polls the dead worker until its node is gone."""
    none = RetryPolicy(0)
    for _ in range(3):
        assert fails(none, w0=CLOSED, w1=DIED, w2=taken_away("a")) is None
    # another worker dies before the same restart
    assert fails(none, w1=taken_away("b"), w2=taken_away("a")) is None
    assert fails(none, w1=taken_away("b")) is None
    text = (
        "Worker 2: A worker health check failed. Gone. Its node was preempted. Ray "
        "waits for the end of the notice, and "
    )
    text += "restarts the workers then."
    assert board.lines == [text]
    assert fails(none, w2=taken_away("c")) is None  # after the restart
    assert board.lines == [text] * 2
    assert fails(none, w0=DIED) is None
    assert len(board.lines) == 2


def test_a_number_of_restarts_that_is_none_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"Invalid FailureConfig\(max_failures=-2\)\. Must be a number of restarts; 0 for",
    ):
        RetryPolicy(-2)


def test_the_same_after_the_same_step_ends_the_run_the_second_time(
    told: list[str],
) -> None:
    restarts = RetryPolicy(20)
    assert fails(restarts, w0=after(IndexError("row at 0x7f01"), 0, 31)) is None
    assert fails(restarts, w0=after(IndexError("row at 0x7f01"), 30, 33)) is None
    assert fails(restarts, w1=after(ValueError("row at 0x7f01"), 30, 31)) is None
    # Messages have what is another in each start: an address, a file's name, a time.
    again = fails(restarts, w1=after(IndexError("row at 0x7f99"), 30, 31))
    assert "after optimizer step 31. The same in 2 starts" in str(again)
    assert len(told) == 3


def test_storage_that_fails_three_times_at_one_step_ends_the_run(
    told: list[str],
) -> None:
    restarts, full = RetryPolicy(20), OSError(28, "No space left on device")
    assert [fails(restarts, w0=after(full, 0, 31)) for _ in range(2)] == [None, None]
    assert "The same in 3 starts" in str(fails(restarts, w0=after(full, 0, 31)))


def test_a_checkpoint_that_may_not_be_stored_ends_the_run_at_once(
    told: list[str],
) -> None:
    error = NotPermitted("this user may not write there")
    assert (
        fails(RetryPolicy(20), w0=after(error, 3, 31))
        == "Raised after optimizer step 31."
    )
    assert (
        fails(
            RetryPolicy(20),
            w1=NotPermitted("of an upload in the background"),
            w0=CLOSED,
        )
        == "It is not permitted."
    )
    assert told == []


def test_an_error_without_a_note_is_rays_to_count(told: list[str]) -> None:
    restarts = RetryPolicy(20)
    assert [fails(restarts, w0=ValueError("of a callback")) for _ in range(4)] == [
        None
    ] * 4


def test_ray_takes_the_callback() -> None:
    assert isinstance(RetryPolicy(3), ray.train.UserCallback)
    assert pickle.loads(cloudpickle.dumps(RetryPolicy(3)))._max_failures == 3


def test_a_controller_that_cannot_write_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any) -> None:
        raise ray.train.ControllerError(
            OSError(28, "Error writing bytes to file. Detail: No space left on device")
        )

    monkeypatch.setattr(AdaScaleTrainer, "_run_controllers", fails)
    trainer = AdaScaleTrainer(
        lambda config: None,
        config=AdaScaleConfig(base_batch_size=4, total_steps=4),
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name="mine", storage_path=str(tmp_path)),
    )
    with pytest.raises(ray.train.ControllerError) as caught:
        trainer._fit()
    last = failure_message(caught.value).splitlines()[-1]
    assert last.startswith(
        f"Ray's controller could not write to the run's folder {tmp_path}/mine; the "
        f"disk of {tmp_path} is full: "
    )


@pytest.mark.parametrize("several", [True, False])
def test_a_failure_names_the_node_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """In the message and in the whole text, in the driver's process."""
    nodes = {"b": "worker-2 (10.0.0.2)"} | ({"a": "head (10.0.0.1)"} if several else {})
    answers = iter([nodes])  # then the head is gone

    def alive_nodes() -> dict[str, str]:
        for answer in answers:
            return answer
        raise ConnectionError("GCS unavailable")

    monkeypatch.setattr(cluster, "alive_nodes", alive_nodes)
    monkeypatch.setattr(
        cluster.ray,
        "get_runtime_context",
        lambda: SimpleNamespace(get_node_id=lambda: "b"),
    )
    with (
        pytest.raises(FileNotFoundError) as caught,
        annotate_exceptions(),
        cluster.naming_the_node(),
    ):
        raise FileNotFoundError("/data/train is missing")
    arrived = pickle.loads(cloudpickle.dumps(caught.value))
    who = "Worker 1 on node worker-2 (10.0.0.2)" if several else "Worker 1"
    failed = Failed(w1=arrived)
    message = failure_message(failed)
    assert message.startswith(f"{who}: FileNotFoundError: /data/train is missing")
    assert f"{who}:\n" in whole_failure(failed)
    assert "Raised while the workload was built." in arrived.__notes__
    # the head is gone as the worker begins
    with pytest.raises(KeyError, match="the user's"), cluster.naming_the_node():
        raise KeyError("the user's")
