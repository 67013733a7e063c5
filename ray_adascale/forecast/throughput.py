"""The time of an optimizer step, as a function of workers, passes and examples: one
model for forecasts and for running runs.

::

    seconds = passes · m · example_s + step_s + volume_s · (k − 1)/k

with m examples a pass on each of k workers. The passes compute. The optimizer steps. A
ring all-reduce moves (k − 1)/k of twice the gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured point.

    Attributes:
        workers: k.
        accumulation: Passes a step.
        per_worker_batch_size: m, examples a pass on one worker.
        step_s: Seconds of an optimizer step, the median.
        low_s: The lower quartile of the same seconds; None where it is not known.
        high_s: The upper quartile.

    Raises:
        ValueError: A number is out of range.
    """

    workers: int
    accumulation: int
    per_worker_batch_size: int
    step_s: float
    low_s: float | None = None
    high_s: float | None = None

    def __post_init__(self) -> None:
        if (
            min(self.workers, self.accumulation, self.per_worker_batch_size) < 1
            or not 0 < self.step_s < math.inf
        ):
            raise ValueError(
                f"Invalid {self}. Counts must be at least 1 and step_s positive."
            )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Seconds of an optimizer step. Fit it to measurements with :meth:`fit` or
    :func:`ray_adascale.measure_throughput`.

    Attributes:
        example_s: Seconds for each example of a pass, forward and backward.
        step_s: Seconds of a step beside its passes, on one worker.
        volume_s: Seconds to send all gradients once there and back, as k grows without
            end.
        low: Lower quartile of the steps measured on one worker, as a multiple of their
            median.
        high: Upper quartile. Both are 1 where the spread is not known.
        notes: What the measurements could not tell, a sentence each.
    """

    example_s: float = 0.0
    step_s: float = 0.0
    volume_s: float = 0.0
    low: float = 1.0
    high: float = 1.0
    notes: tuple[str, ...] = ()

    def sync_s(self, workers: int) -> float:
        """Return the seconds of a step spent on synchronisation; 0 for one worker."""
        return self.volume_s * (workers - 1) / workers

    def step_seconds(
        self, workers: int, accumulation: int, per_worker_batch_size: int
    ) -> float:
        """Return the seconds of an optimizer step."""
        return (
            accumulation * per_worker_batch_size * self.example_s
            + self.step_s
            + self.sync_s(workers)
        )

    @classmethod
    def fit(cls, measurements: Iterable[Measurement]) -> Throughput:
        """Fit the model to measured points: at least one at 1 worker, and further ones
        at k workers.

        A pass counts in proportion to its examples. Synchronisation is taken to be all
        volume, which saturates.

        Raises:
            ValueError: No point at 1 worker.
        """
        points = list(measurements)
        alone = [p for p in points if p.workers == 1]
        if not alone:
            raise ValueError(
                "No measurement at 1 worker. Call measure_throughput() for one."
            )
        measured = alone[0].per_worker_batch_size
        notes = []
        if any(p.per_worker_batch_size != measured for p in points):
            notes.append(
                f"Passes of other sizes count in proportion to those of {measured} "
                "examples."
            )
        example_s, step_s = _line(
            [(p.accumulation * p.per_worker_batch_size, p.step_s) for p in alone]
        )
        base = cls(example_s=example_s, step_s=step_s)
        # Synchronisation is the rest of a step of k workers, without its passes and the
        # optimizer's step.
        rest = [
            (
                (p.workers - 1) / p.workers,
                p.step_s
                - base.step_seconds(1, p.accumulation, p.per_worker_batch_size),
            )
            for p in points
            if p.workers > 1
        ]
        if rest:
            most = max(p.workers for p in points)
            notes.append(
                f"Synchronisation was measured at up to {most} workers; beyond it is a "
                "guess."
            )
        else:
            notes.append(
                "Synchronisation was not measured and counts as nothing: give a run at "
                "k workers as well."
            )
        low = min(
            (p.low_s / p.step_s for p in alone if p.low_s is not None), default=1.0
        )
        high = max(
            (p.high_s / p.step_s for p in alone if p.high_s is not None), default=1.0
        )
        if low < high:
            notes.append(
                f"Half the measured steps took {low:.2f} to {high:.2f} times their "
                "median, and so may these."
            )
        return cls(
            example_s=example_s,
            step_s=step_s,
            volume_s=max(_proportion(rest), 0.0) if rest else 0.0,
            low=low,
            high=high,
            notes=tuple(notes),
        )


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and intercept; the intercept is 0 where all points have one x,
    and never negative.
    """
    if len({x for x, _ in points}) > 1:
        slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
        if slope > 0 and intercept >= 0:
            return slope, intercept
    return _proportion(points), 0.0


def _proportion(points: list[tuple[float, float]]) -> float:
    """Return the slope of the line through zero, by least squares."""
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)
