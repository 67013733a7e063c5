"""The forecast of a run that asks for workers when they pay: its numbers of workers, and what it saves against a fixed number.

The run is a :mod:`~ray_adascale.analysis.worker_replay` over the recipe's noise, with the decision of
:mod:`~ray_adascale.worker_policy`. The fixed numbers are replayed over the same noise.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich import box
from rich.table import Table

from ..config import AdaScaleConfig, read_settings
from ..evidence import forecast_doubt
from ..recipe import Recipe
from ..replay import Law, NoiseCurve, momenta_of, noise_curves, replay
from ..throughput import Throughput
from ..worker_policy import (
    DECIDE_S,
    RESTART_S,
    WorkerController,
    WorkersFollow,
    follow_settings,
    numbers_to_compare,
)
from .forecast import in_units
from .plots import pyplot
from .worker_replay import ReplayedRun, WorkerClock

_MOST_STEPS = 4_000
"""Strides of a replay, some ten of them. The changes are exact to a stride."""
_MOST_DECISIONS = 500
_NOTHING = 0.005
"""Largest difference that counts as none. The replay's arithmetic is not closer."""


@dataclass(frozen=True)
class FixedNumber:
    """A run on a fixed number of workers.

    Attributes:
        workers: The number. It is not rounded where it lies between two runs: worker hours are then on the line between theirs,
            which is exact for a gain whose σ² and μ² do not depend on the number.
        worker_hours: Its worker hours.
    """

    workers: float
    worker_hours: float

    @property
    def hours(self) -> float:
        """Its time."""
        return self.worker_hours / self.workers


@dataclass(frozen=True, kw_only=True)
class WorkersForecast:
    """A forecast of a run that asks for workers when they pay, beside fixed numbers of workers.

    Attributes:
        recipe: The recipe's fingerprint.
        total_steps: T.
        settings: The prices, in any currency, and the other settings.
        value_per_hour: What it is worth to end an hour earlier, in the same currency.
        restart_s: Seconds of a restart.
        run: The run that follows its noise.
        fixed: Fixed numbers of workers in the same range.
        best: The fixed number with the lowest price of its run.
        equal_time: The fixed number, not rounded, that takes as long as the run, or less, with the fewest worker hours. Where
            none is as quick, the quickest one.
        equal_worker_hours: The quickest fixed number, not rounded, with as many worker hours as the run, or fewer. Where none
            has as few, the one with the fewest.
        worker_hours_saved: Worker hours saved in comparison with ``equal_time``, 0.1 for 10 %. Negative: the run takes more.
        worker_hours_saved_low: The smallest of these savings: of all the recipe's seeds together and of each seed alone, each for
            every plausible momentum. The decision expects the noise of all seeds.
        worker_hours_saved_high: The largest one.
        time_saved: Time saved in comparison with ``equal_worker_hours``.
        price_saved: Price saved in comparison with ``best``.
        notes: Sources of uncertainty, a sentence each.
    """

    recipe: str
    total_steps: int
    settings: WorkersFollow
    value_per_hour: float
    restart_s: float
    run: ReplayedRun
    fixed: tuple[FixedNumber, ...]
    best: FixedNumber
    equal_time: FixedNumber
    equal_worker_hours: FixedNumber
    worker_hours_saved: float
    worker_hours_saved_low: float
    worker_hours_saved_high: float
    time_saved: float
    price_saved: float
    notes: tuple[str, ...]

    def price(self, run: ReplayedRun | FixedNumber) -> float:
        """Return the price of a run: that of its worker hours, and of its time."""
        return _price(run, self.settings.cost_per_worker_hour, self.value_per_hour)

    def to_json(self) -> str:
        """Return the whole forecast as JSON."""
        fields = asdict(self)
        for name in ("best", "equal_time", "equal_worker_hours"):
            fields[name]["hours"] = getattr(self, name).hours
        for row, each in zip(fields["fixed"], self.fixed, strict=True):
            row["hours"] = each.hours
        return json.dumps(fields, indent=2)

    def table(self) -> Table:
        """Return the run and the fixed numbers as a table for a terminal: ``rich.print(forecast.table())``."""
        low, high = (f"{each.workers:g}" for each in (self.fixed[0], self.fixed[-1]))
        table = Table(
            title=f"Recipe {self.recipe}: {self.total_steps:,} base steps on {low} to {high} workers, as many as pay",
            caption="\n".join(self.lines()),
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        for name in ("run", "workers", "time", "worker hours", "price"):
            table.add_column(name, justify="left" if name == "run" else "right")
        numbers = " → ".join(str(part.workers) for part in self.run.parts)
        rows: list[tuple[str, str, ReplayedRun | FixedNumber]] = [("follows its noise", numbers, self.run)]
        for name, fixed in (
            ("best fixed number", self.best),
            ("fixed, in the same time", self.equal_time),
            ("fixed, for the same worker hours", self.equal_worker_hours),
        ):
            rows.append((name, f"{fixed.workers:.3g}", fixed))
        for name, workers, run in rows:
            table.add_row(
                name, workers, in_units(run.hours * 3600), f"{run.worker_hours:.4g}", f"{self.price(run):.4g}"
            )
        return table

    def lines(self) -> list[str]:
        """Return the lines below the table."""
        first, *others = self.run.parts
        parts = [f"Begins on {_in_words(first.workers)}: {first.reason}."]
        parts += [
            f"{_in_words(part.workers)} from τ = {part.effective_steps:,.0f} ({part.effective_steps / self.total_steps:.0%}) "
            f"on, after {in_units(part.hours * 3600)}."
            for part in others
        ]
        if not others:
            parts.append("The number never changes.")
        interval = ""
        if self.worker_hours_saved_high - self.worker_hours_saved_low > _NOTHING:
            interval = f" By single seeds {self.worker_hours_saved_low:+.1%} to {self.worker_hours_saved_high:+.1%}."
        return [
            *parts,
            f"Worker hours at equal time: {_verdict(self.worker_hours_saved)}.{interval}",
            f"Time at equal worker hours: {_verdict(self.time_saved)}.",
            f"Price beside {_in_words(self.best.workers)} throughout: {_verdict(self.price_saved)}.",
            *self.notes,
        ]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the number of workers against τ, to a file in any of matplotlib's formats.

        Raises:
            ValueError: matplotlib is missing.
        """
        plt = pyplot("a plot")
        figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
        parts = self.run.parts
        axes.step(
            [*(part.effective_steps for part in parts), self.total_steps],
            [*(part.workers for part in parts), parts[-1].workers],
            where="post",
            label="follows its noise",
        )
        axes.axhline(self.equal_time.workers, ls="--", color="0.6", label="fixed, in the same time")
        axes.set(xlabel="effective steps", ylabel="workers", ylim=(0, None))
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(Path(path), dpi=130)
        plt.close(figure)


def forecast_workers(
    recipe: Recipe,
    *,
    workers: tuple[int, int],
    follow: Literal["pay"] | WorkersFollow = "pay",
    config: AdaScaleConfig | None = None,
    throughput: Throughput | None = None,
) -> WorkersForecast:
    """Forecast a run that asks for workers when they pay: its numbers of workers over τ, and what it saves.

    Args:
        recipe: A recipe with noise.
        workers: Fewest and most workers, as ``ScalingConfig(num_workers=(min, max))``.
        follow: As ``AdaScaleTrainer(workers=...)``. Without ``restart_s`` a restart takes 60 s here.
        config: As for :class:`ray_adascale.AdaScaleTrainer`.
        throughput: Seconds of a step; see :func:`ray_adascale.measure_throughput`. Default: that of ``follow``. The decision
            knows them beforehand only if ``follow`` has them. Otherwise it measures them, as in a run.

    Raises:
        ValueError: An argument can't work, the seconds of a step are unknown, or the recipe holds no noise.
    """
    config = replace(read_settings(config), elastic=True).with_recipe(replace(recipe, settings=None))
    settings = follow_settings(follow, config)
    throughput = settings.throughput if throughput is None else throughput
    if throughput is None:
        raise ValueError(
            "Missing throughput: what a worker adds depends on the seconds of a step. Give throughput= or "
            "WorkersFollow(throughput=...), from measure_throughput() or Throughput.fit() (on the command line --measure "
            "WORKLOAD)."
        )
    if not _is_range(workers):
        raise ValueError(f"Invalid {workers=}. Must be fewest and most workers (min, max), with 1 ≤ min < max.")
    replays = _Replays(recipe, workers, settings, config, throughput)
    pooled, *seeds = noise_curves(recipe)
    cases = [(curve, momentum) for curve in (pooled, *seeds) for momentum in momenta_of(recipe)]
    compared = [replays.compared(*case, outlook=pooled) for case in cases]
    first = compared[0]
    value = replays.value
    best = min(first.fixed, key=lambda each: _price(each, settings.cost_per_worker_hour, value))
    prices = [_price(each, settings.cost_per_worker_hour, value) for each in (first.run, best)]
    return WorkersForecast(
        recipe=recipe.fingerprint,
        total_steps=recipe.total_steps,
        settings=settings,
        value_per_hour=value,
        restart_s=replays.restart_s,
        run=first.run,
        fixed=first.fixed,
        best=best,
        equal_time=first.equal_time,
        equal_worker_hours=first.equal_worker_hours,
        worker_hours_saved=first.worker_hours_saved,
        worker_hours_saved_low=min(each.worker_hours_saved for each in compared),
        worker_hours_saved_high=max(each.worker_hours_saved for each in compared),
        time_saved=1 - first.run.hours / first.equal_worker_hours.hours,
        price_saved=1 - prices[0] / prices[1],
        notes=tuple(_notes(recipe, settings, throughput, seeds)),
    )


# ---- fixed numbers ---------------------------------------------------------------------------------------------------


def at_equal_time(fixed: Sequence[FixedNumber], hours: float) -> FixedNumber:
    """Return the fixed number, not rounded, with the fewest worker hours within this time; without any, the quickest one.

    Args:
        fixed: Runs, fewest workers first.
        hours: The time.
    """
    found = [each for each in fixed if each.hours <= hours * (1 + 1e-9)]
    for one, other, slope in _lines(fixed):
        # Worker hours a + slope·k, so hours a/k + slope.
        if slope < hours:
            found += _within(one, other, slope, (one.worker_hours - slope * one.workers) / (hours - slope))
    return min(found, key=lambda each: each.worker_hours) if found else min(fixed, key=lambda each: each.hours)


def at_equal_worker_hours(fixed: Sequence[FixedNumber], worker_hours: float) -> FixedNumber:
    """Return the quickest fixed number, not rounded, within these worker hours; without any, the one with the fewest.

    Args:
        fixed: Runs, fewest workers first.
        worker_hours: The worker hours.
    """
    found = [each for each in fixed if each.worker_hours <= worker_hours * (1 + 1e-9)]
    for one, other, slope in _lines(fixed):
        if slope != 0:
            found += _within(one, other, slope, one.workers + (worker_hours - one.worker_hours) / slope)
    return min(found, key=lambda each: each.hours) if found else min(fixed, key=lambda each: each.worker_hours)


def _lines(fixed: Sequence[FixedNumber]) -> list[tuple[FixedNumber, FixedNumber, float]]:
    """Return neighbours, and what a worker between them adds in worker hours."""
    return [
        (one, other, (other.worker_hours - one.worker_hours) / (other.workers - one.workers))
        for one, other in itertools.pairwise(fixed)
    ]


def _within(one: FixedNumber, other: FixedNumber, slope: float, workers: float) -> list[FixedNumber]:
    """Return the run on this number of workers, if it lies between the two."""
    if not one.workers < workers < other.workers:
        return []
    return [FixedNumber(workers, one.worker_hours + slope * (workers - one.workers))]


def _price(run: ReplayedRun | FixedNumber, cost: float, value: float) -> float:
    return value * run.hours + cost * run.worker_hours


# ---- replays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compared:
    """A run that follows its noise, beside the fixed numbers over the same noise."""

    run: ReplayedRun
    fixed: tuple[FixedNumber, ...]

    @property
    def equal_time(self) -> FixedNumber:
        return at_equal_time(self.fixed, self.run.hours)

    @property
    def equal_worker_hours(self) -> FixedNumber:
        return at_equal_worker_hours(self.fixed, self.run.worker_hours)

    @property
    def worker_hours_saved(self) -> float:
        return 1 - self.run.worker_hours / self.equal_time.worker_hours


class _Replays:
    """Replays a recipe on fixed numbers of workers, and on numbers that follow the noise."""

    def __init__(
        self,
        recipe: Recipe,
        workers: tuple[int, int],
        settings: WorkersFollow,
        config: AdaScaleConfig,
        throughput: Throughput,
    ) -> None:
        self._recipe, self._config, self._settings = recipe, config, settings
        self._policy = config.batch_policy
        self._throughput = throughput
        self._least, self._most = workers
        self.restart_s = settings.restart_s or RESTART_S
        self.value = self._controller(None).value_per_hour

    def _controller(self, outlook: NoiseCurve | None) -> WorkerController:
        return WorkerController(self._settings, self._policy, self._least, self._most, outlook=outlook)

    def compared(self, curve: NoiseCurve, momentum: float, *, outlook: NoiseCurve) -> _Compared:
        """Replay the run and the fixed numbers.

        Args:
            curve: The noise of the base run.
            momentum: Its momentum.
            outlook: The noise that the decision expects.
        """
        law = Law(momentum=momentum, momentum_is_beta=self._recipe.momentum_is_beta)
        fixed = []
        for k in numbers_to_compare(self._least, self._most):
            fixed.append(FixedNumber(k, self._replayed(curve, law, k).worker_hours))
        decide = self._controller(outlook)
        total_steps, base = self._recipe.total_steps, self._recipe.base_batch_size
        first = decide.first(total_steps, base, self.restart_s)
        every = min(each.hours for each in fixed) * 3600 / _MOST_DECISIONS
        run = self._replayed(curve, law, first.workers, decide, first.reason, max(DECIDE_S, every))
        return _Compared(run, tuple(fixed))

    def _replayed(
        self,
        curve: NoiseCurve,
        law: Law,
        workers: int,
        decide: WorkerController | None = None,
        reason: str = "",
        decide_s: float = DECIDE_S,
    ) -> ReplayedRun:
        recipe, config = self._recipe, self._config
        per_epoch = recipe.base_steps_per_epoch
        clock = WorkerClock(
            self._policy,
            workers,
            throughput=self._throughput,
            total_steps=recipe.total_steps,
            decide=decide,
            reason=reason,
            restart_s=self.restart_s,
            decide_s=decide_s,
            stride=max(recipe.total_steps / _MOST_STEPS, 1.0),
            window=config.averaging_window * recipe.total_steps,
            **({} if per_epoch is None else {"largest": per_epoch * recipe.base_batch_size}),
        )
        replay(
            curve,
            scale=1.0,
            count=2,
            total_steps=recipe.total_steps,
            law=law,
            base_batch_size=recipe.base_batch_size,
            rule=config.rule,
            averaging_window=config.averaging_window,
            most_steps=_MOST_STEPS,
            controller=clock,
        )
        return clock.ended()


# ---- words -----------------------------------------------------------------------------------------------------------


def _is_range(workers: object) -> bool:
    if not isinstance(workers, tuple | list) or len(workers) != 2:
        return False
    return all(isinstance(k, int) and not isinstance(k, bool) for k in workers) and 1 <= workers[0] < workers[1]


def _in_words(workers: float) -> str:
    return f"{workers:.3g} worker{'' if workers == 1 else 's'}"


def _verdict(saved: float) -> str:
    """Return what a share saved means."""
    if abs(saved) <= _NOTHING:
        return "it saves nothing"
    return f"it saves {saved:.1%}" if saved > 0 else f"it saves nothing and takes {-saved:.1%} more"


def _notes(recipe: Recipe, settings: WorkersFollow, throughput: Throughput, seeds: Sequence[NoiseCurve]) -> list[str]:
    doubt = forecast_doubt(recipe.optimizer_class)
    notes = [] if doubt is None else [doubt]
    if settings.restart_s is None:
        notes.append(f"A restart counts {RESTART_S:g} s: set restart_s (--restart-s) to what it takes on your cluster.")
    if not seeds:
        notes.append(
            "The decision knows the noise of this run beforehand, since the recipe has that of one seed: a real run saves less. "
            "Search with repeats (--repeats 2) for an interval."
        )
    return [*notes, "New nodes count as if they were there at once.", *throughput.notes]
