"""A small classifier in float64 and what tests of AdaScale do with it: its batches, its
gradients one by one, its weights.

Its true gradient does not drown in noise, so that gains stay inside (1, S).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_adascale import AdaScale


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def two_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.02},
    ]


def batches(
    count: int, size: int, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=dtype),
            # Mostly of one class, so that the true gradient does not drown in noise and
            # gains stay inside (1, S).
            (torch.rand(size, generator=generator) < 0.2).long(),
        )
        for _ in range(count)
    ]


def sample_gradient(
    model: nn.Module, batch: tuple[Tensor, Tensor], groups: list[dict[str, Any]]
) -> list[np.ndarray]:
    """The gradient of one micro-batch per group, flat, by autograd on its own:
    nothing of AdaScale takes part.
    """
    twin = copy.deepcopy(model)
    names = {id(p): name for name, p in model.named_parameters()}
    params = dict(twin.named_parameters())
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    return [
        np.concatenate(
            [
                params[names[id(p)]].grad.double().numpy().ravel()
                for p in group["params"]
            ]
        )
        for group in groups
    ]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def ready(
    scale: float = 4.0, n: int = 2, **kwargs: Any
) -> tuple[nn.Sequential, AdaScale]:
    """The classifier and its optimizer under AdaScale, ``n`` passes a step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, AdaScale(
        optimizer, scale=scale, num_gradients_to_accumulate=n, **kwargs
    )


def backward(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], passes: int | None = None
) -> None:
    """A backward pass a batch, of a step with so many ``passes``: as many as there
    are batches, where nothing is said.
    """
    for x, y in data:
        (F.cross_entropy(model(x), y) / (passes or len(data))).backward()
