"""The experiment of ``transfer.py`` on public data, with networks of 0.08 to 1.25 M
parameters.

    python benchmarks/studies/at_size.py --page                             all of it, or what is missing
    python benchmarks/studies/at_size.py --workloads flights --scales 4 16  some of it
    python benchmarks/studies/at_size.py --smoke                            check that it runs
    python benchmarks/studies/at_size.py --report-only --page p.md          write the page of the kept runs

Five peak LRs run at S = 1 with two seeds and are scored on the search split; the
schedule is a warm-up and a linear decay. The best one is carried to larger batches, and
scored on the test split with other seeds, in two ways. *At equal effective steps*
AdaScale runs until τ = T, with the default m^√r and with a fixed momentum, and the
other methods get as many optimizer steps as the latter. *At equal
examples* every method gets the examples of the base run, T · B0. AdaScale's schedule is
then shortened, for each seed, by the ratio of T · B0 to the examples of its first run,
and ends near T · B0.

A batch that is kept fixed on more workers, as torchft and torchtitan keep it, is the
run at S = 1: same metric, T steps.

The kept results are in ``benchmarks/studies/kept/at_size.jsonl``.
"""

from __future__ import annotations

import argparse
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
    Rounds,
    best_schedule,
    conduct,
)
from comparison_page import (
    cells,
    difference,
    picture_by_scale,
    picture_by_tau,
    picture_of_one,
    provenance,
    verdicts,
    workload_table,
    write_page,
)
from real_workloads import AT_SIZE
from wall_clock import BYTES_PER_S, LATENCY_S, read_steps, share

from ray_adascale import (
    AdaScaleMemoryRule,
    LinearRule,
    SquareRootRule,
    UnscaledRule,
)

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, by_hand, count, markdown

PAGE = PAGES / "at-size.md"
LABELS = {"linear": "LR × S", "√": "LR × √S", "unscaled": "LR unscaled"}
"""Names of methods in the picture of one workload."""
KEPT = "benchmarks/studies/kept/at_size.jsonl"
LONGER = Comparison(
    optimizer="sgd",
    cases=AT_SIZE,
    methods={
        MEMORY: Method(lambda steps: AdaScaleMemoryRule(), label="AdaScale"),
        "AdaScale": Method(lambda steps: "adascale", label="AdaScale, fixed m"),
        "linear": Method(lambda steps: LinearRule(steps=steps), given_steps=True),
        "√": Method(lambda steps: SquareRootRule(steps=steps), given_steps=True),
        "unscaled": Method(lambda steps: UnscaledRule(steps=steps), given_steps=True),
        # At equal examples:
        "AdaScale, T·B0": Method(lambda steps: "adascale"),
        "linear, T·B0": Method(lambda steps: LinearRule()),
        "√, T·B0": Method(lambda steps: SquareRootRule()),
        "unscaled, T·B0": Method(lambda steps: UnscaledRule()),
    },
    own=MEMORY,
    paced_by="AdaScale",
    against=("AdaScale", "linear", "√", "unscaled"),
    pictured=(MEMORY, "linear", "√", "unscaled"),
    stages=((1, 5), (16, 3), (4, 3), (64, 3), (16, 5), (4, 5), (64, 5)),
    shapes=("warmup",),
    grid_scale=1,
    evaluations=5,
    loss_examples=500,
)
EQUAL_STEPS = [name for name in LONGER.methods if not name.endswith("T·B0")]
OF_EXAMPLES = [name for name in LONGER.methods if name.endswith("T·B0")]


def train(job: Job) -> Result:
    """Run a job."""
    return comparison.train(LONGER, job)


def shortened(
    plan: Plan, results: Results, workload: str, scale: int, seed: int
) -> Job | None:
    """Return AdaScale's run on the examples of the base run; None before its first
    run, or if that run failed.
    """
    best = best_schedule(plan, results, workload)
    if best is None:
        return None
    job = plan.job(workload, "AdaScale", scale, seed, best)
    own = results.get(job)
    if own is None or own.failed:
        return None
    ratio = plan.steps(workload) * plan.case(workload).base_batch_size / own.examples
    return replace(
        job,
        method="AdaScale, T·B0",
        total_steps=max(1, round(plan.steps(workload) * ratio)),
    )


def rounds(plan: Plan, path: Path, results: Results) -> Rounds:
    """Yield the grid; then for every stage AdaScale's runs, and those that depend on
    them.
    """
    yield "grid", plan.grid_jobs()
    fixed = [name for name in LONGER.methods if name != "AdaScale, T·B0"]
    for scale, seeds in plan.stages():
        yield (
            f"S = {scale}",
            comparison.stage_jobs(
                plan, results, scale, seeds, fixed, given_steps=False
            ),
        )
        yield (
            f"S = {scale}, given steps",
            comparison.stage_jobs(plan, results, scale, seeds, fixed, given_steps=True),
        )
        if scale > 1:
            cells = [
                (workload, seed)
                for workload in plan.workloads
                for seed in plan.seeds[:seeds]
            ]
            jobs = [
                shortened(plan, results, workload, scale, seed)
                for workload, seed in cells
            ]
            yield (
                f"S = {scale}, equal examples",
                [job for job in jobs if job is not None],
            )


def of_examples(
    plan: Plan, results: Results, workload: str, scale: int, method: str
) -> dict[int, Result]:
    """Return the results on the examples of the base run, by seed."""
    if method != "AdaScale, T·B0":
        return comparison.seeds_of(plan, results, workload, scale, method)
    jobs = {
        seed: shortened(plan, results, workload, scale, seed) for seed in plan.seeds
    }
    return {
        seed: results[job]
        for seed, job in jobs.items()
        if job is not None and job in results
    }


def shortened_runs(plan: Plan, results: Results) -> list[Result]:
    """Return all results of AdaScale on the examples of the base run."""
    cells = [
        (workload, scale)
        for workload in plan.workloads
        for scale in plan.scales
        if scale > 1
    ]
    return [
        r
        for cell in cells
        for r in of_examples(plan, results, *cell, "AdaScale, T·B0").values()
    ]


def examples_table(plan: Plan, results: Results, workload: str) -> str:
    """Return a table of the runs on the examples of the base run."""
    case = plan.case(workload)
    base = comparison.seeds_of(plan, results, workload, 1, "AdaScale")
    rows = [["1", "all alike", *cells(list(base.values())), ""]]
    for scale in plan.scales:
        if scale == 1:
            continue
        for method in OF_EXAMPLES:
            found = of_examples(plan, results, workload, scale, method)
            name = LONGER.label(method.removesuffix(", T·B0"))
            seeds = (
                f" ({count(list(found), 'seed')})"
                if 0 < len(found) < len(plan.seeds)
                else ""
            )
            rows.append(
                [
                    f"{scale}",
                    name + seeds,
                    *cells(list(found.values())),
                    str(difference(case, found, base)),
                ]
            )
    head = [
        "S",
        "method",
        f"test {case.metric}",
        "training loss",
        "optimizer steps",
        "examples",
        "mean gain",
    ]
    return markdown([*head, "better than S = 1 by"], rows)


def seconds_table(plan: Plan, results: Results) -> str:
    """Return a table of the seconds to T on S separate machines with B0 examples
    each, and with a batch that is kept fixed.
    """
    measured, _ = read_steps()
    rows = []
    for workload in plan.workloads:
        base, clock = (
            plan.case(workload).base_batch_size,
            measured[f"at size {workload}"],
        )
        alone = plan.steps(workload) * clock.of(base, 1)
        for scale in plan.scales:
            found = [
                r
                for r in comparison.seeds_of(
                    plan, results, workload, scale, MEMORY
                ).values()
                if not r.failed
            ]
            if scale == 1 or not found:
                continue
            own = statistics.mean(r.optimizer_steps for r in found) * clock.of(
                base, scale
            )
            fixed = plan.steps(workload) * clock.of(share(base, scale), scale)
            row = [
                workload,
                f"{scale}",
                f"{alone:.1f}",
                f"{fixed:.1f}",
                f"{own:.1f}",
                f"{own / fixed:.2f}",
                f"{alone / own:.1f}",
            ]
            rows.append(row)
    head = [
        "workload",
        "machines",
        "s on one machine",
        "s, batch kept fixed",
        "s, AdaScale",
        "AdaScale / fixed",
    ]
    return markdown([*head, "× faster than one machine"], rows)


HOW = """\
- Every run is one process with one thread. The n = min(S, 8) gradient samples of a step are accumulation passes, not workers.
  Batch norm sees one pass: B0 examples up to S = 8, and 2·B0 and 8·B0 at S = 16 and 64, as on eight workers.
- Momentum 0.9. The schedule is a warm-up over a tenth and then linear to zero. Its peak is the best at S = 1 of five, a factor
  of two apart, on the search split with two other seeds.
- **AdaScale** runs until τ reaches T, with the defaults of `AdaScaleConfig`: the momentum is m^√r in a step of gain r.
  **AdaScale, fixed m** is the paper's rule, `rule="adascale"`. **linear**: LR × S, after a warm-up of the factor
  over 5/90 of the run. **√**: LR × √S. **unscaled**: the base LR. At equal effective steps each of them, with a fixed m, is
  stretched to the optimizer steps of AdaScale with a fixed m and the same seed, which nobody knows beforehand. The default takes
  up to 2 % more at S = 4, 8 % at S = 16 and 25 % at S = 64.
- **At equal examples** the three take T/S steps. AdaScale has a fixed m there, and runs with a T that is shorter by the ratio of T · B0 to the examples
  of its first run; the examples taken then differ from T · B0, since a shorter run has other gains.
- Training loss: mean over the first 500 training examples. A run has failed when its gradient was not finite for 50 steps in a
  row, or when it ends no more than 5 % of the way from chance to perfect. Failed runs are counted and left out of means.
- Seeds set weights, the order of examples and augmentation; methods are compared seed by seed."""


def write(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """Write the page and its pictures; the part by hand stays."""
    kept = by_hand(page)
    _, about = read_steps()
    page.parent.mkdir(parents=True, exist_ok=True)
    narrow = replace(
        plan,
        comparison=replace(
            LONGER, methods={name: LONGER.methods[name] for name in EQUAL_STEPS}
        ),
    )
    scale, curves = (
        draw(narrow, results, page) for draw in (picture_by_scale, picture_by_tau)
    )
    picture_of_one(narrow, results, page, "smiles", LABELS, shown=0.45)
    sections = []
    for workload in plan.workloads:
        best = best_schedule(plan, results, workload)
        tuned = "grid incomplete" if best is None else f"peak LR {best[0]:g}"
        sections += [
            f"## {workload.capitalize()}",
            plan.case(workload).sentences(plan.steps(workload), f"; tuned: {tuned}"),
            "At equal effective steps:",
            workload_table(narrow, results, workload),
            "At equal examples:",
            examples_table(plan, results, workload),
        ]
    parts = [
        "# Does the schedule transfer on public data?",
        "One schedule, tuned at the base batch, carried to larger batches by five "
        "methods, on public data and with larger networks than [the first "
        "study](transfer.md). Test metric, mean ± standard deviation over "
        f"{count(plan.seeds, 'seed')}, or as many as a row says.",
        provenance(plan, results, command, more=shortened_runs(plan, results)),
        "## What it says",
        kept,
        f"![metric against scale]({scale.name})",
        "## AdaScale against the others, at equal effective steps",
        verdicts(narrow, results),
        "## How",
        HOW,
        *sections,
        "## Seconds on separate machines",
        "Computed: optimizer steps × (the seconds of a plain step with a machine's "
        "examples, measured on one core + a ring all-reduce over "
        f"{BYTES_PER_S * 8 / 1e9:g} Gbit/s with {LATENCY_S * 1e6:g} µs a message). "
        "AdaScale has B0 examples a machine, the fixed batch B0 / machines, rounded "
        "up. What AdaScale adds to a step (2 to 20 % on CPUs, [time of a "
        "step](overhead.md#cpu)) is not included. `wall_clock.py`, "
        f"{about['date'][:10]}, {about['cpu']}, load {about['load']} before.",
        seconds_table(plan, results),
        "## The same curve over effective steps",
        f"![metric against effective steps]({curves.name})",
    ]
    write_page(page, parts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    return comparison.parse(argv, __doc__, LONGER, KEPT, PAGE)


def show(plan: Plan, results: Results) -> None:
    """Print both tables of every workload."""
    for workload in plan.workloads:
        print(
            f"\n{workload}\n\n{workload_table(plan, results, workload)}\n\n{examples_table(plan, results, workload)}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    return conduct(argv, __file__, parse, train, rounds, write, show)


if __name__ == "__main__":
    sys.exit(main())
