"""The forecast of a run that asks for workers when they pay, against numbers worked by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import rich.console

from ray_adascale import AdaScaleConfig, Throughput, WorkersFollow
from ray_adascale.analysis.worker_forecast import (
    FixedNumber,
    WorkersForecast,
    at_equal_time,
    at_equal_worker_hours,
    forecast_workers,
)
from ray_adascale.analysis.worker_replay import WorkerClock
from ray_adascale.batch_policy import BatchLimits, FixedBatch, Position
from ray_adascale.recipe import Repeat
from ray_adascale.worker_policy import Situation, WorkerController, WorkerDecision

from ..samples_of import probes, recipe

POLICY = FixedBatch(limits=BatchLimits(base_batch_size=8))
SECOND = Throughput(pass_s=1.0)
FOLLOW = WorkersFollow(restart_s=10.0)

NOISE = [(0, 1, 0)]
"""Nothing but noise: r = S, so each worker adds as much as the first, and all numbers take the same worker hours."""
SIGNAL = [(0, 0, 1)]
"""No noise: r = 1, so further workers only cost."""
STEP = [(tau, 0, 1) if tau < 5_000 else (tau, 1, 0) for tau in range(0, 10_000, 50)]
"""No noise in the first half of τ, nothing else in the second."""


# ---- the clock -------------------------------------------------------------------------------------------------------


class Scripted(WorkerController):
    """Asks for 4 workers at τ = 50, and keeps what it was asked with."""

    def __init__(self) -> None:
        super().__init__(WorkersFollow(), POLICY, 1, 8)
        self.seen: list[Situation] = []

    def decide(self, now: Situation) -> WorkerDecision:
        self.seen.append(now)
        return WorkerDecision(4 if now.effective_steps >= 50 else now.workers, "a script")


def test_the_clock_counts_time_worker_hours_and_the_restart() -> None:
    # 50 steps of 3 s on one worker, 60 s of a restart on the larger number, then 25 steps of r = 2 on four: 3 s and 1.5 s of
    # synchronisation each. The last one ends at τ = 101, so half of it is beyond T.
    script = Scripted()
    clock = WorkerClock(
        POLICY,
        1,
        throughput=Throughput(pass_s=3.0, volume_s=2.0),
        total_steps=100,
        decide=script,
        restart_s=60.0,
        decide_s=30.0,
    )
    tau = 0.0
    while tau < 100:
        tau = 101.0 if tau == 99 else tau + (1.0 if clock.plan.world_size == 1 else 2.0 if tau != 98 else 1.0)
        clock.after_step(Position(tau, 0.0), lambda: (3.0, 1.0))
    found = clock.ended()
    alone, together = 50 * 3.0, (25 - 1 + 1 + 0.5) * 4.5
    assert found.hours * 3600 == pytest.approx(alone + 60 + together)
    assert found.worker_hours * 3600 == pytest.approx(alone + 4 * 60 + 4 * together)
    assert [(part.workers, part.effective_steps, part.hours * 3600) for part in found.parts] == [
        (1, 0.0, 0.0),
        (4, 50.0, pytest.approx(150.0)),
    ]
    # Decisions are 30 s apart, at steps 10, 20, ... on one worker; then after the restart, at the first step.
    assert [now.effective_steps for now in script.seen[:6]] == [10, 20, 30, 40, 50, 52]
    last = script.seen[4]
    assert (last.workers, last.steps, last.stay_s, last.changes) == (1, 50, 150.0, 0)
    after = script.seen[5]
    assert (after.workers, after.steps, after.stay_s, after.changes, after.batch) == (4, 1, 4.5, 1, 32)
    assert script.times.seconds == {1: 3.0, 4: 4.5}


def test_the_decision_is_not_told_a_noise_that_a_run_would_not_measure() -> None:
    script = Scripted()
    clock = WorkerClock(POLICY, 1, throughput=SECOND, total_steps=100, decide=script, decide_s=1.0)
    for tau in (49.0, 50.0, 52.0):
        clock.after_step(Position(tau, 0.0), lambda: (3.0, 1.0))
    # One pass on one worker, then four workers.
    assert [math.isnan(now.sigma2) for now in script.seen] == [True, True, False]
    two = FixedBatch(limits=BatchLimits(base_batch_size=8, accumulation=2))
    clock = WorkerClock(two, 1, throughput=SECOND, total_steps=100, decide=script, decide_s=1.0)
    clock.after_step(Position(1.0, 0.0), lambda: (3.0, 1.0))
    assert script.seen[-1].sigma2 == 3.0


def test_the_batch_that_follows_the_noise_stays_over_a_change_of_workers() -> None:
    policy = AdaScaleConfig(base_batch_size=8, target_efficiency=0.5, total_steps=100, elastic=True).batch_policy
    clock = WorkerClock(
        policy, 1, throughput=SECOND, total_steps=100, decide=Scripted(), restart_s=1.0, decide_s=1.0, window=5.0
    )
    clock.after_step(Position(49.0, 0.0), lambda: (1.0, 1e-9))
    before = clock.plan
    assert before.global_batch_size == 32  # twice the first batch, 1/E = 2 times the base batch
    clock.after_step(Position(50.0, 0.0), lambda: (math.nan, math.nan))
    assert (clock.plan.world_size, clock.plan.global_batch_size) == (4, before.global_batch_size)
    assert clock.plan.accumulation == before.accumulation // 4


# ---- fixed numbers ---------------------------------------------------------------------------------------------------

TWO = [FixedNumber(1, 4.0), FixedNumber(2, 6.0)]
"""Worker hours 2 + 2·k, so hours 2/k + 2: 4 and 3."""


def test_fixed_numbers_at_equal_time_and_at_equal_worker_hours() -> None:
    # 2/k + 2 = 10/3 at k = 1.5, where the worker hours are 5.
    found = at_equal_time(TWO, 10 / 3)
    assert (found.workers, found.worker_hours, found.hours) == pytest.approx((1.5, 5.0, 10 / 3))
    found = at_equal_worker_hours(TWO, 5.0)
    assert (found.workers, found.worker_hours, found.hours) == pytest.approx((1.5, 5.0, 10 / 3))
    assert at_equal_time(TWO, 4.0) == at_equal_worker_hours(TWO, 4.0) == TWO[0]
    assert at_equal_time(TWO, 9.0) == TWO[0]
    assert at_equal_worker_hours(TWO, 9.0) == TWO[1]
    # Beyond both ends.
    assert at_equal_time(TWO, 2.9) == TWO[1]
    assert at_equal_worker_hours(TWO, 3.9) == TWO[0]


def test_a_number_that_is_slower_and_dearer_is_not_compared_with() -> None:
    # Three workers take as many passes as two, and more time for synchronisation.
    fixed = [*TWO, FixedNumber(3, 12.0), FixedNumber(4, 8.0)]
    assert at_equal_time(fixed, 3.0) == TWO[1]
    assert at_equal_worker_hours(fixed, 12.0) == fixed[-1]
    assert at_equal_time(fixed, 2.0) == fixed[-1]


# ---- the forecast ----------------------------------------------------------------------------------------------------


def text(made: WorkersForecast) -> str:
    console = rich.console.Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made.table())
    return " ".join(console.export_text().split())


def test_a_constant_noise_saves_nothing_and_says_so() -> None:
    # 10,000 worker seconds on any number, so the most workers are cheapest: 1,250 s.
    made = forecast_workers(recipe(NOISE, 10_000), workers=(1, 8), follow=FOLLOW, throughput=SECOND)
    assert [part.workers for part in made.run.parts] == [8]
    assert made.run.hours * 3600 == pytest.approx(1250, rel=1e-3)
    assert [each.worker_hours * 3600 for each in made.fixed] == pytest.approx([10_000] * 8, rel=1e-3)
    assert (made.best.workers, made.equal_time.workers, made.equal_worker_hours.workers) == (8, 8, 8)
    assert (made.worker_hours_saved, made.time_saved, made.price_saved) == (0.0, 0.0, 0.0)
    assert made.value_per_hour == 8.0
    # 8 for each hour, and 1 for each worker hour.
    assert made.price(made.run) == pytest.approx((8 * 1250 + 10_000) / 3600, rel=1e-3)
    said = text(made)
    assert "The number never changes. Worker hours at equal time: it saves nothing. Time at equal worker" in said
    assert "Price beside 8 workers throughout: it saves nothing." in said


def test_a_noise_that_comes_late_saves_what_is_worked_by_hand() -> None:
    # The first half takes 5,000 s on any number k. The second takes 5,000/k s. A fixed number takes 5,000·(1 + 1/k) s and
    # 5,000·(k + 1) worker seconds. At 8 + k an hour the cheapest fixed number is the one nearest to √8 from 40/k + 5·k: 3.
    made = forecast_workers(recipe(STEP, 10_000), workers=(1, 8), follow=FOLLOW, throughput=SECOND)
    for each in made.fixed:
        assert each.worker_hours * 3600 == pytest.approx(5000 * (each.workers + 1), rel=0.1)
    assert made.best.workers == 3
    # One worker and then eight would take 5,625 s and 10,000 worker seconds. The averages and the probes' smoothing reach over
    # 5 % of the run each, so some hundred effective steps are made on too few workers.
    assert [part.workers for part in made.run.parts][-1] == 8
    assert 1 in [part.workers for part in made.run.parts]
    assert 0.5 < made.run.parts[-1].effective_steps / 10_000 < 0.6
    hours, worker_hours = made.run.hours * 3600, made.run.worker_hours * 3600
    assert 5_625 < hours < 6_500
    assert 10_000 < worker_hours < 12_500
    # The worker seconds of fixed numbers are on a line a + s·k, so at equal time k = a/(t − s), at equal worker hours (w − a)/s.
    slope = (made.fixed[7].worker_hours - made.fixed[0].worker_hours) * 3600 / 7
    start = made.fixed[0].worker_hours * 3600 - slope
    k = start / (hours - slope)
    assert made.equal_time.workers == pytest.approx(k, rel=0.01)
    assert made.worker_hours_saved == pytest.approx(1 - worker_hours / (start + slope * k), abs=0.003)
    k = (worker_hours - start) / slope
    assert made.equal_worker_hours.workers == pytest.approx(k, rel=0.01)
    assert made.time_saved == pytest.approx(1 - hours / (start / k + slope), abs=0.003)
    price = 8 * hours + worker_hours
    assert made.price_saved == pytest.approx(1 - price / (8 * 5_000 * 4 / 3 + 5_000 * 4), abs=0.06)
    said = text(made)
    assert f"Worker hours at equal time: it saves {made.worker_hours_saved:.1%}." in said
    assert f"Time at equal worker hours: it saves {made.time_saved:.1%}." in said
    assert "8 workers from τ = " in said


def test_a_dear_restart_keeps_the_number_and_a_loss_is_said() -> None:
    made = forecast_workers(
        recipe(STEP, 10_000), workers=(1, 8), follow=WorkersFollow(restart_s=2000.0), throughput=SECOND
    )
    assert len(made.run.parts) == 1
    assert abs(made.worker_hours_saved) < 0.005
    # Begun on two workers, which is one too many, and one restart of 10 s on 2 workers.
    made = forecast_workers(recipe(SIGNAL, 10_000), workers=(1, 8), follow=FOLLOW, throughput=SECOND)
    assert made.run.parts[-1].workers == 1
    assert made.best.workers == 1
    if len(made.run.parts) > 1:
        assert made.worker_hours_saved < 0
        assert f"it saves nothing and takes {-made.worker_hours_saved:.1%} more" in text(made)


def test_only_a_throughput_of_the_settings_is_known_beforehand() -> None:
    # Nothing but noise, and a step of k seconds on k workers: every number takes as long, so one worker is cheapest.
    hops = Throughput(pass_s=1.0, hop_s=1.0)
    known = WorkersFollow(restart_s=10.0, throughput=hops)
    made = forecast_workers(recipe(NOISE, 10_000), workers=(1, 8), follow=known)
    assert [part.workers for part in made.run.parts] == [1]
    assert made.run.hours * 3600 == pytest.approx(10_000, rel=1e-3)
    # A run that measures begins on eight, and measures eight alone. It never learns that fewer would be as quick.
    made = forecast_workers(recipe(NOISE, 10_000), workers=(1, 8), follow=FOLLOW, throughput=hops)
    assert [part.workers for part in made.run.parts] == [8]
    assert made.worker_hours_saved == pytest.approx(1 - 8, rel=0.01)


def test_seeds_give_an_interval() -> None:
    late = recipe(STEP, 10_000, repeats=[Repeat(seed=1, score=0.5, noise=probes(NOISE))])
    made = forecast_workers(late, workers=(1, 8), follow=FOLLOW, throughput=SECOND)
    assert made.worker_hours_saved_low < made.worker_hours_saved < made.worker_hours_saved_high
    assert "By single seeds " in text(made)
    assert "noise of this run beforehand" not in text(made)
    alone = forecast_workers(recipe(STEP, 10_000), workers=(1, 8), follow=FOLLOW, throughput=SECOND)
    assert alone.worker_hours_saved_low == alone.worker_hours_saved == alone.worker_hours_saved_high
    assert "noise of this run beforehand" in text(alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"throughput": None}, r"Missing throughput: .*WorkersFollow\(throughput=.*--measure WORKLOAD"),
        ({"workers": (2, 2)}, r"Invalid workers=\(2, 2\). Must be fewest and most workers"),
        ({"workers": 4}, "Invalid workers=4"),
        ({"workers": (0, 4)}, "Invalid workers="),
        ({"follow": 3.0}, 'Must be "pay", a WorkersFollow'),
        ({"config": AdaScaleConfig(rule="linear")}, "clock of that rule"),
    ],
)
def test_what_cannot_be_forecast(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"workers": (1, 8), "throughput": SECOND}
    with pytest.raises(ValueError, match=message):
        forecast_workers(recipe(NOISE), **(given | changes))


def test_json_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = forecast_workers(recipe(NOISE), workers=(1, 3), throughput=SECOND)
    assert not any("Lion" in note for note in made.notes)
    lion = forecast_workers(recipe(NOISE, search={"optimizer_class": "Lion"}), workers=(1, 3), throughput=SECOND)
    assert "With Lion runs took" in lion.notes[0]
    read = json.loads(made.to_json())
    assert read["run"]["parts"][0]["workers"] == made.run.parts[0].workers
    assert [row["hours"] * row["workers"] for row in read["fixed"]] == pytest.approx(
        [row["worker_hours"] for row in read["fixed"]]
    )
    assert read["restart_s"] == 60.0
    assert "A restart counts 60 s" in " ".join(made.lines())
    made.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        made.plot(tmp_path / "plot.png")
