"""Does a recipe survive the larger batch? Eight-trial searches, and the runs of what
they choose, clipped or not.

    python benchmarks/studies/carry_over.py               what is missing, and the tables of all runs
    python benchmarks/studies/carry_over.py --length 3    the same with three times as many steps

A search is that of ``tune_recipe`` with its default options, without Ray's processes:
Tune's random draws, base runs in this process, ASHA. The config of the best trial then
runs at S = 1, 8 and 16 with three seeds, at S > 1 clipped at a multiple of the expected
norm. All runs are kept in ``benchmarks/studies/kept/carry_over.jsonl``, each once.
Workers are passes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from carry_over_workloads import CASES
from ray.tune.search.sample import _BackwardsCompatibleNumpyRng
from ray.tune.search.variant_generator import generate_variants
from study import KeptRuns, announce, prepare_process

from ray_adascale import AdaScaleConfig, LocalBackend, Run, seed_everything
from ray_adascale.run.base.base_run import base_config
from ray_adascale.run.boundary.stage import StepReport
from ray_adascale.workload import build

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, markdown

KEPT = ROOT / "benchmarks" / "studies" / "kept" / "carry_over.jsonl"
TRIALS, SEARCHES = 8, (0, 1, 2)
SCALES, SEEDS = (1, 8, 16), (101, 102, 103)
PASSES = 2
CLIPS = (0.0, 2.0, 3.0)
RUNGS = (1 / 8, 1 / 2)
"""Shares of T at which ASHA compares trials."""
WINDOW = 0.05
"""Memory of the clipping threshold's average as a share of T, as of the averages of
the gain.
"""
UNMEASURED = 10
"""Steps before the first that may be clipped."""


# ---- runs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        workload: Its name in ``CASES``.
        config: Hyperparameters as JSON.
        seed: Of weights and order.
        scale: S.
        clip: κ, clip at this multiple of the expected norm; 0: no clipping.
        cutoffs: The metric below which ASHA stops the trial at T/8 and at T/2; None:
            none.
        length: T in units of the workload's.
    """

    workload: str
    config: str
    seed: int
    scale: int = 1
    clip: float = 0.0
    cutoffs: tuple[float | None, ...] = ()
    length: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))  # JSON has lists

    @property
    def lr(self) -> float:
        """The peak LR."""
        return float(json.loads(self.config)["lr"])

    @property
    def total_steps(self) -> int:
        """T."""
        return CASES[self.workload].total_steps * self.length


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        score: The metric at the end, larger is better; None: the run diverged, or ASHA
            stopped it.
        scores: (τ/T, metric) of each evaluation.
        tau: τ/T at the end.
        steps: Optimizer steps, skipped ones included.
        skipped: Skipped steps.
        clipped: Clipped steps.
        cpu_s: CPU seconds.
        date: Day of the run.
        stopped: Whether ASHA stopped it.
    """

    score: float | None
    scores: list[list[float]]
    tau: float
    steps: int
    skipped: int
    clipped: int
    cpu_s: float
    date: str
    stopped: bool = False


Runs = Callable[[Job], Result]
"""Returns the result of a job, from the kept ones or by a run."""


def threshold(kappa: float, square: float, weight: float, steps: int) -> float:
    """Return the largest norm κ·√(average of ‖ḡ‖²), or ∞ in the first steps. E‖ḡ‖² =
    μ² + σ²/S.
    """
    return (
        kappa * math.sqrt(square / weight)
        if steps >= UNMEASURED and weight > 0
        else math.inf
    )


class Clipping:
    """Clips a run at κ times the root mean square of its own gradient norms over
    effective time.

    At a constant S the average of ‖ḡ‖² estimates μ² + σ²/S, at S = 1 too. A clipped
    step adds its clipped norm.
    """

    def __init__(self, run: Run, kappa: float) -> None:
        self._run, self._kappa = run, kappa
        self._square, self._weight, self._steps = 0.0, 0.0, 0
        self.clipped = 0

    def step(self) -> bool:
        """Clip and end the pass, as ``run.step()``."""
        norm = self._run.clip_grad_norm_(math.inf)
        if norm is None:
            return self._run.step()
        limit = threshold(self._kappa, self._square, self._weight, self._steps)
        size, tau = float(norm), self._run.effective_steps
        if size > limit:
            self._run.clip_grad_norm_(limit)
            self.clipped += 1
        ended = self._run.step()
        if math.isfinite(size):
            theta = math.exp(
                -(self._run.effective_steps - tau) / (WINDOW * self._run.total_steps)
            )
            self._square = theta * self._square + (1 - theta) * min(size, limit) ** 2
            self._weight = theta * self._weight + (1 - theta)
            self._steps += 1
        return ended


class Scores(LocalBackend):
    """Keeps the metric of each evaluation. As in a search, one that is not finite
    ends the run.
    """

    def __init__(self, metric: str, sign: int) -> None:
        super().__init__(device="cpu")
        self._metric, self._sign = metric, sign
        self.scores: list[list[float]] = []

    def report(self, report: StepReport, folder: Path | None) -> None:
        if not report.evaluated:
            return
        value = self._sign * float(report.metrics[self._metric])
        if not math.isfinite(value):
            raise FloatingPointError(f"{self._metric} is {value}")
        self.scores.append(
            [
                round(report.effective_steps / report.schedule.total_steps, 4),
                round(value, 6),
            ]
        )


def train(job: Job) -> Result:
    """Run a job."""
    began, case = time.process_time(), CASES[job.workload]
    if job.scale == 1:
        settings = base_config(
            None, case.base_batch_size, job.total_steps, None, job.seed
        )
    else:
        settings = AdaScaleConfig(
            base_batch_size=case.base_batch_size,
            total_steps=job.total_steps,
            per_worker_batch_size=case.base_batch_size * job.scale // PASSES,
            accumulation=PASSES,
            rule="adascale",
            seed=job.seed,
        )
    hyperparameters = json.loads(job.config)
    seed_everything(job.seed)
    built = build(case.workload, hyperparameters, settings)
    backend = Scores(built.metric, 1 if case.maximize else -1)
    run = Run.of(built, settings, backend=backend)
    clipping = Clipping(run, job.clip) if job.clip else None
    score, stopped = None, False
    try:
        for batch in run:
            run.backward(built.loss(run.model, batch))
            _ = clipping.step() if clipping else run.step()
            stopped = below(job.cutoffs, backend.scores)
            if stopped:
                break
        score = backend.scores[-1][1] if backend.scores and not stopped else None
    except (
        FloatingPointError
    ):  # no finite gradient for 50 steps in a row, or a metric that is not finite
        pass
    return Result(
        score=score,
        scores=backend.scores,
        tau=round(run.effective_steps / job.total_steps, 4),
        steps=run.state.iterations,
        skipped=run.state.iterations - run.optimizer.steps,
        clipped=clipping.clipped if clipping else 0,
        cpu_s=round(time.process_time() - began, 2),
        date=str(datetime.datetime.now(datetime.UTC).date()),
        stopped=stopped,
    )


# ---- the search ----------------------------------------------------------------------


@functools.cache
def draws(workload: str, seed: int) -> tuple[str, ...]:
    """Return the configs that ``tune_recipe`` draws by default with this seed, as
    JSON.
    """
    # as BasicVariantGenerator(random_state=seed) has it
    stream = _BackwardsCompatibleNumpyRng(seed)
    space = {"config": CASES[workload].space}
    variants = [
        list(generate_variants(space, random_state=stream)) for _ in range(TRIALS)
    ]
    # The last bits of a draw depend on the processor's exponential function.
    rounded = [
        {k: float(f"{v:.12g}") for k, v in spec["config"].items()}
        for [(_, spec)] in variants
    ]
    return tuple(map(json.dumps, rounded))


def at_rung(scores: Sequence[Sequence[float]], rung: float) -> float | None:
    """Return the metric of the first evaluation at or after a share of T, before T;
    None without one.
    """
    return next((score for tau, score in scores if rung <= tau < 1), None)


def cutoffs(earlier: Sequence[Result]) -> tuple[float | None, ...]:
    """Return the metrics below which ASHA, as ``tune_recipe`` sets it up, stops the
    next trial at T/8 and at T/2.

    The trials report in their order. At each rung that is also the order of trials
    which run at the same time.
    """
    at = [
        [
            score
            for trial in earlier
            if (score := at_rung(trial.scores, rung)) is not None
        ]
        for rung in RUNGS
    ]
    return tuple(float(np.percentile(scores, 75)) if scores else None for scores in at)


def below(cutoffs: Sequence[float | None], scores: Sequence[Sequence[float]]) -> bool:
    """Return whether a trial with these evaluations so far is below the cutoff of a
    rung.
    """
    found = [
        (at_rung(scores, rung), cutoff)
        for rung, cutoff in zip(RUNGS, cutoffs, strict=False)
    ]
    return any(
        score is not None and cutoff is not None and score < cutoff
        for score, cutoff in found
    )


def search(
    runs: Runs, workload: str, seed: int, length: int
) -> list[tuple[Job, Result]]:
    """Return the trials that reached T in the search with this seed, best first."""
    rows: list[tuple[Job, Result]] = []
    for config in draws(workload, seed):
        job = Job(
            workload,
            config,
            seed,
            cutoffs=cutoffs([trial for _, trial in rows]),
            length=length,
        )
        rows.append((job, runs(job)))
    finished = [(job, trial) for job, trial in rows if trial.score is not None]
    return sorted(finished, key=lambda pair: -float(pair[1].score or 0))


# ---- cells and tables ----------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A recipe and its runs: ``scores[scale]`` has the metric of each seed, None
    where the run diverged.
    """

    lr: float
    scores: dict[int, list[float | None]]
    failed_at: list[float]
    clipped: dict[int, float]

    @property
    def finite(self) -> dict[int, bool]:
        """Whether all runs of each scale ended finite."""
        return {scale: None not in found for scale, found in self.scores.items()}

    def mean(self, scale: int) -> float:
        """Return the mean over the seeds that ended finite; −∞ without any."""
        found = [score for score in self.scores[scale] if score is not None]
        return statistics.mean(found) if found else -math.inf


def cell(runs: Runs, workload: str, seed: int, clip: float, length: int) -> Cell:
    """Return what becomes of a search's recipe, clipped at κ at S > 1."""
    base = replace(search(runs, workload, seed, length)[0][0], cutoffs=())
    found = {
        scale: [
            runs(replace(base, seed=s, scale=scale, clip=clip if scale > 1 else 0.0))
            for s in SEEDS
        ]
        for scale in SCALES
    }
    return Cell(
        base.lr,
        {scale: [run.score for run in each] for scale, each in found.items()},
        [run.tau for scale in SCALES[1:] for run in found[scale] if run.score is None],
        {
            scale: sum(r.clipped for r in each) / sum(r.steps for r in each)
            for scale, each in found.items()
        },
    )


def deviation(cells: Iterable[Cell]) -> float:
    """Return the deviation of a base run's metric over seeds: the median variance of
    a workload's recipes, corrected.
    """
    found = [[s for s in each.scores[1] if s is not None] for each in cells]
    variances = [statistics.variance(scores) for scores in found if len(scores) > 2]
    # χ² with two degrees
    return (
        math.sqrt(statistics.median(variances) / math.log(2)) if variances else math.nan
    )


def survives(each: Cell, sd: float, errors: float) -> bool:
    """Return whether all runs are finite and each scale's mean is at most so many
    standard errors worse than at S = 1.

    The error is that of the difference of two means of three seeds.
    """
    worst = (
        min(each.mean(scale) - each.mean(1) for scale in SCALES[1:])
        if all(each.finite.values())
        else -math.inf
    )
    return worst >= -errors * sd * math.sqrt(2 / len(SEEDS))


Cells = dict[tuple[str, int, float], Cell]


def share(values: Sequence[bool]) -> str:
    """Return "5 of 9"."""
    return f"{sum(values)} of {len(values)}"


def deviations(cells: Cells) -> dict[str, float]:
    """Return each workload's deviation over seeds."""
    return {
        w: deviation([c for (x, _, clip), c in cells.items() if (x, clip) == (w, 0.0)])
        for w in CASES
    }


def survival_table(cells: Cells) -> str:
    """Return a row for each κ, over all searches."""
    sds, rows = deviations(cells), []
    for kappa in CLIPS:
        of = {key: each for key, each in cells.items() if key[2] == kappa}
        finite = [
            share([each.finite[scale] for each in of.values()]) for scale in SCALES
        ]
        near = [
            share([survives(each, sds[key[0]], errors) for key, each in of.items()])
            for errors in (1, 2)
        ]
        rows.append([f"{kappa:g}x" if kappa else "none", *finite, *near])
    head = [
        "clipped at S > 1",
        *(f"finite at S = {s}" for s in SCALES),
        "within 1 error",
        "within 2",
    ]
    return markdown(head, rows)


def scores_table(cells: Cells) -> str:
    """Return a row for each search of each workload: the mean metric at each scale."""
    sds, rows = deviations(cells), []
    for (workload, seed, kappa), each in sorted(
        cells.items(), key=lambda item: list(CASES).index(item[0][0])
    ):
        sign = 1 if CASES[workload].maximize else -1
        shown = [
            f"{sign * each.mean(s):.4f}"
            + ("" if each.finite[s] else f" ({each.scores[s].count(None)} diverged)")
            for s in SCALES
        ]
        at = ", ".join(f"{tau:.2f}" for tau in sorted(each.failed_at))
        clipped = (
            ", ".join(f"{100 * each.clipped[s]:.1f}" for s in SCALES)
            if any(each.clipped.values())
            else ""
        )
        verdict = "yes" if survives(each, sds[workload], 1) else "no"
        rows.append(
            [
                f"{workload}, {seed}",
                f"{kappa:g}",
                f"{each.lr:.3g}",
                *shown,
                at,
                clipped,
                f"{sds[workload]:.2g}",
                verdict,
            ]
        )
    head = [
        "workload, search",
        "κ",
        "LR",
        *(f"S = {s}" for s in SCALES),
        "diverged at τ/T",
        "% clipped",
    ]
    return markdown([*head, "sd over seeds", "within 1 error"], rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--workloads", nargs="+", choices=list(CASES), default=list(CASES)
    )
    parser.add_argument(
        "--length", type=int, default=1, help="T in units of each workload's"
    )
    parser.add_argument("--json", type=Path, default=KEPT, help="kept runs")
    return parser.parse_args(argv)


def cells_of(runs: Runs, workloads: Sequence[str], length: int) -> Cells:
    """Return what becomes of each search's recipe with each κ."""
    keys = [(w, seed, clip) for clip in CLIPS for w in workloads for seed in SEARCHES]
    return {key: cell(runs, *key, length) for key in keys}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_process()
    announce(args.json)
    kept = KeptRuns(args.json, Job, Result, train)

    def runs(job: Job) -> Result:
        for _, result in kept.run([job]):
            print(job, result.score, f"{result.cpu_s} s", file=sys.stderr, flush=True)
        return kept.results[job]

    cells = cells_of(runs, args.workloads, args.length)
    print(survival_table(cells), scores_table(cells), sep="\n\n")
    print(
        "\n"
        f"{len(kept.results)} runs, "
        f"{sum(r.cpu_s for r in kept.results.values()) / 3600:.2f} CPU hours"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
