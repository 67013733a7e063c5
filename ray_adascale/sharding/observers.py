"""Squared norms under ShardedDataParallel: of each gradient sample, and of the owned shards of the reduced gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from .._torch import without_gradients
from ..measure.identity import LENGTH, project, total
from ..measure.norms import GroupSums, take_group_norms
from ..measure.observers import GradientObserver, HookObserver, PassListener
from .buckets import Bucket, Fragment
from .gradient_bucket import GradientBucket


class GradientReducer(Protocol):
    """Reduces each gradient to the worker that owns it (ShardedDataParallel); every worker gets those of its fragments only."""

    @property
    def consumed(self) -> bool:
        """Whether a step has used the gradients, and no backward pass came on this worker since."""

    def finish_reduction(self) -> None:
        """Reduce the gradients of this step's backward passes, if that has not happened."""

    def reopen(self) -> None:
        """Prepare for further backward passes, which add to the gradients that the optimizer did not clear."""

    def discard(self) -> None:
        """Forget gradients, reduced or not."""

    def consume(self) -> None:
        """Forget gradients that a step has used."""

    def observe(self, listener: PassListener, *, accumulating: bool) -> GradientObserver:
        """Return an observer of the optimizer's gradients; with ``accumulating``, a step has several passes."""

    def own_norms(self) -> list[tuple[int, Tensor]]:
        """Return (parameter group, norm) of this worker's shards, once they are reduced."""

    def own_fragments(self) -> Iterator[Fragment]:
        """Return the fragments whose gradients the optimizer has not used or cleared yet."""


class ReducerListener(Protocol):
    """Object that depends on whether gradients are sharded. OSS holds it weakly."""

    def renew(self) -> None:
        """A ShardedDataParallel was made over the optimizer."""


class _OwnedShards(GradientObserver):
    """The reduced gradient's part of an observer: the shards that this worker owns. Those of all workers add up."""

    holds_whole_gradient = False
    reducer: weakref.ref[GradientReducer]

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        reducer = self.reducer()
        return (
            iter(())
            if reducer is None
            else (f.tensor.grad for f in reducer.own_fragments() if f.tensor.grad is not None)
        )

    @without_gradients
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        reducer = self.reducer()
        if reducer is None:
            raise RuntimeError("The ShardedDataParallel of this optimizer is gone; keep the wrapped model.")
        return self._sums(reducer.own_norms())


class ShardHookObserver(_OwnedShards, HookObserver):
    """A hook on each parameter for the gradient samples, and the owned shards for the reduced gradient."""

    def __init__(self, reducer: GradientReducer, groups: Sequence[Sequence[Tensor]], listener: PassListener) -> None:
        self.reducer = weakref.ref(reducer)
        self._contiguous: dict[Tensor, bool] = {}  # as buckets were laid out
        super().__init__(groups, listener)

    def has_product(self, param: Tensor) -> bool:
        return self._contiguous.setdefault(param, param.is_contiguous())  # a part is a range of elements

    def reduced_product(self) -> Tensor:
        reducer = cast(GradientReducer, self.reducer())
        parts = [f for f in reducer.own_fragments() if f.start < LENGTH and self.has_product(f.param)]
        return total([project(cast(Tensor, f.tensor.grad), f.start) for f in parts], self.device)


class BucketObserver(_OwnedShards):
    """Norms from the flat buckets of a ShardedDataParallel: one call for a bucket, while it is in the cache."""

    def __init__(
        self, reducer: GradientReducer, groups: int, buckets: Sequence[Bucket], listener: PassListener
    ) -> None:
        super().__init__(listener)
        self.reducer = weakref.ref(reducer)
        self._sums = GroupSums(groups, next((bucket.flat.device for bucket in buckets), torch.device("cpu")))
        self.norms: list[tuple[int, Tensor]] = []
        """(parameter group, norm) of the gradient sample so far."""

    def local_sq_norms(self) -> Tensor:
        norms, self.norms = self.norms, []
        return self._sums(norms)

    def add_bucket(self, bucket: GradientBucket, flat: Tensor) -> None:
        """Take the norms of one bucket of a gradient sample."""
        if self.measures:
            self.norms += take_group_norms([(g, flat[start:end]) for g, start, end in bucket.layout.segments])

    def detach(self) -> None:
        self.listener = lambda: None
