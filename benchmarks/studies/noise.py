"""What the noise of a base run costs: CPU time of steps with and without measurements.

    python benchmarks/studies/noise.py            eight models up to 2.5 M parameters: minutes
    python benchmarks/studies/noise.py --smoke    two small ones: check that it runs

Everything runs in this process on one thread. Blocks with and without measurements take
turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from study import announce
from torch import Tensor, nn

from ray_adascale.measure.probe import BatchSamples
from ray_adascale.recipe import probe_steps

sys.path.append(str(Path(__file__).parents[1]))
from bench import markdown
from models import Decoder

T = 4000  # of the base run whose density of measurements counts
EVERY = T // len(probe_steps(T))


def convolutions(channels: int, side: int) -> nn.Module:
    """Return two convolutions with pooling, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (side // 4) ** 2, 10),
    )


def signal_net() -> nn.Module:
    """Return the small convolutional net of MNIST-1D."""
    layers = [
        nn.Conv1d(1, 25, 5, 2, 1),
        nn.ReLU(),
        nn.Conv1d(25, 25, 3, 2, 1),
        nn.ReLU(),
        nn.Conv1d(25, 25, 3, 2, 1),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(125, 10))


def dense(*sizes: int) -> nn.Module:
    """Return linear layers with ReLU in between."""
    layers = [
        layer
        for i in range(len(sizes) - 1)
        for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Model:
    """A model with a batch.

    Attributes:
        name: Name in the table.
        module: The model.
        x: Its input.
        y: Classes.
    """

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def models(smoke: bool) -> list[Model]:
    """Return the models, the smallest steps first."""
    torch.manual_seed(0)

    def images(name: str, channels: int, batch: int, side: int) -> Model:
        return Model(
            name,
            convolutions(channels, side),
            torch.randn(batch, 1, side, side),
            torch.randint(10, (batch,)),
        )

    small = [
        Model(
            "dense 784-48-10, B = 16",
            dense(784, 48, 10),
            torch.randn(16, 784),
            torch.randint(10, (16,)),
        ),
        images("conv 16-32 on 8×8, B = 8", 16, 8, 8),
    ]
    if smoke:
        return small
    rows = torch.randint(64, (8, 49))
    signals = Model(
        "conv 25-25-25 on 40 values, B = 32",
        signal_net(),
        torch.randn(32, 1, 40),
        torch.randint(10, (32,)),
    )
    return [
        *small,
        signals,
        Model(
            "dense 784-512-512-10, B = 64",
            dense(784, 512, 512, 10),
            torch.randn(64, 784),
            torch.randint(10, (64,)),
        ),
        images("conv 16-32 on 28×28, B = 16", 16, 16, 28),
        images("conv 64-128 on 8×8, B = 32", 64, 32, 8),
        Model(
            "transformer, 48 positions, B = 8",
            Decoder(64, 224, 4, 4, 48),
            rows[:, :-1],
            rows[:, 1:],
        ),
        Model(
            "transformer, 256 positions, B = 4",
            Decoder(64, 224, 4, 4, 256),
            *(torch.randint(64, (4, 256)) for _ in range(2)),
        ),
    ]


class Stepper:
    """Takes steps of a model, with and without measurements.

    Args:
        model: The model with its batch.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._batch = model.module, (model.x, model.y)
        self.params = list(model.module.parameters())
        self._optimizer = torch.optim.SGD(self.params, lr=1e-3, momentum=0.9)
        self._samples = BatchSamples(model.module, loss_of)

    def seconds(self, measured: bool, blocks: int) -> float:
        """Return the CPU seconds of blocks of :data:`EVERY` steps, each with one
        measurement or none.
        """
        began = time.process_time()
        for step in range(blocks * EVERY):
            if self._samples.begun:
                self._samples.add(self._batch)
            loss_of(self._model, self._batch).backward()
            if measured and step % EVERY == 0:
                self._samples.begin(self.params)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--smoke", action="store_true", help="small: only check that it runs"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    announce()
    rows: list[list[Any]] = []
    for model in models(arguments.smoke):
        stepper = Stepper(model)
        stepper.seconds(True, 1)
        block = stepper.seconds(False, 1)
        blocks, rounds = (
            (1, 2)
            if arguments.smoke
            else (max(1, int(0.5 / block)), 15 if block < 1 else 5)
        )
        pairs = [
            (stepper.seconds(False, blocks), stepper.seconds(True, blocks))
            for _ in range(rounds)
        ]
        plain = statistics.median(p for p, _ in pairs) / blocks / EVERY
        ratio = statistics.median(m / p for p, m in pairs)
        count = sum(p.numel() for p in stepper.params)
        rows.append(
            [
                model.name,
                f"{count:,}",
                f"{plain * 1e3:.2f}",
                f"{ratio:.3f}",
                f"{(ratio - 1) * EVERY:.2f}",
            ]
        )
    head = [
        "model",
        "parameters",
        "step, ms",
        "with noise, × without",
        "a measurement, in steps",
    ]
    print(markdown(head, rows), flush=True)


if __name__ == "__main__":
    main()
