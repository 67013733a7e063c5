"""Noise from single examples: what it costs, whether one pass a step suffices, and how far it steadies the first gains.

    python benchmarks/studies/noise.py cost          CPU time of measured steps, seven models up to 2.5 M parameters
    python benchmarks/studies/noise.py one-pass      optimizer steps of one worker with one pass at S = 8, against eight passes
    python benchmarks/studies/noise.py first-steps   standard deviation of r over seeds in the first 5 % of a run, S = 8, n = 2
    python benchmarks/studies/noise.py --smoke       all three, small: check that it runs

Everything runs in this process on one thread. ``cost`` interleaves plain and measured steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from forecast_workloads import Case, cases
from study import announce
from torch import Tensor, nn

from ray_adascale import AdaScaleConfig, Run, seed_everything
from ray_adascale.measure.per_example import ExampleNorms
from ray_adascale.workload import build

sys.path.append(str(Path(__file__).parents[1]))
from bench import markdown

SCALE = 8
CASES = ("images, no momentum", "images, m 0.9", "characters, m 0.9", "products, m 0.95", "cells", "autoencoder")


# ---- cost ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block whose attention consists of linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.project(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, width))
        return x + self.wide(x)


class Language(nn.Module):
    """A causal transformer over characters. Positions are looked up for each example, so that they are covered, too."""

    def __init__(self, kinds: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(kinds, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, kinds))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.token(x) + self.position(torch.arange(x.shape[1]).expand_as(x))))


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


def dense(*sizes: int) -> nn.Module:
    """Return linear layers with ReLU in between."""
    layers = [layer for i in range(len(sizes) - 1) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
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

    def loss(self) -> Tensor:
        """Return the mean loss of the batch."""
        return F.cross_entropy(self.module(self.x).flatten(0, -2), self.y.flatten())


def models(smoke: bool) -> list[Model]:
    """Return the models, the smallest steps first."""
    torch.manual_seed(0)

    def images(name: str, channels: int, batch: int, side: int) -> Model:
        return Model(name, convolutions(channels, side), torch.randn(batch, 1, side, side), torch.randint(10, (batch,)))

    small = [
        Model("dense 784-48-10, B = 16", dense(784, 48, 10), torch.randn(16, 784), torch.randint(10, (16,))),
        images("conv 16-32 on 8×8, B = 8", 16, 8, 8),
    ]
    if smoke:
        return small
    rows = torch.randint(64, (8, 49))
    return [
        *small,
        Model("dense 784-512-512-10, B = 64", dense(784, 512, 512, 10), torch.randn(64, 784), torch.randint(10, (64,))),
        images("conv 16-32 on 28×28, B = 16", 16, 16, 28),
        images("conv 64-128 on 8×8, B = 32", 64, 32, 8),
        Model("transformer, 48 positions, B = 8", Language(64, 224, 4, 48), rows[:, :-1], rows[:, 1:]),
        Model(
            "transformer, 256 positions, B = 4",
            Language(64, 224, 4, 256),
            *(torch.randint(64, (4, 256)) for _ in range(2)),
        ),
    ]


class Stepper:
    """Takes plain and measured steps of a model.

    Args:
        model: The model with its batch.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.params = list(model.module.parameters())
        self._optimizer = torch.optim.SGD(self.params, lr=1e-3, momentum=0.9)
        self._norms = ExampleNorms(model.module, [self.params])

    def _step(self, measured: bool) -> None:
        if measured:
            self._norms.begin()
        self._model.loss().backward()
        if measured:
            found = self._norms.end()
            assert found.problem is None, found.problem
            grads = [p.grad for p in self.params if p.grad is not None]
            reduced = torch.stack(torch._foreach_norm(grads)).square().sum()
            torch.stack([found.sq_norms.sum(), reduced.double()]).tolist()  # what a base run reads
        self._optimizer.step()
        self._optimizer.zero_grad()

    def seconds(self, measured: bool, steps: int) -> float:
        """Return the CPU seconds of a step, a mean over a block of steps."""
        began = time.process_time()
        for _ in range(steps):
            self._step(measured)
        return (time.process_time() - began) / steps


def cost(smoke: bool) -> None:
    """Print the CPU time of a measured step relative to a plain one: medians over blocks of both in turn."""
    rows = []
    for model in models(smoke):
        stepper = Stepper(model)
        stepper.seconds(True, 2)
        steps = max(2, int((0.02 if smoke else 0.2) / stepper.seconds(False, 3)))
        pairs = [(stepper.seconds(False, steps), stepper.seconds(True, steps)) for _ in range(2 if smoke else 15)]
        plain = statistics.median(p for p, _ in pairs)
        ratio = statistics.median(m / p for p, m in pairs)
        count = sum(p.numel() for p in stepper.params)
        rows.append([model.name, f"{count:,}", f"{plain * 1e3:.2f}", f"{ratio:.2f}", f"{1 + (ratio - 1) / 5:.2f}"])
    print(markdown(["model", "parameters", "plain step, ms", "measured step", "every 5th step"], rows), flush=True)


# ---- runs ------------------------------------------------------------------------------------------------------------


def chosen(smoke: bool) -> list[Case]:
    """Return the cases."""
    found = [case for group in cases().values() for case in group if case.name.startswith(CASES)]
    return [replace(found[0], total_steps=100)] if smoke else found


def gains_of(
    case: Case,
    seed: int,
    samples: int,
    noise: Literal["per_example", "samples"],
    budget: float = 0.05,
    until: float = 1.0,
) -> tuple[list[float], float]:
    """Return the gain of each step at S = 8 in ``samples`` passes, and the score at the end.

    Args:
        case: The workload.
        seed: Seed of weights and data.
        samples: Passes of a step.
        noise: As in ``AdaScaleConfig``.
        budget: As ``noise_budget`` there.
        until: Share of T after which the run is left; the score is then NaN.
    """
    seed_everything(seed)
    config = AdaScaleConfig(
        base_batch_size=case.base_batch_size,
        total_steps=case.total_steps,
        per_worker_batch_size=SCALE * case.base_batch_size // samples,
        accumulation=samples,
        noise=noise,
        noise_budget=budget,
        seed=seed,
    )
    built = build(case.workload, case.hyperparameters, config)
    run = Run.of(built, config)
    gains = []
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        if run.step():
            gains.append(run.gain)
            if until < 1 and run.effective_steps >= until * case.total_steps:
                return gains, math.nan
    return gains, float(run.summary()[built.metric])


def one_pass(smoke: bool) -> None:
    """Print the optimizer steps of one pass a step, by its examples, against eight passes."""
    seeds = range(1 if smoke else 5)
    rows = []
    for case in chosen(smoke):
        steps: dict[str, float] = {}
        scores: dict[str, float] = {}
        for way, samples, noise, budget in (
            ("eight passes", 8, "samples", 1.0),
            ("examples, each step", 1, "per_example", 100.0),
            ("examples, 5 %", 1, "per_example", 0.05),
        ):
            runs = [gains_of(case, seed, samples, noise, budget) for seed in seeds]  # type: ignore[arg-type]
            steps[way] = statistics.mean(len(gains) for gains, _ in runs)
            scores[way] = statistics.mean(score for _, score in runs)
        base = steps["eight passes"]
        off = [f"{n:.0f} ({n / base - 1:+.1%}), {scores[way]:.3f}" for way, n in steps.items() if way != "eight passes"]
        rows.append([case.name, f"{base:.0f}, {scores['eight passes']:.3f}", *off])
    head = [
        "workload",
        "eight passes: steps, score",
        "one pass, examples of each step",
        "examples, budget 5 %",
    ]
    print(markdown(head, rows), flush=True)


WAYS: tuple[Literal["samples", "per_example"], ...] = ("samples", "per_example")


def first_steps(smoke: bool) -> None:
    """Print the standard deviation of r over seeds, a mean over the steps of the first 5 % of a run."""
    seeds = range(3 if smoke else 20)
    rows = []
    for case in chosen(smoke):
        spread: dict[str, float] = {}
        level: dict[str, float] = {}
        for way in WAYS:
            runs = [gains_of(case, seed, 2, way, until=0.05)[0] for seed in seeds]
            count = min(len(run) for run in runs)
            spread[way] = statistics.mean(statistics.stdev(run[i] for run in runs) for i in range(count))
            level[way] = statistics.mean(run[i] for run in runs for i in range(count))
        rows.append(
            [
                case.name,
                *(f"{level[way]:.2f} ± {spread[way]:.2f}" for way in spread),
                f"{spread['per_example'] / spread['samples']:.2f}",
            ]
        )
    print(
        markdown(["workload", "r by two samples", "r by examples, budget 5 %", "ratio of the deviations"], rows),
        flush=True,
    )


PARTS = {"cost": cost, "one-pass": one_pass, "first-steps": first_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("part", nargs="?", choices=list(PARTS), help="default: all")
    parser.add_argument("--smoke", action="store_true", help="small: only check that it runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of batches beyond the noise
    torch.set_num_threads(1)
    announce()
    for name in [arguments.part] if arguments.part else PARTS:
        print(f"\n{name}\n", flush=True)
        PARTS[name](arguments.smoke)


if __name__ == "__main__":
    main()
