"""The flags of a step boundary, which are summed over the workers."""

from __future__ import annotations

from ray_adascale.run.boundary.stage import BoundaryFlags

NOTHING = BoundaryFlags.NONE
REPORT, CHECKPOINT, POLL = (
    BoundaryFlags.REPORT,
    BoundaryFlags.CHECKPOINT,
    BoundaryFlags.POLL,
)
STOP, STALLED, BUSY = BoundaryFlags.STOP, BoundaryFlags.STALLED, BoundaryFlags.BUSY


def test_the_sum_over_workers_has_rank_0s_flags_and_whether_any_worker_is_busy() -> (
    None
):
    for mine in (NOTHING, REPORT, REPORT | CHECKPOINT | POLL | STOP | STALLED):
        assert BoundaryFlags.from_sum(float(mine)) == mine
        assert BoundaryFlags.from_sum(float(mine + 3 * BUSY)) == mine | BUSY
        assert (
            BoundaryFlags.from_sum(float((mine | BUSY) + 16383 * BUSY)) == mine | BUSY
        )
    assert max(REPORT, CHECKPOINT, POLL, STOP, STALLED) * 2 == BUSY
