"""The workload of a run with faults: it keeps a record of what each worker does, and
has switches for slow storage and clocks.

The folder of the record, and of the switches, is ``config["record"]``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ray_adascale import Workload
from ray_adascale.checkpoint import dcp

LENGTH = 101
T = 600
PAUSE_S = 0.02
SLOW_S = 1.0
"""Seconds of a pass beyond the step of the file "gate": the run goes on, and does not
come far until the fault of that step is made.
"""
_CLOCK_S = 3600.0


class Numbered(Dataset[Any]):
    """Examples that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(LENGTH, 12, generator=generator)
        self.y = (
            self.x[:, 0] + 0.5 * torch.randn(LENGTH, generator=generator) > 0
        ).long()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Count:
    """Counts the steps of the run over all starts, as part of its checkpoints."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, model: nn.Module) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def workload(config: dict[str, Any]) -> Workload:
    """Return a small network with dropout and batch norm, so that random numbers and
    buffers must survive as well.
    """
    import ray.train

    record = Path(config["record"])
    context = ray.train.get_context()
    rank = context.get_world_rank()
    log = (record / f"{time.monotonic():017.6f}-{rank}-{os.getpid()}.jsonl").open(
        "w", buffering=1
    )
    log.write(json.dumps({"rank": rank, "pid": os.getpid()}) + "\n")
    _switches(record)
    count = Count()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y, index = batch
        log.write(json.dumps([count.steps + 1, index.tolist()]) + "\n")
        if not (record / "hurry").exists():
            time.sleep(pause(record, count.steps))
        return F.cross_entropy(model(x), y)

    model = nn.Sequential(
        nn.Linear(12, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(24, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T),
        scheduler_unit="step",
        train_dataset=Numbered(),
        loss_fn=loss_fn,
        extra_state={"count": count},
        after_step=count.step,
    )


def pause(record: Path, steps: int) -> float:
    """Return the seconds of a pass after so many steps."""
    try:
        gate = int((record / "gate").read_text())
    except (FileNotFoundError, ValueError):  # none, or it is being written
        return PAUSE_S
    return SLOW_S if steps >= gate else PAUSE_S


def _switches(record: Path) -> None:
    """Let the file "slow" make each write to a checkpoint slow, and the file "clock"
    set this process's clock back.
    """
    write, now = dcp._HashingStream.write, time.time

    def slow(self: Any, data: Any) -> int:
        if (record / "slow").exists():
            time.sleep(0.3)
        return write(self, data)

    dcp._HashingStream.write = slow  # type: ignore[method-assign]
    time.time = lambda: now() - _CLOCK_S if (record / "clock").exists() else now()
