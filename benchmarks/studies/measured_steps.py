"""What becomes of a run at S = 16 where one optimizer step in k measures the noise:
metric, steps, and the path of the gain.

    python benchmarks/studies/measured_steps.py --page                     all of it: about 20 minutes on two cores
    python benchmarks/studies/measured_steps.py --smoke                    check that it runs
    python benchmarks/studies/measured_steps.py --report-only --page p.md  write the page of the kept runs

Each run is one process with one thread; its eight gradient samples are accumulation
passes. The schedules are those of ``transfer.py``, at the same lengths, of which a
default run measures each step. The kept results are in
``benchmarks/studies/kept/measured_steps.jsonl``.
"""

from __future__ import annotations

import datetime
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study import (
    CASES,
    announce,
    made_by,
    mean_and_error,
    parsed,
    prepare_process,
    read_runs,
    run_all,
    transformer,
)
from study import parser as study_parser

from ray_adascale import LocalBackend, Run, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, command_line, markdown

PAGE = PAGES / "measured-steps.md"
KEPT = "benchmarks/studies/kept/measured_steps.jsonl"
SCALE, PASSES, PARTS = 16, 8, 5
EVERY = (1, 4, 10)
LRS = {"vision": 0.05, "text": 0.2, "tabular": 0.02, "transformer": 0.2}
"""Peak LRs, those of ``transfer.py``'s page; the transformer's is that of the text."""
WORKLOADS = CASES | {
    "transformer": replace(CASES["text"], workload=transformer, total_steps=1500)
}


@dataclass(frozen=True)
class Job:
    """One run: the workload, k, the seed and T."""

    workload: str
    every: int
    seed: int
    total_steps: int


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        score: The metric on the test split.
        steps: Optimizer steps.
        path: Mean gain in each fifth of the effective steps.
        cpu_s: Processor seconds.
        date: Of the run.
    """

    score: float
    steps: int
    path: list[float]
    cpu_s: float
    date: str


def train(job: Job) -> Result:
    """Run a job."""
    case, began = WORKLOADS[job.workload], time.process_time()
    seed_everything(job.seed)
    settings = {
        "lr": LRS[job.workload],
        "schedule": "warmup",
        "total_steps": job.total_steps,
        "split": "test",
    }
    config = case.config(
        SCALE,
        PASSES,
        job.total_steps,
        seed=job.seed,
        evaluate_every=job.total_steps,
        measure_every=job.every,
    )
    workload = case.workload(settings)
    run, gains = (
        Run.of(workload, config, backend=LocalBackend()),
        list[list[float]]([[] for _ in range(PARTS)]),
    )
    assert workload.loss_fn is not None
    assert workload.metric is not None
    for batch in run:
        run.backward(workload.loss_fn(run.model, batch))
        part = min(
            int(run.optimizer.effective_steps * PARTS / job.total_steps), PARTS - 1
        )
        if run.step():
            gains[part].append(run.optimizer.last_step.gain)
    score, cpu_s = run.summary()[workload.metric], time.process_time() - began
    path = [statistics.mean(part) for part in gains if part]
    return Result(
        score, run.optimizer.steps, path, cpu_s, datetime.date.today().isoformat()
    )


def differences(
    results: dict[Job, Result], jobs: Sequence[Job], every: int
) -> list[tuple[float, float]]:
    """Return mean and standard error over seeds of what k changes: the metric
    (positive is better), steps, gains, in per cent.
    """
    rows = []
    for job in jobs:
        mine, all_measured, case = (
            results[replace(job, every=every)],
            results[job],
            WORKLOADS[job.workload],
        )
        relative = [
            a / b - 1 for a, b in zip(mine.path, all_measured.path, strict=True)
        ]
        changes = [mine.steps / all_measured.steps - 1, *relative]
        rows.append(
            [
                case.better(mine.score, all_measured.score),
                *(100 * change for change in changes),
            ]
        )
    return [mean_and_error(column) for column in zip(*rows, strict=True)]


def table(results: dict[Job, Result], jobs: Sequence[Job]) -> str:
    """Return the table of the page."""
    rows = []
    for name in dict.fromkeys(job.workload for job in jobs):
        own = [job for job in jobs if job.workload == name and job.every == 1]
        mean, error = mean_and_error([results[job].score for job in own])
        steps = statistics.mean(results[job].steps for job in own)
        rows.append(
            [name, "1", f"{mean:.4f} ± {error:.4f}", f"{steps:.0f}", *[""] * PARTS]
        )
        for every in EVERY[1:]:
            (better, off), *changes = differences(results, own, every)
            cells = [f"{m:+.1f} ± {e:.1f} %" for m, e in changes]
            rows.append(["", str(every), f"{better:+.4f} ± {off:.4f}", *cells])
    fifths = [f"gain, fifth {i + 1}" for i in range(PARTS)]
    return markdown(["workload", "k", "metric", "steps", *fifths], rows)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    smoke = "one seed of 200 steps"
    options = study_parser(
        __doc__, seeds=5, runs=KEPT, smoke=smoke, workloads=WORKLOADS, page=PAGE
    )
    args = parsed(options, argv)
    seeds = range(1, 2 if args.smoke else args.seeds + 1)
    jobs = [
        Job(name, every, seed, 200 if args.smoke else WORKLOADS[name].total_steps)
        for name in args.workloads
        for seed in seeds
        for every in EVERY
    ]

    def rounds(_: Any) -> Iterator[tuple[str, Sequence[Job]]]:
        yield "run", jobs

    announce(args.json)
    prepare_process()
    say = "{0.workload}, k = {0.every}, seed {0.seed}: {1.score:.4f} in {1.steps} steps".format
    if args.report_only:
        results = read_runs(args.json, Job, Result)
    else:
        results = run_all(args.json, Job, Result, train, rounds, say, args.jobs)
    found = table(results, jobs)
    print(found)
    if args.page is not None:
        about = made_by(
            command_line(argv, "benchmarks/studies/measured_steps.py"),
            [results[job] for job in jobs],
        )
        text = f"""\
# One measured step in k

A run may measure the noise in one optimizer step of k (`AdaScaleConfig(measure_every=k)`). By default k is as large as leaves
50 measured steps in the memory of the averages, and 1 for runs as short as these. Here k is forced, at S = {SCALE}, with the
schedules and lengths of [transfer](transfer.md): far fewer than 50 measured steps. Rows with k above 1 have the difference to
k = 1 by seed, mean ± standard error over seeds; a positive difference of the metric is better.

{found}

{about}.
"""
        args.page.write_text(text)
    return 0 if all(math.isfinite(results[job].score) for job in jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
