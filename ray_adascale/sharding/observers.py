"""Squared norms under ShardedDataParallel: of each gradient sample, and of the owned shards of the reduced gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..measure.norms import GroupSums, take_norms
from ..measure.observers import GradientObserver, HookObserver, PassListener
from .gradient_bucket import GradientBucket
from .oss import OSS


class OwnedShards(Protocol):
    """This worker's shards of the reduced gradient of one optimizer. An observer holds it weakly."""

    optimizer: OSS

    def own_norms(self) -> list[tuple[int, Tensor]]:
        """Return (parameter group, norm) of this worker's shards, once they are reduced."""

    def own_gradients(self) -> Iterator[Tensor]:
        """Return the shards that the optimizer has not used or cleared yet."""


def _norms_of(shards: OwnedShards | None) -> list[tuple[int, Tensor]]:
    if shards is None:
        raise RuntimeError("The ShardedDataParallel of this optimizer is gone; keep the wrapped model.")
    return shards.own_norms()


class ShardHookObserver(HookObserver):
    """A hook on each parameter for the gradient samples, and the owned shards for the reduced gradient."""

    reduced_everywhere = False

    def __init__(self, shards: OwnedShards, listener: PassListener) -> None:
        self._shards_ref = weakref.ref(shards)
        super().__init__([group["params"] for group in shards.optimizer.param_groups], listener)

    def _watch(self) -> None:
        super()._watch()
        self._sums = GroupSums(len(self.groups), self.device)

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        shards = self._shards_ref()
        return iter(()) if shards is None else shards.own_gradients()

    @torch.no_grad()
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        unfrozen = any(p.requires_grad and p not in self.hooked for params in self.groups for p in params)
        self.complete = not unfrozen
        if unfrozen:
            self.hook_all()
        return self._sums(_norms_of(self._shards_ref()))


class BucketObserver(GradientObserver):
    """Norms from the flat buckets of a ShardedDataParallel: one call for a bucket, while it is in the cache.

    Each worker holds its shard of the reduced gradient, so ``reduced_sq_norms`` are shares that add up over workers.
    """

    reduced_everywhere = False

    def __init__(self, shards: OwnedShards, listener: PassListener) -> None:
        self._shards_ref = weakref.ref(shards)
        self._listener = weakref.ref(listener)
        buckets = shards.optimizer.buckets
        self._device = next((bucket.flat.device for bucket in buckets), torch.device("cpu"))
        self._groups = len(shards.optimizer.param_groups)
        self._sums = GroupSums(self._groups, self._device)
        self._norms: list[tuple[int, Tensor]] = []
        self._attached = True

    @property
    def listener(self) -> PassListener | None:
        """The listener, while it is alive and this observer is attached."""
        return self._listener() if self._attached else None

    def add_bucket(self, bucket: GradientBucket, flat: Tensor) -> None:
        """Take the norms of one bucket of a gradient sample."""
        norms = take_norms([flat[start:end] for _, start, end in bucket.segments])
        self._norms += [(g, norm) for (g, _, _), norm in zip(bucket.segments, norms, strict=True)]

    def local_sq_norms(self) -> Tensor:
        norms, self._norms = self._norms, []
        return self._sums(norms)

    @torch.no_grad()
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        return self._sums(_norms_of(self._shards_ref()))

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        shards = self._shards_ref()
        return iter(()) if shards is None else shards.own_gradients()

    def add_group(self, params: Sequence[Tensor]) -> None:
        self._groups += 1  # the group's buckets are found at the next forward pass
        self._sums = GroupSums(self._groups, self._device)

    def detach(self) -> None:
        self._attached = False
