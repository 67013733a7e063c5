"""The user's own optimizer in a run: nobody else steps it, or gives it groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ..._warn import warn_on_first_worker
from ...optim.adascale import AdaScaleOptimizer

LOOP = (
    "Loop over the run, not over a loader (for batch in run), and write "
    "run.backward(loss) in place of loss.backward()."
)


class UsersOptimizer:
    """Refuses what the program does with the user's own optimizer beside the run.

    Args:
        users: The user's own optimizer.
        optimizer: The optimizer of the run.

    Attributes:
        run_is_stepping: Whether the run steps the optimizer now.
    """

    def __init__(
        self,
        users: Optimizer,
        optimizer: AdaScaleOptimizer,
    ) -> None:
        self._users = users
        self.run_is_stepping = False
        self._refuse_groups()
        self._before_the_loop = optimizer.register_step_post_hook(
            _warn_of_steps_outside()
        )

    def _refuse_groups(self) -> None:
        self._users.add_param_group = _refuse_group  # type: ignore[method-assign]

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Return a context for a loop over the run."""
        self._before_the_loop.remove()
        steps = self._users.register_step_pre_hook(self._check_step)
        self._refuse_groups()
        try:
            yield
        finally:
            steps.remove()
            # which an inner loop has restored
            vars(self._users).pop("add_param_group", None)

    def _check_step(self, *_: Any) -> None:
        if not self.run_is_stepping:
            raise RuntimeError(
                "optimizer.step() was called in the loop beside run.step(): the "
                "weights would move twice, once without the gain. Remove "
                "optimizer.step() and optimizer.zero_grad(): run.step() does both, in "
                "a step's last pass."
            )


def _warn_of_steps_outside() -> Callable[..., None]:
    """Return a hook that warns if the user's optimizer steps before there is any
    loop over the run.
    """
    steps = itertools.count(1)

    def stepped(*_: object) -> None:
        if next(steps) == 5:
            warn_on_first_worker(
                "optimizer.step() has run 5 times, and no loop over the run has begun. "
                f"{LOOP}"
            )

    return stepped


def _refuse_group(param_group: dict[str, Any]) -> None:
    raise RuntimeError(
        "optimizer.add_param_group() was called on the optimizer of a run. A resume "
        "would not have the group. Give the optimizer all groups when it is built, and "
        "freeze what is to be trained later: part.requires_grad_(False)."
    )
