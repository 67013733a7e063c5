"""AdaScale as the paper states it, slow and literal: what the production code is tested against.

Johnson et al., *AdaScale SGD: A User-Friendly Algorithm for Distributed Training*, ICML 2020 (arXiv 2007.05105), in
NumPy float64, one gradient sample at a time. It imports nothing from ``ray_adascale``, and has no speed to be proud of.

Symbols: gradient samples ``g_i`` (i = 1…n) with weights ``w_i`` that sum to 1, scale ``S``, gradient variance ``σ²`` of
one base batch, squared gradient ``μ²``, gain ``r``, effective steps ``τ``, total steps ``T``, decay ``θ``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def moments(samples: Sequence[Vector], weights: Sequence[float], scale: float) -> tuple[float, float]:
    """``(σ², μ²)`` of one optimizer step from its n ≥ 2 flat gradient samples, unclipped."""
    n = len(samples)
    # ḡ = Σ w_i g_i
    mean = np.sum([w * g for w, g in zip(weights, samples, strict=True)], axis=0)
    # A = Σ w_i ‖g_i‖²
    a = sum(w * float(g @ g) for w, g in zip(weights, samples, strict=True))
    # C = ‖ḡ‖²
    c = float(mean @ mean)
    # σ² = S · (A − C) / (n − 1)
    sigma2 = scale * (a - c) / (n - 1)
    # μ² = C − σ² / S
    return sigma2, c - sigma2 / scale


def differenced_moments(g: Vector, g_prev: Vector, scale: float) -> tuple[float, float]:
    """``(σ², μ²)`` from the mean gradients of two consecutive steps, for n = 1."""
    # σ² = (S/2) · ‖g_t − g_{t−1}‖²
    sigma2 = scale / 2 * float((g - g_prev) @ (g - g_prev))
    # μ² = ⟨g_t, g_{t−1}⟩
    return sigma2, float(g @ g_prev)


def gain(sigma2: float, mu2: float, scale: float, floor: float = 0.0) -> float:
    """``r``, from statistics clipped here: σ² at ``floor``, μ² at 0. Both zero: 1."""
    sigma2, mu2 = max(sigma2, floor), max(mu2, 0.0)
    if sigma2 / scale + mu2 == 0:
        return 1.0
    # r = (σ² + μ²) / (σ²/S + μ²)
    return (sigma2 + mu2) / (sigma2 / scale + mu2)


class MovingAverage:
    """Of vectors; ``value`` is None before the first sample."""

    def __init__(self, debias: bool) -> None:
        self.debias = debias
        self.t = 0
        self.biased: Vector | float = 0.0
        self.weights = 0.0
        self.value: Vector | None = None

    def update(self, x: Vector, theta: float) -> None:
        self.t += 1
        if self.debias:
            # biased ← θ·biased + (1−θ)·x;  weights ← θ·weights + (1−θ);  value = biased / weights
            self.biased = theta * self.biased + (1 - theta) * x
            self.weights = theta * self.weights + (1 - theta)
            self.value = self.biased / self.weights
        elif self.value is None:
            self.value = x
        elif self.t < 1 / (1 - theta):
            # mean_t = ((t−1)·mean_{t−1} + x_t) / t
            self.value = ((self.t - 1) * self.value + x) / self.t
        else:
            # value ← θ·value + (1−θ)·x
            self.value = theta * self.value + (1 - theta) * x


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step yields.

    Attributes:
        gains: r for the learning rate of each parameter group (all the same with ``single_gain``).
        gain: r that advances the clock; NaN for a skipped step.
        mean_gradient: ḡ of each parameter group.
        sigma2: This step's unclipped σ², summed over groups; NaN where the step yields none.
        mu2: This step's unclipped μ², likewise.
        effective_steps: τ after the step.
        skipped: A gradient sample was not finite.
    """

    gains: list[float]
    gain: float
    mean_gradient: list[Vector]
    sigma2: float
    mu2: float
    effective_steps: float
    skipped: bool = False


class ReferenceAdaScale:
    """The statistics of a whole run; the caller owns weights and learning rate.

    Args:
        scale: S.
        n: Gradient samples in one optimizer step.
        averaging: ``"count"``: θ = ``smoothing``. ``"effective"``: θ_t = exp(−r_{t−1} / (window·T)).
        smoothing: θ of the count rule; None: max(1 − n/1000, 0).
        debias: False: the paper's Appendix B.3, a plain mean at first. Meant for the count rule, whose θ is constant.
        clip: ``"samples"``: σ² at ``variance_floor`` and μ² at 0 before averaging; ``"averages"``: only on reading.
        variance_floor: Lower bound on σ².
        window: Width of the effective average as a fraction of the run.
        total_steps: T, needed by the effective rule.
        single_gain: Sum the statistics over parameter groups before anything else.
    """

    def __init__(
        self,
        *,
        scale: float,
        n: int,
        averaging: Literal["count", "effective"] = "count",
        smoothing: float | None = None,
        debias: bool = True,
        clip: Literal["samples", "averages"] = "samples",
        variance_floor: float = 0.0,
        window: float = 0.05,
        total_steps: float | None = None,
        single_gain: bool = False,
    ) -> None:
        if averaging == "effective" and total_steps is None:
            raise ValueError("The effective rule needs total_steps.")
        self.scale, self.n = scale, n
        self.averaging, self.smoothing, self.debias, self.clip = averaging, smoothing, debias, clip
        self.variance_floor, self.window, self.total_steps = variance_floor, window, total_steps
        self.single_gain = single_gain
        self.effective_steps = 0.0
        self.previous_gain = 1.0  # r_{−1}
        self.previous_mean: list[Vector] | None = None  # ḡ_{t−1}, for n = 1
        self._restart()

    def _restart(self) -> None:
        self.sigma2, self.mu2 = MovingAverage(self.debias), MovingAverage(self.debias)

    def set_scale(self, scale: float) -> None:
        """σ² is per base batch, so nothing is rescaled; but ḡ_{t−1} came from a batch of another size."""
        if scale != self.scale:
            self.previous_mean = None
        self.scale = scale

    def set_n(self, n: int) -> None:
        """The two estimators have different biases: going from one to the other starts the averages anew."""
        if n != self.n:
            self.previous_mean = None
        if (n == 1) != (self.n == 1):
            self._restart()
        self.n = n

    def theta(self) -> float:
        if self.averaging == "effective":
            assert self.total_steps is not None
            # θ_t = exp(−r_{t−1} / (window·T))
            return math.exp(-self.previous_gain / (self.window * self.total_steps))
        # θ = max(1 − n/1000, 0)
        return max(1 - self.n / 1000, 0.0) if self.smoothing is None else self.smoothing

    def step(self, samples: Sequence[Sequence[Vector]], weights: Sequence[float] | None = None) -> StepResult:
        """``samples[i][k]`` is the flat gradient of gradient sample i for parameter group k; weights default to 1/n."""
        assert len(samples) == self.n
        if weights is None:
            weights = [1 / self.n] * self.n
        by_group = list(zip(*samples, strict=True))
        groups = len(by_group)
        with np.errstate(invalid="ignore"):  # ∞ − ∞ in a step that is skipped below
            mean = [np.sum([w * g for w, g in zip(weights, gs, strict=True)], axis=0) for gs in by_group]
        if not all(np.isfinite(g).all() for gs in by_group for g in gs):
            self.previous_mean = None  # the next difference would span two steps
            return StepResult([math.nan] * groups, math.nan, mean, math.nan, math.nan, self.effective_steps, True)

        statistics = None  # for each group (σ², μ²)
        if self.n > 1:
            statistics = np.array([moments(gs, weights, self.scale) for gs in by_group])
        elif self.previous_mean is not None:
            pairs = zip(mean, self.previous_mean, strict=True)
            statistics = np.array([differenced_moments(g, g_prev, self.scale) for g, g_prev in pairs])
        self.previous_mean = mean

        total_sigma2 = total_mu2 = math.nan
        if statistics is not None:
            total_sigma2, total_mu2 = statistics.sum(axis=0)
            if self.single_gain:
                statistics = statistics.sum(axis=0, keepdims=True)
            sigma2, mu2 = statistics.T
            if self.clip == "samples":
                sigma2, mu2 = np.maximum(sigma2, self.variance_floor), np.maximum(mu2, 0.0)
            # This step's sample enters the averages before r_t is read from them: FairScale's order.
            theta = self.theta()
            self.sigma2.update(sigma2, theta)
            self.mu2.update(mu2, theta)

        gains, clock = self._gains(groups)
        # τ ← τ + r
        self.effective_steps += clock
        self.previous_gain = clock
        return StepResult(gains, clock, mean, float(total_sigma2), float(total_mu2), self.effective_steps)

    def _gains(self, groups: int) -> tuple[list[float], float]:
        sigma2, mu2 = self.sigma2.value, self.mu2.value
        if sigma2 is None or mu2 is None:
            return [1.0] * groups, 1.0
        # The clock: the gain of the sums over groups.
        clock = gain(float(sigma2.sum()), float(mu2.sum()), self.scale, self.variance_floor)
        if self.single_gain:
            return [clock] * groups, clock
        pairs = zip(sigma2, mu2, strict=True)
        return [gain(float(s), float(m), self.scale, self.variance_floor) for s, m in pairs], clock


def adam_with_changing_betas(
    start: Vector,
    gradients: Sequence[Vector | None],
    exponents: Sequence[float],
    lrs: Sequence[float],
    *,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    infinity: bool = False,
) -> list[Vector]:
    """A parameter after each step of AdamW, of which step k has the betas ``β^e_k``; the products of betas written out.

    Args:
        start: The parameter.
        gradients: One each step; None: the step leaves the parameter alone.
        exponents: e of each step.
        lrs: Learning rate of each step.
        betas: β1, β2 at e = 1.
        weight_decay: Decoupled.
        eps: ε.
        infinity: Adamax in place of Adam, for which ε is added to |g|.
    """
    x = start.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    product1 = product2 = 1.0
    out = []
    for g, e, lr in zip(gradients, exponents, lrs, strict=True):
        if g is not None:
            b1, b2 = betas[0] ** e, betas[1] ** e
            # 1 − Π β: the sum of the weights that an average has given to gradients so far
            product1, product2 = product1 * b1, product2 * b2
            m = b1 * m + (1 - b1) * g
            if infinity:
                v = np.maximum(b2 * v, np.abs(g) + eps)
                x = x - lr * m / (1 - product1) / v
            else:
                v = b2 * v + (1 - b2) * g * g
                x = x * (1 - lr * weight_decay)
                x = x - lr * (m / (1 - product1)) / (np.sqrt(v / (1 - product2)) + eps)
        out.append(x)
    return out
