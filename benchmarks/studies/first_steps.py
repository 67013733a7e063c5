"""Gains of the first steps: do they cost runs? Runs at the edge of stability, as they are and from two slower starts.

    python benchmarks/studies/first_steps.py                all of it: 800 runs of some 4 s, about an hour on one quiet core
    python benchmarks/studies/first_steps.py --edges        the search for the LRs at the edge, at S = 1
    python benchmarks/studies/first_steps.py --smoke        check that it runs

The first gains come from averages of one, two, three samples. If they are too large they should cost runs, most of all if the
schedule begins at its peak LR, and if that peak is the largest that S = 1 survives (``edge``) or half as much again
(``beyond``). So each schedule runs at S = 1, and at larger S from three starts:

    plain    r unchanged
    prior    1/r' = p + (1 − p)/r with p = 10/(10 + 1 + τ): r = 1 with the weight of ten effective steps
    ramp     r' = 1 + (r − 1)·τ/0.05T until τ is 0.05 T, the width of the averages: the slowest start

Both slower starts are scaling rules, and do not change S = 1. Every run is one single-threaded process and a step has n = 2
gradient samples, the fewest possible, with the noisiest averages. Every result is kept in a file, and an interrupted study
continues from it.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import study
import torch
from study import CASES as TRANSFERRED
from study import Case, KeptRuns, announce, bits_without_context, check_scales, example, prepare_process
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_adascale import RuleInput, Run, Workload, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import markdown, spread

PRIOR = 10.0  # effective steps
WINDOW = 0.05  # share of T: width of the averages, and of the ramp
GOOD = 0.9  # share of what the best schedule learns at S = 1
AT = (0, 5, 10, 20)  # effective steps at which the tables show gains
STARTS = ("plain", "prior", "ramp")
SHAPES = ("warmup", "cosine")


# ---- workloads -------------------------------------------------------------------------------------------------------


def one_cycle(optimizer: Optimizer, shape: str, total_steps: int) -> LRScheduler:
    """Return torch's OneCycleLR for a schedule with a warm-up."""
    if shape != "warmup":
        return study.schedule(optimizer, shape, total_steps)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=total_steps)


def transformer(config: dict[str, Any]) -> Workload:
    """Predict the next character with a transformer; the warm-up is torch's OneCycleLR."""
    return study.transformer(config, one_cycle)


def digits(config: dict[str, Any]) -> Workload:
    """Train the network of ``examples/digits.py`` with another schedule."""
    built: Workload = example("digits.py:workload")({"lr": config["lr"], "momentum": 0.9, "split": "test"})
    return replace(built, scheduler=study.schedule(built.optimizer, config["schedule"], config["total_steps"]))


CASES = {
    "tabular": replace(TRANSFERRED["tabular"], total_steps=2000),
    "digits": Case("the demo's digits", digits, "accuracy", 1, lambda: 0.1, 8, 900, (0.05,)),
    "transformer": Case("two causal layers", transformer, "bits a character", 0, bits_without_context, 8, 600, (0.1,)),
    "text": replace(TRANSFERRED["text"], total_steps=600),
    "vision": replace(TRANSFERRED["vision"], total_steps=600),
}
EDGES = {  # largest peak LRs that S = 1 survives, found by --edges
    ("tabular", "warmup"): 0.045,
    ("tabular", "cosine"): 0.03,
    ("digits", "warmup"): 0.075,
    ("digits", "cosine"): 0.075,
    ("transformer", "warmup"): 0.3375,
    ("transformer", "cosine"): 0.3375,
    ("text", "warmup"): 0.675,
    ("text", "cosine"): 0.45,
    ("vision", "warmup"): 0.1125,
    ("vision", "cosine"): 0.05 / 1.5,
}
LEVELS = {"below": 1 / 1.5, "edge": 1.0, "beyond": 1.5}
SEARCH_FROM = {"tabular": 0.02, "digits": 0.05, "transformer": 0.1, "text": 0.2, "vision": 0.05}


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prior:
    """AdaScale with a prior of r = 1, which has the weight of ``steps`` effective steps."""

    steps: float

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        p = self.steps / (self.steps + 1 + now.effective_steps)
        r = 1 / (p + (1 - p) / now.gain)
        return r, r


@dataclass(frozen=True)
class Ramp:
    """AdaScale with a gain that grows from 1 to its estimate over a share of the run."""

    share: float

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        assert now.total_steps is not None
        r = 1 + (now.gain - 1) * min(1.0, now.effective_steps / (self.share * now.total_steps))
        return r, r


RULES: dict[str, str | Callable[[RuleInput], tuple[float, float]]] = {
    "plain": "adascale",
    "prior": Prior(PRIOR),
    "ramp": Ramp(WINDOW),
}


@dataclass(frozen=True)
class Job:
    """One run. The fields identify it."""

    workload: str
    shape: str
    lr: float
    scale: int
    start: str
    seed: int
    total_steps: int


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        score: The metric; None if it is not finite.
        learnt: Share of the way from chance to perfect; −1 if the metric is not finite.
        optimizer_steps: Number of optimizer steps.
        gains: The estimates of r at :data:`AT` effective steps and, last, at 0.05 T; None after the run's end.
        well_until: Last τ at which the training loss, a mean over ten steps, was nearer to its minimum than to its first value.
        date: Date of the run.
    """

    score: float | None
    learnt: float
    optimizer_steps: int
    gains: list[float | None]
    well_until: float
    date: str


def train(job: Job) -> Result:
    """Run a job in this process. Divergence is a result, not an error."""
    case = CASES[job.workload]
    seed_everything(job.seed)
    built = case.workload({"lr": job.lr, "schedule": job.shape, "total_steps": job.total_steps, "split": "test"})
    rule, until = RULES[job.start], job.total_steps
    run = Run.of(built, case.config(job.scale, 2, until, rule=rule, seed=job.seed, evaluate_every=until))
    score = math.nan
    taus, gains, losses, parts = [0.0], list[float](), list[float](), list[float]()
    try:
        for batch in run:
            loss = built.loss_fn(run.model, batch)
            parts.append(loss.item())
            run.backward(loss)
            if run.step():
                losses.append(statistics.fmean(parts))
                gains.append(run.optimizer.last_step.gain)
                taus.append(run.effective_steps)
                parts.clear()
        score = run.summary()[built.metric]
    except FloatingPointError:  # no finite gradient for 50 steps in a row
        pass
    finite = math.isfinite(score)
    at = (*AT, WINDOW * job.total_steps)
    return Result(
        score=score if finite else None,
        learnt=case.learned(score) if finite else -1.0,
        optimizer_steps=run.optimizer.steps,
        gains=[next((r for tau, r in zip(taus, gains, strict=False) if tau >= t), None) for t in at],
        well_until=well_until(taus, losses),
        date=datetime.date.today().isoformat(),
    )


def well_until(taus: Sequence[float], losses: Sequence[float], width: int = 10) -> float:
    """Return :attr:`Result.well_until`, or 0 if there is no such τ.

    Args:
        taus: τ before each step.
        losses: Loss of each step.
        width: Number of steps in a mean.
    """
    means = [statistics.fmean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]
    finite = [x for x in means if math.isfinite(x)]
    halfway = (finite[0] + min(finite)) / 2 if finite else -math.inf
    return max((tau for tau, x in zip(taus, means, strict=False) if x < halfway), default=0.0)


# ---- all runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The runs of the study. ``total_steps`` replaces each workload's T, for the smoke test."""

    workloads: tuple[str, ...]
    scales: tuple[int, ...]
    starts: tuple[str, ...]
    seeds: tuple[int, ...]
    shapes: tuple[str, ...] = SHAPES
    levels: tuple[str, ...] = ("edge", "beyond")
    total_steps: int | None = None

    def jobs(self, workload: str, shape: str, level: str, scale: int, start: str) -> list[Job]:
        """Return a run for each seed. At S = 1 all starts are one."""
        lr = float(f"{EDGES[workload, shape] * LEVELS[level]:.6g}")
        total_steps = self.total_steps or CASES[workload].total_steps
        start = start if scale > 1 else "plain"
        return [Job(workload, shape, lr, scale, start, seed, total_steps) for seed in self.seeds]

    def cells(self) -> Iterable[tuple[str, str, str, int, str]]:
        """Yield workload, the schedule's shape, its level, S and start."""
        for workload in self.workloads:
            for shape in self.shapes:
                for level in self.levels:
                    for scale in self.scales:
                        for start in self.starts if scale > 1 else ("plain",):
                            yield workload, shape, level, scale, start


class Runs(KeptRuns[Job, Result]):
    """The study's runs.

    Args:
        path: The file of results.
        do: Runs a job.
    """

    def __init__(self, path: Path, do: Callable[[Job], Result] = train) -> None:
        super().__init__(path, Job, Result, do)


def edge(runs: Runs, workload: str, shape: str, seeds: Sequence[int] = (1, 2, 3, 4)) -> float:
    """Return the largest peak LR, in factors of 1.5, at which every run at S = 1 learns :data:`GOOD` of the best mean."""
    best = 0.0

    def good(lr: float, seeds: Sequence[int]) -> bool:
        nonlocal best
        jobs = [Job(workload, shape, lr, 1, "plain", seed, CASES[workload].total_steps) for seed in seeds]
        learnt = [result.learnt for result in runs.of(jobs)]
        best = max(best, statistics.fmean(learnt))
        return min(learnt) >= GOOD * best

    lr = SEARCH_FROM[workload]
    while good(lr, seeds[:2]):
        lr *= 1.5**2
    lr /= 1.5
    while not good(lr, seeds):
        lr /= 1.5
    return lr


# ---- tables ----------------------------------------------------------------------------------------------------------


def reference(plan: Plan, runs: Runs, workload: str) -> float:
    """Return the mean share that the best of the plan's schedules learns at S = 1."""
    schedules = [(shape, level) for shape in plan.shapes for level in plan.levels]
    return max(statistics.fmean(r.learnt for r in runs.of(plan.jobs(workload, *s, 1, "plain"))) for s in schedules)


def outcome_table(plan: Plan, runs: Runs) -> str:
    """Return a table with a row for every schedule, scale and start."""
    rows = []
    for workload, shape, level, scale, start in plan.cells():
        jobs = plan.jobs(workload, shape, level, scale, start)
        found = runs.of(jobs)
        line = GOOD * reference(plan, runs, workload)
        well = [r for r in found if r.learnt >= line and r.score is not None]
        lost = sorted(r.well_until / jobs[0].total_steps for r in found if r.learnt < line)
        rows.append(
            [
                workload,
                f"{shape} {jobs[0].lr:.3g}, {level}",
                f"{scale}",
                "all alike" if scale == 1 else start,
                f"{len(found) - len(well)} of {len(found)}",
                spread([r.score for r in well if r.score is not None], "{:.3f}"),
                spread([r.optimizer_steps for r in well], "{:,.0f}"),
                ", ".join(f"{share:.2f}" for share in lost),
            ]
        )
    head = [
        "workload",
        "schedule, peak LR",
        "S",
        "start",
        "bad runs",
        "metric of the good",
        "their steps",
        "well until τ/T",
    ]
    return markdown(head, rows)


def gain_table(plan: Plan, runs: Runs) -> str:
    """Return a table of r/S in the first effective steps and at 0.05 T, for plain runs with the schedules at the edge."""
    rows = []
    for workload in plan.workloads:
        for shape in plan.shapes:
            for scale in plan.scales:
                if scale == 1:
                    continue
                found = runs.of(plan.jobs(workload, shape, plan.levels[0], scale, "plain"))
                columns = zip(*(r.gains for r in found), strict=True)
                ratios = [[r / scale for r in column if r is not None] for column in columns]
                rows.append([workload, shape, f"{scale}", *(extent(ratio) for ratio in ratios)])
    head = ["workload", "schedule", "S", "r/S of step 1", *(f"at τ = {t}" for t in AT[1:]), "at 0.05 T"]
    return markdown(head, rows)


def extent(values: Sequence[float]) -> str:
    """Return "mean (smallest–largest)"."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else ""


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    parser = study.parser(
        __doc__,
        seeds=4,
        runs="runs/first_steps.jsonl",
        smoke="tabular, S = 1 and 4, one seed, one schedule, 60 steps",
    )
    parser.add_argument("--workloads", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--scales", type=int, nargs="+", default=[2, 4, 8], help="beside 1; even")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=["edge", "beyond"])
    parser.add_argument("--edges", action="store_true", help="search for the LRs at the edge, and nothing else")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    check_scales(parser, args.scales, 2)
    if args.smoke:
        return args, Plan(("tabular",), (1, 4), STARTS, (1,), ("cosine",), ("edge",), 60)
    seeds, scales = tuple(range(1, args.seeds + 1)), tuple(sorted({1, *args.scales}))
    return args, Plan(tuple(args.workloads), scales, tuple(args.starts), seeds, tuple(args.shapes), tuple(args.levels))


def main(argv: Sequence[str] | None = None) -> int:
    args, plan = parse(argv)
    began = time.monotonic()
    prepare_process()
    announce(args.json)
    runs = Runs(args.json)
    if args.edges:
        found = [[w, shape, f"{edge(runs, w, shape):.4g}"] for w in plan.workloads for shape in plan.shapes]
        print(markdown(["workload", "schedule", "largest peak LR"], found))
    else:
        for cell in plan.cells():
            learnt = ", ".join(f"{r.learnt:.3f}" for r in runs.of(plan.jobs(*cell)))
            print(*cell, learnt, file=sys.stderr, flush=True)
        print(f"{outcome_table(plan, runs)}\n\n{gain_table(plan, runs)}")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
