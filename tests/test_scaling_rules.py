"""Scaling rules: AdaptDL's known values, with mocks as its own tests have them."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ray_adascale import AdaScaleConfig
from ray_adascale.scaling_rules import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    ScalingRuleBase,
    SqrtScale,
)

from .classifier import make_model


def test_known_values_of_the_adascale_rule() -> None:
    adp = Mock(
        require_backward_grad_sync=True,
        gns=Mock(
            raw_var_avg=np.asarray([1, 0, 0, 2]), raw_sqr_avg=np.asarray([-1, 0, -1, 1])
        ),
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
    np.testing.assert_equal(
        [LinearScale().scale_lr(s) for s in (0.5, 1, 2, 4, 10)], [0.5, 1, 2, 4, 10]
    )
    np.testing.assert_equal(
        [SqrtScale().scale_lr(s) for s in (1, 4, 9, 16, 25)], [1, 2, 3, 4, 5]
    )


@pytest.mark.parametrize(
    ("progress", "base_batch_size", "answers"),
    [
        (5, 100, [1 / 20, 1 / 40, 1 / 60, 1 / 80, 1 / 100]),
        (400, 50, [1.0, 1.0, 2 / 3, 0.5, 0.4]),
        (400, 100, [1.0, 2.0, 4 / 3, 1.0, 0.8]),
    ],
)
def test_known_values_of_legw(
    progress: float, base_batch_size: int, answers: list[float]
) -> None:
    adp = Mock(
        gns=Mock(get_progress=Mock(return_value=progress)),
        base_batch_size=base_batch_size,
    )
    rule = LEGWScale(10, 1000)
    rule.initialize(adp, Mock())
    for scale, answer in zip((1, 4, 9, 16, 25), answers, strict=True):
        np.testing.assert_equal(rule.scale_lr(scale), answer)


def test_a_rule_before_initialize_is_refused() -> None:
    for use in (
        AdaScale().step,
        AdaScale().zero_grad,
        lambda: AdaScale().scale_lr(2.0),
        LEGWScale(1, 2).step,
    ):
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
    first, second = (
        torch.optim.SGD(make_model().parameters(), lr=0.1) for _ in range(2)
    )
    rule.initialize(adp, first)
    rule.initialize(adp, first)
    with pytest.raises(ValueError, match="This LinearScale has a model already"):
        rule.initialize(Mock(), second, patch_optimizer=True)
    assert rule.adp is adp
    assert "step" not in vars(second)


def test_a_rule_is_not_the_trainers() -> None:
    with pytest.raises(ValueError, match="LinearScale"):
        AdaScaleConfig(rule=LinearScale())  # type: ignore[arg-type]
