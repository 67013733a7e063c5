"""What transfers: the workloads of ``transfer.py``, which ``autobatch.py`` and ``first_steps.py`` run as well."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import Workload
from ray_adascale.workload import WorkloadFn, resolve

EXAMPLES = Path(__file__).parents[1] / "examples"


def prepare_process() -> None:
    """One thread; and no word about batches beyond the noise scale or rules for Adam, which are the point here."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="AdaScale is derived for SGD")
    warnings.filterwarnings("ignore", message="The batch of .* exceeds the gradient noise scale")


@functools.cache
def example(name: str) -> Any:
    """``"mnist.py:workload"``: something of an example."""
    return resolve(f"{EXAMPLES}/{name}")


@functools.cache
def text_splits() -> list[TensorDataset]:
    """Chunks of the text for training, search and test: 8, 1 and 1 of 10 blocks of 20 neighbouring chunks."""
    letters, length = example("language_model.py:LETTERS"), example("language_model.py:LENGTH")
    code_of = {letter: code for code, letter in enumerate(letters)}
    codes = torch.tensor([code_of[c] for c in example("language_model.py:text")() if c in code_of])
    count = (len(codes) - 1) // length
    x, y = (codes[start : start + count * length].view(count, length) for start in (0, 1))
    block = torch.arange(count) // 20 % 10
    return [TensorDataset(x[which], y[which]) for which in (block < 8, block == 8, block == 9)]


def text(config: dict[str, Any], model: nn.Module | None = None, chunks: int | None = None) -> Workload:
    """The next character of docstrings of the standard library: the model of ``examples/language_model.py``, half as wide."""
    if model is None:
        model = example("language_model.py:CharacterModel")(width=48)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    train, search, test = text_splits()
    scored = [part[:chunks] for part in (test if config["split"] == "test" else search).tensors]

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        codes, following = batch
        return F.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=example("mnist.py:schedule")(optimizer, config["schedule"], config["total_steps"]),
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=loss_fn,
        evaluate=lambda model: {"bits": loss_fn(model, scored).item() / math.log(2)},
        metric="bits",
    )


class Transformer(nn.Module):
    """Two causal layers with layer norm after each half, torch's default and the less stable one."""

    def __init__(self, kinds: int, width: int = 32, length: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(width, kinds)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes) + self.place
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.out(x)


def transformer(config: dict[str, Any]) -> Workload:
    """The same text by two layers of a transformer, scored on 256 chunks."""
    return text(config, Transformer(len(example("language_model.py:LETTERS"))), 256)


@functools.cache
def table_splits() -> list[TensorDataset]:
    """24 normal columns; the target is a sum of 16 tanh units of them, with noise of variance 0.25."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(18_000, 24, generator=generator)
    hidden = torch.tanh(2 * x @ torch.randn(24, 16, generator=generator) / 24**0.5)
    y = hidden @ torch.randn(16, 1, generator=generator) / 2 + 0.5 * torch.randn(len(x), 1, generator=generator)
    return [TensorDataset(x[part], y[part]) for part in (slice(12_000), slice(12_000, 14_000), slice(14_000, None))]


def tabular(config: dict[str, Any]) -> Workload:
    """Regression on 24 columns with three linear layers and weight decay."""
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=1e-4)
    train, search, test = table_splits()
    scored = (test if config["split"] == "test" else search).tensors

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=example("mnist.py:schedule")(optimizer, config["schedule"], config["total_steps"]),
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=loss_fn,
        evaluate=lambda model: {"error": loss_fn(model, scored).item()},
        metric="error",
    )


def bits_without_context() -> float:
    """Cross-entropy of the test split under the training split's frequencies of single characters."""
    train, _, test = (split.tensors[1].flatten() for split in text_splits())
    counts = torch.bincount(train, minlength=128) + 1
    return -(counts[test] / counts.sum()).log2().mean().item()


@dataclass(frozen=True)
class Case:
    """A workload of the benchmark.

    Attributes:
        about: A sentence for the page.
        workload: A function from a config with ``lr``, ``schedule``, ``total_steps`` and ``split``.
        metric: Its metric, for headings.
        perfect: The metric's best value. 1: larger is better; 0: smaller is better.
        chance: The metric of the best answer that doesn't look at the input.
        base_batch_size: B0.
        total_steps: T.
        lrs: Peak LRs of the grid.
    """

    about: str
    workload: WorkloadFn
    metric: str
    perfect: int
    chance: Callable[[], float]
    base_batch_size: int
    total_steps: int
    lrs: tuple[float, ...]

    def better(self, one: float, other: float) -> float:
        """By how much ``one`` is the better score; negative where it is worse."""
        return one - other if self.perfect else other - one

    def loss(self, score: float) -> float:
        """The score as something of which less is better: 1 − accuracy, or the score itself."""
        return 1 - score if self.perfect else score


CASES = {
    "vision": Case(
        "3,000 images of MNIST, two convolutions with group norm, shifted images, weight decay (`examples/mnist.py`)",
        lambda config: example("mnist.py:workload")(config),
        "accuracy",
        1,
        lambda: 0.1,
        16,
        2000,
        (0.003, 0.006, 0.0125, 0.025, 0.05),
    ),
    "text": Case(
        "next character of the standard library's docstrings (about 480,000 characters, by the version of Python), two "
        "causal convolutions (text and model of `examples/language_model.py`)",
        text,
        "bits a character",
        0,
        bits_without_context,
        8,
        3000,
        (0.05, 0.1, 0.2, 0.4, 0.8),
    ),
    "tabular": Case(
        "regression on 24 columns, 12,000 rows, noise of variance 0.25, three linear layers, weight decay",
        tabular,
        "squared error",
        0,
        lambda: table_splits()[2].tensors[1].var().item(),
        16,
        4000,
        (0.005, 0.01, 0.02, 0.04, 0.08),
    ),
}
