"""The experiment of ``transfer.py`` with AdamW: fourteen candidate rules, four workloads, two shapes of schedule.

    python benchmarks/studies/adam.py --page                       all of it
    python benchmarks/studies/adam.py --smoke                      check that it runs
    python benchmarks/studies/adam.py --report-only --page p.md    write the page of the kept runs

``comparison.py`` has the runs, ``comparison_page.py`` the tables that ``transfer.py`` needs as well, ``adam_candidates.py`` the
rules. There is no grid at S = 16. Two candidates also run with another β₂. One base run of each workload is recorded with
noise probes, and the page sets forecasts from it beside the steps that AdaScale took.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparison
import study
import torch
import transfer
from adam_candidates import (
    Changing,
    Power,
    betas_per_effective_step,
    decay_per_effective_step,
    sde_square_root,
)
from comparison import (
    MOST_PASSES,
    Comparison,
    Job,
    Method,
    Plan,
    Result,
    Results,
    Rounds,
    conduct,
    recipes,
    record_recipes,
    seeds_of,
    stage_jobs,
)
from comparison_page import (
    picture,
    picture_by_scale,
    picture_by_tau,
    print_tables,
    provenance,
    verdicts,
    workload_sections,
    write_page,
)
from study import CASES, Case, transformer

from ray_adascale import LinearRule, SquareRootRule, UnscaledRule, Workload, forecast_recipe

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, by_hand, count, markdown

PAGE = ROOT / "docs" / "results" / "adam.md"
DECAY = 0.1  # AdamW's decoupled weight decay
OTHER_BETA2 = 0.95
OTHER_BETA2_METHODS = ("AdaScale", "SDE, κ = r")
OTHER_BETA2_AFTER = 2  # index of the stage after which they run


def with_adamw(built: Workload, job: Job) -> Workload:
    """Return the workload with AdamW in place of its optimizer."""
    optimizer = torch.optim.AdamW(
        built.model.parameters(), lr=job.lr, betas=(0.9, job.beta2), weight_decay=DECAY, foreach=True
    )
    return replace(built, optimizer=optimizer, scheduler=study.schedule(optimizer, job.shape, job.total_steps))


ADAMW = Comparison(
    optimizer="adamw",
    cases={
        "vision": replace(CASES["vision"], total_steps=600, lrs=(0.001, 0.002, 0.004, 0.008, 0.016)),
        "text": replace(CASES["text"], total_steps=800, lrs=(0.002, 0.004, 0.008, 0.016, 0.032)),
        "tabular": replace(CASES["tabular"], total_steps=2500, lrs=(0.002, 0.004, 0.008, 0.016, 0.032)),
        "transformer": replace(
            CASES["text"],
            about="the same text, two causal layers of a transformer of width 32",
            workload=transformer,
            total_steps=600,
            lrs=(0.002, 0.004, 0.008, 0.016, 0.032),
        ),
    },
    methods={
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
            lambda steps: Changing(SquareRootRule(), sde_square_root),
            about="(√S, S), 1 − β times S, ε by √S",
        ),
        "linear": Method(lambda steps: LinearRule(), about="(S, S), warm-up over 5/90 of the run"),
        "sqrt": Method(lambda steps: SquareRootRule(), about="(√S, S)"),
        "sqrt+": Method(
            lambda steps: SquareRootRule(steps=steps),
            given_steps=True,
            about="√S, as many steps as AdaScale took with this seed",
        ),
        "unscaled": Method(
            lambda steps: UnscaledRule(steps=steps),
            given_steps=True,
            about="1, as many steps as AdaScale took with this seed",
        ),
    },
    against=("AdamScale", "sqrt", "sqrt+", "unscaled"),
    pictured=("AdaScale", "AdamScale", "SDE, κ = r", "sqrt", "sqrt+", "unscaled"),
    stages=((1, 5), (16, 2), (16, 5), (4, 2), (64, 2), (4, 5), (64, 5)),
    shapes=("cosine", "warmup"),
    grid_scale=1,
    evaluations=10,
    loss_examples=500,
    with_optimizer=with_adamw,
)


# ---- runs ------------------------------------------------------------------------------------------------------------


def train(job: Job) -> Result:
    """Run a job."""
    return comparison.train(ADAMW, job)


def rounds(plan: Plan, path: Path, results: Results) -> Rounds:
    """Yield the grid, every stage, and after one of them the runs with another β₂; record the base runs before those."""
    yield "grid", plan.grid_jobs()
    for number, (scale, seeds) in enumerate(plan.stages()):
        yield from comparison.stage(plan, results, scale, seeds)
        if number == OTHER_BETA2_AFTER:
            record_recipes(plan, results, path)
            other = with_other_betas(plan)
            for scale in other.scales:
                jobs = stage_jobs(other, results, scale, len(plan.seeds), OTHER_BETA2_METHODS, given_steps=False)
                yield f"other betas, S = {scale}", jobs


def with_other_betas(plan: Plan) -> Plan:
    """Return the plan with another β₂, for S = 1 and 16; the schedule is the one tuned with the default β₂."""
    return replace(plan, beta2=OTHER_BETA2, scales=tuple(s for s in (1, 16) if s in plan.scales))


# ---- tables ----------------------------------------------------------------------------------------------------------


def standing(plan: Plan, results: Results, scale: int) -> str:
    """Return a table of every method that ran at a scale: by how much it is better than S = 1, and its steps."""
    rows = []
    for method, about in plan.comparison.methods.items():
        row = []
        for workload in plan.workloads:
            found, base = (seeds_of(plan, results, workload, s, method) for s in (scale, 1))
            row.append(standing_of(plan.case(workload), found, base))
        if set(row) != {"not run"}:
            rows.append([method, about.about, *row])
    head = ["method", "(LR factor, clock)", *(f"{w}, {plan.case(w).metric}" for w in plan.workloads)]
    return markdown(head, rows)


def standing_of(case: Case, found: dict[int, Result], base: dict[int, Result]) -> str:
    """Return a cell: by how much a method is better than S = 1 with the same seeds, and in how many steps.

    The error is the standard error of the mean at S = 1. Bold: worse by more than that. Seeds whose run at S = 1 failed are
    left out.
    """
    seeds = len(base)
    base = {seed: r for seed, r in base.items() if not r.failed}
    found = {seed: r for seed, r in found.items() if seed in base}
    good = {seed: r for seed, r in found.items() if not r.failed}
    if len(good) < len(found):
        return f"**{len(found) - len(good)} of {len(found)} failed**"
    if not found:
        return "not run"
    scores = [r.score for r in base.values() if r.score is not None]
    by = statistics.mean(case.better(r.score or 0.0, base[seed].score or 0.0) for seed, r in good.items())
    error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.inf
    text = f"{by:+.3f}" + (f" ± {error:.3f}" if len(scores) > 1 else "")
    steps = statistics.mean(r.optimizer_steps for r in good.values())
    of = f", {count(list(found), 'seed')}" if len(found) < seeds else ""
    return f"{f'**{text}**' if by < -error else text} in {steps:,.0f}{of}"


def betas_table(plan: Plan, results: Results) -> str:
    """Return a table of the candidates that ran with another β₂, at S = 16."""
    other = with_other_betas(plan)
    rows = []
    for method in OTHER_BETA2_METHODS:
        row = [method]
        for workload in plan.workloads:
            found, base = (seeds_of(other, results, workload, scale, method) for scale in (16, 1))
            row.append(standing_of(plan.case(workload), found, base))
        rows.append(row)
    return markdown(["method, S = 16", *plan.workloads], rows)


def forecasts(plan: Plan, results: Results, path: Path) -> str:
    """Return a table of AdaScale's steps: forecast from one base run, and taken."""
    rows = []
    for workload, recipe in recipes(plan, path):
        for scale in plan.scales[1:]:
            runs = seeds_of(plan, results, workload, scale, "AdaScale").values()
            taken = [r.optimizer_steps for r in runs if not r.failed]
            if not taken:
                continue
            config = plan.case(workload).config(scale, MOST_PASSES, plan.steps(workload))
            row = forecast_recipe(recipe, workers=[1], config=config).rows[0]
            actual = statistics.mean(taken)
            forecast = f"{row.steps:,} ({row.low:,.0f} to {row.high:,.0f})"
            rows.append([workload, f"{scale}", forecast, f"{actual:,.0f}", f"{row.steps / actual - 1:+.0%}"])
    return markdown(["workload", "S", "forecast (interval)", "taken", "off by"], rows)


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw_along(plan: Plan, results: Results, panel: Any, workload: str, divided_by: Callable[[int], float]) -> None:
    """Draw the metric of S = 1 and 16 against the examples divided by ``divided_by(S)``."""
    case = plan.case(workload)
    for number, method in enumerate(plan.comparison.pictured):
        for scale, style in ((1, "--"), (16, "-")):
            found = seeds_of(plan, results, workload, scale, method).values()
            runs = [r for r in found if not r.failed and len(r.curve_score) == len(r.curve_examples) > 0]
            if not runs or (scale == 1 and number):
                continue
            points = min(len(r.curve_score) for r in runs)  # the mean over seeds needs evaluations that all runs have
            panel.plot(
                [statistics.mean(r.curve_examples[i] for r in runs) / divided_by(scale) for i in range(points)],
                [statistics.mean(case.loss(r.curve_score[i]) for r in runs) for i in range(points)],
                style,
                color="k" if scale == 1 else f"C{number}",
                lw=1.1,
                label="S = 1" if scale == 1 else method,
            )
    panel.set(xscale="log")


def picture_by_steps(plan: Plan, results: Results, page: Path) -> Path:
    """Draw the metric against optimizer steps."""

    def draw(panel: Any, workload: str) -> None:
        draw_along(plan, results, panel, workload, lambda scale: scale * plan.case(workload).base_batch_size)
        panel.set(xlabel="optimizer steps")

    return picture(plan, page, "steps", "Test metric against optimizer steps, S = 16, mean over seeds", draw)


def picture_by_examples(plan: Plan, results: Results, page: Path) -> Path:
    """Draw the metric against examples."""

    def draw(panel: Any, workload: str) -> None:
        draw_along(plan, results, panel, workload, lambda scale: 1.0)
        panel.set(xlabel="examples")

    return picture(plan, page, "examples", "Test metric against examples, S = 16, mean over seeds", draw)


# ---- the page --------------------------------------------------------------------------------------------------------

TRANSFER = os.path.relpath(transfer.PAGE, PAGE.parent)
STANDING = """\
By how much each method is better (positive) or worse (negative) than S = 1 with the same seeds, ± the standard error of the mean
at S = 1; in how many optimizer steps, and of how many seeds where not of all. Bold: worse by more than that error, or failed."""
HOW = f"""\
- `torch.optim.AdamW`, betas (0.9, 0.999), ε 1e-8, weight decay 0.1, decoupled. Models, data, splits and seeds are those of
  [transfer]({TRANSFER}), and a small transformer on the same text. Every run is one process with one thread; the n = min(S, 8)
  gradient samples of a step are accumulation passes.
- The schedule is the best at S = 1 of a grid of ten, five peak LRs a factor of two apart times two shapes (cosine; warm-up over a
  tenth, then linear to zero), on a search split and with seeds of its own, two a schedule. There is no grid at S = 16.
- **AdaScale** is `rule="adascale"`, (r, r), as for SGD. **AdamScale** is `rule="adamscale"`, AdaptDL's. Names with "Adam's
  metric" take r from gradients divided by √v. The others change entries of the optimizer for each step
  (`benchmarks/studies/adam_candidates.py`).
- **SDE** is the square-root rule of Malladi et al., NeurIPS 2022 (arXiv 2205.10287): a batch κ times as large has √κ the LR,
  1 − β′ = κ(1 − β) for both betas, and ε/√κ. With β₁ = 0.9 the rule has no meaning from κ = 10 on, where β₁′ would be negative:
  it is 0 there.
- **sqrt+** and **unscaled** have as many optimizer steps as AdaScale took with this seed, so they differ from it in the LR alone.
- Training loss: of the first 500 examples. Failed: as in [transfer]({TRANSFER})."""


def write(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """Write the page and its pictures; the part by hand stays."""
    kept = by_hand(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    draws = (picture_by_scale, picture_by_tau, picture_by_steps, picture_by_examples)
    scale, curves, steps, examples = (draw(plan, results, page) for draw in draws)
    candidates = [
        part
        for s in plan.scales[1:]
        for part in (
            f"## All candidates at S = {s}",
            STANDING if s == plan.scales[1] else "",
            standing(plan, results, s),
        )
    ]
    parts = [
        "# Adam",
        "One schedule, tuned at the base batch, carried to larger batches by candidate rules for AdamW, on four workloads of "
        "different kinds. Validation metric on a test split on which no LR was chosen, mean ± standard deviation over "
        f"{count(plan.seeds, 'seed')} or fewer, where that is said.",
        provenance(plan, results, command),
        "## What it says",
        kept,
        *candidates,
        f"![metric against scale]({scale.name})",
        "## AdaScale against the others",
        verdicts(plan, results),
        "## How",
        HOW,
        *workload_sections(plan, results),
        "## The same curve over effective steps",
        f"![metric against effective steps]({curves.name})",
        "## Metric against steps and against examples",
        f"![metric against optimizer steps]({steps.name})",
        f"![metric against examples]({examples.name})",
        f"## Betas (0.9, {OTHER_BETA2:g})",
        betas_table(plan, results),
        "## Forecasts",
        "Steps forecast from one base run (`record_recipe`, a probe every five steps), and steps taken.",
        forecasts(plan, results, runs),
    ]
    write_page(page, parts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    return comparison.parse(argv, __doc__, ADAMW, "runs/transfer-adamw.jsonl", PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    return conduct(argv, __file__, parse, train, rounds, write, print_tables)


if __name__ == "__main__":
    sys.exit(main())
