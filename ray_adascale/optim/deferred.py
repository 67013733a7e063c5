"""Steps that a fused optimizer takes, or skips, on the device, before the host has seen the numbers that decide it.

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

from .._torch import is_dtensor

__all__ = ["HostCopy", "LastStep", "skippable_step", "steps_on_device"]

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
class LastStep:
    """What became of the last step; where it was skipped, all but the payload is of the one before.

    Attributes:
        skipped: Whether it did nothing.
        lr_factor: What the LR was multiplied by.
        sigma2: σ² of its gradient samples, over all groups; NaN where it says nothing.
        mu2: μ², likewise.
        payload: What travelled with its statistics, summed over workers.
    """

    skipped: bool = False
    lr_factor: float = 1.0
    sigma2: float = math.nan
    mu2: float = math.nan
    payload: Sequence[float] = ()
