"""The measurements of a step: timed in this process, and read from a trace."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_adascale import AdaScaleConfig, Workload
from ray_adascale.analysis import throughput
from ray_adascale.analysis.throughput import measure_throughput, measurement_from_trace
from ray_adascale.forecast.throughput import Measurement

from ..samples_of import regression, write_rows


def at(workers: int, passes: int, seconds: float, batch: int = 16) -> Measurement:
    return Measurement(
        workers=workers,
        accumulation=passes,
        per_worker_batch_size=batch,
        step_s=seconds,
    )


def write_trace(run: Path, rows: list[dict[str, Any]]) -> Path:
    usual = {"world_size": 2, "scale": 8.0, "examples_per_s": 320.0}
    return write_rows(
        run, [{"step": step} | usual | row for step, row in enumerate(rows, 1)]
    )


def test_measurement_from_a_trace(tmp_path: Path) -> None:
    rates: list[dict[str, Any]] = [
        {"examples_per_s": rate} for rate in (1.0, 1.0, 300.0, 320.0, 900.0)
    ]
    path = write_trace(tmp_path, rows=rates)
    # B = 8·8 = 64 examples on 2 workers, 16 a pass: 2 passes. 64 / 320 a second; the
    # slow start does not count.
    assert measurement_from_trace(
        path, base_batch_size=8, per_worker_batch_size=16
    ) == at(2, 2, 0.2)
    with pytest.raises(ValueError, match=r"per_worker_batch_size=24: the batch of 64"):
        measurement_from_trace(path, base_batch_size=8, per_worker_batch_size=24)
    # not one whole pass on each
    with pytest.raises(ValueError, match=r"per_worker_batch_size=64: the batch of 64"):
        measurement_from_trace(path, base_batch_size=8, per_worker_batch_size=64)
    # 30/13 · 13 is 29.999999999999996 in floats, and 30 examples are meant.
    assert int(30 / 13 * 13) == 29
    odd = write_trace(tmp_path / "odd", [{"scale": 30 / 13}] * 2)
    assert measurement_from_trace(
        odd, base_batch_size=13, per_worker_batch_size=15
    ) == at(2, 1, 30 / 320, batch=15)
    resized = write_trace(
        tmp_path / "resized", [{}, {}, {}, {"world_size": 1, "scale": 4.0}]
    )
    with pytest.raises(ValueError, match="was resized"):
        measurement_from_trace(resized, base_batch_size=8, per_worker_batch_size=16)
    with pytest.raises(ValueError, match="is empty"):
        measurement_from_trace(
            write_trace(tmp_path / "empty", []),
            base_batch_size=8,
            per_worker_batch_size=16,
        )


# so short, beside other tests
@pytest.mark.filterwarnings("ignore:The time of a step is known roughly only")
def test_measured_throughput(tmp_path: Path) -> None:
    # 10 s a step: nothing but waiting
    path = write_trace(tmp_path, [{"examples_per_s": 64 / 10}])
    found = measure_throughput(
        regression,
        {},
        per_worker_batch_size=16,
        seconds=0.1,
        runs=[path],
        base_batch_size=8,
    )
    assert 0 < 16 * found.example_s < 1
    assert found.volume_s == pytest.approx(20, rel=0.2)
    with pytest.raises(ValueError, match="Missing base_batch_size"):
        measure_throughput(regression, {}, per_worker_batch_size=16, runs=[path])
    with pytest.raises(ValueError, match="seconds=0"):
        measure_throughput(regression, {}, per_worker_batch_size=16, seconds=0)
    with pytest.raises(ValueError, match="threads=0"):
        measure_throughput(regression, {}, per_worker_batch_size=16, threads=0)


@pytest.mark.parametrize(
    ("each", "wide"), [((4, 4, 5, 6, 6), False), ((3, 4, 6, 8, 9), True)]
)
def test_steps_of_unequal_times_are_measured_and_warned_of(
    each: tuple[int, ...], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only the loss moves. Three steps to warm up, which count for
    nothing, and the five that must be.
    """
    now = [0.0]
    monkeypatch.setattr(
        "ray_adascale.analysis.throughput.time.monotonic", lambda: now[0]
    )

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
        found = measure_throughput(
            workload, {}, per_worker_batch_size=4, seconds=1, threads=2
        )
    # The middle of the five is the median, those beside it the quartiles.
    assert (found.low, found.high) == pytest.approx(
        (each[1] / each[2], each[3] / each[2])
    )
    assert 4 * found.example_s == pytest.approx(each[2])
    assert [str(w.message).partition(":")[0] for w in told] == [
        "The time of a step is known roughly only"
    ] * wide
    assert torch.get_num_threads() == 1


def test_each_pass_of_what_is_timed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the loss moves, by a second a pass: 2 s and 4 s a step, so a
    pass takes 1 s and the rest nothing.
    """
    now = [0.0]
    monkeypatch.setattr(
        "ray_adascale.analysis.throughput.time.monotonic", lambda: now[0]
    )

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

    # but nothing is evaluated
    precise = AdaScaleConfig(precision="bf16", evaluate_every=0.1)
    found = measure_throughput(
        workload, {"seconds": 1.0}, per_worker_batch_size=4, config=precise, seconds=40
    )
    assert (4 * found.example_s, found.step_s) == pytest.approx((1.0, 0.0))
    # more than 20 s each, and 8 steps at least
    assert now[0] == pytest.approx(2 * 11 + 4 * 8)
