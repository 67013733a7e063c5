"""Advice on rank 0: when a warning of the noise comes, and which keys count as
read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_adascale.run.observe.advice import NoiseWarning, UnreadHyperparameters
from ray_adascale.workload import ConfigAccessLog

from ...samples_of import step_of

SMALL, LARGE = 1.0, 100.0
"""Noise scales, in examples. The batch of 16 is larger than the first and smaller
than the second.
"""


def warned_at(
    listener: NoiseWarning,
    noise_scale: Callable[[int], float],
    *,
    scale: int = 4,
    total_steps: int = 10,
    gain: Callable[[int], float] = lambda _: 1.0,
) -> list[int]:
    """Steps, of 80, after which the listener warns; τ is the number of the step."""
    at: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(1, 81):
            step = step_of(
                number, scale=scale, noise_scale=noise_scale(number), gain=gain(number)
            )
            listener.after_step(replace(step, total_steps=total_steps))
            at += [number] * (len(caught) - len(at))
    assert all("exceeds the gradient noise scale" in str(w.message) for w in caught)
    return at


@pytest.mark.parametrize(
    ("window", "at"), [(2.0, 20), (6.5, 20), (7.0, 21), (10.0, 30)]
)
def test_a_warning_waits_for_three_windows_and_for_20_steps(
    window: float, at: int
) -> None:
    assert warned_at(NoiseWarning(window, None), lambda _: SMALL) == [at]


def test_a_warning_needs_one_whole_window_with_a_too_large_batch() -> None:
    assert warned_at(NoiseWarning(5.0, None), lambda n: LARGE if n < 40 else SMALL) == [
        45
    ]
    assert warned_at(
        NoiseWarning(5.0, None), lambda n: math.nan if n < 40 else SMALL
    ) == [45]


@pytest.mark.parametrize("between", [LARGE, math.nan])
def test_a_batch_that_is_small_enough_again_resets_the_window(between: float) -> None:
    assert warned_at(
        NoiseWarning(5.0, None), lambda n: between if n == 18 else SMALL
    ) == [24]
    assert (
        warned_at(NoiseWarning(5.0, None), lambda n: between if n % 5 == 0 else SMALL)
        == []
    )


def test_a_run_that_was_efficient_so_far_is_not_warned() -> None:
    # At S = 4 the mean of r/S over 30 steps of r = 3 and k of r = 1 falls below one
    # half after step 60.
    gain: Callable[[int], float] = lambda n: 3.0 if n <= 30 else 1.0  # noqa: E731
    assert warned_at(NoiseWarning(2.0, None), lambda _: SMALL, gain=gain) == [61]
    assert warned_at(NoiseWarning(2.0, None), lambda _: SMALL, gain=lambda _: 2.0) == []


def test_a_warm_up_is_no_reason_for_a_warning() -> None:
    assert warned_at(NoiseWarning(5.0, None, warmed_up=40.0), lambda _: SMALL) == [45]
    assert (
        warned_at(
            NoiseWarning(5.0, None, warmed_up=40.0),
            lambda n: SMALL if n < 44 else LARGE,
        )
        == []
    )


def test_the_base_batch_is_never_too_large() -> None:
    assert warned_at(NoiseWarning(2.0, None), lambda _: SMALL, scale=1) == []


@pytest.mark.parametrize(("whole", "at"), [(50, []), (51, [20])])
def test_a_forecast_that_is_efficient_as_a_whole_silences_the_warning(
    whole: int, at: list[int]
) -> None:
    # T = 100 at S = 4: with 50 steps the run's mean efficiency is one half.
    forecast: Any = SimpleNamespace(steps_left=lambda tau: whole - tau)
    assert (
        warned_at(NoiseWarning(2.0, forecast), lambda _: SMALL, total_steps=100) == at
    )


def test_a_key_that_is_read_before_the_end_of_the_first_step_counts_as_read() -> None:
    reads = ConfigAccessLog({"lr": 0.1, "lazy": 1, "unused": 2})
    reads.read["lr"] = None
    listener = UnreadHyperparameters(reads)
    reads.read["lazy"] = None
    with pytest.warns(
        UserWarning, match="has not read 'unused' of its config"
    ) as caught:
        listener.after_step(step_of(1))
    assert len(caught) == 1
    listener.after_step(step_of(2))  # once: a warning is an error here


def test_no_warning_comes_after_the_first_step_or_without_unread_keys() -> None:
    reads = ConfigAccessLog({"lr": 0.1})
    reads.read["lr"] = None
    UnreadHyperparameters(reads).after_step(step_of(1))
