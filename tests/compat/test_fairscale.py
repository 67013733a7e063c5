"""AdaScaleWrapper, and the gains of groups that are added later.
``test_fairscale_loops`` compares whole loops.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from ray_adascale import (
    OSS,
    AdaScale,
    AdaScaleMemoryRule,
    AdaScaleRule,
    OptimizerChain,
)
from ray_adascale.compat.fairscale import AdaScaleWrapper

from ..classifier import batches, make_model, weights


def _train(optimizer: AdaScale, model: torch.nn.Module, passes: int) -> torch.Tensor:
    for i, (x, y) in enumerate(batches(4 * passes, 4)):
        (F.cross_entropy(model(x), y) / passes).backward()
        if i % passes == passes - 1:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_the_wrapper_is_adascale_of_the_optimizer() -> None:
    model, twin = make_model(), make_model()
    # all positions
    ours = AdaScaleWrapper(
        model.parameters(), 1, 5.0, 0.7, 2, False, SGD, lr=0.1, momentum=0.9
    )
    other = AdaScale(
        SGD(twin.parameters(), lr=0.1, momentum=0.9),
        world_size=1,
        scale=5.0,
        smoothing=0.7,
        num_gradients_to_accumulate=2,
        debias_ewma=False,
    )
    assert isinstance(ours, AdaScale)
    assert torch.equal(_train(ours, model, 2), _train(other, twin, 2))
    assert ours.gain() == other.gain() > 1
    assert (ours.scale, ours.smoothing, ours.defaults["momentum"]) == (5.0, 0.7, 0.9)


def test_the_wrapper_takes_any_optimizer_class_and_its_arguments() -> None:
    optimizer = AdaScaleWrapper(
        make_model().parameters(),
        num_gradients_to_accumulate=2,
        optim_cls=torch.optim.RMSprop,
        lr=0.3,
        alpha=0.8,
    )
    assert isinstance(optimizer.wrapped, torch.optim.RMSprop)
    assert optimizer.param_groups[0]["alpha"] == 0.8
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.3
    nested = AdaScaleWrapper(
        make_model().parameters(), num_gradients_to_accumulate=2, optim_cls=OSS, lr=0.3
    )
    assert isinstance(nested.wrapped, OSS)
    with pytest.raises(ValueError, match="optim_cls"):
        AdaScaleWrapper(
            make_model().parameters(), optim_cls=SGD(make_model().parameters(), lr=1.0)
        )  # type: ignore[arg-type]


def _layer(inputs: int, outputs: int, bias: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        values = torch.arange(1.0, 7.0).repeat(2)[: inputs * outputs]
        layer.weight.copy_(values.view(outputs, inputs))
        layer.bias.fill_(bias)
    return layer


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("is_scaled_loss", [True, False])
def test_groups_added_later_give_fairscales_gains(
    debias: bool, is_scaled_loss: bool
) -> None:
    """The numbers of FairScale's own test_add_param_group, which it runs on a GPU,
    to its float32 tolerance.
    """
    layers = [_layer(2, 2, 0.1), _layer(2, 3, 0.2), _layer(3, 4, 0.2)]
    optimizer = AdaScale(
        torch.optim.SGD(layers[0].parameters(), lr=0.1),
        num_gradients_to_accumulate=2,
        is_scaled_loss=is_scaled_loss,
        debias_ewma=debias,
        variance_floor=1e-6,
    )

    def passes(model: nn.Module) -> None:
        for row in ([1.0, 2.0], [3.0, 4.0]):
            loss = model(torch.tensor(row)).sum()
            (loss / 2 if is_scaled_loss else loss).backward()
        if not is_scaled_loss:
            optimizer.scale_grad_by_num_grads_to_accum()

    optimizer.add_param_group({"params": list(layers[1].parameters())})
    passes(nn.Sequential(*layers[:2]))
    assert [optimizer.gain(), optimizer.gain(0), optimizer.gain(1)] == pytest.approx(
        [1.1440223454935758, 1.1428571428571428, 1.1471258476157762], rel=1e-5
    )
    optimizer.step()
    optimizer.zero_grad()

    optimizer.add_param_group({"params": list(layers[2].parameters())})
    passes(nn.Sequential(*layers))
    known = [optimizer.gain(), *[optimizer.gain(g) for g in range(3)]]
    biased = [
        1.1391959826562015,
        1.142857206006931,
        1.1116906378271827,
        1.0749164095196344,
    ]
    debiased = [
        1.1382937715383077,
        1.142857206008338,
        1.1116875516387468,
        1.0749164095196344,
    ]
    # The two expectations are 8e-4 apart in the first, so that 1e-6 tells them.
    assert known == pytest.approx(debiased if debias else biased, rel=1e-6)


class _SharedCount:
    """FairScale's rule for ``debias_ewma=False``, for one statistic: one count for
    all groups, also for one added later.
    """

    def __init__(self, groups: int, at_first: float) -> None:
        self.count, self.at_first = 0, at_first
        self.total, self.mean = [0.0] * groups, [at_first] * groups

    def add_group(self) -> None:
        self.total.append(0.0)
        self.mean.append(self.at_first)

    def update(self, samples: list[float], theta: float) -> None:
        self.count += 1
        for g, sample in enumerate(samples):
            if self.count < 1 / (1 - theta):
                self.total[g] += sample
                self.mean[g] = self.total[g] / self.count
            else:
                self.mean[g] = theta * self.mean[g] + (1 - theta) * sample


@pytest.mark.parametrize("added_after", [0, 1, 3, 6])
def test_without_debiasing_a_group_added_later_shares_the_count_of_the_others(
    added_after: int,
) -> None:
    """Before the fourth step plain means (1/(1 − 0.75) = 4), from then on moving
    ones, which begin at σ² = 0 and μ² = 1.
    """
    scale, theta, floor = 3.0, 0.75, 1e-6
    params = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    optimizer = AdaScale(
        torch.optim.SGD(params[:1], lr=0.1),
        scale=scale,
        smoothing=theta,
        num_gradients_to_accumulate=2,
        debias_ewma=False,
        variance_floor=floor,
    )
    var, sqr = _SharedCount(1, 0.0), _SharedCount(1, 1.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(10):
        if step == added_after:
            optimizer.add_param_group({"params": params[1:]})
            var.add_group()
            sqr.add_group()
        live = params[: len(var.mean)]
        # pass, group, element
        gradients = 0.1 + 0.1 * torch.randn(
            2, 2, 2, generator=generator, dtype=torch.float64
        )
        for g_i in gradients:
            (sum((g * p).sum() for g, p in zip(g_i, live, strict=False)) / 2).backward()  # type: ignore[union-attr]
        variances, squares = [], []
        for g in range(len(live)):
            one, two = gradients[0, g], gradients[1, g]
            mean = (one + two) / 2
            variance = scale * float(
                (one.square().sum() + two.square().sum()) / 2 - mean.square().sum()
            )
            variances.append(max(variance, floor))
            squares.append(max(float(mean.square().sum()) - variance / scale, 0.0))
        var.update(variances, theta)
        sqr.update(squares, theta)
        expected = [
            (v + s) / (v / scale + s) for v, s in zip(var.mean, sqr.mean, strict=True)
        ]
        assert [optimizer.gain(g) for g in range(len(live))] == pytest.approx(
            expected, rel=1e-9
        )
        v, s = sum(var.mean), sum(sqr.mean)
        assert optimizer.gain() == pytest.approx((v + s) / (v / scale + s), rel=1e-9)
        optimizer.step()
        optimizer.zero_grad()


class _MyAdam(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("cls", "sharded", "rule", "told"),
    [
        (torch.optim.Adam, False, None, 1),
        (_MyAdam, True, None, 1),
        (torch.optim.AdamW, False, AdaScaleMemoryRule(), 0),
        (torch.optim.AdamW, False, AdaScaleRule(), 0),
        (SGD, True, None, 0),
        (torch.optim.RMSprop, False, None, 0),
    ],
)
def test_fairscales_rule_for_adam_is_warned_of(
    cls: Any, sharded: bool, rule: Any, told: int
) -> None:
    params = make_model().parameters()
    inner = OSS(params, cls, lr=0.1) if sharded else cls(params, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AdaScale(inner, num_gradients_to_accumulate=2, rule=rule)
    texts = [str(each.message) for each in caught]
    assert len(texts) == told
    assert all(
        f"AdaScale({cls.__name__}) has FairScale's rule" in text
        and "rule=AdaScaleMemoryRule()" in text
        for text in texts
    )


def test_fairscales_rule_is_warned_of_in_a_chain() -> None:
    first, second = make_model(), make_model()
    chain = OptimizerChain(
        [SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters())]
    )
    with pytest.warns(UserWarning, match=r"AdaScale\(SGD and AdamW\) has FairScale's"):
        AdaScale(chain, num_gradients_to_accumulate=2)
