"""Does a recipe survive the larger batch? Eight-trial searches, the runs of what they choose, and more careful choices.

    python benchmarks/studies/carry_over.py --rules now            the default search, all workloads
    python benchmarks/studies/carry_over.py --first                all candidates on the workloads for the choice
    python benchmarks/studies/carry_over.py --report-only          the tables of the kept runs

A search is that of ``tune_recipe`` with its default options, without Ray's processes: Tune's random draws, base runs in this
process, ASHA. A *choice rule* is a function from the finished trials to a config. It may ask for further runs, whose examples
count as the rule's cost. The chosen config then runs at S = 1, 8 and 16 with three seeds. All runs are kept in
``benchmarks/studies/kept/carry_over.jsonl``, each once, so that a rule is evaluated from kept runs. Workers are passes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from carry_over_workloads import CASES, FIRST
from ray.tune.search.sample import _BackwardsCompatibleNumpyRng
from ray.tune.search.variant_generator import generate_variants
from study import KeptRuns, announce, prepare_process, read_runs

from ray_adascale import AdaScaleConfig, LocalBackend, Run, seed_everything
from ray_adascale.forecast.replay import Forecaster
from ray_adascale.recipe import NoiseProbe, probe_steps
from ray_adascale.run.base.base_noise import NoiseRecorder
from ray_adascale.run.base.base_run import BaseResult, base_config, freeze, momentum_of
from ray_adascale.run.boundary.stage import StepReport
from ray_adascale.workload import build

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, markdown

KEPT = ROOT / "benchmarks" / "studies" / "kept" / "carry_over.jsonl"
TRIALS, SEARCHES = 8, (0, 1, 2)
SCALES, SEEDS = (1, 8, 16), (101, 102, 103)
PASSES = 2
RUNGS = (1 / 8, 1 / 2)
"""Shares of T at which ASHA compares trials."""
WINDOW = 0.05
"""Memory of the clipping threshold's average as a share of T, as of the averages of the gain."""
UNMEASURED = 10
"""Steps before the first that may be clipped."""


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        workload: Its name in ``CASES``.
        config: Hyperparameters as JSON.
        seed: Of weights and order.
        scale: S.
        clip: κ, clip at this multiple of the expected norm; 0: no clipping.
        until: Share of T at which the run stops.
        measured: Whether to measure the noise and to forecast, as in a trial.
        cutoffs: The metric below which ASHA stops the trial at T/8 and at T/2; None: none.
        length: T in units of the workload's.
    """

    workload: str
    config: str
    seed: int
    scale: int = 1
    clip: float = 0.0
    until: float = 1.0
    measured: bool = False
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

    def times(self, factor: float, **changes: Any) -> Job:
        """Return the job with another peak LR."""
        config = {**json.loads(self.config), "lr": self.lr * factor}
        return replace(self.plain, config=json.dumps(config), **changes)

    @property
    def plain(self) -> Job:
        """The job as no trial of a search: neither measured nor stopped."""
        return replace(self, measured=False, cutoffs=())


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        score: The metric at the end, larger is better; None: the run diverged, or ASHA stopped it.
        scores: (τ/T, metric) of each evaluation.
        tau: τ/T at the end.
        steps: Optimizer steps, skipped ones included.
        skipped: Skipped steps.
        clipped: Clipped steps.
        peak: For each scale the forecast's largest lr·r in units of the peak LR, and τ/T where it is; of measured runs.
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
    peak: dict[str, list[float]]
    cpu_s: float
    date: str
    stopped: bool = False

    def at(self, share: float) -> float | None:
        """Return the metric of the first evaluation at or after this share of T."""
        return next((score for tau, score in self.scores if tau >= share - 1e-9), None)


Results = dict[Job, Result]


def threshold(kappa: float, square: float, weight: float, steps: int) -> float:
    """Return the largest norm κ·√(average of ‖ḡ‖²), or ∞ in the first steps. E‖ḡ‖² = μ² + σ²/S."""
    return kappa * math.sqrt(square / weight) if steps >= UNMEASURED and weight > 0 else math.inf


class Clipping:
    """Clips a run at κ times the root mean square of its own gradient norms over effective time.

    At a constant S the average of ‖ḡ‖² estimates μ² + σ²/S, at S = 1 too. A clipped step adds its clipped norm.
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
            theta = math.exp(-(self._run.effective_steps - tau) / (WINDOW * self._run.total_steps))
            self._square = theta * self._square + (1 - theta) * min(size, limit) ** 2
            self._weight = theta * self._weight + (1 - theta)
            self._steps += 1
        return ended


class Scores(LocalBackend):
    """Keeps the metric of each evaluation. As in a search, one that is not finite ends the run."""

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
        self.scores.append([round(report.effective_steps / report.schedule.total_steps, 4), round(value, 6)])


def train(job: Job) -> Result:
    """Run a job."""
    began, case = time.process_time(), CASES[job.workload]
    if job.scale == 1:
        settings = base_config(None, case.base_batch_size, job.total_steps, None, job.seed)
    else:
        settings = AdaScaleConfig(
            base_batch_size=case.base_batch_size,
            total_steps=job.total_steps,
            per_worker_batch_size=case.base_batch_size * job.scale // PASSES,
            accumulation=PASSES,
            seed=job.seed,
        )
    hyperparameters = json.loads(job.config)
    seed_everything(job.seed)
    built = build(case.workload, hyperparameters, settings)
    backend = Scores(built.metric, 1 if case.maximize else -1)
    run = Run.of(built, settings, backend=backend)
    noise: list[NoiseProbe] = []
    recorder = NoiseRecorder(run, built, probe_steps(job.total_steps), noise) if job.measured else None
    clipping = Clipping(run, job.clip) if job.clip else None
    momentum, score, stopped = momentum_of(built.optimizer), None, False
    try:
        for batch in run:
            if recorder:
                recorder.begin(batch)
            run.backward(built.loss(run.model, batch))
            if recorder:
                recorder.end()
            ended = clipping.step() if clipping else run.step()
            stopped = below(job.cutoffs, backend.scores)
            if stopped or (ended and job.until < 1 and run.effective_steps >= job.until * job.total_steps):
                break
        score = backend.scores[-1][1] if backend.scores and not stopped else None
    except FloatingPointError:  # no finite gradient for 50 steps in a row, or a metric that is not finite
        pass
    peak = {}
    if recorder and score is not None and job.until == 1:
        outcome = BaseResult(
            metric=built.metric,
            mode=built.mode,
            score=score,
            schedule=run.base_schedule,
            noise=noise,
            momentum=momentum,
        )
        recipe = freeze(outcome, workload=case.workload, hyperparameters=hyperparameters, config=settings, search={})
        peak = {str(scale): forecast_peak(Forecaster(recipe), recipe.lr_curve[0], scale) for scale in SCALES[1:]}
    return Result(
        score=score,
        scores=backend.scores,
        tau=round(run.effective_steps / job.total_steps, 4),
        steps=run.state.iterations,
        skipped=run.state.iterations - run.optimizer.steps,
        clipped=clipping.clipped if clipping else 0,
        peak=peak,
        cpu_s=round(time.process_time() - began, 2),
        date=str(datetime.datetime.now(datetime.UTC).date()),
        stopped=stopped,
    )


def forecast_peak(forecaster: Forecaster, curve: Sequence[float], scale: int) -> list[float]:
    """Return the largest lr·r of the forecast in units of the peak LR, and τ/T where it is."""
    found = forecaster.at(scale).expected
    pushed = [curve[min(int(tau), len(curve) - 1)] * gain for tau, gain in zip(found.tau, found.gains, strict=True)]
    at = max(range(len(pushed)), key=pushed.__getitem__)
    return [round(pushed[at] / max(curve), 3), round(found.tau[at] / found.total_steps, 3)]


class Missing(Exception):
    """Runs that a rule or a table needs and that are not kept yet."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(f"{len(jobs)} runs")
        self.jobs = jobs


def need(results: Results, jobs: Sequence[Job]) -> list[Result]:
    """Return the results of these jobs.

    Raises:
        Missing: Some are not kept yet.
    """
    missing = [job for job in jobs if job not in results]
    if missing:
        raise Missing(missing)
    return [results[job] for job in jobs]


# ---- the search ------------------------------------------------------------------------------------------------------


@functools.cache
def draws(workload: str, seed: int) -> tuple[str, ...]:
    """Return the configs that ``tune_recipe`` draws by default with this seed, as JSON."""
    stream = _BackwardsCompatibleNumpyRng(seed)  # as BasicVariantGenerator(random_state=seed) has it
    space = {"config": CASES[workload].space}
    variants = [list(generate_variants(space, random_state=stream)) for _ in range(TRIALS)]
    return tuple(json.dumps(spec["config"]) for [(_, spec)] in variants)


def at_rung(scores: Sequence[Sequence[float]], rung: float) -> float | None:
    """Return the metric of the first evaluation at or after a share of T, before T; None without one."""
    return next((score for tau, score in scores if rung <= tau < 1), None)


def cutoffs(earlier: Sequence[Result]) -> tuple[float | None, ...]:
    """Return the metrics below which ASHA, as ``tune_recipe`` sets it up, stops the next trial at T/8 and at T/2.

    The trials report in their order. At each rung that is also the order of trials which run at the same time.
    """
    at = [[score for trial in earlier if (score := at_rung(trial.scores, rung)) is not None] for rung in RUNGS]
    return tuple(float(np.percentile(scores, 75)) if scores else None for scores in at)


def below(cutoffs: Sequence[float | None], scores: Sequence[Sequence[float]]) -> bool:
    """Return whether a trial with these evaluations so far is below the cutoff of a rung."""
    found = [(at_rung(scores, rung), cutoff) for rung, cutoff in zip(RUNGS, cutoffs, strict=False)]
    return any(score is not None and cutoff is not None and score < cutoff for score, cutoff in found)


@dataclass(frozen=True)
class Search:
    """A search that has ended.

    Attributes:
        ranked: Jobs and results of the trials that reached T, best first.
        diverged: LRs of the trials that diverged.
        cost: Examples of all trials, in base runs.
    """

    ranked: list[tuple[Job, Result]]
    diverged: list[float]
    cost: float


def base_runs(job: Job, result: Result) -> float:
    """Return the examples of a run in those of a base run."""
    return result.steps * job.scale / job.total_steps


def search(results: Results, workload: str, seed: int, length: int, clip: float = 0.0) -> Search:
    """Return the search with this seed."""
    rows: list[tuple[Job, Result]] = []
    for config in draws(workload, seed):
        ends = cutoffs([trial for _, trial in rows])
        job = Job(workload, config, seed, clip=clip, measured=True, cutoffs=ends, length=length)
        (result,) = need(results, [job])
        rows.append((job, result))
    finished = [(job, trial) for job, trial in rows if trial.score is not None]
    return Search(
        sorted(finished, key=lambda pair: -float(pair[1].score or 0)),
        [job.lr for job, trial in rows if trial.score is None and not trial.stopped],
        sum(base_runs(*row) for row in rows),
    )


# ---- choice rules ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a rule has chosen.

    Attributes:
        job: The chosen config, as the job of a base run.
        extra: Examples beside those of the search, in base runs.
        clip_at_scale: κ of the runs at S > 1.
    """

    job: Job
    extra: float = 0.0
    clip_at_scale: float = 0.0


def now(results: Results, found: Search) -> Choice:
    """The best trial, as ``tune_recipe`` chooses."""
    return Choice(found.ranked[0][0])


def half(results: Results, found: Search) -> Choice:
    """Half the best trial's LR, without a look."""
    return Choice(found.ranked[0][0].times(0.5))


def most_conservative(found: Search, noise: float) -> Job:
    """Return the trial with the smallest LR among those within ``noise`` of the best."""
    best = float(found.ranked[0][1].score or 0)
    near = [job for job, trial in found.ranked if float(trial.score or 0) >= best - noise]
    return min(near, key=lambda job: job.lr)


def one_error_evaluations(results: Results, found: Search) -> Choice:
    """One standard error, the error being the deviation of the best trial's last three evaluations."""
    last = [score for _, score in found.ranked[0][1].scores[-3:]]
    return Choice(most_conservative(found, statistics.stdev(last) if len(last) > 1 else 0.0))


def again(job: Job, count: int) -> list[Job]:
    """Return the job with the next seeds, as ``Search(repeats=count)`` repeats it."""
    return [replace(job.plain, seed=job.seed + 1 + i) for i in range(count)]


def one_error_repeats(results: Results, found: Search) -> Choice:
    """One standard error, the error being the deviation of the best trial and two repeats of it; a failure halves the LR."""
    best, trial = found.ranked[0]
    jobs = again(best, 2)
    repeats = need(results, jobs)
    extra = sum(map(base_runs, jobs, repeats))
    scores = [each.score for each in (trial, *repeats)]
    if None in scores:
        return Choice(best.times(0.5), extra)
    return Choice(most_conservative(found, statistics.stdev(map(float, scores))), extra)  # type: ignore[arg-type]


def repeats_of_best(results: Results, found: Search) -> Choice:
    """The best mean of the best three trials and two repeats of each; a trial with a failure is out."""
    jobs = [job for best, _ in found.ranked[:3] for job in again(best, 2)]
    repeats = need(results, jobs)
    means: list[tuple[float, Job]] = []
    for number, (best, _) in enumerate(found.ranked[:3]):
        scores = [each.score for each in repeats[2 * number : 2 * number + 2]]
        means.append((-math.inf if None in scores else statistics.mean(map(float, scores)), best))  # type: ignore[arg-type]
    return Choice(max(means, key=lambda pair: pair[0])[1], sum(map(base_runs, jobs, repeats)))


def went_well(tried: Result, trial: Result) -> bool:
    """Return whether a try of a schedule's first part ended better than the base run was after a tenth of its steps."""
    return tried.score is not None and tried.score >= float(trial.at(0.1) or -math.inf)


def careful(results: Results, found: Search, tried: Callable[[Job, Result], Job], most: int = 4) -> Choice:
    """Return the best trial's config, with an LR halved until the try of it goes well.

    Args:
        results: The kept runs.
        found: The search.
        tried: From the job to take and the best trial to the job that tries it.
        most: Largest number of tries.
    """
    (job, trial), extra = found.ranked[0], 0.0
    for _ in range(most):
        test = tried(job, trial)
        [outcome] = need(results, [test])
        extra += base_runs(test, outcome)
        if went_well(outcome, trial):
            break
        job = job.times(0.5)
    return Choice(job, extra)


def past_peak(trial: Result, scale: int) -> float:
    """Return the share of T that a try takes: a tenth past the forecast's peak of lr·r, on an evaluation, at most 0.4."""
    return min(math.ceil((trial.peak[str(scale)][1] + 0.1) * 10 - 1e-9) / 10, 0.4)


def headroom(results: Results, found: Search) -> Choice:
    """A try at S = 1 with the LR times the forecast's largest factor at S = 16."""

    def tried(job: Job, trial: Result) -> Job:
        return job.times(trial.peak["16"][0], until=past_peak(trial, 16))

    return careful(results, found, tried)


def rehearsal(results: Results, found: Search) -> Choice:
    """A try at S = 16."""
    return careful(results, found, lambda job, trial: replace(job.plain, scale=16, until=past_peak(trial, 16)))


def clip_at_scale(results: Results, found: Search, kappa: float = 2.0) -> Choice:
    """The best trial, clipped at S > 1 only."""
    return Choice(found.ranked[0][0], clip_at_scale=kappa)


Rule = Callable[[Results, Search], Choice]
RULES: dict[str, tuple[Rule, float]] = {
    "now": (now, 0.0),
    "half": (half, 0.0),
    "one error, evaluations": (one_error_evaluations, 0.0),
    "one error, repeats": (one_error_repeats, 0.0),
    "repeats": (repeats_of_best, 0.0),
    "headroom": (headroom, 0.0),
    "rehearsal": (rehearsal, 0.0),
    "clip at scale": (clip_at_scale, 0.0),
    "clip at 3": (functools.partial(clip_at_scale, kappa=3.0), 0.0),
    "clip": (functools.partial(clip_at_scale), 2.0),
}
"""Choice rules by name, each with the κ of its search's trials."""


# ---- cells and tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A recipe and its runs: ``scores[scale]`` has the metric of each seed, None where the run diverged."""

    lr: float
    cost: float
    searched: float
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


def cell(results: Results, workload: str, seed: int, name: str, length: int) -> Cell:
    """Return what a rule makes of a search.

    Raises:
        Missing: Runs are missing.
    """
    rule, clip = RULES[name]
    found = search(results, workload, seed, length, clip)
    plain = found if not clip else search(results, workload, seed, length)
    choice = rule(results, found)
    base = choice.job.plain
    jobs = {
        scale: [replace(base, seed=s, scale=scale, clip=clip if scale == 1 else choice.clip_at_scale) for s in SEEDS]
        for scale in SCALES
    }
    need(results, [job for each in jobs.values() for job in each])
    runs = {scale: [results[job] for job in each] for scale, each in jobs.items()}
    return Cell(
        base.lr,
        (found.cost + choice.extra) / plain.cost,
        plain.cost,
        {scale: [run.score for run in each] for scale, each in runs.items()},
        [run.tau for scale in SCALES[1:] for run in runs[scale] if run.score is None],
        {scale: sum(r.clipped for r in each) / sum(r.steps for r in each) for scale, each in runs.items()},
    )


def deviation(cells: Iterable[Cell]) -> float:
    """Return the deviation of a base run's metric over seeds: the median variance of a workload's recipes, corrected."""
    found = [[s for s in each.scores[1] if s is not None] for each in cells]
    variances = [statistics.variance(scores) for scores in found if len(scores) > 2]
    return math.sqrt(statistics.median(variances) / math.log(2)) if variances else math.nan  # χ² with two degrees


def survives(each: Cell, sd: float, errors: float) -> bool:
    """Return whether all runs are finite and each scale's mean is at most so many standard errors worse than at S = 1.

    The error is that of the difference of two means of three seeds.
    """
    worst = min(each.mean(scale) - each.mean(1) for scale in SCALES[1:]) if all(each.finite.values()) else -math.inf
    return worst >= -errors * sd * math.sqrt(2 / len(SEEDS))


Cells = dict[tuple[str, int, str], Cell]


def share(values: Sequence[bool]) -> str:
    """Return "5 of 9"."""
    return f"{sum(values)} of {len(values)}"


def deviations(cells: Cells) -> dict[str, float]:
    """Return each workload's deviation over seeds, of the recipes that are chosen now."""
    return {w: deviation([c for (x, _, name), c in cells.items() if x == w and name == "now"]) for w in CASES}


def rules_table(cells: Cells, workloads: Sequence[str]) -> str:
    """Return a row for each rule, over the searches that all rules have ended."""
    sds, rows = deviations(cells), []
    for name in RULES:
        of = {key[:2]: each for key, each in cells.items() if key[2] == name and key[0] in workloads}
        if not of:
            continue
        given = [
            (cells[*key, "now"].mean(1) - each.mean(1)) / sds[key[0]]
            for key, each in of.items()
            if (*key, "now") in cells and all(math.isfinite(c.mean(1)) for c in (each, cells[*key, "now"]))
        ]
        rows.append(
            [
                name,
                share([each.finite[1] for each in of.values()]),
                *(share([each.finite[scale] for each in of.values()]) for scale in SCALES[1:]),
                *(share([survives(each, sds[key[0]], errors) for key, each in of.items()]) for errors in (1, 2)),
                f"{statistics.mean(given):+.2f}, {statistics.median(given):+.2f}" if given else "",
                f"{sum(c.cost * c.searched for c in of.values()) / sum(c.searched for c in of.values()):.2f}",
                f"{max(c.cost for c in of.values()):.2f}",
            ]
        )
    head = ["choice", "finite at S = 1", *(f"at {s}" for s in SCALES[1:]), "within 1 error", "within 2"]
    return markdown([*head, "given up at S = 1, mean, median (sd of a run)", "cost", "largest cost"], rows)


def scores_table(cells: Cells, names: Sequence[str]) -> str:
    """Return a row for each search of each workload: the mean metric at each scale."""
    sds, rows = deviations(cells), []
    for (workload, seed, name), each in sorted(cells.items(), key=lambda item: list(CASES).index(item[0][0])):
        if name not in names:
            continue
        sign = 1 if CASES[workload].maximize else -1
        shown = [
            f"{sign * each.mean(s):.4f}" + ("" if each.finite[s] else f" ({each.scores[s].count(None)} diverged)")
            for s in SCALES
        ]
        at = ", ".join(f"{tau:.2f}" for tau in sorted(each.failed_at))
        clipped = ", ".join(f"{100 * each.clipped[s]:.1f}" for s in SCALES) if any(each.clipped.values()) else ""
        verdict = "yes" if survives(each, sds[workload], 1) else "no"
        rows.append(
            [f"{workload}, {seed}", name, f"{each.lr:.3g}", *shown, at, clipped, f"{sds[workload]:.2g}", verdict]
        )
    head = ["workload, search", "choice", "LR", *(f"S = {s}" for s in SCALES), "diverged at τ/T", "% clipped"]
    return markdown([*head, "sd over seeds", "within 1 error"], rows)


def evaluate(results: Results, wanted: Iterable[tuple[str, int, str]], length: int) -> tuple[Cells, list[Job]]:
    """Return the cells that the kept runs suffice for, and the runs that the others need next."""
    cells: Cells = {}
    missing: dict[Job, None] = {}
    for key in wanted:
        try:
            cells[key] = cell(results, *key, length)
        except Missing as found:
            missing.update(dict.fromkeys(found.jobs))
    return cells, list(missing)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--first", action="store_true", help="only the workloads on which a rule is chosen")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--length", type=int, default=1, help="T in units of each workload's")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--json", type=Path, default=KEPT, help="kept runs")
    parser.add_argument("--report-only", action="store_true", help="only print the tables of the kept runs")
    args = parser.parse_args(argv)
    args.workloads = [w for w in args.workloads if w in FIRST or not args.first]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    wanted = [(w, seed, name) for name in args.rules for w in args.workloads for seed in SEARCHES]
    if args.report_only:
        results = read_runs(args.json, Job, Result)
    else:
        announce(args.json)
        kept = KeptRuns(args.json, Job, Result, train)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, mp_context=context, initializer=prepare_process) as pool:
            while missing := evaluate(kept.results, wanted, args.length)[1]:
                for job, result in kept.run(missing, pool):
                    print(job, result.score, f"{result.cpu_s} s", file=sys.stderr, flush=True)
        results = kept.results
    cells, missing = evaluate(results, wanted, args.length)
    print(rules_table(cells, args.workloads), scores_table(cells, args.rules), sep="\n\n")
    hours = sum(result.cpu_s for result in results.values()) / 3600
    print(f"\n{len(results)} runs, {hours:.2f} CPU hours; {len(wanted) - len(cells)} recipes are not complete.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
