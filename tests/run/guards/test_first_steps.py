"""The first micro-batch: a loss that looks like a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ray_adascale.run.guards.first_steps import sum_advice

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
