"""Where micro-batches come from: :class:`BatchSource`, and the one for map-style datasets, which resumes exactly."""

from __future__ import annotations

import abc
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from .order import BatchSplit, ExampleOrder, Part, StepSampler, checked_int, stable_seed

__all__ = [
    "BatchSource",
    "MapSource",
    "MicroBatch",
    "as_micro_batches",
    "base_steps",
    "check_state",
    "loader_generator",
]


_KEYED = "keyed"
"""What a data state says of an order that is :func:`.order.keyed_order`'s; of torch's it says nothing."""


@dataclass(frozen=True)
class MicroBatch:
    """What one worker computes one gradient sample from.

    Attributes:
        batch: Whatever the dataset and ``collate_fn`` make of the examples.
        examples: ``m_i``, the examples in it.
        weight: ``w_i = m_i / B``; the weights sum to 1 over the workers and passes of a step.
        pass_index: Accumulation pass within the step, from 0.
        is_last: True on the step's last pass, where the optimizer steps.
    """

    batch: Any
    examples: int
    weight: float
    pass_index: int
    is_last: bool


class BatchSource(abc.ABC):
    """Micro-batches without end, and a position that moves only when a step is committed."""

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
    def set_split(self, split: BatchSplit) -> None:
        """From the next step on, cut the examples after ``position`` so. At a step boundary; a running iterator goes on.

        Raises:
            ValueError: The data comes in batches of a size that can't change, or there are too few examples for B.
        """

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
            ValueError: A field on which the order depends differs; the message names it.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the iterator and shuts its loader processes down. The source can be iterated again."""


class MapSource(BatchSource):
    """A map-style dataset (``__getitem__`` and ``__len__``), exactly resumable at any number of workers.

    With loader processes, torch's, Python's and NumPy's global generators are seeded before each micro-batch with a
    function of (seed, position), so random augmentation depends neither on which process fetches nor on
    restarts; across a change of the micro-batches' sizes it differs. Without loader processes examples are fetched in the
    training process, whose generators are left alone: they belong to the user and to the checkpoint.

    Args:
        dataset: ``__getitems__`` is used where it has one.
        split: How a step is split, and which part of it is this worker's.
        order: The order of the examples.
        collate_fn: Makes a batch of a list of examples; torch's default if None.
        num_workers: Loader processes; they live as long as the iterator, over all epochs.
        pin_memory: Copies batches to page-locked memory, for a faster way to a GPU.
    """

    def __init__(
        self,
        dataset: Any,
        split: BatchSplit,
        order: ExampleOrder,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        checked_int("num_workers", num_workers, 0)
        self.sampler = StepSampler(len(dataset), split, order)
        if collate_fn is None and _has_plain_rows(dataset):
            dataset, collate_fn = _Rows(dataset.tensors), _as_it_is
        self._requests = _Requests(self.sampler, seeded=num_workers > 0)
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset) if num_workers else dataset,
            batch_sampler=self._requests,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=loader_generator(order.seed),
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
        self._iterator = self._requests.answered(iter(self._loader))
        return self._iterator

    def commit(self) -> None:
        self.sampler.position = self.sampler.next_position(self.sampler.position)

    def set_split(self, split: BatchSplit) -> None:
        self.sampler.split = split
        self._requests.restart()

    def base_steps_per_epoch(self, base_batch_size: int) -> float:
        return base_steps(self.sampler.length, base_batch_size, drop_last=self.sampler.order.drop_last)

    def state_dict(self) -> dict[str, Any]:
        keyed = {"permutation": _KEYED} if self.sampler.keyed else {}
        return {"kind": "map", "position": self.position, **self._order_fields(), **keyed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_state(state_dict, {"kind": "map", **self._order_fields()})
        permutation = state_dict.get("permutation")
        if permutation not in (None, _KEYED):
            raise ValueError(
                f"The checkpoint's data state has permutation={permutation!r}: written by a newer ray_adascale."
            )
        self.sampler.position = state_dict["position"]
        self.sampler.keyed = permutation == _KEYED  # a run that began before there was this order keeps its own

    def close(self) -> None:
        # A closed generator lets go of the loader's iterator, which stops its processes as it goes.
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _order_fields(self) -> dict[str, Any]:
        return {**asdict(self.sampler.order), "length": self.sampler.length}


class _Rows(Dataset[Any]):
    """Gives the rows of a ``TensorDataset`` a micro-batch at a time: the same as fetching and stacking them one by one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = torch.tensor(indices)
        return [tensor[rows] for tensor in self._tensors]


def _has_plain_rows(dataset: Any) -> bool:
    """Whether selecting rows of the tensors is sure to give what torch's collation gives, strides included."""
    return type(dataset) is TensorDataset and all(type(t) is Tensor and t.is_contiguous() for t in dataset.tensors)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Request(list[int]):
    """The indices of one micro-batch, and the seed of whatever is random in fetching them."""

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class _Requests(Sampler[list[int]]):
    """Asks a loader for the sampler's micro-batches, and knows what was asked for and not yet received.

    A loader with processes asks ahead. Where steps are cut otherwise meanwhile, what is on its way is kept if it is what
    comes next under the new cut too, as where only the number of passes changes; else it is thrown away as it comes, and
    asked for anew. So its processes live on, whatever changes.

    Args:
        sampler: Its position and split hold for what is asked for next.
        seeded: Give each request a seed, which depends on the run's seed and the position alone.
    """

    def __init__(self, sampler: StepSampler, *, seeded: bool) -> None:
        self._sampler = sampler
        self._seeded = seeded
        self._parts: Iterator[Part] = iter(())
        self._on_their_way: deque[Part | None] = deque()  # None for what nobody wants any more

    def __iter__(self) -> Iterator[list[int]]:
        # Not itself a generator: the position counts from now, not from the first next().
        self._on_their_way.clear()
        self._parts = self._sampler.parts(self._sampler.position)
        return self._asked()

    def _asked(self) -> Iterator[list[int]]:
        while True:
            part = next(self._parts)
            self._on_their_way.append(part)
            indices = self._sampler.indices(part)
            if self._seeded:
                yield _Request(indices, stable_seed("fetch", self._sampler.order.seed, part.position))
            else:
                yield indices

    def restart(self) -> None:
        """Go on from the sampler's position and split, which are others now."""
        self._parts = self._sampler.parts(self._sampler.position)
        kept = True
        for i, asked in enumerate(self._on_their_way):
            if kept:
                wanted = next(self._parts)
                kept = asked is not None and asked.same_examples(wanted)
                if not kept:
                    self._parts = itertools.chain([wanted], self._parts)
            self._on_their_way[i] = wanted if kept else None

    def answered(self, batches: Iterator[Any]) -> Generator[MicroBatch, None, None]:
        """What the loader brings, in the order in which it was asked for."""
        for batch in batches:
            part = self._on_their_way.popleft()
            if part is not None:
                yield MicroBatch(batch, part.size, part.weight, part.pass_index, part.is_last)


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


def as_micro_batches(batches: Iterator[Any], split: BatchSplit) -> Generator[MicroBatch, None, None]:
    """This worker's batches, each with its weight and its pass of the step. Ends where ``batches`` do.

    Args:
        batches: Step by step, within a step pass by pass; of the sizes that ``split`` gives this worker.
        split: How a step is cut.
    """
    sizes = split.micro_batch_sizes
    last = len(sizes) - 1
    for batch, (pass_index, size) in zip(batches, itertools.cycle(enumerate(sizes)), strict=False):
        yield MicroBatch(batch, size, size / split.global_batch_size, pass_index, pass_index == last)


def base_steps(length: int, base_batch_size: int, *, drop_last: bool) -> float:
    """Optimizer steps per epoch of a run at batch size B0, of a dataset of ``length`` examples.

    Where the rest of an epoch is not dropped, a step runs on into the next one, so the steps need not be whole.
    """
    checked_int("base_batch_size", base_batch_size, 1)
    if not drop_last:
        return length / base_batch_size
    if base_batch_size > length:
        raise ValueError(f"Invalid {base_batch_size=} with drop_last=True: an epoch has only {length} examples.")
    return float(length // base_batch_size)


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses a saved state whose position would mean other examples here.

    Args:
        state: What a source's ``state_dict`` returned.
        expected: This source's fields beside the position; the state must have the same.

    Raises:
        ValueError: The position is no number of examples, or a field differs; names the field.
    """
    position = state.get("position")
    if not isinstance(position, int) or isinstance(position, bool) or position < 0:
        raise ValueError(f"Invalid data state: position={position!r}. Must be the examples consumed so far.")
    for name, value in expected.items():
        if name not in state or state[name] != value:
            raise ValueError(
                f"The checkpoint was written with {name}={state.get(name)!r} in its data state, this run has"
                f" {name}={value!r}. The order of examples would change: use the same dataset and settings, or begin a"
                " new run, under another name."
            )


def loader_generator(seed: int) -> torch.Generator:
    """A generator for a ``DataLoader``, which else draws its base seed from the *global* one at each iter().

    A resumed run makes one iterator more than one that was never stopped; drawing from the global generator, it would
    differ from there on.
    """
    return torch.Generator().manual_seed(stable_seed("loader", seed))
