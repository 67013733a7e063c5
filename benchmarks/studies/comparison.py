"""The experiment of ``transfer.py`` and others: one schedule, tuned at S = 1, run at
larger S by several methods.

First every schedule of a grid runs at S = 1, scored on the search split; the best one
is the schedule to transfer. Then that schedule runs with other seeds, scored on a test
split on which no choice was made. At S = 1 all methods are the plain optimizer, so it
runs once. A run is one single-threaded process; its n = min(S, 8) gradient samples a
step are accumulation passes, not workers. Every result is kept in a file, and an
interrupted study continues from it.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import study
import torch
from real_data import needs_data
from study import Case, announce, check_scales, prepare_process, read_runs
from torch import nn
from torch.utils.data import DataLoader, Subset

from ray_adascale import Recipe, Run, Workload, record_recipe, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import command_line

MOST_PASSES = 8
BASE = "AdaScale"
"""Name of the method of runs at S = 1, where all methods are the plain optimizer."""
MEMORY = "m^√r"
"""Name of the method that is the default rule for SGD with momentum."""


# ---- methods and jobs ----------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way to carry a schedule to a larger batch.

    Attributes:
        rule: Makes the scaling rule, given the number of optimizer steps or None.
        given_steps: Whether it is given the number of steps of another method's run, see
            :attr:`Comparison.paced_by`.
        about: Its LR factor and clock, for the page.
        label: Its name on the page; empty: that of the comparison.
    """

    rule: Callable[[int | None], Any]
    given_steps: bool = False
    about: str = ""
    label: str = ""


@dataclass(frozen=True)
class Job:
    """One run. The fields identify it."""

    workload: str
    method: str
    scale: int
    seed: int
    lr: float
    shape: str
    total_steps: int
    split: str
    steps: int | None = None  # optimizer steps, for a method that is given AdaScale's
    optimizer: str = "sgd"
    beta2: float = 0.999


@dataclass(frozen=True)
class Result:
    """Outcome of a run. ``score`` and ``train_loss`` are None if they are not
    finite.
    """

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


def as_built(built: Workload, job: Job) -> Workload:
    """Return the workload with the SGD that it builds."""
    return built


@dataclass(frozen=True)
class Comparison:
    """The methods that are compared with one optimizer, and on what.

    Attributes:
        optimizer: Name of the optimizer in :class:`Job`.
        cases: Workloads, by name.
        methods: By name.
        against: Names of the methods that ``own`` is compared with, beside S = 1.
        pictured: Names of the methods in the picture of the metric against scale.
        stages: Scales and numbers of seeds, in the order in which they run.
        shapes: Shapes of the grid's schedules.
        grid_scale: The larger scale at which the grid runs; 1 for none.
        evaluations: Number of evaluations in a run.
        loss_examples: Number of examples in the final training loss; None for all.
        with_optimizer: Puts the optimizer into a built workload.
        own: Name of the method that is compared with the others.
        paced_by: Name of the method whose number of steps the methods with given steps
            have; None: that of ``own``.
        most_passes: Most gradient samples of a step.
    """

    optimizer: str
    cases: dict[str, Case]
    methods: dict[str, Method]
    against: tuple[str, ...]
    pictured: tuple[str, ...]
    stages: tuple[tuple[int, int], ...]
    shapes: tuple[str, ...]
    grid_scale: int
    evaluations: int
    loss_examples: int | None = None
    with_optimizer: Callable[[Workload, Job], Workload] = as_built
    own: str = "AdaScale"
    paced_by: str | None = None
    most_passes: int = MOST_PASSES

    def label(self, name: str) -> str:
        """Return the name of a method on the page."""
        method = self.methods.get(name)
        return method.label if method is not None and method.label else name


# ---- one run -------------------------------------------------------------------------


def train(comparison: Comparison, job: Job) -> Result:
    """Run a job in this process. Divergence is a result, not an error.

    Raises:
        ValueError: At S > 1 the job's method is none of the comparison's.
    """
    began = time.process_time()
    case = comparison.cases[job.workload]
    seed_everything(job.seed)
    config = {
        "lr": job.lr,
        "schedule": job.shape,
        "total_steps": job.total_steps,
        "split": job.split,
    }
    built = comparison.with_optimizer(case.workload(config), job)
    if job.method in comparison.methods:
        rule = comparison.methods[job.method].rule(job.steps)
    elif job.scale == 1:  # where all methods are alike
        rule = "adascale"
    else:
        raise ValueError(
            f"Unknown method {job.method!r} at S = {job.scale}. Must be one of: "
            f"{', '.join(comparison.methods)}."
        )
    curve: list[tuple[float, int, float]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert built.evaluate is not None
        scores = dict(built.evaluate(model))
        curve.append((run.effective_steps, run.source.position, scores[built.metric]))
        return scores

    settings = case.config(
        job.scale,
        comparison.most_passes,
        job.total_steps,
        rule=rule,
        seed=job.seed,
        evaluate_every=job.total_steps / comparison.evaluations,
    )
    run = Run.of(replace(built, evaluate=evaluate), settings)
    score = train_loss = math.nan
    try:
        for batch in run:
            run.backward(built.loss_fn(run.model, batch))
            run.step()
        score, train_loss = curve[-1][2], final_loss(built, comparison.loss_examples)
    except FloatingPointError:  # no finite gradient for 50 steps in a row
        pass
    steps = run.summary().get("optimizer_steps", 0)
    return Result(
        score=score if math.isfinite(score) else None,
        train_loss=train_loss if math.isfinite(train_loss) else None,
        optimizer_steps=steps,
        examples=run.source.position,
        mean_gain=run.progress / max(1, steps),
        curve_tau=[tau for tau, _, _ in curve],
        curve_score=[value for _, _, value in curve],
        # Divergence often ends at finite weights that give the same answer to every
        # input.
        failed=not case.learned(score) > 0.05,
        cpu_s=time.process_time() - began,
        date=datetime.date.today().isoformat(),
        curve_examples=[examples for _, examples, _ in curve],
    )


def final_loss(built: Workload, examples: int | None) -> float:
    """Return the mean loss over the training split or its first examples, in eval
    mode and thus without augmentation.
    """
    built.model.eval()
    total = 0.0
    dataset: Any = built.train_dataset
    if examples is not None:
        dataset = Subset(dataset, range(min(examples, len(dataset))))
    with torch.no_grad():
        for batch in DataLoader(dataset, batch_size=500):
            total += built.loss_fn(built.model, batch).item() * len(batch[0])
    return total / len(dataset)


# ---- all runs ------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison. ``total_steps`` replaces each workload's T, for the
    smoke test.
    """

    comparison: Comparison
    workloads: tuple[str, ...]
    scales: tuple[int, ...]
    seeds: tuple[int, ...]
    grid_scale: int
    shapes: tuple[str, ...]
    grid_seeds: tuple[int, ...] = (101, 102)
    every: int = 1  # step through the grid's LRs
    total_steps: int | None = None

    def case(self, workload: str) -> Case:
        """Return the case of a workload."""
        return self.comparison.cases[workload]

    def steps(self, workload: str) -> int:
        """Return T."""
        return self.total_steps or self.case(workload).total_steps

    def stages(self) -> list[tuple[int, int]]:
        """Return the comparison's stages, limited to this plan's scales and seeds."""
        stages = [
            (scale, min(n, len(self.seeds)))
            for scale, n in self.comparison.stages
            if scale in self.scales
        ]
        return stages + [(scale, len(self.seeds)) for scale in self.scales]

    def grid(self, workload: str) -> list[tuple[float, str]]:
        """Return the schedules: peak LR and shape."""
        return [
            (lr, shape)
            for lr in self.case(workload).lrs[:: self.every]
            for shape in self.shapes
        ]

    def grid_job(
        self, workload: str, scale: int, seed: int, lr: float, shape: str
    ) -> Job:
        """Return AdaScale's run with a schedule of the grid."""
        optimizer = self.comparison.optimizer
        return Job(
            workload,
            BASE,
            scale,
            seed,
            lr,
            shape,
            self.steps(workload),
            "search",
            optimizer=optimizer,
        )

    def grid_jobs(self) -> list[Job]:
        """Return all runs of the grid; those at S = 1, on which the choice of a
        schedule depends, come first.
        """
        return [
            self.grid_job(workload, scale, seed, lr, shape)
            for scale in dict.fromkeys((1, self.grid_scale))
            for workload in self.workloads
            for seed in self.grid_seeds
            for lr, shape in self.grid(workload)
        ]

    def job(
        self, workload: str, method: str, scale: int, seed: int, best: tuple[float, str]
    ) -> Job:
        """Return a run of the comparison, for a method that is given no number of
        steps.
        """
        optimizer = self.comparison.optimizer
        return Job(
            workload,
            method,
            scale,
            seed,
            *best,
            self.steps(workload),
            "test",
            None,
            optimizer,
        )


def grid_score(
    plan: Plan, results: Results, workload: str, scale: int, lr: float, shape: str
) -> float:
    """Return the mean loss over the grid's seeds, of the score; infinite if a run
    failed.
    """
    found = [
        results[plan.grid_job(workload, scale, seed, lr, shape)]
        for seed in plan.grid_seeds
    ]
    if any(r.failed or r.score is None for r in found):
        return math.inf
    return statistics.mean(
        plan.case(workload).loss(r.score) for r in found if r.score is not None
    )


def best_schedule(
    plan: Plan, results: Results, workload: str
) -> tuple[float, str] | None:
    """Return the grid's best schedule at S = 1, or None while the grid is
    incomplete. The only one of a grid needs no runs.
    """
    cells = plan.grid(workload)
    if len(cells) == 1:
        return cells[0]
    if any(
        job not in results
        for job in plan.grid_jobs()
        if job.workload == workload and job.scale == 1
    ):
        return None
    return min(
        cells,
        key=lambda cell: grid_score(plan, results, workload, 1, *cell),
    )


def stretched(
    plan: Plan,
    results: Results,
    workload: str,
    scale: int,
    seed: int,
    best: tuple[float, str],
) -> list[Job]:
    """Return the runs of methods that are given the steps of another one; none if its
    run is missing or failed.
    """
    pace = plan.comparison.paced_by or plan.comparison.own
    paced = results.get(plan.job(workload, pace, scale, seed, best))
    if paced is None or paced.failed:
        return []
    given = [
        name for name, method in plan.comparison.methods.items() if method.given_steps
    ]
    return [
        replace(plan.job(workload, m, scale, seed, best), steps=paced.optimizer_steps)
        for m in given
    ]


def seeds_of(
    plan: Plan, results: Results, workload: str, scale: int, method: str
) -> dict[int, Result]:
    """Return the results of a method at a scale by seed, as far as they exist. At S
    = 1 all methods are one.
    """
    best = best_schedule(plan, results, workload)
    if best is None:
        return {}
    found: dict[int, Result] = {}
    for seed in plan.seeds:
        if scale == 1:
            jobs = [plan.job(workload, BASE, 1, seed, best)]
        elif not plan.comparison.methods[method].given_steps:
            jobs = [plan.job(workload, method, scale, seed, best)]
        else:
            jobs = [
                job
                for job in stretched(plan, results, workload, scale, seed, best)
                if job.method == method
            ]
        found.update((seed, results[job]) for job in jobs if job in results)
    return found


def stage_jobs(
    plan: Plan,
    results: Results,
    scale: int,
    seeds: int,
    methods: Iterable[str],
    *,
    given_steps: bool,
) -> list[Job]:
    """Return a stage's jobs, either of the methods that are given their number of
    steps or of the others.
    """
    jobs = []
    for workload in plan.workloads:
        best = best_schedule(plan, results, workload)
        if best is None:
            continue
        for seed in plan.seeds[:seeds]:
            given = {
                job.method: job
                for job in stretched(plan, results, workload, scale, seed, best)
            }
            if scale == 1:
                jobs += [] if given_steps else [plan.job(workload, BASE, 1, seed, best)]
                continue
            for name in methods:
                if plan.comparison.methods[name].given_steps != given_steps:
                    continue
                if not given_steps:
                    jobs.append(plan.job(workload, name, scale, seed, best))
                elif name in given:
                    jobs.append(given[name])
    return jobs


Rounds = Iterator[tuple[str, list[Job]]]
"""Names and jobs. Each list is made when the jobs before it are done, because it
depends on their results.
"""


def stage(plan: Plan, results: Results, scale: int, seeds: int) -> Rounds:
    """Yield the two rounds of a stage: the methods that are given a number of steps
    need AdaScale's runs first.
    """
    methods = plan.comparison.methods
    yield (
        f"S = {scale}",
        stage_jobs(plan, results, scale, seeds, methods, given_steps=False),
    )
    yield (
        f"S = {scale}, given steps",
        stage_jobs(plan, results, scale, seeds, methods, given_steps=True),
    )


def rounds(plan: Plan, path: Path, results: Results) -> Rounds:
    """Yield the grid and then every stage.

    Args:
        plan: The plan.
        path: The file of runs.
        results: The results, which grow meanwhile.
    """
    yield "grid", plan.grid_jobs()
    for scale, seeds in plan.stages():
        yield from stage(plan, results, scale, seeds)


def rounds_and_recipes(plan: Plan, path: Path, results: Results) -> Rounds:
    """Yield the rounds of :func:`rounds`; record the base runs after the grid, which
    chooses their LR.
    """
    for number, each in enumerate(rounds(plan, path, results)):
        if number == 1:
            record_recipes(plan, results, path)
        yield each


def recipe_path(path: Path, workload: str) -> Path:
    """Return the path of a workload's recipe beside the file of runs."""
    return path.with_name(f"{path.stem}-{workload}-recipe.json")


def recipes(plan: Plan, path: Path) -> Iterator[tuple[str, Recipe]]:
    """Yield each workload of the plan that has a recipe, with the recipe.

    Args:
        plan: The plan.
        path: The file of runs.
    """
    for workload in plan.workloads:
        if recipe_path(path, workload).exists():
            yield workload, Recipe.load(recipe_path(path, workload))


def record_recipes(plan: Plan, results: Results, path: Path) -> None:
    """Record a base run of each workload with probes, unless its recipe exists.

    Args:
        plan: The plan.
        results: The results of the grid.
        path: The file of runs.
    """
    for workload in plan.workloads:
        best = best_schedule(plan, results, workload)
        if best is None or recipe_path(path, workload).exists():
            continue
        case, job = (
            plan.case(workload),
            plan.job(workload, BASE, 1, plan.seeds[0], best),
        )

        def workload_of(
            config: dict[str, Any], case: Case = case, job: Job = job
        ) -> Workload:
            return plan.comparison.with_optimizer(case.workload(config), job)

        record_recipe(
            workload_of,
            {"lr": job.lr, "schedule": job.shape, "split": job.split},
            base_batch_size=case.base_batch_size,
            total_steps=job.total_steps,
            seed=job.seed,
            probe_every=5,
        ).save(recipe_path(path, workload))


def read(path: Path) -> Results:
    """Return the results in a file of runs."""
    return read_runs(path, Job, Result)


def run_all(
    path: Path,
    do: Callable[[Job], Result],
    rounds_of: Callable[[Results], Rounds],
    processes: int = 1,
) -> Results:
    """Run every job that the file lacks, and return all results; see
    :func:`study.run_all`.
    """

    def say(job: Job, result: Result) -> str:
        score = "failed" if result.failed else f"{result.score:.4f}"
        return (
            f"{job.workload}, {job.method}, S = {job.scale}, seed {job.seed}, lr "
            f"{job.lr:g} {job.shape}: {score} in {result.optimizer_steps} steps, "
            f"{result.cpu_s:.1f} s"
        )

    return study.run_all(path, Job, Result, do, rounds_of, say, processes)


# ---- command line --------------------------------------------------------------------


def parse(
    argv: Sequence[str] | None,
    doc: str | None,
    comparison: Comparison,
    runs: str,
    page: Path,
    *,
    seeds: int = 5,
    scales: Sequence[int] = (1, 4, 16, 64),
) -> tuple[argparse.Namespace, Plan]:
    """Read the command line of a comparison, or end with an error.

    Args:
        argv: Its words; None: those of the process.
        doc: The script's docstring.
        comparison: The comparison.
        runs: Default path of the kept results.
        page: Path of the page in the repository.
        seeds: Default number of seeds.
        scales: Default scales.
    """
    smoke = "S = 1 and 4, one seed, two schedules, 60 steps"
    parser = study.parser(
        doc, seeds=seeds, runs=runs, smoke=smoke, workloads=comparison.cases, page=page
    )
    parser.add_argument(
        "--scales",
        type=int,
        nargs="+",
        default=list(scales),
        help="beside 1; 1 to 8 or 8·k",
    )
    args = study.parsed(parser, argv)
    check_scales(parser, args.scales, comparison.most_passes)
    if args.smoke:
        grid_scale = 4 if comparison.grid_scale > 1 else 1
        shapes = comparison.shapes[:1]
        plan = Plan(
            comparison,
            args.workloads,
            (1, 4),
            (1,),
            grid_scale,
            shapes,
            grid_seeds=(101,),
            every=3,
            total_steps=60,
        )
        return args, plan
    chosen, numbers = tuple(sorted({1, *args.scales})), tuple(range(1, args.seeds + 1))
    return args, Plan(
        comparison,
        args.workloads,
        chosen,
        numbers,
        comparison.grid_scale,
        comparison.shapes,
    )


@needs_data
def conduct(
    argv: Sequence[str] | None,
    script: str,
    parse: Callable[[Sequence[str]], tuple[argparse.Namespace, Plan]],
    do: Callable[[Job], Result],
    rounds: Callable[[Plan, Path, Results], Rounds],
    write: Callable[[Plan, Results, Path, Path, str], None],
    show: Callable[[Plan, Results], None],
) -> int:
    """Run a study as its command line says, and return the exit status.

    Args:
        argv: Words of the command line; None: those of the process.
        script: Path of the study's script.
        parse: Reads the command line.
        do: Runs a job; a function of a module, so that other processes can import it.
        rounds: Yields the rounds, given the plan, the file of runs and the results.
        write: Writes the page, given the plan, the results, the file of runs, the page
            and the command.
        show: Prints the tables.
    """
    argv = sys.argv[1:] if argv is None else argv
    args, plan = parse(argv)
    began = time.monotonic()
    prepare_process()
    announce(args.json)
    path: Path = args.json
    results = (
        read(path)
        if args.report_only
        else run_all(path, do, partial(rounds, plan, path), args.jobs)
    )
    if args.page is not None:
        write(
            plan,
            results,
            path,
            args.page,
            command_line(argv, f"benchmarks/studies/{Path(script).name}"),
        )
    show(plan, results)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


def of_plan(plan: Plan, results: Results) -> Sequence[Result]:
    """Return the results of the plan's workloads, lengths and LRs, for any method,
    scale and seed.
    """
    return [
        r
        for job, r in results.items()
        if (
            job.workload in plan.workloads
            and job.method in (BASE, *plan.comparison.methods)
        )
        and job.optimizer == plan.comparison.optimizer
        and (
            job.total_steps == plan.steps(job.workload)
            and job.lr in plan.case(job.workload).lrs
        )
    ]
