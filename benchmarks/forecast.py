"""Forecast against actual steps: three small workloads at S = 4, 16 and 64, and how far off the forecast is.

``python benchmarks/forecast.py`` records base runs (three seeds, as ``tune_recipe(repeats=2)`` would), forecasts from their
noise alone, then runs each scale for real, in this process, with accumulation in place of workers. Everything is printed,
misses too. A few minutes on one core; ``--smoke`` takes seconds and only tells whether everything runs. ``--held-out``
takes other hyperparameters, which nobody looked at when the model was made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Recipe, Run, Workload, forecast_recipe, record_recipe, seed_everything
from ray_adascale.recipe import Repeat
from ray_adascale.workload import WorkloadFn, build, resolve

SCALES: tuple[int, ...] = (4, 16, 64)
PASSES = 4


def tabular(config: Mapping[str, Any]) -> Workload:
    """Regression on 20 columns: a network with noise for a teacher, MultiStepLR by epochs."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4000, 20, generator=generator)
    hidden = torch.randn(20, 16, generator=generator) / 20**0.5
    clean = torch.tanh(2 * x @ hidden) @ torch.randn(16, 1, generator=generator) / 2
    y = clean + 0.3 * torch.randn(4000, 1, generator=generator)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"], weight_decay=1e-4)
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 12], gamma=0.2),
        scheduler_unit="epoch",
        train_dataset=TensorDataset(x[:3200], y[:3200]),
        loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        evaluate=lambda model: {"error": F.mse_loss(model(x[3200:]), y[3200:]).item()},
        metric="error",
    )


class Symbols(nn.Module):
    """Embedding, GRU, one linear layer."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, 16)
        self.recurrent = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embedding(x))[0])


def sequence(config: Mapping[str, Any]) -> Workload:
    """The next symbol of a second-order Markov chain; warm-up and linear decay by steps."""
    kinds, length, count = 12, 17, 2400
    generator = torch.Generator().manual_seed(12)
    next_of = (2.0 * torch.randn(kinds, kinds, kinds, generator=generator)).softmax(-1)
    symbols = torch.randint(kinds, (count, length), generator=generator)
    for t in range(2, length):
        chances = next_of[symbols[:, t - 2], symbols[:, t - 1]]
        symbols[:, t] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    model = Symbols(kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0][:, :-1]).transpose(1, 2), batch[0][:, 1:])

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: min(1.0, (t + 1) / 100) * max(0.02, 1 - t / 1500)
        ),
        scheduler_unit="step",
        train_dataset=TensorDataset(symbols[:2000]),
        loss_fn=loss_fn,
        evaluate=lambda model: {"nll": loss_fn(model, [symbols[2000:]]).item()},
        metric="nll",
    )


@dataclass(frozen=True)
class Case:
    """A workload with its hyperparameters, B0 and T."""

    name: str
    workload: WorkloadFn
    hyperparameters: dict[str, Any]
    base_batch_size: int
    total_steps: int


def cases(*, held_out: bool) -> list[Case]:
    """The three workloads; held out: with other learning rates and momenta."""
    digits = resolve(f"{Path(__file__).parents[1] / 'examples' / 'digits.py'}:workload")
    if held_out:
        return [
            Case("digits", digits, {"lr": 0.1, "momentum": 0.8}, 8, 1800),
            Case("digits, no momentum", digits, {"lr": 0.2, "momentum": 0.0}, 8, 1800),
            Case("tabular", tabular, {"lr": 0.005, "momentum": 0.9}, 16, 3000),
            Case("tabular, no momentum", tabular, {"lr": 0.1, "momentum": 0.0}, 16, 3000),
            Case("sequence, no momentum", sequence, {"lr": 0.5, "momentum": 0.0}, 8, 1500),
        ]
    return [
        Case("digits", digits, {"lr": 0.03, "momentum": 0.9}, 8, 1800),
        Case("tabular", tabular, {"lr": 0.02, "momentum": 0.9}, 16, 3000),
        Case("sequence", sequence, {"lr": 0.1, "momentum": 0.9}, 8, 1500),
    ]


def record(case: Case, seeds: list[int]) -> Recipe:
    """Base runs with several seeds, as one recipe with repeats."""
    first, *others = (
        record_recipe(
            case.workload,
            case.hyperparameters,
            base_batch_size=case.base_batch_size,
            total_steps=case.total_steps,
            seed=seed,
        )
        for seed in seeds
    )
    return replace(first, repeats=[Repeat(seed=r.seed, score=r.score, noise=r.noise) for r in others])


def run(case: Case, recipe: Recipe, scale: int, seed: int) -> tuple[int, float]:
    """Optimizer steps and score of a scaled run."""
    seed_everything(seed)
    built = build(case.workload, case.hyperparameters)
    config = AdaScaleConfig(
        per_worker_batch_size=scale * recipe.base_batch_size // PASSES, accumulation=PASSES, seed=seed
    )
    scaled = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        config,
        evaluate=built.evaluate,
        recipe=recipe,
    )
    for batch in scaled:
        scaled.backward(built.loss_fn(scaled.model, batch))
        scaled.step()
    summary = scaled.summary()
    return summary["optimizer_steps"], summary[built.metric]


def compare(case: Case, scales: tuple[int, ...], base_seeds: list[int], seeds: list[int]) -> list[list[str]]:
    """A row for each scale."""
    recipe = record(case, base_seeds)
    rows = []
    for scale in scales:
        predicted = forecast_recipe(
            recipe,
            workers=[1],
            config=AdaScaleConfig(per_worker_batch_size=scale * recipe.base_batch_size // PASSES, accumulation=PASSES),
        ).rows[0]
        runs = [run(case, recipe, scale, seed) for seed in seeds]
        steps = [n for n, _ in runs]
        actual = statistics.mean(steps)
        off = predicted.steps / actual - 1
        interval = "" if predicted.low is None else f"{predicted.low}–{predicted.high}"
        rows.append(
            [
                case.name,
                f"{scale}",
                f"{predicted.steps}",
                interval,
                f"{actual:.0f}",
                f"{min(steps)}–{max(steps)}",
                f"{off:+.0%}",
                "yes" if abs(off) <= 0.1 else "no",
                f"{recipe.metric} {recipe.score:.3f}",
                f"{statistics.mean(score for _, score in runs):.3f}",
            ]
        )
    return rows


HEADINGS = ["workload", "S", "forecast", "over seeds", "actual", "each run", "off", "≤ 10 %", "base run", "scaled"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast against actual steps.")
    parser.add_argument("--smoke", action="store_true", help="one short case")
    parser.add_argument("--held-out", action="store_true", help="other hyperparameters than the model was made with")
    parser.add_argument("--base-seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12], help="of the scaled runs")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # that the batch exceeds the noise scale, at every larger scale
    torch.set_num_threads(1)
    print(f"load before: {os.getloadavg()[0]:.2f}; torch {torch.__version__}", file=sys.stderr)
    started = time.monotonic()
    chosen = cases(held_out=args.held_out)
    scales, base_seeds, seeds = SCALES, args.base_seeds, args.seeds
    if args.smoke:
        chosen, scales, base_seeds, seeds = [replace(chosen[1], total_steps=200)], (4,), [0], [10]
    print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}", flush=True)
    for case in chosen:
        for row in compare(case, scales, base_seeds, seeds):
            print(f"| {' | '.join(row)} |", flush=True)
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
