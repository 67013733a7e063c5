"""The number of workers of a run that asks for workers when they pay: settings and decision, without Ray.

An hour of a run has a price: that of k worker hours, and what an hour of waiting is worth. So an effective step on k workers
costs (value + k·cost)/v(k), with v effective steps an hour. The number with the cheapest effective steps pays best. A change of
the number is a restart, in which all workers are paid for and none trains. :func:`plan_workers` weighs both over the run's rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ._errors import SettingError
from .batch_policy import BatchPolicy
from .config import AdaScaleConfig
from .gain import plain_gain
from .optim.rules import follows_gain, make_rule
from .replay import NoiseCurve
from .throughput import Throughput

MARGIN = 2.0
"""Factor of a restart's price in the comparison, since noise and restarts are not known exactly."""
WORTH = 0.02
"""Smallest share of the price of the remaining run that a change must save."""
STAY = 5.0
"""Shortest stay by default, in restarts."""
FLOOR = 60.0
"""Remaining time of a run, in restarts, below which the number stays. docs/results/workers.md derives it."""
DECIDE_S = 10.0
"""Seconds between two decisions."""
RESTART_S = 60.0
"""Seconds of a restart, where nothing tells them."""
SETTLED = 20
"""Optimizer steps of a start before its noise and the time of its steps count."""

_CELLS = 12
_FADE = 0.25
"""Share of the run in which the difference between the run's noise and the recipe's falls to 1/e."""
_WIDEST = 1e3
"""Bound of ν = σ²/μ² and of its inverse."""
_TYPICAL = 2.0, 30.0
"""ν at the beginning of a typical base run, and its growth until the end. It is what six recorded runs have in common."""
_NEVER = 1e100
"""Seconds of a step that workers can't make. Sums and products of it are finite."""
_RESTARTS = 100.0
"""Length of a run in restarts, where the seconds of its steps are not known yet."""
_EXACT = 8
"""Numbers of workers up to this one are all tried. Above it each is an eighth larger than the one before."""


@dataclass(frozen=True, kw_only=True)
class WorkersFollow:
    """Settings of a run that asks for workers when they pay.

    Attributes:
        cost_per_worker_hour: Price of a worker hour, in any currency.
        value_per_hour: What it is worth to end an hour earlier, in the same currency. Default: the price of an hour of the
            largest number of workers. A smaller value takes fewer workers and more time.
        restart_s: Seconds of a restart, before the run has measured its own. Default: the seconds of the run's first start.
        shortest_stay_s: Seconds between two changes. Default: five times as long as a restart takes.
        max_changes: Most changes in the whole run, over all starts of the driver.
        throughput: Seconds of a step by the number of workers, see :class:`ray_adascale.Throughput`. Default: the run's own
            measurements. Numbers that it has not tried count as if their passes took as long.

    Raises:
        ValueError: A setting is out of its range.
    """

    cost_per_worker_hour: float = 1.0
    value_per_hour: float | None = None
    restart_s: float | None = None
    shortest_stay_s: float | None = None
    max_changes: int = 20
    throughput: Throughput | None = None

    def __post_init__(self) -> None:
        for name in ("cost_per_worker_hour", "value_per_hour", "restart_s", "shortest_stay_s"):
            value: object = getattr(self, name)
            if value is None and name != "cost_per_worker_hour":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise SettingError("Invalid {}. Must be a positive number.", "WorkersFollow", **{name: value})
        if isinstance(self.max_changes, bool) or not isinstance(self.max_changes, int) or self.max_changes < 0:
            raise SettingError(
                "Invalid {}. Must be an integer of at least 0.", "WorkersFollow", max_changes=self.max_changes
            )
        if self.throughput is not None and not isinstance(self.throughput, Throughput):
            raise SettingError("Invalid {}. Must be a Throughput.", "WorkersFollow", throughput=self.throughput)


def follow_settings(workers: Literal["pay"] | WorkersFollow, config: AdaScaleConfig) -> WorkersFollow:
    """Return the settings of a run that asks for workers when they pay.

    Args:
        workers: "pay" for the defaults.
        config: The settings of the run.

    Raises:
        ValueError: ``workers`` is something else, or the run's batch policy can't tell what a worker adds.
    """
    if workers != "pay" and not isinstance(workers, WorkersFollow):
        raise SettingError('Invalid {}. Must be "pay", a WorkersFollow(...), or None.', "", workers=workers)
    if not follows_gain(make_rule(config.rule)):
        raise SettingError(
            "Invalid {} with workers='pay': the clock of that rule advances by the scale, not by the measured gain, so further "
            "workers would always seem to pay. Use rule='adascale'.",
            rule=config.rule,
        )
    return WorkersFollow() if workers == "pay" else workers


@dataclass
class StepTimes:
    """Seconds of a pass by the number of workers: measured where the run has been, estimated elsewhere.

    Two numbers of workers give t(k) = a + b·(k − 1)/k by least squares: the passes, and the volume of a ring all-reduce. One
    number gives a alone.

    Attributes:
        seconds: The newest measurement by the number of workers: seconds of an optimizer step over its passes.
    """

    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, workers: int, seconds: float) -> None:
        """Set the seconds of a pass on this number of workers."""
        self.seconds[workers] = seconds

    def at(self, workers: int) -> float:
        """Return the seconds of a pass. Without any measurement return 1."""
        known = self.seconds.get(workers)
        if known is not None:
            return known
        points = [((k - 1) / k, t) for k, t in self.seconds.items()]
        if not points:
            return 1.0
        mean_x, mean_t = (sum(column) / len(points) for column in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (t - mean_t) for x, t in points) / spread if spread > 0 else 0.0
        slope = max(slope, 0.0)  # more workers never make a pass faster
        return max(mean_t + slope * ((workers - 1) / workers - mean_x), min(self.seconds.values()) * 0.5)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a decision depends on, at a step boundary.

    Attributes:
        workers: Workers that train now.
        asked: Most workers that the run has asked for; more than ``workers`` where the cluster lacks room.
        effective_steps: τ.
        total_steps: T.
        sigma2: Averaged gradient variance of one base batch; NaN where it is unknown, as on one worker with one pass at S = 1.
        mu2: Averaged squared gradient norm; NaN where it is unknown.
        batch: Examples of the present step.
        steps: Optimizer steps of this start.
        stay_s: Seconds since the last change, or since the run began.
        restart_s: Seconds of a restart.
        changes: Changes so far.
    """

    workers: int
    asked: int
    effective_steps: float
    total_steps: float
    sigma2: float
    mu2: float
    batch: int
    steps: int
    stay_s: float
    restart_s: float
    changes: int


class WorkerDecision(NamedTuple):
    """The number of workers to train with, and why.

    Attributes:
        workers: The number; the present one to keep it.
        reason: A clause in words.
    """

    workers: int
    reason: str


class WorkerController:
    """Decides on the number of workers of one run.

    Args:
        settings: The settings.
        policy: The batch policy of the run.
        least: Fewest workers.
        most: Most workers.
        outlook: The noise of the base run over τ, from the recipe. None: that of a typical run, ν = 2·30^(τ/T).
        times: Seconds of a pass; the caller adds the measurements.

    Attributes:
        value_per_hour: What it is worth to end an hour earlier.
    """

    def __init__(
        self,
        settings: WorkersFollow,
        policy: BatchPolicy,
        least: int,
        most: int,
        *,
        outlook: NoiseCurve | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.least, self.most = least, most
        self.times = StepTimes() if times is None else times
        self._outlook = outlook
        self._measured: tuple[float, float] | None = None  # τ and ν of the last decision with a measured noise
        cost = settings.cost_per_worker_hour
        self._cost = cost
        self.value_per_hour = most * cost if settings.value_per_hour is None else settings.value_per_hour

    def first(self, total_steps: float, batch: int, restart_s: float) -> WorkerDecision:
        """Return the number to begin with, by the recipe's noise or that of a typical run.

        Args:
            total_steps: T.
            batch: Examples of the first step.
            restart_s: Seconds of a restart.
        """
        candidates = numbers_to_compare(self.least, self.most)
        costs = self._costs(candidates, 0.0, total_steps, batch)
        restarts = self._restart_prices(candidates, restart_s)
        if self.settings.throughput is None and not self.times.seconds and len(candidates) > 1:
            # The seconds of a pass are not known, so a restart has the price of a share of the run.
            restarts = self._restart_prices(candidates, 1.0)
            run = float(np.median(costs.sum(axis=0)))
            restarts *= MARGIN * run / _RESTARTS / float(np.median(restarts[restarts > 0]))
        found, _ = plan_workers(candidates, None, costs, restarts)
        by = "the noise of a typical run" if self._outlook is None else "the recipe's noise"
        return WorkerDecision(found, f"cheapest by {by}")

    def decide(self, now: Situation) -> WorkerDecision:
        """Return the number of workers from here on, with the reason."""
        refusal = self._refusal(now)
        if refusal is not None:
            return WorkerDecision(now.workers, refusal)
        candidates = numbers_to_compare(self.least, self.most, now.workers)
        if now.asked > now.workers:  # the cluster has no room for more
            candidates = [k for k in candidates if k <= now.workers]
        measured = not math.isnan(now.sigma2 + now.mu2)
        if measured:
            ratio = now.sigma2 / max(now.mu2, 1e-300)
            self._measured = now.effective_steps, min(max(ratio, 1 / _WIDEST), _WIDEST)
        noise = self._present_noise(now)
        costs = self._costs(candidates, now.effective_steps, now.total_steps, now.batch)
        here = candidates.index(now.workers)
        left = self._seconds_left(now, noise)
        if left <= FLOOR * now.restart_s:
            return WorkerDecision(now.workers, f"{left:.0f} s are left, too few for a restart of {now.restart_s:.0f} s")
        found, saved = plan_workers(candidates, now.workers, costs, self._restart_prices(candidates, now.restart_s))
        if found == now.workers:
            return WorkerDecision(found, "no other number pays for a restart")
        share = saved / float(costs[:, here].sum())
        if share < WORTH:
            return WorkerDecision(now.workers, f"{found} workers would save {share:.1%} of the rest, too little")
        which = "noise" if measured else "expected noise"
        return WorkerDecision(
            found,
            f"{which} {noise:.3g} times the signal: saves {share:.0%} of the price of the rest, "
            f"with a restart of {now.restart_s:.0f} s paid for",
        )

    def _refusal(self, now: Situation) -> str | None:
        """Return why no change is due; None if one may be."""
        if now.changes >= self.settings.max_changes:
            return f"all {self.settings.max_changes} changes are used up"
        stay = STAY * now.restart_s if self.settings.shortest_stay_s is None else self.settings.shortest_stay_s
        if now.stay_s < stay:
            return f"the last change was {now.stay_s:.0f} s ago, less than {stay:.0f} s"
        if now.steps < SETTLED or (math.isnan(now.sigma2 + now.mu2) and not self._is_noise_hidden(now.workers)):
            return "the noise is not known yet"
        return None

    def _is_noise_hidden(self, workers: int) -> bool:
        """Return whether the noise stays unknown on this number of workers: one gradient sample of the base batch."""
        try:
            plan = self.policy.plan(workers)
        except ValueError:
            return False
        return not plan.measures_noise

    def _present_noise(self, now: Situation) -> float:
        """Return ν: the expected one, corrected by the one that was measured last, which may be of now."""
        return self._noise_ahead(now.total_steps, np.array([now.effective_steps]))[0]

    def _seconds_left(self, now: Situation, noise: float) -> float:
        return (now.total_steps - now.effective_steps) * self._seconds_a_step(now.workers, noise, now.batch)

    def _seconds_a_step(self, workers: int, noise: float, batch: int) -> float:
        """Return the seconds of an effective step; :data:`_NEVER` for workers that can't make a batch."""
        try:
            plan = self.policy.plan_at(workers, noise, 1.0, batch)
        except SettingError:
            return _NEVER
        given = self.settings.throughput
        seconds = plan.accumulation * self.times.at(workers) if given is None else plan.seconds(given)
        return seconds / plain_gain(noise, 1.0, plan.scale)

    def _restart_prices(self, candidates: Sequence[int], restart_s: float) -> np.ndarray:
        """Return the prices of a restart, shape (from, to): time, and the larger number of workers, for the time of a restart."""
        k = np.array(candidates, dtype=float)
        larger = np.maximum(k[:, None], k[None, :])
        prices: np.ndarray = MARGIN * restart_s * (self.value_per_hour + self._cost * larger)
        np.fill_diagonal(prices, 0.0)
        return prices

    def _costs(self, candidates: Sequence[int], tau: float, total_steps: float, batch: int) -> np.ndarray:
        """Return the prices of the remaining parts of the run, shape (parts, candidates). The first parts are the shortest."""
        edges = tau + (total_steps - tau) * (np.arange(_CELLS + 1) / _CELLS) ** 2
        middles = (edges[:-1] + edges[1:]) / 2
        price = np.array([self.value_per_hour + self._cost * k for k in candidates])
        seconds = [
            [self._seconds_a_step(k, ratio, batch) for k in candidates]
            for ratio in self._noise_ahead(total_steps, middles)
        ]
        costs: np.ndarray = np.diff(edges)[:, None] * price * np.array(seconds)
        return costs

    def _noise_ahead(self, total_steps: float, at: np.ndarray) -> list[float]:
        """Return ν at these τ: the expected one, corrected by the one that was measured last."""
        ahead = self._expected(at, total_steps)
        if self._measured is not None:
            tau, noise = self._measured
            off = math.log(noise / float(self._expected(np.array([tau]), total_steps)[0]))
            ahead = ahead * np.exp(off * np.exp(-(at - tau) / (_FADE * total_steps)))
        return [float(value) for value in ahead]

    def _expected(self, tau: np.ndarray, total_steps: float) -> np.ndarray:
        """Return ν at these τ, before the run has measured any."""
        if self._outlook is None:
            start, growth = _TYPICAL
            typical: np.ndarray = start * growth ** (tau / total_steps)
            return typical
        ratio: np.ndarray = 1 / np.clip(self._outlook.ratio_at(tau), 1 / _WIDEST, _WIDEST)
        return ratio


def numbers_to_compare(least: int, most: int, *more: int) -> list[int]:
    """Return the numbers of workers to compare, in order: few of the large ones, see :data:`_EXACT`."""
    found = [least]
    while found[-1] < most:
        found.append(min(found[-1] + max(1, (found[-1] - _EXACT) // 8 + 1 if found[-1] > _EXACT else 1), most))
    return sorted({*found, *more})


def plan_workers(
    candidates: Sequence[int], now: int | None, costs: np.ndarray, restarts: np.ndarray
) -> tuple[int, float]:
    """Return the number of workers for the first part of a run, by dynamic programming over all sequences of numbers.

    Args:
        candidates: Numbers of workers.
        now: The present number, one of them; None for a run that begins, whose first number costs no restart.
        costs: Price of each part of the run on each number, shape (parts, candidates).
        restarts: Price of a restart from each number to each other, shape (candidates, candidates); 0 on the diagonal.

    Returns:
        The number, and what the best sequence saves in comparison with the present number to the end; 0 without one.
    """
    ahead = costs[-1]
    for part in costs[-2::-1]:
        ahead = part + (restarts + ahead[None, :]).min(axis=1)
    if now is None:
        return candidates[int(ahead.argmin())], 0.0
    here = candidates.index(now)
    prices = restarts[here] + ahead
    best = int(prices.argmin())
    return candidates[best], float(costs[:, here].sum() - prices[best])
