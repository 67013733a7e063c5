"""Seconds from ``fit()`` to the first optimizer step on two workers: this library against a plain ``TorchTrainer``.

    python benchmarks/start.py                      five rounds: six minutes on two quiet cores
    python benchmarks/start.py --rounds 1

All kinds have the same model, data and optimizer, on one Ray, started before, with cached bytecode. A round is one start of each
kind in shuffled order. Reported are medians over rounds of the seconds to each stage and of the difference to the plain trainer
in the same round.

    plain      TorchTrainer, ``prepare_model``, ``prepare_data_loader``
    beside     plain, and an empty actor started just before, because ``AdaScaleTrainer`` starts one for messages to the driver
    prepare    TorchTrainer, ``ray_adascale.prepare``
    trainer    ``AdaScaleTrainer`` with a workload

Stages: the trainer object exists, before ``fit()`` (built); the worker's function was called (entered), after Ray's part:
placement, processes, imports of torch, the process group; model and loader are ready; the first optimizer step was taken
(stepped); ``fit()`` returned (ended).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import in_words, machine, markdown, write_json

KINDS = ("plain", "beside", "prepare", "trainer")
STAGES = ("built", "entered", "ready", "stepped", "ended")
STEPS = 5
BATCH = 16


def stamp(folder: str, stage: str) -> None:
    """Log the time at which rank 0 reached a stage."""
    import ray.train

    if ray.train.get_context().get_world_rank() == 0:
        (Path(folder) / stage).write_text(f"{time.time()}")


def build() -> tuple[Any, Any, Any]:
    """Return model, optimizer and data."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randint(0, 10, (4096,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data


def plain(config: dict[str, Any]) -> None:
    """Train with Ray Train alone, in a worker."""
    stamp(config["folder"], "entered")
    import ray.train.torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    model, optimizer, data = build()
    wrapped = ray.train.torch.prepare_model(model)
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=BATCH, shuffle=True))
    stamp(config["folder"], "ready")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        if step == 0:
            stamp(config["folder"], "stepped")
        if step + 1 == STEPS:
            break
    ray.train.report({"loss": 0.0})


def settings() -> Any:
    """Return the settings of a run with :data:`STEPS` steps."""
    from ray_adascale import AdaScaleConfig

    return AdaScaleConfig(
        base_batch_size=BATCH,
        per_worker_batch_size=BATCH,
        total_steps=2 * STEPS,
        rule="unscaled",  # all kinds must take the same number of steps
        checkpoint_every_s=1e9,
    )


def prepare(config: dict[str, Any]) -> None:
    """Train with ``ray_adascale.prepare``, in a worker."""
    stamp(config["folder"], "entered")
    import torch.nn.functional as F

    import ray_adascale

    model, optimizer, data = build()
    run = ray_adascale.prepare(model, optimizer, None, data, settings())
    stamp(config["folder"], "ready")
    first = True
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        if first:
            stamp(config["folder"], "stepped")
            first = False


def workload(config: dict[str, Any]) -> Any:
    """Return the workload of ``AdaScaleTrainer``, in a worker."""
    stamp(config["folder"], "entered")
    import torch.nn.functional as F

    from ray_adascale import Workload

    model, optimizer, data = build()
    passes = 0

    def loss_fn(model: Any, batch: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes <= 2:  # the second pass begins after the first step
            stamp(config["folder"], "ready" if passes == 1 else "stepped")
        return F.cross_entropy(model(batch[0]), batch[1])

    return Workload(model=model, optimizer=optimizer, train_dataset=data, loss_fn=loss_fn)


class Empty:
    """An actor that does nothing."""


def measure(kind: str) -> dict[str, float]:
    """Run a kind; return the seconds from before the trainer is made to each stage."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ray_adascale import AdaScaleTrainer

    folder = tempfile.mkdtemp()
    shared: dict[str, Any] = {
        "scaling_config": ScalingConfig(num_workers=2),
        "run_config": RunConfig(name="start", storage_path=folder),
    }
    empty = None
    try:
        began = time.time()
        trainer: TorchTrainer
        if kind == "trainer":
            trainer = AdaScaleTrainer(
                workload, hyperparameters={"folder": folder}, config=settings(), progress=False, **shared
            )
        else:
            if kind == "beside":
                empty = ray.remote(num_cpus=0)(Empty).remote()
            loop = prepare if kind == "prepare" else plain
            trainer = TorchTrainer(loop, train_loop_config={"folder": folder}, **shared)
        built = time.time()
        trainer.fit()
        at = {"built": built, "ended": time.time()}
        at.update({stage: float((Path(folder) / stage).read_text()) for stage in STAGES[1:4]})
        return {stage: at[stage] - began for stage in STAGES}
    finally:
        if empty is not None:
            ray.kill(empty)
        shutil.rmtree(folder, ignore_errors=True)


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """Return a table of medians over the rounds."""
    rows = []
    for kind in KINDS:
        medians = [f"{statistics.median(r[kind][stage] for r in rounds):.2f}" for stage in STAGES]
        above = [r[kind]["stepped"] - r["plain"]["stepped"] for r in rounds]
        extra = "" if kind == "plain" else f"{statistics.median(above):+.2f} ({min(above):+.2f} to {max(above):+.2f})"
        rows.append([kind, *medians, extra])
    head = ["kind", *(f"{stage}, s" for stage in STAGES), "to the first step, s above plain (range)"]
    return markdown(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the seconds to this file")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / "ray_adascale-pycache"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    import ray

    about = machine(ray=ray.__version__)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        for kind in KINDS:  # fills bytecode and disk caches, and starts processes that Ray keeps
            measure(kind)
        rounds = []
        for number in range(arguments.rounds):
            order = random.Random(number).sample(KINDS, len(KINDS))
            rounds.append({kind: measure(kind) for kind in order})
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    finally:
        ray.shutdown()
    if arguments.json is not None:
        write_json(arguments.json, rounds)
    print(f"{in_words(about)}\nmedian of {arguments.rounds} rounds\n")
    print(table(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
