"""Training of one small model on a CPU or a GPU, for tests that compare the two. It
needs torch alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ray_adascale import (
    OSS,
    AdaScale,
    AdaScaleConfig,
    LocalBackend,
    Run,
    ShardedDataParallel,
)

TOTAL_STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        optimizer: Name of a class in ``torch.optim``.
        fused: Whether it steps in one kernel.
        settings: Settings of the run beside batch and schedule.
    """

    optimizer: str = "SGD"
    fused: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def low_precision(self) -> bool:
        """Whether forward passes run under autocast. The model is then float32, and
        else float64.
        """
        return self.settings.get("precision", "fp32") != "fp32"

    @property
    def tolerances(self) -> dict[str, float]:
        """Tolerances of τ and of weights between two devices.

        float64 sums in another order differ by 1e-15, which some tens of steps raise. A
        fused optimizer's LR is rounded to float32, so a gain that differs in its last
        bit may move it by 6e-8. Under autocast each product is rounded to 11 (fp16) or
        8 bits (bf16), and not always to the same side.
        """
        return {
            "fp32": {"rtol": 1e-6, "atol": 1e-7}
            if self.fused
            else {"rtol": 1e-9, "atol": 1e-10},
            "fp16": {"rtol": 0.01, "atol": 0.005},
            "bf16": {"rtol": 0.05, "atol": 0.02},
        }[self.settings.get("precision", "fp32")]


@dataclass(frozen=True)
class Outcome:
    """The end of a training run.

    Attributes:
        steps: Optimizer steps.
        tau: τ.
        weights: All weights. A list, since a tensor would go to another process as
            memory that ends with its sender.
        device: The device that the run was on.
    """

    steps: int
    tau: float
    weights: list[float]
    device: str


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, dtype=dtype),
        nn.LayerNorm(16, dtype=dtype),
        nn.Tanh(),
        nn.Linear(16, 3, dtype=dtype),
    )


def make_data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 8, generator=generator, dtype=dtype)
    noisy = x[:, :3] + 0.5 * torch.randn(256, 3, generator=generator, dtype=dtype)
    return TensorDataset(x, noisy.argmax(1))


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    rate: dict[str, float] = (
        {"lr": 0.05, "momentum": 0.9} if case.optimizer == "SGD" else {"lr": 0.01}
    )
    return getattr(torch.optim, case.optimizer)(
        model.parameters(), **rate, fused=case.fused or None
    )


def whole_weights(model: nn.Module) -> list[float]:
    """Return all weights. Collective where the model is sharded."""
    parts = [p.detach() for p in model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parts]
    return torch.cat([p.reshape(-1).cpu().double() for p in whole]).tolist()


def make_run(case: Case, device: str | None, folder: str | None = None) -> Run:
    """Return a run at S = 2 · workers, on 16 examples a pass."""
    dtype = torch.float32 if case.low_precision else torch.float64
    model = make_model(dtype)
    optimizer = make_optimizer(case, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL_STEPS)
    settings: dict[str, Any] = {
        "base_batch_size": 16,
        "per_worker_batch_size": 16,
        "accumulation": 2,
        "total_steps": TOTAL_STEPS,
        "scheduler_unit": "step",
        "report_every_s": 1e6,
        "checkpoint_every_s": 1e6,
        **case.settings,
    }
    backend = LocalBackend(folder, device=device)
    return Run(
        model,
        optimizer,
        scheduler,
        make_data(dtype),
        AdaScaleConfig(**settings),
        backend=backend,
    )


def train(
    case: Case,
    device: str | None,
    folder: str | None = None,
    stop_after: int | None = None,
) -> Outcome:
    """Train with ``Run`` to its end, or for a number of steps after which a
    checkpoint is saved if there is a folder.
    """
    run = make_run(case, device, folder)
    steps = run.state.iterations
    for x, y in run:
        assert x.device == run.backend.device
        run.backward(F.cross_entropy(run.model(x), y))
        steps += run.step()
        if steps == stop_after and run.at_boundary:
            if folder is not None:
                run.save_checkpoint()
            break
    return Outcome(
        steps, run.effective_steps, whole_weights(run.module), str(run.backend.device)
    )


def resumed(case: Case, device: str | None, folder: str) -> Outcome:
    """Train in two starts: the first stops after 7 steps."""
    train(case, device, folder, stop_after=7)
    return train(case, device, folder)


def agree(found: Outcome, expected: Outcome, case: Case) -> None:
    """Compare two runs of a case, whose tolerances hold."""
    tolerances = case.tolerances
    assert abs(found.tau - expected.tau) <= tolerances["rtol"] * expected.tau, (
        found.tau,
        expected.tau,
    )
    assert found.steps == expected.steps
    np.testing.assert_allclose(found.weights, expected.weights, **tolerances)


KINDS = ("ddp", "oss", "sharded", "fsdp2")


def train_wrapped(
    kind: str, device: str, *, fused: bool = False, steps: int = 12
) -> Outcome:
    """Train with AdaScale in a loop of its own, over one of ``KINDS``, with two
    passes a step. Collective.
    """
    case = Case(fused=fused)
    model = make_model(torch.float64).to(device)
    passes, wrapped, optimizer = 2, model, make_optimizer(case, model)
    inner: torch.optim.Optimizer = optimizer
    given: nn.Module | None = None
    ids = [torch.device(device)] if device.startswith("cuda") else None
    if kind == "fsdp2":
        from ray_adascale.sharding.kinds.fsdp2 import shard_model

        shard_model(model, optimizer, torch.device(device))
        given = model
    elif kind in ("oss", "sharded"):
        inner = OSS.wrap(optimizer)
    adascale = None
    if kind == "sharded":
        adascale = AdaScale(inner, scale=4.0, num_gradients_to_accumulate=passes)
        wrapped = ShardedDataParallel(model, adascale)
    elif kind != "fsdp2":
        wrapped = DistributedDataParallel(model, device_ids=ids)
    if adascale is None:
        adascale = AdaScale(
            inner, scale=4.0, num_gradients_to_accumulate=passes, model=given
        )
    x, y = make_data(torch.float64).tensors
    rank = torch.distributed.get_rank()
    for step in range(steps):
        for p in range(passes):
            start = (
                16
                * ((step * passes + p) * torch.distributed.get_world_size() + rank)
                % 256
            )
            batch, labels = (
                x[start : start + 16].to(device),
                y[start : start + 16].to(device),
            )
            last = p == passes - 1 or kind == "fsdp2"
            with nullcontext() if last else wrapped.no_sync():  # type: ignore[operator]
                (F.cross_entropy(wrapped(batch), labels) / passes).backward()
        adascale.step()
        adascale.zero_grad()
    return Outcome(
        adascale.steps, float(adascale.effective_steps), whole_weights(model), device
    )
