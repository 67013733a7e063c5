"""A batch that follows the noise or a given schedule against fixed batches: steps,
examples, metric, on four workloads.

    python benchmarks/studies/autobatch.py                                    all of it: about an hour of one thread
    python benchmarks/studies/autobatch.py --workloads mnist1d --seeds 2      a part; kept runs are not repeated
    python benchmarks/studies/autobatch.py --report-only                      the tables of the kept runs
    python benchmarks/studies/autobatch.py --smoke                            check that it runs

The workloads are those of ``transfer.py``, each with the schedule that was tuned there
at S = 1, and one like MNIST-1D. Each runs at fixed scales, with ``target_efficiency``
E, and with a given schedule of batches G, which is written in base batches:
G=0:1,20%:4,60%:16.

The frontier of the fixed scales shows how many examples a fixed batch needs for the
same number of steps, and which metric it reaches. Both are interpolated over the
logarithm of the steps, for each seed. A run is one single-threaded process; gradient
samples are accumulation passes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import study
import torch
import torch.nn.functional as F
from study import (
    CASES,
    Case,
    announce,
    check_scales,
    made,
    mean_and_error,
    prepare_process,
    read_runs,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Run, Workload, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, markdown

PAGE = PAGES / "adaptive-batch.md"  # written by hand, with these tables

KEPT = "benchmarks/studies/kept/autobatch.jsonl"

SCHEDULES = {
    "vision": (0.05, "warmup"),
    "text": (0.2, "warmup"),
    "tabular": (0.02, "warmup"),
    "mnist1d": (0.05, "cosine"),
}
"""Peak LR and shape. ``transfer.py`` found the first three, each among fifteen; the
last one was not searched for.
"""
LARGEST = 64
"""Largest scale that a run may choose; also the scale of the largest fixed batch."""

# Ten shapes of Greydanus's MNIST-1D (arXiv 2011.14439): heights of a digit's strokes.
DIGITS = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)


@functools.cache
def digit_splits() -> list[TensorDataset]:
    """Make 4,000 signals of 40 points for training and 2,000 each for search and
    test: shifted, scaled, sheared, noisy.
    """
    generator = torch.Generator().manual_seed(11)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    count, length = 8000, 40
    y = torch.arange(count) % 10
    shapes = torch.tensor(DIGITS)[y] - 5
    shapes = F.interpolate(shapes[:, None], 24, mode="linear", align_corners=True)[
        :, 0
    ] * uniform(0.8, 1.6, count, 1)
    x = torch.zeros(count, length)
    start = torch.randint(0, length - 24 + 1, (count, 1), generator=generator)
    x.scatter_(1, start + torch.arange(24), shapes)
    x = x + uniform(-0.75, 0.75, count, 1) * torch.linspace(-1, 1, length)
    noise = F.avg_pool1d(
        torch.randn(count, 1, length + 4, generator=generator), 5, stride=1
    )[:, 0]
    x = (
        x
        + 0.55 * noise * 5**0.5 / 2
        + 0.1 * torch.randn(count, length, generator=generator)
    )
    x = x / x.std()
    return [
        TensorDataset(x[part], y[part])
        for part in (slice(4000), slice(4000, 6000), slice(6000, None))
    ]


def mnist1d(config: dict[str, Any]) -> Workload:
    """Classify ten shapes in signals of 40 points with three convolutions."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        *(nn.Conv1d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv1d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv1d(16, 16, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(160, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    train, search, test = digit_splits()

    def evaluate(model: nn.Module) -> dict[str, float]:
        x, y = (test if config["split"] == "test" else search).tensors
        return {"accuracy": (model(x).argmax(1) == y).float().mean().item()}

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    parts: dict[str, Any] = {
        "model": model,
        "train_dataset": train,
        "loss_fn": loss_fn,
        "evaluate": evaluate,
    }
    return made(config, optimizer, metric="accuracy", mode="max", **parts)


WORKLOADS: dict[str, Case] = {
    "mnist1d": Case(
        "4,000 signals of 40 points in MNIST-1D's ten shapes, shifted, scaled, sheared "
        "and noisy; three convolutions",
        mnist1d,
        "accuracy",
        1,
        lambda: 0.1,
        32,
        4000,
        (0.05,),
    ),
    **CASES,
}


# ---- one run -------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run. ``choice`` is "S=4", "E=0.6" or "G=0:1,50%:4"."""

    workload: str
    choice: str
    seed: int
    total_steps: int


@dataclass(frozen=True)
class Result:
    """Outcome of a run. ``scale`` has S at some of its steps, ``tau`` the effective
    steps there.
    """

    score: float
    steps: int
    examples: int
    tau: list[float]
    scale: list[float]
    cpu_s: float
    date: str


def config_of(job: Job) -> AdaScaleConfig:
    """Return the settings of a run: a fixed scale in up to 8 passes, or the bounds
    of a run that chooses its scale.
    """
    case = WORKLOADS[job.workload]
    kind, _, value = job.choice.partition("=")
    if kind == "S":
        return case.config(
            int(value),
            8,
            job.total_steps,
            seed=job.seed,
            evaluate_every=math.inf,
            rule="adascale",
        )
    if kind == "G":
        chosen: dict[str, Any] = {"batch_schedule": given_batches(job, value)}
    else:
        chosen = {"target_efficiency": float(value)}
    return AdaScaleConfig(
        base_batch_size=case.base_batch_size,
        total_steps=job.total_steps,
        per_worker_batch_size=8 * case.base_batch_size,
        max_global_batch_size=LARGEST * case.base_batch_size,
        rule="adascale",
        seed=job.seed,
        evaluate_every=math.inf,
        **chosen,
    )


def given_batches(job: Job, value: str) -> list[tuple[str, int]]:
    """Return the schedule of a run in examples; ``value`` has base batches."""
    pairs = [pair.split(":") for pair in value.split(",")]
    return [
        (start, int(size) * WORKLOADS[job.workload].base_batch_size)
        for start, size in pairs
    ]


def build(job: Job) -> Workload:
    """Return the workload of a run."""
    lr, shape = SCHEDULES[job.workload]
    config = {
        "lr": lr,
        "schedule": shape,
        "total_steps": job.total_steps,
        "split": "test",
    }
    return WORKLOADS[job.workload].workload(config)


def train(job: Job) -> Result:
    """Run a job in this process."""
    began = time.process_time()
    config = config_of(job)
    seed_everything(job.seed)
    built = build(job)
    run = Run.of(built, config)
    seen: list[tuple[float, float]] = []
    for batch in run:
        scale = run.scale
        run.backward(built.loss_fn(run.model, batch))
        if run.step():
            seen.append((run.effective_steps, scale))
    summary = run.summary()
    every = max(1, len(seen) // 200)
    return Result(
        score=summary[built.metric],
        steps=summary["optimizer_steps"],
        examples=run.source.position,
        tau=[round(tau, 2) for tau, _ in seen[::every]],
        scale=[scale for _, scale in seen[::every]],
        cpu_s=time.process_time() - began,
        date=datetime.date.today().isoformat(),
    )


def run_all(jobs: Sequence[Job], path: Path, processes: int) -> dict[Job, Result]:
    """Run every job that the file lacks, and return all results."""

    def say(job: Job, result: Result) -> str:
        end = (
            f"{result.score:.4f} in {result.steps} steps, {result.examples} examples, "
            f"{result.cpu_s:.1f} s"
        )
        return f"{job.workload}, {job.choice}, seed {job.seed}: {end}"

    return study.run_all(
        path, Job, Result, train, lambda _: [("run", jobs)], say, processes
    )


def of_choice(
    results: dict[Job, Result], workload: str, total_steps: int, choice: str
) -> list[Result]:
    """Return the results of a choice on a workload, for all seeds."""
    wanted = (workload, choice, total_steps)
    return [
        r
        for job, r in results.items()
        if (job.workload, job.choice, job.total_steps) == wanted
    ]


# ---- tables --------------------------------------------------------------------------


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between points (x, y); the function is constant beyond
    them.
    """
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def against(
    case: Case,
    results: dict[Job, Result],
    workload: str,
    total_steps: int,
    choice: str,
    scales: Sequence[int],
) -> list[str]:
    """Compare a choice with the fixed frontier at as many steps, over the seeds that
    have results for all scales.

    Returns:
        Two cells with means over seeds and standard errors: the share of the examples
        that a fixed scale needs and this choice saves, with the number of seeds that
        took fewer or more steps than any fixed scale and are compared with the nearest;
        and by how much the score is better.
    """
    saved, better, outside = [], [], 0
    for job, own in results.items():
        if (job.workload, job.choice, job.total_steps) != (
            workload,
            choice,
            total_steps,
        ):
            continue
        fixed = [
            results.get(Job(workload, f"S={s}", job.seed, total_steps)) for s in scales
        ]
        there = [r for r in fixed if r is not None]
        if len(there) < len(scales):
            continue
        # Leave out a fixed scale that takes more steps and more examples than another:
        # with few seeds, noise can cause that.
        there = [
            r
            for r in there
            if not any(o.steps <= r.steps and o.examples < r.examples for o in there)
        ]
        at, logs = math.log(own.steps), [math.log(r.steps) for r in there]
        outside += not min(logs) <= at <= max(logs)
        needed = math.exp(
            interpolated(
                [(x, math.log(r.examples)) for x, r in zip(logs, there, strict=True)],
                at,
            )
        )
        score = interpolated(
            [(x, r.score) for x, r in zip(logs, there, strict=True)], at
        )
        saved.append(1 - own.examples / needed)
        better.append(case.better(own.score, score))
    if not saved:
        return ["", ""]
    (share, share_error), (by, by_error) = mean_and_error(saved), mean_and_error(better)
    note = f" ({outside} beyond the frontier)" if outside else ""
    return [
        f"{100 * share:+.0f} % ± {100 * share_error:.0f}{note}",
        f"{by:+.4f} ± {by_error:.4f}",
    ]


def table(
    results: dict[Job, Result], workload: str, total_steps: int, choices: Sequence[str]
) -> str:
    """Return a table with a row for every choice; a choice that changes its batch is
    compared with the fixed frontier.
    """
    case = WORKLOADS[workload]
    scales = [int(c[2:]) for c in choices if c.startswith("S=")]
    rows = []
    for choice in choices:
        mine = of_choice(results, workload, total_steps, choice)
        if not mine:
            rows.append([choice, "not run", "", "", "", "", ""])
            continue
        score, error = mean_and_error([r.score for r in mine])
        row = [
            choice,
            f"{len(mine)}",
            f"{statistics.mean(r.steps for r in mine):,.0f}",
            f"{statistics.mean(r.examples for r in mine) / (total_steps * case.base_batch_size):.2f}",
            f"{score:.4f} ± {error:.4f}",
        ]
        fixed = choice[0] == "S"
        rows.append(
            [
                *row,
                *(
                    ["", ""]
                    if fixed
                    else against(case, results, workload, total_steps, choice, scales)
                ),
            ]
        )
    head = [
        "",
        "seeds",
        "steps",
        "examples, × base run",
        case.metric,
        "examples saved at as many steps",
        "better by",
    ]
    return markdown(head, rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    smoke = "one seed, S = 1 and 4, E = 0.6, a schedule, 60 base steps"
    parser = study.parser(
        __doc__, seeds=5, runs=KEPT, smoke=smoke, workloads=WORKLOADS, page=PAGE
    )
    parser.add_argument(
        "--efficiencies", type=float, nargs="+", default=[0.8, 0.6, 0.4]
    )
    parser.add_argument(
        "--schedules",
        nargs="*",
        default=["0:1,20%:4,60%:16"],
        help="of batches, in base batches",
    )
    scales = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument(
        "--scales", type=int, nargs="+", default=scales, help="1 to 8 or multiples of 8"
    )
    args = study.parsed(parser, argv)
    check_scales(parser, args.scales)
    if args.smoke:
        args.seeds, args.scales, args.efficiencies, args.schedules = (
            1,
            [1, 4],
            [0.6],
            ["0:1,50%:4"],
        )
    return args


def choices_of(args: argparse.Namespace) -> list[str]:
    """Return the choices that the arguments ask for."""
    return [
        *(f"S={s}" for s in sorted(args.scales)),
        *(f"E={e:g}" for e in sorted(args.efficiencies, reverse=True)),
        *(f"G={given}" for given in args.schedules),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_process()
    plan = {w: 60 if args.smoke else WORKLOADS[w].total_steps for w in args.workloads}
    choices = choices_of(args)
    jobs = [
        Job(workload, choice, seed, total)
        for seed in range(1, args.seeds + 1)
        for workload, total in plan.items()
        for choice in choices
    ]
    announce(args.json)
    results = (
        read_runs(args.json, Job, Result)
        if args.report_only
        else run_all(jobs, args.json, args.jobs)
    )
    tables = [
        f"## {w}\n\n{table(results, w, total, choices)}" for w, total in plan.items()
    ]
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
