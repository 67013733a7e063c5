"""What a search costs beside the same trials as plain functions under Ray Tune, without this library.

    python benchmarks/search.py                     two workloads, about five minutes on two quiet cores
    python benchmarks/search.py --smoke             whether it runs

Both search the same fixed list of learning rates, each trial to its end: the same model, data, batch size, schedule, steps,
evaluations and reports, one CPU a trial. The plain trial is a hand-written loop in a process that never imports this
library. Both let Tune reuse processes (Tune's default starts one a trial, which would flatter this library). Searches
take turns; printed are medians of wall time and of the ratio within a round.

Then, where extra time goes: seconds of one trial in one process, for the plain loop, for ``Run``'s loop, and for that with
the noise probed on every 20th step; and of importing what a trial's process imports.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray import tune
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LRS = (0.01, 0.02, 0.05, 0.1)
REPORTS = 10  # of a trial
KINDS = ("plain", "tune_recipe")


@dataclass(frozen=True)
class Task:
    """What is searched: a net of this many channels on the digits, batches of ``batch`` examples, ``steps`` steps."""

    name: str
    channels: int
    batch: int
    steps: int
    rounds: int


TASKS = (Task("digits", 16, 8, 1800, 5), Task("wide", 64, 32, 600, 4))  # the first is examples/digits.py


@dataclass(frozen=True)
class Pieces:
    """Plain torch, for both kinds of trial."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    train: TensorDataset
    evaluate: Callable[[nn.Module], dict[str, float]]


def make(task: Task, lr: float) -> Pieces:
    model = nn.Sequential(
        nn.Conv2d(1, task.channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(task.channels, 2 * task.channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * task.channels, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, rest = order[:1200], order[1200:1450]

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": (model(x[rest]).argmax(1) == y[rest]).float().mean().item()}

    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=task.steps)
    return Pieces(model, optimizer, scheduler, TensorDataset(x[train], y[train]), evaluate)


def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain_loop(task: Task, lr: float, report: Callable[[dict[str, Any]], object]) -> None:
    """The base run as anybody would write it."""
    torch.manual_seed(0)
    pieces = make(task, lr)
    loader = DataLoader(pieces.train, batch_size=task.batch, shuffle=True, drop_last=True)
    batches = iter(loader)
    losses = 0.0
    for step in range(1, task.steps + 1):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        loss = loss_fn(pieces.model, batch)
        pieces.optimizer.zero_grad()
        loss.backward()
        pieces.optimizer.step()
        pieces.scheduler.step()
        losses += loss.item()
        if step % (task.steps // REPORTS) == 0:
            pieces.model.eval()
            with torch.no_grad():
                found = pieces.evaluate(pieces.model)
            pieces.model.train()
            report({**found, "loss": losses / (task.steps // REPORTS), "step": step})
            losses = 0.0


def plain_trial(config: dict[str, Any], task: Task) -> None:
    torch.set_num_threads(1)
    plain_loop(task, config["lr"], tune.report)


def plain_search(task: Task, folder: str) -> int:
    results = tune.Tuner(
        tune.with_resources(tune.with_parameters(plain_trial, task=task), {"CPU": 1}),
        param_space={"lr": tune.grid_search(list(LRS))},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", reuse_actors=True),
        run_config=tune.RunConfig(name=f"plain-{time.time():.3f}", storage_path=folder, verbose=0),
    ).fit()
    return sum(
        r.error is None and r.metrics["step"] == task.steps and r.metrics["training_iteration"] == REPORTS
        for r in results
        if r.metrics is not None
    )


def our_search(task: Task, folder: str) -> int:
    from ray_adascale import Workload, tune_recipe

    def workload(config: dict[str, Any]) -> Workload:
        pieces = make(task, config["lr"])
        return Workload(
            model=pieces.model,
            optimizer=pieces.optimizer,
            scheduler=pieces.scheduler,
            scheduler_unit="step",
            train_dataset=pieces.train,
            loss_fn=loss_fn,
            evaluate=pieces.evaluate,
            metric="accuracy",
            mode="max",
        )

    recipe = tune_recipe(
        workload,
        {"lr": tune.grid_search(list(LRS))},
        base_batch_size=task.batch,
        total_steps=task.steps,
        num_samples=1,
        scheduler=None,
        storage_path=folder,
        verbose=0,
    )
    assert len(recipe.noise) == -(-task.steps // 20)
    return int(recipe.search["completed"])


SEARCH: Mapping[str, Callable[[Task, str], int]] = {"plain": plain_search, "tune_recipe": our_search}


@dataclass(frozen=True)
class Result:
    """One task's searches: seconds and ratios by round, after one of each to warm up."""

    task: str
    plain_s: list[float]
    tune_recipe_s: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / plain for ours, plain in zip(self.tune_recipe_s, self.plain_s, strict=True)]


def compare(task: Task, folder: str) -> Result:
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(task.rounds + 1):
        for kind in random.Random(number).sample(KINDS, len(KINDS)):
            began = time.perf_counter()
            ended = SEARCH[kind](task, folder)
            wall = time.perf_counter() - began
            if ended != len(LRS):
                raise RuntimeError(f"{kind} on {task.name}: {ended} of {len(LRS)} trials did the whole work.")
            if number > 0:
                seconds[kind].append(wall)
    return Result(task.name, seconds["plain"], seconds["tune_recipe"])


def run_loop(task: Task, lr: float, probe_every: int) -> None:
    """The loop of a trial of ours, in this process."""
    from ray_adascale import AdaScaleConfig, LocalBackend, Run, Workload
    from ray_adascale.run.base_run import base_config, train_base
    from ray_adascale.workload import with_unit

    torch.manual_seed(0)
    pieces = make(task, lr)
    built = Workload(
        model=pieces.model,
        optimizer=pieces.optimizer,
        scheduler=pieces.scheduler,
        scheduler_unit="step",
        train_dataset=pieces.train,
        loss_fn=loss_fn,
        evaluate=pieces.evaluate,
    )
    run = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        with_unit(base_config(AdaScaleConfig(), task.batch, task.steps, None, 0), built),
        evaluate=built.evaluate,
        backend=LocalBackend(device="cpu"),
    )
    train_base(run, built, probe_every, [], lambda loss: None)


def breakdown(task: Task, rounds: int) -> dict[str, float]:
    """Median seconds of one trial in this process."""
    ways: dict[str, Callable[[], None]] = {
        "plain": lambda: plain_loop(task, LRS[0], lambda metrics: None),
        "run": lambda: run_loop(task, LRS[0], 10**9),
        "run_with_probes": lambda: run_loop(task, LRS[0], 20),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in random.Random(number).sample(sorted(ways), len(ways)):
            began = time.perf_counter()
            ways[way]()
            if number > 0:
                found[way].append(time.perf_counter() - began)
    return {way: statistics.median(seconds) for way, seconds in found.items()}


def import_seconds(rounds: int) -> dict[str, float]:
    """Median seconds to import what a plain trial needs, and what one of ours does.

    With an optimizer each, as that loads a part of torch (``torch._dynamo``, and with it DTensors) that we need too.
    """
    optimizer = "; torch.optim.SGD([torch.ones(1)], lr=0.1)"
    code = {
        "plain": f"import torch, ray.tune, sklearn.datasets{optimizer}",
        "tune_recipe": f"import torch, ray.tune, sklearn.datasets, ray_adascale.search.trial{optimizer}",
    }
    found: dict[str, list[float]] = {kind: [] for kind in code}
    for number in range(rounds + 1):
        for kind, statement in code.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-W", "ignore", "-c", statement], check=True)
            if number > 0:
                found[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def table(results: Sequence[Result]) -> str:
    lines = ["| workload | plain, s | tune_recipe, s | ratio | range over rounds |", "| --- | --- | --- | --- | --- |"]
    for r in results:
        lines.append(
            f"| {r.task} | {statistics.median(r.plain_s):.2f} | {statistics.median(r.tune_recipe_s):.2f} "
            f"| {statistics.median(r.ratios):.3f} | {min(r.ratios):.3f}–{max(r.ratios):.3f} |"
        )
    return "\n".join(lines)


def parts_table(parts: Mapping[str, Mapping[str, float]], imports: Mapping[str, float], tasks: Sequence[Task]) -> str:
    lines = [
        "| one trial, in one process | plain loop, s | Run, s | with probes, s | Run adds a step, µs | a probe, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for task in tasks:
        p = parts[task.name]
        step = (p["run"] - p["plain"]) / task.steps
        probe = (p["run_with_probes"] - p["run"]) / -(-task.steps // 20)
        lines.append(
            f"| {task.name} | {p['plain']:.3f} | {p['run']:.3f} | {p['run_with_probes']:.3f} | {step * 1e6:.0f} "
            f"| {probe * 1e3:.2f} |"
        )
    more = imports["tune_recipe"] - imports["plain"]
    return "\n".join(
        [*lines, "", f"Imports of a trial's process: {imports['plain']:.2f} s, {more:+.2f} s with this library"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="short trials, one round: only whether it runs")
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS], help="default: all")
    parser.add_argument("--rounds", type=int, help="of searches (default: 5 and 4)")
    parser.add_argument("--cpus", type=int, default=2, help="of the Ray that is started (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args(argv)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    tasks = [task for task in TASKS if arguments.tasks is None or task.name in arguments.tasks]
    if arguments.rounds is not None:
        tasks = [Task(t.name, t.channels, t.batch, t.steps, arguments.rounds) for t in tasks]
    if arguments.smoke:
        tasks = [Task(t.name, 4, t.batch, 40, 1) for t in tasks]

    import ray

    torch.set_num_threads(1)
    about = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "python": platform.python_version(),
    }
    rounds = 1 if arguments.smoke else 5
    parts = {task.name: breakdown(task, rounds) for task in tasks}
    imports = import_seconds(1 if arguments.smoke else 3)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # as tune_recipe does, so that neither prints
        ray.init(num_cpus=arguments.cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            results = [compare(task, folder) for task in tasks]
        finally:
            ray.shutdown()
    if arguments.json is not None:
        document = {
            "machine": about,
            "tasks": [asdict(task) for task in tasks],
            "results": [{**asdict(r), "ratio": statistics.median(r.ratios)} for r in results],
            "one_process_s": parts,
            "imports_s": imports,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{len(LRS)} trials on {arguments.cpus} CPUs, each to its end; medians\n")
    print(table(results))
    print()
    print(parts_table(parts, imports, tasks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
