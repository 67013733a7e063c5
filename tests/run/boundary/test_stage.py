"""The values of a step boundary: flags that are summed over the workers, and intervals."""

from __future__ import annotations

import math

import pytest

from ray_adascale.run.boundary import stage
from ray_adascale.run.boundary.stage import BoundaryFlags, IntervalTimer, Stage
from ray_adascale.run.observe.step import Listener

from ...samples_of import step_of

NOTHING = BoundaryFlags.NONE
REPORT, CHECKPOINT, POLL = BoundaryFlags.REPORT, BoundaryFlags.CHECKPOINT, BoundaryFlags.POLL
STOP, STALLED, BUSY = BoundaryFlags.STOP, BoundaryFlags.STALLED, BoundaryFlags.BUSY


def test_the_sum_over_workers_has_rank_0s_flags_and_whether_any_worker_is_busy() -> None:
    for mine in (NOTHING, REPORT, REPORT | CHECKPOINT | POLL | STOP | STALLED):
        assert BoundaryFlags.from_sum(float(mine)) == mine
        assert BoundaryFlags.from_sum(float(mine + 3 * BUSY)) == mine | BUSY
        assert BoundaryFlags.from_sum(float((mine | BUSY) + 16383 * BUSY)) == mine | BUSY
    assert max(REPORT, CHECKPOINT, POLL, STOP, STALLED) * 2 == BUSY


def test_an_interval_begins_anew_when_it_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(stage.time, "monotonic", lambda: clock[0])
    timer = IntervalTimer(5.0)
    assert not timer.due
    clock[0] += 5
    assert (timer.due, timer.elapsed) == (True, 5)
    timer.restart()
    assert (timer.due, timer.elapsed) == (False, 0)


def test_an_infinite_interval_never_passes() -> None:
    assert not IntervalTimer(math.inf).due


def test_a_stage_that_overrides_nothing_is_never_due_and_has_no_state() -> None:
    stage, run = Stage(), None
    assert not stage.due_by(math.inf)
    assert stage.flags() == NOTHING
    assert stage.act(run, REPORT | STOP) is None  # type: ignore[arg-type,func-returns-value]
    assert stage.state_dict() == {}
    stage.load_state_dict({"iterations": 3})


def test_a_listener_that_overrides_nothing_leaves_the_step_as_it_is() -> None:
    listener, now = Listener(), step_of(1)
    metrics, row = dict(now.metrics), dict(now.row)
    listener.after_step(now)
    listener.recorded({"accuracy": 0.5})
    listener.ended("done", {})
    assert (now.metrics, now.row) == (metrics, row)
