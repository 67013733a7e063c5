"""What is due by the clock."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig, LocalBackend
from ray_adascale.run import due
from ray_adascale.run.due import Clocks, Due


class Told(LocalBackend):
    preemption_poll_s = 5.0
    notice: str | None = None

    def preemption_notice(self) -> str | None:
        return self.notice


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(due.time, "monotonic", lambda: now[0])
    return now


def make(backend: LocalBackend, **settings: Any) -> Clocks:
    return Clocks(AdaScaleConfig(report_every_s=10.0, checkpoint_every_s=300.0, **settings), backend)


def test_each_thing_is_due_after_its_own_time(clock: list[float]) -> None:
    mine = make(Told(device="cpu"))

    def due(**state: bool) -> Due:
        return mine.due(**({"in_flight": False, "busy": False} | state))

    assert due() == Due(report=0, checkpoint=0, poll=0, busy=0)
    assert not due().anything
    clock[0] += 5
    assert due() == Due(report=0, checkpoint=0, poll=1, busy=0)
    assert due().anything
    assert not mine.preempted(3)
    assert due() == Due(report=0, checkpoint=0, poll=0, busy=0)
    clock[0] += 295
    assert due(busy=True) == Due(report=1, checkpoint=1, poll=1, busy=1)
    assert due(in_flight=True) == Due(report=1, checkpoint=0, poll=1, busy=0)
    mine.reported()
    assert due() == Due(report=0, checkpoint=1, poll=1, busy=0)
    mine.saved()
    assert due() == Due(report=0, checkpoint=0, poll=1, busy=0)


def test_what_is_due_by_two_boundaries_is_due_by_either() -> None:
    before, now = Due(report=2, checkpoint=0, poll=0, busy=1), Due(report=0, checkpoint=1, poll=0, busy=0)
    assert now.together_with(before) == Due(report=2, checkpoint=1, poll=0, busy=1)
    assert not Due(report=0, checkpoint=0, poll=0, busy=1).anything  # there is only something to wait for


def test_only_rank_0_goes_by_its_clock(clock: list[float]) -> None:
    backend = Told(device="cpu")
    backend.rank = 1
    mine = make(backend)
    clock[0] += 1000
    assert mine.due(in_flight=False, busy=True) == Due(report=0, checkpoint=0, poll=0, busy=1)


def test_examples_a_second_count_from_the_last_report(clock: list[float]) -> None:
    mine = make(Told(device="cpu"))
    clock[0] += 2
    mine.took(8)
    mine.took(8)
    assert mine.examples_per_s == 8
    mine.reported()
    clock[0] += 4
    mine.took(8)
    assert mine.examples_per_s == 2


def test_a_notice_counts_once_until_it_changes(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    backend = Told(device="cpu")
    mine = make(backend)
    answers = []
    for backend.notice in (None, "node a", "node a", "nodes a, b", None, "node a"):
        answers.append(mine.preempted(7))
    assert answers == [False, True, False, True, False, True]
    with caplog.at_level(logging.WARNING):
        backend.notice = "node c"
        assert mine.preempted(8)
    assert "node c. Writing a checkpoint at step 8" in caplog.text
