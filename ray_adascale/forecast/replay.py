"""The replay: a run at a larger scale, step by step, over the noise that the search
measured at the base batch.

The noise goes through the arithmetic of the loop: the moving averages over effective
time, clipping on reading, the rule's pair (LR factor, clock increment). In the limit of
no averaging the number of steps is ``N(S) = ∫ dτ / r(τ; S)``. :class:`Law` converts the
noise of the base batch to that of another scale.

The replay leaves out the sampling noise of a single step's σ² and μ² on purpose. Runs
of one batch cut into 2 and into 16 gradient samples differ by at most about 5 % in
steps, because the averages reach over many samples (docs/results.md).
"""

from __future__ import annotations

import bisect
import copy
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..batch import BatchFollower, BatchSettings, StepPlan
from ..gain import advanced, plain_effective_decay, plain_gain
from ..optim.betas import BetaRule
from ..optim.rules import (
    RULES,
    RuleInput,
    ScalingRule,
    auto_rule,
    betas_of,
    make_rule,
)
from ..recipe import NoiseProbe, Recipe, smoothing_width

# grid of a smoothed curve: 160 of its 400 points lie in the first 8 %
_EARLY = 0.08
_EARLY_POINTS = 160
_POINTS = 400
_BATCH = 2_000_000  # weights computed at once
_MOST_RATIO = 3.0  # largest q: the gain hardly depends on larger ones

MOST_STEPS = 20_000
"""Base steps beyond which a forecast takes longer strides, so that it does not delay
the start of a run.
"""

UNSURE = 0.06
"""The interval is wider than the forecasts of the single seeds by a factor of
e^(±0.06·log₂S): 13, 27 and 43 % at S = 4, 16 and 64. More seeds make the noise of the
base run known, and not the law: this is the law's own error, with which 34 of 36
intervals of three seeds contained the mean of the runs, and 35 of 36 on twelve
workloads that were chosen before (docs/results.md).
"""

UNSURE_ALONE = 0.1
"""The exponent's factor for one seed: nothing tells how far its noise is from that
of other seeds.
"""


@dataclass(frozen=True)
class NoiseCurve:
    """σ² and μ² over a base run, smoothed; linear between the points, constant beyond
    them.

    Attributes:
        tau: Effective steps, increasing.
        sigma2: Gradient variance of one base batch.
        mu2: Squared norm of the true gradient. May be negative where it is lost in the
            noise.
        ratio: q = μ²/σ², smoothed over a wider range, within 0 and 3; None for zeros.
    """

    tau: np.ndarray
    sigma2: np.ndarray
    mu2: np.ndarray
    ratio: np.ndarray | None = None

    @classmethod
    def from_probes(
        cls, probes: Iterable[NoiseProbe], total_steps: float
    ) -> NoiseCurve:
        """Fit local lines to the raw probes, weighted by a Gaussian.

        The Gaussian's width (its σ) at τ is
        :func:`ray_adascale.recipe.smoothing_width`; for ``ratio`` it is that of the end
        throughout. The fit gives means, not medians: the loop's averages are means too,
        and single probes have long tails.

        Args:
            probes: The probes of one run, or of several runs with the same schedule,
                pooled.
            total_steps: T.

        Raises:
            ValueError: There are no probes.
        """
        rows = sorted((p.effective_steps, p.sigma2, p.mu2) for p in probes)
        if not rows:
            raise ValueError(
                "There are no noise probes to forecast from. Search again with "
                "confirm=True, as is the default, or record a base run with "
                "record_recipe."
            )
        points = np.array(rows, dtype=np.float64)
        first = points[0, 0]
        last = points[-1, 0]
        early = min(max(_EARLY * total_steps, first), last)
        tau = np.unique(
            np.concatenate(
                [
                    np.linspace(first, early, _EARLY_POINTS),
                    np.linspace(early, last, _POINTS - _EARLY_POINTS),
                ]
            )
        )
        width = smoothing_width(tau, total_steps)
        narrow = _local_lines(points, tau, width)
        broad = _local_lines(
            points, tau, np.full_like(tau, smoothing_width(total_steps, total_steps))
        )
        sigma2 = broad[:, 0].clip(min=0)
        mu2 = broad[:, 1].clip(min=0)
        ratio = np.where(
            mu2 >= _MOST_RATIO * sigma2,
            _MOST_RATIO,
            mu2 / np.where(sigma2 > 0, sigma2, 1),
        )
        return cls(tau, narrow[:, 0], narrow[:, 1], np.where(mu2 > 0, ratio, 0.0))

    def at(self, tau: Any) -> tuple[Any, Any]:
        """Return ``(σ², μ²)`` at τ, a number or an array."""
        return np.interp(tau, self.tau, self.sigma2), np.interp(tau, self.tau, self.mu2)

    def ratio_at(self, tau: Any) -> Any:
        """Return q at τ, a number or an array."""
        return (
            np.zeros_like(tau, dtype=float)
            if self.ratio is None
            else np.interp(tau, self.tau, self.ratio)
        )


def _local_lines(points: np.ndarray, at: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Fit weighted least-squares lines to the columns after the first, and return their
    values at ``at``.

    Args:
        points: Shape (m, 3): x, and two columns of y.
        at: Shape (n,), places.
        width: Shape (n,), the width of the weights at each place.

    Returns:
        Shape (n, 2).
    """
    nearest = np.abs(
        points[np.searchsorted(points[:, 0], at).clip(max=len(points) - 1), 0] - at
    )
    before = np.abs(points[(np.searchsorted(points[:, 0], at) - 1).clip(min=0), 0] - at)
    # otherwise the weights of far probes would all vanish
    width = np.maximum(width, np.minimum(nearest, before) / 3)
    out = np.empty((len(at), 2))
    rows = max(_BATCH // len(points), 1)
    for i in range(0, len(at), rows):
        x = points[:, 0] - at[i : i + rows, None]
        weight = np.exp(-0.5 * (x / width[i : i + rows, None]) ** 2)
        s0 = weight.sum(1)
        s1 = (weight * x).sum(1)
        s2 = (weight * x * x).sum(1)
        determinant = s0 * s2 - s1 * s1
        mean = weight @ points[:, 1:] / s0[:, None]
        # a single probe within reach: use its value
        alone = determinant <= 1e-9 * s0 * s2
        line = (
            (weight * (s2[:, None] - s1[:, None] * x))
            @ points[:, 1:]
            / np.where(alone, 1, determinant)[:, None]
        )
        out[i : i + rows] = np.where(alone[:, None], mean, line)
    return out


def noise_curves(recipe: Recipe) -> list[NoiseCurve]:
    """Return the noise curve of all the recipe's seeds pooled, followed by one for each
    seed where there are several.

    Raises:
        ValueError: The recipe holds no noise.
    """
    seeds = recipe.noise_by_seed
    pooled = [probe for noise in seeds for probe in noise]
    alone = seeds if len(seeds) > 1 else []
    return [
        NoiseCurve.from_probes(noise, recipe.total_steps) for noise in (pooled, *alone)
    ]


BETAS_CALM = 0.0
BETAS_SHAKE = 4.0
""":attr:`Law.calm` and :attr:`Law.shake` under a rule for betas, where m is a β1."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """μ² at another scale than that of the base run. σ² is per base batch and does not
    change.

    Much of μ² in a base run comes from random motion of the weights, caused by the
    noise itself. A larger batch has less noise, r/S of it at the LR lr·r, so a part of
    the motion disappears. The larger LR moves the weights more, where momentum does not
    average the motion out. After a step of gain r at scale S, the next step's μ² is
    that of the base run times

        f = 0.4 + 0.6·r/S + min(2·q·(r − 1)·(1 − m)/(1 + m), 2),    q = μ²/σ² of the base run.

    f = 1 at S = 1. With momentum the weights lag behind the clock by the memory L =
    m/(1 − m), in steps. So after large steps the replay uses the base run's noise at p
    + L·(1 − e^(−p/L)), where p is the sum of the gains as momentum averages them.

    The law is empirical, from some 200 settings on 20 workloads, six of them held out
    (docs/results.md). It was found for SGD. For an optimizer with betas, such as Adam,
    m = β1, measured on four workloads. Under a rule that changes m, f has the changed m
    of the step before, and the lag is left out. With m^e the memory is that of the base
    run on the clock. With m^√e it is longer; its forecasts are in
    benchmarks/studies/pages/momentum.md. If m is a β1 as well, f is
    1 + min(4·q·(r − 1)·(1 − m)/(1 + m), 2):
    with less noise Adam's denominator is smaller and its steps are larger, so the
    random motion does not disappear. The numbers 1 and 4 were chosen on two workloads
    and frozen for three others.

    Attributes:
        momentum: m, 0 ≤ m < 1.
        momentum_is_beta: Whether m is β1. A rule for betas may leave another momentum
            as it is, see :class:`ray_adascale.BetaRule`.
        is_muons: Whether m is Muon's.
        calm: Share of the base run's random motion that disappears with the noise.
        shake: Growth of μ² with the larger LR.
        most_shake: Limit of that growth.
    """

    momentum: float = 0.0
    momentum_is_beta: bool = True
    is_muons: bool = False
    calm: float = 0.6
    shake: float = 2.0
    most_shake: float = 2.0

    @property
    def memory(self) -> float:
        """L, the lag of the weights in steps."""
        return self.momentum / (1 - self.momentum)

    def is_changed_by(self, betas: BetaRule) -> bool:
        """Return whether a rule for betas changes m."""
        if self.momentum_is_beta:
            return True
        if self.is_muons:
            return betas.muon > 0
        return betas.momentum > 0 and self.momentum > betas.momentum_floor

    def under_betas(self, betas: BetaRule, increment: float) -> Law:
        """Return the law for the step after one in which a rule for betas changed m.

        Args:
            betas: The rule.
            increment: Effective steps of that step.
        """
        exponent = betas.exponent(increment)
        if exponent == 1:
            return self
        if self.momentum_is_beta:
            return replace(
                self,
                momentum=self.momentum**exponent,
                calm=BETAS_CALM,
                shake=BETAS_SHAKE,
            )
        if self.is_muons:
            return replace(self, momentum=self.momentum**exponent**betas.muon)
        changed = betas.shortened(self.momentum, exponent**betas.momentum)
        return replace(self, momentum=changed)

    def factor(self, ratio: float, gain: float, scale: float) -> float:
        """Return f, from q at the base batch and from r and S of the step before."""
        averaged = (1 - self.momentum) / (1 + self.momentum)
        shaken = min(self.shake * ratio * (gain - 1) * averaged, self.most_shake)
        return 1 - self.calm + self.calm * gain / scale + shaken


@dataclass(frozen=True)
class PredictedRun:
    """The result of a replay.

    Attributes:
        effective_steps: τ at the end.
        progress: Σ r over the steps: equal to τ under AdaScale's own rule.
        tau: τ before each stride.
        gains: r of each stride.
        total_steps: T.
        stride: Optimizer steps in each stride; above 1 in long runs only.
        plans: The plan of each stride in a run that changes its batch; otherwise empty.
    """

    effective_steps: float
    progress: float
    tau: tuple[float, ...]
    gains: tuple[float, ...]
    total_steps: float
    stride: float = 1.0
    plans: tuple[StepPlan, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps until τ ≥ T."""
        return len(self.tau) if self.stride == 1 else math.ceil(self.exact_steps)

    @property
    def exact_steps(self) -> float:
        """Optimizer steps until τ = T, with the needed share of the last one; at
        least 1. It is continuous, unlike ``steps``.
        """
        last = self.effective_steps - self.tau[-1]
        return max(
            (len(self.tau) - (self.effective_steps - self.total_steps) / last)
            * self.stride,
            1.0,
        )

    def steps_left(self, tau: float) -> float:
        """Return the optimizer steps from τ to T, with the needed shares of the
        first and the last one; 0 beyond T.
        """
        i = bisect.bisect_right(self.tau, tau) - 1
        end = self.tau[i + 1] if i + 1 < len(self.tau) else self.effective_steps
        done = (i + (tau - self.tau[i]) / (end - self.tau[i])) * self.stride
        return max(self.exact_steps - done, 0.0)

    @property
    def mean_gain(self) -> float:
        """Mean gain of the optimizer steps."""
        return self.progress / (len(self.tau) * self.stride)

    @property
    def mean_batch(self) -> float:
        """Mean examples a step, for a run that changes its batch."""
        return sum(plan.global_batch_size for plan in self.plans) / len(self.plans)


def replay(
    curve: NoiseCurve,
    *,
    scale: float,
    total_steps: float,
    law: Law | None,
    base_batch_size: float | None = None,
    rule: str | ScalingRule = "adascale",
    averaging_window: float = 0.05,
    most_steps: int | None = None,
    follower: BatchFollower | None = None,
) -> PredictedRun:
    """Replay a run over a noise curve, with the loop's arithmetic.

    Args:
        curve: σ²(τ), μ²(τ) of the base run.
        scale: S ≥ 1.
        total_steps: T.
        law: Converts the base run's noise to that of this scale. None: the curve is the
            noise of this run itself.
        base_batch_size: B0, for rules that need it.
        rule: The rule, as in :class:`ray_adascale.AdaScaleConfig`.
        averaging_window: Width of the averages as a share of the run, as in
            :class:`ray_adascale.AdaScaleConfig`.
        most_steps: A run of more base steps is replayed in longer strides, in as many
            of them as if T were this number. The rounding error is far below the
            uncertainty of the noise.
        follower: A fresh one that chooses the scale; ``scale`` has no effect then.

    Raises:
        ValueError: An argument is out of its range, or the rule's clock stands still.
    """
    plans: list[StepPlan] = []
    if follower is not None:
        scale = follower.plan.scale
    if not scale >= 1:
        raise ValueError(
            f"Invalid {scale=}. Must be at least 1: the batch may not be smaller than "
            "the base batch."
        )
    advance = copy.deepcopy(make_rule(rule))  # LEGW's keeps the scale of its last call
    stride = 1.0 if most_steps is None else max(total_steps / most_steps, 1.0)
    length = total_steps / stride  # T in strides, as are τ, p and L from here on
    at = np.arange(math.ceil(length)) * stride
    sigma2, mu2 = (values.tolist() for values in curve.at(at))
    ratio = curve.ratio_at(at).tolist()
    variance = 0.0
    square = 0.0
    weight = 0.0
    tau = 0.0
    progress = 0.0
    r = 1.0
    factor = 1.0
    taus: list[float] = []
    gains: list[float] = []
    # u and p of the law
    pushed = 0.0
    moved = 0.0
    betas = betas_of(advance)
    if betas is not None and (law is None or not law.is_changed_by(betas)):
        betas = None
    law_of_step = law  # with the momentum of the step before
    memory = 0.0 if law is None or betas is not None else law.memory / stride
    momentum = memory / (1 + memory)  # m, where a stride is a step
    stepped_at = scale  # of the step before
    while tau < length:
        # Raw samples averaged, debiased, clipped on reading: gain.Average in plain
        # numbers.
        theta = plain_effective_decay(r, averaging_window * length)
        now = int(tau)
        if memory > 0:
            now = min(now, int(moved + memory * -math.expm1(-moved / memory)))
        if law_of_step is not None and taus:
            factor = law_of_step.factor(ratio[now], r, stepped_at)
        variance = theta * variance + (1 - theta) * sigma2[now]
        square = theta * square + (1 - theta) * mu2[now] * factor
        weight = theta * weight + (1 - theta)
        r = plain_gain(variance / weight, square / weight, scale)
        seen = RuleInput(
            gain=r,
            scale=scale,
            effective_steps=tau * stride,
            total_steps=total_steps,
            base_batch_size=base_batch_size,
        )
        increment = advance(seen)[1]
        if not increment > 0:
            raise ValueError(
                f"Invalid rule: its clock increment is {increment!r} at effective step "
                f"{tau * stride:g}."
            )
        if law is not None and betas is not None:
            law_of_step = law.under_betas(betas, increment)
        taus.append(tau * stride)
        gains.append(r)
        tau = advanced(tau, increment)
        progress = advanced(progress, r)
        if follower is not None:
            plans.append(follower.plan)
            read = functools.partial(_clipped, variance, square, weight)
            stepped_at = scale
            scale = follower.next_plan(tau * stride, read).scale
        pushed = momentum * pushed + (1 - momentum) * r
        moved += pushed
    return PredictedRun(
        tau * stride,
        progress * stride,
        tuple(taus),
        tuple(gains),
        total_steps,
        stride,
        tuple(plans),
    )


def _clipped(variance: float, square: float, weight: float) -> tuple[float, float]:
    """Return the averaged σ² and μ² as the loop reads them; NaN before the first
    sample.
    """
    return (
        (max(variance / weight, 0.0), max(square / weight, 0.0))
        if weight > 0
        else (math.nan, math.nan)
    )


def auto_rule_of(recipe: Recipe) -> str:
    """Return the name of the rule that "auto" stands for with the recipe's optimizer:
    ``search["auto_rule"]``, or if missing that of the optimizer's class and momentum.
    """
    kept = recipe.search.get("auto_rule")
    if kept in RULES:
        return str(kept)
    kind = recipe.optimizer_class
    return auto_rule([kind], recipe.momentum if kind == "SGD" else 0.0)


@dataclass(frozen=True)
class StepForecast:
    """The expected steps of a run at one scale.

    Attributes:
        expected: The replay of the noise of all seeds together.
        low: Fewest optimizer steps of the interval, not rounded; at least 1.
        high: Most optimizer steps of the interval.
    """

    expected: PredictedRun
    low: float
    high: float


class Forecaster:
    """Replays a recipe at any scale, and gives an interval for the actual steps.

    The interval reaches from the fewest to the most steps of several replays: of the
    pooled noise and of each seed's noise alone. It is widened by e^(±0.06·log₂S), or by
    e^(±0.1·log₂S) with one seed, and ends at the steps of constant gains of 1 and of S.

    Args:
        recipe: A recipe with noise.
        rule: As in :class:`ray_adascale.AdaScaleConfig`.
        averaging_window: As in :class:`ray_adascale.AdaScaleConfig`.

    Attributes:
        seeds: Number of seeds with noise.
        measures: Whether the rule's clock advances by the measured gain. If not, the
            steps do not depend on the noise.

    Raises:
        ValueError: The recipe holds no noise, or the rule is unknown.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        rule: str | ScalingRule = "adascale",
        averaging_window: float = 0.05,
    ) -> None:
        self._recipe = recipe
        self._rule = make_rule(rule)
        self._window = averaging_window
        self._curves = noise_curves(recipe)
        self._found: dict[tuple[float, int], StepForecast] = {}
        self.seeds = max(len(self._curves) - 1, 1)
        self.measures = self._clock_at(1.0, 4.0) != self._clock_at(4.0, 4.0)

    def _clock_at(self, gain: float, scale: float) -> float:
        """Return the clock increment in the middle of a run."""
        seen = RuleInput(
            gain=gain,
            scale=scale,
            effective_steps=self._recipe.total_steps / 2,
            total_steps=self._recipe.total_steps,
            base_batch_size=self._recipe.base_batch_size,
        )
        return copy.deepcopy(self._rule)(seen)[1]

    def at(self, scale: float, *, most_steps: int = MOST_STEPS) -> StepForecast:
        """Return the steps at S; ``most_steps`` as for :func:`replay`."""
        key = scale, most_steps
        if key not in self._found:
            self._found[key] = self._steps(scale, most_steps)
        return self._found[key]

    def following(
        self, batch: BatchSettings, workers: int, *, most_steps: int = MOST_STEPS
    ) -> StepForecast:
        """Return the steps of a run with these settings, on this number of workers.

        Raises:
            ValueError: The workers can't make the batch.
        """
        if not batch.changes:
            return self.at(batch.plan(workers).scale, most_steps=most_steps)
        follower = functools.partial(
            BatchFollower,
            batch,
            workers,
            total_steps=self._recipe.total_steps,
            window=self._window * self._recipe.total_steps,
            base_steps_per_epoch=self._recipe.base_steps_per_epoch,
        )
        return self._steps(1.0, most_steps, follower)

    def _steps(
        self,
        scale: float,
        most_steps: int,
        follower: Callable[[], BatchFollower | None] = lambda: None,
    ) -> StepForecast:
        replays = [
            replay(
                curve,
                scale=scale,
                total_steps=self._recipe.total_steps,
                law=Law(
                    momentum=self._recipe.momentum,
                    momentum_is_beta=self._recipe.momentum_is_beta,
                    is_muons=self._recipe.optimizer_class == "Muon",
                ),
                base_batch_size=self._recipe.base_batch_size,
                rule=self._rule,
                averaging_window=self._window,
                most_steps=most_steps,
                follower=follower(),
            )
            for curve in self._curves
        ]
        steps = [one.exact_steps for one in replays]
        low = min(steps)
        high = max(steps)
        if self.measures:
            scales = [plan.scale for one in replays for plan in one.plans] or [scale]
            factor = math.exp(
                (UNSURE if self.seeds > 1 else UNSURE_ALONE)
                * math.log2(sum(scales) / len(scales))
            )
            # The gain lies between 1 and S, so the steps lie between those of the two.
            possible = sorted(
                self._recipe.total_steps / self._clock_at(gain, max(scales))
                for gain in (1.0, max(scales))
            )
            low = min(low, max(low / factor, possible[0]))
            high = max(high, min(high * factor, possible[1]))
        return StepForecast(replays[0], max(low, 1.0), max(high, 1.0))
