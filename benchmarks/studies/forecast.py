"""Forecast against actual steps: 32 small workloads at S = 4, 16 and 64, the error of
the forecast, and the time left.

    python benchmarks/studies/forecast.py                 all that is missing: about an hour on one core if nothing is kept
    python benchmarks/studies/forecast.py --only report   the tables of the runs that are there
    python benchmarks/studies/forecast.py --smoke         seconds: check that it runs

Runs each scale with five seeds, in this process, with accumulation in place of workers;
these runs are kept in ``benchmarks/studies/kept/forecast.jsonl``. Records base runs
with three other seeds, with the noise as in the run that confirms a search's winner.
Then it forecasts from one base run, as after a search, and prints every row; and sums
up the forecasts from three, as after a search with repeats. An interrupted study
continues. ``forecast_workloads.py`` has the cases.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from forecast_workloads import Case, cases
from study import announce, prepare_process, read_runs, run_all

from ray_adascale import (
    AdaScaleConfig,
    Recipe,
    Run,
    forecast_recipe,
    record_recipe,
    seed_everything,
)
from ray_adascale.forecast.replay import Forecaster
from ray_adascale.optim.rules import ScalingRule
from ray_adascale.recipe import Repeat
from ray_adascale.workload import build

sys.path.append(str(Path(__file__).parents[1]))
from bench import markdown

SCALES: tuple[int, ...] = (4, 16, 64)
PASSES = 4
# of T: values of τ at which the time left is compared
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
KEPT = "benchmarks/studies/kept/forecast.jsonl"
KEPT_BASES = "benchmarks/studies/kept/forecast_bases.jsonl"


# ---- runs ----------------------------------------------------------------------------


def batch_of(base_batch_size: int, scale: int, seed: int = 0) -> AdaScaleConfig:
    """Return the settings of a run at S = ``scale`` in :data:`PASSES` passes a step."""
    return AdaScaleConfig(
        per_worker_batch_size=scale * base_batch_size // PASSES,
        accumulation=PASSES,
        seed=seed,
    )


def base_run(case: Case, seed: int) -> Recipe:
    """Record a base run, with the noise that a search has."""
    sizes: dict[str, Any] = {
        "base_batch_size": case.base_batch_size,
        "total_steps": case.total_steps,
    }
    return record_recipe(case.workload, case.hyperparameters, **sizes, seed=seed)


def joined(recipes: Sequence[Recipe]) -> Recipe:
    """Join base runs with several seeds to one recipe with repeats, as a search
    does.
    """
    winner, *others = recipes
    return replace(
        winner,
        repeats=[Repeat(seed=r.seed, score=r.score, noise=r.noise) for r in others],
    )


@dataclass(frozen=True)
class Job:
    """A scaled run: the name of its case, S and its seed."""

    case: str
    scale: int
    seed: int


@dataclass(frozen=True)
class Scaled:
    """The outcome of a scaled run.

    Attributes:
        steps: Optimizer steps.
        score: The metric at the end.
        passed: Step and τ at which τ passes each of :data:`SHARES` of T, but not at the
            last step.
    """

    steps: int
    score: float
    passed: list[list[float]]


def scaled_run(
    of: Mapping[str, Case],
    data: Path,
    base_seed: int,
    rule: str | ScalingRule,
    job: Job,
) -> Scaled:
    """Run a case at a larger scale."""
    case = of[job.case]
    (recipe,) = base_runs(case, data, [base_seed])
    seed_everything(job.seed)
    config = replace(batch_of(recipe.base_batch_size, job.scale, job.seed), rule=rule)
    built = build(
        case.workload, case.hyperparameters, config.with_recipe(recipe), recipe
    )
    scaled = Run.of(built, config, recipe=recipe)
    gains = []
    for batch in scaled:
        scaled.backward(built.loss_fn(scaled.model, batch))
        if scaled.step():
            gains.append(scaled.gain)
    return Scaled(
        len(gains), scaled.summary()[built.metric], passed(gains, recipe.total_steps)
    )


def passed(gains: Sequence[float], total_steps: float) -> list[list[float]]:
    """Return the steps, and τ after them, at which τ passes each of :data:`SHARES`,
    but not at the last step.
    """
    taus = list(itertools.accumulate(gains))[:-1]
    found = []
    for share in SHARES:
        step = bisect.bisect_left(taus, share * total_steps)
        if step < len(taus):
            found.append([step + 1, taus[step]])
    return found


def base_runs(case: Case, data: Path, seeds: Sequence[int]) -> list[Recipe]:
    """Return the base runs of a case; those without a file are recorded first."""
    recipes = []
    for seed in seeds:
        path = data / _slug(case.name) / f"base-{seed}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            base_run(case, seed).save(path)
        recipes.append(Recipe.load(path))
    return recipes


def base_scores(path: Path) -> dict[str, dict[int, float]]:
    """Return the kept scores of base runs, by case and seed."""
    found: dict[str, dict[int, float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["case"], {})[row["seed"]] = row["score"]
    return found


def keep_base_scores(
    path: Path, chosen: Iterable[Case], data: Path, seeds: Sequence[int]
) -> None:
    """Keep the scores of the cases' base runs, beside those that are kept already."""
    found = base_scores(path) if path.exists() else {}
    for case in chosen:
        for seed, recipe in zip(seeds, base_runs(case, data, seeds), strict=True):
            found.setdefault(case.name, {})[seed] = recipe.score
    lines = [
        json.dumps({"case": name, "seed": seed, "score": score}) + "\n"
        for name, scores in found.items()
        for seed, score in scores.items()
    ]
    path.write_text("".join(lines))


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name)


# ---- forecasts beside runs -----------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A case at one scale: forecast, interval, and the runs.

    Attributes:
        case: Name of the case.
        scale: S.
        forecast: Optimizer steps of the forecast.
        low: Lower end of its interval.
        high: Upper end of its interval.
        steps: Optimizer steps of each run.
        base_score: Metric and score of the base run.
        score: Mean score of the runs.
        left: The estimates of the time left in each run, see :func:`estimates_of`.
    """

    case: str
    scale: int
    forecast: int
    low: int
    high: int
    steps: list[int]
    base_score: str
    score: float
    left: list[dict[float, dict[str, Estimate]]]

    @property
    def actual(self) -> float:
        """Mean optimizer steps of the runs."""
        return statistics.mean(self.steps)

    @property
    def off(self) -> float:
        """Relative error of the forecast."""
        return self.forecast / self.actual - 1

    @property
    def held(self) -> bool:
        """Whether the interval contains the mean of the runs."""
        return self.low <= self.actual <= self.high

    def cells(self) -> list[str]:
        """Return the row's cells under :data:`HEADINGS`."""
        steps = [f"{self.forecast}", f"{self.low}–{self.high}", f"{self.actual:.0f}"]
        good = [
            "yes" if abs(self.off) <= 0.1 else "no",
            "yes" if self.held else "**no**",
        ]
        return [
            *(
                self.case,
                f"{self.scale}",
                *steps,
                f"{min(self.steps)}–{max(self.steps)}",
                f"{self.off:+.0%}",
            ),
            *(*good, self.base_score, f"{self.score:.3f}"),
        ]


HEADINGS = [
    "workload",
    "S",
    "forecast",
    "interval",
    "actual",
    "each run",
    "off",
    "≤ 10 %",
    "in interval",
    "base run",
    "scaled",
]


@dataclass(frozen=True)
class Estimate:
    """An estimate of the steps left, beside the number of steps that followed and of
    those done.

    Attributes:
        estimated: Estimate of the steps left.
        left: Steps that followed.
        done: Steps done.
    """

    estimated: float
    left: int
    done: int

    @property
    def of_rest(self) -> float:
        """Error relative to the steps that followed."""
        return self.estimated / self.left - 1

    @property
    def of_whole(self) -> float:
        """Error relative to all steps of the run."""
        return (self.done + self.estimated) / (self.done + self.left) - 1


def estimates_of(
    recipe: Recipe, scale: int, run: Scaled, rule: str
) -> dict[float, dict[str, Estimate]]:
    """Estimate the steps left at each share of T that the run has passed.

    Returns:
        By share, two estimates: "forecast", and "rough", (T − τ)/r̄.
    """
    forecast = Forecaster(recipe, rule=rule).at(scale).expected
    found: dict[float, dict[str, Estimate]] = {}
    for share, (step, tau) in zip(SHARES, run.passed, strict=False):
        ways = {
            "forecast": forecast.steps_left(tau),
            "rough": (recipe.total_steps - tau) * step / tau,
        }
        found[share] = {
            way: Estimate(steps, run.steps - int(step), int(step))
            for way, steps in ways.items()
        }
    return found


def row_of(
    case: Case,
    recipe: Recipe,
    scale: int,
    runs: Sequence[Scaled],
    rule: str = "adascale",
) -> Row:
    """Return the forecast of a recipe beside the runs with a rule."""
    config = replace(batch_of(recipe.base_batch_size, scale), rule=rule)
    predicted = forecast_recipe(recipe, workers=[1], config=config).rows[0]
    return Row(
        case=case.name,
        scale=scale,
        forecast=predicted.steps,
        low=predicted.low,
        high=predicted.high,
        steps=[run.steps for run in runs],
        base_score=f"{recipe.metric} {recipe.score:.3f}",
        score=statistics.mean(run.score for run in runs),
        left=[estimates_of(recipe, scale, run, rule) for run in runs],
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Return sentences on all rows together."""
    near = [row for row in rows if row.scale <= 16]
    worst = max(rows, key=lambda row: abs(row.off))
    runs = [(row, steps) for row in rows for steps in row.steps]
    return [
        f"Within 10 %: {_count(rows, lambda row: abs(row.off) <= 0.1)}; up to S = 16 "
        f"{_count(near, lambda row: abs(row.off) <= 0.1)}.",
        f"Furthest off: {worst.case} at S = {worst.scale}, {worst.off:+.0%}.",
        "The interval holds the mean of the runs in "
        f"{_count(rows, lambda row: row.held)} rows, and "
        f"{_count(runs, lambda run: run[0].low <= run[1] <= run[0].high)} single runs.",
    ]


def left_table(rows: Sequence[Row]) -> str:
    """Return a table of the shares of runs with the time left within 10 %: of the
    run's length, and of the rest alone.
    """
    estimates = [one for row in rows for one in row.left]
    names = {"forecast": "forecast", "rough": "(T − τ)/r̄"}
    lines = []
    for way, name in names.items():
        cells = []
        for share in SHARES:
            at = [one[share][way] for one in estimates if share in one]
            of_whole, of_rest = (
                [abs(getattr(x, kind)) <= 0.1 for x in at]
                for kind in ("of_whole", "of_rest")
            )
            cells.append(
                f"{statistics.mean(of_whole):.0%} ({statistics.mean(of_rest):.0%})"
                if at
                else ""
            )
        lines.append([name, *cells])
    return markdown(
        ["time left within 10 %", *(f"τ = {share:.0%} of T" for share in SHARES)], lines
    )


def _count(things: Iterable[Any], holds: Callable[[Any], bool]) -> str:
    """Return "3 of 4": the number of things for which the condition holds, of all."""
    found = [bool(holds(thing)) for thing in things]
    return f"{sum(found)} of {len(found)}"


def report(
    chosen: Mapping[str, Sequence[Case]],
    args: argparse.Namespace,
    scales: Sequence[int],
    found: Mapping[Job, Scaled],
) -> None:
    """Print the runs that are there, a table for each group of cases."""
    for kind, of_kind in chosen.items():
        rows: dict[str, list[Row]] = {}
        for case in of_kind:
            for scale in scales:
                runs = [
                    found[job]
                    for seed in args.seeds
                    if (job := Job(case.name, scale, seed)) in found
                ]
                if not runs:
                    continue
                recipes = base_runs(case, args.data, args.base_seeds)
                for seed, recipe in zip(args.base_seeds, recipes, strict=True):
                    rows.setdefault(f"Seed {seed}", []).append(
                        row_of(case, recipe, scale, runs, args.rule)
                    )
                rows.setdefault("All seeds together", []).append(
                    row_of(case, joined(recipes), scale, runs, args.rule)
                )
        if not rows:
            continue
        first = rows[f"Seed {args.base_seeds[0]}"]
        print(f"\n{kind}\n\n{markdown(HEADINGS, [row.cells() for row in first])}\n")
        for name, of_name in rows.items():
            print(f"{name}: {' '.join(summary(of_name))}")
        print(f"\n{left_table(first)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast against actual steps.")
    parser.add_argument(
        "--smoke", action="store_true", help="one short case: only check that it runs"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path(KEPT),
        help="scaled runs (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("runs/forecast"),
        help="base runs (default: %(default)s)",
    )
    parser.add_argument(
        "--only", choices=("run", "report"), help="train, or print; default: both"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="NAME",
        help="beginnings of the names of cases; default: all",
    )
    parser.add_argument(
        "--base-seeds",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        help="seeds of the base runs",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[10, 11, 12, 13, 14],
        help="seeds of the scaled runs",
    )
    parser.add_argument(
        "--rule",
        default="adascale",
        help="of the scaled runs (default: %(default)s); with another --runs names "
        "their file",
    )
    args = parser.parse_args()
    # at every larger scale the batch exceeds the noise scale
    warnings.simplefilter("ignore")
    prepare_process()
    chosen, scales = cases(), SCALES
    if args.smoke:
        chosen, scales = (
            {"smoke": [replace(chosen["found on"][1], total_steps=200)]},
            (4,),
        )
        args.base_seeds, args.seeds, args.runs = (
            args.base_seeds[:1],
            args.seeds[:1],
            args.data / "scaled.jsonl",
        )
    if args.cases:
        chosen = {
            kind: [c for c in found if c.name.startswith(tuple(args.cases))]
            for kind, found in chosen.items()
        }
    announce(args.data)
    of = {case.name: case for found in chosen.values() for case in found}
    if args.only != "report":
        # Every case gets its first seed before any gets its second.
        rounds = [
            (
                f"seed {seed}",
                [Job(name, scale, seed) for name in of for scale in scales],
            )
            for seed in args.seeds
        ]
        do = partial(scaled_run, of, args.data, args.base_seeds[0], args.rule)
        run_all(
            args.runs,
            Job,
            Scaled,
            do,
            lambda _: rounds,
            lambda job, run: f"{job}: {run.steps} steps",
        )
        if not args.smoke:
            keep_base_scores(Path(KEPT_BASES), of.values(), args.data, args.base_seeds)
    if args.only != "run":
        report(chosen, args, scales, read_runs(args.runs, Job, Scaled))


if __name__ == "__main__":
    main()
