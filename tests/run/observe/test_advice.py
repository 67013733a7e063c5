"""Advice on rank 0: when a warning of the noise comes, which keys count as read, and
what is warned of for an optimizer.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, Muon, Optimizer, RMSprop

from ray_adascale import OptimizerChain
from ray_adascale.optim.rules import make_rule
from ray_adascale.run.observe.advice import (
    NoiseWarning,
    UnreadHyperparameters,
    class_name,
    forecast_advice,
    sum_advice,
    warn_of_optimizer,
)
from ray_adascale.workload import ConfigAccessLog

from ...samples_of import recipe, step_of

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


# ---- by the optimizer ----------------------------------------------------------------


class Lion(Optimizer):
    """Stands for the class of that name in any package."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})


class Own(AdamW):
    """A user's class."""


def made(kind: Any) -> Any:
    return kind([torch.zeros(2, 2, requires_grad=True)], lr=0.1)


def advice(rule: Any, optimizer: Any, of: Any = None) -> str | None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_optimizer(make_rule(rule), optimizer, of)
    return str(caught[0].message) if caught else None


@pytest.mark.parametrize(
    ("rule", "kinds", "words"),
    [
        ("adascale", [SGD], None),
        ("sqrt", [Lion], None),
        ("adamscale", [Adam], "is experimental.*Leave rule out"),
        ("adascale", [Muon], None),
        ("adascale", [Adam], "the averages of Adam reach over r times.*Leave rule out"),
        ("adascale", [Own], "the averages of Own reach over r times.*Leave rule out"),
        ("adascale", [SGD, AdamW], "the averages of SGD and AdamW reach over r times"),
        (
            "adascale",
            [Muon, AdamW],
            "the averages of Muon and AdamW reach over r times",
        ),
        ("adascale", [Lion], "the averages of Lion reach over r times.*Leave rule out"),
        ("adascale", [Lion, AdamW], "not with Lion and AdamW. The run goes on"),
        ("adascale", [RMSprop], "not with RMSprop. The run goes on"),
        ("adascale_memory", [AdamW], None),
        ("adascale_memory", [Muon, AdamW], None),
        ("adascale_memory", [Lion], None),
        ("adascale_memory", [SGD], None),
        ("adascale_memory", [Adamax], "not with Adamax"),
    ],
)
def test_a_rule_that_was_not_measured_with_an_optimizer_or_fell_behind_warns(
    rule: Any, kinds: list[Any], words: str | None
) -> None:
    parts = [made(kind) for kind in kinds]
    found = advice(rule, parts[0] if len(parts) == 1 else OptimizerChain(parts))
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SGD, None),
        (Own, None),
        (Muon, None),
        (Lion, "2.3 times the forecast steps.*lion.md"),
        (RMSprop, "but not of RMSprop"),
    ],
)
def test_a_forecast_says_where_its_formula_was_not_found(
    kind: Any, words: str | None
) -> None:
    found = forecast_advice(class_name(made(kind)))
    assert found is None if words is None else re.search(words, found or "")
    assert forecast_advice("") is None  # a recipe of an earlier version


def test_a_recipe_of_another_class_of_optimizer_is_reported() -> None:
    adamw, sgd = (
        recipe([], 10, search={"optimizer_class": "AdamW"}),
        recipe([], 10, search={"optimizer_class": "SGD"}),
    )
    assert advice("unscaled", made(Own), adamw) is None
    # of an earlier version
    assert advice("unscaled", made(SGD), recipe([], 10)) is None
    found = advice("unscaled", made(Lion), adamw)
    assert found is not None
    assert re.search(
        "made with AdamW, and this run has Lion.*Use AdamW, or search anew with Lion",
        found,
    )
    few, many = (
        SGD([torch.zeros(2, requires_grad=True)], lr=0.1),
        AdamW([torch.zeros(9, requires_grad=True)], lr=0.1),
    )
    # its recipe has the momentum of the larger part
    chain = OptimizerChain([few, many])
    assert advice("unscaled", chain, adamw) is None
    assert advice("unscaled", chain, sgd) is not None


# ---- by the loss ---------------------------------------------------------------------


X = torch.linspace(-1, 1, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda x: (x**2).sum(), True),
        (lambda x: F.mse_loss(x, torch.zeros(8), reduction="sum"), True),
        (lambda x: -F.logsigmoid(x).sum() + x.abs().mean(), True),
        (lambda x: 0.5 * (x**2).sum(), True),
        (lambda x: x.mean() - x.sum(), True),
        (lambda x: (x**2).mean(), False),
        (lambda x: (x**2).sum() / len(x), False),
        (lambda x: 0.5 * (x**2).sum() / torch.tensor(8), False),
        (lambda x: x.view(4, 2).sum(1).mean(), False),
        (lambda x: 3.0, False),
    ],
)
def test_a_loss_that_is_a_sum_is_found_by_its_graph(
    loss: Callable[[Tensor], Any], found: bool
) -> None:
    assert (sum_advice(loss(X), 8) is not None) == found
