"""Data with an order of its own: iterables of batches, and Ray Data shards. Some
store their place; others resume by epochs.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import sampler as samplers

from .._warn import warn_at_user, warn_on_first_worker
from .fetch import epoch_setters
from .order import BatchSplit, MicroBatch
from .sampling import ExampleSampler
from .source import BatchSource


def even_size(split: BatchSplit) -> int:
    """Return the examples in each micro-batch of a step, if all have one size.

    Raises:
        ValueError: B is not a multiple of the number of micro-batches.
    """
    size, rest = divmod(split.global_batch_size, split.num_samples)
    if rest:
        raise ValueError(
            f"Invalid global_batch_size={split.global_batch_size}: batches from an "
            f"iterable have one size, so it must be a multiple of {split.num_samples} "
            f"(world_size={split.world_size} times accumulation={split.accumulation})."
        )
    return size


def fixed_batches(dataset: Any) -> str:
    """Return the error text for data with batches of a fixed size."""
    return (
        f"A {type(dataset).__name__} has batches of a fixed size, which can't change "
        "while the run goes on. Leave target_efficiency and batch_schedule out and "
        "choose per_worker_batch_size and accumulation; or give a map-style dataset, "
        "with __getitem__ and __len__ (of a DataLoader: loader.dataset)."
    )


_COUNTED = (
    "They are counted by the first dimension of a batch's first tensor, array or "
    "sequence, also within tuples, lists and mappings. If yours is another, as in "
    "(sequence, batch) layouts and in graphs, give the dataset itself with __getitem__ "
    "and __len__ (of a DataLoader: loader.dataset) and the collate_fn: then batches "
    "are made here, and counted as they are made."
)
"""What to do where batches can't be counted, as the end of an error message."""


class IterableSource(BatchSource):
    """Reads the user's own iterable of batches, and restarts it at its end.

    Every worker repeats its own iterable without end, so workers with unequal numbers
    of batches stay in step, with a warning. A sampler or dataset with ``set_epoch``
    (``DistributedSampler``) gets the number of the pass before each pass. A shorter
    last batch of a pass is skipped with one warning, since B must stay constant. Other
    batches of another size raise ValueError.

    Data with ``state_dict()`` and ``load_state_dict()`` (torchdata's
    ``StatefulDataLoader``, Hugging Face's iterable datasets) store each worker's place
    themselves, and a run resumes there on the same number of workers. Otherwise a
    resumed run starts at the beginning of an epoch, with a warning: the epoch's first
    examples are repeated.

    Args:
        batches: Each ``iter()`` makes a pass over this worker's share.
        split: The split of a step into micro-batches of one size. Each batch is one
            micro-batch.
        length: Examples per epoch over all workers; the epoch stays 0 if None.
        examples_of: Returns the number of examples in a batch. Default: its leading
            dimension.

    Raises:
        ValueError: An argument is out of range, or the micro-batches would differ in
            size.
    """

    kind = "iterable"

    def __init__(
        self,
        batches: Iterable[Any],
        split: BatchSplit,
        *,
        length: int | None = None,
        examples_of: Callable[[Any], int] | None = None,
    ) -> None:
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise ValueError(
                f"Invalid batches of type {type(batches).__name__}. Must be iterable, "
                "and start anew at each iter(): a DataLoader, also DataLoader(batches, "
                "batch_size=None), an IterableDataset, or an object with __iter__."
            )
        self.split = split
        self.batch_size = even_size(split)
        self.length = length
        self.position = 0
        self._batches = batches
        self._examples_of = examples_of or _leading_dimension
        self._warned = False
        self._stateful = _stateful(batches)
        self._pass = 0
        # so far, and in the last pass that has ended
        self._batches_in_pass = self._ended = 0
        self._unequal = False
        self._loaded_pass: int | None = None
        """Number of the pass that the next iterator continues, after
        :meth:`load_own_state`; else None.
        """

    def _stream(self) -> Generator[MicroBatch, None, None]:
        # This method is no generator, so that the position is read now and not at the
        # first next().
        return self._endless(
            self.epoch if self._loaded_pass is None else self._loaded_pass
        )

    def commit(self) -> None:
        self.position += self.split.global_batch_size

    def set_split(self, split: BatchSplit) -> None:
        raise ValueError(fixed_batches(self._batches))

    def _order_fields(self) -> dict[str, Any]:
        return {"length": self.length}

    def differ(self, difference: Callable[[str], str]) -> None:
        # Workers with equally many batches end a pass in the same step.
        how = difference(
            f"{self._ended} batches"
            if self._ended
            else f"{self._batches_in_pass} batches so far"
        )
        told = self._unequal
        self._unequal = True
        self.compared = 0
        if told:  # the next step's numbers were on their way
            return
        warn_on_first_worker(
            f"An epoch of the data has {how}. A worker with fewer batches repeats "
            "them, so its examples count more. Give all workers equally many: share "
            "out the data by examples, or end each pass (itertools.islice) after the "
            "fewest."
        )

    def own_state(self) -> Tensor | None:
        if self._stateful is None:
            return None
        written = io.BytesIO()
        torch.save((self._pass, self._stateful.state_dict()), written)
        return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)

    def load_own_state(self, state: Tensor) -> None:
        if self._stateful is not None:
            self._loaded_pass, place = torch.load(
                io.BytesIO(state.numpy().tobytes()), weights_only=True
            )
            self._stateful.load_state_dict(place)

    def _resume(self, position: int) -> None:
        if self._loaded_pass is not None:
            self.position = position
            return
        if position > 0:
            warn_at_user(
                f"The run resumes after {position} examples, but an iterable cannot be "
                "resumed in mid-epoch: it restarts at its epoch's start, so some "
                "examples are seen again and others not. A map-style dataset resumes "
                "exactly, and so does a stream with state_dict(), without "
                "num_loader_workers or in torchdata's StatefulDataLoader."
            )
        # Back to the epoch's start, so that epochs count whole passes.
        self.position = (
            position if self.length is None else position - position % self.length
        )

    def _endless(self, first_pass: int) -> Generator[MicroBatch, None, None]:
        weight = self.batch_size / self.split.global_batch_size
        last = self.split.accumulation - 1
        pass_index = itertools.cycle(range(last + 1))
        for number in itertools.count(first_pass):
            for set_epoch in epoch_setters(self._batches):
                set_epoch(number)
            iterator = iter(self._batches)
            seen = usable = 0
            self._pass = number
            continued = number == self._loaded_pass
            self._loaded_pass = None
            self._batches_in_pass = 0
            for batch in iterator:
                seen += 1
                if self._fits(batch, others=seen - usable - 1):
                    self._batches_in_pass = usable = usable + 1
                    i = next(pass_index)
                    yield MicroBatch(batch, self.batch_size, weight, i, i == last)
            self._ended = usable
            self.compared = 0 if self._unequal else usable
            if iterator is self._batches:
                raise ValueError(
                    f"The data ended after {seen} batches and cannot be restarted, "
                    f"since it is a one-shot iterator ({type(iterator).__name__}). "
                    "Give an iterable that starts anew at each iter(), such as a "
                    "DataLoader, or an object whose __iter__ is the generator function."
                )
            if usable == 0 and not continued:  # a place may be the end of a pass
                raise ValueError(
                    f"A whole epoch of the data gave no batch of {self.batch_size} "
                    f"examples ({seen} batches of other sizes). Give this worker more "
                    f"data, or batches of that size. {_COUNTED}"
                )

    def _fits(self, batch: Any, others: int) -> bool:
        """Return whether a batch has the right size; False for a pass's last and
        shorter batch, of each loader process.

        Args:
            batch: The batch.
            others: Batches of another size so far in this pass.

        Raises:
            ValueError: Batches are of varying size.
        """
        examples = self._examples_of(batch)
        if examples is None:
            raise ValueError(
                f"Cannot tell how many examples a batch of type {type(batch).__name__} "
                f"holds. {_COUNTED}"
            )
        if examples == self.batch_size:
            return True
        if examples > self.batch_size or others >= max(
            1, getattr(self._batches, "num_workers", 0)
        ):
            raise ValueError(
                f"A batch has {examples} examples, and must have {self.batch_size}: "
                "batches must be of one size, because the gain compares their "
                "gradients. Use a batch sampler of a fixed number of examples. "
                f"{_COUNTED}"
            )
        if not self._warned:
            self._warned = True
            warn_at_user(
                "Skipping the shorter last batch of each epoch "
                f"({examples} of {self.batch_size} examples): the global batch size "
                "must stay constant. drop_last=True in the data loader avoids this "
                "warning."
            )
        return False


class RayDataBatches:
    """A Ray Data shard (``ray.data.DataIterator``) as an iterable: each ``iter()`` is a
    pass over the shard.

    Ray Train's shards have equal lengths, so all workers start a pass together.
    """

    def __init__(
        self, shard: Any, batch_size: int, collate_fn: Callable[..., Any] | None
    ) -> None:
        self._shard = shard
        own = {} if collate_fn is None else {"collate_fn": collate_fn}
        self._arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "drop_last": True,
            **own,
        }

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shard.iter_torch_batches(**self._arguments))


def _leading_dimension(batch: Any) -> int | None:
    """Return the examples in a batch by its first tensor, array or plain sequence,
    depth first; None without any.
    """
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        return next(
            (n for n in map(_leading_dimension, batch.values()) if n is not None), None
        )
    if isinstance(batch, list | tuple):
        inner = (n for n in map(_leading_dimension, batch) if n is not None)
        return next(inner, len(batch))
    return None


_OF_RANKS = ("rank", "replica", "shard", "process", "world")
"""Parts of the names of a sampler's attributes that show that it selects a rank's
share.
"""


def unshared(loader: DataLoader[Any]) -> str | None:
    """Return the name of a loader's sampler if it selects from all of a map-style
    dataset, whatever the rank; else None.

    Several workers with such loaders may all read the same examples.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    own = type(loader.batch_sampler) not in (samplers.BatchSampler, type(None))
    sampler: Any = loader.batch_sampler if own else loader.sampler
    names = [
        name.lower()
        for name in (*getattr(sampler, "__dict__", ()), type(sampler).__name__)
    ]
    return (
        None
        if any(part in name for name in names for part in _OF_RANKS)
        else type(sampler).__name__
    )


def own_sampler(loader: Any) -> ExampleSampler | None:
    """Return the sampler of all examples that the user gave a ``DataLoader`` over a
    map-style dataset; None without one.
    """
    makes_batches = (
        isinstance(loader, DataLoader)
        and type(loader.batch_sampler) is samplers.BatchSampler
    )
    plain = not makes_batches or type(loader.sampler) in (
        samplers.SequentialSampler,
        samplers.RandomSampler,
    )
    return None if plain or unshared(loader) is None else loader.sampler


def known_length(dataset: Any, world_size: int) -> int | None:
    """Return the examples in an epoch of a DataLoader over all workers; None if it does
    not tell them, or is no DataLoader.

    A sampler without the rank draws for its own worker, so with several workers their
    number is not known.
    """
    if (
        not isinstance(dataset, DataLoader)
        or type(dataset.batch_sampler) is not samplers.BatchSampler
    ):
        return None
    if isinstance(dataset.sampler, DistributedSampler):
        return len(dataset.sampler.dataset)  # type: ignore[arg-type]
    counted = (
        dataset.dataset
        if isinstance(dataset.dataset, IterableDataset)
        else dataset.sampler
    )
    return len(counted) if world_size == 1 and isinstance(counted, Sized) else None


def _stateful(batches: Any) -> Any:
    """Return the object that stores this worker's place in the data; None without one.

    A ``DataLoader`` with loader processes has a copy of the dataset in each process,
    and this process can't read the state of the copies. A ``StatefulDataLoader`` can.
    With a shuffled map-style dataset its state did not restore the order of the
    examples.
    """
    if isinstance(batches, DataLoader) and not isinstance(
        batches.dataset, IterableDataset
    ):
        return None
    if type(batches) is DataLoader:
        batches = batches.dataset if batches.num_workers == 0 else None
    both = all(
        callable(getattr(batches, name, None))
        for name in ("state_dict", "load_state_dict")
    )
    return batches if both else None
