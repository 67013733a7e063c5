"""Seconds from a command to its first optimizer step: ``ray-adascale train`` against a
script with a plain ``TorchTrainer``.

    python benchmarks/start.py                      five rounds, about six minutes on two quiet cores
    python benchmarks/start.py --smoke              check that it runs

A round starts each kind once, in shuffled order, with a Ray of its own and cached
bytecode: the same model, data and optimizer on two workers. Medians over rounds, and of
the difference to the plain script in the same round. Stages: the command has imported
the workload's file; the check has made its pass; Ray calls the first worker's function;
a first step is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from bench import in_words, machine, markdown
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STAGES = ("imported", "checked", "called", "stepped")
BATCH, STEPS = 16, 5
SETTINGS = {
    "num-workers": 2,
    "base-batch-size": BATCH,
    "per-worker-batch-size": BATCH,
    "total-steps": 2 * STEPS,
}
TRAIN = (
    "-m",
    "ray_adascale",
    "train",
    f"{__file__}:workload",
    *(f"--{name}={value}" for name, value in SETTINGS.items()),
)
KINDS = {
    "plain": (__file__, "--plain"),
    "train": TRAIN,
    "train --no-check": (*TRAIN, "--no-check"),
}


def stamp(stage: str) -> None:
    """Keep the time at which a stage was first reached."""
    folder = os.environ.get("START_FOLDER")
    if folder is not None:
        with (
            contextlib.suppress(FileExistsError),
            open(Path(folder) / stage, "x") as file,
        ):
            file.write(f"{time.time()}")


stamp("imported")


def pieces() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Return model, optimizer and data."""
    model = nn.Sequential(
        nn.Linear(32, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    data = TensorDataset(torch.randn(4096, 32), torch.randint(0, 10, (4096,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data


def workload(config: dict[str, Any]) -> Any:
    """Return the workload of the command."""
    from ray_adascale import Workload

    in_worker, passes = ray.is_initialized(), 0
    if in_worker:
        stamp("called")
    model, optimizer, data = pieces()

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        nonlocal passes
        passes += 1
        if not in_worker or passes == 2:  # the second pass begins after the first step
            stamp("stepped" if in_worker else "checked")
        return F.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model, optimizer=optimizer, train_dataset=data, loss_fn=loss_fn
    )


def plain_loop() -> None:
    """Train with Ray Train alone, in a worker."""
    import ray.train.torch

    stamp("called")
    model, optimizer, data = pieces()
    model = ray.train.torch.prepare_model(model)
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(data, batch_size=BATCH, shuffle=True)
    )
    for _, (x, y) in zip(range(STEPS), loader, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stamp("stepped")


def plain() -> None:
    """Start Ray and a plain trainer, in a script's process."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(log_to_driver=False, logging_level="ERROR")
    config = RunConfig(storage_path=os.environ["START_FOLDER"])
    TorchTrainer(
        plain_loop, scaling_config=ScalingConfig(num_workers=2), run_config=config
    ).fit()


def measure(kind: str) -> dict[str, float]:
    """Run a kind to its end; return the seconds to each stage that it has."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            *KINDS[kind],
            *([] if kind == "plain" else [f"--storage-path={folder}"]),
        ]
        began = time.time()
        subprocess.run(
            command,
            env=os.environ | {"START_FOLDER": folder},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return {
            each: float(file.read_text()) - began
            for each in STAGES
            if (file := Path(folder) / each).exists()
        }


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """Return a table of medians over the rounds."""
    rows = []
    for kind in KINDS:
        found = [
            [r[kind][stage] for r in rounds if stage in r[kind]] for stage in STAGES
        ]
        more = [r[kind]["stepped"] - r["plain"]["stepped"] for r in rounds]
        above = f"{statistics.median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})"
        rows.append(
            [
                kind,
                *(f"{statistics.median(each):.2f}" if each else "" for each in found),
                above,
            ]
        )
    return markdown(
        [
            "kind",
            *(f"{stage}, s" for stage in STAGES),
            "first step, s above plain (range)",
        ],
        rows,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="after one to warm up (default: %(default)s)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="one round: only check that it runs"
    )
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.plain:
        plain()
        return 0
    about, numbers = (
        machine(ray=ray.__version__),
        range(1 if arguments.smoke else arguments.rounds + 1),
    )
    rounds = [
        {kind: measure(kind) for kind in random.Random(n).sample([*KINDS], len(KINDS))}
        for n in numbers
    ]
    print(f"{in_words(about)}\n\n{table(rounds if arguments.smoke else rounds[1:])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
