"""Which worker holds up a run, by the heartbeats of all."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_adascale.run.observe.pulse import Phase, Pulse
from ray_adascale.train.hangs import Beat, Beats, HangWatch
from ray_adascale.train.worker_reports import Heartbeat, end_heartbeats


def beat(
    rank: int,
    phase: Phase,
    seconds: float,
    *,
    steps: int = 57,
    limit: float | None = 120.0,
    of: int = 2,
) -> Beat:
    return Beat(
        rank,
        of,
        steps,
        phase,
        seconds,
        limit,
        f"node{rank}",
        f"10.0.0.{rank}",
        1000 + rank,
    )


def beats(*given: tuple[Beat, float]) -> Beats:
    found = Beats()
    for one, came in given:
        found.add(one, came)
    return found


def test_a_worker_that_is_silent_holds_up_the_others() -> None:
    found = beats(
        (beat(1, Phase.PASS, 3.0, steps=55), 10.0),
        (beat(0, Phase.REDUCTION, 121.0), 130.0),
    )
    assert found.hang(126.0) is None  # of worker 1 it is 119 s
    hang = found.hang(130.0)
    assert hang is not None
    assert hang.description() == (
        "The run has made no step for 121 s, after step 57. Worker 1 on node 10.0.0.1 "
        "(process 1001) sends no heartbeat: it is stopped, or its node can't be "
        "reached. Worker 0 waits for the gradients of the other workers."
    )


def test_a_worker_whose_loader_is_stuck_is_behind() -> None:
    found = beats(
        *(
            (beat(r, p, 125.0, of=3), 500.0)
            for r, p in enumerate([Phase.REDUCTION, Phase.DATA, Phase.PASS])
        )
    )
    hang = found.hang(501.0)
    assert hang is not None
    assert [one.rank for one in hang.held_up_by] == [1]
    assert (
        "Worker 1 on node 10.0.0.1 (process 1001) waits for its next batch. Worker 0 "
        "waits" in hang.description()
    )


def test_if_all_are_at_the_same_place_no_worker_is_blamed() -> None:
    found = beats(*((beat(r, Phase.REDUCTION, 200.0), 500.0) for r in range(2)))
    hang = found.hang(501.0)
    assert hang is not None
    assert (
        "No worker is behind, and each of them waits for the gradients"
        in hang.description()
    )
    assert [one.rank for one in hang.held_up_by] == [0, 1]


def test_one_worker_alone() -> None:
    hang = beats((beat(0, Phase.DATA, 200.0, of=1), 500.0)).hang(500.0)
    assert hang is not None
    assert (
        "Worker 0 on node 10.0.0.0 (process 1000) waits for its next batch."
        in hang.description()
    )


@pytest.mark.parametrize(
    "other",
    [
        beat(1, Phase.BOUNDARY, 999.0),  # evaluates alone
        beat(1, Phase.BETWEEN, 999.0),
        beat(1, Phase.START, 999.0, limit=None),
        beat(1, Phase.PASS, 100.0),  # has moved since
        beat(1, Phase.ENDED, 999.0),
        beat(1, Phase.PASS, 999.0, limit=2000.0),  # its steps are as slow as that
    ],
)
def test_no_hang_while_a_worker_may_take_its_time(other: Beat) -> None:
    found = beats((beat(0, Phase.REDUCTION, 999.0), 500.0), (other, 500.0))
    assert found.hang(500.0) is None


def test_a_silent_worker_is_no_exception_in_a_phase_without_a_limit() -> None:
    found = beats(
        (beat(0, Phase.REDUCTION, 300.0), 500.0), (beat(1, Phase.BOUNDARY, 1.0), 379.0)
    )
    hang = found.hang(500.0)
    assert hang is not None
    assert hang.held_up_by[0].rank == 1


def test_nothing_is_known_before_all_workers_have_ended_their_first_step() -> None:
    assert Beats().hang(0.0) is None
    assert beats((beat(0, Phase.PASS, 999.0), 0.0)).hang(0.0) is None
    both = beats(
        (beat(0, Phase.PASS, 999.0, limit=None), 0.0),
        (beat(1, Phase.PASS, 999.0, limit=None), 0.0),
    )
    assert both.hang(0.0) is None


def test_workers_of_an_earlier_start_are_forgotten() -> None:
    found = beats(*((beat(r, Phase.PASS, 999.0, of=3), 0.0) for r in range(3)))
    assert found.hang(0.0) is not None
    found.add(beat(0, Phase.PASS, 1.0, of=2), 400.0)
    found.add(beat(1, Phase.PASS, 1.0, of=2), 400.0)
    assert found.hang(400.0) is None
    hang = found.hang(600.0)
    assert hang is not None
    assert [one.rank for one in hang.held_up_by] == [0, 1]
    found.clear()
    assert found.hang(9999.0) is None


def test_a_worker_without_news_is_told_after_ten_seconds_with_the_limit_in_force(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a power loss, of which Ray says nothing for a minute."""
    found = beats(
        (beat(0, Phase.REDUCTION, 1.0), 100.0),
        (beat(1, Phase.PASS, 1.0, limit=145.0), 100.0),
    )
    watch = HangWatch()
    with caplog.at_level(logging.INFO, "ray_adascale"):
        for second in range(101, 150):
            found.add(beat(0, Phase.REDUCTION, 1.0), float(second))
            watch.log_quiet(found.quiet(float(second)), float(second))
        assert len(caplog.messages) == 2  # again after half a minute
        assert caplog.messages[0] == (
            "No heartbeat of worker 1 on node 10.0.0.1 for 10 s. Ray takes about a "
            "minute to notice that a node is lost. The run itself ends a worker after "
            "145 s without a step."
        )
        found.add(beat(1, Phase.PASS, 1.0), 150.0)
        watch.log_quiet(found.quiet(151.0), 151.0)
        watch.log_quiet(found.quiet(161.0), 161.0)  # worker 0 this time, at once
    assert len(caplog.messages) == 3
    found.add(beat(0, Phase.ENDED, 1.0), 162.0)
    found.add(beat(1, Phase.ENDED, 1.0), 162.0)
    assert found.quiet(300.0) is None


def test_the_last_beat_of_a_worker_that_ray_is_about_to_end_is_sent_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the run grows. A worker that only falls silent would be told as lost."""
    sent: list[Phase] = []
    client: Any = SimpleNamespace(
        connected=True, beat=lambda beat, wait: bool(sent.append(beat.phase))
    )
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node0")
    )
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.0")
    pulse = Pulse(None)
    heartbeat = Heartbeat(client, pulse, 0, 1)
    end_heartbeats()
    pulse.enter(Phase.DATA)  # its loop goes on until the process ends
    heartbeat.thread.join(10)
    assert not heartbeat.thread.is_alive()
    assert sent[-1] is Phase.ENDED


def test_a_step_that_does_not_end_is_told_each_half_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two workers are parted from each other, and both reach the driver."""
    found = beats(*((beat(r, Phase.REDUCTION, 25.0), 500.0) for r in range(2)))
    assert found.slow(504.0) is None
    slow = found.slow(506.0)
    assert slow is not None
    assert found.hang(506.0) is None
    watch = HangWatch()
    with caplog.at_level(logging.WARNING, "ray_adascale"):
        for now in (506.0, 510.0, 535.0, 537.0, 560.0):
            watch.log_slow(found.slow(now), now)
    assert len(caplog.messages) == 2
    assert caplog.messages[0] == (
        "The run has made no step for 31 s, after step 57. No worker is behind, and "
        "each of them waits for the gradients of the other workers: the network may be "
        "down. The limit is 120 s; then the worker that is behind is killed."
    )
    # a step that takes 40 s, as those before it
    long = beats(*((beat(r, Phase.PASS, 39.0, limit=400.0), 500.0) for r in range(2)))
    assert long.slow(500.0) is None
    # an evaluation may take any time
    assert beats((beat(0, Phase.BOUNDARY, 99.0, of=1), 500.0)).slow(500.0) is None
