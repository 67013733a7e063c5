"""What is looked at in each step: who runs the backward passes, the modes of the
modules, the learning rates, the losses.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..._warn import warn_on_first_worker
from ...data.order import MicroBatch
from ...optim.adascale import AdaScaleOptimizer
from ...optim.guards import FOREIGN_PASS
from ...optim.schedule import EffectiveSchedule
from ..observe.step import OF_FIRST, Step
from .first_steps import OWN_EXAMPLES
from .guard import Guard

_EQUAL_STEPS = 10


class OnlyRunsBackward(Guard):
    """Raises if a step begins with gradients, where nothing is measured, so that a hook
    on two parameters alone notices passes.

    Args:
        optimizer: The optimizer of the run.
    """

    def __init__(self, optimizer: AdaScaleOptimizer) -> None:
        self._current = optimizer.current

    def backward(self, batch: MicroBatch, loss: Tensor) -> None:
        """Look for gradients of other passes."""
        if batch.pass_index > 0 or self._current.observer is not None:
            return
        for p in self._current.params:
            if p.grad is not None:
                raise RuntimeError(FOREIGN_PASS)


class TrainMode(Guard):
    """Warns once if all modules of the model are in eval mode. A model with a part in
    train mode was set so on purpose.

    Args:
        module: The bare model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._steps = 0

    def backward(self, batch: MicroBatch, loss: Tensor) -> None:
        """Look at the modes."""
        self._steps += batch.pass_index == 0
        if (
            self._module.training
            or self.retired
            or any(part.training for part in self._module.modules())
        ):
            return
        self.retired = True
        warn_on_first_worker(
            f"All modules of the model are in eval mode in step {self._steps} of this "
            "start: dropout is off, and batch norm uses its running statistics. If an "
            "evaluation of the loop called model.eval(), call model.train() after it. "
            "Models from a hub are in eval mode at first: call model.train() before "
            "the loop. To train in eval mode on purpose, ignore this warning."
        )


class ScheduledRates(Guard):
    """Raises if the loop has stepped the scheduler, or has set a learning rate.

    Args:
        schedule: The schedule that drives the optimizer.
    """

    def __init__(self, schedule: EffectiveSchedule) -> None:
        self._schedule = schedule

    def step(self) -> None:
        """Look at the scheduler and at the learning rates."""
        self._schedule.check()


class EqualLosses(Guard):
    """Warns if the loss was the same on all workers in ten steps in a row, so that they
    compute with equal data.

    With one pass a step the gradient samples show it.

    Args:
        workers: Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._in_a_row = 0

    def read(self, step: Step) -> None:
        """Compare the losses of a step."""
        if step.plan.passes == 1:
            return
        shared = step.result.shared
        total = shared["loss"]
        difference = abs(total - self._workers * shared["loss" + OF_FIRST])
        if total == 0 or difference > 1e-12 * abs(total):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == _EQUAL_STEPS:
            self.retired = True
            warn_on_first_worker(
                f"The loss was the same on all workers in {_EQUAL_STEPS} steps in a "
                "row: they compute with equal data, so more workers don't help. "
                f"{OWN_EXAMPLES}"
            )
