"""Optimizer steps that are scaled, and skipped, on the device, and what the host gets to know of them meanwhile.

A fused optimizer takes its LR as a tensor, and leaves everything as it is where ``found_inf`` is 1: the protocol that
``torch.amp.GradScaler`` uses. Numbers for the host (gains, averages and outcome, in one small tensor) go by a copy that nobody
waits for until they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .. import gain as gain_math
from .._torch import is_dtensor
from ..gain import Average

__all__ = ["HostCopy", "Known", "LastStep", "numbers_of", "skippable_step", "steps_on_device"]

# Exactly these: what a subclass does in step() is not known. Adagrad's kernel is left out for want of a GPU to try it on.
_FUSED: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)


class HostCopy:
    """Numbers on their way from the device to the host. To make one waits for nothing; to read it waits for it alone.

    Args:
        numbers: On any device; must stay as they are.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            # A copy into memory that is not pinned would wait for the whole stream.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[float]:
        """The numbers, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


def steps_on_device(kind: type[Optimizer], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether :func:`skippable_step` may be used, and LRs given as tensors; the same on all workers.

    Args:
        kind: The optimizer's class.
        groups: Its parameter groups, whole ones where the optimizer is sharded.
    """
    params = [p for group in groups for p in group["params"]]
    return (
        kind in _FUSED
        and all(group["fused"] for group in groups)
        # A first momentum buffer is undamped in torch, which `_fill_momentum` could not reproduce.
        and all(group.get("dampening", 0) == 0 for group in groups)
        # The kernels want LR and found_inf where the parameters are.
        and len({p.device for p in params}) == 1
        # DTensors don't mix with plain ones. One parameter of each class tells, in each step.
        and not any(is_dtensor(p) for p in {type(p): p for p in params}.values())
    )


def skippable_step(optimizer: Optimizer, skip: Tensor, step: Callable[[], Any]) -> None:
    """Call ``step``, in which ``optimizer`` takes a step, or changes nothing where ``skip`` is true.

    Args:
        optimizer: A fused one, see :func:`steps_on_device`.
        skip: Bool, 0-dim, on the parameters' device.
        step: Usually ``optimizer.step``.
    """
    _fill_momentum(optimizer)
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    try:
        step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def _fill_momentum(optimizer: Optimizer) -> None:
    """Make SGD's momentum buffers that are missing: zeros, after which the first step is torch's own.

    torch's fused SGD makes them itself in its first step, but without filling them: where the kernel then skips that step,
    the next one takes what happened to be in memory for momentum.
    """
    for group in optimizer.param_groups:
        if group.get("momentum", 0) != 0:
            for p in group["params"]:
                if p.requires_grad and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)


@dataclass(frozen=True)
class Known:
    """What some averages say at a scale.

    Attributes:
        gains: r of each group.
        gain: r of the whole.
        sigma2: Averaged σ² of each group, unclipped; NaN before the first sample.
        mu2: Averaged μ², likewise.
    """

    averages: Average
    scale: float
    gains: list[float]
    gain: float
    sigma2: list[float]
    mu2: list[float]

    @classmethod
    def from_numbers(cls, averages: Average, scale: float, numbers: list[float]) -> Known:
        """From what :func:`numbers_of` returned for these averages, now on the host."""
        count = averages.total.shape[1]
        gains, (gain, *values) = numbers[:count], numbers[count:]
        return cls(averages, scale, gains, gain, values[:count], values[count:])

    def of(self, averages: Average, scale: float) -> bool:
        """Whether it is of just these averages, at this scale."""
        return self.averages is averages and self.scale == scale

    def total_moments(self) -> tuple[float, float]:
        """Averaged (σ², μ²), each group's clipped to non-negative, summed; NaN before the first sample."""
        if all(math.isnan(x) for x in self.sigma2):
            return math.nan, math.nan
        return sum(0.0 if x < 0 else x for x in self.sigma2), sum(0.0 if x < 0 else x for x in self.mu2)


@dataclass(frozen=True)
class LastStep:
    """What became of the last step; where it was skipped, all but the rider is of the one before.

    Attributes:
        skipped: Whether it did nothing.
        lr_factor: What the LR was multiplied by.
        sigma2: σ² of its gradient samples, over all groups; NaN where it says nothing.
        mu2: μ², likewise.
        rider: What travelled with its statistics, summed over workers.
    """

    skipped: bool = False
    lr_factor: float = 1.0
    sigma2: float = math.nan
    mu2: float = math.nan
    rider: Sequence[float] = ()


def numbers_of(averages: Average, scale: float, variance_floor: float) -> Tensor:
    """r of each group, r of the whole, averaged σ² and μ² of each group; float64 ``[3 · groups + 1]``, on the device."""
    unknown = ~(averages.weight > 0)
    sigma2, mu2 = (averages.total / averages.weight.masked_fill(unknown, 1.0)).masked_fill(unknown, 0.0)
    each = gain_math.gain(sigma2, mu2, scale, variance_floor=variance_floor).masked_fill(unknown, 1.0)
    whole = each
    if len(each) > 1:
        whole = gain_math.gain(sigma2.sum(), mu2.sum(), scale, variance_floor=variance_floor)
        whole = whole.masked_fill(unknown.all(), 1.0).reshape(1)
    return torch.cat([each, whole, averages.value.reshape(-1)])
