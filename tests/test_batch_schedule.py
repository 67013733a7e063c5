"""A given schedule of batches: how it is read, its plans, and resumes.
``tests/model`` compares whole runs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig
from ray_adascale.batch import BatchFollower, BatchSchedule, read_schedule
from ray_adascale.forecast.replay import Forecaster, Law, noise_curves, replay
from ray_adascale.run.observe.eta import forecast_run

from .changing_batch import drive, make_run, network
from .samples_of import recipe

# ---- what is read --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "unit", "starts"),
    [
        ([(0, 32), (0.2, 128), (0.6, 512)], "share", (0, 0.2, 0.6)),
        ([(0.0, 32), ("20%", 128), ("60 %", 512)], "share", (0, 0.2, 0.6)),
        ("0:32,20%:128,60%:512", "share", (0, 0.2, 0.6)),
        (" 0:32, 0.2:128, .6:512", "share", (0, 0.2, 0.6)),
        ([[0, 32], [200, 128], ["600", 512]], "steps", (0, 200, 600)),
        ("0:32,200:128,600:512", "steps", (0, 200, 600)),
        ("0%:32,1:128,2:512", "steps", (0, 1, 2)),
    ],
)
def test_starts_are_shares_or_effective_steps(
    given: Any, unit: Any, starts: tuple[float, ...]
) -> None:
    found = read_schedule(given)
    assert found == BatchSchedule(starts, (32, 128, 512), unit == "share")
    assert read_schedule(str(found)) == found
    assert (
        AdaScaleConfig(base_batch_size=32, batch_schedule=given)
        .batch.plan(1)
        .global_batch_size
        == 32
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "no pairs"),
        ("", "no pairs|no start"),
        (32, "no pairs"),
        ([32, 128], "no pairs"),
        ([(0, 32, 1)], "no pairs"),
        ("32", "'' is no start"),
        ([(0, 32), (1.0, 64)], r"1\.0 is no start"),
        ([(0, 32), (-1, 64)], "-1 is no start"),
        ([(0, 32), (True, 64)], "True is no start"),
        ([(0, 32), (math.nan, 64)], "nan is no start"),
        ([(0, 32), ("100%", 64)], "'100%' is no start"),
        ("0:32,2 epochs:64", "'2 epochs' is no start"),
        ("0:32,50 examples:64", "is no start"),
        ([(0, 32.0)], r"32\.0 is no batch"),
        ([(0, True)], "True is no batch"),
        ("0:0", "0 is no batch"),
        ("0:many", "'many' is no batch"),
        ("20%:32", "the first batch begins at 20%"),
        ("0:32,20%:64,300:128", "several units"),
        ("0:32,20%:64,20%:128", "do not ascend"),
        ("0:32,0:64", "do not ascend"),
        ("0:32,60%:64,20%:128", "do not ascend"),
    ],
)
def test_other_schedules_are_refused_with_the_forms_there_are(
    given: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        AdaScaleConfig(base_batch_size=8, batch_schedule=given)
    assert f"batch_schedule={given!r}" in str(refused.value)
    assert "Must be pairs of start and batch" in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_efficiency": 0.5},
            "target_efficiency=0.5, batch_schedule='0:8'.*not both",
        ),
        (
            {"global_batch_size": 8},
            "batch_schedule='0:8', global_batch_size=8.*not both",
        ),
        ({"base_batch_size": 9}, "batch of 8 is smaller than base_batch_size=9"),
        (
            {"max_global_batch_size": 7},
            r"AdaScaleConfig\(max_global_batch_size=7\): it leaves no batch on 1 workers",
        ),
    ],
)
def test_settings_that_contradict_a_schedule_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AdaScaleConfig(
            **({"base_batch_size": 8, "batch_schedule": "0:8"} | settings)
        ).batch.plan(1)


# ---- the plans -----------------------------------------------------------------------


def phases(schedule: Any, workers: int, **settings: Any) -> list[tuple[int, int]]:
    """(B, passes) of each batch of a schedule."""
    batch = AdaScaleConfig(
        **({"base_batch_size": 8, "batch_schedule": schedule} | settings)
    ).batch
    return [(plan.global_batch_size, plan.passes) for plan in batch.plans(workers)]


def test_a_bound_cuts_the_batches_above_it() -> None:
    given = "0:8,10:33,20:64"
    assert phases(given, 2, max_global_batch_size=40) == [(8, 1), (33, 3), (40, 3)]
    # Passes of one example on two workers: 11 examples need 6 of them, which are 12.
    assert phases(
        "0:8,10:12,20:64", 2, per_worker_batch_size=1, max_global_batch_size=11
    ) == [(8, 4), (10, 5), (10, 5)]


def following(schedule: str) -> BatchFollower:
    batch = AdaScaleConfig(base_batch_size=8, batch_schedule=schedule).batch
    return BatchFollower(batch, 2, total_steps=10, window=1.0)


def test_a_batch_begins_at_the_first_boundary_that_has_reached_its_start() -> None:
    def batches(schedule: str, *taus: float) -> list[int]:
        it = following(schedule)
        seen = [it.plan.global_batch_size]
        for tau in taus:
            due, before = it.due_by(tau), it.plan
            assert it.next_plan(tau, lambda: (math.nan, math.nan)) == it.plan
            assert due or it.plan == before
            seen.append(it.plan.global_batch_size)
            again = following(schedule)
            again.resume(json.loads(json.dumps(it.state())), tau, lambda: (1.0, 1.0))
            assert again.plan == it.plan
            assert not again.due_by(tau)
        return seen

    # 0.7·10 is 7.000000000000001 in floats: τ = 7 is 70 % of 10 all the same.
    assert batches("0:8,70%:16", 6.9, 7.0, 9.0) == [8, 8, 16, 16]
    assert batches("0:8,3:32,5:16", 2.99, 3.0, 4.9, 5.5, 9.0) == [8, 8, 32, 32, 16, 16]
    assert batches("0:8,3:32,5:8", 6.0) == [8, 8]  # one step went over the batch of 32


def test_a_step_that_may_end_in_the_second_of_two_equal_batches_is_read() -> None:
    """τ may be at most 6 by then, but it may be 4 as well, where the batch is 32."""
    it = following("0:8,3:32,5:8")
    assert it.due_by(6.0)
    assert it.next_plan(4.0, lambda: (1.0, 1.0)).global_batch_size == 32


# ---- runs ----------------------------------------------------------------------------


def test_a_run_may_resume_with_a_schedule_and_without_one(tmp_path: Path) -> None:
    every = {"checkpoint_every_s": 1e-9}
    drive(
        make_run(
            network(),
            str(tmp_path),
            target_efficiency=0.5,
            max_global_batch_size=32,
            **every,
        ),
        15,
    )
    given = make_run(network(), str(tmp_path), batch_schedule="0:12,50%:16", **every)
    assert given.scale == 3
    drive(given, 60)
    assert given.effective_steps > 100
    assert given.scale == 4
    follows = make_run(
        network(), str(tmp_path), target_efficiency=0.5, max_global_batch_size=32
    )
    assert follows.effective_steps == given.effective_steps
    assert {scale for scale, *_ in drive(follows)} <= {
        plan.scale for plan in follows.parts.boundary.stages[0].follower.plans
    }


# ---- forecast, time left, data, loops of others --------------------------------------


def test_a_schedule_is_forecast_as_it_runs() -> None:
    # Nothing but noise, so r = S: 10 steps at 8 examples, 10 at 16 up to τ = 30, and
    # then (100 − 30)/8 at 64.
    noise = recipe([(0, 1, 0)])
    config = AdaScaleConfig(base_batch_size=8, batch_schedule="0:8,10%:16,30%:64")
    found = Forecaster(noise).following(config.batch, 2).expected
    assert [plan.global_batch_size for plan in found.plans] == [8] * 10 + [16] * 10 + [
        64
    ] * 9
    assert found.tau[20:22] == (30, 38)
    by_hand = replay(
        noise_curves(noise)[0],
        scale=1,
        total_steps=100,
        law=Law(),
        base_batch_size=8,
        follower=BatchFollower(config.batch, 2, total_steps=100, window=5.0),
    )
    assert by_hand == found
    assert forecast_run(noise, config, 1, 2) == found
    assert [found.steps_left(tau) for tau in (0, 10, 30, 100)] == pytest.approx(
        [28.75, 18.75, 8.75, 0]
    )
