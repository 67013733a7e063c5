"""The time of a step on k workers: the model, what it is fitted to, and how that is measured; worked by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_adascale import AdaScaleConfig, Workload
from ray_adascale.analysis import throughput
from ray_adascale.analysis.throughput import Measurement, Throughput, measure_throughput
from ray_adascale.run.trace import Trace

from ..samples_of import regression


def at(workers: int, passes: int, seconds: float, batch: int = 16) -> Measurement:
    return Measurement(workers=workers, accumulation=passes, per_worker_batch_size=batch, step_s=seconds)


def test_a_step_is_its_passes_the_optimizer_and_the_ring() -> None:
    model = Throughput(per_worker_batch_size=8, pass_s=0.2, step_s=0.1, volume_s=0.6, hop_s=0.01)
    assert model.step_seconds(1, 1, 8) == pytest.approx(0.2 + 0.1)  # nobody to share with
    assert model.step_seconds(1, 3, 4) == pytest.approx(3 * 0.1 + 0.1)  # half of the examples, half of the time
    assert [model.sync_s(k) for k in (1, 2, 3, 4)] == pytest.approx([0, 0.3 + 0.01, 0.4 + 0.02, 0.45 + 0.03])
    assert model.step_seconds(3, 2, 16) == pytest.approx(2 * 0.4 + 0.1 + 0.42)
    free = Throughput(per_worker_batch_size=8, pass_s=0.2)
    assert free.step_seconds(100, 1, 8) == 0.2


def test_throughput_through_hand_made_points() -> None:
    # 0.2 s a pass and 0.1 s a step; ring: 0.2·(k−1)/k + 0.01·(k−1).
    alone = [at(1, 2, 0.5), at(1, 4, 0.9)]
    both = Throughput.fit([*alone, at(2, 2, 0.5 + 0.11), at(4, 2, 0.5 + 0.18)])
    assert (both.pass_s, both.step_s, both.volume_s, both.hop_s) == pytest.approx((0.2, 0.1, 0.2, 0.01))
    assert both.notes == ()
    # Four workers, three passes of twice the size: 3·0.4 + 0.1 + 0.15 + 0.03.
    assert both.step_seconds(4, 3, 32) == pytest.approx(1.48)
    assert both.sync_s(1) == 0
    one = Throughput.fit([*alone, at(2, 2, 0.6)])
    assert (one.volume_s, one.hop_s) == pytest.approx((0.2, 0.0))
    assert one.sync_s(1000) == pytest.approx(0.2, rel=1e-2)
    assert "measured at 2 workers only" in one.notes[0]
    assert "counts as nothing" in Throughput.fit(alone).notes[0]


def test_points_of_one_number_of_workers_are_averaged() -> None:
    # Of one size and one number of passes: all the time of a step is that of its passes, 0.3 s each.
    alone = at(1, 2, 0.6)
    found = Throughput.fit([alone, at(2, 2, 0.7), at(2, 4, 1.5)])  # 0.1 and 0.3 s are left: 0.2 = volume/2
    assert (found.pass_s, found.step_s, found.volume_s, found.hop_s) == pytest.approx((0.3, 0, 0.4, 0))
    assert found.notes == ("Synchronisation was measured at 2 workers only; beyond it is a guess.",)


def test_several_points_of_one_number_of_passes_are_all_passes() -> None:
    found = Throughput.fit([at(1, 2, 0.5), at(1, 2, 0.7)])
    assert (found.pass_s, found.step_s) == pytest.approx((0.3, 0))


def test_passes_of_other_sizes_count_in_proportion() -> None:
    # 0.1 s a step and 0.2 s a pass of 16: a pass of 8 is half of one, one of 32 two.
    found = Throughput.fit([at(1, 2, 0.5), at(1, 2, 0.3, batch=8), at(4, 1, 0.5 + 0.15, batch=32)])
    assert (found.per_worker_batch_size, found.pass_s, found.step_s) == pytest.approx((16, 0.2, 0.1))
    assert found.volume_s == pytest.approx(0.2)
    assert found.notes[0] == "Passes of other sizes count in proportion to those of 16 examples."


def test_throughput_is_never_negative() -> None:
    faster = Throughput.fit([at(1, 2, 0.5), at(1, 4, 1.2), at(2, 2, 0.3)])  # a noisy machine
    assert (faster.step_s, faster.volume_s) == (0, 0)
    assert faster.pass_s == pytest.approx((2 * 0.5 + 4 * 1.2) / 20)
    # More passes in less time: the line through zero, (1·1 + 2·0.5)/5.
    backwards = Throughput.fit([at(1, 1, 1.0), at(1, 2, 0.5)])
    assert (backwards.pass_s, backwards.step_s) == pytest.approx((0.4, 0))
    # Only hops: 1 s at 3 workers, none at 2, (2·1)/5 a hop. Only volume: 0.5 s at 2 workers, 0.55 at 8 would be hops of less
    # than nothing; (0.25 + 0.48125)/(0.25 + 0.765625) of a volume.
    hops = Throughput.fit([at(1, 1, 1.0), at(2, 1, 1.0), at(3, 1, 2.0)])
    assert (hops.volume_s, hops.hop_s) == pytest.approx((0, 0.4))
    volume = Throughput.fit([at(1, 1, 1.0), at(2, 1, 1.5), at(8, 1, 1.55)])
    assert (volume.volume_s, volume.hop_s) == pytest.approx((0.73125 / 1.015625, 0))
    shrinking = Throughput.fit([at(1, 1, 1.0), at(2, 1, 1.4), at(8, 1, 1.1)])
    assert min(shrinking.volume_s, shrinking.hop_s) == 0
    with pytest.raises(ValueError, match="No measurement at 1 worker"):
        Throughput.fit([at(2, 1, 1.0)])
    with pytest.raises(ValueError, match="step_s positive"):
        at(1, 1, 0.0)
    for counts in ((0, 1, 16), (1, 0, 16), (1, 1, 0)):
        with pytest.raises(ValueError, match="Counts must be at least 1"):
            Measurement(workers=counts[0], accumulation=counts[1], per_worker_batch_size=counts[2], step_s=1.0)
    with pytest.raises(ValueError, match="step_s positive"):
        at(1, 1, float("inf"))


def write_trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    with Trace(path) as trace:
        for step, row in enumerate(rows, 1):
            trace.append({"step": step, "world_size": 2, "scale": 8.0, "examples_per_s": 320.0} | row)
    return path


def test_measurement_from_a_trace(tmp_path: Path) -> None:
    rates: list[dict[str, Any]] = [{"examples_per_s": rate} for rate in (1.0, 1.0, 300.0, 320.0, 900.0)]
    path = write_trace(tmp_path / "trace.jsonl", rows=rates)
    # B = 8·8 = 64 examples on 2 workers, 16 a pass: 2 passes. 64 / 320 a second; the slow start does not count.
    assert Measurement.from_trace(path, base_batch_size=8, per_worker_batch_size=16) == at(2, 2, 0.2)
    with pytest.raises(ValueError, match=r"per_worker_batch_size=24: the batch of 64"):
        Measurement.from_trace(path, base_batch_size=8, per_worker_batch_size=24)
    with pytest.raises(ValueError, match=r"per_worker_batch_size=64: the batch of 64"):  # not one whole pass on each
        Measurement.from_trace(path, base_batch_size=8, per_worker_batch_size=64)
    # 30/13 · 13 is 29.999999999999996 in floats, and 30 examples are meant.
    assert int(30 / 13 * 13) == 29
    odd = write_trace(tmp_path / "odd.jsonl", [{"scale": 30 / 13}] * 2)
    assert Measurement.from_trace(odd, base_batch_size=13, per_worker_batch_size=15) == at(2, 1, 30 / 320, batch=15)
    resized = write_trace(tmp_path / "resized.jsonl", [{}, {}, {}, {"world_size": 1, "scale": 4.0}])
    with pytest.raises(ValueError, match="was resized"):
        Measurement.from_trace(resized, base_batch_size=8, per_worker_batch_size=16)
    with pytest.raises(ValueError, match="is empty"):
        Measurement.from_trace(write_trace(tmp_path / "empty.jsonl", []), base_batch_size=8, per_worker_batch_size=16)


@pytest.mark.filterwarnings("ignore:The time of a step is known roughly only")  # so short, beside other tests
def test_measured_throughput(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [{"examples_per_s": 64 / 10}])  # 10 s a step: nothing but waiting
    found = measure_throughput(regression, {}, per_worker_batch_size=16, seconds=0.1, runs=[path], base_batch_size=8)
    assert 0 < found.pass_s < 1
    assert found.volume_s == pytest.approx(20, rel=0.2)
    with pytest.raises(ValueError, match="Missing base_batch_size"):
        measure_throughput(regression, {}, per_worker_batch_size=16, runs=[path])
    with pytest.raises(ValueError, match="seconds=0"):
        measure_throughput(regression, {}, per_worker_batch_size=16, seconds=0)


def test_how_far_the_measured_steps_lie_apart() -> None:
    # Quartiles 0.4 and 0.6 of a median of 0.5; 0.9 and 0.99 of 0.9. What is known of the runs at k workers says nothing here.
    first = Measurement(workers=1, accumulation=2, per_worker_batch_size=16, step_s=0.5, low_s=0.4, high_s=0.6)
    second = Measurement(workers=1, accumulation=4, per_worker_batch_size=16, step_s=0.9, low_s=0.9, high_s=0.99)
    found = Throughput.fit([first, second, at(2, 2, 0.6)])
    assert (found.low, found.high) == pytest.approx((0.8, 1.2))
    assert found.notes[-1] == "Half of the measured steps took 0.80 to 1.20 times their median, and so may these."
    assert (Throughput.fit([at(1, 2, 0.5)]).low, Throughput.fit([at(1, 2, 0.5)]).high) == (1, 1)


@pytest.mark.parametrize(("each", "wide"), [((4, 4, 5, 6, 6), False), ((3, 4, 6, 8, 9), True)])
def test_steps_of_unequal_times_are_measured_and_warned_of(
    each: tuple[int, ...], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only the loss moves. Three steps to warm up, which count for nothing, and the five that must be."""
    now = [0.0]
    monkeypatch.setattr("ray_adascale.analysis.throughput.time.monotonic", lambda: now[0])

    def workload(config: dict[str, Any]) -> Workload:
        built, steps = regression(config), [0.0]

        def loss_fn(model: Any, batch: Any) -> Any:
            assert torch.get_num_threads() == 2
            now[0] += (9, 9, 9, *each)[int(steps[0])]
            steps[0] += 1 / passes[0]
            return built_loss(model, batch)

        built_loss, built.loss_fn = built.loss_fn, loss_fn
        return built

    passes = [2]

    def next_passes(*args: Any) -> Measurement:
        passes[0] = args[3]
        return time_alone(*args)

    time_alone = throughput._time_alone
    monkeypatch.setattr(throughput, "_time_alone", next_passes)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = measure_throughput(workload, {}, per_worker_batch_size=4, seconds=1, threads=2)
    # The middle of the five is the median, those beside it the quartiles.
    assert (found.low, found.high) == pytest.approx((each[1] / each[2], each[3] / each[2]))
    assert found.pass_s == pytest.approx(each[2])
    assert [str(w.message).partition(":")[0] for w in told] == ["The time of a step is known roughly only"] * wide
    assert torch.get_num_threads() == 1


def test_it_is_measured_with_the_threads_of_a_worker() -> None:
    seen = []

    def workload(config: dict[str, Any]) -> Workload:
        seen.append(torch.get_num_threads())
        raise KeyError("depth")

    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            measure_throughput(workload, {}, per_worker_batch_size=4)
        assert (seen, torch.get_num_threads()) == ([1], 2)  # and the caller's are back
    finally:
        torch.set_num_threads(1)
    with pytest.raises(ValueError, match="threads=0"):
        measure_throughput(workload, {}, per_worker_batch_size=4, threads=0)


def test_each_pass_of_what_is_timed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the loss moves, by a second a pass: 2 s and 4 s a step, so a pass takes 1 s and the rest nothing."""
    now = [0.0]
    monkeypatch.setattr("ray_adascale.analysis.throughput.time.monotonic", lambda: now[0])

    def workload(config: dict[str, Any]) -> Workload:
        built = regression(config)

        def loss_fn(model: Any, batch: Any) -> Any:
            assert model(batch[0]).dtype is torch.bfloat16  # as it was asked for
            assert len(batch[0]) == 4
            now[0] += config["seconds"]
            return built_loss(model, batch)

        built_loss, built.loss_fn = built.loss_fn, loss_fn
        built.evaluate = evaluate
        return built

    def evaluate(model: Any) -> dict[str, float]:
        raise AssertionError

    precise = AdaScaleConfig(precision="bf16", evaluate_every=0.1)  # but nothing is evaluated
    found = measure_throughput(workload, {"seconds": 1.0}, per_worker_batch_size=4, config=precise, seconds=40)
    assert (found.per_worker_batch_size, found.pass_s, found.step_s) == pytest.approx((4, 1.0, 0.0))
    assert now[0] == pytest.approx(2 * 11 + 4 * 8)  # more than 20 s each, and 8 steps at least
