"""What is said when a run goes on from a checkpoint: what was changed since, and where the curves differ."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.optim.schedule import BaseSchedule
from ray_adascale.run.boundary.train_state import changes_since, saved_schedule


def schedule(**changes: Any) -> BaseSchedule:
    fields: dict[str, Any] = {
        "base_batch_size": 4,
        "total_steps": 40,
        "lr_curve": [[0.1] * 40],
        "scheduler_unit": "step",
        "base_steps_per_epoch": 10.0,
    }
    return BaseSchedule(**(fields | changes))


def test_a_checkpoint_says_what_its_schedule_was() -> None:
    state = {"plan": {"base_batch_size": 4}, "total_steps": 40, "scheduler_unit": "step", "base_steps_per_epoch": 10.0}
    rows = torch.tensor([[0.1] * 40], dtype=torch.float64)
    found = saved_schedule(state, {"lr_curve": rows})  # as of an older one, with a row for each group
    assert replace(found, lr_curve=[*found.lr_curve]) == schedule()
    groups = torch.tensor([[0, 1.0], [0, 0.5]], dtype=torch.float64)
    assert [*saved_schedule(state, {"lr_curve": rows, "lr_groups": groups}).lr_curve] == [[0.1] * 40, [0.05] * 40]


def test_every_change_is_named_with_both_values() -> None:
    assert changes_since(schedule(), schedule()) == []
    found = changes_since(schedule(), schedule(base_batch_size=8, total_steps=20, lr_curve=[[0.2] * 20]))
    assert found[:2] == ["base_batch_size is 8, was 4", "total_steps is 20, was 40"]
    assert "at scheduler call 0, where 0.1 is expected and the actual value is 0.2" in found[2]


def test_the_group_that_differs_is_named() -> None:
    found = changes_since(schedule(lr_curve=[[0.1] * 40, [0.3] * 40]), schedule(lr_curve=[[0.1] * 40, [0.4] * 40]))
    assert "first in parameter group 1 at scheduler call 0, where 0.3 is expected" in found[0]
    found = changes_since(schedule(), schedule(lr_curve=[[0.1] * 40, [0.4] * 40]))
    assert "parameter groups" in found[0]


def test_many_groups_share_a_curve_in_a_checkpoint_and_at_the_start(tmp_path: Path) -> None:
    """A hundred groups with learning rates of their own, as of layer-wise decay: 77 MB and 46 s before."""
    total = 100_000
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(100)])

    def run() -> Run:
        optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9**i} for i, p in enumerate(model)], lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        config = AdaScaleConfig(base_batch_size=4, total_steps=total, scheduler_unit="step")
        return Run(model, optimizer, scheduler, TensorDataset(torch.ones(8)), config, backend=LocalBackend(tmp_path))

    began = time.process_time()
    built = run()
    assert time.process_time() - began < 5  # 1.5 s on an idle core
    folder = built.save_checkpoint()
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2**20  # 0.8 MB of them are the curve
    (row,) = built.base_schedule.lr_curve.rows  # type: ignore[attr-defined]
    assert row.tolist() == pytest.approx([0.05 * (1 + math.cos(math.pi * t / total)) for t in range(total)], abs=1e-10)
    run()  # resumes, so the curves agree
