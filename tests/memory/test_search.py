"""The search's arithmetic: predictions and decisions by hand, and whole searches over models of memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ray_adascale.memory.search import Ceiling, Decision, Trial, decide, growth, predicted

NO_NOISE = 0.0


def linear(size: int, fixed: float = 100, slope: float = 2, rest: float = 90) -> Trial:
    return Trial(size, int(rest), int(fixed + slope * size), int(fixed + slope * size))


def test_growth_of_trials_on_a_line_is_its_slope() -> None:
    trials = [linear(4), linear(8), linear(16)]
    assert growth(trials, NO_NOISE) == 2
    # (400 − 132) / 2 examples more than 16.
    assert predicted(trials, 400, NO_NOISE) == 16 + 134
    # Two measurements may differ by 8: 2 + 8/8 from 8 to 16, 2 + 8/12 from 4 to 16, of which the larger counts.
    assert growth(trials, 8) == 3
    # The growth from 4 to 16 counts where that from 8 to 16 seems to be none: (132 − 108) / 12.
    assert growth([linear(4), Trial(8, 90, 132, 132), linear(16)], NO_NOISE) == 2
    # 15 and 16 are too near to each other to tell, and the noise of 8 would be all of it.
    assert growth([linear(8), linear(15), linear(16)], 8) == 3


def test_one_trial_counts_all_its_memory_as_growth() -> None:
    # 1.5 · (108 − 90) / 4
    assert growth([linear(4)], NO_NOISE) == 6.75


def test_growth_hidden_under_gradients_is_that_of_the_forward_pass_and_more() -> None:
    hidden = [Trial(4, 90, 100 + 4 * 3, 500), Trial(8, 90, 100 + 8 * 3, 500)]
    assert growth(hidden, NO_NOISE) == 1.5 * 3


def test_sizes_quadruple_in_half_of_the_memory_and_then_double_while_they_are_predicted_to_fit() -> None:
    # 90 bytes are in use. 100 + 2 · 224 = (90 + 1006) / 2, which is 4 · 56 examples and one less than 4 · 57 need.
    assert decide([linear(28), linear(56)], Ceiling(1006, 1006), NO_NOISE, largest=10**6) == Decision(224, final=False)
    assert decide([linear(28), linear(57)], Ceiling(1006, 1006), NO_NOISE, largest=10**6) == Decision(114, final=False)
    ceiling = Ceiling(200, 200)
    assert decide([linear(4), linear(8)], ceiling, NO_NOISE, largest=10**6) == Decision(16, final=False)
    assert decide([linear(4), linear(8)], ceiling, NO_NOISE, largest=11) == Decision(11, final=False)
    assert decide([linear(4), linear(8)], ceiling, NO_NOISE, largest=8) == Decision(8, final=True)


def test_the_answer_is_below_the_largest_size_by_the_margin() -> None:
    ceiling = Ceiling(1000, 1000)  # which 450 examples reach: 0.95 · 450 = 427
    assert decide([linear(128), linear(256)], ceiling, NO_NOISE, largest=10**6) == Decision(427, final=False)
    assert decide([linear(256), linear(427)], ceiling, NO_NOISE, largest=10**6) == Decision(427, final=True)
    # A size that turned out to be too large is not the answer.
    assert decide([linear(256), linear(440)], ceiling, NO_NOISE, largest=10**6) == Decision(427, final=True)


def test_a_trial_keeps_to_its_own_ceiling_and_the_answer_to_that_of_the_run() -> None:
    # A copy of the weights takes 200 bytes: the run may use 1200 of a trial's bytes, and 550 examples, of which 522.
    ceiling = Ceiling(1000, 1200)
    trial = decide([linear(128), linear(256)], ceiling, NO_NOISE, largest=10**6)
    assert trial == Decision(441, final=False)  # 100 + 2 · 441 = 1000 − 0.02 · 900
    assert decide([linear(256), linear(441)], ceiling, NO_NOISE, largest=10**6) == Decision(522, final=True)


def test_after_a_failure_the_search_halves_the_distance() -> None:
    ceiling = Ceiling(10**6, 10**6)
    assert decide([linear(64)], ceiling, NO_NOISE, largest=10**6, failed=128) == Decision(96, final=False)
    # 96 fits and 98 does not: 0.95 · 98 = 93 keeps the margin.
    assert decide([linear(96)], ceiling, NO_NOISE, largest=10**6, failed=98) == Decision(93, final=True)


def test_nothing_fits() -> None:
    # What one example would need is not guessed from two that are too large.
    assert decide([linear(2)], Ceiling(103, 103), NO_NOISE, largest=10**6) == Decision(0, final=True)
    assert decide([linear(1)], Ceiling(101, 101), NO_NOISE, largest=10**6) == Decision(0, final=True)
    # One example fits, and the margin does not make it none.
    assert decide([linear(1)], Ceiling(102, 102), NO_NOISE, largest=10**6) == Decision(1, final=True)


def test_below_a_size_that_is_too_large_the_memory_is_interpolated() -> None:
    # 100 + 2 · 300 = 700; with noise the growth is 2 + 64/256, which would allow more below 512.
    assert predicted([linear(256), linear(512)], 700, 64) == 300


def test_workers_agree_on_the_smallest_size_and_its_end() -> None:
    decisions = [Decision(128, final=False), Decision(100, final=True), Decision(100, final=False)]
    assert Decision.of(min(d.as_number() for d in decisions)) == Decision(100, final=True)


def search(
    forward: Callable[[int], float], peak: Callable[[int], float], limit: int, fails_beyond: float = math.inf
) -> tuple[int, list[int]]:
    """A whole search over a model of memory. Returns the answer and the sizes that were tried."""
    trials: list[Trial] = []
    tried, failed, size = [], None, 2
    while True:
        tried.append(size)
        assert len(tried) < 40
        if size > fails_beyond:
            failed = size
        else:
            trials.append(Trial(size, int(forward(0)), int(forward(size)), int(peak(size))))
        decision = decide(trials, Ceiling(limit, limit), 1.0, largest=10**9, failed=failed)
        if decision.final:
            return decision.size, tried
        size = decision.size


@pytest.mark.parametrize("fixed", [0, 1_000, 50_000, 90_000])
@pytest.mark.parametrize("slope", [3, 40, 700])
@pytest.mark.parametrize("gradients", [0, 20_000])
def test_no_trial_crosses_the_limit_and_the_answer_is_within_ten_percent(
    fixed: int, slope: int, gradients: int
) -> None:
    """Memory of 100 000 bytes; the backward pass needs a third more than the forward pass, or the gradients if these are more."""
    limit = 120_000

    def forward(m: int) -> float:
        return fixed + 0.75 * slope * m

    def peak(m: int) -> float:
        return fixed + max(slope * m, gradients)

    answer, tried = search(forward, peak, limit)
    true = (limit - fixed) // slope
    assert max(map(peak, tried)) <= limit
    assert 0.9 * true <= answer <= true
    assert len(tried) < 18


def test_memory_that_jumps_is_found_by_failures() -> None:
    # From 300 examples on, an operator takes another path and fails.
    answer, tried = search(lambda m: 10 * m, lambda m: 12 * m, 100_000, fails_beyond=300)
    assert 0.9 * 300 <= answer <= 300
    assert max(tried) > 300
