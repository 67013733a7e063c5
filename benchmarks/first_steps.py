"""Are the first steps' gains too bold? Runs at the edge of stability, as they are and with a start that is held back.

    python benchmarks/first_steps.py                all of it: 800 runs of some 4 s, about an hour on one quiet core
    python benchmarks/first_steps.py --edges        the search for the LRs at the edge, at S = 1
    python benchmarks/first_steps.py --smoke        whether it runs

The first gains come from averages of one, two, three samples. If they are too large they should cost runs, most of all where
the schedule begins at its peak LR, and where that peak is the largest that S = 1 survives (``edge``) or half as much again
(``beyond``). So each schedule runs at S = 1, and at larger S from three starts:

    plain    r as it is
    prior    1/r' = p + (1 − p)/r with p = 10/(10 + 1 + τ): r = 1 with the weight of ten effective steps
    ramp     r' = 1 + (r − 1)·τ/0.05T until τ is 0.05 T, the width of the averages: as timid as can be

Both held-back starts are scaling rules, and leave S = 1 alone. Every run is one single-threaded process and a step has
n = 2 gradient samples, the fewest, whose averages are the least settled. Every run appends a line to a file; an interrupted
benchmark goes on from it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from page import markdown
from torch import Tensor, nn
from workloads import CASES as TRANSFERRED
from workloads import Case, Transformer, bits_without_context, example, prepare_process, text_splits

from ray_adascale import AdaScaleConfig, RuleInput, Run, Workload, seed_everything

PRIOR = 10.0  # effective steps
WINDOW = 0.05  # of T: the averages' width, and the ramp's
GOOD = 0.9  # of what the best schedule learns at S = 1
AT = (0, 5, 10, 20)  # effective steps at which gains are shown
STARTS = ("plain", "prior", "ramp")
SHAPES = ("warmup", "cosine")


# ---- workloads -------------------------------------------------------------------------------------------------------


def transformer(config: dict[str, Any]) -> Workload:
    """The next character of the text of ``workloads.py``; the schedule with a warm-up is torch's OneCycleLR."""
    model = Transformer(len(example("language_model.py:LETTERS")))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    train, _, test = text_splits()
    x, y = (part[:256] for part in test.tensors)
    scheduler: Any
    if config["schedule"] == "warmup":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=config["total_steps"])
    else:
        scheduler = example("mnist.py:schedule")(optimizer, config["schedule"], config["total_steps"])

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=loss_fn,
        evaluate=lambda model: {"bits": loss_fn(model, (x, y)).item() / math.log(2)},
        metric="bits",
    )


def digits(config: dict[str, Any]) -> Workload:
    """``examples/digits.py``, which the demo trains, with another schedule."""
    built: Workload = example("digits.py:workload")({"lr": config["lr"], "momentum": 0.9, "split": "test"})
    shape, total_steps = config["schedule"], config["total_steps"]
    return replace(built, scheduler=example("mnist.py:schedule")(built.optimizer, shape, total_steps))


def shorter(name: str, total_steps: int) -> Case:
    """A workload of ``workloads.py`` with another T."""
    return replace(TRANSFERRED[name], total_steps=total_steps)


CASES = {
    "tabular": shorter("tabular", 2000),
    "digits": Case("the demo's digits", digits, "accuracy", 1, lambda: 0.1, 8, 900, (0.05,)),
    "transformer": Case("two causal layers", transformer, "bits a character", 0, bits_without_context, 8, 600, (0.1,)),
    "text": shorter("text", 600),
    "vision": shorter("vision", 600),
}
EDGES = {  # the largest peak LRs that S = 1 survives, found by --edges
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
    """AdaScale with a prior of r = 1 that has the weight of ``steps`` effective steps."""

    steps: float

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        p = self.steps / (self.steps + 1 + now.effective_steps)
        r = 1 / (p + (1 - p) / now.gain)
        return r, r


@dataclass(frozen=True)
class Ramp:
    """AdaScale whose gain grows from 1 to what it is over a share of the run."""

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
    """One run. What makes it another run is a field."""

    workload: str
    shape: str
    lr: float
    scale: int
    start: str
    seed: int
    total_steps: int


@dataclass(frozen=True)
class Result:
    """How it ended.

    Attributes:
        score: The metric; None where it isn't finite.
        learnt: The way from chance to perfect, as a share; −1 where the metric isn't finite.
        optimizer_steps: Taken.
        gains: r as estimated, at :data:`AT` effective steps and, last, at 0.05 T; None where the run ended before.
        well_until: τ up to which the training loss, a mean over ten steps, was nearer to its lowest than to its beginning.
        date: Of the run.
    """

    score: float | None
    learnt: float
    optimizer_steps: int
    gains: list[float | None]
    well_until: float
    date: str


Results = dict[Job, Result]
chance = functools.cache(lambda workload: CASES[workload].chance())


def train(job: Job) -> Result:
    """One run in this process. Divergence is a result, not an error."""
    case = CASES[job.workload]
    seed_everything(job.seed)
    config = {"lr": job.lr, "schedule": job.shape, "total_steps": job.total_steps, "split": "test"}
    built = case.workload(config)
    passes = min(job.scale, 2)
    run = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        AdaScaleConfig(
            base_batch_size=case.base_batch_size,
            total_steps=job.total_steps,
            scheduler_unit=built.scheduler_unit,
            per_worker_batch_size=case.base_batch_size * job.scale // passes,
            accumulation=passes,
            rule=RULES[job.start],
            seed=job.seed,
            evaluate_every=job.total_steps,
        ),
        evaluate=built.evaluate,
    )
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
        learnt=(score - chance(job.workload)) / (case.perfect - chance(job.workload)) if finite else -1.0,
        optimizer_steps=run.optimizer.steps,
        gains=[next((r for tau, r in zip(taus, gains, strict=False) if tau >= t), None) for t in at],
        well_until=well_until(taus, losses),
        date=datetime.date.today().isoformat(),
    )


def well_until(taus: Sequence[float], losses: Sequence[float], width: int = 10) -> float:
    """:attr:`Result.well_until`, of τ before each step and the loss of each step; 0 where that never was."""
    means = [statistics.fmean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]
    finite = [x for x in means if math.isfinite(x)]
    halfway = (finite[0] + min(finite)) / 2 if finite else -math.inf
    return max((tau for tau, x in zip(taus, means, strict=False) if x < halfway), default=0.0)


# ---- all runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which runs there are. ``total_steps`` replaces each workload's T, for the smoke test."""

    workloads: tuple[str, ...]
    scales: tuple[int, ...]
    starts: tuple[str, ...]
    seeds: tuple[int, ...]
    shapes: tuple[str, ...] = SHAPES
    levels: tuple[str, ...] = ("edge", "beyond")
    total_steps: int | None = None

    def jobs(self, workload: str, shape: str, level: str, scale: int, start: str) -> list[Job]:
        """A run for each seed. At S = 1 all starts are one."""
        lr = float(f"{EDGES[workload, shape] * LEVELS[level]:.6g}")
        total_steps = self.total_steps or CASES[workload].total_steps
        start = start if scale > 1 else "plain"
        return [Job(workload, shape, lr, scale, start, seed, total_steps) for seed in self.seeds]

    def cells(self) -> Iterable[tuple[str, str, str, int, str]]:
        """Workload, schedule's shape, its level, S, start."""
        for workload in self.workloads:
            for shape in self.shapes:
                for level in self.levels:
                    for scale in self.scales:
                        for start in self.starts if scale > 1 else ("plain",):
                            yield workload, shape, level, scale, start


class Runs:
    """Runs, each of which is done once and kept in a file.

    Args:
        path: The file, of one line of JSON a run.
        do: What does a run.
    """

    def __init__(self, path: Path, do: Callable[[Job], Result] = train) -> None:
        self._path, self._do = path, do
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a last line that was torn by a crash doesn't count
        path.write_text("".join(whole))
        rows = map(json.loads, whole)
        self.done: Results = {Job(**row["job"]): Result(**row["result"]) for row in rows}

    def of(self, jobs: Iterable[Job]) -> list[Result]:
        """Results of these runs, done now where the file hasn't got them."""
        found = []
        for job in jobs:
            if job not in self.done:
                self.done[job] = self._do(job)
                with self._path.open("a") as file:
                    file.write(json.dumps({"job": asdict(job), "result": asdict(self.done[job])}) + "\n")
            found.append(self.done[job])
        return found


def edge(runs: Runs, workload: str, shape: str, seeds: Sequence[int] = (1, 2, 3, 4)) -> float:
    """The largest peak LR of a ladder of factors of 1.5 at which every run at S = 1 learns :data:`GOOD` of the best mean."""
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


# ---- what came of it -------------------------------------------------------------------------------------------------


def reference(plan: Plan, runs: Runs, workload: str) -> float:
    """What the best of the plan's schedules learns at S = 1, a mean over seeds."""
    schedules = [(shape, level) for shape in plan.shapes for level in plan.levels]
    return max(statistics.fmean(r.learnt for r in runs.of(plan.jobs(workload, *s, 1, "plain"))) for s in schedules)


def outcome_table(plan: Plan, runs: Runs) -> str:
    """A row for every schedule, scale and start."""
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
    """r/S over the first effective steps, against 0.05 T, of the plain runs on the schedules at the edge."""
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


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def extent(values: Sequence[float]) -> str:
    """Mean (smallest–largest)."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else ""


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--scales", type=int, nargs="+", default=[2, 4, 8], help="beside 1; even")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=["edge", "beyond"])
    parser.add_argument("--seeds", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("runs/first_steps.jsonl"), help="(default: %(default)s)")
    parser.add_argument("--edges", action="store_true", help="search for the LRs at the edge, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="tabular, S = 1 and 4, one seed, one schedule, 60 steps")
    args = parser.parse_args(argv)
    if args.seeds < 1 or any(s < 2 or s % 2 for s in args.scales):
        parser.error("--seeds must be at least 1, and --scales even numbers, so that both passes of a step are equal")
    if args.smoke:
        return args, Plan(("tabular",), (1, 4), STARTS, (1,), ("cosine",), ("edge",), 60)
    seeds, scales = tuple(range(1, args.seeds + 1)), (1, *sorted(set(args.scales)))
    return args, Plan(tuple(args.workloads), scales, tuple(args.starts), seeds, tuple(args.shapes), tuple(args.levels))


def main(argv: Sequence[str] | None = None) -> int:
    args, plan = parse(argv)
    began = time.monotonic()
    prepare_process()
    print(f"load before: {os.getloadavg()[0]:.2f}; torch {torch.__version__}; results: {args.json}", file=sys.stderr)
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
