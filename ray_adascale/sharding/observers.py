"""Squared norms under ShardedDataParallel: of each gradient sample, and of the owned shards of the reduced gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from .._torch import without_gradients
from ..measure.observers import GradientObserver, HookObserver, PassListener


class GradientReducer(Protocol):
    """Reduces each gradient to the worker that owns it (ShardedDataParallel); every worker gets those of its fragments only."""

    @property
    def consumed(self) -> bool:
        """Whether a step has used the gradients, and no backward pass came on this worker since."""

    def finish_reduction(self) -> None:
        """Reduce the gradients of this step's backward passes, if that has not happened."""

    def reopen(self) -> None:
        """Prepare for further backward passes, which add to the gradients that the optimizer has left."""

    def discard(self) -> None:
        """Forget gradients, reduced or not."""

    def consume(self) -> None:
        """Forget gradients that a step has used."""

    def observe(self, listener: PassListener) -> GradientObserver:
        """Return an observer of the optimizer's gradients."""

    def own_norms(self) -> list[tuple[int, Tensor]]:
        """Return (parameter group, norm) of this worker's shards, once they are reduced."""

    def own_gradients(self) -> Iterator[Tensor]:
        """Return the shards that the optimizer has not used or cleared yet."""


class ReducerListener(Protocol):
    """Object that depends on whether gradients are sharded. OSS holds it weakly."""

    def on_reducer_attached(self) -> None:
        """A ShardedDataParallel was made over the optimizer."""


class ShardObserver(HookObserver):
    """A hook on each parameter for the gradient samples. The reduced gradient's norms are those of the shards of all workers."""

    reduced_everywhere = False

    def __init__(self, reducer: GradientReducer, groups: Sequence[Sequence[Tensor]], listener: PassListener) -> None:
        self._reducer = weakref.ref(reducer)
        super().__init__(groups, listener)

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        reducer = self._reducer()
        return iter(()) if reducer is None else reducer.own_gradients()

    @without_gradients
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        reducer = self._reducer()
        if reducer is None:
            raise RuntimeError("The ShardedDataParallel of this optimizer is gone; keep the wrapped model.")
        self.complete = len(self.hooked) == len(self._group_of) or all(
            p in self.hooked for params in self.groups for p in params if p.requires_grad
        )
        if not self.complete:
            self.hook_all()
        return self._sums(reducer.own_norms())
