"""Fetches the examples of a micro-batch, in the training or in a loader process;
shows whether a dataset has changed.
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from .._errors import noted
from .._torch import count_of_writes
from .order import stable_seed

Fetch = Callable[[int, Tensor], Any]
"""Returns the batch at a position in the stream, of some indices, int64 of shape
(size,).
"""


@dataclass(frozen=True)
class Rows:
    """Fetches rows of tensors, with the result of fetching and stacking single rows."""

    tensors: Sequence[Tensor]

    def __call__(self, _: int, indices: Tensor) -> list[Tensor]:
        return [tensor.index_select(0, indices) for tensor in self.tensors]


class Examples:
    """Fetches examples of a dataset, with its ``__getitems__`` if there is one, and
    makes a batch of them.

    A dataset with ``set_epoch``, or one that it wraps, gets the epoch before its
    examples are fetched, in each process.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any], length: int
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._length = length
        # whether a batch is fetched epoch by epoch
        self._epoch = -1
        self._splits = False

    def __call__(self, position: int, indices: Tensor) -> Any:
        wanted: list[int] = indices.tolist()
        examples: list[Any] = []
        while wanted:
            epoch, before = divmod(position, self._length)
            if epoch != self._epoch:
                self._epoch, setters = epoch, epoch_setters(self._dataset)
                self._splits = len(setters) > 0
                for set_epoch in setters:
                    set_epoch(epoch)
            count = self._length - before if self._splits else len(wanted)
            fetch = getattr(self._dataset, "__getitems__", None)
            part = wanted[:count]
            examples += (
                fetch(part) if fetch else [self._dataset[index] for index in part]
            )
            wanted = wanted[count:]
            position = position + count
        return self._collate_fn(examples)


_ENTRIES = 100
_OBJECTS = 10_000
_ELEMENTS = 2**17
"""Most entries of a list and objects of a dataset that are looked into, and (about)
elements of an array that count.
"""


def _held(value: Any) -> Iterator[Iterable[Any]]:
    """Yield what an object holds: entries; and names and values of attributes, or of
    the variables around a function.
    """
    slots = (
        name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
    )
    named = {name: getattr(value, name, None) for name in slots} | dict(
        getattr(value, "__dict__", {})
    )
    if inspect.isfunction(value):
        with suppress(ValueError):  # a variable has no value yet
            named |= inspect.getclosurevars(value).nonlocals
    if isinstance(value, list | tuple | set | deque):
        yield value
    for names in (named, value) if isinstance(value, dict) else (named,):
        yield from (names, names.values())


def _objects(value: Any) -> Iterator[tuple[Any, list[tuple[Any, ...]]]]:
    """Yield an object and those that it holds, each once, with what each holds."""
    seen: dict[int, Any] = {}
    queue = deque([value])
    while queue and len(seen) < _OBJECTS:
        each = queue.popleft()
        if (
            id(each) in seen
            or each is None
            or isinstance(each, int | float | complex | str | bytes)
        ):
            continue
        seen[id(each)] = each
        held = [*map(tuple, _held(each))]
        yield each, held
        for inside in held:
            queue.extend(
                inside
                if isinstance(next(iter(inside), None), Dataset)
                else inside[:_ENTRIES]
            )


def epoch_setters(data: Any) -> list[Callable[[int], object]]:
    """Return the methods ``set_epoch`` of a dataset or a loader, and of the
    samplers, datasets and transforms that it holds.
    """
    return [
        each.set_epoch
        for each, _ in _objects(data)
        if hasattr(type(each), "set_epoch") and callable(each.set_epoch)
    ]


def state_of(value: Any) -> tuple[list[int], object]:
    """Return numbers that change if an object is changed, or one that it holds; and
    objects to keep while they count.

    An object is known by its identity and by those of what it holds, a tensor by the
    count of writes to it, an array by its elements, of a large one by some of them.
    """
    found: list[int] = []
    kept = []  # so that no new object gets the identity of a lost one
    for each, held in _objects(value):
        kept.append((each, held))
        found += [id(each), *(hash(tuple(map(id, inside))) for inside in held)]
        if isinstance(each, Tensor):
            found.append(count_of_writes(each))
        elif (
            isinstance(each, np.ndarray)
            and each.flags.writeable
            and not isinstance(each, np.memmap)
        ):
            found.append(hash(each.flat[:: 1 + each.size // _ELEMENTS].tobytes()))
    return found, kept


def has_plain_rows(dataset: Any) -> bool:
    """Return whether selecting rows gives the same as torch's collation, strides
    included.
    """
    return type(dataset) is TensorDataset and all(
        type(t) is Tensor and t.is_contiguous() for t in dataset.tensors
    )


def stacked(examples: list[Any]) -> Any:
    """Return a batch by torch's own collation."""
    with noted(
        lambda: (
            f"While {len(examples)} examples were made a batch, by torch's "
            "default_collate: they must have equal shapes and types. Give a collate_fn "
            "that pads them, or one for types of your own."
        )
    ):
        return default_collate(examples)


@dataclass(frozen=True)
class Seeded(Dataset[Any]):
    """Fetches the batch of a request in a loader process. It first seeds the
    generators of the process, by run and position.
    """

    fetch: Fetch
    seed: int

    def __getitem__(self, request: tuple[int, list[int]]) -> Any:
        position, indices = request
        seed = stable_seed("fetch", self.seed, position)
        # torch.manual_seed would queue a call for CUDA at every micro-batch.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (augmentations use the global generator)
        return self.fetch(position, torch.tensor(indices))
