"""One small task that every client trains, what is noted of each of its steps, and what
those are held against.

All in float64. A step's gradient samples are consecutive micro-batches of the data's
order: sample i of a step is that of pass i // workers on worker i % workers, as ``Run``
has it with ``shuffle=False``.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import TensorDataset

from ray_adascale import AdaScale, AdaScaleConfig, Run

from ..classifier import batches, make_model, sample_gradient, weights
from ..model.reference_run import ReferenceAdaScale

BATCH = 4
"""B0, and the examples of a pass on one worker: S = n."""
LR = 0.05


def make(total_steps: int) -> tuple[nn.Module, SGD, LRScheduler]:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
    return model, optimizer, CosineAnnealingLR(optimizer, T_max=total_steps)


def settings(total_steps: int, **more: Any) -> AdaScaleConfig:
    return AdaScaleConfig(
        base_batch_size=BATCH, total_steps=total_steps, scheduler_unit="step", **more
    )


def dataset(examples: int) -> TensorDataset:
    x, y = batches(1, examples)[0]
    return TensorDataset(x, y)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


@dataclass
class Notes:
    """What AdaScale did in each step, whoever called it."""

    weights: list[Tensor] = field(default_factory=list)  # before the step
    # of the schedule, which the step was taken with
    lrs: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)  # τ before it
    gains: list[float] = field(default_factory=list)
    end: Tensor = field(default_factory=lambda: torch.empty(0))
    tau: float = 0.0

    def of(self, optimizer: AdaScale, model: nn.Module) -> Notes:
        def before(*_: Any) -> None:
            self.weights.append(weights(model).clone())
            self.clocks.append(optimizer.effective_steps)

        def after(*_: Any) -> None:
            self.gains.append(optimizer.last_step.gain)
            self.end, self.tau = weights(model).clone(), optimizer.effective_steps

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        inner = optimizer.wrapped
        inner.register_step_pre_hook(
            lambda o, *_: self.lrs.append(float(o.param_groups[0]["lr"]))
        )
        return self


def by_run(total_steps: int, accumulation: int, examples: int) -> Notes:
    """The same with ``Run``. One rank's part."""
    model, optimizer, scheduler = make(total_steps)
    config = settings(
        total_steps,
        per_worker_batch_size=BATCH,
        accumulation=accumulation,
        shuffle=False,
        sharding="none",
    )
    run = Run(model, optimizer, scheduler, dataset(examples), config)
    notes = Notes().of(run.optimizer, model)
    for batch in run:
        run.backward(loss_of(run.model, batch))
        run.step()
    return notes


def check_against_reference(
    notes: Notes,
    *,
    total_steps: int,
    samples: int,
    passes: Sequence[int],
    workers: int,
    examples: int,
    gradient: Callable[[nn.Sequential, list[int]], list[np.ndarray]] | None = None,
    weigh: Callable[[list[list[int]]], list[float] | None] = lambda samples: None,
) -> None:
    """Gains, clock, learning rates and weights of each step against the literal
    reference and SGD with the momentum 0.9^√r, as the default rule has it.

    Args:
        notes: Of the client's steps.
        total_steps: T.
        samples: n of a whole step.
        passes: Of each step of an epoch.
        workers: How many.
        examples: In the data, an epoch.
        gradient: Of a model and the rows of a gradient sample; default: of the
            cross-entropy of ``dataset``.
        weigh: Weights of a step's samples, given their rows; None: all alike.
    """
    model = make_model()
    x, y = dataset(examples).tensors
    if gradient is None:

        def gradient(model: nn.Sequential, rows: list[int]) -> list[np.ndarray]:
            return sample_gradient(
                model, (x[rows], y[rows]), [{"params": list(model.parameters())}]
            )

    reference = ReferenceAdaScale(
        scale=samples,
        n=samples,
        single_gain=True,
        clip="averages",
        averaging="effective",
        window=0.05,
        total_steps=total_steps,
    )
    position, tau, velocity = 0, 0.0, np.zeros(notes.end.numel())
    for step, before in enumerate(notes.weights):
        n = passes[step % len(passes)] * workers
        torch.nn.utils.vector_to_parameters(before, model.parameters())
        rows = [
            [(position + i * BATCH + j) % examples for j in range(BATCH)]
            for i in range(n)
        ]
        position += n * BATCH
        reference.scale, reference.n = n, n
        expected = reference.step(
            [gradient(model, sample) for sample in rows], weights=weigh(rows)
        )
        assert notes.clocks[step] == pytest.approx(tau, rel=1e-9)
        assert notes.gains[step] == pytest.approx(expected.gain, rel=1e-6)
        curve = (
            LR
            * (1 + math.cos(math.pi * math.floor(notes.clocks[step]) / total_steps))
            / 2
        )
        # The optimizer was called with the schedule's rate times the gain.
        assert notes.lrs[step] / notes.gains[step] == pytest.approx(curve, rel=1e-12)
        m = 0.9 ** math.sqrt(notes.gains[step])
        fresh = (1 - m) / (1 - 0.9) * np.concatenate(expected.mean_gradient)
        velocity = m * velocity + fresh
        after = notes.weights[step + 1] if step + 1 < len(notes.weights) else notes.end
        np.testing.assert_allclose(
            after.numpy(),
            before.numpy() - notes.lrs[step] * velocity,
            rtol=1e-6,
            atol=1e-9,
        )
        tau = expected.effective_steps
    assert notes.tau == pytest.approx(tau, rel=1e-9)
    assert total_steps <= notes.tau < total_steps + samples
    assert 1 < np.mean(notes.gains) < samples


def check_losses(
    rows: list[dict[str, Any]], notes: Notes, passes: Sequence[int], examples: int
) -> None:
    """The loss of each row of a trace is the mean over rank 0's passes of the step,
    at even places of two workers' data.
    """
    model, first, (x, y) = (
        make(1)[0].requires_grad_(False),
        0,
        dataset(examples).tensors,
    )
    for step, (row, before) in enumerate(zip(rows, notes.weights, strict=True)):
        torch.nn.utils.vector_to_parameters(before, model.parameters())
        n = passes[step % len(passes)]
        places = [first + 2 * i * BATCH for i in range(n)]
        losses = [
            float(loss_of(model, (x[at : at + BATCH], y[at : at + BATCH])))
            for at in places
        ]
        first = (first + 2 * n * BATCH) % examples
        assert row["loss"] == pytest.approx(sum(losses) / n, rel=1e-12)


def assert_same_run(ours: Notes, theirs: Notes) -> None:
    """Two runs over the same examples, to the rounding of sums in another order."""
    assert len(ours.gains) == len(theirs.gains)
    torch.testing.assert_close(ours.end, theirs.end, rtol=1e-6, atol=1e-9)
    assert ours.gains == pytest.approx(theirs.gains, rel=1e-6)


@contextlib.contextmanager
def as_if_by_torchrun() -> Iterator[None]:
    """The environment that torchrun gives to its workers, for those of the pool."""
    workers = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
    }
    there = {
        **{k: str(v) for k, v in workers.items()},
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
    }
    before = dict(os.environ)
    os.environ.update(
        {
            **there,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29999",
            "OMP_NUM_THREADS": "1",
        }
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
