"""The forecast: the steps, time and cost of a recipe on each number of workers, before
the large run.

The steps are those of a :mod:`~ray_adascale.replay`. The time of a step is that of
:mod:`~ray_adascale.throughput`.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from rich import box
from rich.table import Table

from .._errors import SettingError
from ..batch import BatchSettings, StepPlan
from ..config import AdaScaleConfig, read_settings
from ..forecast.replay import MOST_STEPS, Forecaster, StepForecast, auto_rule_of
from ..forecast.throughput import Throughput
from ..optim.rules import AUTO, make_rule, metric_of, name_of
from ..recipe import Recipe
from ..run.build_warnings import forecast_advice
from ..run.observe.eta import clock_time
from ..run.observe.verdict import BaseFigures, epochs_warning

# share of the first worker's speed that further workers must add to be useful
_PAYS = 0.5
_FAR = 16  # S above which a note says that the forecast is rough
# in the replays for the useful number of workers, some hundred of them
_ROUGH_STEPS = 2000
_MOST = 4096  # largest number of workers that is tried for the useful number


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """One way to run the recipe.

    Attributes:
        workers: k.
        accumulation: Passes a step on each worker.
        global_batch_size: B, examples a step.
        scale: S = B / B0; the mean over the steps for a run that changes its batch.
            ``accumulation``, ``global_batch_size`` and ``num_samples`` of such a run
            are the last step's.
        last_scale: S of the last step.
        num_samples: n = k · accumulation.
        examples: Examples of all steps together.
        epochs: Epochs; None where the dataset's length is unknown.
        steps: Optimizer steps, by the noise of all seeds together.
        low: Fewest steps of the interval, see
            :class:`ray_adascale.forecast.replay.Forecaster`.
        high: Most steps of the interval.
        mean_gain: r̄, over optimizer steps.
        efficiency: r̄ / S, the share of the examples that results in effective steps.
        seconds: Wall time; None without a throughput model.
        seconds_low: The wall time of ``low`` steps at the lower quartile of the
            measured times of a step.
        seconds_high: The wall time of ``high`` steps at the upper quartile.
        speedup: Relative to the base run: in time, or without a throughput model in
            consecutive passes.
        cost: Price of ``seconds``; None without a price or without seconds.
        marginal: Speed-up that the last of these workers adds. Unlike ``speedup``, it
            is not rounded to whole steps.
        pays: Whether there are no more workers than ``Forecast.max_useful_workers``.
    """

    workers: int
    accumulation: int
    global_batch_size: int
    scale: float
    last_scale: float
    num_samples: int
    examples: int
    epochs: float | None
    steps: int
    low: int
    high: int
    mean_gain: float
    efficiency: float
    seconds: float | None
    seconds_low: float | None
    seconds_high: float | None
    speedup: float
    cost: float | None
    marginal: float
    pays: bool


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast for a recipe: a row for each number of workers, and notes about the
    uncertainty.

    Attributes:
        recipe: The recipe's fingerprint.
        rule: How the LR follows the scale.
        total_steps: T.
        base_batch_size: B0.
        rows: A row for each number of workers, in increasing order.
        notes: Sources of uncertainty, a sentence each.
        max_useful_workers: The largest useful number of workers: further ones, up to
            twice as many, each add less than half of the first one's speed-up. It does
            not depend on the rows. Above 64 it is exact to a sixteenth. None: 4,096
            workers are still useful.
        max_useful_workers_low: ``max_useful_workers`` at the end of the interval with
            the smaller number of workers.
        max_useful_workers_high: ``max_useful_workers`` at the other end of the
            interval.
    """

    recipe: str
    rule: str
    total_steps: int
    base_batch_size: int
    rows: tuple[ForecastRow, ...]
    notes: tuple[str, ...]
    max_useful_workers: int | None
    max_useful_workers_low: int | None
    max_useful_workers_high: int | None

    def to_json(self) -> str:
        """Return the whole forecast as JSON."""
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """Return the rows as a table for a terminal:
        ``rich.print(forecast.table())``.
        """
        table = Table(
            title=f"Recipe {self.recipe}: {self.total_steps:,} base steps of "
            f"{self.base_batch_size} examples, rule {self.rule}",
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
        """Return the lines below the table."""
        if self.max_useful_workers is None:
            verdict = (
                f"Adding workers still pays at {_MOST:,}: each adds at least half as "
                "much as the first"
            )
        else:
            most = f"{self.max_useful_workers:,}"
            verdict = (
                f"Adding workers pays up to {most}: further ones each add less than "
                "half as much as the first"
            )
        low, high = (
            f"{k:,}" if k is not None else f"over {_MOST:,}"
            for k in (self.max_useful_workers_low, self.max_useful_workers_high)
        )
        verdict += f" (with the interval: {low}–{high})." if low != high else "."
        return [verdict, *self.notes]

    def _columns(self) -> dict[str, list[str]]:
        """Return the cells of each column by its heading, without empty columns."""
        rows = self.rows
        columns = {"workers": [f"{row.workers}" for row in rows]}
        if all(row.scale == row.last_scale for row in rows):
            if any(row.accumulation > 1 for row in rows):
                columns["passes"] = [f"{row.accumulation}" for row in rows]
            columns["batch"] = [f"{row.global_batch_size:,}" for row in rows]
            columns["S"] = [f"{row.scale:g}" for row in rows]
        else:  # the runs change their batch
            base = self.total_steps * self.base_batch_size
            columns["mean\nS"] = [f"{row.scale:.3g}" for row in rows]
            columns["last\nS"] = [f"{row.last_scale:.3g}" for row in rows]
            columns["exam-\nples"] = [f"{row.examples / base:.2f}×" for row in rows]
        columns["steps"] = [f"{row.steps:,}" for row in rows]
        if any(row.epochs is not None for row in rows):
            columns["epochs"] = [f"{row.epochs or 0.0:.3g}" for row in rows]
        if any(row.low < row.high for row in rows):
            columns["interval"] = [f"{row.low:,}–{row.high:,}" for row in rows]
        columns["mean\ngain"] = [f"{row.mean_gain:.2f}" for row in rows]
        columns["effi-\nciency"] = [f"{row.efficiency:.0%}" for row in rows]
        if any(row.seconds is not None for row in rows):
            columns["time"] = [clock_time(row.seconds or 0.0) for row in rows]
        columns["speed-\nup"] = [f"{row.speedup:.2f}" for row in rows]
        columns["last\nadds"] = [f"{row.marginal:.2f}" for row in rows]
        if any(row.cost is not None for row in rows):
            columns["cost"] = [
                "" if row.cost is None else f"{row.cost:,.2f}" for row in rows
            ]
        return columns


def forecast_recipe(
    recipe: Recipe,
    *,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32),
    config: AdaScaleConfig | None = None,
    throughput: Throughput | None = None,
    cost_per_worker_hour: float | None = None,
) -> Forecast:
    """Forecast a recipe's steps, time and cost on each number of workers, before the
    large run.

    Args:
        recipe: A recipe with noise. Repeats make the estimate and the interval more
            precise.
        workers: Numbers of workers.
        config: As for :class:`ray_adascale.AdaScaleTrainer`: batch of a worker,
            accumulation, rule, averaging window. With ``target_efficiency`` the scale
            is chosen step by step, as in the run. Passes are added if few workers would
            make less than a base batch. The rule "adamscale" raises an error, because a
            search does not measure its statistics.
        throughput: Time of a step; see :func:`ray_adascale.measure_throughput`. Without
            it, time is counted in passes.
        cost_per_worker_hour: Price, in any currency; needs ``throughput``.

    Raises:
        ValueError: An argument can't work, or the recipe holds no noise.
    """
    ks = sorted(set(workers))
    if not ks or any(
        isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in ks
    ):
        raise ValueError(
            f"Invalid {workers=}. Must be numbers of workers, each at least 1."
        )
    if cost_per_worker_hour is not None and not cost_per_worker_hour >= 0:
        raise ValueError(
            f"Invalid {cost_per_worker_hour=}. Must be a price per worker and hour, at "
            "least 0."
        )
    if cost_per_worker_hour is not None and throughput is None:
        raise ValueError(
            f"Invalid {cost_per_worker_hour=} without throughput. Cost follows from "
            "time: give throughput= as well, from measure_throughput() or "
            "Throughput.fit() (on the command line --measure WORKLOAD or --run RUN)."
        )
    # Precision, clipping and the order of examples do not change the forecast, so there
    # is no warning about them.
    config = replace(read_settings(config), elastic=True).with_recipe(
        replace(recipe, settings=None)
    )
    if config.rule == AUTO:
        config = replace(config, rule=auto_rule_of(recipe))
    made = make_rule(config.rule)
    if metric_of(made) != "euclidean":
        raise ValueError(
            f"Invalid rule={config.rule!r}: its gain is taken in Adam's metric, and a "
            "search probes plain gradients. There is no forecast for it."
        )
    forecaster = Forecaster(recipe, rule=made, averaging_window=config.averaging_window)
    runs = _Runs(recipe, forecaster, config.batch, throughput)
    # first, since it refuses numbers that can't make a batch
    asked = [(k, *runs.on(k)) for k in ks]
    useful = [
        max_useful_workers(functools.partial(runs.speedup, edge=edge), _MOST)
        for edge in range(3)
    ]
    pays_up_to, fewest, *_, most = (
        useful[0],
        *sorted(useful, key=lambda k: math.inf if k is None else k),
    )
    base = BaseFigures.of(recipe)
    rows: list[ForecastRow] = []
    for k, found, step_s in asked:
        expected = found.expected
        plan = expected.plans[-1] if expected.plans else config.batch.plan(k)
        batch = expected.mean_batch if expected.plans else plan.global_batch_size
        low = min(math.floor(found.low), expected.steps)
        high = math.ceil(found.high)
        scale = batch / plan.base_batch_size
        seconds = seconds_low = seconds_high = cost = None
        if throughput is not None:
            seconds = expected.steps * step_s
            seconds_low = low * step_s * throughput.low
            seconds_high = high * step_s * throughput.high
            cost = (
                None
                if cost_per_worker_hour is None
                else k * seconds / 3600 * cost_per_worker_hour
            )
        rows.append(
            ForecastRow(
                workers=k,
                accumulation=plan.passes,
                global_batch_size=plan.global_batch_size,
                scale=scale,
                last_scale=plan.scale,
                num_samples=plan.num_samples,
                examples=round(batch * expected.steps),
                epochs=None
                if base.epochs is None
                else batch * expected.steps / base.examples * base.epochs,
                steps=expected.steps,
                low=low,
                high=high,
                mean_gain=expected.mean_gain,
                efficiency=expected.mean_gain / scale,
                seconds=seconds,
                seconds_low=seconds_low,
                seconds_high=seconds_high,
                speedup=runs.base / (expected.steps * step_s),
                cost=cost,
                marginal=runs.speedup(k) - (runs.speedup(k - 1) if k > 1 else 0.0),
                pays=pays_up_to is None or k <= pays_up_to,
            )
        )
    return Forecast(
        recipe=recipe.fingerprint,
        rule=name_of(made),
        total_steps=recipe.total_steps,
        base_batch_size=recipe.base_batch_size,
        rows=tuple(rows),
        notes=tuple(_notes(recipe, rows, forecaster, throughput)),
        max_useful_workers=pays_up_to,
        max_useful_workers_low=fewest,
        max_useful_workers_high=most,
    )


class _Runs:
    """The steps of a recipe's run, and the time of a step, by the number of workers."""

    def __init__(
        self,
        recipe: Recipe,
        forecaster: Forecaster,
        batch: BatchSettings,
        throughput: Throughput | None,
    ) -> None:
        self._forecaster = forecaster
        self._batch = batch
        self._throughput = throughput
        self._found: dict[int, tuple[float, float, float]] = {}
        plan = StepPlan(recipe.base_batch_size, recipe.base_batch_size, 1, 1)
        self.base = recipe.total_steps * _step_time(throughput, plan)
        """The time of the base run."""

    def on(self, k: int, most_steps: int = MOST_STEPS) -> tuple[StepForecast, float]:
        """Return the steps on k workers, and the mean time of one step."""
        found = self._forecaster.following(self._batch, k, most_steps=most_steps)
        plans = found.expected.plans or [self._batch.plan(k)]
        return found, statistics.fmean(
            _step_time(self._throughput, plan) for plan in plans
        )

    def speedup(self, k: int, edge: int = 0) -> float:
        """Return the speed relative to the base run, not rounded to whole steps; 0 if
        these workers can't make a batch.

        Args:
            k: Number of workers.
            edge: 0 for the expected steps, 1 and 2 for the fewest and the most of the
                interval.
        """
        if k not in self._found:
            try:
                found, step_s = self.on(k, _ROUGH_STEPS)
                self._found[k] = (
                    found.expected.exact_steps * step_s,
                    found.low * step_s,
                    found.high * step_s,
                )
            except SettingError:
                self._found[k] = (math.inf,) * 3
        return self.base / self._found[k][edge]


def max_useful_workers(speedup: Callable[[int], float], most: int) -> int | None:
    """Return the largest useful number of workers: each of the last ones still adds a
    share of the first one's speed.

    The increase is averaged over up to twice as many workers: with a fixed batch, three
    workers may need as many passes as two. The number is exact up to 64 workers and to
    a sixteenth above them. It is None where even ``most`` workers are useful. The share
    is ``½ · speedup(1)``.

    Args:
        speedup: Speed by the number of workers, in any unit; 0 for workers that can't
            make a batch. One worker can make any batch that several can.
        most: Largest number of workers to try.
    """
    tried = list(range(1, min(64, most) + 1))
    while tried[-1] < most:
        tried.append(tried[-1] + tried[-1] // 16)
    here = 1
    share = _PAYS * speedup(1)
    while here <= most:
        more = (
            k
            for k in tried
            if here < k <= 2 * here and speedup(k) - speedup(here) >= share * (k - here)
        )
        found = next(more, None)
        if found is None:
            return here
        here = found
    return None


def _step_time(throughput: Throughput | None, plan: StepPlan) -> float:
    """Return the seconds of a step; without a throughput model the number of its
    passes, as if nothing else took time.
    """
    if throughput is None:
        return plan.passes
    # Workers wait for the largest pass.
    return throughput.step_seconds(plan.workers, plan.passes, plan.largest_pass)


def _notes(
    recipe: Recipe,
    rows: Sequence[ForecastRow],
    forecaster: Forecaster,
    throughput: Throughput | None,
) -> list[str]:
    if throughput is None:
        time = [
            "Without a throughput model: speed-up counts passes, as if each took as "
            "long and nothing else did."
        ]
    else:
        time = list(throughput.notes)
    base = BaseFigures.of(recipe)
    warnings = [(row.workers, epochs_warning(base, row.examples)) for row in rows]
    of_epochs = [
        f"{k} {'workers' if k > 1 else 'worker'}: {text}"
        for k, text in warnings
        if text is not None
    ][:1]
    if not forecaster.measures:
        return [*of_epochs, *time]  # the steps follow from S alone
    notes = [*of_epochs, *filter(None, [forecast_advice(recipe.optimizer_class)])]
    if rows[-1].scale > _FAR:
        notes.append(
            f"Above S = {_FAR} a forecast is rough: of twelve at S = 64, six were "
            "within a quarter of the actual steps."
        )
    if forecaster.seeds == 1:
        notes.append(
            "The recipe has the noise of one seed, so the interval is wider: search "
            "with repeats (--repeats 2) for a closer one."
        )
    probes = sum(map(len, recipe.noise_by_seed))
    if probes < 40:
        notes.append(
            f"Only {probes} probes: at large scales the steps are rough. A search with "
            "a smaller --probe-every has more."
        )
    return [*notes, *time]
