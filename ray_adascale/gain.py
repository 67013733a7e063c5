"""The mathematics of AdaScale, as pure functions: no distribution, no optimizer, no
Ray.

Source: Johnson, Agrawal, Gu, Guestrin, *AdaScale SGD: A User-Friendly Algorithm for
Distributed Training*, ICML 2020 (arXiv 2007.05105). Symbols, per optimizer step, with
weights ``w_i`` that sum to 1 over the ``n`` gradient samples ``g_i`` and
``ḡ = Σ w_i g_i``::

    A  = Σ w_i ‖g_i‖²      mean squared norm of the gradient samples, before reduction
    C  = ‖ḡ‖²              squared norm of the reduced gradient
    σ²                      gradient variance: trace of the covariance of the gradient of one *base* batch
    μ²                      squared norm of the true gradient
    S                       scale: global batch size / base batch size
    r                       gain, between 1 and S

Tensors of statistics are float64, of any common shape (in practice one entry per
parameter group). Functions called ``plain`` take numbers of the host, where making one
tensor would cost more than the formula. :func:`plain_gain` equals :func:`gain_of_sums`,
to the bit if S is a power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CLOCK_ROUNDING = 2.0**-45
"""Relative rounding of τ: 128 times the spacing of float64. A hundred additions of
the same number stay below it.
"""


def gradient_moments(
    mean_sq_norm: Tensor, reduced_sq_norm: Tensor, *, scale: float, count: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of σ² and μ² from one optimizer step with ``count`` ≥ 2
    gradient samples.

    Unbiased for every scale and count, also for micro-batches of unequal size, provided
    that ``w_i = m_i / Σm``: the covariance of ``g_i`` is ``(B0/m_i)·Σ``, so
    ``E[A − C] = (n − 1)·σ²/S``. The samples may be the B examples of the batch: then
    ``count`` is B and A the mean of ``‖g_e‖²``.

    Args:
        mean_sq_norm: ``A``.
        reduced_sq_norm: ``C``, of the same shape.
        scale: ``S``.
        count: ``n``, workers × accumulation passes; B for single examples. A tensor is
            not checked.

    Returns:
        ``(σ², μ²)``, unclipped: either may be negative in a single step.
    """
    if not isinstance(count, Tensor) and count < 2:
        raise ValueError(
            f"Invalid {count=}. The variance of one gradient sample is unknown."
        )
    sigma2 = (mean_sq_norm - reduced_sq_norm) * (scale / (count - 1))
    mu2 = torch.sub(reduced_sq_norm, sigma2, alpha=1 / scale)
    return sigma2, mu2


def gain_of_sums(sigma2: Tensor, mu2: Tensor, scale: float) -> Tensor:
    """Return :func:`plain_gain` of statistics that are not negative. A factor of
    both cancels, as the weight of an average.
    """
    r = (sigma2 + mu2) / torch.add(mu2, sigma2, alpha=1 / scale)
    # 0/0 (no gradient at all, or no sample) is a gain of 1. Rounding may leave the
    # interval by one ulp.
    return r.nan_to_num_(nan=1.0, posinf=1.0).clamp_(
        min=min(1.0, scale), max=max(1.0, scale)
    )


def plain_gain(
    sigma2: float, mu2: float, scale: float, *, variance_floor: float = 0.0
) -> float:
    """Return ``r = (σ² + μ²) / (σ²/S + μ²)`` from averaged statistics, which are
    clipped to non-negative here.

    1 where both are zero, and where either is NaN (no sample yet).

    Args:
        sigma2: Averaged gradient variance of one base batch.
        mu2: Averaged squared gradient.
        scale: ``S``. Exactly 1 gives exactly 1. Below 1 (AdaptDL allows it) the gain
            lies between S and 1.
        variance_floor: Lower bound on σ². 0 makes the gain independent of the
            gradients' magnitude; 1e-6 is FairScale's and AdaptDL's constant, and
            reports S for gradients much smaller than that.
    """
    if scale == 1:
        return 1.0
    # In this order NaN stays NaN: max() keeps its first argument unless the second is
    # larger.
    sigma2 = max(sigma2, variance_floor)
    mu2 = max(mu2, 0.0)
    denominator = sigma2 / scale + mu2
    r = (sigma2 + mu2) / denominator if denominator else 1.0
    return min(max(r, min(1.0, scale)), max(1.0, scale)) if math.isfinite(r) else 1.0


def plain_noise_scale(sigma2: float, mu2: float, base_batch_size: float) -> float:
    """Return ``B_noise = B0·σ²/μ²`` in examples: the batch size above which a larger
    batch buys less than half.

    Infinite where μ² ≤ 0 < σ², zero where there is no noise either, NaN where either is
    NaN (no sample yet). At the batch size B the efficiency ``r/S`` is
    ``(B_noise + B0) / (B_noise + B)``.

    The simple noise scale of McCandlish et al., *An Empirical Model of Large-Batch
    Training* (arXiv 1812.06162).
    """
    if math.isnan(sigma2) or math.isnan(mu2):
        return math.nan
    if mu2 > 0:
        return base_batch_size * max(sigma2, 0.0) / mu2
    return math.inf if sigma2 > 0 else 0.0


def advanced(effective_steps: float, increment: float) -> float:
    """Return τ after a step: the sum, or the whole number that it equals but for
    rounding.

    Ten steps with r = 1.1 are 11 effective steps, where their sum is
    10.999999999999998. The LR is that of ⌊τ⌋, and evaluations and the end come when τ
    reaches a number, so each would come a step late.

    Args:
        effective_steps: τ before the step.
        increment: r, or the increment of another rule.
    """
    tau = effective_steps + increment
    nearest = float(round(tau)) if math.isfinite(tau) else tau
    return nearest if abs(tau - nearest) <= _CLOCK_ROUNDING * nearest else tau


def whole_number(x: float) -> int:
    """Return ⌊x⌋; an x within rounding of a whole number counts as that number: 1000 /
    (1000 / 3) is 3 epochs, not 2.

    The tolerance is about a thousand times the rounding error of the two divisions, and
    far below the distance of a true fraction from a whole number, which is at least 1 /
    len(dataset).
    """
    nearest = round(x)
    return nearest if abs(x - nearest) <= 1e-12 * max(1.0, abs(x)) else math.floor(x)


def scale_at_efficiency(sigma2: float, mu2: float, efficiency: float) -> float:
    """Return the scale with the efficiency ``r/S = E``: ``S = (ν + 1)/E − ν``, ν =
    σ²/μ².

    It is at least 1/E: even without any noise S = 1/E has this efficiency, since r ≥ 1.

    Args:
        sigma2: Averaged gradient variance of one base batch.
        mu2: Averaged squared gradient. Both are clipped to non-negative here.
        efficiency: E in (0, 1]. 1 gives 1 exactly, whatever the noise.

    Returns:
        S; infinite where μ² ≤ 0 < σ² (and E < 1), NaN where either is NaN (no sample
        yet, and E < 1).
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"Invalid {efficiency=}. Must be above 0, and at most 1.")
    if efficiency == 1:
        return 1.0
    nu = plain_noise_scale(sigma2, mu2, 1.0)
    # (ν + 1)/E − ν, without a difference of large numbers
    return (nu * (1 - efficiency) + 1) / efficiency


def count_decay(count: int) -> float:
    """Return FairScale's θ = max(1 − n/1000, 0): the weight of the past in a moving
    average over optimizer steps.
    """
    return max(1.0 - count / 1000.0, 0.0)


def plain_effective_decay(advance: float, window: float) -> float:
    """Return θ_t = exp(−Δτ / window) of a moving average over *effective* time.

    Memory reaches back over the same share of the run at every scale and every n, so
    the outcome does not depend on how many workers share one batch.

    Args:
        advance: Δτ since the last sample: ``r_{t−1}`` where each step has one; 1 before
            the first step.
        window: Width in effective steps, e.g. 0.05·T.
    """
    return math.exp(-advance / window)


@dataclass(frozen=True)
class Average:
    """A moving average of statistics. ``value`` is NaN before the first sample.

    ``total`` is the weighted sum of the samples and ``weight`` the sum of their
    weights, so that ``total / weight`` has no bias towards the start value (the
    correction of Adam's moments). The paper's own rule, a plain mean at first, fits
    into the same two numbers (``debias=False``).

    Attributes:
        packed: :attr:`total`, and :attr:`weight` as one more row; float64. One tensor,
            so that a step updates it with one call.
        count: int64, samples seen; shaped as ``weight``.
    """

    packed: Tensor
    count: Tensor

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Average:
        """Return the average of no sample, with one weight for each column of
        samples of this shape.
        """
        rows, *columns = shape
        return cls(
            torch.zeros((rows + 1, *columns), dtype=torch.float64, device=device),
            torch.zeros(columns, dtype=torch.int64, device=device),
        )

    @classmethod
    def of(cls, total: Tensor, weight: Tensor, count: Tensor) -> Average:
        """Return the average with these numbers."""
        return cls(torch.cat([total, weight.unsqueeze(0)]), count)

    @property
    def total(self) -> Tensor:
        """The weighted sum of the samples; float64, the shape of a sample."""
        return self.packed[:-1]

    @property
    def weight(self) -> Tensor:
        """The sum of the weights, between 0 and 1; float64, one for each column:
        columns may begin at different steps.
        """
        return self.packed[-1]

    @property
    def value(self) -> Tensor:
        return self.total / self.weight

    def to(self, device: torch.device) -> Average:
        """Return the average on a device: this object, if it is there."""
        if self.packed.device == device:
            return self
        return Average(self.packed.to(device), self.count.to(device))

    def update(
        self,
        sample: Tensor,
        decay: Tensor | float,
        *,
        debias: bool = True,
        use: Tensor | None = None,
    ) -> Average:
        """Return the average after one more sample; no host synchronization.

        Args:
            sample: Of the shape of ``total``, or a number for all of it.
            decay: θ, the weight of the past, in [0, 1).
            debias: True: ``total ← θ·total + (1−θ)·x``, ``weight ← θ·weight + (1−θ)``.
                False (the paper's Appendix B.3): plain mean of all samples while t <
                1/(1−θ), then ``θ·old + (1−θ)·x``.
            use: Bool, 0-dim: if false, the average stays unchanged.
        """
        one = torch.ones_like(self.packed[-1:])
        return self.update_packed(
            torch.cat([sample.expand(self.total.shape), one]),
            decay,
            debias=debias,
            use=use,
        )

    def update_packed(
        self,
        sample: Tensor,
        decay: Tensor | float,
        *,
        debias: bool = True,
        use: Tensor | None = None,
    ) -> Average:
        """Return :meth:`update` of a sample that has a row of ones as its last."""
        weight: Tensor | float = 1 - decay
        if not debias:
            # A plain mean is the recursion with θ_t = 1 − 1/t, whose weights sum to 1
            # from the first sample on.
            share = 1 / (self.count + 1).double()
            weight = torch.where(
                self.count + 1 < 1 / weight, share, torch.zeros_like(share) + weight
            )
        elif isinstance(weight, Tensor):
            weight = weight.to(sample.dtype)
        packed = torch.lerp(self.packed, sample, weight)
        if use is None:
            return Average(packed, self.count + 1)
        return Average(torch.where(use, packed, self.packed), self.count + use)
