"""Forecast against actual steps: 20 small workloads at S = 4, 16 and 64, the error of the forecast, and the time left.

    python benchmarks/studies/forecast.py --data runs/forecast    all of it: about an hour on one core
    python benchmarks/studies/forecast.py --only report           the tables of the kept runs
    python benchmarks/studies/forecast.py --smoke                 seconds: check that it runs

Records base runs with three seeds, as ``Search(repeats=2)`` would, and runs each scale with five other seeds, in this
process, with accumulation in place of workers. The runs are kept in files, and an interrupted study continues from them. Then it
forecasts from the base runs' noise alone, and prints every row. ``forecast_workloads.py`` has the cases.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forecast_workloads import Case, cases
from study import announce, kept

from ray_adascale import AdaScaleConfig, Recipe, Run, forecast_recipe, record_recipe, seed_everything
from ray_adascale.forecast.replay import Forecaster
from ray_adascale.recipe import Repeat
from ray_adascale.workload import build

sys.path.append(str(Path(__file__).parents[1]))
from bench import markdown

SCALES: tuple[int, ...] = (4, 16, 64)
PASSES = 4
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)  # of T: values of τ at which the time left is compared


# ---- runs ------------------------------------------------------------------------------------------------------------


def batch_of(base_batch_size: int, scale: int, seed: int = 0) -> AdaScaleConfig:
    """Return the settings of a run at S = ``scale`` in :data:`PASSES` passes a step."""
    return AdaScaleConfig(per_worker_batch_size=scale * base_batch_size // PASSES, accumulation=PASSES, seed=seed)


def base_run(case: Case, seed: int) -> Recipe:
    """Record a base run, with the noise that a search has."""
    sizes: dict[str, Any] = {"base_batch_size": case.base_batch_size, "total_steps": case.total_steps}
    return record_recipe(case.workload, case.hyperparameters, **sizes, seed=seed)


def joined(recipes: Sequence[Recipe]) -> Recipe:
    """Join base runs with several seeds to one recipe with repeats, as a search does."""
    winner, *others = recipes
    return replace(winner, repeats=[Repeat(seed=r.seed, score=r.score, noise=r.noise) for r in others])


def scaled_run(case: Case, recipe: Recipe, scale: int, seed: int) -> dict[str, Any]:
    """Return the gain of each optimizer step of a scaled run, and its score."""
    seed_everything(seed)
    config = batch_of(recipe.base_batch_size, scale, seed)
    built = build(case.workload, case.hyperparameters, config.with_recipe(recipe), recipe)
    scaled = Run.of(built, config, recipe=recipe)
    gains = []
    for batch in scaled:
        scaled.backward(built.loss_fn(scaled.model, batch))
        if scaled.step():
            gains.append(scaled.gain)
    return {"gains": gains, "score": scaled.summary()[built.metric]}


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


def scaled_runs(case: Case, data: Path, scale: int, seeds: Sequence[int], recipe: Recipe) -> list[dict[str, Any]]:
    """Return the scaled runs of a case; those without a file are run first."""
    folder = data / _slug(case.name)
    return [kept(folder / f"S{scale}-{seed}.json", partial(scaled_run, case, recipe, scale, seed)) for seed in seeds]


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name)


# ---- forecasts beside runs -------------------------------------------------------------------------------------------


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
        good = ["yes" if abs(self.off) <= 0.1 else "no", "yes" if self.held else "**no**"]
        return [
            *(self.case, f"{self.scale}", *steps, f"{min(self.steps)}–{max(self.steps)}", f"{self.off:+.0%}"),
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
    """An estimate of the steps left, beside the number of steps that followed and of those done.

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


def estimates_of(recipe: Recipe, scale: int, gains: Sequence[float]) -> dict[float, dict[str, Estimate]]:
    """Estimate the steps left at each share of T, in a run with these gains.

    Returns:
        By share, two estimates: "forecast", and "rough", (T − τ)/r̄.
    """
    total = recipe.total_steps
    forecast = Forecaster(recipe).at(scale).expected
    found: dict[float, dict[str, Estimate]] = {}
    tau = 0.0
    for step, gain in enumerate(gains, start=1):
        tau += gain
        for share in SHARES:
            if share not in found and tau >= share * total and step < len(gains):
                ways = {"forecast": forecast.steps_left(tau), "rough": (total - tau) * step / tau}
                found[share] = {way: Estimate(steps, len(gains) - step, step) for way, steps in ways.items()}
    return found


def row_of(case: Case, recipe: Recipe, scale: int, runs: Sequence[Mapping[str, Any]]) -> Row:
    """Return the forecast of a recipe beside the runs."""
    predicted = forecast_recipe(recipe, workers=[1], config=batch_of(recipe.base_batch_size, scale)).rows[0]
    return Row(
        case=case.name,
        scale=scale,
        forecast=predicted.steps,
        low=predicted.low,
        high=predicted.high,
        steps=[len(run["gains"]) for run in runs],
        base_score=f"{recipe.metric} {recipe.score:.3f}",
        score=statistics.mean(run["score"] for run in runs),
        left=[estimates_of(recipe, scale, run["gains"]) for run in runs],
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Return sentences on all rows together."""
    near = [row for row in rows if row.scale <= 16]
    worst = max(rows, key=lambda row: abs(row.off))
    runs = [(row, steps) for row in rows for steps in row.steps]
    return [
        f"Within 10 %: {_count(rows, lambda row: abs(row.off) <= 0.1)}; "
        f"up to S = 16 {_count(near, lambda row: abs(row.off) <= 0.1)}.",
        f"Furthest off: {worst.case} at S = {worst.scale}, {worst.off:+.0%}.",
        f"The interval holds the mean of the runs in {_count(rows, lambda row: row.held)} rows, and "
        f"{_count(runs, lambda run: run[0].low <= run[1] <= run[0].high)} single runs.",
    ]


def left_table(rows: Sequence[Row]) -> str:
    """Return a table of the shares of runs with the time left within 10 %: of the run's length, and of the rest alone."""
    estimates = [one for row in rows for one in row.left]
    names = {"forecast": "forecast", "rough": "(T − τ)/r̄"}
    lines = []
    for way, name in names.items():
        cells = []
        for share in SHARES:
            at = [one[share][way] for one in estimates if share in one]
            of_whole, of_rest = ([abs(getattr(x, kind)) <= 0.1 for x in at] for kind in ("of_whole", "of_rest"))
            cells.append(f"{statistics.mean(of_whole):.0%} ({statistics.mean(of_rest):.0%})" if at else "")
        lines.append([name, *cells])
    return markdown(["time left within 10 %", *(f"τ = {share:.0%} of T" for share in SHARES)], lines)


def _count(things: Iterable[Any], holds: Callable[[Any], bool]) -> str:
    """Return "3 of 4": the number of things for which the condition holds, of all."""
    found = [bool(holds(thing)) for thing in things]
    return f"{sum(found)} of {len(found)}"


def report(chosen: Mapping[str, Sequence[Case]], args: argparse.Namespace, scales: Sequence[int]) -> None:
    """Print the kept runs, a table for each group of cases."""
    for kind, of_kind in chosen.items():
        rows: list[Row] = []
        single: list[Row] = []
        for case in of_kind:
            folder = args.data / _slug(case.name)
            if not all((folder / f"base-{seed}.json").exists() for seed in args.base_seeds):
                continue
            recipes = base_runs(case, args.data, args.base_seeds)
            for scale in scales:
                seeds = [seed for seed in args.seeds if (folder / f"S{scale}-{seed}.json").exists()]
                if not seeds:
                    continue
                runs = scaled_runs(case, args.data, scale, seeds, recipes[0])
                rows.append(row_of(case, joined(recipes), scale, runs))
                single.extend(row_of(case, joined([one]), scale, runs) for one in recipes)
        if not rows:
            continue
        print(f"\n{kind}\n\n{markdown(HEADINGS, [row.cells() for row in rows])}")
        print("", *summary(rows), sep="\n")
        print(f"One seed alone: {summary(single)[0]} {summary(single)[2]}")
        print(f"\n{left_table(rows)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast against actual steps.")
    parser.add_argument("--smoke", action="store_true", help="one short case: only check that it runs")
    parser.add_argument("--data", type=Path, default=Path("runs/forecast"), help="kept runs (default: %(default)s)")
    parser.add_argument(
        "--only", choices=("base", "run", "report"), help="train (base runs only), or print; default: all"
    )
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="beginnings of the names of cases; default: all")
    parser.add_argument("--base-seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the base runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14], help="seeds of the scaled runs")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # at every larger scale the batch exceeds the noise scale
    torch.set_num_threads(1)
    chosen, scales = cases(), SCALES
    if args.smoke:
        chosen, scales = {"smoke": [replace(chosen["found on"][1], total_steps=200)]}, (4,)
        args.base_seeds, args.seeds = args.base_seeds[:1], args.seeds[:1]
    if args.cases:
        chosen = {kind: [c for c in found if c.name.startswith(tuple(args.cases))] for kind, found in chosen.items()}
    started = time.monotonic()
    announce(args.data)
    if args.only != "report":
        for case in (case for found in chosen.values() for case in found):
            base_runs(case, args.data, args.base_seeds)
    if args.only not in ("base", "report"):
        for seed in range(len(args.seeds)):  # every case gets its first seed before any gets its second
            for case in (case for found in chosen.values() for case in found):
                recipe = base_runs(case, args.data, args.base_seeds)[0]
                for scale in scales:
                    scaled_runs(case, args.data, scale, args.seeds[: seed + 1], recipe)
                print(f"{time.monotonic() - started:5.0f} s  {case.name}, seed {args.seeds[seed]}", file=sys.stderr)
    if args.only not in ("base", "run"):
        report(chosen, args, scales)


if __name__ == "__main__":
    main()
