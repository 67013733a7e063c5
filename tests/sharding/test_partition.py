"""Owners of whole parameters: about equal loads, of what is trained now and of what
may be later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ray_adascale.sharding.partition import Owners


def params(*sizes: int, trained: bool) -> list[Tensor]:
    return [torch.empty(size, requires_grad=trained) for size in sizes]


def test_frozen_parameters_make_up_for_uneven_trained_ones() -> None:
    owners = Owners(2)
    frozen_and_trained = [
        *params(8, trained=False),
        *params(8, trained=True),
        *params(4, 4, trained=False),
    ]
    assert owners.add(frozen_and_trained) == [1, 0, 0, 1]
    # by what is trained: 8 and 0 so far
    assert owners.add(params(6, trained=True)) == [1]
    assert owners.add(params(2, trained=False)) == [0]  # by all: 12 and 18
