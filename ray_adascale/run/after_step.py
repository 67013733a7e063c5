"""The user's function that is called after each optimizer step."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from ..optim.adascale import AdaScaleOptimizer
from ..optim.step_sums import StepResult


class AfterStep:
    """Calls ``after_step(model)``, or ``after_step(model, gain=...)`` if the function
    has a parameter of that name.

    Args:
        function: The user's.
        module: The bare model.
    """

    def __init__(self, function: Callable[..., object], module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._gives_gain = _takes_gain(function)

    def __call__(self, optimizer: AdaScaleOptimizer, before: StepResult) -> None:
        """Call the function after a step.

        Args:
            optimizer: The optimizer that has taken it. The host waits for its numbers,
                if the function gets the gain.
            before: The step before.
        """
        if self._gives_gain:
            advance = optimizer.last_step.effective_steps - before.effective_steps
            self._function(self._module, gain=advance)
        else:
            self._function(self._module)


def _takes_gain(function: Callable[..., object]) -> bool:
    try:
        return "gain" in inspect.signature(function).parameters
    except ValueError:  # a built-in function without a signature
        return False
