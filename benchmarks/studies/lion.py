"""The experiment of ``adam_betas.py`` with Lion: four small workloads, five seeds.

    python benchmarks/studies/lion.py --page                       all of it, or what is missing
    python benchmarks/studies/lion.py --smoke                      check that it runs
    python benchmarks/studies/lion.py --report-only --page p.md    write the page of the kept runs

Lion moves each weight by ± its LR, so ℓ1 is the dual norm of its steps: a gain in this norm is one of the methods. The kept
results are in ``benchmarks/studies/kept``. One base run of each workload is recorded with noise probes, and the page sets
forecasts from it beside the steps that were taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import comparison
import study
from adam_betas import SMALL
from adam_candidates import SignGain
from comparison import (
    Comparison,
    Job,
    Method,
    Plan,
    Result,
    Results,
    conduct,
    rounds_and_recipes,
)
from comparison_page import (
    STANDING,
    forecast_table,
    picture_by_scale,
    print_tables,
    provenance,
    standing,
    verdicts,
    workload_sections,
    write_page,
)
from lion_pytorch import Lion

from ray_adascale import AdaScaleBetasRule, UnscaledRule, Workload

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, by_hand, count

PAGE = PAGES / "lion.md"
KEPT = "benchmarks/studies/kept/lion.jsonl"
BETAS = (0.9, 0.99)
DECAY = 0.4
SMALLER = 4  # AdamW's LRs over Lion's, and Lion's decay over AdamW's
FORECAST = ("AdaScale", "β^r")


def with_lion(built: Workload, job: Job) -> Workload:
    """Return the workload with Lion in place of its optimizer."""
    optimizer = Lion(built.model.parameters(), lr=job.lr, betas=BETAS, weight_decay=DECAY)
    return replace(built, optimizer=optimizer, scheduler=study.schedule(optimizer, job.shape, job.total_steps))


LION = Comparison(
    optimizer="lion",
    cases={name: replace(case, lrs=tuple(lr / SMALLER for lr in case.lrs)) for name, case in SMALL.items()},
    methods={
        "AdaScale": Method(lambda steps: "adascale", about="(r, r)"),
        "β^r": Method(lambda steps: AdaScaleBetasRule(), about="(r, r), both betas to the power r"),
        "ℓ1": Method(lambda steps: SignGain(), about="(r₁, r₁), r₁ in the ℓ1 norm, betas to the power r₁"),
        "unscaled": Method(
            lambda steps: UnscaledRule(steps=steps),
            given_steps=True,
            about="1, as many steps as AdaScale took with this seed",
        ),
    },
    against=("β^r", "ℓ1", "unscaled"),
    pictured=("AdaScale", "β^r", "ℓ1", "unscaled"),
    stages=((1, 5), (16, 3), (4, 3), (64, 3), (16, 5), (4, 5), (64, 5)),
    shapes=("warmup",),
    grid_scale=1,
    evaluations=10,
    loss_examples=500,
    with_optimizer=with_lion,
)


def train(job: Job) -> Result:
    """Run a job."""
    return comparison.train(LION, job)


HOW = f"""\
- `Lion` of the package `lion-pytorch`, betas {BETAS}, decoupled weight decay {DECAY}. Against AdamW's grids the LRs are
  {SMALLER} times smaller and the decay is {SMALLER} times larger, so that LR · decay is the same.
- Models, data, splits and lengths are those of [Adam](adam.md). The schedule is a warm-up over a tenth and then linear to
  zero. Its peak is the best at S = 1 of five, a factor of two apart, on the search split with two other seeds.
- **AdaScale** is `rule="adascale"`, **β^r** is `rule="adascale_betas"`, **ℓ1** is in `benchmarks/studies/adam_candidates.py`.
  **unscaled** has as many optimizer steps as AdaScale took with this seed, so it differs in the LR alone.
- Every run is one process with one thread; the n = min(S, 8) gradient samples of a step are accumulation passes. Failed: as in
  [transfer](transfer.md)."""


def write(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """Write the page and its picture; the part by hand stays."""
    kept = by_hand(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    scale = picture_by_scale(plan, results, page)
    parts = [
        "# Lion",
        "One schedule, tuned at the base batch with Lion, carried to larger batches. Metric on a test split that no choice was "
        f"made on, mean ± standard deviation over {count(plan.seeds, 'seed')}.",
        provenance(plan, results, command),
        "## What it says",
        kept,
        "## All methods",
        STANDING,
        *(part for s in plan.scales[1:] for part in (f"S = {s}:", standing(plan, results, s))),
        f"![metric against scale]({scale.name})",
        "## AdaScale against the others",
        verdicts(plan, results),
        "## Forecasts",
        "Steps forecast from one base run (`record_recipe`, a probe every five steps), with their interval, and steps taken.",
        forecast_table(plan, results, runs, FORECAST),
        "## How",
        HOW,
        *workload_sections(plan, results),
    ]
    write_page(page, parts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    return comparison.parse(argv, __doc__, LION, KEPT, PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    return conduct(argv, __file__, parse, train, rounds_and_recipes, write, print_tables)


if __name__ == "__main__":
    sys.exit(main())
