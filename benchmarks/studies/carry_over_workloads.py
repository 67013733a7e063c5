"""Ten small workloads of ``carry_over.py``: their best LR lies near the edge of
stability, and a base run takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from forecast_workloads import (
    chain,
    characters,
    classify,
    mnist,
    next_symbol,
    seeded,
    sgd,
    squared,
    table,
    three_layers,
)
from forecast_workloads import made as scored
from ray import tune
from study import Transformer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from ray_adascale import Workload
from ray_adascale.workload import WorkloadFn


@dataclass(frozen=True)
class Case:
    """A workload with its search space, B0 and T.

    Attributes:
        about: A few words for the page.
        workload: A function of a config with the keys of ``space``.
        space: Tune's search space.
        base_batch_size: B0.
        total_steps: T.
        maximize: Whether a large metric is better.
    """

    about: str
    workload: WorkloadFn
    space: dict[str, Any]
    base_batch_size: int
    total_steps: int
    maximize: bool = False


def made(
    config: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[Tensor],
    held_out: int,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    accuracy: bool = False,
) -> Workload:
    """Return a workload with a linear warm-up over a share ``warmup`` (0.05 by
    default) of the run and a cosine.
    """
    total_steps = config["total_steps"]
    up = max(1, int(config.get("warmup", 0.05) * total_steps))
    warmup, cosine = (
        LinearLR(optimizer, 0.1, 1.0, up),
        CosineAnnealingLR(optimizer, total_steps - up),
    )
    schedule = SequentialLR(optimizer, [warmup, cosine], [up])
    return scored(
        model, optimizer, schedule, data, held_out, loss_fn, accuracy=accuracy
    )


class Sorter(nn.Module):
    """A transformer that sees all positions."""

    def __init__(
        self, kinds: int, length: int, layers: int, *, norm_first: bool, width: int = 32
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x) + self.place))


def sorting(config: dict[str, Any]) -> Workload:
    """Sort eight numbers with a pre-norm transformer of two layers and SGD."""
    x = torch.randint(0, 16, (4000, 8), generator=seeded(0))
    model = Sorter(16, 8, 2, norm_first=True)
    return made(
        config,
        model,
        sgd(model, config),
        [x, x.sort(1).values],
        500,
        classify,
        accuracy=True,
    )


def sorting_adamw(config: dict[str, Any]) -> Workload:
    """Sort six numbers with a post-norm transformer of one layer and AdamW."""
    x = torch.randint(0, 10, (4000, 6), generator=seeded(1))
    model = Sorter(10, 6, 1, norm_first=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=0.01
    )
    return made(config, model, optimizer, [x, x.sort(1).values], 500, classify)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 images of digits, (1797, 1, 8, 8), in random
    order, and their classes.
    """
    from sklearn.datasets import load_digits

    table = load_digits()
    order = torch.randperm(len(table.target), generator=seeded(2))
    x = torch.tensor(table.images, dtype=torch.float32)[:, None] / 8 - 1
    return x[order], torch.tensor(table.target)[order]


def deep(config: dict[str, Any]) -> Workload:
    """Classify digits with eight linear layers without norms."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU()]
    for _ in range(6):
        linear = nn.Linear(64, 64)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    return made(config, model, sgd(model, config), digits(), 500, classify)


class Recurrent(nn.Module):
    """Embedding, a plain tanh recurrence and one linear layer."""

    def __init__(self, kinds: int, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, 16)
        self.recurrent = nn.RNN(16, width, batch_first=True)
        self.out = nn.Linear(width, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embed(x))[0])


def recurrent(config: dict[str, Any]) -> Workload:
    """Predict the next symbol of a second-order Markov chain with a tanh network."""
    model = Recurrent(12)
    return made(config, model, sgd(model, config), [chain(3000)], 500, next_symbol)


def autoencoder(config: dict[str, Any]) -> Workload:
    """Write digits as 6 numbers and read them again."""
    x = digits()[0].flatten(1)
    model = nn.Sequential(
        *(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 6)),
        *(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 64)),
    )
    return made(config, model, sgd(model, config, nesterov=True), [x], 500, squared)


class Block(nn.Module):
    """Two convolutions, added to their input, with batch norm or without."""

    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        made = [nn.BatchNorm2d(width) if norm else nn.Identity() for _ in range(2)]
        convolutions = [
            nn.Conv2d(width, width, 3, padding=1, bias=not norm) for _ in range(2)
        ]
        self.body = nn.Sequential(
            convolutions[0], made[0], nn.ReLU(), convolutions[1], made[1]
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def residual(config: dict[str, Any], *, norm: bool) -> Workload:
    """Classify digits with two residual blocks."""
    model = nn.Sequential(
        *(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            Block(8, norm=norm),
            nn.MaxPool2d(2),
            Block(8, norm=norm),
        ),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)),
    )
    return made(config, model, sgd(model, config), digits(), 500, classify)


def regression(config: dict[str, Any]) -> Workload:
    """Regression on 20 columns with three linear layers."""
    model = three_layers()
    return made(config, model, sgd(model, config), table(4500), 1000, squared)


def text(config: dict[str, Any]) -> Workload:
    """Predict the next character of Python's help pages with a causal post-norm
    transformer and SGD.
    """
    rows, kinds = characters()
    rows = rows[:, :17]
    model = Transformer(kinds, 32, rows.shape[1] - 1)
    return made(config, model, sgd(model, config), [rows], 300, next_symbol)


def images(config: dict[str, Any]) -> Workload:
    """Classify MNIST with two linear layers."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10)
    )
    return made(
        config, model, sgd(model, config), mnist(), 1000, classify, accuracy=True
    )


WIDE = {"lr": tune.loguniform(3e-3, 1.0)}
_SORT = {"lr": tune.loguniform(1e-2, 1.0), "warmup": tune.choice([0.05, 0.1])}
_HIGH = {"lr": tune.loguniform(3e-2, 10.0)}
_ADAM = {"lr": tune.loguniform(3e-4, 1e-1)}

CASES: dict[str, Case] = {
    "sorting": Case("pre-norm transformer, SGD", sorting, _SORT, 16, 400, True),
    "adamw": Case("post-norm transformer, AdamW", sorting_adamw, _ADAM, 8, 400),
    "deep": Case("eight linear layers without norms, digits", deep, WIDE, 16, 300),
    "regression": Case("three linear layers, 20 columns", regression, WIDE, 16, 400),
    "recurrent": Case("tanh network, Markov chain", recurrent, WIDE, 8, 400),
    "autoencoder": Case(
        "six numbers for a digit, Nesterov", autoencoder, _HIGH, 16, 400
    ),
    "residual": Case(
        "residual network, batch norm, digits",
        functools.partial(residual, norm=True),
        WIDE,
        16,
        300,
    ),
    "no norm": Case(
        "residual network without norms, digits",
        functools.partial(residual, norm=False),
        WIDE,
        16,
        300,
    ),
    "text": Case("post-norm transformer, SGD, Python's help pages", text, WIDE, 8, 300),
    "images": Case("two linear layers, MNIST", images, WIDE, 16, 400, True),
}
