"""The experiment of ``adam_betas.py`` with Muon: an ``OptimizerChain`` of Muon and AdamW, two workloads, three seeds.

    python benchmarks/studies/muon.py --page                       all of it
    python benchmarks/studies/muon.py --smoke                      check that it runs
    python benchmarks/studies/muon.py --report-only --page p.md    write the page of the kept runs

Muon steps the hidden matrices, AdamW the rest. Both have one LR. ``muon_candidates.py`` has a gain in the norm of these steps.
The kept results are in ``benchmarks/studies/kept``. One base run of each workload is recorded with noise probes, and the page
sets forecasts from it beside the steps that were taken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparison
import study
from adam_betas import DECAY, SMALL
from comparison import (
    MOST_PASSES,
    Comparison,
    Job,
    Method,
    Plan,
    Result,
    Results,
    conduct,
    recipes,
    rounds_and_recipes,
    seeds_of,
)
from comparison_page import (
    STANDING,
    forecast_table,
    picture,
    print_tables,
    provenance,
    standing,
    verdicts,
    workload_sections,
    write_page,
)
from muon_candidates import DualGain
from torch.optim import AdamW, Muon, Optimizer

from ray_adascale import (
    AdaScaleBetasRule,
    BetaRule,
    OptimizerChain,
    UnscaledRule,
    Workload,
    forecast_recipe,
)

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, by_hand, count, markdown

PAGE = PAGES / "muon.md"
KEPT = "benchmarks/studies/kept/muon.jsonl"
MOMENTUM = 0.95  # Muon's
# Names of the matrices that Muon steps: neither embeddings nor the first or the last layer.
HIDDEN = {"transformer": "layers.", "tabular": "2."}
DUAL = "dual norm"
BETAS = ("AdaScale, β^r", "AdaScale, β^r, m^r")
LRS = (0.004, 0.008, 0.016, 0.032)


def with_muon(built: Workload, job: Job) -> Workload:
    """Return the workload with Muon for the hidden matrices, and AdamW for the rest, in place of its optimizer."""
    named = list(built.model.named_parameters())
    hidden = [p for name, p in named if name.startswith(HIDDEN[job.workload]) and p.ndim == 2]
    rest = [p for _, p in named if not any(p is q for q in hidden)]
    muon = Muon(hidden, lr=job.lr, momentum=MOMENTUM, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(rest, lr=job.lr, betas=(0.9, job.beta2), weight_decay=DECAY, foreach=True)
    optimizer: Optimizer = OptimizerChain([muon, adamw])
    return replace(built, optimizer=optimizer, scheduler=study.schedule(optimizer, job.shape, job.total_steps))


MUON = Comparison(
    optimizer="muon",
    cases={name: replace(SMALL[name], lrs=LRS) for name in HIDDEN},
    methods={
        "AdaScale": Method(lambda steps: "adascale", about="(r, r)"),
        "AdaScale, β^r": Method(lambda steps: AdaScaleBetasRule(), about="(r, r), AdamW's betas to the power r"),
        "AdaScale, β^r, m^r": Method(
            lambda steps: AdaScaleBetasRule(BetaRule(momentum=True)),
            about="(r, r), AdamW's betas and Muon's momentum to the power r",
        ),
        DUAL: Method(
            lambda steps: DualGain(),
            about="(r_d, r_d), r_d in the dual norm of the steps, betas and momentum to the power r_d",
        ),
        "unscaled": Method(
            lambda steps: UnscaledRule(steps=steps),
            given_steps=True,
            about="1, as many steps as AdaScale took with this seed",
        ),
    },
    against=("AdaScale, β^r", "AdaScale, β^r, m^r", DUAL, "unscaled"),
    pictured=("AdaScale", "AdaScale, β^r", "AdaScale, β^r, m^r", DUAL, "unscaled"),
    stages=((1, 3), (16, 3), (4, 3)),
    shapes=("cosine", "warmup"),
    grid_scale=1,
    evaluations=10,
    loss_examples=500,
    with_optimizer=with_muon,
)


# ---- runs ------------------------------------------------------------------------------------------------------------


def train(job: Job) -> Result:
    """Run a job."""
    return comparison.train(MUON, job)


# ---- tables ----------------------------------------------------------------------------------------------------------


def target(plan: Plan, results: Results, scale: int = 16, share: float = 0.4) -> str:
    """Return a table of the target: the metric within a standard error of S = 1, in at most a share of T.

    The standard error is that of the mean of the differences from S = 1, paired by seed.
    """
    rows = []
    for workload in plan.workloads:
        case, steps = plan.case(workload), plan.steps(workload)
        for method in plan.comparison.methods:
            found, base = (seeds_of(plan, results, workload, s, method) for s in (scale, 1))
            pairs = [(found[s], base[s]) for s in found if s in base]
            scored = [(a, b) for a, b in pairs if not a.failed and a.score is not None and b.score is not None]
            if len(scored) < 2:
                continue
            by = [case.better(a.score or 0.0, b.score or 0.0) for a, b in scored]
            error = statistics.stdev(by) / len(by) ** 0.5
            mean, taken = statistics.mean(by), statistics.mean(a.optimizer_steps for a, _ in scored) / steps
            failed = len(pairs) - len(scored)
            good = mean >= -error and taken <= share and not failed
            row = [workload, method, f"{mean:+.4f} ± {error:.4f}", f"{taken:.2f}·T", "yes" if good else "no"]
            rows.append(row if not failed else [*row[:2], f"{failed} failed", *row[3:]])
    return markdown(["workload", f"method, S = {scale}", "better than S = 1 by", "steps", "met"], rows)


def forecasts(plan: Plan, results: Results, path: Path) -> str:
    """Return a table of AdaScale's steps: forecast from one base run with several momenta, and taken."""
    rows = []
    for workload, recipe in recipes(plan, path):
        for scale in plan.scales[1:]:
            runs = seeds_of(plan, results, workload, scale, "AdaScale").values()
            taken = [r.optimizer_steps for r in runs if not r.failed]
            if not taken:
                continue
            actual = statistics.mean(taken)
            config = plan.case(workload).config(scale, MOST_PASSES, plan.steps(workload))
            row = [workload, f"{scale}"]
            for momentum in (MOMENTUM, 0.9, 0.0):
                made = forecast_recipe(replace(recipe, momentum=momentum), workers=[1], config=config).rows[0]
                row.append(f"{made.steps:,} ({made.low:,.0f} to {made.high:,.0f}), {made.steps / actual - 1:+.0%}")
            rows.append([*row, f"{actual:,.0f}"])
    head = ["workload", "S", f"m = {MOMENTUM}, Muon's (in use)", "m = 0.9, AdamW's β₁", "m = 0", "taken"]
    return markdown(head, rows)


def picture_by_steps(plan: Plan, results: Results, page: Path) -> Path:
    """Draw the metric of S = 1 and 16 against optimizer steps."""

    def draw(panel: Any, workload: str) -> None:
        case = plan.case(workload)
        for number, method in enumerate(plan.comparison.pictured):
            for scale, style in ((1, "--"), (16, "-")):
                found = seeds_of(plan, results, workload, scale, method).values()
                runs = [r for r in found if not r.failed and len(r.curve_score) == len(r.curve_examples) > 0]
                if not runs or (scale == 1 and number):
                    continue
                points = min(len(r.curve_score) for r in runs)  # the mean needs evaluations that all runs have
                batch = scale * case.base_batch_size
                panel.plot(
                    [statistics.mean(r.curve_examples[i] for r in runs) / batch for i in range(points)],
                    [statistics.mean(case.loss(r.curve_score[i]) for r in runs) for i in range(points)],
                    style,
                    color="k" if scale == 1 else f"C{number}",
                    lw=1.1,
                    label="S = 1" if scale == 1 else method,
                )
        panel.set(xscale="log", xlabel="optimizer steps")

    return picture(plan, page, "steps", "Test metric against optimizer steps, S = 16, mean over seeds", draw)


# ---- the page --------------------------------------------------------------------------------------------------------

HOW = f"""\
- `OptimizerChain([Muon(hidden matrices), AdamW(the rest)])`. Muon: momentum {MOMENTUM}, Nesterov,
  `adjust_lr_fn="match_rms_adamw"`. AdamW: betas (0.9, 0.999), ε 1e-8. Both have weight decay {DECAY} and the same LR, which is
  what `match_rms_adamw` is made for.
- Muon's matrices are those of the transformer's two layers (attention's three input projections as one matrix), and the middle
  one of the three linear layers of tabular.
- Models, data, splits and lengths are those of [Adam](adam.md). The schedule is the best at S = 1 of a grid of eight, four peak
  LRs a factor of two apart times two shapes, on the search split, with one seed of its own.
- **unscaled** has as many optimizer steps as AdaScale took with this seed, so it differs in the LR alone.
- Every run is one process with one thread; the n = min(S, 8) gradient samples of a step are accumulation passes. Failed: as in
  [transfer](transfer.md)."""


def write(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """Write the page and its picture; the part by hand stays."""
    kept = by_hand(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    steps = picture_by_steps(plan, results, page)
    tables = [
        part
        for s in plan.scales[1:]
        for part in (f"## All methods at S = {s}", STANDING if s == plan.scales[1] else "", standing(plan, results, s))
    ]
    parts = [
        "# Muon",
        "One schedule, tuned at the base batch with Muon for the hidden matrices and AdamW for the rest, carried to larger "
        "batches. Metric on a test split that no choice was made on, mean ± standard deviation over "
        f"{count(plan.seeds, 'seed')}.",
        provenance(plan, results, command),
        "## What it says",
        kept,
        "## The target",
        "Set before the runs: at S = 16 the metric within a standard error of S = 1, in at most 0.4·T optimizer steps. The "
        "error is that of the mean difference, paired by seed.",
        target(plan, results),
        *tables,
        f"![metric against optimizer steps]({steps.name})",
        "## AdaScale against the others",
        verdicts(plan, results),
        "## How",
        HOW,
        *workload_sections(plan, results),
        "## Forecasts",
        "Steps forecast from one base run (`record_recipe`, a probe every five steps) with three momenta, and steps taken.",
        forecasts(plan, results, runs),
        "The same with the rules that change betas, with Muon's momentum.",
        forecast_table(plan, results, runs, BETAS),
    ]
    write_page(page, parts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    args, plan = comparison.parse(argv, __doc__, MUON, KEPT, PAGE, seeds=3, scales=(1, 4, 16))
    return args, replace(plan, grid_seeds=(101,))


def main(argv: Sequence[str] | None = None) -> int:
    return conduct(argv, __file__, parse, train, rounds_and_recipes, write, print_tables)


if __name__ == "__main__":
    sys.exit(main())
