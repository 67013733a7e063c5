"""Scaling rules: AdaptDL's known values, with mocks as its own tests have them, and the trainer's pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ray_adascale import AdaScale as Wrapper
from ray_adascale import AdaScaleConfig, RuleInput
from ray_adascale.compat.adaptdl import GradientNoiseScale
from ray_adascale.optim.rules import follows_gain, make_rule, metric_of
from ray_adascale.scaling_rules import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    ScalingRuleBase,
    SqrtScale,
    pick_factor,
)

from .classifier import batches, make_model, weights
from .model.reference_run import gain as reference_gain


def now(gain: float = 3.0, scale: float = 4.0, **kwargs: Any) -> RuleInput:
    return RuleInput(gain=gain, scale=scale, **{"effective_steps": 0.0, **kwargs})


# ---- AdaptDL's numbers -----------------------------------------------------------------------------------------------


def test_known_values_of_the_adascale_rule() -> None:
    adp = Mock(
        require_backward_grad_sync=True,
        gns=Mock(raw_var_avg=np.asarray([1, 0, 0, 2]), raw_sqr_avg=np.asarray([-1, 0, -1, 1])),
    )
    rule = AdaScale()
    rule.initialize(adp, Mock(param_groups=[1, 0, 2, -1]))
    expected = {
        0.5: [0.5, 0.5, 0.5, 0.6],
        1: [1.0, 1.0, 1.0, 1.0],
        2: [2.0, 2.0, 2.0, 1.5],
        4: [4.0, 4.0, 4.0, 2.0],
        10: [10.0, 10.0, 10.0, 2.5],
    }
    for scale, answer in expected.items():
        np.testing.assert_equal(rule.scale_lr(scale), answer)
        adam = AdamScale()
        adam.initialize(adp, Mock())
        np.testing.assert_allclose(adam.scale_lr(scale), np.sqrt(answer), rtol=1e-15)


def test_known_values_of_the_rules_that_look_at_the_scale_alone() -> None:
    np.testing.assert_equal([LinearScale().scale_lr(s) for s in (0.5, 1, 2, 4, 10)], [0.5, 1, 2, 4, 10])
    np.testing.assert_equal([SqrtScale().scale_lr(s) for s in (1, 4, 9, 16, 25)], [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("progress", "base_batch_size", "answers"),
    [
        (5, 100, [1 / 20, 1 / 40, 1 / 60, 1 / 80, 1 / 100]),
        (400, 50, [1.0, 1.0, 2 / 3, 0.5, 0.4]),
        (400, 100, [1.0, 2.0, 4 / 3, 1.0, 0.8]),
    ],
)
def test_known_values_of_legw(progress: float, base_batch_size: int, answers: list[float]) -> None:
    adp = Mock(gns=Mock(get_progress=Mock(return_value=progress)), base_batch_size=base_batch_size)
    rule = LEGWScale(10, 1000)
    rule.initialize(adp, Mock())
    for scale, answer in zip((1, 4, 9, 16, 25), answers, strict=True):
        np.testing.assert_equal(rule.scale_lr(scale), answer)
        pair = LEGWScale(10, 1000)(now(scale=scale, effective_steps=progress, base_batch_size=base_batch_size))
        assert pair == (answer, scale)


def test_a_rule_before_initialize_is_refused() -> None:
    for use in (AdaScale().step, AdaScale().zero_grad, lambda: AdaScale().scale_lr(2.0), LEGWScale(1, 2).step):
        with pytest.raises(ValueError, match="initialize"):
            use()
    with pytest.raises(NotImplementedError, match="scale_lr"):
        ScalingRuleBase().scale_lr(2.0)


def test_an_optimizer_is_patched_once() -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    AdaScale().initialize(Mock(), optimizer, patch_optimizer=True)
    with pytest.raises(ValueError, match="already"):
        AdaScale().initialize(Mock(), optimizer, patch_optimizer=True)


def test_a_rule_belongs_to_one_model() -> None:
    rule, adp = LinearScale(), Mock()
    first, second = (torch.optim.SGD(make_model().parameters(), lr=0.1) for _ in range(2))
    rule.initialize(adp, first)
    rule.initialize(adp, first)
    with pytest.raises(ValueError, match="This LinearScale has a model already"):
        rule.initialize(Mock(), second, patch_optimizer=True)
    assert rule.adp is adp
    assert "step" not in vars(second)


@pytest.mark.parametrize("passes", [1, 2])
def test_training_with_a_mock_model_wrapper(passes: int) -> None:
    """The form of AdaptDL's own optimization tests: GradientNoiseScale by hand, every call in every iteration."""
    x = torch.nn.Parameter(torch.tensor([1.0, 1.5]))
    sgd = torch.optim.SGD([x], lr=0.05)
    schedule = torch.optim.lr_scheduler.MultiStepLR(sgd, [100])
    adp = Mock(require_backward_grad_sync=True)
    adp.gns = GradientNoiseScale(adp, sgd, accum_scale=1.0, num_replicas=1)
    AdaScale().initialize(adp, sgd, patch_optimizer=True)
    torch.manual_seed(0)
    for i in range(200 * passes):
        adp.require_backward_grad_sync = i % passes == passes - 1
        sgd.zero_grad()
        ((x - 3).square() * (1 + 0.2 * torch.randn(2))).sum().backward()
        before = x.detach().clone()
        sgd.step()
        if adp.require_backward_grad_sync:
            schedule.step()
        else:
            assert torch.equal(x, before)  # accumulating
    assert x.tolist() == pytest.approx([3.0, 3.0], abs=0.01)
    assert adp.gns.get_progress() == pytest.approx(200) if passes == 1 else 200 < adp.gns.get_progress() <= 400
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_nan_is_not_averaged_and_not_stepped_with() -> None:
    x = torch.nn.Parameter(torch.tensor([1.0]))
    sgd = torch.optim.SGD([x], lr=0.1)
    adp = Mock(require_backward_grad_sync=True)
    adp.gns = GradientNoiseScale(adp, sgd, accum_scale=1.0, num_replicas=1)
    AdaScale().initialize(adp, sgd, patch_optimizer=True)
    for i in range(60):
        sgd.zero_grad()
        (x - (math.nan if i % 2 else 4.0)).square().sum().backward()
        sgd.step()
    assert x.item() == pytest.approx(4.0, abs=0.05)
    assert math.isfinite(adp.gns.sqr_avg() + adp.gns.var_avg())
    assert adp.gns.get_progress() == pytest.approx(30)


# ---- the trainer's pairs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "pair"),
    [
        (AdaScale(), (3.0, 3.0)),
        (AdamScale(), (math.sqrt(3), 3.0)),
        (LinearScale(), (4.0, 4.0)),
        (SqrtScale(), (2.0, 4.0)),
        (LEGWScale(2, 1000), (2.0 * 20 / 80, 4.0)),
    ],
)
def test_each_rule_answers_with_factor_and_clock(rule: ScalingRuleBase, pair: tuple[float, float]) -> None:
    given = now(effective_steps=20.0, base_batch_size=100)
    assert rule(given) == pytest.approx(pair, rel=1e-15)
    assert AdaScaleConfig(rule=rule).rule is rule
    assert make_rule(rule) is rule
    assert rule.adp is None
    assert follows_gain(rule) == (rule(replace(given, gain=2.0))[1] != pair[1])


@pytest.mark.parametrize("rule", [LinearScale(), SqrtScale(), LEGWScale(2, 1000)])
def test_a_batch_that_follows_the_noise_refuses_a_clock_that_does_not(rule: ScalingRuleBase) -> None:
    with pytest.raises(ValueError, match="clock of that rule advances by the scale"):
        AdaScaleConfig(target_efficiency=0.6, rule=rule)


def test_each_rule_says_what_its_statistics_are_measured_in() -> None:
    class Own(AdamScale):
        pass

    assert [metric_of(rule) for rule in (AdamScale(), Own())] == ["adam"] * 2
    others = [AdaScale(), LinearScale(), SqrtScale(), LEGWScale(1, 10), _Cautious()]
    assert {metric_of(rule) for rule in others} == {"euclidean"}


class _Cautious(ScalingRuleBase):
    def scale_lr(self, scale: float) -> Any:
        gns = self.adp.gns
        var, sqr = np.maximum(gns.raw_var_avg, 1e-6), np.maximum(gns.raw_sqr_avg, 0.0)  # as AdaptDL's own rule reads it
        return 0.5 * (var + sqr) / (var / scale + sqr) + 0.5 * gns.gain(scale)


class _OwnClock(_Cautious):
    def __init__(self) -> None:  # no super().__init__(), as is easily forgotten
        pass

    def clock(self, now: RuleInput) -> float:
        return 2 * now.gain


@pytest.mark.parametrize("scale", [1.0, 1.5, 4.0, 64.0])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 1.0, 50.0, math.inf])
def test_a_rule_that_only_overrides_scale_lr_is_a_trainers_rule(scale: float, ratio: float) -> None:
    sigma2, mu2 = (1.0, 0.0) if ratio == math.inf else (ratio, 1.0)
    r = reference_gain(sigma2, mu2, scale)
    # 1e-11: σ²/μ² is read back from r, and AdaptDL's floor is 1e-18 of what is shown.
    assert _Cautious()(now(gain=r, scale=scale, group=0)) == pytest.approx((r, r), rel=1e-11)
    assert _OwnClock()(now(gain=r, scale=scale)) == pytest.approx((r, 2 * r), rel=1e-11)
    if scale == 1:
        assert _Cautious()(now(gain=r, scale=scale, group=0)) == (1.0, 1.0)


def test_at_the_base_batch_a_rule_sees_no_noise() -> None:
    class Ahead(ScalingRuleBase):
        def scale_lr(self, scale: float) -> Any:
            var, sqr = np.maximum(self.adp.gns.raw_var_avg, 1e-6), self.adp.gns.raw_sqr_avg
            return (var + sqr) / (var / (8 * scale) + sqr)

    assert Ahead()(now(gain=1.0, scale=1.0)) == (1.0, 1.0)


def test_a_subclass_of_a_rule_keeps_what_it_does_not_override() -> None:
    class Half(AdaScale):
        def scale_lr(self, scale: float) -> Any:
            return super().scale_lr(scale) / 2

    class HalfLinear(LinearScale):
        def scale_lr(self, scale: float) -> Any:
            return scale / 2

    assert Half()(now()) == pytest.approx((1.5, 3.0), rel=1e-11)
    assert HalfLinear()(now()) == (2.0, 4.0)


def test_one_factor_for_all_groups_or_one_each() -> None:
    assert pick_factor(2, 5) == 2.0
    assert pick_factor(np.array([1.0, 3.0]), 1) == 3.0
    assert pick_factor(np.array([1.0, 3.0]), None) == 2.0
    with pytest.raises(ValueError, match="2 factors for at least 3"):
        pick_factor([1.0, 3.0], 2)


def test_rules_drive_our_optimizer() -> None:
    moved = {}
    for name, rule in {"linear": LinearScale(), "own": _OwnClock(), "adascale": AdaScale()}.items():
        model = make_model()
        optimizer = Wrapper(
            torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2, rule=rule
        )
        for batch in batches(2, 4):
            (F.cross_entropy(model(batch[0]), batch[1]) / 2).backward()
        r = optimizer.gain()
        before = weights(model)
        optimizer.step()
        moved[name] = (before - weights(model)).norm().item()
        assert optimizer.effective_steps == pytest.approx({"linear": 4.0, "own": 2 * r, "adascale": r}[name], rel=1e-9)
    assert 1 < r < 4
    assert moved["linear"] / moved["adascale"] == pytest.approx(4 / r)
    assert moved["own"] == pytest.approx(moved["adascale"], rel=1e-9)
