"""Fetches the examples of a micro-batch, in the training or in a loader process; shows whether a dataset has changed."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
"""Returns the batch at a position in the stream, of some indices, int64 of shape (size,)."""


@dataclass(frozen=True)
class Rows:
    """Fetches rows of tensors, with the result of fetching and stacking single rows."""

    tensors: Sequence[Tensor]

    def __call__(self, _: int, indices: Tensor) -> list[Tensor]:
        return [tensor.index_select(0, indices) for tensor in self.tensors]


class Examples:
    """Fetches examples of a dataset, with its ``__getitems__`` if there is one, and makes a batch of them.

    A dataset with ``set_epoch``, or one that it wraps, gets the epoch before its examples are fetched, in each process.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], length: int) -> None:
        self._dataset, self._collate_fn, self._length = dataset, collate_fn, length
        self._epoch = -1

    def __call__(self, position: int, indices: Tensor) -> Any:
        wanted, examples = indices.tolist(), []
        setters = epoch_setters(self._dataset)
        while wanted:
            epoch, before = divmod(position, self._length)
            count = self._length - before if setters else len(wanted)
            if setters and epoch != self._epoch:
                self._epoch = epoch
                for set_epoch in setters:
                    set_epoch(epoch)
            examples += self._fetched(wanted[:count])
            wanted, position = wanted[count:], position + count
        return self._collate_fn(examples)

    def _fetched(self, wanted: list[int]) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        return fetch(wanted) if fetch else [self._dataset[index] for index in wanted]


def epoch_setters(data: Any) -> list[Callable[[int], object]]:
    """Return the methods ``set_epoch`` of a dataset or a loader, of its samplers, and of the datasets that it wraps."""
    wrapped = getattr(data, "datasets", ())
    parts = [getattr(data, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    parts += wrapped if isinstance(wrapped, list | tuple) else ()
    own = getattr(data, "set_epoch", None)
    return ([own] if callable(own) else []) + [
        each for part in parts if part is not None for each in epoch_setters(part)
    ]


_ENTRIES, _OBJECTS = 100, 10_000
"""Most entries of a list, and objects of a dataset, in which a change is looked for."""


def state_of(value: Any) -> tuple[list[Any], object]:
    """Return numbers and texts that change if an object is changed, or one that it holds; and objects to keep while they count.

    An object is known by its identity, a tensor also by the count of writes to it, a short array by its elements.
    """
    found: list[Any] = []
    kept: dict[int, Any] = {}  # so that no new object gets the identity of a lost one
    queue = deque([value])
    while queue and len(found) < _OBJECTS:
        each = queue.popleft()
        plain = each is None or isinstance(each, int | float | complex | str | bytes)
        found.append(each if plain else id(each))
        if plain or id(each) in kept:
            continue
        kept[id(each)] = each
        named = each if isinstance(each, Mapping) else getattr(each, "__dict__", {})
        listed = each if isinstance(each, list | tuple | set | deque) else ()
        if isinstance(each, np.ndarray) and each.size <= _ENTRIES:
            listed = each.tolist()
        found += [len(named), len(listed), count_of_writes(each) if isinstance(each, Tensor) else 0]
        for inside in (listed, named, named.values()):
            queue.extend(itertools.islice(inside, _ENTRIES))
    return found, kept


def has_plain_rows(dataset: Any) -> bool:
    """Return whether selecting rows gives the same as torch's collation, strides included."""
    return type(dataset) is TensorDataset and all(type(t) is Tensor and t.is_contiguous() for t in dataset.tensors)


def stacked(examples: list[Any]) -> Any:
    """Return a batch by torch's own collation."""
    with noted(
        lambda: (
            f"While {len(examples)} examples were made a batch, by torch's default_collate: they must have equal shapes and "
            "types. Give a collate_fn that pads them, or one for types of your own."
        )
    ):
        return default_collate(examples)


@dataclass(frozen=True)
class Seeded(Dataset[Any]):
    """Fetches the batch of a request in a loader process. It first seeds the generators of the process, by run and position."""

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
