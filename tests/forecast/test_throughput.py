"""The model of a step's seconds and its fit, worked by hand."""

from __future__ import annotations

import pytest

from ray_adascale.forecast.throughput import Measurement, Throughput


def at(workers: int, passes: int, seconds: float, batch: int = 16) -> Measurement:
    return Measurement(
        workers=workers,
        accumulation=passes,
        per_worker_batch_size=batch,
        step_s=seconds,
    )


def test_a_step_is_its_passes_the_optimizer_and_the_ring() -> None:
    model = Throughput(example_s=0.025, step_s=0.1, volume_s=0.6)
    # nobody to share with
    assert model.step_seconds(1, 1, 8) == pytest.approx(0.2 + 0.1)
    # half of the examples, half of the time
    assert model.step_seconds(1, 3, 4) == pytest.approx(3 * 0.1 + 0.1)
    assert [model.sync_s(k) for k in (1, 2, 3, 4)] == pytest.approx([0, 0.3, 0.4, 0.45])
    assert model.step_seconds(3, 2, 16) == pytest.approx(2 * 0.4 + 0.1 + 0.4)
    free = Throughput(example_s=0.025)
    assert free.step_seconds(100, 1, 8) == 0.2


def test_throughput_through_hand_made_points() -> None:
    # 0.2 s a pass and 0.1 s a step; ring: 0.2·(k−1)/k.
    alone = [at(1, 2, 0.5), at(1, 4, 0.9)]
    both = Throughput.fit([*alone, at(2, 2, 0.5 + 0.1), at(4, 2, 0.5 + 0.15)])
    assert (16 * both.example_s, both.step_s, both.volume_s) == pytest.approx(
        (0.2, 0.1, 0.2)
    )
    assert both.notes == (
        "Synchronisation was measured at up to 4 workers; beyond it is a guess.",
    )
    # Four workers, three passes of twice the size: 3·0.4 + 0.1 + 0.15.
    assert both.step_seconds(4, 3, 32) == pytest.approx(1.45)
    assert both.sync_s(1) == 0
    one = Throughput.fit([*alone, at(2, 2, 0.6)])
    assert one.volume_s == pytest.approx(0.2)
    assert one.sync_s(1000) == pytest.approx(0.2, rel=1e-2)
    assert "measured at up to 2 workers" in one.notes[0]
    assert "counts as nothing" in Throughput.fit(alone).notes[0]


def test_points_of_one_number_of_workers_are_averaged() -> None:
    # Of one size and one number of passes: all the time of a step is that of its
    # passes, 0.3 s each.
    alone = at(1, 2, 0.6)
    # 0.1 and 0.3 s are left: 0.2 = volume/2
    found = Throughput.fit([alone, at(2, 2, 0.7), at(2, 4, 1.5)])
    assert (16 * found.example_s, found.step_s, found.volume_s) == pytest.approx(
        (0.3, 0, 0.4)
    )
    assert found.notes == (
        "Synchronisation was measured at up to 2 workers; beyond it is a guess.",
    )


def test_several_points_of_one_number_of_passes_are_all_passes() -> None:
    found = Throughput.fit([at(1, 2, 0.5), at(1, 2, 0.7)])
    assert (16 * found.example_s, found.step_s) == pytest.approx((0.3, 0))


def test_passes_of_other_sizes_count_in_proportion() -> None:
    # 0.1 s a step and 0.2 s a pass of 16: a pass of 8 is half of one, one of 32 two.
    found = Throughput.fit(
        [at(1, 2, 0.5), at(1, 2, 0.3, batch=8), at(4, 1, 0.5 + 0.15, batch=32)]
    )
    assert (16 * found.example_s, found.step_s) == pytest.approx((0.2, 0.1))
    assert found.volume_s == pytest.approx(0.2)
    assert (
        found.notes[0]
        == "Passes of other sizes count in proportion to those of 16 examples."
    )


def test_throughput_is_never_negative() -> None:
    # a noisy machine
    faster = Throughput.fit([at(1, 2, 0.5), at(1, 4, 1.2), at(2, 2, 0.3)])
    assert (faster.step_s, faster.volume_s) == (0, 0)
    assert 16 * faster.example_s == pytest.approx((2 * 0.5 + 4 * 1.2) / 20)
    # More passes in less time: the line through zero, (1·1 + 2·0.5)/5.
    backwards = Throughput.fit([at(1, 1, 1.0), at(1, 2, 0.5)])
    assert (16 * backwards.example_s, backwards.step_s) == pytest.approx((0.4, 0))
    # 0.5 s at 2 workers and 0.55 at 8: (0.25 + 0.48125)/(0.25 + 0.765625) of a volume,
    # by least squares.
    volume = Throughput.fit([at(1, 1, 1.0), at(2, 1, 1.5), at(8, 1, 1.55)])
    assert volume.volume_s == pytest.approx(0.73125 / 1.015625)
    with pytest.raises(ValueError, match="No measurement at 1 worker"):
        Throughput.fit([at(2, 1, 1.0)])
    with pytest.raises(ValueError, match="step_s positive"):
        at(1, 1, 0.0)
    for counts in ((0, 1, 16), (1, 0, 16), (1, 1, 0)):
        with pytest.raises(ValueError, match="Counts must be at least 1"):
            Measurement(
                workers=counts[0],
                accumulation=counts[1],
                per_worker_batch_size=counts[2],
                step_s=1.0,
            )
    with pytest.raises(ValueError, match="step_s positive"):
        at(1, 1, float("inf"))


def test_how_far_the_measured_steps_lie_apart() -> None:
    # Quartiles 0.4 and 0.6 of a median of 0.5; 0.9 and 0.99 of 0.9. What is known of
    # the runs at k workers says nothing here.
    first = Measurement(
        workers=1,
        accumulation=2,
        per_worker_batch_size=16,
        step_s=0.5,
        low_s=0.4,
        high_s=0.6,
    )
    second = Measurement(
        workers=1,
        accumulation=4,
        per_worker_batch_size=16,
        step_s=0.9,
        low_s=0.9,
        high_s=0.99,
    )
    found = Throughput.fit([first, second, at(2, 2, 0.6)])
    assert (found.low, found.high) == pytest.approx((0.8, 1.2))
    assert (
        found.notes[-1]
        == "Half the measured steps took 0.80 to 1.20 times their median, and so may "
        "these."
    )
    assert (
        Throughput.fit([at(1, 2, 0.5)]).low,
        Throughput.fit([at(1, 2, 0.5)]).high,
    ) == (1, 1)
