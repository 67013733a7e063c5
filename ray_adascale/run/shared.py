"""What the workers of a run tell each other in a step's all-reduce: losses, boundary flags, and what must be equal."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ..optim.adascale import AdaScale
from ..optim.step_sums import constant
from .boundary.replicas import Replicas
from .boundary.stage import BoundaryFlags
from .observe.step import Step

EXCHANGE_EVERY = 16
"""Most steps between two exchanges, where steps that are not measured need no all-reduce."""


class Shared:
    """Shares a step's numbers if it has an all-reduce in any case, and else every :data:`EXCHANGE_EVERY` steps.

    Args:
        optimizer: The optimizer of the run.
        replicas: Compares the workers.
        workers: Number of workers.

    Attributes:
        mean_loss: Mean loss of all workers over the steps between the last two exchanges; NaN before the first.
    """

    def __init__(self, optimizer: AdaScale, replicas: Replicas, workers: int) -> None:
        self._optimizer, self._replicas, self._workers = optimizer, replicas, workers
        self._loss: Tensor | None = None  # of this worker, since the last exchange
        self._steps = 0
        self.mean_loss = math.nan

    def send(self, loss: Tensor, flags: Callable[[], int]) -> None:
        """Send the losses since the last exchange, the flags and what is compared, if the step exchanges numbers.

        Args:
            loss: This worker's part of the step's mean loss.
            flags: Returns this worker's boundary flags.
        """
        measurement = self._optimizer.measurement
        if self._workers == 1:
            measurement.share(loss=loss)
            return
        self._loss, self._steps = loss if self._loss is None else self._loss + loss, self._steps + 1
        if measurement.exchanges or self._optimizer.passes.plans.ended % EXCHANGE_EVERY == 0:
            loss, self._loss = self._loss, None
            # On the device: a copy from the host would wait for it.
            own = constant(float(flags()), loss.device)[0]
            measurement.share(flags=own, **self._replicas.numbers(loss))

    def step_taken(self) -> int:
        """Count what is to be sent of a step that was taken. Return the number of steps whose losses it has exchanged."""
        self._replicas.count()
        steps, self._steps = self._steps, 0 if self._loss is None else self._steps
        return steps

    def read(self, taken: Step) -> int:
        """Use the numbers that a step has exchanged. Return the flags of all workers."""
        shared = taken.result.shared
        if "loss" in shared:
            self.mean_loss = shared["loss"] / max(taken.losses, 1)
        if "flags" not in shared:
            return taken.flags
        self._replicas.read(taken.plan.passes, shared)
        return BoundaryFlags.from_sum(shared["flags"])
