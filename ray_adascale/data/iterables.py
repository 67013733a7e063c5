"""Data that only comes in its own order: iterables of batches, and Ray Data shards. Resumed at the start of an epoch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from .order import count
from .source import BatchSource, MicroBatch, base_steps, check_state, labelled

__all__ = ["IterableSource", "RayDataBatches", "unshared"]


class IterableSource(BatchSource):
    """The user's own iterable of batches, restarted whenever it ends.

    Every worker goes through its own iterable, for ever, so workers with unequal numbers of batches stay in step. A
    sampler or dataset that has ``set_epoch`` (``DistributedSampler``) gets the number of the pass before each one.
    Batches of another size are skipped with one warning, since B must stay constant.

    A resumed run begins at the start of an epoch, with a warning: what was seen of it is seen again.

    Args:
        batches: Each ``iter()`` makes a pass over this worker's share.
        batch_size: Examples in each batch.
        world_size: Workers.
        accumulation: Passes per optimizer step.
        length: Examples per epoch over all workers; the epoch stays 0 if None.
        examples_of: Number of examples in a batch, for batches whose leading dimension does not tell.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        batch_size: int,
        world_size: int = 1,
        accumulation: int = 1,
        length: int | None = None,
        examples_of: Callable[[Any], int] | None = None,
    ) -> None:
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise ValueError(
                f"Invalid batches of type {type(batches).__name__}. Must be iterable, and start anew at each iter(): a"
                " DataLoader, an IterableDataset, a list of batches, or an object with __iter__."
            )
        self.batch_size = count("batch_size", batch_size, 1)
        self.world_size = count("world_size", world_size, 1)
        self.accumulation = count("accumulation", accumulation, 1)
        self.length = None if length is None else count("length", length, 1)
        self.global_batch_size = batch_size * world_size * accumulation
        self._position = 0
        self._batches = batches
        self._iterator: Generator[MicroBatch, None, None] | None = None
        self._examples_of = examples_of or _leading_dimension
        self._warned = False

    @property
    def position(self) -> int:
        return self._position

    @property
    def epoch(self) -> int:
        return 0 if self.length is None else self._position // self.length

    def __iter__(self) -> Iterator[MicroBatch]:
        self.close()
        sizes = [self.batch_size] * self.accumulation
        self._iterator = labelled(self._endless(self.epoch), sizes, self.global_batch_size)
        return self._iterator

    def commit(self) -> None:
        self._position += self.global_batch_size

    def base_steps_per_epoch(self, base_batch_size: int) -> float | None:
        return None if self.length is None else base_steps(self.length, base_batch_size, drop_last=False)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "iterable", "position": self.position, "length": self.length}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_state(state_dict, {"kind": "iterable", "length": self.length})
        position = state_dict["position"]
        if position > 0:
            warnings.warn(
                f"The run resumes after {position} examples, but an iterable cannot be resumed in mid-epoch: it"
                " restarts at its epoch's start, so some examples are seen again and others not. Only map-style"
                " datasets resume exactly.",
                UserWarning,
                stacklevel=2,
            )
        # Back to the epoch's start, so that the epoch goes on counting whole passes.
        self._position = position if self.length is None else position - position % self.length

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _endless(self, first_pass: int) -> Iterator[Any]:
        for number in itertools.count(first_pass):
            _set_epoch(self._batches, number)
            iterator = iter(self._batches)
            seen = usable = 0
            for batch in iterator:
                seen += 1
                if self._fits(batch):
                    usable += 1
                    yield batch
            if iterator is self._batches:
                raise ValueError(
                    f"The data ended after {seen} batches and cannot be restarted, since it is a one-shot iterator"
                    f" ({type(iterator).__name__}). Give an iterable that starts anew at each iter(), such as a"
                    " DataLoader, a list, or an object whose __iter__ is the generator function."
                )
            if usable == 0:
                raise ValueError(
                    f"A whole pass over the data gave no batch of {self.batch_size} examples ({seen} batches of other"
                    " sizes). Give this worker more data, or batches of that size."
                )

    def _fits(self, batch: Any) -> bool:
        examples = self._examples_of(batch)
        if examples is None:
            raise ValueError(
                f"Cannot tell how many examples a batch of type {type(batch).__name__} holds. Use tensors, arrays or"
                " sequences, also in nested tuples, lists or mappings, or give examples_of."
            )
        if examples != self.batch_size and not self._warned:
            self._warned = True
            warnings.warn(
                f"Skipping batches that do not have {self.batch_size} examples (the first has {examples}): the global"
                " batch size must stay constant. drop_last=True in the data loader avoids this warning.",
                UserWarning,
                stacklevel=2,
            )
        return examples == self.batch_size


class RayDataBatches:
    """A Ray Data shard (``ray.data.DataIterator``) as an iterable: each ``iter()`` is a pass over the shard.

    The shards that Ray Train hands out are equal in length, which matters here: a pass begins on all of them together.
    """

    def __init__(self, shard: Any, batch_size: int, collate_fn: Callable[..., Any] | None) -> None:
        self._shard = shard
        self._arguments: dict[str, Any] = {"batch_size": batch_size, "drop_last": True}
        if collate_fn is not None:
            self._arguments["collate_fn"] = collate_fn

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shard.iter_torch_batches(**self._arguments))


def _leading_dimension(batch: Any) -> int | None:
    """Examples in a batch by its first tensor, array or plain sequence, depth first; None where there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        return next((n for n in map(_leading_dimension, batch.values()) if n is not None), None)
    if isinstance(batch, list | tuple):
        inner = (n for n in map(_leading_dimension, batch) if n is not None)
        return next(inner, len(batch))
    return None


def unshared(loader: DataLoader[Any]) -> bool:
    """True where the loader goes through the whole of a map-style dataset, by torch's own samplers."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) in (SequentialSampler, RandomSampler)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
    )


def _set_epoch(batches: Any, epoch: int) -> None:
    """Tells a DistributedSampler (or whoever else has ``set_epoch``) which epoch's order to use."""
    for owner in (batches, *(getattr(batches, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
