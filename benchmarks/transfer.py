"""The paper's experiment: one schedule, tuned at S = 1, carried to S = 4, 16 and 64 by several methods and workloads.

    python benchmarks/transfer.py --page docs/results/transfer.md      all of it: a good half hour on two quiet cores
    python benchmarks/transfer.py --optimizer adamw --page docs/results/adam.md
    python benchmarks/transfer.py --smoke                      whether it runs
    python benchmarks/transfer.py --report-only --page p.md    the page of the runs so far

First, on every workload, 15 schedules (five peak LRs, three shapes) run at S = 1 and at S = 16 and are scored on the search
split: the best at S = 1 is the schedule to transfer, and how alike both rankings are is the robustness picture. Then that
schedule runs with other seeds, scored on a test split that no choice was made on:

    AdaScale   LR and clock by the gain r
    LSW        linear scaling with warm-up (5/90 of the run), T/S steps
    LSW+       the same, stretched to as many optimizer steps as AdaScale took with this seed
    unscaled   the base schedule's LR, stretched to as many optimizer steps as AdaScale took with this seed

At S = 1 all four are plain SGD, so it runs once. With AdamW there are more methods (``adam_candidates.py``), one workload more,
two shapes of schedule, and no grid at S = 16. A run is one single-threaded process, and its n = min(S, 8) gradient samples a
step are accumulation passes, not workers. Every run appends a line to a file; an interrupted benchmark goes on from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from adam_candidates import (
    Changing,
    Power,
    SquareRoot,
    betas_per_effective_step,
    decay_per_effective_step,
    sde_square_root,
)
from page import by_hand, command_line, count, markdown, spread
from torch import nn
from torch.utils.data import DataLoader, Subset
from workloads import CASES, Case, example, prepare_process, transformer

from ray_adascale import (
    AdaScaleConfig,
    LinearRule,
    Recipe,
    Run,
    UnscaledRule,
    Workload,
    forecast_recipe,
    record_recipe,
    seed_everything,
)

SHAPES = ("cosine", "step", "warmup")
GRID_SCALE = 16
GRID_SEEDS = (101, 102)


# ---- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """How a schedule is carried to a larger batch.

    Attributes:
        rule: Makes the scaling rule, of the optimizer steps that it is told or None.
        told: Whether it is told the steps that AdaScale's run took.
        about: What it is, in the page's words.
    """

    rule: Callable[[int | None], Any]
    told: bool = False
    about: str = ""


@dataclass(frozen=True)
class Study:
    """The comparison with one optimizer.

    Attributes:
        cases: Workloads, by name.
        methods: By name; the first is AdaScale.
        against: Those that AdaScale is compared with, beside S = 1.
        pictured: Those in the picture of the metric against scale.
        stages: Scales and how many seeds, in the order in which they are run.
        shapes: Of schedules in the grid.
        grid_scale: The other scale at which the grid is run; 1 for none.
        evaluations: In a run.
        betas_after: The stage after which some methods are run with another β₂; None for never.
        loss_examples: Of the training split, for the training loss at the end; None for all.
    """

    cases: dict[str, Case]
    methods: dict[str, Method]
    against: tuple[str, ...]
    pictured: tuple[str, ...]
    stages: tuple[tuple[int, int], ...]
    shapes: tuple[str, ...]
    grid_scale: int
    evaluations: int
    loss_examples: int | None = None
    betas_after: int | None = None


SGD = Study(
    CASES,
    {
        "AdaScale": Method(lambda steps: "adascale"),
        "LSW": Method(lambda steps: LinearRule()),
        "LSW+": Method(lambda steps: LinearRule(steps=steps), told=True),
        "unscaled": Method(lambda steps: UnscaledRule(steps=steps), told=True),
    },
    ("LSW", "LSW+", "unscaled"),
    ("AdaScale", "LSW", "LSW+", "unscaled"),
    ((64, 5), (16, 5), (4, 5), (1, 5)),
    SHAPES,
    GRID_SCALE,
    20,
)
DECAY = 0.1  # of AdamW, decoupled


def adamw_case(name: str, total_steps: int, lrs: tuple[float, ...]) -> Case:
    """A workload with other steps and peak LRs."""
    return replace(CASES[name], total_steps=total_steps, lrs=lrs)


ADAMW = Study(
    {
        "vision": adamw_case("vision", 600, (0.001, 0.002, 0.004, 0.008, 0.016)),
        "text": adamw_case("text", 800, (0.002, 0.004, 0.008, 0.016, 0.032)),
        "tabular": adamw_case("tabular", 2500, (0.002, 0.004, 0.008, 0.016, 0.032)),
        "transformer": replace(
            CASES["text"],
            about="the same text, two causal layers of a transformer of width 32",
            workload=transformer,
            total_steps=600,
            lrs=(0.002, 0.004, 0.008, 0.016, 0.032),
        ),
    },
    {
        "AdaScale": Method(lambda steps: "adascale", about="(r, r), norms of the gradients as they are"),
        "r, Adam's metric": Method(lambda steps: Power(1.0, "adam"), about="(r, r), norms in Adam's metric"),
        "r^¾": Method(lambda steps: Power(0.75), about="(r^¾, r)"),
        "r^¾, Adam's metric": Method(lambda steps: Power(0.75, "adam"), about="(r^¾, r), norms in Adam's metric"),
        "√r": Method(lambda steps: Power(0.5), about="(√r, r)"),
        "AdamScale": Method(
            lambda steps: Power(0.5, "adam"),
            about="(√r, r), norms in Adam's metric: AdaptDL's",
        ),
        "AdaScale, β^r": Method(
            lambda steps: Changing(Power(1.0), betas_per_effective_step),
            about="(r, r), both betas to the power r",
        ),
        "√r, decay": Method(
            lambda steps: Changing(Power(0.5), decay_per_effective_step),
            about="(√r, r), weight decay times √r",
        ),
        "SDE, κ = r": Method(
            lambda steps: Changing(Power(0.5), sde_square_root),
            about="(√r, r), 1 − β times r, ε by √r",
        ),
        "SDE, κ = S": Method(
            lambda steps: Changing(SquareRoot(), sde_square_root),
            about="(√S, S), 1 − β times S, ε by √S",
        ),
        "linear": Method(lambda steps: LinearRule(), about="(S, S), warm-up over 5/90 of the run"),
        "sqrt": Method(lambda steps: SquareRoot(), about="(√S, S)"),
        "sqrt+": Method(
            SquareRoot,
            told=True,
            about="√S, as many steps as AdaScale took with this seed",
        ),
        "unscaled": Method(
            lambda steps: UnscaledRule(steps=steps),
            told=True,
            about="1, as many steps as AdaScale took with this seed",
        ),
    },
    ("AdamScale", "sqrt", "sqrt+", "unscaled"),
    ("AdaScale", "AdamScale", "SDE, κ = r", "sqrt", "sqrt+", "unscaled"),
    ((1, 5), (16, 2), (16, 5), (4, 2), (64, 2), (4, 5), (64, 5)),
    ("cosine", "warmup"),
    1,
    10,
    500,
    betas_after=2,
)
OTHER_BETA2 = 0.95
OTHER_BETA2_METHODS = ("AdaScale", "SDE, κ = r")
STUDIES = {"sgd": SGD, "adamw": ADAMW}


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run. What makes it another run is a field."""

    workload: str
    method: str
    scale: int
    seed: int
    lr: float
    shape: str
    total_steps: int
    split: str
    steps: int | None = None  # optimizer steps, where the method is given AdaScale's
    optimizer: str = "sgd"
    beta2: float = 0.999


@dataclass(frozen=True)
class Result:
    """How it ended. ``score`` and ``train_loss`` are None where they aren't finite."""

    score: float | None
    train_loss: float | None
    optimizer_steps: int
    examples: int
    mean_gain: float
    curve_tau: list[float]
    curve_score: list[float]
    failed: bool
    cpu_s: float
    date: str
    curve_examples: list[int] = field(default_factory=list)


Results = dict[Job, Result]


def with_adamw(built: Workload, job: Job) -> Workload:
    """The same model and schedule with AdamW."""
    optimizer = torch.optim.AdamW(
        built.model.parameters(), lr=job.lr, betas=(0.9, job.beta2), weight_decay=DECAY, foreach=True
    )
    return replace(
        built, optimizer=optimizer, scheduler=example("mnist.py:schedule")(optimizer, job.shape, job.total_steps)
    )


def train(job: Job) -> Result:
    """One run in this process. Divergence is a result, not an error."""
    began = time.process_time()
    study = STUDIES[job.optimizer]
    case = study.cases[job.workload]
    seed_everything(job.seed)
    config = {"lr": job.lr, "schedule": job.shape, "total_steps": job.total_steps, "split": job.split}
    built = case.workload(config)
    rule = study.methods[job.method].rule(job.steps)
    if job.optimizer == "adamw":
        built = with_adamw(built, job)
    if isinstance(rule, Changing):
        rule.attach(built.optimizer)
    curve: list[tuple[float, int, float]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert built.evaluate is not None
        scores = built.evaluate(model)
        curve.append((run.effective_steps, run.source.position, scores[built.metric]))
        return scores

    passes = min(job.scale, 8)
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
            rule=rule,
            seed=job.seed,
            evaluate_every=job.total_steps / study.evaluations,
        ),
        evaluate=evaluate,
    )
    score = train_loss = math.nan
    try:
        for batch in run:
            run.backward(built.loss_fn(run.model, batch))
            run.step()
        score, train_loss = curve[-1][2], final_loss(built, study.loss_examples)
    except FloatingPointError:  # no finite gradient for 50 steps in a row
        pass
    summary = run.summary()
    chance = case.chance()
    # Divergence often ends at finite weights that answer the same to everything.
    learnt = (score - chance) / (case.perfect - chance)
    return Result(
        score=score if math.isfinite(score) else None,
        train_loss=train_loss if math.isfinite(train_loss) else None,
        optimizer_steps=summary.get("optimizer_steps", 0),
        examples=run.source.position,
        mean_gain=run.progress / max(1, summary.get("optimizer_steps", 0)),
        curve_tau=[tau for tau, _, _ in curve],
        curve_score=[value for _, _, value in curve],
        failed=not learnt > 0.05,
        cpu_s=time.process_time() - began,
        date=datetime.date.today().isoformat(),
        curve_examples=[examples for _, examples, _ in curve],
    )


def final_loss(built: Workload, examples: int | None) -> float:
    """Mean loss over the training split, or its first so many examples, in eval mode, so without augmentation."""
    built.model.eval()
    total = 0.0
    dataset: Any = built.train_dataset
    if examples is not None:
        dataset = Subset(dataset, range(min(examples, len(dataset))))
    with torch.no_grad():
        for batch in DataLoader(dataset, batch_size=500):
            total += built.loss_fn(built.model, batch).item() * len(batch[0])
    return total / len(dataset)


# ---- all runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which runs there are. ``total_steps`` replaces each workload's T, for the smoke test."""

    workloads: tuple[str, ...]
    scales: tuple[int, ...]
    seeds: tuple[int, ...]
    grid_scale: int = GRID_SCALE
    grid_seeds: tuple[int, ...] = GRID_SEEDS
    every: int = 1  # of a grid's LRs
    shapes: tuple[str, ...] = SHAPES
    total_steps: int | None = None
    optimizer: str = "sgd"
    beta2: float = 0.999

    @property
    def study(self) -> Study:
        return STUDIES[self.optimizer]

    def case(self, workload: str) -> Case:
        return self.study.cases[workload]

    def steps(self, workload: str) -> int:
        """T."""
        return self.total_steps or self.case(workload).total_steps

    def stages(self) -> list[tuple[int, int]]:
        """The study's, of this plan's scales and seeds."""
        return [(scale, min(seeds, len(self.seeds))) for scale, seeds in self.study.stages if scale in self.scales] + [
            (scale, len(self.seeds)) for scale in self.scales
        ]

    def grid(self, workload: str) -> list[tuple[float, str]]:
        """The schedules: peak LR and shape."""
        return [(lr, shape) for lr in self.case(workload).lrs[:: self.every] for shape in self.shapes]

    def grid_job(self, workload: str, scale: int, seed: int, lr: float, shape: str) -> Job:
        """AdaScale's run with a schedule of the grid."""
        return Job(
            workload, "AdaScale", scale, seed, lr, shape, self.steps(workload), "search", optimizer=self.optimizer
        )

    def grid_jobs(self) -> list[Job]:
        """All runs of the grid; those that the choice of a schedule waits for come first."""
        return [
            self.grid_job(workload, scale, seed, lr, shape)
            for scale in dict.fromkeys((1, self.grid_scale))
            for workload in self.workloads
            for seed in self.grid_seeds
            for lr, shape in self.grid(workload)
        ]

    def job(self, workload: str, method: str, scale: int, seed: int, best: tuple[float, str]) -> Job:
        """A run of the comparison, of a method that needs not be told its steps."""
        return Job(workload, method, scale, seed, *best, self.steps(workload), "test", None, self.optimizer, self.beta2)


def grid_score(plan: Plan, results: Results, workload: str, scale: int, lr: float, shape: str) -> float:
    """Mean over the grid's seeds of the score as a loss; infinite where a run failed."""
    found = [results[plan.grid_job(workload, scale, seed, lr, shape)] for seed in plan.grid_seeds]
    if any(r.failed or r.score is None for r in found):
        return math.inf
    return statistics.mean(plan.case(workload).loss(r.score) for r in found if r.score is not None)


def best_schedule(plan: Plan, results: Results, workload: str) -> tuple[float, str] | None:
    """The grid's best at S = 1, or None as long as the grid is incomplete."""
    if any(job not in results for job in plan.grid_jobs() if job.workload == workload and job.scale == 1):
        return None
    return min(plan.grid(workload), key=lambda cell: grid_score(plan, results, workload, 1, *cell))


def stretched(plan: Plan, results: Results, workload: str, scale: int, seed: int, best: tuple[float, str]) -> list[Job]:
    """Runs of the methods that are told the steps of AdaScale's run; none where that one is missing or failed."""
    own = results.get(plan.job(workload, "AdaScale", scale, seed, best))
    if own is None or own.failed:
        return []
    told = [name for name, method in plan.study.methods.items() if method.told]
    return [replace(plan.job(workload, m, scale, seed, best), steps=own.optimizer_steps) for m in told]


def comparison(plan: Plan, results: Results, workload: str, scale: int, method: str) -> dict[int, Result]:
    """Results by seed of a method at a scale, as far as they are there. At S = 1 all methods are one."""
    best = best_schedule(plan, results, workload)
    if best is None:
        return {}
    found: dict[int, Result] = {}
    for seed in plan.seeds:
        if scale == 1:
            jobs = [plan.job(workload, "AdaScale", 1, seed, best)]
        elif not plan.study.methods[method].told:
            jobs = [plan.job(workload, method, scale, seed, best)]
        else:
            jobs = [job for job in stretched(plan, results, workload, scale, seed, best) if job.method == method]
        found.update((seed, results[job]) for job in jobs if job in results)
    return found


def read(path: Path) -> Results:
    """The runs in a file. A last line that was torn by a crash doesn't count."""
    results: Results = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            row = json.loads(line)
            results[Job(**row["job"])] = Result(**row["result"])
    return results


def run_all(plan: Plan, path: Path, jobs: int) -> Results:
    """Runs what the file doesn't have yet, in rounds, since some need to know the one before."""
    results = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # without a torn last line, which the next one would be glued to
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")))

    def jobs_of(plan: Plan, scale: int, seeds: int, methods: Iterable[str], *, told: bool) -> list[Job]:
        """Of methods that are told their steps, or of those that aren't."""
        jobs = []
        for workload in plan.workloads:
            best = best_schedule(plan, results, workload)
            if best is None:
                continue
            for seed in plan.seeds[:seeds]:
                given = {job.method: job for job in stretched(plan, results, workload, scale, seed, best)}
                for name in methods:
                    method = plan.study.methods[name]
                    if method.told != told or (scale == 1 and name != "AdaScale"):
                        continue
                    if not told:
                        jobs.append(plan.job(workload, name, scale, seed, best))
                    elif name in given:
                        jobs.append(given[name])
        return jobs

    def rounds() -> Iterable[tuple[str, list[Job]]]:
        """Lists of jobs, each made when those before are done, on which it depends."""
        yield "grid", plan.grid_jobs()
        for stage, (scale, seeds) in enumerate(plan.stages()):
            for told in (False, True):
                what = f"S = {scale}{', given steps' * told}"
                yield what, jobs_of(plan, scale, seeds, plan.study.methods, told=told)
            if stage == plan.study.betas_after:
                record_recipes(plan, results, path)
                other = with_other_betas(plan)
                for scale in other.scales:
                    yield (
                        f"other betas, S = {scale}",
                        jobs_of(other, scale, len(plan.seeds), OTHER_BETA2_METHODS, told=False),
                    )

    context = multiprocessing.get_context("spawn")  # torch's threads don't survive a fork
    with ExitStack() as stack:
        pool = None
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare_process))
        file = stack.enter_context(path.open("a"))
        for what, wanted in rounds():
            missing = [job for job in wanted if job not in results]
            for number, (job, result) in enumerate(execute(missing, pool), start=1):
                results[job] = result
                file.write(json.dumps({"job": asdict(job), "result": asdict(result)}) + "\n")
                file.flush()
                score = "failed" if result.failed else f"{result.score:.4f}"
                print(
                    f"{what} {number}/{len(missing)}: {job.workload}, {job.method}, S = {job.scale}, seed {job.seed}, "
                    f"lr {job.lr:g} {job.shape}: {score} in {result.optimizer_steps} steps, {result.cpu_s:.1f} s",
                    flush=True,
                )
    return results


def execute(jobs: Sequence[Job], pool: ProcessPoolExecutor | None) -> Iterable[tuple[Job, Result]]:
    """Jobs and their results, as they get done; in this process without a pool."""
    if pool is None:
        yield from ((job, train(job)) for job in jobs)
        return
    futures = {pool.submit(train, job): job for job in jobs}
    for future in as_completed(futures):
        yield futures[future], future.result()


# ---- the page --------------------------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, those of equal values averaged."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's ρ; NaN where all values of a side are equal."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return math.nan
    return statistics.correlation(ranks(one), ranks(other))


def cells(found: Sequence[Result]) -> list[str]:
    """Score, training loss, optimizer steps, examples and mean gain of a method's runs."""
    if not found:
        return ["not run", "", "", "", ""]
    good = [r for r in found if not r.failed]
    lost = len(found) - len(good)
    if not good:
        return [f"**failed** ({lost} of {lost})", "", "", "", ""]
    return [
        spread([r.score for r in good if r.score is not None])
        + (f" (**{lost} of {len(found)} failed**)" if lost else ""),
        spread([r.train_loss for r in good if r.train_loss is not None]),
        f"{statistics.mean(r.optimizer_steps for r in good):,.0f}",
        f"{statistics.mean(r.examples for r in good):,.0f}",
        f"{statistics.mean(r.mean_gain for r in good):.2f}",
    ]


@dataclass(frozen=True)
class Difference:
    """By how much AdaScale is better than another, paired by seed; ``low``, ``high``: 95 % interval of the mean."""

    mean: float
    low: float
    high: float
    failed: int  # of the other's runs; these are in no mean

    @property
    def verdict(self) -> str:
        if math.isnan(self.mean):
            return "the other failed" if self.failed else "not run"
        if math.isinf(self.low):
            word = "one seed only"
        elif self.low > 0:
            word = "better"
        elif self.high < 0:
            word = "worse"
        else:
            word = "no clear difference"
        return word + (f"; the other failed {self.failed} times" if self.failed else "")

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return self.verdict
        interval = "" if math.isinf(self.low) else f" [{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.mean:+.4f}{interval}: {self.verdict}"


def difference(case: Case, own: dict[int, Result], other: dict[int, Result]) -> Difference:
    """Of the seeds that both have. The interval is Student's; of one seed there is none, and it is infinite."""
    from scipy.stats import t

    pairs = [(own[seed], other[seed]) for seed in own if seed in other]
    by = [
        case.better(a.score, b.score)
        for a, b in pairs
        if not (a.failed or b.failed) and a.score is not None and b.score is not None
    ]
    failed = sum(b.failed for _, b in pairs)
    if not by:
        return Difference(math.nan, math.nan, math.nan, failed)
    half = math.inf
    if len(by) > 1:
        half = float(t.ppf(0.975, len(by) - 1)) * statistics.stdev(by) / math.sqrt(len(by))
    mean = statistics.mean(by)
    return Difference(mean, mean - half, mean + half, failed)


def workload_table(plan: Plan, results: Results, workload: str) -> str:
    """A row for every scale and method."""
    case = plan.case(workload)
    rows = []
    for scale in plan.scales:
        for method in ("all alike",) if scale == 1 else plan.study.methods:
            found = comparison(plan, results, workload, scale, method)
            seeds = f" ({count(list(found), 'seed')})" if 0 < len(found) < len(plan.seeds) else ""
            rows.append([f"{scale}", method + seeds, *cells(list(found.values()))])
    head = ["S", "method", f"test {case.metric}", "training loss", "optimizer steps", "examples", "mean gain"]
    return markdown(head, rows)


def differences(plan: Plan, results: Results) -> list[tuple[str, int, str, Difference]]:
    """AdaScale at each scale against S = 1, and against the other methods at that scale."""
    out = []
    for workload in plan.workloads:
        for scale in plan.scales:
            if scale == 1:
                continue
            own = comparison(plan, results, workload, scale, "AdaScale")
            base = comparison(plan, results, workload, 1, "AdaScale")
            out.append((workload, scale, "S = 1", difference(plan.case(workload), own, base)))
            for method in plan.study.against:
                other = comparison(plan, results, workload, scale, method)
                out.append((workload, scale, method, difference(plan.case(workload), own, other)))
    return out


def verdicts(plan: Plan, results: Results) -> str:
    """Where AdaScale is clearly worse, in words, and the table of all differences."""
    found = differences(plan, results)
    lost = [
        f"- {workload}, S = {scale}: worse than {against} by {-d.mean:.4f} {plan.case(workload).metric} "
        f"(95 % interval {-d.high:.4f} to {-d.low:.4f})."
        for workload, scale, against, d in found
        if d.high < 0
    ]
    for workload in plan.workloads:
        for scale in plan.scales:
            failed = sum(r.failed for r in comparison(plan, results, workload, scale, "AdaScale").values())
            if failed:
                lost.append(f"- {workload}, S = {scale}: {failed} of {len(plan.seeds)} AdaScale runs failed.")
    against = ["S = 1", *plan.study.against]
    rows = [
        [workload, f"{scale}", *(str(d) for w, s, _, d in found if (w, s) == (workload, scale))]
        for workload in plan.workloads
        for scale in plan.scales
        if scale > 1
    ]
    return "\n".join(
        [
            "By how much AdaScale is better (positive) or worse (negative) in the test metric, paired by seed, with the 95 % "
            "interval of the mean. A difference is called one where the interval doesn't hold 0; of as many intervals as "
            "these, one or two do so by chance.",
            "",
            markdown(["workload", "S", *(f"against {a}" for a in against)], rows),
            "",
            "**Where AdaScale loses:**" if lost else "AdaScale is nowhere clearly worse.",
            "",
            *lost,
        ]
    ).rstrip()


def standing(plan: Plan, results: Results, scale: int) -> str:
    """Every method that was run at a scale: by how much it is better than S = 1, and its steps."""
    rows = []
    for method, about in plan.study.methods.items():
        row = []
        for workload in plan.workloads:
            found, base = (comparison(plan, results, workload, s, method) for s in (scale, 1))
            row.append(standing_of(plan.case(workload), found, base))
        if set(row) != {"not run"}:
            rows.append([method, about.about, *row])
    head = ["method", "(LR factor, clock)", *(f"{w}, {plan.case(w).metric}" for w in plan.workloads)]
    return markdown(head, rows)


def standing_of(case: Case, found: dict[int, Result], base: dict[int, Result]) -> str:
    """A cell: how much better than S = 1 with the same seeds, ± the standard error of S = 1's mean; in how many steps.

    Bold: worse by more than that.
    """
    good = {seed: r for seed, r in found.items() if not r.failed and seed in base}
    if len(good) < len(found):
        return f"**{len(found) - len(good)} of {len(found)} failed**"
    if not found:
        return "not run"
    scores = [r.score for r in base.values() if r.score is not None]
    by = statistics.mean(case.better(r.score or 0.0, base[seed].score or 0.0) for seed, r in good.items())
    error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.inf
    text = f"{by:+.3f}" + (f" ± {error:.3f}" if len(scores) > 1 else "")
    steps = statistics.mean(r.optimizer_steps for r in good.values())
    seeds = f", {count(list(found), 'seed')}" if len(found) < len(base) else ""
    return f"{f'**{text}**' if by < -error else text} in {steps:,.0f}{seeds}"


def with_other_betas(plan: Plan) -> Plan:
    """The same with another β₂: S = 1 and 16, and the schedule that was tuned with the default one."""
    return replace(plan, beta2=OTHER_BETA2, scales=tuple(s for s in (1, 16) if s in plan.scales))


def betas_table(plan: Plan, results: Results) -> str:
    """The candidates that were run with another β₂, at S = 16."""
    other = with_other_betas(plan)
    rows = []
    for method in OTHER_BETA2_METHODS:
        row = [method]
        for workload in plan.workloads:
            found, base = (comparison(other, results, workload, scale, method) for scale in (16, 1))
            row.append(standing_of(plan.case(workload), found, base))
        rows.append(row)
    return markdown(["method, S = 16", *plan.workloads], rows)


def recipe_path(path: Path, workload: str) -> Path:
    return path.with_name(f"{path.stem}-{workload}-recipe.json")


def record_recipes(plan: Plan, results: Results, path: Path) -> None:
    """A base run of each workload with probes, beside the file of runs, where it isn't there yet."""
    for workload in plan.workloads:
        best = best_schedule(plan, results, workload)
        if best is None or recipe_path(path, workload).exists():
            continue
        case, job = plan.case(workload), plan.job(workload, "AdaScale", 1, plan.seeds[0], best)

        def workload_of(config: dict[str, Any], case: Case = case, job: Job = job) -> Workload:
            return with_adamw(case.workload(config), job)

        record_recipe(
            workload_of,
            {"lr": job.lr, "schedule": job.shape, "split": job.split},
            base_batch_size=case.base_batch_size,
            total_steps=job.total_steps,
            seed=job.seed,
            probe_every=5,
        ).save(recipe_path(path, workload))


def forecasts(plan: Plan, results: Results, path: Path) -> str:
    """AdaScale's steps as they were forecast from one base run, and as they were taken."""
    rows = []
    for workload in plan.workloads:
        if not recipe_path(path, workload).exists():
            continue
        recipe = Recipe.load(recipe_path(path, workload))
        for scale in plan.scales[1:]:
            taken = [r.optimizer_steps for r in comparison(plan, results, workload, scale, "AdaScale").values()]
            if not taken:
                continue
            passes = min(scale, 8)
            config = AdaScaleConfig(per_worker_batch_size=recipe.base_batch_size * scale // passes, accumulation=passes)
            row = forecast_recipe(recipe, workers=[1], config=config).rows[0]
            actual = statistics.mean(taken)
            forecast = f"{row.steps:,} ({row.low:,.0f} to {row.high:,.0f})"
            rows.append([workload, f"{scale}", forecast, f"{actual:,.0f}", f"{row.steps / actual - 1:+.0%}"])
    return markdown(["workload", "S", "forecast (interval)", "taken", "off by"], rows)


def robustness(plan: Plan, results: Results) -> str:
    """Rank correlations of the schedules' scores at S = 1 and at the grid's other scale."""
    large = plan.grid_scale
    rows = []
    for workload in plan.workloads:
        if any(job not in results for job in plan.grid_jobs() if job.workload == workload):
            rows.append([workload, "not run"])
            continue
        grid = plan.grid(workload)

        def scores(scale: int, seeds: Sequence[int] = plan.grid_seeds, workload: str = workload) -> list[float]:
            narrow = replace(plan, grid_seeds=tuple(seeds))
            return [grid_score(narrow, results, workload, scale, *cell) for cell in plan.grid(workload)]

        small, big = scores(1), scores(large)
        finite = [i for i, score in enumerate(small) if math.isfinite(score)]
        first, last = plan.grid_seeds[:1], plan.grid_seeds[-1:]
        crossed = [rank_correlation(scores(1, a), scores(large, b)) for a, b in ((first, last), (last, first))]
        chosen = min(range(len(grid)), key=lambda i: small[i])
        lr, shape = grid[chosen]
        edge = ", at the edge of the grid" if lr in (grid[0][0], grid[-1][0]) and len({c[0] for c in grid}) > 2 else ""
        rows.append(
            [
                workload,
                f"lr {lr:g}, {shape}{edge}",
                f"{ranks(big)[chosen]:g} of {len(grid)}",
                f"{len(grid) - len(finite)}, {sum(map(math.isinf, big))}",
                f"{rank_correlation(small, big):.2f}",
                f"{rank_correlation([small[i] for i in finite], [big[i] for i in finite]):.2f}",
                f"{statistics.mean(crossed):.2f}",
                f"{rank_correlation(scores(1, first), scores(1, last)):.2f}" if first != last else "",
            ]
        )
    head = [
        "workload",
        "best at S = 1",
        f"its rank at S = {large}",
        f"failed at S = 1, {large}",
        f"ρ, S = 1 and {large}",
        "ρ of those that didn't fail at S = 1",
        f"ρ, S = 1 and {large}, one seed each",
        "ρ, S = 1 twice, one seed each",
    ]
    return markdown(head, [row + [""] * (len(head) - len(row)) for row in rows])


def plot(plan: Plan, results: Results, stem: Path) -> list[Path]:
    """Pictures: metric against S, against effective steps, and the grid at S = 1 against the grid at scale.

    Without a grid at scale, the metric against examples and steps in its place.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def panels(name: str, title: str, draw: Callable[[Any, str], None]) -> Path:
        figure, axes = plt.subplots(
            1, len(plan.workloads), figsize=(4.6 * len(plan.workloads), 4), layout="constrained", squeeze=False
        )
        for panel, workload in zip(axes[0], plan.workloads, strict=True):
            draw(panel, workload)
            case = plan.case(workload)
            panel.set(title=workload, yscale="log")
            panel.set_ylabel(f"1 − {case.metric}" if case.perfect else case.metric)
            panel.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.3g"))
            panel.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%.3g"))
            panel.tick_params(axis="both", which="both", labelsize=7)
            panel.spines[["top", "right"]].set_visible(False)
        if axes[0][0].get_legend_handles_labels()[1]:
            axes[0][0].legend(frameon=False, fontsize=8)
        figure.suptitle(title, fontsize=11)
        path = stem.with_name(f"{stem.name}-{name}.png")
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return path

    def by_scale(panel: Any, workload: str) -> None:
        case = plan.case(workload)
        for number, method in enumerate(plan.study.pictured):
            points = []
            for place, scale in enumerate(plan.scales):
                found = comparison(plan, results, workload, scale, method).values()
                good = [case.loss(r.score) for r in found if not r.failed and r.score is not None]
                if good:
                    deviation = statistics.stdev(good) if len(good) > 1 else 0.0
                    points.append((place + 0.06 * (number - 1.5), statistics.mean(good), deviation))
                if len(good) < len(found):  # at the top edge, outside any scale
                    panel.plot(
                        place + 0.06 * (number - 1.5),
                        0.98,
                        "x",
                        color=f"C{number}",
                        transform=panel.get_xaxis_transform(),
                        clip_on=False,
                    )
            if points:
                x, y, error = zip(*points, strict=True)
                panel.errorbar(x, y, error, fmt="o-", ms=4, lw=1.2, capsize=2, color=f"C{number}", label=method)
        panel.set(xlabel="S   (×: runs that failed)", xticks=range(len(plan.scales)), xticklabels=plan.scales)

    def by_tau(panel: Any, workload: str) -> None:
        case = plan.case(workload)
        for number, scale in enumerate(plan.scales):
            for first, r in enumerate(comparison(plan, results, workload, scale, "AdaScale").values()):
                panel.plot(
                    r.curve_tau,
                    [case.loss(score) for score in r.curve_score],
                    color=f"C{number}",
                    lw=0.9,
                    alpha=0.7,
                    label=f"S = {scale}" if first == 0 else None,
                )
        panel.set(xlabel="effective steps τ")

    def along(panel: Any, workload: str, divided_by: Callable[[int], float]) -> None:
        case = plan.case(workload)
        for number, method in enumerate(plan.study.pictured):
            for scale, style in ((1, "--"), (16, "-")):
                found = comparison(plan, results, workload, scale, method).values()
                runs = [r for r in found if not r.failed and len(r.curve_score) == len(r.curve_examples) > 0]
                if not runs or (scale == 1 and number):
                    continue
                points = min(len(r.curve_score) for r in runs)  # a mean over seeds, of as many evaluations as all have
                panel.plot(
                    [statistics.mean(r.curve_examples[i] for r in runs) / divided_by(scale) for i in range(points)],
                    [statistics.mean(case.loss(r.curve_score[i]) for r in runs) for i in range(points)],
                    style,
                    color="k" if scale == 1 else f"C{number}",
                    lw=1.1,
                    label="S = 1" if scale == 1 else method,
                )
        panel.set(xscale="log")

    def by_examples(panel: Any, workload: str) -> None:
        along(panel, workload, lambda scale: 1.0)
        panel.set(xlabel="examples")

    def by_steps(panel: Any, workload: str) -> None:
        along(panel, workload, lambda scale: scale * plan.case(workload).base_batch_size)
        panel.set(xlabel="optimizer steps")

    def grid(panel: Any, workload: str) -> None:
        if any(job not in results for job in plan.grid_jobs() if job.workload == workload):
            return
        lrs = list(dict.fromkeys(lr for lr, _ in plan.grid(workload)))
        for lr, shape in plan.grid(workload):
            x, y = (grid_score(plan, results, workload, scale, lr, shape) for scale in (1, plan.grid_scale))
            if math.isfinite(x) and math.isfinite(y):
                color = plt.colormaps["viridis"](lrs.index(lr) / len(lrs))
                marker = dict(zip(SHAPES, "os^", strict=True))[shape]
                label = shape if lr == lrs[0] else None
                panel.plot(x, y, marker, color=color, label=label, alpha=0.9)
        panel.set(xscale="log", xlabel="the same at S = 1   (dark to light: rising peak LR)")
        panel.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.3g"))
        panel.xaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%.3g"))
        low, high = panel.get_xlim()
        panel.plot([low, high], [low, high], color="0.6", lw=0.8, ls="--", zorder=0)

    schedules = count(plan.grid(plan.workloads[0]), "schedule")
    pictures = [
        panels("scale", "Test metric against scale, less is better: mean ± sd over seeds", by_scale),
        panels("curves", "Test metric against effective steps, AdaScale, each seed", by_tau),
    ]
    if plan.grid_scale == 1:
        return [
            *pictures,
            panels("steps", "Test metric against optimizer steps, S = 16, mean over seeds", by_steps),
            panels("examples", "Test metric against examples, S = 16, mean over seeds", by_examples),
        ]
    return [
        *pictures,
        panels("grid", f"{schedules} at S = {plan.grid_scale} against S = 1, AdaScale, search split", grid),
    ]


def write_page(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """The page and its plots beside it; the part by hand stays."""
    page.parent.mkdir(parents=True, exist_ok=True)
    kept = by_hand(page)
    pictures = plot(plan, results, page.with_suffix(""))
    mine = [
        r
        for job, r in results.items()
        if (job.workload in plan.workloads and job.optimizer == plan.optimizer)
        and (job.total_steps == plan.steps(job.workload) and job.lr in plan.case(job.workload).lrs)
    ]
    dates = sorted({r.date for r in mine})
    adamw = plan.optimizer == "adamw"
    parts = [
        "# Adam" if adamw else "# Does the schedule transfer?",
        "One schedule, tuned at the base batch, carried to larger batches by "
        + ("candidate rules for AdamW, on four" if adamw else "four methods, on three")
        + " workloads of different kinds. Validation metric on a test split that no choice was made on, mean ± standard "
        f"deviation over {count(plan.seeds, 'seed')}{' or fewer, where that is said' if adamw else ''}.",
        f"`{command}`, {' to '.join(dict.fromkeys([*dates[:1], *dates[-1:]]))}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {len(mine)} runs of one thread each, {sum(r.cpu_s for r in mine) / 60:.0f} "
        "minutes of CPU time in all.",
        "## What it says",
        kept,
    ]
    if adamw:
        for scale in plan.scales[1:]:
            parts += [
                f"## All candidates at S = {scale}",
                STANDING if scale == plan.scales[1] else "",
                standing(plan, results, scale),
            ]
    parts += [
        f"![metric against scale]({pictures[0].name})",
        "## AdaScale against the others",
        verdicts(plan, results),
        "## How",
        HOW_ADAMW if adamw else HOW,
    ]
    for workload in plan.workloads:
        case = plan.case(workload)
        best = best_schedule(plan, results, workload)
        tuned = "grid incomplete" if best is None else f"peak LR {best[0]:g}, shape {best[1]}"
        parts += [
            f"## {workload.capitalize()}",
            f"{case.about[0].upper()}{case.about[1:]}. B0 = {case.base_batch_size}, T = {plan.steps(workload):,}; tuned: "
            f"{tuned}. The best answer without a look at the input scores {case.chance():.3f}.",
            workload_table(plan, results, workload),
        ]
    parts += ["## The same curve over effective steps", f"![metric against effective steps]({pictures[1].name})"]
    if adamw:
        parts += [
            "## Metric against steps and against examples",
            f"![metric against optimizer steps]({pictures[2].name})",
            f"![metric against examples]({pictures[3].name})",
            f"## Betas (0.9, {OTHER_BETA2:g})",
            betas_table(plan, results),
            "## Forecasts",
            "Steps forecast from one base run (`record_recipe`, a probe every five steps), and steps taken.",
            forecasts(plan, results, runs),
        ]
    else:
        parts += [
            "## Robustness: do schedules keep their order?",
            f"Every schedule of the grid at S = 1 and, under AdaScale, at S = {plan.grid_scale}, on the search split, mean of "
            f"{count(plan.grid_seeds, 'seed')}; Spearman's ρ between the two. A schedule that failed ranks last. The last two "
            "columns are there for comparison: how far two seeds agree about the order at S = 1 is as much as one could hope "
            "for.",
            robustness(plan, results),
            f"![schedules at both scales]({pictures[2].name})",
        ]
    page.write_text("\n\n".join(part for part in parts if part) + "\n")


STANDING = """\
By how much each method is better (positive) or worse (negative) than S = 1 with the same seeds, ± the standard error of the mean
at S = 1; in how many optimizer steps, and of how many seeds where not of all. Bold: worse by more than that error, or failed."""

HOW = """\
- Every run is one process with one thread. The n = min(S, 8) gradient samples of a step are *simulated by accumulation*, not by
  workers: the arithmetic is that of n workers, the speed isn't, and nothing is said about it here.
- Momentum 0.9 throughout. The schedule is the best at S = 1 of a grid of 15, five peak LRs a factor of two apart times three
  shapes (cosine; steps to a tenth and a hundredth at a half and three quarters; warm-up over a tenth, then linear to zero), on a
  search split and with seeds of its own, two a schedule. Without that, linear scaling would be flattered: an LR too small at
  S = 1 leaves room to be multiplied.
- **AdaScale** runs until τ reaches T, with the defaults of `AdaScaleConfig`.
- **LSW**: LR × S after a linear warm-up over 5/90 of the run, T/S optimizer steps, as many examples as the base run.
- **LSW+**: the same, stretched to exactly the number of optimizer steps that AdaScale took with this seed.
- **unscaled**: the base LR, the schedule stretched to that same number of steps. There are two other readings of "no scaling":
  T/S steps, which saves examples and is far too short, and T steps, which saves no step and so is no way to scale. With
  AdaScale's own number everything but the LR is the same.
- LSW+ and unscaled so are given what no one knows beforehand: how long AdaScale will run.
- Training loss: the mean over the training split at the end, in eval mode. Mean gain: Σ r / steps, measured under every method,
  used only by AdaScale.
- A run has failed when its gradient wasn't finite for 50 steps in a row, or when it ends no more than 5 % of the way from
  chance to perfect, as after divergence to weights that answer the same to everything. Failed runs are counted, not averaged.
- Seeds set weights, the order of examples and augmentation; methods are compared seed by seed."""


HOW_ADAMW = """\
- `torch.optim.AdamW`, betas (0.9, 0.999), ε 1e-8, weight decay 0.1, decoupled. Models, data, splits and seeds are those of
  [transfer](transfer.md), and a small transformer on the same text. Every run is one process with one thread; the n = min(S, 8)
  gradient samples of a step are accumulation passes.
- The schedule is the best at S = 1 of a grid of ten, five peak LRs a factor of two apart times two shapes (cosine; warm-up over a
  tenth, then linear to zero), on a search split and with seeds of its own, two a schedule. There is no grid at S = 16.
- **AdaScale** is `rule="adascale"`, (r, r), as for SGD. **AdamScale** is `rule="adamscale"`, AdaptDL's. Names with "Adam's
  metric" take r from gradients divided by √v. The others change entries of the optimizer for each step
  (`benchmarks/adam_candidates.py`).
- **SDE** is the square-root rule of Malladi et al., NeurIPS 2022 (arXiv 2205.10287): a batch κ times as large has √κ the LR,
  1 − β′ = κ(1 − β) for both betas, and ε/√κ. With β₁ = 0.9 the rule has no meaning from κ = 10 on, where β₁′ would be negative:
  it is 0 there.
- **sqrt+** and **unscaled** have as many optimizer steps as AdaScale took with this seed, so they differ from it in the LR alone.
- Training loss: of the first 500 examples. Failed: as in [transfer](transfer.md)."""


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--optimizer", choices=list(STUDIES), default="sgd", help="(default: %(default)s)")
    parser.add_argument("--workloads", nargs="+", choices=list(ADAMW.cases), help="(default: all of the optimizer's)")
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 4, 16, 64], help="beside 1; at most 8 or 8·k")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="(default: runs/transfer.jsonl, or runs/transfer-adamw.jsonl)")
    parser.add_argument("--page", type=Path, help="write this Markdown page, and its plots beside it")
    parser.add_argument("--report-only", action="store_true", help="run nothing; the page of the runs in --json")
    parser.add_argument("--smoke", action="store_true", help="S = 1 and 4, one seed, two schedules, 60 steps")
    args = parser.parse_args(argv)
    if args.json is None:
        args.json = Path("runs", "transfer.jsonl" if args.optimizer == "sgd" else f"transfer-{args.optimizer}.jsonl")
    if args.seeds < 1 or args.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if any(s < 1 or s % min(s, 8) for s in args.scales):
        parser.error("--scales must be 1 to 8, or multiples of 8, so that all passes of a step are equal")
    study = STUDIES[args.optimizer]
    workloads = tuple(dict.fromkeys(args.workloads or study.cases))
    if not set(workloads) <= set(study.cases):
        parser.error(f"--optimizer {args.optimizer} has the workloads {', '.join(study.cases)}")
    if args.smoke:
        grid_scale = 4 if study.grid_scale > 1 else 1
        return args, Plan(workloads, (1, 4), (1,), grid_scale, (101,), 3, SHAPES[:1], 60, args.optimizer)
    return args, Plan(
        workloads,
        tuple(sorted({1, *args.scales})),
        tuple(range(1, args.seeds + 1)),
        grid_scale=study.grid_scale,
        shapes=study.shapes,
        optimizer=args.optimizer,
    )


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args, plan = parse(argv)
    began = time.monotonic()
    prepare_process()
    print(f"load before: {os.getloadavg()[0]:.2f}; torch {torch.__version__}; results: {args.json}", file=sys.stderr)
    results = read(args.json) if args.report_only else run_all(plan, args.json, args.jobs)
    if args.page is not None:
        write_page(plan, results, args.json, args.page, command_line(argv))
    for workload in plan.workloads:
        print(f"\n{workload}\n\n{workload_table(plan, results, workload)}")
    print(f"\n{verdicts(plan, results)}")
    if plan.grid_scale > 1:
        print(f"\n{robustness(plan, results)}")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
