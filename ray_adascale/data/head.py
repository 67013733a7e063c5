"""The first examples of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._torch import leaves, with_parts


def examples_of(batch: Any, count: int) -> tuple[Any, int] | None:
    """Return the first examples of a batch, and their number; None if the batch can't
    be cut.

    Args:
        batch: Tensors and NumPy arrays with the same leading dimension m, in nested
            lists, tuples, named tuples and mappings. They are cut, as are lists of m
            strings; any other leaf is whole.
        count: Most examples to return.
    """
    sizes = list(_leading_dimensions(batch))
    if not sizes or min(sizes) != max(sizes) or sizes[0] < 1:
        return None
    count = min(count, sizes[0])
    return _first(batch, sizes[0], count), count


def _is_array(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray)


def _leading_dimensions(batch: Any) -> Iterator[int]:
    """Yield m of every array; 0, which can't be cut, if its examples lie along
    another dimension than the first.
    """
    for x in leaves(batch):
        if isinstance(x, PackedSequence) or (isinstance(x, Tensor) and x.is_nested):
            yield 0
        elif _is_array(x) and x.ndim > 0:
            yield x.shape[0]


def _first(batch: Any, m: int, count: int) -> Any:
    """Return the same structure with only the first of the m examples. Arrays are
    views.
    """
    if _is_array(batch):
        return batch[:count] if batch.ndim > 0 else batch
    if (
        isinstance(batch, list)
        and len(batch) == m
        and all(isinstance(x, str | bytes) for x in batch)
    ):
        return batch[:count]  # default_collate leaves texts as a list: one per example
    return with_parts(batch, lambda part: _first(part, m, count))
