"""The guards of a run: objects that look at it for mistakes of the program around it,
and change nothing.

A run without its guards takes the same steps. So the loop calls them in one line at
each moment, and what they look for stands in their own files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...data.order import MicroBatch
from ..observe.step import Step


class Guard:
    """Base class of the guards. Each method is a moment of a step, in order; a guard
    has those that it looks at.
    """

    retired = False
    """Whether it has seen what it looks for, or would have seen it by now. It is
    then not called any more.
    """

    def begin(self, batch: MicroBatch) -> None:
        """A pass begins, before its forward pass."""

    def backward(self, batch: MicroBatch, loss: Tensor) -> None:
        """The backward pass of a micro-batch is about to run."""

    def step(self) -> None:
        """The optimizer is about to step. The host has the numbers of the step
        before.
        """

    def read(self, step: Step) -> None:
        """The host has the numbers of a step."""

    def ended(self) -> None:
        """A step has ended, with the evaluation, the report and the checkpoint that
        were due.
        """


class Guards:
    """All guards of a run. Its methods are those of :class:`Guard`, for the guards that
    have them, in order.

    Args:
        guards: The guards.
    """

    def __init__(self, guards: Iterable[Guard] = ()) -> None:
        self._guards = list(guards)
        self._sort()

    def _sort(self) -> None:
        self._guards = [guard for guard in self._guards if not guard.retired]
        self._at_begin = self._that_have("begin")
        self._at_backward = self._that_have("backward")
        self._at_step = self._that_have("step")
        self._at_read = self._that_have("read")
        self._at_end = self._that_have("ended")

    def _that_have(self, moment: str) -> list[Any]:
        default = getattr(Guard, moment)
        return [
            guard
            for guard in self._guards
            if getattr(type(guard), moment) is not default
        ]

    def begin(self, batch: MicroBatch) -> None:
        for guard in self._at_begin:
            guard.begin(batch)

    def backward(self, batch: MicroBatch, loss: Tensor) -> None:
        for guard in self._at_backward:
            guard.backward(batch, loss)

    def step(self) -> None:
        for guard in self._at_step:
            guard.step()

    def read(self, step: Step) -> None:
        for guard in self._at_read:
            guard.read(step)

    def ended(self) -> None:
        for guard in self._at_end:
            guard.ended()
        for guard in self._guards:
            if guard.retired:
                self._sort()
                return
