"""A small run that changes its batch, its data, and what each of its steps took."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ray_adascale import AdaScaleConfig, Run
from ray_adascale.data.order import epoch_order

from .samples_of import WaitingBackend


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Examples that say which they are, with noise that a loader process draws."""

    def __init__(self, length: int = 90, *, noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(length, 6, generator=generator)
        self.y = (
            self.x[:, 0]
            + 0.5 * self.x[:, 1]
            + 0.7 * torch.randn(length, generator=generator)
            > 0
        ).long()
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = self.x[index]
        return x + 0.1 * torch.randn(6) if self.noisy else x, self.y[index], index


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def make_run(
    net: nn.Module,
    folder: str | None = None,
    *,
    fused: bool | None = None,
    **settings: Any,
) -> Run:
    """A run at the base batch size 4 and T = 200; ``settings`` are those of the
    configuration, and ``data`` and ``backend``.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 17, 0.9)
    data = settings.pop("data", None) or Numbered()
    backend = settings.pop("backend", None) or WaitingBackend(folder, device="cpu")
    defaults: dict[str, Any] = {
        # m^√r would need the gain of a fused step on the host
        "rule": "adascale" if fused else "auto",
        "base_batch_size": 4,
        "total_steps": 200,
        "scheduler_unit": "step",
        "per_worker_batch_size": 8,
    }
    return Run(
        net,
        optimizer,
        schedule,
        data,
        AdaScaleConfig(**(defaults | settings)),
        backend=backend,
    )


Step = tuple[float, int, int, list[int]]


def drive(run: Run, stop_after: int | None = None) -> list[Step]:
    """S, passes and position after each step, and the examples that this worker saw
    in it.
    """
    steps: list[Step] = []
    indices: list[int] = []
    for x, y, index in run:
        indices += index.tolist()
        scale, passes = run.scale, run.plan.passes
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step():
            steps.append((scale, passes, run.source.position, indices))
            indices = []
            if len(steps) == stop_after:
                break
    return steps


def flat(net: nn.Module) -> list[float]:
    weights = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()
    ]
    return torch.cat([p.detach().reshape(-1) for p in weights]).tolist()


def stream(length: int, count: int) -> list[int]:
    """The first examples of the data's order, by its definition."""
    epochs = [epoch_order(length, seed=0, epoch=e) for e in range(-(-count // length))]
    return torch.cat(epochs).tolist()[:count]


def assert_exactly_once(
    workers: list[list[Step]], *, base: int = 4, begin: int = 0
) -> None:
    """Each step takes the next S·B0 examples of the stream, over all workers, and no
    other.
    """
    position = begin
    for parts in zip(*workers, strict=True):
        scale, _, after, _ = parts[0]
        batch = round(scale * base)
        assert [part[:3] for part in parts] == [parts[0][:3]] * len(parts)
        assert after == position + batch
        taken = sorted(i for part in parts for i in part[3])
        assert taken == sorted(stream(90, after)[position:])
        position = after


def stopped_at(
    folder: str | None, stops: tuple[int, ...], **settings: Any
) -> tuple[list[float], list[Step], float]:
    """A run that is left at each of these optimizer steps and taken up from its
    checkpoint there.
    """
    done: list[Step] = []
    every = {"checkpoint_every_s": 1e-9} if stops else {}
    for stop in (*stops, None):
        net = network()
        seeded = not done
        if seeded:
            torch.manual_seed(7)
        run = make_run(net, folder, **every, **settings)
        if seeded:
            torch.manual_seed(100 + run.backend.rank)
        assert run.source.position == (done[-1][2] if done else 0)
        done += drive(run, None if stop is None else stop - len(done))
    return flat(run.module), done, run.effective_steps
