"""Event files of a trace, read back record by record."""

from __future__ import annotations

import errno
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.analysis import tensorboard
from ray_adascale.analysis.tensorboard import LiveEvents, write_events
from ray_adascale.run.step import Step

from ..samples_of import row, scalars, step_of, write_rows


def test_every_number_of_the_trace_is_a_scalar(tmp_path: Path) -> None:
    rows = [row(1, loss=math.nan), row(2, loss=0.5, accuracy=0.75, note="mine")]
    folder = write_events(write_rows(tmp_path / "mine" / "trace.jsonl", rows), tmp_path / "events")
    assert folder == tmp_path / "events" / "mine"
    found = scalars(folder)
    assert found["gain"] == [(1, 2.0), (2, 2.0)]
    assert found["loss"] == [(2, 0.5)]
    assert found["accuracy"] == [(2, 0.75)]
    assert found["tau/accuracy"] == [(4, 0.75)]  # τ = 4 at the second step
    assert not {"note", "step", "attempt", "position"} & set(found)


def live_metrics(step: int) -> dict[str, Any]:
    """At S = 4 with gain 2."""
    return {"optimizer_steps": step, "effective_steps": 2.0 * step, "gain": 2.0, "loss": 1 / step, "note": "mine"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(tensorboard.time, "monotonic", lambda: now[0])
    return now


def test_a_run_that_goes_on_has_a_point_a_second_and_its_last_step(tmp_path: Path, clock: list[float]) -> None:
    events = LiveEvents(tmp_path)
    for step in range(1, 12):
        events.after_step(after(live_metrics(step)))
        clock[0] += 0.25
    events.ended("", {})
    steps = [1, 5, 9, 11]
    found = scalars(tmp_path / "steps")
    assert set(found) == {"gain", "loss", "effective_steps"}
    assert found["loss"] == [(step, pytest.approx(1 / step)) for step in steps]
    assert [at for at, _ in scalars(tmp_path / "tau")["tau/loss"]] == [2 * step for step in steps]


def test_points_get_rarer_as_a_run_gets_long(tmp_path: Path, clock: list[float]) -> None:
    events = LiveEvents(tmp_path)
    for step in range(1, 201):
        events.after_step(after(live_metrics(step)))
        clock[0] += 50.0  # 10,000 s in all: in the end a point each 20 s would do
    events.after_step(after(live_metrics(201)))
    clock[0] += 19.0
    events.after_step(after(live_metrics(202)))  # not yet
    clock[0] += 2.0
    events.after_step(after(live_metrics(203)))
    events.ended("", {})
    found = [at for at, _ in scalars(tmp_path / "steps")["gain"]]
    assert found == [*range(1, 202), 203]


def test_a_run_that_resumes_shows_no_step_twice(tmp_path: Path, clock: list[float]) -> None:
    for steps in (range(1, 31), range(21, 41)):  # killed at step 30, resumed from the checkpoint after 20
        events = LiveEvents(tmp_path)
        for step in steps:
            events.after_step(after(live_metrics(step)))
            clock[0] += 1.0
        events.ended("", {})
    assert [at for at, _ in scalars(tmp_path / "steps")["gain"]] == list(range(1, 41))
    assert [at for at, _ in scalars(tmp_path / "tau")["tau/gain"]] == list(range(2, 82, 2))


def test_without_tensorboardx_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    events = LiveEvents(tmp_path / "events")
    events.after_step(after(live_metrics(1)))
    events.ended("", {})
    assert not (tmp_path / "events").exists()


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="tensorboardX is needed"):
        write_events(write_rows(tmp_path / "trace.jsonl", [row(1)]), tmp_path)


def after(metrics: dict[str, Any]) -> Step:
    return replace(step_of(), metrics=metrics)


def add_many(events: LiveEvents, clock: list[float], steps: int, *, wait_after_the_first: bool) -> None:
    for step in range(1, steps):
        events.after_step(after(live_metrics(step)))
        clock[0] += 50.0
        if step == 1 and wait_after_the_first:
            events.ended("", {})  # when the disk has answered
    events.ended("", {})


@pytest.mark.timeout(30)
def test_a_full_disk_costs_event_files_and_nothing_else(tmp_path: Path, clock: list[float]) -> None:
    (tmp_path / "steps").symlink_to(
        "/dev/full"
    )  # no folder can be made there; and each write to it says: no space left
    events = LiveEvents(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"event files in .* are incomplete: .*[Ee]xist") as warned:
        add_many(events, clock, 30, wait_after_the_first=True)
    assert len(warned) == 1
    assert not list(tmp_path.glob("steps/events*"))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("fails", [True, False])
def test_no_step_waits_for_a_disk_that_is_full_or_does_not_answer(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    import tensorboardX

    answers = threading.Event()

    class Disk(tensorboardX.RecordWriter):
        def flush(self) -> None:
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            answers.wait(25)

    monkeypatch.setattr(tensorboardX, "RecordWriter", Disk)
    monkeypatch.setattr(tensorboard, "_PATIENCE_S", 0.1)
    events = LiveEvents(tmp_path)
    with pytest.warns(RuntimeWarning, match="No space left" if fails else "does not answer") as warned:
        add_many(events, clock, 30 if fails else 1000, wait_after_the_first=fails)
    answers.set()
    assert len(warned) == 1
