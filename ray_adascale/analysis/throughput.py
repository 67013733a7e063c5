"""Measurements for the model of a step's seconds (:mod:`ray_adascale.throughput`):
timed here, or read from a run's trace.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._errors import check_count
from .._warn import warn_at_user
from ..config import AdaScaleConfig, read_settings
from ..forecast.throughput import Measurement, Throughput
from ..run.loop import Run
from ..run.observe.trace import read_trace
from ..workload import WorkloadFn, build_seeded

_WIDE = 1.5
"""Ratio of the quartiles of the measured steps from which on a warning is given."""


def measurement_from_trace(
    run: str | os.PathLike[str], *, base_batch_size: int, per_worker_batch_size: int
) -> Measurement:
    """Return the median step time of the second half of a run, from ``examples_per_s``
    in its trace.

    The time includes evaluations, reports and checkpoints, as ``examples_per_s`` does.

    Args:
        run: As in :func:`ray_adascale.read_trace`.
        base_batch_size: B0 of the run.
        per_worker_batch_size: Examples a pass on one worker.

    Raises:
        ValueError: There is no trace, the run changed its number of workers, or its
            batch isn't made of such passes.
    """
    rows = read_trace(run)
    rows = rows[len(rows) // 2 :]
    if not rows:
        raise ValueError(
            f"The trace of {run} is empty: there is no throughput to read."
        )
    sizes = {(row["world_size"], row["scale"]) for row in rows}
    if len(sizes) > 1:
        raise ValueError(
            f"The run in {run} was resized. Use a run that kept its number of workers."
        )
    ((workers, scale),) = sizes
    batch = round(scale * base_batch_size)
    passes, rest = divmod(batch, workers * per_worker_batch_size)
    if rest or not passes:
        raise ValueError(
            f"Invalid {per_worker_batch_size=}: the batch of {batch} in {run} is not "
            f"made of whole passes of that many examples on {workers} workers."
        )
    rate = statistics.median(row["examples_per_s"] for row in rows)
    return Measurement(
        workers=workers,
        accumulation=passes,
        per_worker_batch_size=per_worker_batch_size,
        step_s=batch / rate,
    )


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

    Steps of 2 and of 4 passes are timed for half of ``seconds`` each, after a few steps
    to warm up, with as many threads as a worker has. Use a machine of the workers'
    kind. A warning follows where the times of the steps differ widely: something else
    is busy on the machine, and all times are rough.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        hyperparameters: Its config, such as a recipe's.
        per_worker_batch_size: m, examples a pass.
        config: Precision, clipping and loader processes; T and B0, where the workload
            asks its config for them.
        runs: Folders of runs at k workers with the same ``per_worker_batch_size``, for
            the synchronisation.
        base_batch_size: B0 of those runs.
        seconds: How long to measure.
        threads: torch's CPU threads during the measurement. Ray gives a worker one for
            each of its CPUs: 1 by default, and beside a GPU.

    Raises:
        ValueError: An argument can't work.
    """
    threads = check_count("threads", threads)
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
                workload,
                hyperparameters,
                per_worker_batch_size,
                passes,
                read_settings(config),
                seconds / 2,
            )
            for passes in (2, 4)
        ]
    finally:
        torch.set_num_threads(threads_before)
    for run in runs:
        assert base_batch_size is not None
        points.append(
            measurement_from_trace(
                run,
                base_batch_size=base_batch_size,
                per_worker_batch_size=per_worker_batch_size,
            )
        )
    fitted = Throughput.fit(points)
    if fitted.high > _WIDE * fitted.low:
        warn_at_user(
            "The time of a step is known roughly only: half of those measured took "
            f"between {fitted.low:.2f} and {fitted.high:.2f} times their median. "
            "Something else is busy on this machine, or examples differ in size. "
            "Measure on an idle one, or for longer."
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
    """Measure a step of this number of passes on one worker."""
    built = build_seeded(workload, hyperparameters, config)
    # the search has checked a recipe's hyperparameters already
    built.config_reads = None
    settings = AdaScaleConfig(
        base_batch_size=per_worker_batch_size,
        total_steps=1_000_000_000,
        per_worker_batch_size=per_worker_batch_size,
        accumulation=passes,
        rule="unscaled",
        precision=config.precision,
        grad_clip=config.grad_clip,
        num_loader_workers=config.num_loader_workers,
        seed=config.seed,
    )
    # The weights don't matter here, and a scheduler may end too early.
    built.scheduler = built.evaluate = None
    run = Run.of(built, settings)
    stamps = [time.monotonic()]
    for batch in run:
        run.backward(built.loss(run.model, batch))
        if run.step():
            if run.backend.device.type == "cuda":
                torch.cuda.synchronize()
            stamps.append(time.monotonic())
            if stamps[-1] - stamps[0] > seconds and len(stamps) > 8:
                break
    times = [end - start for start, end in itertools.pairwise(stamps[3:])]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Measurement(
        workers=1,
        accumulation=passes,
        per_worker_batch_size=per_worker_batch_size,
        step_s=median,
        low_s=low,
        high_s=high,
    )
