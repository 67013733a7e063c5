"""What rank 0 writes down of each step, and for whom."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ray_adascale.run.backend import LocalBackend
from ray_adascale.run.steplog import TRACE, StepLog
from ray_adascale.run.trace import read_trace


def take_steps(log: StepLog, count: int) -> None:
    for step in range(1, count + 1):
        log.step({"step": step, "loss": 1 / step})


def test_rows_reach_the_backend_with_metrics_that_came_after_the_step(tmp_path: Path) -> None:
    log = StepLog(LocalBackend(tmp_path, device="cpu"), keep=None)
    take_steps(log, 2)
    log.add({"accuracy": 0.5})
    take_steps(log, 1)
    log.finish()
    rows = list(read_trace(tmp_path / "trace.jsonl"))
    assert rows == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5, "accuracy": 0.5}, {"step": 1, "loss": 1.0}]


def test_a_checkpoint_gets_the_rows_so_far(tmp_path: Path) -> None:
    log = StepLog(LocalBackend(tmp_path, device="cpu"), keep=None)
    take_steps(log, 3)
    path, size = log.files()[TRACE]
    take_steps(log, 1)
    assert [row["step"] for row in read_trace(path)] == [1, 2, 3]
    assert path.stat().st_size == size


@pytest.mark.parametrize("why", ["no folder", "another rank", "the backend says so"])
def test_nothing_is_written_for_nobody(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    backend = LocalBackend(None if why == "no folder" else tmp_path, device="cpu")
    if why == "another rank":
        backend.rank = 1
    if why == "the backend says so":
        backend.keeps_trace = False
    log = StepLog(backend, keep=None)
    take_steps(log, 3)
    assert log.files() == {}
    log.finish()
    assert not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "trace.jsonl").exists()


def test_the_number_of_a_step_is_noted_without_a_trace(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, device="cpu")
    backend.keeps_trace = False
    take_steps(StepLog(backend, keep=None), 7)
    assert StepLog(backend, keep=None).last == 7
