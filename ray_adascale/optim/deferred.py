"""Steps that a fused optimizer takes, or skips, on the device, before the host has the
numbers that decide it.

A fused optimizer takes its LR as a tensor, and changes nothing if ``found_inf`` is 1:
the protocol that ``torch.amp.GradScaler`` uses. The numbers for the host (gains,
averages and outcome, in one small tensor) are copied asynchronously; the host waits for
the copy only when it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .step_sums import Numbers, Packed

# These classes only, since a subclass may override step(). Adagrad's kernel was never
# tried on a GPU.
_FUSED: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)


def read(numbers: Numbers) -> dict[str, list[float]]:
    """Return numbers that are on the host."""
    return {name: number.reshape(-1).tolist() for name, number in numbers.items()}


class HostCopy:
    """Numbers on their way from the device to the host. Making one waits for nothing;
    reading it waits for this copy alone.

    Args:
        numbers: On any device. They must not be changed.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._event: torch.cuda.Event | None = None
        first = next(iter(numbers.values()))
        if first.is_cuda:
            if len(numbers) > 1:
                packed = Packed.of(numbers)
            else:
                packed = Packed(first.view(-1), dict.fromkeys(numbers, first.numel()))
            # A copy into memory that is not pinned would wait for the whole stream.
            copy = torch.empty(
                packed.tensor.shape,
                dtype=packed.tensor.dtype,
                device="cpu",
                pin_memory=True,
            )
            copy.copy_(packed.tensor, non_blocking=True)
            self._numbers = packed.apart(copy)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.tensor.device))

    def read(self) -> dict[str, list[float]]:
        """Wait until the numbers have arrived, and return them by name."""
        if self._event is not None:
            self._event.synchronize()
        return read(self._numbers)


def steps_on_device(kind: type[Optimizer], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether :func:`skippable_step` may be used, with tensors as LRs; equal on all
    workers.

    Args:
        kind: The optimizer's class.
        groups: The optimizer's parameter groups; the full ones if it is sharded.
    """
    if kind not in _FUSED or not all(group["fused"] for group in groups):
        return False
    params = [p for group in groups for p in group["params"]]
    return (
        # A first momentum buffer is undamped in torch, which `fill_momentum` could not
        # reproduce.
        all(group.get("dampening", 0) == 0 for group in groups)
        # The kernels want LR and found_inf where the parameters are.
        and len({p.device for p in params}) == 1
    )


def skippable_step(optimizer: Optimizer, skip: Tensor, step: Callable[[], Any]) -> None:
    """Call ``step``, in which ``optimizer`` takes a step, or changes nothing if
    ``skip`` is 1.

    Args:
        optimizer: A fused one, see :func:`steps_on_device`.
        skip: 1 or 0: float32, 0-dim, on the parameters' device.
        step: Usually ``optimizer.step``.
    """
    fill_momentum(optimizer)
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def fill_momentum(optimizer: Optimizer) -> None:
    """Make SGD's missing momentum buffers, as zeros, after which the first step is
    torch's own.

    torch's fused SGD makes them in its first step without filling them. If the kernel
    then skips that step, the next step takes uninitialized memory for momentum.
    """
    momenta = [g["momentum"] for g in optimizer.param_groups if "momentum" in g]
    if not any(momenta):
        return
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    filled = [
        state
        for state in optimizer.state.values()
        if "momentum_buffer" in state and state["momentum_buffer"] is not None
    ]
    # Most steps end here, without a look-up of each parameter.
    if len(filled) == len(optimizer.state) == count:
        return
    for group in optimizer.param_groups:
        if group.get("momentum", 0) != 0:
            for p in group["params"]:
                # zero2's shard of a parameter that was frozen at first has a gradient,
                # and requires none
                stepped = p.requires_grad or p.grad is not None
                if stepped and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(
                        p, requires_grad=False
                    )
