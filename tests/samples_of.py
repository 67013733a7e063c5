"""What tests of several rooms make or read alike: a workload, a recipe, the rows of a
trace.

The command line's tests name this file as ``path/to/file.py:function``, so it imports
nothing relative to itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import LocalBackend, Recipe, Workload
from ray_adascale._files import TRACE
from ray_adascale.batch import StepPlan
from ray_adascale.optim.schedule import BaseSchedule
from ray_adascale.optim.step_sums import StepResult
from ray_adascale.recipe import SHARE, NoiseProbe, probe_steps
from ray_adascale.run.boundary.backend import ReportPolicy
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.step import Step


class WaitingBackend(LocalBackend):
    """The run waits for each checkpoint. With ``checkpoint_every_s=1e-9`` a loop may
    end by ``break`` after any step.
    """

    report_policy = ReportPolicy(in_background=False)


class Merging(nn.Linear):
    """A LoRA layer: in eval mode its update is merged into its weight, and train
    mode takes it out again.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(2, sizes[0])),
            nn.Parameter(torch.zeros(sizes[1], 2)),
        )
        self.merged = False
        self.changes = 0

    def train(self, mode: bool = True) -> Merging:
        if self.merged == mode:
            self.weight.data.add_(
                self.b.data @ self.a.data, alpha=-1.0 if mode else 1.0
            )
            self.merged = not mode
            self.changes += 1
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return (
            super().forward(x)
            if self.merged
            else super().forward(x) + x @ self.a.T @ self.b.T
        )


def regression(config: dict[str, Any]) -> Workload:
    """A linear regression of 512 examples with noise of variance 4; its scheduler
    counts T steps, of 400 if not said.

    With momentum SGD; ``{"adamw": True}``: with AdamW.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 10, generator=generator)
    y = x @ torch.linspace(-1, 1, 10).unsqueeze(1) + 2 * torch.randn(
        512, 1, generator=generator
    )
    model = nn.Linear(10, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9
    )
    if config.get("adamw"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"error": (model(x) - y).square().mean().item()}

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, config.get("total_steps", 400)
        ),
        scheduler_unit="step",
        train_dataset=TensorDataset(x, y),
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="error",
        mode="min",
    )


def recipe(
    noise: list[tuple[float, float, float]], total_steps: int = 100, **changes: Any
) -> Recipe:
    """A recipe of a base batch of 8 without a scheduler, with this noise; see
    :func:`probes`.
    """
    fields: dict[str, Any] = {
        "hyperparameters": {},
        "base_batch_size": 8,
        "total_steps": total_steps,
        "base_steps_per_epoch": None,
        "scheduler_unit": None,
        "metric": "loss",
        "mode": "min",
        "score": 0.5,
        "lr_curve": [[0.1]],
        "noise": probes(noise),
        "seed": 0,
        "search": {},
        "workload": "",
        "versions": {},
        "created": "2026-11-21",
        "momentum": 0.0,
    }
    return Recipe(**fields | changes)


def schedule(
    total_steps: int, base_batch_size: int = 8, **changes: Any
) -> BaseSchedule:
    """The base run of a constant LR of 0.1, which counts no calls of a scheduler."""
    fields: dict[str, Any] = {
        "scheduler_unit": None,
        "base_steps_per_epoch": None,
        "lr_curve": [[0.1]],
    }
    return BaseSchedule(
        base_batch_size=base_batch_size, total_steps=total_steps, **fields | changes
    )


def probes(noise: list[tuple[float, float, float]]) -> list[NoiseProbe]:
    """Probes from (τ, σ², μ²)."""
    return [
        NoiseProbe(effective_steps=tau, sigma2=sigma2, mu2=mu2)
        for tau, sigma2, mu2 in noise
    ]


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A step of a run at S = 4 with r = 2."""
    return {
        "step": step,
        "attempt": 0,
        "position": 32 * step,
        "gain": 2.0,
        "scale": 4.0,
        "effective_steps": 2.0 * step,
        "progress": 2.0 * step,
        "lr": 0.1,
        "loss": 1 / step,
        "sigma2": 3.0,
        "mu2": 1.0,
        "noise_scale": 24.0,
        "efficiency": 0.5,
        "examples_per_s": 1000.0,
        "optimizer_steps": step,
        "world_size": 2,
    } | changes


def write_rows(run: Path, rows: list[dict[str, Any]], start: int = 0) -> Path:
    """A trace of these rows in a run's folder, which is made. Returns the folder."""
    (run / TRACE).mkdir(parents=True, exist_ok=True)
    (run / TRACE / f"{start:04d}.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in rows)
    )
    return run


def step_of(
    number: int = 1,
    *,
    scale: int = 1,
    row: dict[str, Any] | None = None,
    **metrics: Any,
) -> Step:
    """A step of gain 1 whose metrics are all 1, but for those given."""
    tau = float(number)
    own = {
        **dict.fromkeys(METRICS, 1.0),
        "effective_steps": tau,
        "optimizer_steps": number,
        **metrics,
    }
    return Step(
        number=number,
        plan=StepPlan(4, 4 * scale, 1, scale),
        total_steps=10,
        tau_before=tau - 1,
        result=StepResult(gain=1.0, effective_steps=tau),
        metrics=own,
        row={"step": number} if row is None else row,
    )


def measured_steps(
    total_steps: int, every: int | None = None, *, share: float = SHARE
) -> list[int]:
    """The steps of a base run that have a measurement of the noise: those with three
    batches after them, one at a time.
    """
    found, free = [], 0
    for step in sorted(probe_steps(total_steps, every, passes=3, share=share)):
        if step >= free and step + 3 < total_steps:
            found.append(step)
            free = step + 3
    return found
