"""How long a step takes on k workers: a model of four numbers, fitted to a short measured run at 1 and at k workers.

::

    seconds a step = passes · pass_s · (m / m0) + step_s + volume_s · (k − 1)/k + hop_s · (k − 1)

with m examples a pass (measured with m0): passes compute, the optimizer steps, and a ring all-reduce moves (k − 1)/k of
twice the gradients and takes k − 1 hops each way.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.rng import seed_everything
from ..config import AdaScaleConfig
from ..run.loop import Run
from ..run.trace import read_trace
from ..workload import WorkloadFn, build

__all__ = ["Measurement", "Throughput", "measure_throughput"]

_WIDE = 1.5
"""Steps are measured well where the slowest of their middle half takes less than so many times as long as the fastest."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured point.

    Attributes:
        workers: k.
        accumulation: Passes a step.
        per_worker_batch_size: m, examples a pass on one worker.
        step_s: Seconds an optimizer step took, the median.
        low_s: A quarter of the steps took less than so many seconds; None where that is not known.
        high_s: And a quarter more than these.
    """

    workers: int
    accumulation: int
    per_worker_batch_size: int
    step_s: float
    low_s: float | None = None
    high_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.workers, self.accumulation, self.per_worker_batch_size) < 1 or not 0 < self.step_s < math.inf:
            raise ValueError(f"Invalid {self}. Counts must be at least 1 and step_s positive.")

    @classmethod
    def from_trace(
        cls, trace: str | os.PathLike[str], *, base_batch_size: int, per_worker_batch_size: int
    ) -> Measurement:
        """The median step time of the second half of a run, from ``examples_per_s`` in its trace: evaluations, reports and
        checkpoints included, as ``examples_per_s`` includes them.

        Raises:
            ValueError: The run changed its number of workers, or its batch isn't made of such passes.
        """
        rows = read_trace(trace)
        rows = rows[len(rows) // 2 :]
        if not rows:
            raise ValueError(f"The trace {trace} is empty: there is no throughput to read.")
        sizes = {(row["world_size"], row["scale"]) for row in rows}
        if len(sizes) > 1:
            raise ValueError(f"The run in {trace} was resized. Take a run that kept its number of workers.")
        ((workers, scale),) = sizes
        batch = round(scale * base_batch_size)
        passes, rest = divmod(batch, workers * per_worker_batch_size)
        if rest or not passes:
            raise ValueError(
                f"Invalid {per_worker_batch_size=}: the batch of {batch} in {trace} is not made of whole passes of so many "
                f"examples on {workers} workers."
            )
        rate = statistics.median(row["examples_per_s"] for row in rows)
        return cls(
            workers=workers,
            accumulation=passes,
            per_worker_batch_size=per_worker_batch_size,
            step_s=batch / rate,
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Seconds of a step, as a function of how it is made up.

    Attributes:
        per_worker_batch_size: m0, examples a pass in the measurement.
        pass_s: Seconds of one forward and backward pass with m0 examples.
        step_s: Seconds of a step beside its passes, on one worker.
        volume_s: Seconds to move all gradients once there and back, as k grows without end.
        hop_s: Seconds that each further worker adds.
        low: A quarter of the steps measured on one worker took less than ``low`` times the median.
        high: And a quarter more than ``high`` times it. 1 and 1 where that is not known.
        notes: What the model could not know.
    """

    per_worker_batch_size: int
    pass_s: float
    step_s: float = 0.0
    volume_s: float = 0.0
    hop_s: float = 0.0
    low: float = 1.0
    high: float = 1.0
    notes: tuple[str, ...] = ()

    def sync_s(self, workers: int) -> float:
        """Seconds of a step spent on synchronisation; 0 for one worker."""
        return self.volume_s * (workers - 1) / workers + self.hop_s * (workers - 1)

    def step_seconds(self, workers: int, accumulation: int, per_worker_batch_size: int) -> float:
        """Seconds of an optimizer step."""
        compute = accumulation * self.pass_s * per_worker_batch_size / self.per_worker_batch_size
        return compute + self.step_s + self.sync_s(workers)

    @classmethod
    def fit(cls, measurements: Iterable[Measurement]) -> Throughput:
        """The model through measured points: at least one at 1 worker; others at k workers.

        With one number of workers beside 1, synchronisation is taken to be all volume, which saturates; with several it is
        split between volume and hops by least squares.

        Raises:
            ValueError: No point at 1 worker.
        """
        points = list(measurements)
        alone = [p for p in points if p.workers == 1]
        if not alone:
            raise ValueError("No measurement at 1 worker. Call measure_throughput() for one.")
        m0 = alone[0].per_worker_batch_size
        notes = []
        if any(p.per_worker_batch_size != m0 for p in points):
            notes.append(f"Passes of other sizes count in proportion to those of {m0} examples.")
        pass_s, step_s = _line([(p.accumulation * p.per_worker_batch_size / m0, p.step_s) for p in alone])
        base = cls(per_worker_batch_size=m0, pass_s=pass_s, step_s=step_s)
        # What is left of the steps of k workers when their passes and the optimizer's step are taken off.
        left: dict[int, list[float]] = {}
        for p in points:
            if p.workers > 1:
                compute = base.step_seconds(1, p.accumulation, p.per_worker_batch_size)
                left.setdefault(p.workers, []).append(p.step_s - compute)
        volume_s, hop_s = _sync({k: statistics.mean(values) for k, values in left.items()})
        if not left:
            notes.append("Synchronisation was not measured and counts as nothing: give a run at k workers as well.")
        elif len(left) == 1:
            notes.append(f"Synchronisation was measured at {next(iter(left))} workers only; beyond it is a guess.")
        low = min((p.low_s / p.step_s for p in alone if p.low_s is not None), default=1.0)
        high = max((p.high_s / p.step_s for p in alone if p.high_s is not None), default=1.0)
        if low < high:
            notes.append(
                f"Half of the measured steps took {low:.2f} to {high:.2f} times their median, and so may these."
            )
        return cls(
            per_worker_batch_size=m0,
            pass_s=pass_s,
            step_s=step_s,
            volume_s=volume_s,
            hop_s=hop_s,
            low=low,
            high=high,
            notes=tuple(notes),
        )


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of step time over passes; the intercept is 0 with one number of passes, and never negative."""
    through_zero = sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    if len({x for x, _ in points}) == 1:
        return through_zero, 0.0
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return (slope, intercept) if slope > 0 and intercept >= 0 else (through_zero, 0.0)


def _sync(left: Mapping[int, float]) -> tuple[float, float]:
    """Volume and hop seconds, both ≥ 0, by least squares over the numbers of workers."""
    rows = [((k - 1) / k, k - 1.0, seconds) for k, seconds in left.items()]
    if not rows:
        return 0.0, 0.0
    vv, vh, hh = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    vy, hy = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    volume = max(vy / vv, 0.0)
    if len(rows) == 1:
        return volume, 0.0
    determinant = vv * hh - vh * vh
    both = (hh * vy - vh * hy) / determinant, (vv * hy - vh * vy) / determinant
    if min(both) >= 0:
        return both
    return (0.0, max(hy / hh, 0.0)) if both[0] < 0 else (volume, 0.0)


def measure_throughput(
    workload: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    *,
    per_worker_batch_size: int,
    config: AdaScaleConfig | None = None,
    runs: Iterable[str | os.PathLike[str]] = (),
    base_batch_size: int | None = None,
    seconds: float = 3.0,
    threads: int = 1,
) -> Throughput:
    """Time the workload's steps on one worker, in this process, and fit the model.

    Times steps of 2 and of 4 passes, for half of ``seconds`` each after a few to warm up, with as many threads as a worker
    has. A machine that computes otherwise than the workers' must not be used. Warns where the steps took very unequal times:
    something else is busy there, and all times are rough.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        hyperparameters: What it is called with, a recipe's.
        per_worker_batch_size: m, examples a pass.
        config: Precision and the like; T and B0, where the workload asks its config for them.
        runs: Traces of runs at k workers with the same ``per_worker_batch_size``, for the synchronisation.
        base_batch_size: B0 of those runs.
        seconds: How long to measure.
        threads: How many torch uses on the CPU meanwhile. Ray gives a worker as many as it has CPUs, 1 by default and beside
            a GPU.

    Raises:
        ValueError: An argument can't work.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"Invalid {threads=}. Must be an integer of at least 1.")
    if not seconds > 0:
        raise ValueError(f"Invalid {seconds=}. Must be positive.")
    runs = list(runs)
    if runs and base_batch_size is None:
        raise ValueError("Missing base_batch_size: that of the runs.")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        points = [
            _time_alone(
                workload, hyperparameters, per_worker_batch_size, passes, config or AdaScaleConfig(), seconds / 2
            )
            for passes in (2, 4)
        ]
    finally:
        torch.set_num_threads(threads_before)
    for run in runs:
        assert base_batch_size is not None
        points.append(
            Measurement.from_trace(run, base_batch_size=base_batch_size, per_worker_batch_size=per_worker_batch_size)
        )
    fitted = Throughput.fit(points)
    if fitted.high > _WIDE * fitted.low:
        warnings.warn(
            f"The time of a step is known roughly only: half of those measured took between {fitted.low:.2f} and "
            f"{fitted.high:.2f} times their median. Something else is busy on this machine, or examples differ in size. "
            "Measure on an idle one, or for longer.",
            stacklevel=2,
        )
    return fitted


def _time_alone(
    workload: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    per_worker_batch_size: int,
    passes: int,
    config: AdaScaleConfig,
    seconds: float,
) -> Measurement:
    """The median time of a step of so many passes on one worker."""
    seed_everything(config.seed)
    built = build(workload, hyperparameters, config)
    built.config_reads = None  # what is measured here is a recipe's, and was looked at when that was made
    settings = AdaScaleConfig(
        base_batch_size=per_worker_batch_size,
        total_steps=1_000_000_000,
        per_worker_batch_size=per_worker_batch_size,
        accumulation=passes,
        rule="unscaled",
        precision=config.precision,
        grad_clip=config.grad_clip,
        evaluate_every=math.inf,
        num_loader_workers=config.num_loader_workers,
        seed=config.seed,
    )
    # The learning rates are those of no schedule: nobody looks at the weights, and a scheduler may end too early.
    built.scheduler = None
    run = Run.of(built, settings)
    times: list[float] = []
    started = last = time.monotonic()
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        if run.step():
            if run.backend.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic()
            times.append(now - last)
            last = now
            if now - started > seconds and len(times) >= 8:
                break
    low, median, high = statistics.quantiles(times[3:], n=4, method="inclusive")
    return Measurement(
        workers=1,
        accumulation=passes,
        per_worker_batch_size=per_worker_batch_size,
        step_s=median,
        low_s=low,
        high_s=high,
    )
