"""Checkpoints on their way to disk: what workers must agree on, and what is left
where one can't take part.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_adascale import CheckpointError, LocalBackend, checkpoint
from ray_adascale.checkpoint import dcp
from ray_adascale.optim.schedule import BaseSchedule
from ray_adascale.run.boundary import checkpointing
from ray_adascale.run.boundary.checkpointing import Boundary, Saver
from ray_adascale.run.boundary.stage import StepReport

SCHEDULE = BaseSchedule(
    base_batch_size=4,
    total_steps=9,
    scheduler_unit=None,
    base_steps_per_epoch=None,
    lr_curve=[[0.1]],
)


def outcome(metrics: dict[str, float], effective_steps: float = 1.0) -> StepReport:
    return StepReport(
        metrics=metrics, effective_steps=effective_steps, schedule=SCHEDULE
    )


def content() -> Any:
    return {"x": torch.ones(3)}, {"at": 1}


class Uploading(LocalBackend):
    """A backend whose uploads end when they are told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, device="cpu")
        self.reported: list[dict[str, Any]] = []
        self.going = False

    def report_in_background(self, outcome: StepReport, folder: Path) -> None:
        checkpoint.verify(folder)
        self.reported.append(dict(outcome.metrics))
        self.going = True

    @property
    def uploading(self) -> bool:
        return self.going


def test_one_is_in_flight_until_it_is_handed_over_and_busy_until_it_is_uploaded(
    tmp_path: Path,
) -> None:
    backend = Uploading(tmp_path)
    saver = Saver(backend)
    assert not saver.in_flight
    metrics = {"loss": 1.0}
    saver.begin(Boundary(1, 1.0, 0.1), content, outcome(metrics))
    metrics["loss"] = 2.0  # the next step's
    assert saver.in_flight
    saver.finish()
    assert not saver.in_flight
    assert backend.reported == [{"loss": 1.0}]
    assert saver.busy
    backend.going = False
    assert not saver.busy
    saver.finish()
    assert len(backend.reported) == 1
    # The next one hands over the one before it.
    saver.begin(Boundary(2, 2.0, 0.1), content, outcome({"loss": 2.0}, 2.0))
    assert (
        saver.save(Boundary(3, 3.0, 0.1), content) == tmp_path / "checkpoint_0000000003"
    )
    assert [row["loss"] for row in backend.reported] == [1.0, 2.0]


def test_nothing_is_made_where_none_is_kept() -> None:
    saver = Saver(LocalBackend(device="cpu"))
    assert (
        saver.save(Boundary(1, 1.0, 0.1), lambda: pytest.fail("not asked for")) is None
    )
    saver.begin(
        Boundary(1, 1.0, 0.1), lambda: pytest.fail("not asked for"), outcome({})
    )
    assert not saver.in_flight


def test_content_that_cannot_be_made_leaves_no_folder(tmp_path: Path) -> None:
    def broken() -> Any:
        raise MemoryError("no room for a copy")

    with pytest.raises(MemoryError, match="no room"):
        Saver(LocalBackend(tmp_path, device="cpu")).save(Boundary(1, 1.0, 0.1), broken)
    assert list(tmp_path.iterdir()) == []


def full(folder: str, error: OSError | None, workers: int) -> str:
    """Saves where there is no room for rank 1's folder."""

    class Full(LocalBackend):
        def checkpoint_folder(self, step: int) -> Path | None:
            if self.rank == workers - 1 and error is not None:
                raise error
            return Path(folder, str(self.rank))

    try:
        Saver(Full(folder, device="cpu")).save(Boundary(7, 1.5, 0.1), content)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "saved"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_without_room_for_a_folder_is_named_by_every_worker(
    tmp_path: Path, pool: Any, workers: int
) -> None:
    run = pool(2).run if workers == 2 else lambda fn, *args: [fn(*args)]
    said = run(
        full,
        str(tmp_path),
        OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x")),
        workers,
    )
    for text in said:
        assert re.match(
            rf"CheckpointError: No checkpoint was saved at all\. rank {workers - 1}: OSError: .*No space",
            text,
        )
        assert re.search(
            rf"the disk of {tmp_path} is full: [\d,.]+ of [\d,.]+ MB are free", text
        )
    assert len(said) == workers
    # the collectives are in step again
    assert run(full, str(tmp_path), None, workers) == ["saved"] * workers


def disagree(folder: str, step: int, tau: float, broken: bool) -> str:
    rank = dist.get_rank()

    def mine() -> Any:
        if broken and rank == 1:
            raise MemoryError("no room for a copy")
        return content()

    try:
        Saver(LocalBackend(folder, device="cpu")).save(
            Boundary(7 + step * rank, 1.5 + tau * rank, 0.1), mine
        )
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "saved"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 0.0, False), ["saved", "saved"]),
        ((1, 0.0, False), ["rank 1: τ=1.5, lr=0.1, step=8"] * 2),
        ((0, 1e-15, False), ["rank 1: τ=1.500000000000001, lr=0.1, step=7"] * 2),
        (
            (0, 0.0, True),
            [
                "CheckpointError: No checkpoint was saved at all. rank 1: MemoryError: no room",
                "MemoryError: no room",
            ],
        ),
    ],
)
def test_workers_that_are_not_at_one_place_write_nothing(
    tmp_path: Path, pool: Any, arguments: Any, said: list[str]
) -> None:
    # The folder's name comes from the step: those that differ in it must still meet in
    # the comparison.
    found = pool(2).run(disagree, str(tmp_path), *arguments)
    for one, expected in zip(found, said, strict=True):
        assert expected in one
    assert len(list(tmp_path.glob("*/manifest.json"))) == (said[0] == "saved")


def test_a_disk_that_hangs_is_told_each_half_minute_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()
    write = dcp.Writer.write_data

    def slow(*given: Any) -> Any:
        hangs.wait(60)
        return write(*given)

    monkeypatch.setattr(dcp.Writer, "write_data", slow)
    monkeypatch.setattr(checkpointing, "_LONG_S", 0.1)
    backend = LocalBackend(tmp_path, device="cpu")
    saver = Saver(backend)
    backend.store_timeout_s = 0.5
    saver.begin(Boundary(9, 9.0, 0.1), content, outcome({"optimizer_steps": 9}))
    assert saver.busy
    time.sleep(0.15)
    with caplog.at_level(logging.WARNING, "ray_adascale"):
        assert saver.busy  # as asked at each step boundary
        (line,) = caplog.messages
        assert re.fullmatch(
            r"Worker 0 has been storing the checkpoint of optimizer step 9 in "
            rf"{tmp_path}/checkpoint_0000000009 for 0 s: 0\.0 MB are there\.",
            line,
        )
        time.sleep(0.5)
        assert not saver.busy
        with pytest.raises(
            CheckpointError,
            match=r"rank 0: Worker 0 has been storing .* given up after "
            r"AdaScaleConfig\(store_timeout_s=0\.5\) without progress",
        ):
            saver.finish()
    hangs.set()
    assert not list(tmp_path.glob("*/manifest.json"))


def test_a_disk_that_is_slow_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for the time without a new byte, not for the whole."""

    class Slow:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            time.sleep(0.15)
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    create = dcp.FileSystem.create_stream

    @contextlib.contextmanager
    def slow(*given: Any) -> Any:
        with create(*given) as file:
            yield Slow(file)

    monkeypatch.setattr(dcp.FileSystem, "create_stream", slow)
    monkeypatch.setattr(dcp, "_PIECE", 4096, raising=False)
    backend = LocalBackend(tmp_path, device="cpu")
    backend.store_timeout_s = 1.0
    saver = Saver(backend)
    tensors = {"x": torch.ones(10 * 1024)}  # ten pieces of one tensor
    began = time.monotonic()
    saver.begin(Boundary(9, 9.0, 0.1), lambda: (tensors, {}), outcome({}))
    while saver.busy:
        time.sleep(0.05)
    saver.finish()
    assert time.monotonic() - began > backend.store_timeout_s
    checkpoint.verify(tmp_path / "checkpoint_0000000009")


def test_the_end_of_a_run_waits_for_its_checkpoint_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = dcp.Writer.write_data

    def slow(*given: Any) -> Any:
        time.sleep(0.5)
        return write(*given)

    monkeypatch.setattr(dcp.Writer, "write_data", slow)
    monkeypatch.setattr(checkpointing, "_LONG_S", 0.1)
    saver = Saver(LocalBackend(tmp_path, device="cpu"))
    saver.begin(Boundary(9, 9.0, 0.1), content, outcome({"optimizer_steps": 9}))
    with caplog.at_level(logging.WARNING, "ray_adascale"):
        saver.finish()
    assert len(caplog.messages) >= 2
    checkpoint.verify(tmp_path / "checkpoint_0000000009")
