"""Time of a search against the same trials as plain functions under Ray Tune, without
this library.

    python benchmarks/search.py                     two workloads, about six minutes on two quiet cores
    python benchmarks/search.py --smoke             check that it runs

Both search the same fixed list of learning rates, each trial to its end: the same
model, data, batch size, schedule, steps, evaluations and reports, one CPU a trial. The
plain trial is a hand-written loop in a process that never imports this library. Both
let Tune reuse processes (Tune's default starts one per trial, which would favour this
library). Searches alternate. Printed are medians of wall time, of the machine's CPU
time (Ray's own processes included), and of the ratios within a round. The trials of
``tune_recipe`` measure no noise. The confirmation that follows does: it is timed by
itself, as a number of plain trials.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench import in_words, machine, markdown, write_json
from ray import tune
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LRS = (0.01, 0.02, 0.05, 0.1)
REPORTS = 10  # per trial
KINDS = ("plain", "tune_recipe")
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Task:
    """A search: a network with ``channels`` channels on the digits, batches of
    ``batch`` examples, ``steps`` steps.
    """

    name: str
    channels: int
    batch: int
    steps: int
    rounds: int


# the first is examples/digits.py
TASKS = (Task("digits", 16, 8, 1800, 5), Task("wide", 64, 32, 600, 4))


def cpu_seconds() -> float:
    """Return the seconds of CPU time that the machine has spent so far. Nothing else
    may run beside the searches.
    """
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq) / TICK


@dataclass(frozen=True)
class Now:
    """A point in time: seconds of the wall clock, and of CPU time."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=cpu_seconds)

    def since(self, began: Now) -> dict[str, float]:
        """Return the seconds from another point in time to this one."""
        return {"wall": self.wall - began.wall, "cpu": self.cpu - began.cpu}


class Ends(tune.Callback):
    """Notes when the trials of a search end, and when its repeats do."""

    def __init__(self) -> None:
        self.found: list[Now] = []

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        self.found.append(Now())


@dataclass(frozen=True)
class Pieces:
    """Plain torch objects, for both kinds of trial."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    train: TensorDataset
    evaluate: Callable[[nn.Module], dict[str, float]]


def make(task: Task, lr: float) -> Pieces:
    """Return model, optimizer, scheduler and data of a trial."""
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
    return Pieces(
        model, optimizer, scheduler, TensorDataset(x[train], y[train]), evaluate
    )


def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain_loop(
    task: Task, lr: float, report: Callable[[dict[str, Any]], object]
) -> None:
    """Train as a hand-written loop would."""
    torch.manual_seed(0)
    pieces = make(task, lr)
    loader = DataLoader(
        pieces.train, batch_size=task.batch, shuffle=True, drop_last=True
    )
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
    """Run a trial of the plain search, in its process."""
    torch.set_num_threads(1)
    plain_loop(task, config["lr"], tune.report)


def plain_search(task: Task, folder: str, ends: Ends) -> int:
    """Search with plain functions; return the number of complete trials."""
    results = tune.Tuner(
        tune.with_resources(tune.with_parameters(plain_trial, task=task), {"CPU": 1}),
        param_space={"lr": tune.grid_search(list(LRS))},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", reuse_actors=True),
        run_config=tune.RunConfig(
            name=f"plain-{time.time():.3f}",
            storage_path=folder,
            verbose=0,
            callbacks=[ends],
        ),
    ).fit()
    return sum(
        r.error is None
        and r.metrics["step"] == task.steps
        and r.metrics["training_iteration"] == REPORTS
        for r in results
        if r.metrics is not None
    )


def workload_of(task: Task, lr: float) -> Any:
    """Return a trial as a workload of this library."""
    from ray_adascale import Workload

    pieces = make(task, lr)
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


def our_search(task: Task, folder: str, ends: Ends) -> int:
    """Search with ``tune_recipe``; return the number of complete trials."""
    from ray_adascale import AdaScaleConfig, Search, tune_recipe

    search = Search(
        lambda config: workload_of(task, config["lr"]),
        {"lr": tune.grid_search(list(LRS))},
        config=AdaScaleConfig(base_batch_size=task.batch, total_steps=task.steps),
        num_samples=1,
        scheduler=None,
        storage_path=folder,
        verbose=0,
        callbacks=[ends],
    )
    recipe = tune_recipe(search)
    assert not recipe.noise, recipe.search
    assert len(recipe.repeats) == 1, recipe.search
    return int(recipe.search["completed"])


SEARCH: Mapping[str, Callable[[Task, str, Ends], int]] = {
    "plain": plain_search,
    "tune_recipe": our_search,
}


def compare(task: Task, folder: str) -> dict[str, Any]:
    """Run the searches of a task in turn. Return wall and CPU seconds of the parts
    by round, after one round to warm up.
    """
    seconds: dict[str, list[dict[str, float]]] = {
        "plain": [],
        "trials": [],
        "confirmation": [],
    }
    for number in range(task.rounds + 1):
        for kind in random.Random(number).sample(KINDS, len(KINDS)):
            ends, began = Ends(), Now()
            ended = SEARCH[kind](task, folder, ends)
            if ended != len(LRS):
                raise RuntimeError(
                    f"{kind} on {task.name}: {ended} of {len(LRS)} trials did the "
                    "whole work."
                )
            if number == 0:
                continue
            seconds["plain" if kind == "plain" else "trials"].append(
                ends.found[0].since(began)
            )
            if kind != "plain":
                seconds["confirmation"].append(ends.found[1].since(ends.found[0]))
    return {"task": task.name, "seconds": seconds}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of the searches."""
    rows = []
    for r in results:
        for clock in ("wall", "cpu"):
            plain, trials, again = (
                [one[clock] for one in r["seconds"][part]] for part in r["seconds"]
            )
            ratios = [ours / theirs for theirs, ours in zip(plain, trials, strict=True)]
            of_trial = [
                len(LRS) * ours / theirs
                for theirs, ours in zip(plain, again, strict=True)
            ]
            cells = [
                f"{statistics.median(plain):.2f}",
                f"{statistics.median(trials):.2f}",
            ]
            spread = f"{min(ratios):.3f}–{max(ratios):.3f}"
            cells += [
                f"{statistics.median(ratios):.3f}",
                spread,
                f"{statistics.median(of_trial):.2f}",
            ]
            rows.append([r["task"], "CPU" if clock == "cpu" else clock, *cells])
    headings = [
        "workload",
        "clock",
        "plain, s",
        "trials, s",
        "ratio",
        "range over rounds",
        "confirmation, plain trials",
    ]
    return markdown(headings, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="short trials, one round: only check that it runs",
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=[task.name for task in TASKS], help="default: all"
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of searches (default: 5 and 4)"
    )
    parser.add_argument(
        "--cpus",
        type=int,
        default=2,
        help="CPUs of the Ray that is started (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args(argv)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    tasks = [
        task
        for task in TASKS
        if arguments.tasks is None or task.name in arguments.tasks
    ]
    if arguments.rounds is not None:
        tasks = [replace(task, rounds=arguments.rounds) for task in tasks]
    if arguments.smoke:
        tasks = [replace(task, channels=4, steps=40, rounds=1) for task in tasks]

    import ray

    torch.set_num_threads(1)
    about = machine(ray=ray.__version__)
    with tempfile.TemporaryDirectory() as folder:
        # tune_recipe sets it as well: neither prints
        os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
        ray.init(
            num_cpus=arguments.cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            results = [compare(task, folder) for task in tasks]
        finally:
            ray.shutdown()
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "machine": about,
                "tasks": [asdict(task) for task in tasks],
                "results": results,
            },
        )
    print(in_words(about))
    print(f"{len(LRS)} trials on {arguments.cpus} CPUs, each to its end; medians\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
