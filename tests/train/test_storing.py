"""A checkpoint that takes long to store: lines about it, a limit, and what Ctrl-C
waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import ray
import torch

from ray_adascale import checkpoint
from ray_adascale.checkpoint import CheckpointError
from ray_adascale.train import driver_monitor, storing
from ray_adascale.train.driver_channel import DriverChannel, Status
from ray_adascale.train.driver_monitor import DriverMonitor
from ray_adascale.train.storing import Storing, stored_within
from ray_adascale.train.trainer import AdaScaleTrainer

LOCAL = pyarrow.fs.LocalFileSystem()


def test_an_upload_that_hangs_is_given_up_and_its_progress_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "_LOOK_S", 0.05)
    told: list[Storing | None] = []
    hangs = threading.Event()

    def store() -> None:
        (tmp_path / "__0_0.distcp").write_bytes(b"x" * 3_000_000)
        hangs.wait(60)

    began = time.monotonic()
    with pytest.raises(
        CheckpointError,
        match=r"Worker 1 has been storing the checkpoint of optimizer step 1,777 in "
        rf"{tmp_path} for \d+ s: 3\.0 MB are there.* "
        r"AdaScaleConfig\(store_timeout_s=0\.5\) without progress",
    ):
        stored_within(
            store, Storing(1, 1777, str(tmp_path)), LOCAL, told.append, limit_s=0.5
        )
    hangs.set()
    assert time.monotonic() - began < 30
    assert told[-1] is None
    assert any(each is not None and each.stored == 3_000_000 for each in told)


def test_an_upload_that_makes_progress_has_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "_LOOK_S", 0.02)

    def store() -> str:
        for number in range(10):
            time.sleep(0.2)
            (tmp_path / str(number)).write_text("more")
        return "stored"

    where = Storing(0, 7, str(tmp_path))
    found = stored_within(store, where, LOCAL, lambda now: None, limit_s=1.5)
    assert found == "stored"


def test_an_error_of_the_storage_is_raised_as_it_is(tmp_path: Path) -> None:
    def store() -> None:
        raise TimeoutError("of the storage")

    with pytest.raises(TimeoutError, match="of the storage"):
        stored_within(store, Storing(0, 7, str(tmp_path)), LOCAL, lambda now: None, 9.0)


def test_the_channel_has_the_share_that_takes_longest_and_ages_without_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = DriverChannel.__ray_metadata__.modified_class()
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    board.set_running(True)
    assert board.status(0).storing is None
    board.storing(0, Storing(0, 7, "/x", seconds=3.0))
    board.storing(1, Storing(1, 7, "/x", seconds=9.0, still_s=4.0))
    now[0] = 140.0
    found = board.status(0).storing
    assert (found.rank, found.seconds, found.still_s) == (1, 49.0, 44.0)
    board.storing(1, None)
    assert board.status(0).storing.rank == 0
    board.set_running(False)  # the workers are gone
    assert board.status(0).storing is None


class Board:
    """A channel whose status the test sets."""

    def __init__(self, now: Storing | None) -> None:
        self.now = now
        self.status = SimpleNamespace(remote=self._status)
        self.request_stop = SimpleNamespace(remote=lambda: None)

    def _status(self, since: int) -> Status:
        return Status({"optimizer_steps": 777}, True, [], 0, storing=self.now)


@pytest.fixture
def monitor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> tuple[DriverMonitor, Board, list[Any]]:
    caplog.set_level(logging.INFO, "ray_adascale")
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(driver_monitor, "_POLL_S", 0.01)
    monkeypatch.setattr(driver_monitor, "_STOP_S", 0.3)
    board = Board(Storing(0, 777, "/runs/x/checkpoint_1", 1_000_000, 31.0, 0.0))
    lock: Any = SimpleNamespace(lost=None)
    made = DriverMonitor(board, ({"CPU": 1.0}, 1), lock)
    made.controller = "the controller"
    return made, board, killed


def test_ctrl_c_waits_for_a_checkpoint_whose_storing_makes_progress(
    monitor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, board, killed = monitor
    with made:
        while not any("has been storing" in line for line in caplog.messages):
            time.sleep(0.01)
        made.interrupt()
        time.sleep(1.0)  # more than the limit
        assert not killed
        board.now = Storing(0, 777, "/runs/x/checkpoint_1", 1_000_000, 40.0, 5.0)
        while not killed:
            time.sleep(0.01)
    (line,) = [line for line in caplog.messages if "has been storing" in line]
    assert line == (
        "Worker 0 has been storing the checkpoint of optimizer step 777 in "
        "/runs/x/checkpoint_1 for 31 s: 1.0 MB are there."
    )


def test_what_is_called_at_the_start_may_hang_and_the_driver_goes_on(
    monitor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The command line writes its options to the storage then."""
    monkeypatch.setattr(driver_monitor, "ANSWER_LIMIT_S", 0.2)
    made, _, killed = monitor
    answers = threading.Event()

    def on_start() -> None:
        answers.wait(60)
        raise OSError("no such bucket")

    made._on_start = on_start
    with made:
        while not made.status.running:
            time.sleep(0.01)
        made.interrupt()
        made.interrupt()
        while not killed:
            time.sleep(0.01)
    answers.set()
    made._after_start.result(60)
    assert "After the run's start: OSError: no such bucket" in caplog.messages


def test_a_second_ctrl_c_ends_at_once(monitor: Any) -> None:
    made, _, killed = monitor
    with made:
        while not made.status.running:
            time.sleep(0.01)
        made.interrupt()
        time.sleep(0.2)
        assert not killed
        made.interrupt()
        while not killed:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("reached", "storing", "said"),
    [
        (20, None, "at once; its last whole checkpoint is of optimizer step 20."),
        (
            50,
            None,
            "at once, at optimizer step 50; its last whole checkpoint is of optimizer "
            "step 20, and what came after it is lost.",
        ),
        (
            50,
            Storing(0, 50, "/runs/x", 2_000_000, 95.0),
            "and what came after it is lost. Worker 0 has been storing the checkpoint "
            "of optimizer step 50 in /runs/x for 95 s: 2.0 MB are there, and was cut "
            "off.",
        ),
        # whole, though its worker has not said so
        (
            20,
            Storing(0, 20, "/runs/x", 2_000_000, 95.0),
            "at once; its last whole checkpoint is of optimizer step 20.",
        ),
    ],
)
def test_the_last_line_says_what_is_there_by_looking(
    tmp_path: Path, reached: int, storing: Storing | None, said: str
) -> None:
    trainer = object.__new__(AdaScaleTrainer)
    trainer.run_config = SimpleNamespace(
        name="x", storage_path=str(tmp_path), storage_filesystem=None
    )
    status = Status({"optimizer_steps": reached}, True, [], 0, storing=storing)
    trainer._monitor = SimpleNamespace(status=status)  # type: ignore[assignment]
    (tmp_path / "x").mkdir()
    assert "it has no whole checkpoint" in trainer._what_is_stored()
    for step in (20, 50):
        checkpoint.save(
            tmp_path / "x" / f"checkpoint_{step}",
            {"x": torch.ones(3)},
            {"iterations": step},
        )
    # The upload was cut off with the manifest there.
    (tmp_path / "x" / "checkpoint_50" / "__0_0.distcp").unlink()
    assert trainer._what_is_stored().endswith(said)
