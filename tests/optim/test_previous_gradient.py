"""σ² and μ² of a step with one gradient sample, from its gradient and that of the step before, where either may be missing.

Gradients are small integers, exact in float64, and so are their products.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ray_adascale import AdaScale
from ray_adascale.optim.previous_gradient import PreviousGradient


@pytest.mark.filterwarnings("ignore:One gradient sample a step")
def test_a_parameter_without_a_gradient_in_one_of_two_steps_counts_as_zero_there() -> None:
    first, second = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second]}]
    adascale = AdaScale(torch.optim.SGD(groups, lr=0.1), scale=4.0)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])

    def step(*losses: torch.Tensor) -> tuple[float, float]:
        torch.autograd.backward(losses)
        adascale.step()
        adascale.zero_grad()
        return adascale.last_step.sigma2, adascale.last_step.mu2

    step((first * a).sum(), (second * b).sum())
    # σ² = S/2 · ‖g_t − g_{t−1}‖² and μ² = ⟨g_t, g_{t−1}⟩, over both groups
    assert step((first * (a + 1)).sum()) == (2 * (2 + 10), 2 + 6)  # `second` has lost its gradient: 0 − b
    assert step((first * (a + 1)).sum(), (second * b).sum()) == (2 * 10, 4 + 9)  # and has one again: b − 0


def gradient_of(*tensors: torch.Tensor) -> PreviousGradient:
    return PreviousGradient(tensors, torch.ones((), dtype=torch.bool), 1.0, [True] * len(tensors))


def consecutive(scale: float, *params: nn.Parameter) -> AdaScale:
    return AdaScale(torch.optim.SGD(params, lr=0.1), scale=scale, noise="samples")


def sigma2_of(adascale: AdaScale, *gradients: float) -> float:
    """Take a step with this gradient of each trainable parameter; return σ² of the step."""
    params = adascale.param_groups[0]["params"]
    torch.autograd.backward([p * g for p, g in zip(params, gradients, strict=True) if p.requires_grad])
    adascale.step()
    adascale.zero_grad()
    return adascale.last_step.sigma2


@pytest.mark.filterwarnings("ignore:One gradient sample a step")
def test_gradients_of_other_parameters_are_not_compared() -> None:
    a, b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    a.requires_grad_(False)
    adascale = consecutive(4.0, a, b)
    found = [sigma2_of(adascale, 5.0, x) for x in (1.0, 2.0)]
    a.requires_grad_(True)  # in the next step a is not watched yet, and in the one after it g_{t−1} is that of b alone
    found += [sigma2_of(adascale, 5.0, x) for x in (3.0, 4.0, 5.0)]
    b.requires_grad_(False)
    found += [sigma2_of(adascale, x, 7.0) for x in (6.0, 8.0)]
    # σ² = S/2 · ‖g_t − g_{t−1}‖²
    nan = math.nan
    assert found == pytest.approx([nan, 2.0, nan, nan, 2.0, nan, 8.0], nan_ok=True)


@pytest.mark.filterwarnings("ignore:One gradient sample a step")
@pytest.mark.parametrize("saved_by", ["this release", "one without the scale"])
@pytest.mark.parametrize("scale", [4.0, 8.0])
def test_a_gradient_that_was_saved_at_another_scale_is_not_compared(scale: float, saved_by: str) -> None:
    first, second = (consecutive(s, nn.Parameter(torch.zeros(()))) for s in (4.0, scale))
    sigma2_of(first, 1.0)
    state = first.state_dict()
    old = saved_by != "this release"
    if old:
        for key in ("scale", "trainable"):
            state["adascale"].pop(f"previous_gradient_{key}", None)
    second.load_state_dict(state)
    found = sigma2_of(second, 3.0)
    assert found == pytest.approx(scale / 2 * 4.0 if old or scale == 4.0 else math.nan, nan_ok=True)
    assert sigma2_of(second, 4.0) == scale / 2


def test_products_of_a_large_gradient_are_those_of_float64() -> None:
    torch.manual_seed(0)
    g, h = torch.rand(1000, 1003) + 1, torch.rand(1000, 1003)  # of one sign: errors of float32 would add up
    difference, inner = gradient_of(g).products_with(gradient_of(h), [1])
    assert difference.item() == pytest.approx((g.double() - h.double()).square().sum().item(), rel=2e-7)
    assert inner.item() == pytest.approx((g.double() * h.double()).sum().item(), rel=2e-7)


def test_products_of_mixed_dtypes_and_layouts() -> None:
    g = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), torch.tensor([1.0 + 2j]), torch.tensor([3.0], dtype=torch.float64)]
    h = [torch.tensor([[1.0, 3.0], [2.0, 5.0]]), torch.tensor([2.0 + 1j]), torch.tensor([1.0])]
    difference, inner = gradient_of(*g).products_with(gradient_of(*h), [1, 2])
    assert difference.tolist() == [1.0, 1 + 1 + 4]
    assert inner.tolist() == [1 + 9 + 4 + 20, 2 + 2 + 3]
