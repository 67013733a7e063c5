"""The paper's experiment: one schedule, tuned at S = 1, carried to S = 4, 16 and 64 by
several methods and workloads.

    python benchmarks/studies/transfer.py --page                       all of it: a good half hour on two quiet cores
    python benchmarks/studies/transfer.py --smoke                      check that it runs
    python benchmarks/studies/transfer.py --report-only --page p.md    write the page of the kept runs

First, on every workload, 15 schedules (five peak LRs, three shapes) run at S = 1 and at
S = 16 and are scored on the search split. The best at S = 1 is the schedule to
transfer; the correlation of both rankings shows how robust the choice is. Then that
schedule runs with other seeds, scored on a test split:

    AdaScale           LR and clock by the gain r, the momentum m^√r in a step of gain r: the default
    AdaScale, fixed m  the same with a fixed momentum: the paper's rule
    AdaScale, m^r      the same with the momentum m^r in a step of gain r
    LSW                linear scaling with warm-up (5/90 of the run), T/S steps
    LSW+               LSW stretched to as many optimizer steps as AdaScale with a fixed m took with this seed
    √                  the LR by √S, stretched to that number
    unscaled           the base schedule's LR, stretched to that number

``comparison.py`` has the runs, ``comparison_page.py`` the tables.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import comparison
from comparison import (
    MEMORY,
    Comparison,
    Job,
    Method,
    Plan,
    Result,
    Results,
    conduct,
    grid_score,
)
from comparison_page import (
    picture_by_scale,
    picture_by_tau,
    picture_of_one,
    print_tables,
    provenance,
    verdicts,
    workload_sections,
    write_page,
)
from study import CASES

from ray_adascale import (
    AdaScaleMemoryRule,
    BetaRule,
    LinearRule,
    SquareRootRule,
    UnscaledRule,
)

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, by_hand, count, markdown

PAGE = PAGES / "transfer.md"
KEPT = "benchmarks/studies/kept/transfer.jsonl"
PICTURED = "text"
"""The workload of the picture on the page of results."""
LABELS = {
    "LSW": "LR × S, T/S steps",
    "LSW+": "LR × S",
    "√": "LR × √S",
    "unscaled": "LR unscaled",
}
"""Names of methods in that picture, where the page's own are too short."""
SGD = Comparison(
    optimizer="sgd",
    cases=CASES,
    methods={
        MEMORY: Method(lambda steps: AdaScaleMemoryRule(), label="AdaScale"),
        "AdaScale": Method(lambda steps: "adascale", label="AdaScale, fixed m"),
        "AdaScale, m^r": Method(lambda steps: AdaScaleMemoryRule(BetaRule(momentum=1))),
        "LSW": Method(lambda steps: LinearRule()),
        "LSW+": Method(lambda steps: LinearRule(steps=steps), given_steps=True),
        "√": Method(lambda steps: SquareRootRule(steps=steps), given_steps=True),
        "unscaled": Method(lambda steps: UnscaledRule(steps=steps), given_steps=True),
    },
    own=MEMORY,
    paced_by="AdaScale",
    against=("AdaScale", "LSW", "LSW+", "√", "unscaled"),
    pictured=(MEMORY, "LSW", "LSW+", "√", "unscaled"),
    stages=((64, 5), (16, 5), (4, 5), (1, 5)),
    shapes=("cosine", "step", "warmup"),
    grid_scale=16,
    evaluations=20,
)


def train(job: Job) -> Result:
    """Run a job."""
    return comparison.train(SGD, job)


# ---- robustness ----------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's ρ; NaN if all values of a side are equal."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return math.nan
    return statistics.correlation(ranks(one), ranks(other))


def robustness(plan: Plan, results: Results) -> str:
    """Return a table of rank correlations between the schedules' scores at S = 1 and
    at the grid's larger scale.
    """
    large = plan.grid_scale
    rows = []
    for workload in plan.workloads:
        if any(
            job not in results for job in plan.grid_jobs() if job.workload == workload
        ):
            rows.append([workload, "not run"])
            continue
        grid = plan.grid(workload)

        def scores(
            scale: int, seeds: Sequence[int] = plan.grid_seeds, workload: str = workload
        ) -> list[float]:
            narrow = replace(plan, grid_seeds=tuple(seeds))
            return [
                grid_score(narrow, results, workload, scale, *cell)
                for cell in plan.grid(workload)
            ]

        small, big = scores(1), scores(large)
        lost = [sum(map(math.isinf, each)) for each in (small, big)]
        finite = [i for i, score in enumerate(small) if math.isfinite(score)]
        first, last = plan.grid_seeds[:1], plan.grid_seeds[-1:]
        chosen = min(range(len(grid)), key=lambda i: small[i])
        lr, shape = grid[chosen]
        edge = (
            ", at the edge of the grid"
            if lr in (grid[0][0], grid[-1][0]) and len({c[0] for c in grid}) > 2
            else ""
        )
        rows.append(
            [
                workload,
                f"lr {lr:g}, {shape}{edge}",
                f"{ranks(big)[chosen]:g} of {len(grid)}",
                f"{lost[0]}, {lost[1]}",
                f"{rank_correlation(small, big):.2f}",
                f"{rank_correlation([small[i] for i in finite], [big[i] for i in finite]):.2f}",
                f"{rank_correlation(scores(1, first), scores(1, last)):.2f}"
                if first != last
                else "",
            ]
        )
    head = [
        "workload",
        "best at S = 1",
        f"its rank at S = {large}",
        f"failed at S = 1, {large}",
        f"ρ, S = 1 and {large}",
        "ρ of those that didn't fail at S = 1",
        "ρ, S = 1 twice, one seed each",
    ]
    return markdown(head, [row + [""] * (len(head) - len(row)) for row in rows])


# ---- the page ------------------------------------------------------------------------

HOW = """\
- Every run is one process with one thread. The n = min(S, 8) gradient samples of a step are *simulated by accumulation*, not by
  workers: the arithmetic is that of n workers, the speed isn't, and nothing is said about it here.
- The momentum is 0.9. The schedule is the best at S = 1 of a grid of 15, five peak LRs a factor of two apart times three
  shapes (cosine; steps to a tenth and a hundredth at a half and three quarters; warm-up over a tenth, then linear to zero), on a
  search split and with seeds of its own, two a schedule. Without that, linear scaling would be flattered: an LR too small at
  S = 1 leaves room to be multiplied.
- **AdaScale** runs until τ reaches T, with the defaults of `AdaScaleConfig`: the momentum is m^√r in a step of gain r.
  **AdaScale, fixed m** is the paper's rule, `rule="adascale"`. The other methods have a fixed momentum, too.
- **LSW**: LR × S after a linear warm-up over 5/90 of the run, T/S optimizer steps, as many examples as the base run.
- **LSW+**: the same, stretched to exactly the number of optimizer steps that AdaScale with a fixed m took with this seed. The default
  takes up to 1 % more at S = 4, 12 % at S = 16 and 30 % at S = 64.
- **unscaled**: the base LR, the schedule stretched to that same number of steps. There are two other readings of "no scaling":
  T/S steps, which saves examples and is far too short, and T steps, which saves no step and so is no way to scale. With
  the number of a fixed m everything but the LR is the same as there.
- **√**: the base LR times √S, stretched to that same number of steps.
- LSW+, √ and unscaled are given what no one knows beforehand: how long AdaScale will run.
- Training loss: the mean over the training split at the end, in eval mode. Mean gain: Σ r / steps, measured under every method,
  used only by AdaScale.
- A run has failed when its gradient wasn't finite for 50 steps in a row, or when it ends no more than 5 % of the way from
  chance to perfect, as after divergence to weights that answer the same to everything. Failed runs are counted, not averaged.
- Seeds set weights, the order of examples and augmentation; methods are compared seed by seed."""


def write(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """Write the page and its pictures; the part by hand stays."""
    kept = by_hand(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    scale, curves = (
        draw(plan, results, page) for draw in (picture_by_scale, picture_by_tau)
    )
    picture_of_one(plan, results, page, PICTURED, LABELS, shown=0.15)
    parts = [
        "# Does the schedule transfer?",
        "One schedule, tuned at the base batch, carried to larger batches by seven "
        "methods, on three workloads of different kinds. Validation metric on a test "
        "split that no choice was made on, mean ± standard deviation over "
        f"{count(plan.seeds, 'seed')}.",
        provenance(plan, results, command),
        "## What it says",
        kept,
        f"![metric against scale]({scale.name})",
        "## AdaScale against the others",
        verdicts(plan, results),
        "## How",
        HOW,
        *workload_sections(plan, results),
        "## The same curve over effective steps",
        f"![metric against effective steps]({curves.name})",
        "## Robustness: do schedules keep their order?",
        "Every schedule of the grid at S = 1 and, under AdaScale with a fixed m, at "
        f"S = {plan.grid_scale}, on the search split, mean of "
        f"{count(plan.grid_seeds, 'seed')}; Spearman's ρ between the two. A schedule "
        "that failed ranks last. The last column is there for comparison: how far two "
        "seeds agree about the order at S = 1 is as much as one could hope for.",
        robustness(plan, results),
    ]
    write_page(page, parts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    return comparison.parse(argv, __doc__, SGD, KEPT, PAGE)


def show(plan: Plan, results: Results) -> None:
    """Print the tables."""
    print_tables(plan, results, robustness(plan, results))


def main(argv: Sequence[str] | None = None) -> int:
    return conduct(argv, __file__, parse, train, comparison.rounds, write, show)


if __name__ == "__main__":
    sys.exit(main())
