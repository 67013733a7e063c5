"""Forecast: what a run at a larger scale takes, from the noise that the search saw at the base batch.

The noise is replayed through the loop's own arithmetic: the moving averages over effective time, clipping on reading, the
rule's pair (LR factor, clock increment). In the limit of no averaging the number of steps is ``N(S) = ∫ dτ / r(τ; S)``.

What the replay leaves out, on purpose: the sampling noise of a step's own σ² and μ². Runs of one batch cut into 2 and into
16 gradient samples differ by about 5 % in steps at most, because the averages reach over many of them (docs/forecast.md).
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from ..config import AdaScaleConfig, BatchPlan
from ..gain import plain_gain
from ..optim.rules import RuleInput, ScalingRule, make_rule, metric_of
from ..recipe import NoiseProbe, Recipe
from .throughput import Throughput

__all__ = ["Forecast", "ForecastRow", "NoiseCurve", "Replay", "forecast_recipe", "limit_steps", "replay"]

SHRINK = 0.25
"""Exponent of μ²'s dependence on the efficiency r/S; see :func:`replay`. Empirical: docs/forecast.md."""

PAYS = 0.5
"""Adding workers pays while each adds at least this share of the first worker's speed."""

_MOST = 4096  # workers, among which the number is looked for up to which adding them pays

_GRID = 400  # points of a smoothed curve at most: twenty within the width of what smooths it


@dataclass(frozen=True)
class NoiseCurve:
    """σ² and μ² over a base run, smoothed; linear between the points, constant beyond them.

    Attributes:
        tau: Effective steps, increasing.
        sigma2: Gradient variance of one base batch.
        mu2: Squared norm of the true gradient. May be negative where it is lost in the noise.
    """

    tau: np.ndarray
    sigma2: np.ndarray
    mu2: np.ndarray

    @classmethod
    def from_probes(cls, probes: Iterable[NoiseProbe], total_steps: float, *, window: float = 0.05) -> NoiseCurve:
        """Local lines through the raw probes, weighted by a Gaussian of ``window · T`` effective steps.

        Means, not medians: the loop's averages are means too, and single probes have long tails.

        Args:
            probes: Of one run, or of several with the same schedule, which then count as one.
            total_steps: T.
            window: Width of the Gaussian (its σ) as a share of the run.

        Raises:
            ValueError: There are no probes.
        """
        rows = sorted((p.effective_steps, p.sigma2, p.mu2) for p in probes)
        if not rows:
            raise ValueError(
                "There are no noise probes to forecast from. Search again with probe_every at most total_steps, or record "
                "a base run with record_recipe."
            )
        points = np.array(rows, dtype=np.float64)
        tau = np.unique(points[:, 0])
        if len(tau) > _GRID:
            tau = np.linspace(tau[0], tau[-1], _GRID)
        smooth = np.array([_local_line(points, at, window * total_steps) for at in tau])
        return cls(tau, smooth[:, 0], smooth[:, 1])

    def at(self, tau: Any) -> tuple[Any, Any]:
        """``(σ², μ²)`` at τ, a number or an array of them."""
        return np.interp(tau, self.tau, self.sigma2), np.interp(tau, self.tau, self.mu2)


def _local_line(points: np.ndarray, at: float, width: float) -> np.ndarray:
    """The value at ``at`` of weighted least-squares lines through the columns after the first."""
    x = points[:, 0] - at
    weight = np.exp(-0.5 * (x / width) ** 2)
    s0, s1, s2 = weight.sum(), weight @ x, weight @ (x * x)
    determinant = s0 * s2 - s1 * s1
    if determinant <= 1e-9 * s0 * s2:  # one probe within reach: its value
        return weight @ points[:, 1:] / s0
    return (weight * (s2 - s1 * x)) @ points[:, 1:] / determinant


@dataclass(frozen=True)
class Replay:
    """One run, replayed.

    Attributes:
        steps: Optimizer steps until τ ≥ T.
        effective_steps: τ at the end.
        progress: Σ r over the steps: equal to τ under AdaScale's own rule.
        tau: τ before each step.
        gains: r of each step.
        total_steps: T.
    """

    steps: int
    effective_steps: float
    progress: float
    tau: tuple[float, ...]
    gains: tuple[float, ...]
    total_steps: float

    @property
    def exact_steps(self) -> float:
        """The steps until τ = T, of the last one the share that was needed; at least 1. Has no jumps where ``steps`` has."""
        last = self.effective_steps - self.tau[-1]
        return max(self.steps - (self.effective_steps - self.total_steps) / last, 1.0)

    @property
    def mean_gain(self) -> float:
        return self.progress / self.steps


def replay(
    curve: NoiseCurve,
    *,
    scale: float,
    count: int,
    total_steps: float,
    base_batch_size: float | None = None,
    rule: str | ScalingRule = "adascale",
    averaging_window: float = 0.05,
    shrink: float = SHRINK,
) -> Replay:
    """The loop's arithmetic over a noise curve, step by step.

    Part of μ² at the base batch is the weights' trembling, kept up by the very noise that a larger batch has less of: there
    lr·r·σ²/S drives it, r/S of the base run's. How large that part is, the probes don't tell. So
    ``μ²(τ; S) = μ²(τ; 1) · (r/S)^shrink``: with ``shrink=0`` μ² is the same at every scale, and with 1 all of it trembles.
    σ² is per base batch, and stays.

    Args:
        curve: σ²(τ), μ²(τ) of the base run.
        scale: S ≥ 1.
        count: n, gradient samples a step. With one, the first step has no sample yet, and its gain is 1.
        total_steps: T.
        base_batch_size: B0, for rules that ask for it.
        rule: As in :class:`ray_adascale.AdaScaleConfig`.
        averaging_window: As there.
        shrink: See above.

    Raises:
        ValueError: An argument is out of its range, or the rule's clock stands still.
    """
    if not scale >= 1:
        raise ValueError(f"Invalid {scale=}. Must be at least 1: the batch may not be smaller than the base batch.")
    if count < 1:
        raise ValueError(f"Invalid {count=}. Must be at least 1 gradient sample a step.")
    advance = copy.deepcopy(make_rule(rule))  # LEGW's remembers the scale it saw
    memory = averaging_window * total_steps
    grid = [values.tolist() for values in curve.at(np.arange(math.ceil(total_steps)))]
    variance, square, weight = 0.0, 0.0, 0.0
    tau, progress, r, efficiency = 0.0, 0.0, 1.0, 1.0
    taus: list[float] = []
    gains: list[float] = []
    while tau < total_steps:
        if count > 1 or taus:
            # θ_t = exp(−r_{t−1} / (window·T)); raw samples averaged, debiased, clipped on reading.
            theta = math.exp(-r / memory)
            now = int(tau)
            variance = theta * variance + (1 - theta) * grid[0][now]
            square = theta * square + (1 - theta) * grid[1][now] * efficiency**shrink
            weight = theta * weight + (1 - theta)
            r = plain_gain(variance / weight, square / weight, scale)
        seen = RuleInput(
            gain=r,
            scale=scale,
            effective_steps=tau,
            total_steps=total_steps,
            base_batch_size=base_batch_size,
        )
        increment = advance(seen)[1]
        if not increment > 0:
            raise ValueError(f"Invalid rule: its clock increment is {increment!r} at effective step {tau:g}.")
        taus.append(tau)
        gains.append(r)
        tau, progress, efficiency = tau + increment, progress + r, r / scale
    return Replay(len(taus), tau, progress, tuple(taus), tuple(gains), total_steps)


def limit_steps(curve: NoiseCurve, *, scale: float, total_steps: float) -> float:
    """``N(S) = ∫ dτ / r(τ; S)``: AdaScale's steps without averaging, by the midpoint rule over base steps.

    A check on :func:`replay` with ``shrink=0``, whose averages lag behind and which can't end between two steps.
    """
    width = total_steps / max(1, math.ceil(total_steps))
    sigma2, mu2 = curve.at((np.arange(math.ceil(total_steps)) + 0.5) * width)
    return width * sum(1 / plain_gain(s, m, scale) for s, m in zip(sigma2.tolist(), mu2.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """One way to run the recipe.

    Attributes:
        workers: k.
        accumulation: Passes a step on each worker.
        global_batch_size: B, examples a step.
        scale: S = B / B0.
        num_samples: n = k · accumulation.
        steps: Optimizer steps.
        low: Fewest steps among ``steps`` and the forecasts from each seed's noise alone; None without repeats.
        high: Most steps among them.
        mean_gain: r̄, over optimizer steps.
        efficiency: r̄ / S, the share of the examples that turns into progress.
        seconds: Wall time; None without a throughput model.
        speedup: Over the base run: in time, or without a throughput model in passes one after the other.
        cost: Money; None without a price or without seconds.
        marginal: Speed-up that the last of these workers adds. Not rounded to whole steps, as ``speedup`` is.
        pays: Whether there are no more workers than ``Forecast.pays_until``.
    """

    workers: int
    accumulation: int
    global_batch_size: int
    scale: float
    num_samples: int
    steps: int
    low: int | None
    high: int | None
    mean_gain: float
    efficiency: float
    seconds: float | None
    speedup: float
    cost: float | None
    marginal: float
    pays: bool


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast for a recipe: a row for each number of workers, and what to know about them.

    Attributes:
        recipe: Its fingerprint.
        rule: How the LR follows the scale.
        total_steps: T.
        base_batch_size: B0.
        rows: By number of workers.
        notes: What the forecast could not know.
        pays_until: The number of workers up to which adding workers pays: further ones, up to twice as many, add less than
            half of the first one's speed-up each. It comes from the model, whatever rows were asked for; above 64 it is
            right to a sixteenth. None where 4,096 workers still pay.
    """

    recipe: str
    rule: str
    total_steps: int
    base_batch_size: int
    rows: tuple[ForecastRow, ...]
    notes: tuple[str, ...]
    pays_until: int | None

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """For a terminal: ``rich.print(forecast.table())``."""
        table = Table(
            title=f"Recipe {self.recipe}: {self.total_steps:,} base steps of {self.base_batch_size} examples, "
            f"rule {self.rule}",
            caption="\n".join(self.lines()),
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        columns = self._columns()
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for i in range(len(self.rows)):
            table.add_row(*(cells[i] for cells in columns.values()))
        return table

    def lines(self) -> list[str]:
        """What stands below the table."""
        if self.pays_until is None:
            verdict = f"Adding workers still pays at {_MOST:,}: each adds at least half as much as the first."
        else:
            verdict = f"Adding workers pays up to {self.pays_until:,}: further ones each add less than half as much as the first."
        return [verdict, *self.notes]

    def _columns(self) -> dict[str, list[str]]:
        """Heading -> cells; a column that no row fills is left out."""
        rows = self.rows
        columns: dict[str, list[str]] = {
            "workers": [f"{row.workers}" for row in rows],
            **(
                {"passes": [f"{row.accumulation}" for row in rows]} if any(row.accumulation > 1 for row in rows) else {}
            ),
            "batch": [f"{row.global_batch_size:,}" for row in rows],
            "S": [f"{row.scale:g}" for row in rows],
            "steps": [f"{row.steps:,}" for row in rows],
        }
        if any(row.low is not None for row in rows):
            columns["seeds"] = [f"{row.low:,}–{row.high:,}" for row in rows]
        columns["mean\ngain"] = [f"{row.mean_gain:.2f}" for row in rows]
        columns["effi-\nciency"] = [f"{row.efficiency:.0%}" for row in rows]
        if any(row.seconds is not None for row in rows):
            columns["time"] = [_duration(row.seconds) for row in rows]
        columns["speed-\nup"] = [f"{row.speedup:.2f}" for row in rows]
        columns["last\nadds"] = [f"{row.marginal:.2f}" for row in rows]
        if any(row.cost is not None for row in rows):
            columns["cost"] = ["" if row.cost is None else f"{row.cost:,.2f}" for row in rows]
        return columns

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Steps and speed-up against workers, to a file of any kind that matplotlib writes.

        Raises:
            ValueError: matplotlib is missing.
        """
        plt = pyplot("a plot")
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        workers = [row.workers for row in self.rows]
        left.plot(workers, [row.steps for row in self.rows], "o-", label="forecast")
        if self.rows[0].low is not None:
            left.fill_between(
                workers,
                [row.low for row in self.rows],
                [row.high for row in self.rows],
                alpha=0.2,
                label="over seeds",
            )
        left.plot(workers, [self.total_steps / row.scale for row in self.rows], "--", color="0.6", label="T / S")
        left.set(xlabel="workers", ylabel="optimizer steps", xscale="log", yscale="log")
        right.plot(workers, [row.speedup for row in self.rows], "o-")
        right.plot(workers, workers, "--", color="0.6", label="one for one")
        right.set(xlabel="workers", ylabel="speed-up", xscale="log", yscale="log")
        for axes in (left, right):
            axes.set_xticks(workers, [str(k) for k in workers])
            axes.minorticks_off()
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(Path(path), dpi=130)
        plt.close(figure)


def pyplot(what: str) -> Any:
    """``matplotlib.pyplot`` with the file backend.

    Raises:
        ValueError: matplotlib is missing; says how to get it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"matplotlib is needed for {what}: pip install 'ray-adascale[plots]'.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def forecast_recipe(
    recipe: Recipe,
    *,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32),
    config: AdaScaleConfig | None = None,
    throughput: Throughput | None = None,
    cost_per_worker_hour: float | None = None,
) -> Forecast:
    """What a recipe takes on each number of workers, before anything is paid for.

    Args:
        recipe: With the noise of its search. Repeat seeds, where it has them, sharpen the estimate and give the interval.
        workers: Numbers of workers.
        config: As for :class:`ray_adascale.AdaScaleTrainer`: batch of a worker, accumulation, rule, averaging window. Passes
            are added where few workers would make less than a base batch. Not the rule "adamscale", whose statistics a
            search does not take.
        throughput: Time of a step; see :func:`ray_adascale.measure_throughput`. Without one, time is counted in passes.
        cost_per_worker_hour: Price, in any currency; needs ``throughput``.

    Raises:
        ValueError: An argument can't work, or the recipe holds no noise.
    """
    ks = sorted(set(workers))
    if not ks or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in ks):
        raise ValueError(f"Invalid {workers=}. Must be numbers of workers, each at least 1.")
    if cost_per_worker_hour is not None and not cost_per_worker_hour >= 0:
        raise ValueError(f"Invalid {cost_per_worker_hour=}. Must be a price per worker and hour, at least 0.")
    if cost_per_worker_hour is not None and throughput is None:
        raise ValueError(
            f"Invalid {cost_per_worker_hour=} without throughput. Cost follows from time: give throughput= as well, from "
            "measure_throughput() or Throughput.fit() (on the command line --measure WORKLOAD or --run RUN)."
        )
    # Precision and the like make no difference to it: nothing to warn of.
    config = replace(AdaScaleConfig() if config is None else config, elastic=True).with_recipe(
        replace(recipe, settings=None)
    )
    made = make_rule(config.rule)
    if metric_of(made) != "euclidean":
        raise ValueError(
            f"Invalid rule={config.rule!r}: its gain is taken in Adam's metric, and a search probes plain gradients. There "
            "is no forecast for it."
        )
    curves = noise_curves(recipe)

    @functools.cache
    def steps(curve: int, scale: float, count: int) -> Replay:
        return replay(
            curves[curve],
            scale=scale,
            count=count,
            total_steps=recipe.total_steps,
            base_batch_size=recipe.base_batch_size,
            rule=made,
            averaging_window=config.averaging_window,
        )

    base = recipe.total_steps * _step_time(throughput, BatchPlan(recipe.base_batch_size, recipe.base_batch_size, 1, 1))

    @functools.cache
    def speedup(k: int) -> float:
        plan = config.plan(k)
        return base / (steps(0, plan.scale, min(plan.num_samples, 2)).exact_steps * _step_time(throughput, plan))

    pays_until = _pays_until(speedup)
    rows: list[ForecastRow] = []
    for k in ks:
        plan = config.plan(k)
        expected, *single = (steps(curve, plan.scale, min(plan.num_samples, 2)) for curve in range(len(curves)))
        span = [expected.steps, *(one.steps for one in single)]
        time = expected.steps * _step_time(throughput, plan)
        seconds = None if throughput is None else time
        rows.append(
            ForecastRow(
                workers=k,
                accumulation=plan.accumulation,
                global_batch_size=plan.global_batch_size,
                scale=plan.scale,
                num_samples=plan.num_samples,
                steps=expected.steps,
                low=min(span) if single else None,
                high=max(span) if single else None,
                mean_gain=expected.mean_gain,
                efficiency=expected.mean_gain / plan.scale,
                seconds=seconds,
                speedup=base / time,
                cost=None
                if cost_per_worker_hour is None or seconds is None
                else k * seconds / 3600 * cost_per_worker_hour,
                marginal=speedup(k) - (speedup(k - 1) if k > 1 else 0.0),
                pays=pays_until is None or k <= pays_until,
            )
        )
    return Forecast(
        recipe=recipe.fingerprint,
        rule=config.rule if isinstance(config.rule, str) else repr(config.rule),
        total_steps=recipe.total_steps,
        base_batch_size=recipe.base_batch_size,
        rows=tuple(rows),
        notes=tuple(_notes(recipe, max(len(curves) - 1, 1), throughput)),
        pays_until=pays_until,
    )


def noise_curves(recipe: Recipe) -> list[NoiseCurve]:
    """The noise of all the recipe's seeds pooled; then that of each alone, where there are several.

    Raises:
        ValueError: The recipe holds no noise.
    """
    seeds = [recipe.noise, *(repeat.noise for repeat in recipe.repeats if repeat.noise)]
    pooled = [probe for noise in seeds for probe in noise]
    alone = seeds if len(seeds) > 1 else []
    return [NoiseCurve.from_probes(noise, recipe.total_steps) for noise in (pooled, *alone)]


def _step_time(throughput: Throughput | None, plan: BatchPlan) -> float:
    """Seconds of a step; without a throughput model its passes, as if each took the same time and nothing else took any."""
    if throughput is None:
        return plan.accumulation
    return throughput.step_seconds(plan.world_size, plan.accumulation, plan.global_batch_size // plan.num_samples)


def _pays_until(speedup: Callable[[int], float]) -> int | None:
    """The first number of workers from which further ones, up to twice as many, add less than ``PAYS · speedup(1)`` each.

    On average over those added, as with a fixed batch three workers may need as many passes as two; where each worker adds
    less than the one before, that is the last worker to add so much. Above 64 to a sixteenth. None if it is above ``_MOST``.
    """
    share = PAYS * speedup(1)
    tried = list(range(1, 65))
    while tried[-1] < _MOST:
        tried.append(tried[-1] + tried[-1] // 16)
    here = 1
    while here <= _MOST:
        more = (k for k in tried if here < k <= 2 * here and speedup(k) - speedup(here) >= share * (k - here))
        found = next(more, None)
        if found is None:
            return here
        here = found
    return None


def _notes(recipe: Recipe, seeds: int, throughput: Throughput | None) -> list[str]:
    notes = []
    if seeds == 1:
        notes.append(
            "No interval: the recipe has the noise of one seed. Search with repeats to have one; single seeds of short runs "
            "may be far off."
        )
    probes = len(recipe.noise) * seeds
    if probes < 200:
        notes.append(f"Only {probes} probes: at large scales the steps are rough.")
    if throughput is None:
        notes.append(
            "Without a throughput model: speed-up counts passes, as if each took as long, and nothing else took any time."
        )
    else:
        notes.extend(throughput.notes)
    return notes


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"
