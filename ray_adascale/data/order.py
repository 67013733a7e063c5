"""The order of examples: a function of (seed, epoch) alone, cut into steps, passes and workers.

The permutations of consecutive epochs are concatenated to one endless *stream* of examples. Every optimizer step takes the
next B examples of it, cut into n = workers × accumulation passes micro-batches. So a run can stop at any step boundary and
go on with another B, another number of workers or another accumulation: over the committed steps no example is repeated or
left out within an epoch.
"""

from __future__ import annotations

import hashlib
import itertools
import numbers
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

__all__ = ["StepSampler", "count", "epoch_order", "split_evenly", "stable_seed"]


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
    return torch.randperm(length, generator=torch.Generator().manual_seed(stable_seed("order", seed, epoch)))


def split_evenly(total: int, parts: int) -> list[int]:
    """``parts`` sizes that sum to ``total`` and differ by at most 1, the larger ones first."""
    count("total", total, 0)
    count("parts", parts, 1)
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
        self.length = count("length", length, 0)
        if length == 0:
            raise ValueError("Invalid length=0: empty dataset. Give at least one example.")
        self.global_batch_size = count("global_batch_size", global_batch_size, 1)
        self.world_size = count("world_size", world_size, 1)
        self.accumulation = count("accumulation", accumulation, 1)
        self.rank = count("rank", rank, 0)
        if rank >= world_size:
            raise ValueError(f"Invalid {rank=} with {world_size=}. Ranks count from 0.")
        parts = world_size * accumulation
        if global_batch_size < parts:
            raise ValueError(
                f"Invalid {global_batch_size=}: {world_size=} times {accumulation=} makes {parts} micro-batches a step,"
                " and each needs an example. Use a larger batch, fewer workers or fewer accumulation passes."
            )
        if drop_last and global_batch_size > length:
            raise ValueError(
                f"Invalid {global_batch_size=} with drop_last=True: an epoch has {length} examples, so every batch"
                " would be dropped. Use drop_last=False, which runs on into the next epoch, or a smaller batch."
            )
        self.seed = count("seed", seed, None)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.position = count("position", position, 0)
        self.sample_sizes: list[int] = split_evenly(self.global_batch_size, parts)
        """Examples in each of the step's n gradient samples, over all workers."""
        self.micro_batch_sizes: list[int] = self.sample_sizes[self.rank :: self.world_size]
        """Examples in this worker's micro-batches, pass by pass."""
        starts = [0, *itertools.accumulate(self.sample_sizes)]
        self._offsets = starts[self.rank : parts : self.world_size]
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


def stable_seed(*parts: int | str) -> int:
    """63 bits that depend on the parts alone: the same in every process and version of Python, unlike hash()."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def count(name: str, value: Any, minimum: int | None) -> int:
    """``value`` as an int (NumPy's too), at least ``minimum``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or (minimum is not None and value < minimum):
        must = "an integer" if minimum is None else f"an integer ≥ {minimum}"
        raise ValueError(f"Invalid {name}={value!r}. Must be {must}.")
    return int(value)
