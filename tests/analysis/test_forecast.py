"""The forecast, against numbers worked by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import rich.console

from ray_adascale import AdamScaleRule, AdaScaleConfig
from ray_adascale.analysis.forecast import Forecast, forecast_recipe
from ray_adascale.analysis.forecast import _step_time as seconds
from ray_adascale.analysis.throughput import Throughput
from ray_adascale.batch import StepPlan
from ray_adascale.forecast.replay import Forecaster
from ray_adascale.recipe import Repeat

from ..samples_of import probes, recipe

LINEAR = AdaScaleConfig(rule="linear")
MODEL = Throughput(example_s=1 / 8, step_s=0.0, volume_s=0.5)


def rows_of(made: Forecast) -> list[tuple[Any, ...]]:
    return [
        (
            row.workers,
            row.steps,
            row.seconds,
            row.speedup,
            row.cost,
            row.marginal,
            row.pays,
        )
        for row in made.rows
    ]


def saturating(loss: float) -> AdaScaleConfig:
    """A rule whose clock advances by S/(1 + loss·(S − 1))."""
    return AdaScaleConfig(
        rule=lambda seen: (1.0, seen.scale / (1 + loss * (seen.scale - 1)))
    )


def test_time_cost_and_where_it_stops_paying() -> None:
    # Under the linear rule k workers take 100/k steps of 1 + 0.5·(k−1)/k seconds: 100;
    # 50·1.25; 25·1.375; 12.5→13·1.4375. Without the rounding k workers are k²/(1.5k −
    # 0.5) times as fast, so the 4th adds 16/5.5 − 9/4 and the 8th 64/11.5 − 4.9.
    made = forecast_recipe(
        recipe([(0, 3, 1)]),
        workers=[8, 1, 2, 4],
        config=LINEAR,
        throughput=MODEL,
        cost_per_worker_hour=3600,
    )
    assert rows_of(made) == [
        (1, 100, 100, 1, 100, 1, True),
        (2, 50, 62.5, pytest.approx(1.6), 125, pytest.approx(0.6), True),
        (
            4,
            25,
            34.375,
            pytest.approx(100 / 34.375),
            137.5,
            pytest.approx(16 / 5.5 - 2.25),
            True,
        ),
        (
            8,
            13,
            18.6875,
            pytest.approx(100 / 18.6875),
            149.5,
            pytest.approx(64 / 11.5 - 4.9),
            True,
        ),
    ]
    # A noiseless gradient: r = 1 whatever the batch, so further workers only cost.
    useless = forecast_recipe(recipe([(0, 0, 1)]), workers=[1, 2, 4], throughput=MODEL)
    assert [(row.steps, row.efficiency, row.pays) for row in useless.rows] == [
        (100, 1, True),
        (100, 0.5, False),
        (100, 0.25, False),
    ]
    assert useless.max_useful_workers == 1
    assert "pays up to 1:" in useless.lines()[0]
    # Nothing but noise: r = S.
    assert [
        row.steps
        for row in forecast_recipe(recipe([(0, 1, 0)]), workers=[1, 2, 4, 8]).rows
    ] == [100, 50, 25, 13]


def test_times_have_the_spread_of_the_measured_steps() -> None:
    # 50 steps of 1.25 s; half of the measured ones took 0.8 to 1.6 times the median.
    rough = Throughput(example_s=1 / 8, volume_s=0.5, low=0.8, high=1.6)
    made = forecast_recipe(
        recipe([(0, 3, 1)]), workers=[2], config=LINEAR, throughput=rough
    )
    (found,) = made.rows
    assert (found.seconds, found.seconds_low, found.seconds_high) == pytest.approx(
        (62.5, 50, 100)
    )
    # The steps' own interval on top: at least low steps of 0.8 times the median, at
    # most high ones of 1.6.
    (found,) = forecast_recipe(recipe([(0, 3, 1)]), workers=[2], throughput=rough).rows
    assert found.low < found.steps < found.high
    assert (found.seconds_low, found.seconds_high) == pytest.approx(
        (found.low * 1.0, found.high * 2.0)
    )
    exact = forecast_recipe(
        recipe([(0, 3, 1)]), workers=[2], config=LINEAR, throughput=MODEL
    )
    assert exact.rows[0].seconds_low == exact.rows[0].seconds_high == 62.5
    assert forecast_recipe(recipe([(0, 3, 1)]), workers=[2]).rows[0].seconds_low is None


@pytest.mark.parametrize("workers", [[1], [1, 2, 4, 8], [3, 100]])
def test_where_it_stops_paying_does_not_depend_on_what_was_asked(
    workers: list[int],
) -> None:
    # A rule whose clock advances by k/(0.9 + 0.1k) at S = k: the k-th worker adds
    # 90/((9 + k)·(8 + k)): 90/156 = 0.58 the 4th, 90/182 = 0.49 the 5th. The first
    # one's half is 0.5.
    made = forecast_recipe(
        recipe([(0, 3, 1)], 10_000), workers=workers, config=saturating(0.1)
    )
    assert made.max_useful_workers == 4
    assert [row.pays for row in made.rows] == [k <= 4 for k in workers]
    assert [row.marginal for row in made.rows] == pytest.approx(
        [90 / ((9 + k) * (8 + k)) for k in workers]
    )
    assert made.lines()[0].startswith("Adding workers pays up to 4:")


def test_paying_for_many_workers() -> None:
    # As above with a hundredth: 0.99/((0.99 + 0.01k)·(0.98 + 0.01k)) ≥ 0.5 up to k =
    # 42.
    long = recipe([(0, 3, 1)], 10_000)
    assert (
        forecast_recipe(long, workers=[1], config=saturating(0.01)).max_useful_workers
        == 42
    )
    # A thousandth: up to k = 414; above 64 to a sixteenth.
    found = forecast_recipe(
        long, workers=[1], config=saturating(0.001)
    ).max_useful_workers
    assert found == pytest.approx(414, rel=1 / 16)
    without = forecast_recipe(long, workers=[5000], config=LINEAR)
    assert (without.max_useful_workers, without.rows[0].pays) == (None, True)
    assert "still pays at 4,096" in without.lines()[0]


def test_a_staircase_pays_by_what_its_steps_bring_together() -> None:
    # A batch of 64 in passes of 8: 3 workers need 3 passes as 64/24 is rounded up, 5 to
    # 7 need 2 as 4 do, 8 need one.
    fixed = AdaScaleConfig(global_batch_size=64, per_worker_batch_size=8)
    made = forecast_recipe(
        recipe([(0, 1, 0)]), workers=[1, 2, 3, 4, 5, 8, 16], config=fixed
    )
    assert [row.accumulation for row in made.rows] == [8, 4, 3, 2, 2, 1, 1]
    assert [row.speedup for row in made.rows] == pytest.approx(
        [100 / 13 / passes for passes in (8, 4, 3, 2, 2, 1, 1)]
    )
    assert made.rows[4].marginal == 0
    assert made.max_useful_workers == 8


def test_without_throughput_speed_up_counts_passes() -> None:
    made = forecast_recipe(recipe([(0, 1, 0)]), workers=[1, 4])
    assert [(row.seconds, row.cost, row.speedup) for row in made.rows] == [
        (None, None, 1),
        (None, None, 4),
    ]
    assert any("speed-up counts passes" in note for note in made.notes)
    with pytest.raises(ValueError, match=r"cost_per_worker_hour=2 without throughput"):
        forecast_recipe(recipe([(0, 1, 0)]), workers=[1, 4], cost_per_worker_hour=2)


def test_the_batch_is_the_trainers() -> None:
    # 2 examples a pass: one worker needs 4 passes for the base batch of 8, as an
    # elastic run would take.
    made = forecast_recipe(
        recipe([(0, 1, 0)]),
        workers=[1, 2, 8],
        config=AdaScaleConfig(per_worker_batch_size=2, accumulation=2),
    )
    assert [
        (row.accumulation, row.global_batch_size, row.scale, row.num_samples)
        for row in made.rows
    ] == [
        (4, 8, 1, 4),
        (2, 8, 1, 4),
        (2, 32, 4, 16),
    ]
    # A batch that is to stay the same takes the same steps everywhere.
    fixed = forecast_recipe(
        recipe([(0, 1, 0)]),
        workers=[1, 4],
        config=AdaScaleConfig(global_batch_size=32),
        throughput=MODEL,
    )
    assert [
        (row.accumulation, row.scale, row.steps, row.seconds) for row in fixed.rows
    ] == [
        (4, 4, 25, 100),  # four passes of a second
        (1, 4, 25, 25 * 1.375),
    ]


def test_a_step_waits_for_the_largest_pass() -> None:
    # 12 examples on 8 workers: 2 on four of them, 1 on the others. 100/1.5 steps of 2/8
    # + 0.5·7/8 seconds.
    config = AdaScaleConfig(rule="linear", global_batch_size=12)
    (row,) = forecast_recipe(
        recipe([(0, 3, 1)]), workers=[8], config=config, throughput=MODEL
    ).rows
    assert (row.steps, row.seconds) == (67, pytest.approx(67 * 0.6875))


def test_numbers_that_were_not_asked_for_may_have_no_batch() -> None:
    # Passes of one example, and 8 examples at most: seven workers would make 14.
    noisy = recipe([(0, 100, 1)])
    config = AdaScaleConfig(
        target_efficiency=0.6, per_worker_batch_size=1, max_global_batch_size=8
    )
    (row,) = forecast_recipe(noisy, workers=[8], config=config).rows
    assert (row.accumulation, row.pays, row.marginal) == (1, True, row.speedup)
    # 16 examples at most: 17 and more workers would make more.
    config = AdaScaleConfig(
        batch_schedule="0:8,50%:16", per_worker_batch_size=1, max_global_batch_size=16
    )
    assert forecast_recipe(noisy, workers=[8], config=config).max_useful_workers == 16
    with pytest.raises(ValueError, match="leaves no batch on 17 workers"):
        forecast_recipe(noisy, workers=[8, 17], config=config)


def test_rows_have_the_interval_in_whole_steps() -> None:
    # Seeds of r = 4 and r = 1, so 25 and 100 steps, beyond which no run at S = 4 can
    # go.
    twice = recipe(
        [(0, 3, 0)], repeats=[Repeat(seed=1, score=0.5, noise=probes([(0, 0, 2)]))]
    )
    made = forecast_recipe(twice, workers=[4])
    row = made.rows[0]
    assert (row.low, row.high) == (25, 100)
    assert 25 < row.steps < 100
    assert "25–100" in text(made)
    # One seed: found by Forecaster, rounded to the outside.
    alone = forecast_recipe(recipe([(0, 3, 1)]), workers=[1, 4])
    found = Forecaster(recipe([(0, 3, 1)])).at(4)
    assert (alone.rows[1].low, alone.rows[1].high) == (
        math.floor(found.low),
        math.ceil(found.high),
    )
    assert (alone.rows[0].low, alone.rows[0].high) == (100, 100)


def test_where_it_stops_paying_has_an_interval() -> None:
    # Seeds of nothing but noise and of none: with r = S each worker adds as much as the
    # first, with r = 1 nothing.
    twice = recipe(
        [(0, 3, 0)],
        10_000,
        repeats=[Repeat(seed=1, score=0.5, noise=probes([(0, 0, 2)]))],
    )
    made = forecast_recipe(twice, workers=[4])
    assert (made.max_useful_workers_low, made.max_useful_workers_high) == (1, None)
    assert "(with the interval: 1–over 4,096)." in made.lines()[0]
    linear = forecast_recipe(
        recipe([(0, 3, 1)]), workers=[4], config=LINEAR, throughput=MODEL
    )
    assert (
        linear.max_useful_workers
        == linear.max_useful_workers_low
        == linear.max_useful_workers_high
    )
    assert linear.lines()[0].endswith("as much as the first.")


def test_what_makes_an_interval_wide_is_said() -> None:
    def notes(**changes: Any) -> str:
        made = forecast_recipe(
            recipe([(tau, 3, 1) for tau in range(30)], **changes),
            workers=changes.pop("workers", [4]),
        )
        return "\n".join(made.lines())

    second = {
        "repeats": [
            Repeat(seed=1, score=0.5, noise=probes([(tau, 3, 1) for tau in range(100)]))
        ]
    }
    assert "noise of one seed, so the interval is wider: search with repeats" in notes()
    assert "one seed" not in notes(**second)
    assert "momentum" not in notes()
    assert "With Lion runs took" in notes(search={"optimizer_class": "Lion"})
    assert "Lion" not in notes(search={"optimizer_class": "AdamW"})
    assert "Only 30 probes" in notes()
    assert "probes" not in notes(**second)
    made = forecast_recipe(recipe([(0, 3, 1)]), workers=[4, 16])
    assert not any("a forecast is rough" in note for note in made.notes)
    made = forecast_recipe(recipe([(0, 3, 1)]), workers=[4, 17])
    assert any("Above S = 16 a forecast is rough" in note for note in made.notes)
    # A rule whose steps follow from S alone needs none of that.
    assert "seed" not in "\n".join(
        forecast_recipe(recipe([(0, 3, 1)]), workers=[32], config=LINEAR).notes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": []}, "Invalid workers="),
        ({"workers": [0, 1]}, "Invalid workers="),
        ({"config": AdaScaleConfig(rule="adamscale")}, "no forecast for it"),
        ({"config": AdaScaleConfig(rule=AdamScaleRule())}, "no forecast for it"),
        (
            {"config": AdaScaleConfig(base_batch_size=4)},
            "base_batch_size=4.: the recipe says 8",
        ),
        ({"cost_per_worker_hour": -1, "throughput": MODEL}, "cost_per_worker_hour=-1"),
        (
            {"config": AdaScaleConfig(global_batch_size=4)},
            "global_batch_size=4.: smaller than base_batch_size=8",
        ),
        (
            {"config": AdaScaleConfig(target_efficiency=0.6, max_global_batch_size=4)},
            "leaves no batch on",
        ),
    ],
)
def test_what_cannot_be_forecast(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forecast_recipe(recipe([(0, 3, 1)]), **changes)
    with pytest.raises(ValueError, match="no noise probes"):
        forecast_recipe(recipe([]))


def text(made: Forecast) -> str:
    console = rich.console.Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made.table())
    return console.export_text()


def test_table_and_json() -> None:
    made = forecast_recipe(
        recipe([(0, 3, 1)]),
        workers=[1, 4],
        config=LINEAR,
        throughput=MODEL,
        cost_per_worker_hour=3.6,
    )
    lines = text(made).splitlines()
    assert max(map(len, lines)) <= 80
    cells = next(line.split() for line in lines if line.split()[:1] == ["4"])
    # The gain has no say under this rule; it begins at 16/7 and settles at 2.04 (see
    # test_replay).
    gain, efficiency = float(cells.pop(4)), cells.pop(4)
    assert gain == pytest.approx(2.1, abs=0.08)
    assert efficiency == f"{gain / 4:.0%}"
    assert cells == ["4", "32", "4", "25", "0:34", "2.91", "0.66", "0.14"]
    assert "Adding workers pays up to" in text(made)
    read = json.loads(made.to_json())
    assert read["max_useful_workers"] == made.max_useful_workers
    assert read["rows"][1]["seconds"] == 34.375
    assert read["recipe"] == recipe([(0, 3, 1)]).fingerprint


# ---- a run that chooses its scale ----------------------------------------------------


def test_a_run_that_follows_the_noise_has_its_mean_and_last_scale() -> None:
    # Nothing but noise: r = S, which doubles from 1/E = 2 at each decision up to the
    # bound of 8: 2, 4, then 12 steps of 8 (tests/forecast/test_replay.py). On one
    # worker these are 2, 4 and 8 passes of 8 examples; on two half as many.
    config = AdaScaleConfig(target_efficiency=0.5, max_global_batch_size=64)
    made = forecast_recipe(
        recipe([(0, 1, 0)]), workers=[1, 2], config=config, throughput=MODEL
    )
    one, two = made.rows
    examples = 16 + 32 + 12 * 64
    for row in (one, two):
        assert (row.steps, row.examples, row.last_scale) == (14, examples, 8)
        assert row.scale == pytest.approx(examples / 14 / 8)
        assert row.mean_gain == pytest.approx(102 / 14)
        assert row.efficiency == pytest.approx(1)
        assert row.low <= row.steps <= row.high
    assert (one.accumulation, two.accumulation) == (8, 4)
    assert one.seconds == pytest.approx(2 + 4 + 12 * 8)
    assert two.seconds == pytest.approx(1 + 2 + 12 * 4 + 14 * 0.25)
    told = text(made)
    assert "exam-" in told
    assert f"{examples / 800:.2f}×" in told
    fixed = forecast_recipe(recipe([(0, 1, 0)]), workers=[2])
    assert (fixed.rows[0].scale, fixed.rows[0].last_scale, fixed.rows[0].examples) == (
        2,
        2,
        50 * 16,
    )
    assert "exam-" not in text(fixed)


def test_a_step_takes_as_long_as_the_worker_with_the_most_examples() -> None:
    # 10 examples on three workers: one of them has 4. In two passes each, 20 are 3.3 a
    # pass, so one has 4 in one of them.
    time = Throughput(example_s=1.0)
    assert seconds(time, StepPlan(10, 10, 3, 1)) == 4
    assert seconds(time, StepPlan(10, 20, 3, 2)) == 8
    assert seconds(time, StepPlan(10, 12, 3, 1)) == 4
    # 0.2 s a pass of 10; step 0.05 s; volume 0.3 s · 2/3 on three workers.
    model = Throughput(example_s=0.02, step_s=0.05, volume_s=0.3)
    assert seconds(model, StepPlan(10, 60, 3, 4)) == pytest.approx(4 * 5 * 0.02 + 0.25)


def test_epochs_have_a_column_and_a_warning() -> None:
    """No noise: r = 1 at every scale, so that k workers make k times the epochs."""
    found = recipe([(0, 0, 1)], total_steps=100, base_steps_per_epoch=50.0)
    made = forecast_recipe(found, workers=[1, 2, 4])
    assert [row.epochs for row in made.rows] == [2.0, 4.0, 8.0]
    assert made.table().columns[4].header == "epochs"
    # the first number of workers that repeats examples half again as often
    (warning,) = (line for line in made.lines() if "More epochs" in line)
    assert warning.startswith(
        "2 workers: More epochs: 4 epochs, 2 in the base run. Repeated "
    )
    assert "--total-examples 1600`" in warning
    unknown = forecast_recipe(recipe([(0, 3, 0)]), workers=[1, 4])
    assert [row.epochs for row in unknown.rows] == [None, None]
    assert "epochs" not in [column.header for column in unknown.table().columns]
    # all noise: as many examples as the base run
    alike = forecast_recipe(
        recipe([(0, 3, 0)], total_steps=100, base_steps_per_epoch=50.0), workers=[4]
    )
    assert alike.rows[0].epochs == 2.0
    assert not any("More epochs" in line for line in alike.lines())
