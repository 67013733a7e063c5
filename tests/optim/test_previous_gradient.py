"""σ² and μ² of a step with one gradient sample, from its gradient and that of the step before, where either may be missing.

Gradients are small integers, exact in float64, and so are their products.
"""

from __future__ import annotations

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


def test_products_of_a_large_gradient_are_those_of_float64() -> None:
    torch.manual_seed(0)
    g, h = torch.rand(1000, 1003) + 1, torch.rand(1000, 1003)  # of one sign: errors of float32 would add up
    yes = torch.ones((), dtype=torch.bool)
    difference, inner = PreviousGradient([g], yes).products_with(PreviousGradient([h], yes), [1])
    assert difference.item() == pytest.approx((g.double() - h.double()).square().sum().item(), rel=2e-7)
    assert inner.item() == pytest.approx((g.double() * h.double()).sum().item(), rel=2e-7)


def test_products_of_mixed_dtypes_and_layouts() -> None:
    yes = torch.ones((), dtype=torch.bool)
    g = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), torch.tensor([1.0 + 2j]), torch.tensor([3.0], dtype=torch.float64)]
    h = [torch.tensor([[1.0, 3.0], [2.0, 5.0]]), torch.tensor([2.0 + 1j]), torch.tensor([1.0])]
    difference, inner = PreviousGradient(g, yes).products_with(PreviousGradient(h, yes), [1, 2])
    assert difference.tolist() == [1.0, 1 + 1 + 4]
    assert inner.tolist() == [1 + 9 + 4 + 20, 2 + 2 + 3]
