"""Ten changes of the number of workers within a run: what five ways to treat batch and
learning rate make of the metric.

    python benchmarks/studies/resize_rules.py --page                   all of it, or what is missing
    python benchmarks/studies/resize_rules.py --smoke                  check that it runs
    python benchmarks/studies/resize_rules.py --report-only --page p.md    write the page of the kept runs
    python benchmarks/studies/wall_clock.py                            measure the seconds of a step, which the page needs
    python benchmarks/studies/resize_workers.py                        the same with Ray workers, once, which the page needs

The schedule, a warm-up and a linear decay, is tuned on one worker: five peak LRs, two
seeds, the search split. Then the number of workers follows ``PLAN``, which was fixed
before the first run. Each worker has B0 examples a step, so N workers are S = N. A
change is a checkpoint, a new ``Run`` and a resume, as when workers come and go.

    nothing changed  the LR stays, the schedule counts examples: what a loop does that takes no notice
    linear           LR × S, as Lightning's and many other users do
    √                LR × √S, as DLRover and OLMo-core do
    batch kept fixed B0 examples whatever the number of workers, as torchft and torchtitan do: the run at S = 1
    AdaScale         this library

A run is one process with one thread; its workers are accumulation passes. The kept
results are in ``benchmarks/studies/kept/resize_rules.jsonl``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_data import needs_data
from real_workloads import SMALL
from study import (
    announce,
    made_by,
    mean_and_error,
    parsed,
    prepare_process,
    read_runs,
    run_all,
)
from study import parser as study_parser
from wall_clock import BYTES_PER_S, LATENCY_S, StepSeconds, read_steps, share

from ray_adascale import (
    AdaScaleConfig,
    LinearRule,
    LocalBackend,
    Run,
    SquareRootRule,
    UnscaledRule,
    seed_everything,
)

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, by_hand, command_line, count, markdown

PAGE = PAGES / "resizes.md"
KEPT = "benchmarks/studies/kept/resize_rules.jsonl"

PLAN = (4, 2, 6, 8, 3, 1, 5, 8, 2, 7, 4)
"""Numbers of workers, one after the other."""
CHANGES = (0.06, 0.15, 0.22, 0.33, 0.41, 0.52, 0.60, 0.71, 0.80, 0.91)
"""Shares of the schedule at which the number changes."""
RULES: dict[str, Callable[[], Any]] = {
    "nothing changed": UnscaledRule,
    "linear": LinearRule,
    "√": SquareRootRule,
    "AdaScale": lambda: "adascale",
}
FIXED = "batch kept fixed"
SHAPE = "warmup"
GRID_SEEDS = (101, 102)


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        workload: Its name in ``SMALL``.
        rule: Its name in ``RULES``.
        workers: Numbers of workers one after the other; one number: no change.
        seed: Of weights, order and augmentation.
        lr: Peak LR.
        total_steps: T.
        split: "search" or "test".
    """

    workload: str
    rule: str
    workers: tuple[int, ...]
    seed: int
    lr: float
    total_steps: int
    split: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(self.workers))  # JSON has lists


@dataclass(frozen=True)
class Result:
    """Outcome of a run. ``score`` is None if the run failed; ``steps`` has the
    optimizer steps of each number of workers.
    """

    score: float | None
    steps: list[int]
    examples: int
    cpu_s: float
    date: str


Results = dict[Job, Result]


def train(job: Job) -> Result:
    """Run a job. Each part but the first resumes from the checkpoint of the one
    before.
    """
    began = time.process_time()
    case = SMALL[job.workload]
    changes = CHANGES if len(job.workers) > 1 else ()
    ends = [*(share * job.total_steps for share in changes), math.inf]
    steps: list[int] = []
    score: float | None = None
    examples = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            for workers, end in zip(job.workers, ends, strict=True):
                seed_everything(job.seed)
                config = {
                    "lr": job.lr,
                    "schedule": SHAPE,
                    "total_steps": job.total_steps,
                    "split": job.split,
                }
                built = case.workload(config)
                settings = AdaScaleConfig(
                    base_batch_size=case.base_batch_size,
                    total_steps=job.total_steps,
                    per_worker_batch_size=case.base_batch_size,
                    accumulation=workers,
                    rule=RULES[job.rule](),
                    seed=job.seed,
                    checkpoint_every_s=1e9,
                    evaluate_every=job.total_steps,
                )
                run = Run.of(
                    built, settings, backend=LocalBackend(folder, device="cpu")
                )
                for batch in run:
                    run.backward(built.loss_fn(run.model, batch))
                    if run.step() and run.effective_steps >= end:
                        run.save_checkpoint()
                        break
                summary = run.summary()
                steps.append(summary["optimizer_steps"] - sum(steps))
                examples = run.source.position
            score = summary[built.metric]
        except FloatingPointError:  # no finite gradient for 50 steps in a row
            pass
    good = score is not None and math.isfinite(score) and case.learned(score) > 0.05
    return Result(
        score if good else None,
        steps,
        examples,
        time.process_time() - began,
        datetime.date.today().isoformat(),
    )


# ---- all runs ------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The runs of the study. ``total_steps`` replaces each workload's T, for the
    smoke test.
    """

    workloads: tuple[str, ...]
    seeds: tuple[int, ...]
    total_steps: int | None = None
    every: int = 1

    def steps(self, workload: str) -> int:
        """Return T."""
        return self.total_steps or SMALL[workload].total_steps

    def grid(self, workload: str) -> dict[float, list[Job]]:
        """Return the jobs of the search by peak LR."""
        return {
            lr: [
                Job(
                    workload, "AdaScale", (1,), seed, lr, self.steps(workload), "search"
                )
                for seed in GRID_SEEDS
            ]
            for lr in SMALL[workload].lrs[:: self.every]
        }

    def best(self, results: Results, workload: str) -> float:
        """Return the best peak LR on one worker."""
        case = SMALL[workload]

        def loss(lr: float) -> float:
            scores = [results[job].score for job in self.grid(workload)[lr]]
            return statistics.mean(
                math.inf if score is None else case.loss(score) for score in scores
            )

        return min(self.grid(workload), key=loss)

    def job(
        self,
        results: Results,
        workload: str,
        rule: str,
        workers: tuple[int, ...],
        seed: int,
    ) -> Job:
        """Return a run with the best peak LR."""
        return Job(
            workload,
            rule,
            workers,
            seed,
            self.best(results, workload),
            self.steps(workload),
            "test",
        )

    def rounds(self, results: Results) -> Iterator[tuple[str, list[Job]]]:
        """Yield the search, then everything else, some seeds at a time."""
        yield (
            "grid",
            [
                job
                for workload in self.workloads
                for jobs in self.grid(workload).values()
                for job in jobs
            ],
        )
        for first in range(0, len(self.seeds), 5):
            jobs = [
                self.job(results, workload, rule, workers, seed)
                for workload in self.workloads
                for seed in self.seeds[first : first + 5]
                for rule, workers in ways()
            ]
            yield "run", jobs


def ways() -> list[tuple[str, tuple[int, ...]]]:
    """Return rules and numbers of workers of the comparison."""
    return [("AdaScale", (1,)), ("AdaScale", (8,)), *((rule, PLAN) for rule in RULES)]


# ---- seconds -------------------------------------------------------------------------


def examples_a_worker(workload: str, rule: str, workers: int) -> int:
    """Return the examples of one worker in one step."""
    base = SMALL[workload].base_batch_size
    return share(base, workers) if rule == FIXED else base


def seconds_of(
    workload: str,
    rule: str,
    workers: Sequence[int],
    steps: Sequence[float],
    measured: StepSeconds,
) -> float:
    """Return the seconds of a run: steps × (measured seconds of a worker's examples
    + the model's all-reduce).
    """
    pairs = zip(workers, steps, strict=True)
    return sum(
        number * measured.of(examples_a_worker(workload, rule, n), n)
        for n, number in pairs
    )


def worker_examples(
    workload: str, rule: str, workers: Sequence[int], steps: Sequence[float]
) -> float:
    """Return the time of a run in a world without overhead: examples of a worker,
    one after the other, in units of B0.
    """
    base = SMALL[workload].base_batch_size
    return sum(
        number
        * (1 / n if rule == FIXED else examples_a_worker(workload, rule, n) / base)
        for n, number in zip(workers, steps, strict=True)
    )


def fixed_steps(total_steps: int) -> list[float]:
    """Return the optimizer steps at each number of workers with a fixed batch: they
    are the schedule's.
    """
    edges = [0.0, *CHANGES, 1.0]
    return [
        (after - before) * total_steps for before, after in itertools.pairwise(edges)
    ]


# ---- the page ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of a workload's table."""

    name: str
    workers: tuple[int, ...]
    results: dict[int, Result]
    steps: list[float]

    @property
    def scores(self) -> dict[int, float]:
        """Return the scores of the runs that did not fail."""
        return {
            seed: r.score for seed, r in self.results.items() if r.score is not None
        }


def rows_of(plan: Plan, results: Results, workload: str) -> list[Row]:
    """Return the rows of a workload, the undisturbed runs first."""

    def found(rule: str, workers: tuple[int, ...]) -> dict[int, Result]:
        jobs = {
            seed: plan.job(results, workload, rule, workers, seed)
            for seed in plan.seeds
        }
        return {seed: results[job] for seed, job in jobs.items() if job in results}

    def row(name: str, rule: str, workers: tuple[int, ...]) -> Row:
        runs = found(rule, workers)
        good = [r.steps for r in runs.values() if r.score is not None]
        return Row(
            name,
            workers,
            runs,
            [statistics.mean(part) for part in zip(*good, strict=True)],
        )

    alone = found("AdaScale", (1,))
    rows = [
        row("undisturbed, 1 worker", "AdaScale", (1,)),
        row("undisturbed, 8 workers", "AdaScale", (8,)),
    ]
    rows += [row(rule, rule, PLAN) for rule in RULES if rule != "AdaScale"]
    rows += [
        Row(FIXED, PLAN, alone, fixed_steps(plan.steps(workload))),
        row("AdaScale", "AdaScale", PLAN),
    ]
    return rows


def workload_table(
    plan: Plan, results: Results, workload: str, measured: StepSeconds
) -> str:
    """Return a workload's table."""
    case = SMALL[workload]
    rows = rows_of(plan, results, workload)
    alone, eight = rows[0].scores, rows[1].scores
    fixed = rows[-2]
    base_seconds = seconds_of(workload, FIXED, fixed.workers, fixed.steps, measured)
    base_examples = worker_examples(workload, FIXED, fixed.workers, fixed.steps)

    def against(row: Row, other: dict[int, float]) -> str:
        by = [
            case.better(row.scores[seed], other[seed])
            for seed in row.scores
            if seed in other
        ]
        if not by or row.scores == other:
            return ""
        mean, error = mean_and_error(by)
        return f"{mean:+.4f} ± {error:.4f}"

    lines = []
    for row in rows:
        failed = len(row.results) - len(row.scores)
        if not row.scores:
            lines.append(
                [row.name, f"**failed** ({failed} of {failed})", "", "", "", "", "", ""]
            )
            continue
        mean, error = mean_and_error(list(row.scores.values()))
        rule = FIXED if row.name == FIXED else "AdaScale"
        examples = statistics.mean(
            r.examples for r in row.results.values() if r.score is not None
        )
        seconds = seconds_of(workload, rule, row.workers, row.steps, measured)
        lines.append(
            [
                row.name,
                f"{mean:.4f} ± {error:.4f}"
                + (f" (**{failed} of {len(row.results)} failed**)" if failed else ""),
                against(row, alone),
                against(row, eight),
                f"{sum(row.steps):,.0f}",
                f"{examples:,.0f}",
                f"{seconds:.1f} ({seconds / base_seconds:.2f})",
                f"{worker_examples(workload, rule, row.workers, row.steps) / base_examples:.2f}",
            ]
        )
    head = [
        "run",
        f"test {case.metric}, mean ± standard error",
        "better than 1 worker by",
        "better than 8 workers by",
    ]
    head += [
        "optimizer steps",
        "examples",
        "seconds by the model (× batch kept fixed)",
        "without any overhead, × batch kept fixed",
    ]
    return markdown(head, lines)


HOW = f"""\
- Numbers of workers: {", ".join(map(str, PLAN))}. They change when {", ".join(f"{100 * c:.0f}" for c in CHANGES)} % of the
  schedule are done. Both lists were fixed before the first run.
- N workers have B0 examples each, so S = N; with the batch kept fixed they have B0/N each, rounded up. Workers are
  accumulation passes in one process: the arithmetic is that of N workers. Each change is a checkpoint, a new `Run` and a resume.
- The clock of "nothing changed", "linear" and "√" counts examples (S per step), so that every epoch of the schedule is an
  epoch. Linear has the usual warm-up of the factor over 5/90 of the run. AdaScale's clock counts gains.
- A batch that is kept fixed gives the run on one worker, whatever the number; only its seconds differ.
- Differences are paired by seed: mean ± standard error. Positive is better. A run has failed when it ends no more than 5 % of
  the way from the best answer without a look at the input to a perfect one; failed runs are in no mean.
- **Seconds by the model**: Σ steps × (seconds of a plain step with a worker's examples, measured on one core + a ring
  all-reduce over {BYTES_PER_S * 8 / 1e9:g} Gbit/s with {LATENCY_S * 1e6:g} µs a message). The cost of a change itself is left
  out; it is the same for all.
- **Without any overhead**: a step takes as long as its examples and nothing else. No machine is like that. It is the bound for
  models that are limited by compute alone, and there a fixed batch is the fastest, because it needs the fewest examples."""


def write(plan: Plan, results: Results, page: Path, command: str) -> None:
    """Write the page; the part by hand stays."""
    import resize_workers  # which imports this module

    kept_part = by_hand(page)
    workers = json.loads(resize_workers.KEPT.read_text())
    mine = [
        r
        for job, r in results.items()
        if job.workload in plan.workloads
        and job.total_steps == plan.steps(job.workload)
    ]
    measured, about = read_steps()
    sections: list[str] = []
    for workload in plan.workloads:
        case = SMALL[workload]
        sections += [
            f"## {workload}",
            case.sentences(
                plan.steps(workload), f", peak LR {plan.best(results, workload):g}"
            ),
            workload_table(plan, results, workload, measured[f"small {workload}"]),
        ]
    parts = [
        "# What do changes of the number of workers do to a run?",
        "Ten forced changes within a run, 1 to 8 workers, three workloads on public "
        f"data, {count(plan.seeds, 'seed')}, five ways to treat batch and learning "
        "rate.",
        f"{made_by(command, mine)}. Seconds of a step: `wall_clock.py`, "
        f"{about['date'][:10]}, {about['cpu']}, load {about['load']} before.",
        "## What it says",
        kept_part,
        *sections,
        "## Seconds of Ray workers on one machine",
        resize_workers.about(workers),
        resize_workers.table(workers),
        "## How",
        HOW,
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part for part in parts if part) + "\n")


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    smoke = "one seed, two LRs, 40 steps"
    args = parsed(
        study_parser(
            __doc__, seeds=20, runs=KEPT, smoke=smoke, workloads=SMALL, page=PAGE
        ),
        argv,
    )
    if args.smoke:
        return args, Plan(args.workloads, (1,), total_steps=40, every=3)
    return args, Plan(args.workloads, tuple(range(1, args.seeds + 1)))


def say(job: Job, result: Result) -> str:
    """Describe a run."""
    score = "failed" if result.score is None else f"{result.score:.4f}"
    about = (
        f"{job.workload}, {job.rule}, {count(job.workers, 'number')} of workers, seed "
        f"{job.seed}, lr {job.lr:g}"
    )
    return f"{about}: {score} in {sum(result.steps)} steps, {result.cpu_s:.1f} s"


@needs_data
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args, plan = parse(argv)
    prepare_process()
    announce(args.json)
    if args.report_only:
        results = read_runs(args.json, Job, Result)
    else:
        results = run_all(args.json, Job, Result, train, plan.rounds, say, args.jobs)
    if args.page is not None:
        write(
            plan,
            results,
            args.page,
            command_line(argv, "benchmarks/studies/resize_rules.py"),
        )
    measured, _ = read_steps()
    for workload in plan.workloads:
        print(
            f"\n{workload}\n\n{workload_table(plan, results, workload, measured[f'small {workload}'])}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
