"""The order of examples, a function of (seed, epoch) alone, and its split into steps,
passes and workers.

Below 2²⁰ examples an epoch's permutation is torch's. From there on it is a keyed one,
which needs no list of all examples (:func:`keyed_order`).

The permutations of consecutive epochs are concatenated to one endless *stream* of
examples. A *position* is a number of examples of the stream. Every optimizer step uses
the next B examples, split into n = workers × accumulation passes micro-batches. So a
run can stop at any step boundary and continue with another B, another number of workers
or another accumulation: over the committed steps no example is repeated or left out
within an epoch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExampleOrder:
    """The fields that determine the order of a dataset's examples, beside its length.

    Attributes:
        seed: Seed of the permutations.
        shuffle: False keeps the dataset's order in every epoch.
        drop_last: Leave out the last examples of an epoch where they are fewer than B.
            They count as consumed.
    """

    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False


@dataclass(frozen=True)
class BatchSplit:
    """The split of one optimizer step's B examples into micro-batches, with this
    worker's part.

    The examples are split into n contiguous parts. The sizes of the parts differ by at
    most 1. Part ``pass · world_size + rank`` goes to that rank and pass.

    Attributes:
        global_batch_size: B, examples per optimizer step.
        rank: This worker, from 0.
        world_size: Workers.
        accumulation: Passes per optimizer step. Each of the n parts has an example: B ≥
            n.
    """

    global_batch_size: int
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    accumulation: int = 1

    @property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step."""
        return self.world_size * self.accumulation

    @property
    def sample_sizes(self) -> list[int]:
        """Examples in each of the step's n gradient samples, over all workers."""
        return split_evenly(self.global_batch_size, self.num_samples)

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Examples in each of this worker's micro-batches, pass by pass."""
        return self.sample_sizes[self.rank :: self.world_size]

    @property
    def micro_batch_starts(self) -> list[int]:
        """Offset of each of this worker's micro-batches within the step, in
        examples, pass by pass.
        """
        starts = [0, *itertools.accumulate(self.sample_sizes[:-1])]
        return starts[self.rank :: self.world_size]


@dataclass(frozen=True)
class MicroBatch:
    """One worker's examples of one pass: one gradient sample.

    Attributes:
        batch: The result of the dataset and of ``collate_fn``; None as long as the
            examples are not loaded.
        examples: ``m_i``, the number of examples.
        weight: ``w_i = m_i / B``; the weights sum to 1 over the workers and passes of a
            step.
        pass_index: Accumulation pass within the step, from 0.
        is_last: Whether this is the step's last pass, after which the optimizer steps.
        by_units: Whether the weight counts units of the user's instead of examples.
        position: Examples of the stream before the micro-batch, while it is to be
            loaded.
    """

    batch: Any
    examples: int
    weight: float
    pass_index: int
    is_last: bool
    by_units: bool = False
    position: int = 0

    def same_examples(self, other: MicroBatch) -> bool:
        """Return whether both are the same piece of the stream, whatever the split
        of their steps.
        """
        return (self.position, self.examples) == (other.position, other.examples)


def epoch_order(length: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of examples in one epoch, a function of the arguments alone.

    Args:
        length: Examples in the dataset.
        seed: The run's seed.
        epoch: Counted from 0.

    Returns:
        int64 of shape ``(length,)``, a permutation.
    """
    return torch.randperm(
        length,
        generator=torch.Generator().manual_seed(stable_seed("order", seed, epoch)),
    )


KEYED_FROM = 2**20
"""Examples from which on an epoch's order is that of :func:`keyed_order`. A shorter
list of all examples is cheap.
"""

# of the Feistel network; three make a permutation that looks random to any statistics,
# the rest is margin
_ROUNDS = 6


def keyed_order(
    positions: np.ndarray, length: int, *, seed: int, epoch: int
) -> np.ndarray:
    """Return the examples at some positions of an epoch's order, in O(1) each and
    without a list of all examples.

    The order is a keyed permutation: a Feistel network (L, R) → (R, (L + F(R)) mod a)
    over pairs of numbers below a = ⌈√length⌉, with F a hash of R and of a key that
    depends on (seed, epoch, round). Where the result lies beyond the dataset the
    network is applied again, which gives a permutation of 0 … length − 1 (Black and
    Rogaway, *Ciphers with Arbitrary Finite Domains*, 2002).

    Args:
        positions: Integers from 0 to length − 1, any shape.
        length: Examples in the dataset, at most 2⁶² of them.
        seed: The run's seed.
        epoch: Counted from 0.

    Returns:
        int64 of the same shape.
    """
    side = np.uint64(math.isqrt(length - 1) + 1)
    keys = [
        np.uint64(stable_seed("keyed order", seed, epoch, i)) for i in range(_ROUNDS)
    ]
    found = np.asarray(positions, dtype=np.uint64).copy()
    beyond = np.ones(found.shape, dtype=bool)
    while beyond.any():
        left, right = np.divmod(found[beyond], side)
        for key in keys:
            left, right = right, (left + _hash(right ^ key) % side) % side
        found[beyond] = left * side + right
        beyond = found >= np.uint64(length)
    return found.astype(np.int64)


def _hash(x: np.ndarray) -> np.ndarray:
    """Return SplitMix64's finalizer of x: each of the 64 bits depends on all of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def split_evenly(total: int, parts: int) -> list[int]:
    """Return ``parts`` sizes that sum to ``total`` and differ by at most 1, the
    larger ones first.
    """
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


class ExampleStream:
    """Yields one worker's micro-batches without end: step by step, within a step pass
    by pass.

    Each step uses B examples of the stream, across the borders of epochs, split as
    ``split`` says.

    Args:
        length: Examples in the dataset.
        split: The split of a step. B may exceed ``length`` unless ``order.drop_last``.
        order: The order of the stream.
        position: Examples of the stream consumed so far, over all workers. It may be
            set between iterations, without effect on a running iterator.
        epoch_indices: Returns an epoch's indices, ``length`` of them, in place of a
            permutation of the dataset.

    Raises:
        ValueError: An argument is out of range; the message says what to change.
    """

    def __init__(
        self,
        length: int,
        split: BatchSplit,
        order: ExampleOrder,
        position: int = 0,
        epoch_indices: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.length = length
        self.order = order
        self.split = split
        self.position = position
        self._epoch_indices = epoch_indices
        self._keyed = length >= KEYED_FROM
        self._permutation: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))
        """An epoch and the order of its examples, unless the order is keyed."""

    @property
    def split(self) -> BatchSplit:
        """The split of a step. It may be set between iterations."""
        return self._split

    @split.setter
    def split(self, split: BatchSplit) -> None:
        if self.order.drop_last and split.global_batch_size > self.length:
            raise ValueError(
                f"Invalid global_batch_size={split.global_batch_size} with "
                f"drop_last=True: an epoch has {self.length} examples, so every batch "
                "would be dropped. Use drop_last=False, which runs on into the next "
                "epoch, or a smaller batch."
            )
        self._split = split

    def next_position(self, position: int) -> int:
        """Return the position after a step that starts at ``position``."""
        batch = self.split.global_batch_size
        return self._step_start(self._step_start(position, batch) + batch, batch)

    def parts(self, position: int) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches from ``position`` on, without end, by
        the split at the first request.
        """
        split = self.split
        batch = self.split.global_batch_size
        pieces = list(
            zip(split.micro_batch_starts, split.micro_batch_sizes, strict=True)
        )
        last = len(pieces) - 1
        while True:
            position = self._step_start(position, batch)
            for i, (start, size) in enumerate(pieces):
                yield MicroBatch(
                    None, size, size / batch, i, i == last, position=position + start
                )
            position = self._step_start(position + batch, batch)

    def _step_start(self, position: int, batch: int) -> int:
        """Return the start of the next step: with ``drop_last``, after the last
        examples of an epoch that are fewer than B.
        """
        rest = self.length - position % self.length
        return position + rest if self.order.drop_last and rest < batch else position

    def indices(self, part: MicroBatch) -> Tensor:
        """Return the dataset's indices of a micro-batch's examples: int64 of shape
        ``(examples,)``.
        """
        position = part.position
        end = part.position + part.examples
        pieces: list[Tensor] = []
        while position < end:
            epoch, before = divmod(position, self.length)
            upto = min(before + end - position, self.length)
            pieces.append(self._in_epoch(epoch, before, upto))
            position += upto - before
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _in_epoch(self, epoch: int, start: int, end: int) -> Tensor:
        """Return the examples of an epoch's order from place ``start`` up to
        ``end``.
        """
        if self._epoch_indices is not None:
            return self._epoch_indices(epoch)[start:end]
        if not self.order.shuffle:
            return torch.arange(start, end)
        if self._keyed:
            return torch.from_numpy(
                keyed_order(
                    np.arange(start, end),
                    self.length,
                    seed=self.order.seed,
                    epoch=epoch,
                )
            )
        if self._permutation[0] != epoch:
            # One epoch is enough: a worker looks up its own micro-batches only, in the
            # stream's order.
            self._permutation = (
                epoch,
                epoch_order(self.length, seed=self.order.seed, epoch=epoch),
            )
        return self._permutation[1][start:end]


def stable_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on the parts alone. Unlike hash(), they are the
    same in every process and Python version.
    """
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
