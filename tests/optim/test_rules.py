"""Scaling rules of the trainer: the pair that each answers with, worked by hand, and
what it needs to know for that.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import (
    SGD,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    SparseAdam,
)

from ray_adascale import (
    AdamScaleRule,
    AdaScale,
    AdaScaleMemoryRule,
    AdaScaleRule,
    LEGWRule,
    LinearRule,
    OptimizerChain,
    RuleInput,
    SquareRootRule,
    UnscaledRule,
)
from ray_adascale.optim.rules import (
    RULES,
    ScalingRule,
    chosen_rule,
    follows_gain,
    legw_factor,
    make_rule,
    metric_of,
    name_of,
)


def now(gain: float = 3.0, scale: float = 4.0, **kwargs: Any) -> RuleInput:
    return RuleInput(gain=gain, scale=scale, **{"effective_steps": 0.0, **kwargs})


@pytest.mark.parametrize(
    ("rule", "pair"),
    [
        (AdaScaleRule(), (3.0, 3.0)),
        (AdaScaleMemoryRule(), (3.0, 3.0)),
        (AdamScaleRule(), (math.sqrt(3), 3.0)),
        (AdamScaleRule(power=0.3), (3**0.3, 3.0)),
        # The warm-up is a tenth of T = 1000, and 20 a fifth of that: 1 + 3/5.
        (LinearRule(warmup=0.1), (1.6, 4.0)),
        (LinearRule(), (1 + 3 * 20 / (1000 * 5 / 90), 4.0)),
        (LinearRule(warmup=0), (4.0, 4.0)),
        (LinearRule(warmup=0, steps=125), (4.0, 8.0)),
        (SquareRootRule(), (2.0, 4.0)),
        (SquareRootRule(steps=250), (2.0, 4.0)),
        (SquareRootRule(steps=125), (2.0, 8.0)),
        (UnscaledRule(), (1.0, 4.0)),
        (UnscaledRule(steps=400), (1.0, 2.5)),
        (LEGWRule(2, 1000), (2.0 * 20 / 80, 4.0)),
    ],
    ids=repr,
)
def test_each_rule_answers_with_factor_and_clock(
    rule: ScalingRule, pair: tuple[float, float]
) -> None:
    given = now(effective_steps=20.0, base_batch_size=100, total_steps=1000)
    assert rule(given) == pytest.approx(pair, rel=1e-15)
    assert make_rule(rule) is rule
    assert follows_gain(rule) == (rule(replace(given, gain=2.0))[1] != pair[1])


@pytest.mark.parametrize("name", RULES)
def test_at_the_base_batch_every_named_rule_is_the_base_run(name: str) -> None:
    for tau in (0.0, 5.0, 999.0):
        given = RuleInput(
            gain=1.0,
            scale=1.0,
            effective_steps=tau,
            total_steps=1000,
            base_batch_size=100,
        )
        assert make_rule(name)(given) == (1.0, 1.0)


def test_rules_by_name_and_refused_ones() -> None:
    assert RULES["adamscale"]()(now(gain=9.0)) == (3.0, 9.0)
    assert make_rule("adamscale") == AdamScaleRule()
    named = [
        AdamScaleRule(),
        AdaScaleRule(),
        AdaScaleMemoryRule(),
        LinearRule(),
        SquareRootRule(),
        UnscaledRule(),
    ]
    names = (
        "adamscale",
        "adascale",
        "adascale_memory",
        "linear",
        "sqrt",
        "unscaled",
    )
    assert [make_rule(name) for name in names] == named
    assert [name_of(rule) for rule in named] == list(names)
    assert name_of(LinearRule(warmup=0)) == "LinearRule(warmup=0, steps=None)"
    assert name_of(now) == "now"  # type: ignore[arg-type]
    for cls in (LinearRule, LEGWRule):
        with pytest.raises(ValueError, match=rf"{cls.__name__}\(\.\.\.\)"):
            make_rule(cls)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"rule='cubic'\. Known rules: auto, adamscale, adascale, adascale_memory, linear",
    ):
        make_rule("cubic")
    assert [make_rule(f"{name}:354") for name in ("linear", "sqrt", "unscaled")] == [
        rule(steps=354) for rule in (LinearRule, SquareRootRule, UnscaledRule)
    ]
    for wrong in (
        "adascale:354",
        "linear:x",
        "linear:-3",
        "linear:1.5",
        "linear:0",
        "linear:",
    ):
        with pytest.raises(
            ValueError, match=f"rule='{wrong}'. Known rules: .*linear:STEPS"
        ):
            make_rule(wrong)
    with pytest.raises(ValueError, match=r"rule=3\. Must be one of"):
        make_rule(3)  # type: ignore[arg-type]


class Lion(AdamW):
    """Of a package, known by its name."""


class Adan(Optimizer):
    """An optimizer with betas of which nothing is known."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})


def optimizer_of(*kinds: Any) -> Any:
    parts = [kind([torch.zeros(2, 2, requires_grad=True)], lr=0.1) for kind in kinds]
    return parts[0] if len(parts) == 1 else OptimizerChain(parts)


def with_momentum(momentum: float) -> Any:
    return functools.partial(SGD, momentum=momentum)


class Renamed(SGD):
    """SGD with torch's step."""


class OwnStep(SGD):
    """SGD with a step of its own, which knows no dampening."""

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


RMSpropWithMomentum = functools.partial(RMSprop, momentum=0.9)


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ([SGD], "adascale"),
        ([Muon], "adascale"),
        ([SGD, Muon], "adascale"),
        ([with_momentum(0.5)], "adascale"),
        ([with_momentum(0.6)], "adascale_memory"),
        ([Muon, with_momentum(0.9)], "adascale_memory"),
        ([with_momentum(1.0)], "adascale"),
        ([functools.partial(Renamed, momentum=0.9)], "adascale_memory"),
        ([functools.partial(OwnStep, momentum=0.9)], "adascale"),
        ([RMSpropWithMomentum], "adascale"),
        ([Adam], "adascale_memory"),
        ([AdamW], "adascale_memory"),
        ([Adamax], "adascale_memory"),
        ([Lion], "adascale_memory"),
        ([SGD, AdamW], "adascale_memory"),
        ([Muon, AdamW], "adascale_memory"),
    ],
)
def test_auto_changes_betas_and_the_momentum_of_sgd_where_there_are_any(
    kinds: list[Any], chosen: str
) -> None:
    optimizer = optimizer_of(*kinds)
    assert chosen_rule("auto", optimizer) == chosen
    assert chosen_rule("sqrt", optimizer) == "sqrt"


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ([NAdam], "exact with NAdam"),
        ([RAdam], "exact with RAdam"),
        ([SparseAdam], "exact with SparseAdam"),
        ([functools.partial(Adam, capturable=True)], "CUDA graphs"),
        ([Adan], "not known to be exact with Adan"),
        ([AdamW, NAdam], "exact with NAdam"),
    ],
)
def test_auto_warns_where_betas_that_change_are_not_exact(
    kinds: list[Any], why: str
) -> None:
    with pytest.warns(
        UserWarning,
        match=rf"rule='auto' is 'adascale' here\..*{why}.*rule='adascale' says that this is meant",
    ):
        assert chosen_rule("auto", optimizer_of(*kinds)) == "adascale"


def test_the_class_alone_keeps_fairscales_rule() -> None:
    assert (
        AdaScale(optimizer_of(AdamW), world_size=1, num_gradients_to_accumulate=2).rule
        == AdaScaleRule()
    )


def test_linear_rule_ramps_and_stretches() -> None:
    rule = LinearRule(warmup=0.1)
    half = RuleInput(gain=2.0, scale=5.0, effective_steps=50, total_steps=1000)
    assert rule(half) == (3.0, 5.0)
    assert rule(
        RuleInput(gain=2.0, scale=5.0, effective_steps=500, total_steps=1000)
    ) == (5.0, 5.0)
    assert LinearRule(warmup=0, steps=100)(half) == (5.0, 10.0)
    with pytest.raises(ValueError, match="total_steps"):
        rule(RuleInput(gain=2.0, scale=5.0, effective_steps=50))


def test_only_the_rule_for_adam_wants_its_statistics_in_adams_metric() -> None:
    def plain(now: RuleInput) -> tuple[float, float]:
        return now.gain, now.gain

    assert [metric_of(rule) for rule in (AdamScaleRule(), AdamScaleRule(0.3))] == [
        "adam"
    ] * 2
    others = [
        *(make_rule(name) for name in RULES if name != "adamscale"),
        LEGWRule(1, 10),
        plain,
    ]
    assert {metric_of(rule) for rule in others} == {"euclidean"}
    plain.metric = "Adam"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"metric='Adam'.*euclidean, adam"):
        metric_of(plain)


def test_a_number_of_steps_needs_the_runs_length() -> None:
    for rule in (UnscaledRule, LinearRule):
        with pytest.raises(ValueError, match=rf"{rule.__name__}\(steps=0\)"):
            rule(steps=0)(now(total_steps=1000))
        with pytest.raises(ValueError, match="total_steps=None"):
            rule(steps=10)(now())


@pytest.mark.parametrize("rule", [UnscaledRule, LinearRule])
@pytest.mark.parametrize(
    ("total_steps", "steps"),
    [(60, 7), (2000, 29), (2000, 330), (4000, 997), (1234.5, 7), (60, 1)],
)
def test_a_rule_that_was_given_its_steps_takes_no_more(
    rule: Any, total_steps: float, steps: int
) -> None:
    # Added up 330 times, 2000 / 330 comes out below 2000.
    given = rule(steps=steps)
    tau, taken = 0.0, 0
    while tau < total_steps:
        increment = given(
            RuleInput(gain=1.0, scale=4.0, effective_steps=tau, total_steps=total_steps)
        )[1]
        assert increment == pytest.approx(total_steps / steps)
        tau += increment
        taken += 1
    assert taken == steps


def test_legws_factor_rises_to_the_root_of_the_scale() -> None:
    # S = 9, a warm-up of 2 epochs of 10 base steps: nine times as long, 180 steps, up
    # to √9.
    assert [legw_factor(9, tau, 2, 10) for tau in (0, 45, 90, 180, 1000)] == [
        0,
        0.75,
        1.5,
        3,
        3,
    ]
    assert legw_factor(9, 0, 0, 10) == 3


# ---- LEGW ----------------------------------------------------------------------------


def test_legw_says_what_it_needs_and_when_it_cannot_work() -> None:
    with pytest.raises(ValueError, match="base_batch_size"):
        LEGWRule(5, 1000)(now())
    with pytest.raises(ValueError, match="base_warmup_epochs=-1"):
        LEGWRule(-1, 1000)
    with pytest.raises(ValueError, match="data_size=0"):
        LEGWRule(5, 0)
    rule = LEGWRule(5, 1000)
    with pytest.warns(UserWarning, match="longer than the whole run"):
        rule(now(base_batch_size=100, total_steps=199.0))  # 4 × 5 × 10 = 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule(now(base_batch_size=100, total_steps=199.0))  # once
        LEGWRule(5, 1000)(now(base_batch_size=100, total_steps=200.0))
    with pytest.warns(UserWarning, match="changed from 4 to 8"):
        rule(now(scale=8.0, base_batch_size=100))


def test_legw_warns_of_a_schedule_with_a_warm_up_of_its_own() -> None:
    flat, falling = [0.1] * 4, [0.1, 0.1, 0.05, 0.2]
    rising = [0.1, 0.1, 0.3, 0.05]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LEGWRule(5, 1000).check_curve([flat, falling])
        LEGWRule(0, 1000).check_curve([rising])  # no warm-up of LEGW's
    with pytest.warns(UserWarning, match=r"group 1: from 0\.1 to 0\.3"):
        LEGWRule(5, 1000).check_curve([flat, rising])


def test_legw_warms_up_at_the_base_batch_too_and_may_have_no_warm_up() -> None:
    rule = LEGWRule(1, 1000)
    assert rule(now(scale=1.0, gain=1.0, effective_steps=5.0, base_batch_size=100)) == (
        0.5,
        1.0,
    )
    assert LEGWRule(0, 1000)(now(base_batch_size=100)) == (2.0, 4.0)
