"""The values of a step boundary: flags that are summed over the workers, and intervals."""

from __future__ import annotations

import math

import pytest

from ray_adascale.run.boundary import stage
from ray_adascale.run.boundary.stage import BoundaryFlags, IntervalTimer

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
