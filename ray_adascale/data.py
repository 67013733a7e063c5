"""Data in an order that survives resizing: positions are counted in examples, never in steps, batches or workers.

The permutations of consecutive epochs are concatenated to one endless *stream* of examples, a function of (seed, epoch)
alone. Every optimizer step takes the next B examples of it, cut into n = workers × accumulation passes micro-batches.
So a run can stop at any step boundary and go on with another B, another number of workers or another accumulation: over
the committed steps no example is repeated or left out within an epoch.

The loop reads micro-batches from a ``BatchSource``. ``MapSource`` keeps the promise above; ``IterableSource``, for data
that only comes in its own order, begins its pass anew after a restart. ``make_source`` chooses.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import numbers
import random
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

__all__ = [
    "BatchSource",
    "IterableSource",
    "MapSource",
    "MicroBatch",
    "StepSampler",
    "epoch_order",
    "make_source",
    "split_evenly",
]


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """The order of examples in one epoch, a function of its arguments alone.

    Args:
        length: Examples in the dataset.
        seed: The run's seed.
        epoch: Counted from 0.
        shuffle: False gives 0, 1, ..., length − 1.

    Returns:
        int64 of shape ``(length,)``, a permutation.
    """
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(_stable_seed("order", seed, epoch)))


def split_evenly(total: int, parts: int) -> list[int]:
    """``parts`` sizes that sum to ``total`` and differ by at most 1, the larger ones first."""
    _count("total", total, 0)
    _count("parts", parts, 1)
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


class StepSampler(Sampler[list[int]]):
    """A batch sampler that yields one worker's micro-batches without end: step by step, within a step pass by pass.

    Step by step the stream is cut into B examples, across the borders of epochs, and these into n contiguous parts
    whose sizes differ by at most 1. Part ``pass · world_size + rank`` goes to that rank and pass.

    Args:
        length: Examples in the dataset.
        global_batch_size: B, examples per optimizer step. May exceed ``length`` unless ``drop_last``.
        rank: This worker, from 0.
        world_size: Workers.
        accumulation: Passes per optimizer step.
        seed: Of the order.
        shuffle: False keeps the dataset's order in every epoch.
        drop_last: True: where fewer than B examples of an epoch remain, they are left out (and count as consumed).
        position: Examples of the stream consumed so far, over all workers. May be set between iterations; a running
            iterator is not affected.

    Raises:
        ValueError: If an argument is out of range, with what to change.
    """

    def __init__(
        self,
        *,
        length: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        position: int = 0,
    ) -> None:
        self.length = _count("length", length, 0)
        if length == 0:
            raise ValueError("Invalid length=0: empty dataset. Give at least one example.")
        self.global_batch_size = _count("global_batch_size", global_batch_size, 1)
        self.world_size = _count("world_size", world_size, 1)
        self.accumulation = _count("accumulation", accumulation, 1)
        self.rank = _count("rank", rank, 0)
        if rank >= world_size:
            raise ValueError(f"Invalid {rank=} with {world_size=}. Ranks count from 0.")
        count = world_size * accumulation
        if global_batch_size < count:
            raise ValueError(
                f"Invalid {global_batch_size=}: {world_size=} times {accumulation=} makes {count} micro-batches a step,"
                " and each needs an example. Use a larger batch, fewer workers or fewer accumulation passes."
            )
        if drop_last and global_batch_size > length:
            raise ValueError(
                f"Invalid {global_batch_size=} with drop_last=True: an epoch has {length} examples, so every batch"
                " would be dropped. Use drop_last=False, which runs on into the next epoch, or a smaller batch."
            )
        self.seed = _count("seed", seed, None)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.position = _count("position", position, 0)
        self.sample_sizes: list[int] = split_evenly(self.global_batch_size, count)
        """Examples in each of the step's n gradient samples, over all workers."""
        self.micro_batch_sizes: list[int] = self.sample_sizes[self.rank :: self.world_size]
        """Examples in this worker's micro-batches, pass by pass."""
        starts = [0, *itertools.accumulate(self.sample_sizes)]
        self._offsets = starts[self.rank : count : self.world_size]
        self._order: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    def next_position(self, position: int) -> int:
        """The position after one step that begins at ``position``."""
        return self._step_start(self._step_start(position) + self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # Not itself a generator: the position counts from now, not from the first next().
        return (indices for _, indices in self.micro_batches(self.position))

    def micro_batches(self, position: int) -> Iterator[tuple[int, list[int]]]:
        """Endless pairs (stream position of the first example, indices) from ``position`` on."""
        while True:
            position = self._step_start(position)
            for offset, size in zip(self._offsets, self.micro_batch_sizes, strict=True):
                yield position + offset, self._indices(position + offset, size)
            position = self.next_position(position)

    def _step_start(self, position: int) -> int:
        """Where the next step really begins: with ``drop_last``, beyond an epoch's rest that is smaller than B."""
        rest = self.length - position % self.length
        return position + rest if self.drop_last and rest < self.global_batch_size else position

    def _indices(self, start: int, size: int) -> list[int]:
        indices: list[int] = []
        while size > 0:
            epoch, offset = divmod(start, self.length)
            if self._order[0] != epoch:
                # One is enough: micro-batches are looked up in stream order, and another worker's not at all.
                self._order = epoch, epoch_order(self.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            taken = self._order[1][offset : offset + size]
            indices += taken.tolist()
            start, size = start + len(taken), size - len(taken)
        return indices


@dataclass(frozen=True)
class MicroBatch:
    """What one worker computes one gradient sample from.

    Attributes:
        batch: Whatever the dataset and ``collate_fn`` make of the examples.
        examples: ``m_i``.
        weight: ``w_i = m_i / B``; sums to 1 over the workers and passes of a step.
        pass_index: Accumulation pass within the step, from 0.
        is_last: True on the step's last pass, where the optimizer steps.
    """

    batch: Any
    examples: int
    weight: float
    pass_index: int
    is_last: bool


class BatchSource(abc.ABC):
    """Micro-batches without end, and a position that moves only when a step is committed.

    Attributes:
        global_batch_size: B, examples per optimizer step.
    """

    global_batch_size: int

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """Examples consumed by committed steps, over all workers."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Epochs completed by committed steps: the same on every worker."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[MicroBatch]:
        """Endless micro-batches from ``position`` on. One iterator at a time: another ends the one before."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Advances ``position`` by one step. Called once after each optimizer step; prefetching never moves it."""

    @abc.abstractmethod
    def base_steps_per_epoch(self, base_batch_size: int) -> float | None:
        """Optimizer steps per epoch of a run at batch size B0; need not be whole. None where the length is unknown."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position and what the order depends on, ready for JSON; the same on every worker."""

    @abc.abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved position, for the next ``iter()``. The state may be that of another B or number of workers.

        Raises:
            ValueError: If a field on which the order depends differs, by its name.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the iterator and shuts its loader processes down. The source can be iterated again."""


class MapSource(BatchSource):
    """A map-style dataset (``__getitem__`` and ``__len__``), exactly resumable at any number of workers.

    With loader workers, torch's, Python's and NumPy's global generators are seeded before each micro-batch with a
    function of (seed, stream position), so random augmentation depends neither on which process fetches nor on
    restarts; across a change of the micro-batches' sizes it differs. Without loader workers examples are fetched in the
    training process, whose generators are left alone: they belong to the user and to the checkpoint.

    Args:
        dataset: ``__getitems__`` is used where it has one.
        global_batch_size: B, examples per optimizer step.
        rank, world_size, accumulation, seed, shuffle, drop_last: See ``StepSampler``.
        collate_fn: Makes a batch of a list of examples; torch's default if None.
        num_workers: Loader processes; they live as long as the iterator, over all epochs.
        pin_memory: Copies batches to page-locked memory, for a faster way to a GPU.
        prefetch_factor: Micro-batches that each loader process loads in advance; torch's default if None.
        worker_init_fn: Called with the worker's id in each loader process as it starts.
        multiprocessing_context: How loader processes start ("fork", "spawn", "forkserver"); torch's default if None.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        _count("num_workers", num_workers, 0)
        self.sampler = StepSampler(
            length=len(dataset),
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self.global_batch_size = self.sampler.global_batch_size
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset) if num_workers else dataset,
            batch_sampler=_SeededRequests(self.sampler) if num_workers else self.sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=_own_generator(seed),
        )
        self._iterator: Generator[MicroBatch, None, None] | None = None

    @property
    def position(self) -> int:
        return self.sampler.position

    @property
    def epoch(self) -> int:
        return self.sampler.position // self.sampler.length

    def __iter__(self) -> Iterator[MicroBatch]:
        self.close()
        self._iterator = _labelled(iter(self._loader), self.sampler.micro_batch_sizes, self.global_batch_size)
        return self._iterator

    def commit(self) -> None:
        self.sampler.position = self.sampler.next_position(self.sampler.position)

    def base_steps_per_epoch(self, base_batch_size: int) -> float:
        return _base_steps(self.sampler.length, base_batch_size, drop_last=self.sampler.drop_last)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "map", "position": self.position, **self._order_fields()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        _check_state(state_dict, {"kind": "map", **self._order_fields()})
        self.sampler.position = state_dict["position"]

    def close(self) -> None:
        # A closed generator lets go of the loader's iterator, which stops its processes as it goes.
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _order_fields(self) -> dict[str, Any]:
        s = self.sampler
        return {"seed": s.seed, "length": s.length, "shuffle": s.shuffle, "drop_last": s.drop_last}


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
        self.batch_size = _count("batch_size", batch_size, 1)
        self.world_size = _count("world_size", world_size, 1)
        self.accumulation = _count("accumulation", accumulation, 1)
        self.length = None if length is None else _count("length", length, 1)
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
        self._iterator = _labelled(self._endless(self.epoch), sizes, self.global_batch_size)
        return self._iterator

    def commit(self) -> None:
        self._position += self.global_batch_size

    def base_steps_per_epoch(self, base_batch_size: int) -> float | None:
        return None if self.length is None else _base_steps(self.length, base_batch_size, drop_last=False)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "iterable", "position": self.position, "length": self.length}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        _check_state(state_dict, {"kind": "iterable", "length": self.length})
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


def make_source(
    dataset: Any,
    *,
    global_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[..., Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    length: int | None = None,
    examples_of: Callable[[Any], int] | None = None,
) -> BatchSource:
    """The source for what a user calls a dataset.

    ===============================================  ===========================================================
    has ``iter_torch_batches`` (a Ray Data shard)    passes over this worker's shard
    has ``__getitem__`` and ``__len__``              ``MapSource``; so a list is a list of *examples*
    bare ``IterableDataset``                         passes over it, batched by a ``DataLoader``
    any other iterable, e.g. a ``DataLoader``        passes over its *batches* of B / (workers × passes) examples
    ===============================================  ===========================================================

    Args:
        dataset: As above. All but a map-style dataset must be this worker's own share.
        global_batch_size, rank, world_size, accumulation, seed, shuffle, drop_last: See ``StepSampler``. Seed, shuffle
            and drop_last matter to map-style datasets alone.
        collate_fn: Makes a batch of a list of examples; for a Ray Data shard as in ``iter_torch_batches``.
        num_workers: Loader processes, for datasets that are batched here.
        pin_memory: The same.
        length: Examples per epoch over all workers, for all but map-style datasets.
        examples_of: See ``IterableSource``.

    Raises:
        ValueError: For an argument out of range, or one that this kind of dataset cannot follow.
    """
    ray_data = hasattr(dataset, "iter_torch_batches")
    loader = isinstance(dataset, DataLoader)
    bare_iterable = isinstance(dataset, IterableDataset)
    if not (ray_data or loader or bare_iterable) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if length is not None and length != len(dataset):
            raise ValueError(f"Invalid {length=}: the dataset has {len(dataset)} examples. Leave length out.")
        return MapSource(
            dataset,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
        )

    count = _count("world_size", world_size, 1) * _count("accumulation", accumulation, 1)
    batch_size, rest = divmod(_count("global_batch_size", global_batch_size, 1), count)
    if rest or batch_size == 0:
        raise ValueError(
            f"Invalid {global_batch_size=}: batches from an iterable are all of one size, so it must be a multiple of"
            f" {count} ({world_size=} times {accumulation=})."
        )
    if num_workers and not bare_iterable:
        raise ValueError(
            f"Invalid {num_workers=}: a {type(dataset).__name__} loads its batches itself. Leave num_workers out."
        )

    batches: Iterable[Any] = dataset
    if ray_data:
        batches = _RayDataBatches(dataset, batch_size, collate_fn)
        examples_of = examples_of or (lambda _: batch_size)  # drop_last=True, whatever collate_fn makes of it
    elif bare_iterable:
        batches = DataLoader(
            dataset,
            batch_size=batch_size,
            drop_last=True,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=_own_generator(seed),
        )
        examples_of = examples_of or (lambda _: batch_size)
    elif collate_fn is not None:
        raise ValueError(
            f"Invalid collate_fn: a {type(dataset).__name__} yields batches that are collated already. Give the"
            " collate_fn to the data loader, or give the dataset itself."
        )
    elif isinstance(dataset, DataLoader) and world_size > 1 and _unshared(dataset):
        warnings.warn(
            f"{world_size} workers were given a DataLoader without a DistributedSampler: unless each worker's dataset"
            " is its own share, all go through the same examples. Give the dataset itself (loader.dataset), which also"
            " resumes exactly.",
            UserWarning,
            stacklevel=2,
        )
    return IterableSource(
        batches,
        batch_size=batch_size,
        world_size=world_size,
        accumulation=accumulation,
        length=length,
        examples_of=examples_of,
    )


class _RayDataBatches:
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


class _Request(list[int]):
    """The indices of one micro-batch, and the seed of whatever is random in fetching them."""

    seed: int

    @classmethod
    def make(cls, indices: list[int], seed: int) -> _Request:
        request = cls(indices)
        request.seed = seed
        return request


class _SeededRequests(Sampler[_Request]):
    """The sampler's micro-batches, each with a seed that depends on the run's seed and the stream position alone."""

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[_Request]:
        micro_batches = self._sampler.micro_batches(self._sampler.position)
        return (_Request.make(i, _stable_seed("fetch", self._sampler.seed, position)) for position, i in micro_batches)


class _Seeded(Dataset[Any]):
    """Fetches the examples of a ``_Request`` in a loader process, whose generators it seeds first."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, request: _Request) -> list[Any]:
        # The generator itself, not torch.manual_seed: that would queue a call for CUDA at every micro-batch.
        torch.default_generator.manual_seed(request.seed)
        random.seed(request.seed)
        np.random.seed(request.seed % 2**32)  # noqa: NPY002 (the global one is what augmentations use)
        fetch = getattr(self._dataset, "__getitems__", None)
        return fetch(list(request)) if fetch else [self._dataset[index] for index in request]


def _labelled(
    batches: Iterator[Any], sizes: Sequence[int], global_batch_size: int
) -> Generator[MicroBatch, None, None]:
    last = len(sizes) - 1
    for batch, (pass_index, size) in zip(batches, itertools.cycle(enumerate(sizes)), strict=False):
        yield MicroBatch(batch, size, size / global_batch_size, pass_index, pass_index == last)


def _base_steps(length: int, base_batch_size: int, *, drop_last: bool) -> float:
    _count("base_batch_size", base_batch_size, 1)
    if not drop_last:
        return length / base_batch_size
    if base_batch_size > length:
        raise ValueError(f"Invalid {base_batch_size=} with drop_last=True: an epoch has only {length} examples.")
    return float(length // base_batch_size)


def _check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    position = state.get("position")
    if not isinstance(position, int) or isinstance(position, bool) or position < 0:
        raise ValueError(f"Invalid data state: position={position!r}. Must be the examples consumed so far.")
    for name, value in expected.items():
        if name not in state or state[name] != value:
            raise ValueError(
                f"The checkpoint was written with {name}={state.get(name)!r} in its data state, this run has"
                f" {name}={value!r}. The order of examples would change: use the same dataset and settings, or begin a"
                " new run."
            )


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


def _unshared(loader: DataLoader[Any]) -> bool:
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


def _own_generator(seed: int) -> torch.Generator:
    """For a DataLoader, which else draws its base seed from the *global* generator at each iter().

    A resumed run makes one iterator more than one that was never stopped, and would differ from there on.
    """
    return torch.Generator().manual_seed(_stable_seed("loader", seed))


def _stable_seed(*parts: int | str) -> int:
    """63 bits that depend on the parts alone: the same in every process and version of Python, unlike hash()."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _count(name: str, value: Any, minimum: int | None) -> int:
    """``value`` as an int (NumPy's too), at least ``minimum``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or (minimum is not None and value < minimum):
        must = "an integer" if minimum is None else f"an integer ≥ {minimum}"
        raise ValueError(f"Invalid {name}={value!r}. Must be {must}.")
    return int(value)
