"""Every workload of every study at S = 16: by how much AdaScale, LR × S, LR × √S and
an unscaled LR end better than the base run.

    python benchmarks/studies/every_workload.py                run what is missing, and write the page
    python benchmarks/studies/every_workload.py --report-only  write the page from the kept runs

AdaScale has the default rule of the optimizer. For SGD with momentum that is m^√r,
"fixed m" is the rule of the paper.
The workloads of ``forecast.py`` have other seeds in their base runs than in the scaled
ones, so that the means are compared. The only runs of this script are those of the
other methods on these workloads, with the seeds, steps and settings of a fixed m.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import at_size
import comparison
import forecast
import momentum
import optimizers
import transfer
from comparison import BASE, MEMORY, Plan, Result, Results, seeds_of
from comparison_page import write_page
from forecast_workloads import Case, cases
from study import prepare_process, read_runs, run_all

from ray_adascale import LinearRule, SquareRootRule, UnscaledRule

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, count, markdown

PAGE = PAGES / "every-workload.md"
ROOT = Path(__file__).parents[2]
SCALE = 16
RULES: dict[str, Any] = {
    "LR × S": LinearRule,
    "LR × √S": SquareRootRule,
    "unscaled": UnscaledRule,
}
"""Rules of the methods beside AdaScale, which have as many optimizer steps."""
OTHERS = tuple(RULES)
FIXED = "fixed m"
"""Method of AdaScale with a fixed momentum, where it is not the default."""
HOT_BASE = "base run"
"""Method of the base runs with the mean LR that LR × S has in effective time: the LR
times S·n/T, for n optimizer steps.
"""
KEPT = "benchmarks/studies/kept/every_workload.jsonl"
DATA = Path("runs/forecast")
"""Folder of the base runs of ``forecast.py``."""
SEEDS = (10, 11)


@dataclass(frozen=True)
class Outcome:
    """By how much a method ended better than the base run.

    Attributes:
        by: Mean over seeds; NaN if a run failed.
        steps: Mean optimizer steps.
    """

    by: float
    steps: float

    def cell(self, error: float) -> str:
        """Return the cell of a table; bold if worse by more than the error."""
        if math.isnan(self.by):
            return "**failed**"
        text = f"{self.by:+.3f}"
        return f"**{text}**" if self.by < -error else text


@dataclass(frozen=True)
class Row:
    """A workload at S = 16.

    Attributes:
        study: Name of the study's page.
        workload: Its name.
        optimizer: Name of the optimizer.
        metric: Name of the metric.
        total_steps: T; NaN: unknown.
        error: Standard error of the mean at S = 1.
        own: AdaScale's outcome.
        others: Those of :data:`OTHERS` that were measured, of :data:`FIXED`, and of
            :data:`HOT_BASE`.
    """

    study: str
    workload: str
    optimizer: str
    metric: str
    total_steps: float
    error: float
    own: Outcome
    others: Mapping[str, Outcome]

    @property
    def worse(self) -> bool:
        """Whether AdaScale failed, or is worse by more than the error."""
        return not self.own.by >= -self.error

    @property
    def behind_linear(self) -> bool:
        """Whether LR × S ended better than AdaScale."""
        linear = self.others.get("LR × S")
        return linear is not None and linear.by > self.own.by


def outcome(
    plan: Plan, results: Results, workload: str, method: str, base: dict[int, Result]
) -> Outcome | None:
    """Return the outcome of a method; None if it was not measured."""
    found = {
        seed: run
        for seed, run in seeds_of(plan, results, workload, SCALE, method).items()
        if seed in base
    }
    if not found:
        return None
    steps = statistics.mean(run.optimizer_steps for run in found.values())
    if any(run.failed for run in found.values()):
        return Outcome(math.nan, steps)
    better = plan.case(workload).better
    return Outcome(
        statistics.mean(
            better(run.score or 0.0, base[seed].score or 0.0)
            for seed, run in found.items()
        ),
        steps,
    )


def rows_of(
    study: str,
    optimizer: str,
    plan: Plan,
    results: Results,
    names: Mapping[str, str],
    own: str = BASE,
) -> Iterator[Row]:
    """Yield the rows of a study.

    Args:
        study: Name of its page.
        optimizer: Name of its optimizer.
        plan: Its plan.
        results: Its kept runs.
        names: The study's name of each of :data:`OTHERS` and :data:`FIXED` that it has.
        own: The method that is the default rule.
    """
    for workload in plan.workloads:
        at_base = seeds_of(plan, results, workload, 1, BASE)
        base = {seed: run for seed, run in at_base.items() if not run.failed}
        outcomes = {
            name: outcome(plan, results, workload, method, base)
            for name, method in {BASE: own, **names}.items()
        }
        ended = outcomes.pop(BASE)
        if ended is None:
            continue
        scores = [run.score or 0.0 for run in base.values()]
        yield Row(
            study,
            workload,
            optimizer,
            plan.case(workload).metric,
            plan.steps(workload),
            statistics.stdev(scores) / math.sqrt(len(scores)),
            ended,
            {name: found for name, found in outcomes.items() if found is not None},
        )


# ---- the workloads of forecast.py ----------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A run of a workload of ``forecast.py`` with one of :data:`RULES` at S = 16, or a
    base run with a larger LR.

    Attributes:
        case: Name of the workload.
        method: Name of the rule, or :data:`HOT_BASE`.
        seed: Its seed.
        steps: Optimizer steps n of AdaScale's run with a fixed m and this seed; those
            of the run too, except for :data:`HOT_BASE`.
    """

    case: str
    method: str
    seed: int
    steps: int

    @property
    def hotter(self) -> float:
        """S·n/T."""
        return SCALE * self.steps / forecast_cases()[self.case].total_steps


@dataclass(frozen=True)
class Ended:
    """The metric at the end of a run; None if it is not finite."""

    score: float | None


def forecast_cases() -> dict[str, Case]:
    """Return the workloads of ``forecast.py`` by name."""
    return {case.name: case for group in cases().values() for case in group}


def train(job: Job) -> Ended:
    """Run a job. Divergence is a result, not an error."""
    if job.method == HOT_BASE:
        return train_hot_base(job)
    rule = RULES[job.method](steps=job.steps)
    of = forecast.Job(job.case, SCALE, job.seed)
    try:
        run = forecast.scaled_run(forecast_cases(), DATA, 1, rule, of)
    except FloatingPointError:  # no finite gradient for 50 steps in a row
        return Ended(None)
    assert run.steps == job.steps, f"{job} took {run.steps} steps."
    return Ended(run.score if math.isfinite(run.score) else None)


def train_hot_base(job: Job) -> Ended:
    """Run a base run with the LR of a job."""
    case = forecast_cases()[job.case]
    lr = job.hotter * case.hyperparameters["lr"]
    hot = replace(case, hyperparameters={**case.hyperparameters, "lr": lr})
    try:
        score = forecast.base_run(hot, job.seed).score
    except FloatingPointError:
        return Ended(None)
    return Ended(score if math.isfinite(score) else None)


def jobs(seed: int) -> list[Job]:
    """Return the jobs of one seed with the rules."""
    paced = forecast.read_runs(ROOT / forecast.KEPT, forecast.Job, forecast.Scaled)
    return [
        Job(name, method, seed, paced[forecast.Job(name, SCALE, seed)].steps)
        for name in forecast_cases()
        for method in RULES
    ]


def hot_jobs() -> list[Job]:
    """Return the base runs with a larger LR: of the workloads on which LR × S ended
    better than AdaScale, with the seeds of LR × S.
    """
    ahead = {row.workload for row in forecast_rows() if row.behind_linear}
    return [
        replace(job, method=HOT_BASE)
        for job in read_runs(ROOT / KEPT, Job, Ended)
        if job.case in ahead and job.method == "LR × S"
    ]


def rounds(results: dict[Job, Ended]) -> Iterator[tuple[str, list[Job]]]:
    """Yield the jobs of each seed, then those that depend on them."""
    for seed in SEEDS:
        yield f"seed {seed}", jobs(seed)
        yield f"seed {seed}, base runs with a larger LR", hot_jobs()


def forecast_rows() -> Iterator[Row]:
    """Yield the rows of the study of forecasts."""
    scores = forecast.base_scores(ROOT / forecast.KEPT_BASES)
    runs = forecast.read_runs(ROOT / forecast.KEPT, forecast.Job, forecast.Scaled)
    shortened = momentum.runs_of_forecast()
    others = read_runs(ROOT / KEPT, Job, Ended)
    of = forecast_cases()
    for name, by_seed in scores.items():
        at_base = list(by_seed.values())
        sign = 1 if of[name].is_accuracy else -1

        def better(
            ended: Sequence[float | None],
            steps: Sequence[int],
            sign: int = sign,
            at_base: Sequence[float] = at_base,
        ) -> Outcome:
            finite = [score for score in ended if score is not None]
            by = sign * (statistics.mean(finite or [0]) - statistics.mean(at_base))
            return Outcome(
                by if len(finite) == len(ended) else math.nan, statistics.mean(steps)
            )

        found = {
            method: [job for job in others if (job.case, job.method) == (name, method)]
            for method in (*RULES, HOT_BASE)
        }
        fixed, own = (
            [run for job, run in kept.items() if (job.case, job.scale) == (name, SCALE)]
            for kept in (runs, shortened)
        )
        outcomes = [
            better([run.score for run in each], [run.steps for run in each])
            for each in (fixed, own)
            if each
        ]
        yield Row(
            "forecast",
            name,
            "SGD",
            "accuracy" if of[name].is_accuracy else "error",
            of[name].total_steps,
            statistics.stdev(at_base) / math.sqrt(len(at_base)),
            outcomes[-1],
            dict(zip([FIXED], outcomes[:-1], strict=False))
            | {
                method: better(
                    [others[job].score for job in of_method],
                    [job.steps for job in of_method],
                )
                for method, of_method in found.items()
                if of_method
            },
        )


def with_hot_base(rows: list[Row]) -> list[Row]:
    """Return the workloads on which LR × S ended better than AdaScale, and which have
    base runs with a larger LR.
    """
    return [row for row in rows if row.behind_linear and HOT_BASE in row.others]


def ahead_of_linear(rows: list[Row]) -> str:
    """Return in words on how many of these the base run with a larger LR ended better
    than LR × S.
    """
    compared = with_hot_base(rows)
    ahead = sum(row.others[HOT_BASE].by > row.others["LR × S"].by for row in compared)
    return f"{ahead} of {len(compared)}"


def hot_base_section(rows: list[Row]) -> list[str]:
    """Return the section on the workloads on which LR × S ended better."""
    lines = []
    for row in with_hot_base(rows):
        hot = row.others[HOT_BASE]
        hotter = SCALE * hot.steps / row.total_steps
        linear = row.others["LR × S"]
        lines.append(
            [
                row.workload,
                f"{hotter:.2f}",
                hot.cell(row.error),
                linear.cell(row.error),
                row.own.cell(row.error),
            ]
        )
    head = ["workload", "S·n/T", "base run at that LR", "LR × S", "AdaScale"]
    return [
        "## Where LR × S ends better than AdaScale",
        "The LRs of all n steps of LR × S add up to S·n/T times those of the base run. "
        "Where the base run's LR lies below the best one, that is an "
        "advantage of a larger LR, and not of the rule. The workloads of "
        "[forecast](forecast.md) have LRs that were not searched. So here is the base "
        "run with S·n/T times its LR; by how much each ended better than the base run. "
        f"On {ahead_of_linear(rows)} that base run ended better than LR × S.",
        markdown(head, lines),
    ]


def seeds_beside() -> str:
    """Return in words the number of seeds of the methods beside AdaScale."""
    ran = read_runs(ROOT / KEPT, Job, Ended)
    return count(list({job.seed for job in ran}), "seed")


# ---- all workloads -------------------------------------------------------------------


def every_row() -> list[Row]:
    """Return the rows of all studies with kept runs."""

    def kept(path: str) -> Results:
        return comparison.read(ROOT / path)

    rows: list[Row] = []
    for study, plan, path, names in (
        (
            "transfer",
            transfer.parse([])[1],
            transfer.KEPT,
            {"LR × S": "LSW+", "LR × √S": "√", "unscaled": "unscaled"},
        ),
        (
            "at-size",
            at_size.parse([])[1],
            at_size.KEPT,
            {"LR × S": "linear", "LR × √S": "√", "unscaled": "unscaled"},
        ),
    ):
        rows += rows_of(
            study,
            "SGD",
            plan,
            kept(path),
            {**names, FIXED: BASE},
            MEMORY,
        )
    rows += forecast_rows()
    names = {"LR × S": "LR × S", "LR × √S": "√S", "unscaled": "unscaled"}
    for name, own in (("adamw", BASE), ("lion", "β^r"), ("muon", "default")):
        of = optimizers.STUDIES[name]
        plan, results = optimizers.parse([name])[1], kept(of.kept)
        questions = optimizers.questions(plan, results)
        if questions is not None:
            rows += rows_of(
                "adamw",
                "SGD",
                questions.momentum,
                results,
                {**names, FIXED: BASE},
                MEMORY,
            )
        ran = {k: v for k, v in names.items() if v in plan.comparison.methods}
        rows += rows_of(name, of.title, plan, results, ran, own)
    return rows


def table(rows: list[Row]) -> str:
    """Return the table of all rows."""
    lines = []
    for row in rows:
        share = row.own.steps / row.total_steps
        others = [
            found.cell(row.error) if (found := row.others.get(name)) else ""
            for name in (FIXED, *OTHERS)
        ]
        lines.append(
            [
                f"[{row.study}]({row.study}.md)",
                f"{row.workload}, {row.metric}",
                row.optimizer,
                row.own.cell(row.error) + (f" ± {row.error:.3f}" if row.error else ""),
                "" if math.isnan(share) else f"{share:.2f}",
                *others,
            ]
        )
    head = ["study", "workload", "optimizer", "AdaScale", "steps / T", FIXED, *OTHERS]
    return markdown(head, lines)


def counts(rows: list[Row]) -> str:
    """Return in words how many workloads are worse than their base runs."""

    def worse(of: list[Row]) -> str:
        return f"{sum(row.worse for row in of)} of {len(of)}"

    def ahead(pairs: list[tuple[Row, Outcome]]) -> str:
        return f"{sum(found.by > row.own.by for row, found in pairs)} of {len(pairs)}"

    parts = []
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        of = [row for row in rows if row.optimizer == optimizer]
        parts.append(f"{optimizer} {worse(of)}")
    sentences = [f"Worse than the base run: {worse(rows)}; {', '.join(parts)}."]
    for name in (FIXED, *OTHERS):
        pairs = [(row, row.others[name]) for row in rows if name in row.others]
        lost = sum(not found.by >= -row.error for row, found in pairs)
        own = worse([row for row, _ in pairs])
        sentences.append(
            f"{name}{', with as many steps' if name in OTHERS else ''}: {lost} of {len(pairs)}, where AdaScale is "
            f"worse on {own}. It ends better than AdaScale on {ahead(pairs)}, of which "
            f"SGD {ahead([pair for pair in pairs if pair[0].optimizer == 'SGD'])}."
        )
    return "\n".join(f"- {sentence}" for sentence in sentences)


def write() -> None:
    """Write the page from the kept runs."""
    rows = every_row()
    write_page(
        PAGE,
        [
            "# Every workload at S = 16",
            "By how much each method ended better (+) or worse (−) than the base run, "
            "with the same seeds; ± is the standard error of the mean at S = 1. Bold: "
            "worse by more than that error, or a run that failed. The workloads of "
            "[forecast](forecast.md) have three base runs with other seeds. "
            "Written by `python benchmarks/studies/every_workload.py` from the kept "
            "runs. AdaScale has the default rule: m^√r for SGD with a momentum above "
            "1/2, beside a fixed m ([momentum](momentum.md)). LR × S, LR × √S and the "
            "unscaled LR have as many steps as AdaScale with a fixed m, or as the study "
            "says. On the workloads of forecast they have "
            f"{seeds_beside()}, and the clipping that a run with a recipe has, as "
            "AdaScale there; where a cell is empty they did not run. The 25 M "
            "parameters of [one GPU](gpu-transfer.md), one seed, are not among them.",
            counts(rows),
            table(rows),
            *hot_base_section(rows),
        ],
    )
    print(counts(rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    if not parser.parse_args(argv).report_only:
        # the batch exceeds the noise scale almost everywhere
        warnings.simplefilter("ignore")
        prepare_process()
        run_all(
            ROOT / KEPT,
            Job,
            Ended,
            train,
            rounds,
            lambda job, ended: f"{job}: {ended.score}",
        )
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
