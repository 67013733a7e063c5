"""``ray_adascale.gain`` against the literal transcription in ``reference.py`` and
against numbers worked by hand.

Two tolerances recur. ``CLOSE`` (relative 1e-12) is for the same float64 formula in
another order of operations: a few dozen roundings of 1e-16 each. Where squared norms
are subtracted (A − C), the error is relative to A and not to the difference, so those
tests allow 1e-12 of A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_adascale.gain import (
    Average,
    advanced,
    count_decay,
    gain_of_sums,
    gradient_moments,
    plain_effective_decay,
    plain_gain,
    plain_noise_scale,
    scale_at_efficiency,
)

from .model import reference_run as reference

CLOSE = 1e-12

# No time limit for a single example: on a busy machine it would measure the neighbours.
unhurried = settings(deadline=None)

# Squared norms of float32 gradients stay below 1e38² · 1e12 parameters = 1e88; float64
# sums overflow near 1e308.
statistics = st.floats(-1e300, 1e300) | st.sampled_from(
    [0.0, -0.0, 5e-324, -5e-324, 1e-300, 1e-30, 1e88, 1e300]
)
unusable = statistics | st.sampled_from([math.inf, -math.inf, math.nan])
positive = st.floats(1e-12, 1e12)
scales = st.floats(1.0, 1e6)
seeds = st.integers(0, 2**32 - 1)


def f64(x: object) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def gain(
    sigma2: Tensor, mu2: Tensor, scale: float, *, variance_floor: float = 0.0
) -> Tensor:
    """The gain of tensors, clipped as averages are when they are read."""
    return gain_of_sums(sigma2.clamp(min=variance_floor), mu2.clamp(min=0.0), scale)


def norms(samples: np.ndarray, weights: np.ndarray) -> tuple[Tensor, Tensor]:
    """``(A, C)`` of gradient samples (…, n, d)."""
    mean = np.einsum("i,...id->...d", weights, samples)
    return f64(np.einsum("i,...id,...id->...", weights, samples, samples)), f64(
        (mean * mean).sum(-1)
    )


# ---- the gain ------------------------------------------------------------------------


@unhurried
@given(statistics, statistics, scales, st.sampled_from([0.0, 1e-6]))
def test_gain_lies_between_one_and_scale(
    sigma2: float, mu2: float, scale: float, floor: float
) -> None:
    r = gain(f64(sigma2), f64(mu2), scale, variance_floor=floor).item()
    assert 1 <= r <= scale  # no tolerance: the clock and T − τ rely on it


@unhurried
@given(statistics, statistics, st.floats(1e-2, 1e6), st.sampled_from([0.0, 1e-6]))
def test_gain_is_the_papers(
    sigma2: float, mu2: float, scale: float, floor: float
) -> None:
    # σ²/S of the smallest numbers has few digits left, which puts the quotient outside
    # of where r lies, or anywhere within.
    assume(not 0 < max(sigma2, mu2) < 1e-305)
    expected = min(
        max(reference.gain(sigma2, mu2, scale, floor), min(1.0, scale)), max(1.0, scale)
    )
    actual = gain(f64(sigma2), f64(mu2), scale, variance_floor=floor).item()
    assert actual == pytest.approx(expected, rel=CLOSE)


@unhurried
@given(unusable, unusable, st.sampled_from([0.0, 1e-6]))
def test_scale_one_gives_exactly_one(sigma2: float, mu2: float, floor: float) -> None:
    # Exactly, and whatever the statistics: a run at S = 1 promises to be bit-identical
    # to the plain optimizer.
    assert gain(f64([sigma2]), f64([mu2]), 1.0, variance_floor=floor).tolist() == [1.0]
    assert gain(f64([sigma2]), f64([mu2]), 1, variance_floor=floor).tolist() == [1.0]


def test_gain_is_elementwise_and_leaves_its_arguments_alone() -> None:
    sigma2, mu2 = f64([3.0, -1.0, 0.0, 1.0]), f64([1.0, 1.0, 0.0, -1.0])
    before = sigma2.clone(), mu2.clone()
    r = gain(sigma2, mu2, 4.0)
    assert r.dtype == torch.float64
    assert r.tolist() == pytest.approx([16 / 7, 1.0, 1.0, 4.0], rel=CLOSE)
    assert torch.equal(sigma2, before[0])
    assert torch.equal(mu2, before[1])


@pytest.mark.parametrize("magnitude", [1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_equal_gradients_of_any_magnitude_gain_nothing(
    magnitude: float, n: int
) -> None:
    scale = 64.0
    g = magnitude * np.random.default_rng(n).normal(size=50)
    a, c = norms(np.tile(g, (n, 1)), np.full(n, 1 / n))
    sigma2, mu2 = gradient_moments(a, c, scale=scale, count=n)
    # A and C agree to a few ulp (1e-16) only, which σ² multiplies by S; hence 64 ·
    # 1e-15. An absolute floor under σ² would show as r = S at small magnitudes.
    assert gain(sigma2, mu2, scale).item() == pytest.approx(1.0, abs=1e-13)


# What FairScale reports for ``Linear(2, 2, bias=False)(x).sum()``, whose gradient is x
# in both rows; S = n = 2, a list of steps with two gradient samples each. The expected
# values of its own tests.
FAIRSCALE = [
    ([[[1.0, 0.0], [0.0, 1.0]]], 2.0),
    ([[[1.0, 1.0], [1.0, 1.0]]], 1.0000001249999846),
    ([[[-1.0, 1.0], [1.0, -1.0]]], 2.0),
    ([[[1.0, 4.0], [5.0, 0.5]]], 1.5022222222222221),
    ([[[-0.2, 3.0], [5.0, 0.5]]], 1.9433267229211089),
    ([[[-0.2, 3.3], [5.2, 0.7]], [[1.0, 4.0], [3.1, 0.1]]], 1.744159431359284),
]
# Its gradients are float32, so digits beyond 6e-8 may be rounding (of 3.3, say); the
# floor moves the second line by twice that, 1.25e-7.
FAIRSCALE_CLOSE = 6e-8


@pytest.mark.parametrize(("steps", "expected"), FAIRSCALE)
def test_variance_floor_reproduces_fairscale(
    steps: list[list[list[float]]], expected: float
) -> None:
    floor, average = 1e-6, Average.empty((2,))
    for xs in steps:
        a, c = norms(np.array([x + x for x in xs]), np.array([0.5, 0.5]))
        sigma2, mu2 = gradient_moments(a, c, scale=2.0, count=2)
        sample = torch.stack([sigma2.clamp(min=floor), mu2.clamp(min=0.0)])
        average = average.update(sample, count_decay(2))
    r = gain(*average.value, 2.0, variance_floor=floor).item()
    assert r == pytest.approx(expected, rel=FAIRSCALE_CLOSE)


# ---- the moments ---------------------------------------------------------------------


@unhurried
@given(seeds, st.integers(2, 9), st.floats(0.1, 1e4), st.booleans())
def test_moments_are_the_papers(seed: int, n: int, scale: float, equal: bool) -> None:
    rng = np.random.default_rng(seed)
    samples = rng.normal(size=(n, 7)) + rng.normal(size=7)
    m = np.ones(n) if equal else rng.integers(1, 20, size=n)
    weights = m / m.sum()
    a, c = norms(samples, weights)
    sigma2, mu2 = gradient_moments(a, c, scale=scale, count=n)
    expected = reference.moments(list(samples), list(weights), scale)
    assert sigma2.item() == pytest.approx(expected[0], abs=CLOSE * scale * a.item())
    assert mu2.item() == pytest.approx(expected[1], abs=CLOSE * a.item())


@pytest.mark.parametrize("count", [1, 0, -1])
def test_one_gradient_sample_has_no_variance(count: int) -> None:
    with pytest.raises(ValueError, match="one gradient sample is unknown"):
        gradient_moments(f64(1.0), f64(1.0), scale=2.0, count=count)


BASE = 32
DRAWS = 40_000
# Twelve coordinates of different noise; σ² (trace) and μ² of similar size, so that
# neither estimate drowns.
SPREAD = np.linspace(0.5, 1.5, 12)
TRUE_GRADIENT = np.linspace(-1.0, 1.0, 12)
SIGMA2, MU2 = float((SPREAD**2).sum()), float((TRUE_GRADIENT**2).sum())
MICRO_BATCHES = {
    "n=2, S=2": [32, 32],
    "n=2, S=8": [128, 128],
    "n=2, S=1": [16, 16],
    "n=8, S=8": [32] * 8,
    "n=8, S=2": [8] * 8,
    "n=8, S=3": [12] * 8,
    "n=2, unequal": [16, 112],
    "n=3, unequal": [1, 31, 64],
    "n=8, unequal": [4, 8, 12, 16, 20, 24, 28, 48],
}


def draw_moments(micro_batches: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """σ², μ² of ``DRAWS`` independent steps: g_i is normal about the true gradient,
    with covariance Σ·B0/m_i.
    """
    m = np.array(micro_batches, dtype=np.float64)
    noise = np.random.default_rng(seed).normal(size=(DRAWS, len(m), len(SPREAD)))
    samples = TRUE_GRADIENT + noise * SPREAD * np.sqrt(BASE / m)[:, None]
    a, c = norms(samples, m / m.sum())
    return gradient_moments(a, c, scale=m.sum() / BASE, count=len(m))


def mean_and_error(x: Tensor) -> tuple[float, float]:
    return x.mean().item(), x.std().item() / math.sqrt(len(x))


@pytest.mark.parametrize(
    "micro_batches", MICRO_BATCHES.values(), ids=MICRO_BATCHES.keys()
)
def test_moments_are_unbiased(micro_batches: list[int]) -> None:
    sigma2, mu2 = draw_moments(micro_batches, seed=1)
    for estimate, truth in ((sigma2, SIGMA2), (mu2, MU2)):
        mean, error = mean_and_error(estimate)
        # Five standard errors: false once in 1.7 million. They must also be less than
        # half of the least visible wrong factor, n instead of n − 1 for n = 8 (12.5 %),
        # or the test could not see it.
        assert 5 * error < 0.0625 * truth
        assert mean == pytest.approx(truth, abs=5 * error)


# ---- noise scale and efficiency ------------------------------------------------------


def test_noise_scale_of_hand_worked_statistics() -> None:
    hand_worked = {(6.0, 2.0): 96.0, (6.0, 0.0): math.inf, (6.0, -1.0): math.inf}
    hand_worked |= {(0.0, 2.0): 0.0, (-1.0, 2.0): 0.0, (0.0, 0.0): 0.0}
    # No signal: no batch is too large. No noise: every batch beyond one example is.
    # Neither: nothing to average away.
    assert {
        statistics: plain_noise_scale(*statistics, 32) for statistics in hand_worked
    } == hand_worked


@unhurried
@given(positive, positive, scales, st.integers(1, 10_000))
def test_efficiency_follows_from_the_noise_scale(
    sigma2: float, mu2: float, scale: float, base: int
) -> None:
    b_noise = plain_noise_scale(sigma2, mu2, base)
    share = gain(f64(sigma2), f64(mu2), scale).item() / scale
    # r/S = (B_noise + B0) / (B_noise + B)
    assert share == pytest.approx(
        (b_noise + base) / (b_noise + scale * base), rel=CLOSE
    )


# ---- plain numbers -------------------------------------------------------------------

# The corners of both functions: 0/0, negative, huge and tiny ones, and no sample yet.
CORNERS = [
    0.0,
    -0.0,
    5e-324,
    1e-300,
    1e-6,
    1.0,
    3.0,
    1e88,
    1e300,
    -1e-6,
    -1.0,
    -1e300,
    math.inf,
    -math.inf,
    math.nan,
]


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("floor", [0.0, 1e-6])
@pytest.mark.parametrize(
    "scale", [1e-3, 0.5, 1.0, 1, 1.5, 2.0, 3.0, 7.3, 10, 64.0, 1e6]
)
def test_the_gain_of_plain_numbers_is_that_of_tensors(
    scale: float, floor: float
) -> None:
    for sigma2 in CORNERS:
        for mu2 in CORNERS:
            expected = gain(f64(sigma2), f64(mu2), scale, variance_floor=floor).item()
            actual = plain_gain(sigma2, mu2, scale, variance_floor=floor)
            # To the bit if 1/S is exact; else a product is rounded once more.
            exact = math.frexp(scale)[0] == 0.5
            # the smallest numbers have few digits
            if not 0 < max(sigma2, mu2) < 1e-305:
                close = (
                    same(actual, expected)
                    if exact
                    else actual == pytest.approx(expected, rel=1e-15)
                )
                assert close, (sigma2, mu2)
            if math.isfinite(sigma2) and math.isfinite(mu2):
                assert actual == pytest.approx(
                    reference.gain(sigma2, mu2, scale, floor), rel=CLOSE
                ), (sigma2, mu2)


def test_before_the_first_sample_there_is_no_noise_scale() -> None:
    assert math.isnan(plain_noise_scale(math.nan, math.nan, 32))


# ---- averages ------------------------------------------------------------------------


def test_count_decay_is_fairscales() -> None:
    assert count_decay(1) == pytest.approx(0.999, rel=CLOSE)
    assert count_decay(32) == pytest.approx(0.968, rel=CLOSE)
    assert count_decay(1000) == 0.0
    assert count_decay(5000) == 0.0


def test_papers_average_moves_from_the_first_sample_that_is_not_before_theta() -> None:
    average, values = Average.empty((1,)), []
    for x in (1.0, 2.0, 4.0):
        average = average.update(f64(x), 0.6, debias=False)
        values.append(average.value.item())
    # 1/(1 − θ) = 2.5: plain means of two samples. The third has the weight 0.4, and not
    # 1/3.
    assert values == pytest.approx([1.0, 3 / 2, 0.9 + 1.6], rel=CLOSE)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("theta", [0.0, 0.5, 0.9, 0.96, 0.998])
def test_average_follows_the_literal_rule(theta: float, debias: bool) -> None:
    rng = np.random.default_rng(4)
    average, slow = Average.empty((3,)), reference.MovingAverage(debias)
    # across the border between plain mean and decay at 1/(1 − 0.9) and 1/(1 − 0.96)
    for _ in range(80):
        x = rng.normal(size=3)
        average = average.update(f64(x), theta, debias=debias)
        slow.update(x, theta)
        # Absolute, because a mean of normal samples may come close to zero; 80
        # roundings of 1e-16.
        np.testing.assert_allclose(
            average.value.numpy(), slow.value, rtol=0, atol=CLOSE
        )


def test_average_accepts_a_decay_that_lives_in_a_tensor() -> None:
    # Between steps r, and so θ, stay on the device.
    x = f64([1.0, 3.0])
    by_tensor = Average.empty((2,)).update(x, f64(0.25)).update(2 * x, f64(0.75))
    by_float = Average.empty((2,)).update(x, 0.25).update(2 * x, 0.75)
    assert torch.equal(by_tensor.value, by_float.value)


@unhurried
@given(
    st.integers(1, 15),
    st.integers(1, 15),
    st.floats(0.01, 1.0),
    st.integers(100, 100_000),
)
def test_steps_forget_by_the_effective_time_that_they_cover(
    k: int, r: int, window: float, total: int
) -> None:
    def remembered(steps: int, gain: float) -> float:
        average = Average.of(f64([1.0]), f64(1.0), torch.tensor(1))
        for _ in range(steps):
            average = average.update(
                f64(0.0), plain_effective_decay(gain, window * total)
            )
        return average.total.item()

    # k steps of gain r forget as much as k·r base steps: exp(−k·r / (window·T)). Up to
    # 225 products, 1e-16 each.
    expected = math.exp(-k * r / (window * total))
    assert remembered(k, r) == pytest.approx(expected, rel=1e-11)
    assert remembered(k * r, 1.0) == pytest.approx(expected, rel=1e-11)


# ---- a run, composed from these functions as an optimizer would ----------------------


# ---- the reference's own rules, on which other test modules rely ---------------------


@pytest.mark.parametrize(
    ("sigma2", "mu2", "efficiency", "scale"),
    [
        # (3 + 1)/0.5 − 3; and r(5) = 4/(3/5 + 1) = 2.5 is half of it
        (3.0, 1.0, 0.5, 5.0),
        (6.0, 2.0, 0.5, 5.0),
        (1.0, 4.0, 0.8, 1.3125),  # 1.25/0.8 − 0.25
        (0.0, 1.0, 0.25, 4.0),  # no noise: r = 1 at every scale
        (0.0, 0.0, 0.25, 4.0),
        (-1.0, 1.0, 0.25, 4.0),
        (1.0, 0.0, 0.5, math.inf),
        (1.0, -1.0, 0.5, math.inf),
        (1.0, 0.0, 1.0, 1.0),
        (math.nan, math.nan, 1.0, 1.0),
        (math.nan, 1.0, 0.5, math.nan),
    ],
)
def test_the_scale_of_an_efficiency(
    sigma2: float, mu2: float, efficiency: float, scale: float
) -> None:
    found = scale_at_efficiency(sigma2, mu2, efficiency)
    assert found == pytest.approx(scale, nan_ok=True)
    if math.isfinite(scale):
        assert plain_gain(sigma2, mu2, found) / found == pytest.approx(
            efficiency, nan_ok=True
        )


@pytest.mark.parametrize("efficiency", [0.0, -0.5, 1.01, math.nan])
def test_an_efficiency_that_there_is_not_is_named(efficiency: float) -> None:
    with pytest.raises(ValueError, match="above 0, and at most 1"):
        scale_at_efficiency(1.0, 1.0, efficiency)


# ---- the clock -----------------------------------------------------------------------


@unhurried
@given(batch=st.integers(1, 1000), base=st.integers(1, 100), steps=st.integers(1, 300))
def test_a_constant_gain_reaches_whole_numbers_exactly(
    batch: int, base: int, steps: int
) -> None:
    tau = 0.0
    for _ in range(steps):
        tau = advanced(tau, batch / base)
    exact = steps * batch / base  # rounded once
    assert tau == pytest.approx(exact, rel=2.0**-45)
    if (steps * batch) % base == 0:
        assert tau == exact


@given(tau=st.integers(0, 10**9), r=st.integers(1, 1000))
def test_whole_effective_steps_stay_as_they_are(tau: int, r: int) -> None:
    assert advanced(float(tau), float(r)) == tau + r


@given(tau=st.floats(0, 1e6), r=st.floats(1, 100))
def test_other_effective_steps_are_the_plain_sum(tau: float, r: float) -> None:
    found, plain = advanced(tau, r), tau + r
    assert found == plain or (
        found == round(plain) and abs(found - plain) <= 128 * math.ulp(plain)
    )


def test_a_clock_that_overflows_is_not_rounded() -> None:
    assert advanced(1.0, math.inf) == math.inf
    assert math.isnan(advanced(1.0, math.nan))
