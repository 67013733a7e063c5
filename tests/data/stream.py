"""What the tests of data share. The stream (permutations of consecutive epochs,
concatenated) is written out here once; whatever the workers see, put together, is
compared with it."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import torch

from ray_adascale.data.order import BatchSplit, ExampleOrder, MicroBatch, epoch_order
from ray_adascale.data.source import BatchSource


def stream(length: int, count: int, *, seed: int, shuffle: bool = True) -> list[int]:
    """The first ``count`` examples of a dataset's stream."""
    epochs = -(-count // length)
    whole = [
        epoch_order(length, seed=seed, epoch=e) if shuffle else torch.arange(length)
        for e in range(epochs)
    ]
    return torch.cat([*whole, torch.empty(0, dtype=torch.int64)]).tolist()[:count]


def take(source: BatchSource, steps: int, passes: int = 1) -> list[MicroBatch]:
    """The micro-batches of some committed steps; the source may be taken from again."""
    taken = list(itertools.islice(source, steps * passes))
    for _ in range(steps):
        source.commit()
    return taken


def settings_of(arguments: dict[str, Any]) -> tuple[BatchSplit, ExampleOrder]:
    """Takes the fields of a cut and of an order out of ``arguments``."""
    cut, order = (
        {f.name: arguments.pop(f.name) for f in fields(kind) if f.name in arguments}
        for kind in (BatchSplit, ExampleOrder)
    )
    return BatchSplit(**cut), ExampleOrder(**order)


def batches_of(*sizes: int, start: float = 0) -> list[torch.Tensor]:
    """Batches of these sizes, which count through their examples."""
    starts = itertools.accumulate(sizes, initial=0)
    return [
        torch.arange(s, s + size) + start
        for s, size in zip(starts, sizes, strict=False)
    ]
