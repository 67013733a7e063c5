"""The source of micro-batches: :class:`BatchSource`, and the source for map-style
datasets, which resumes exactly.
"""

from __future__ import annotations

import abc
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from .._errors import check_count
from .device import CopiesAhead, Pinnable, to_device
from .fetch import Examples, Fetch, Rows, Seeded, has_plain_rows, stacked, state_of
from .order import BatchSplit, ExampleOrder, ExampleStream, MicroBatch, stable_seed
from .sampling import ExampleSampler, SampledOrder


def base_steps_per_epoch(
    length: int | None, base_batch_size: int, *, drop_last: bool
) -> float | None:
    """Return the optimizer steps per epoch of ``length`` examples at batch size B0;
    None where the length is unknown.

    Without ``drop_last`` a step runs on into the next epoch, so the number is not
    rounded.
    """
    if length is None:
        return None
    check_count("base_batch_size", base_batch_size, 1)
    if not drop_last:
        return length / base_batch_size
    if base_batch_size > length:
        raise ValueError(
            f"Invalid {base_batch_size=} with drop_last=True: an epoch has only "
            f"{length} examples."
        )
    return float(length // base_batch_size)


class BatchSource(abc.ABC):
    """An endless stream of micro-batches, and a position that advances only when a step
    is committed.

    Attributes:
        kind: Name of the kind of source in a checkpoint.
        length: Examples per epoch over all workers; None if unknown.
        position: Examples consumed by committed steps, over all workers.
        compared: A number of the step's data below 2³¹ that travels with the step: it
            must be equal on all workers.
    """

    compared = 0
    kind: str
    length: int | None
    position: int
    _drop_last = False
    _iterator: Generator[MicroBatch, None, None] | None = None
    _copies: CopiesAhead | None = None

    @property
    def epoch(self) -> int:
        """Epochs completed by committed steps: the same on every worker. It stays 0
        where the length is unknown.
        """
        return 0 if self.length is None else self.position // self.length

    def __iter__(self) -> Iterator[MicroBatch]:
        """Return an endless iterator from ``position`` on. It ends the previous
        iterator.
        """
        self.close()
        self._iterator = self._stream()
        return self._iterator

    def close(self) -> None:
        """End the iterator and its loader processes. The source can be iterated
        again.
        """
        # A closed generator releases the loader's iterator, which stops its processes.
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    @abc.abstractmethod
    def _stream(self) -> Generator[MicroBatch, None, None]:
        """Return the micro-batches from ``position`` on."""

    def on_device(self, batch: Any, device: torch.device) -> Any:
        """Return the batch of a micro-batch on the device."""
        return (
            to_device(batch, device)
            if self._copies is None
            else self._copies.arrived(batch)
        )

    @abc.abstractmethod
    def commit(self) -> None:
        """Advance ``position`` by one step. Called once after each optimizer step.
        Prefetching does not advance it.
        """

    @abc.abstractmethod
    def set_split(self, split: BatchSplit) -> None:
        """Set the split of the next steps. Called at a step boundary. A running
        iterator continues with the new split.

        Raises:
            ValueError: The data comes in batches of a fixed size, or there are too few
                examples for B.
        """

    def base_steps_per_epoch(self, base_batch_size: int) -> float | None:
        """Return the optimizer steps per epoch at batch size B0; None where the
        length is unknown.
        """
        return base_steps_per_epoch(
            self.length, base_batch_size, drop_last=self._drop_last
        )

    def differ(self, difference: Callable[[str], str]) -> None:
        """Warn or raise, because :attr:`compared` differs between workers. Collective.

        Args:
            difference: From what this worker has, a text, it returns how two workers
                differ: "A on rank 0 and B on rank 1".
        """
        raise NotImplementedError

    @abc.abstractmethod
    def _order_fields(self) -> dict[str, Any]:
        """Return the fields that determine the order, as JSON values, the same on
        every worker.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the fields that determine the order, as JSON
        values, the same on every worker.
        """
        return {"kind": self.kind, "position": self.position, **self._order_fields()}

    def own_state(self) -> Tensor | None:
        """Return this worker's place in data that store it themselves, as bytes,
        uint8 of shape (size,); None for other data.
        """
        return None

    def load_own_state(self, state: Tensor) -> None:
        """Load an :meth:`own_state` of this worker, before :meth:`load_state_dict`."""
        raise ValueError(
            "The checkpoint has this worker's place in the data; a "
            f"{type(self).__name__} has none."
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position of the next ``iter()``. The state may come from another B or
        another number of workers.

        Raises:
            ValueError: The position is no number of examples, or a field that
                determines the order differs, so that the position would mean other
                examples here. The message names the field.
        """
        position = state_dict.get("position")
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise ValueError(
                f"Invalid data state: position={position!r}. Must be the examples "
                "consumed so far."
            )
        for name, value in {"kind": self.kind, **self._order_fields()}.items():
            if name not in state_dict or state_dict[name] != value:
                raise ValueError(
                    f"The checkpoint was written with {name}={state_dict.get(name)!r} "
                    f"in its data state, this run has {name}={value!r}. The order of "
                    "examples would change: use the same dataset and settings, or "
                    "begin a new run, under another name."
                )
        self._resume(position)

    @abc.abstractmethod
    def _resume(self, position: int) -> None:
        """Set the position of the next ``iter()``."""


class MapSource(BatchSource):
    """Reads a map-style dataset (``__getitem__`` and ``__len__``), and resumes exactly
    on any number of workers.

    Loader processes seed torch's, Python's and NumPy's global generators before each
    micro-batch with a function of (seed, position). So random augmentation depends
    neither on the process that fetches nor on restarts. It changes with the sizes of
    the micro-batches. Without loader processes the training process fetches the
    examples, and its generators are not seeded: they belong to the user and to the
    checkpoint.

    Args:
        dataset: The dataset. Its ``__getitems__`` is used if there is one.
        split: The split of a step, with this worker's part.
        order: The order of the examples.
        collate_fn: Makes a batch of a list of examples; torch's default if None.
        num_workers: Loader processes. They live as long as the iterator, over all
            epochs. If the dataset was changed, they start anew at the end of an epoch.
        device: Where the batches are used. To a GPU those of loader processes are
            copied ahead.
        sampler: Draws the indices of each epoch, in place of ``order``'s permutations.
    """

    kind = "map"

    def __init__(
        self,
        dataset: Any,
        split: BatchSplit,
        order: ExampleOrder,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: torch.device | None = None,
        sampler: ExampleSampler | None = None,
    ) -> None:
        check_count("num_workers", num_workers, 0)
        self._dataset, self._size = dataset, len(dataset)
        self._seen_in: tuple[int, tuple[list[int], object] | None] = 0, None
        """The epoch in which the dataset was last looked at, and its state as loader
        processes have it.
        """
        self._sampled = (
            None if sampler is None else SampledOrder(sampler, len(dataset), order.seed)
        )
        drawn = (
            (len(dataset), None)
            if self._sampled is None
            else (self._sampled.length, self._sampled.indices)
        )
        self.sampler = ExampleStream(drawn[0], split, order, epoch_indices=drawn[1])
        self.length = self.sampler.length
        self._drop_last = order.drop_last
        self._fetch: Fetch = Examples(
            dataset, stacked if collate_fn is None else collate_fn, self.length
        )
        if collate_fn is None and has_plain_rows(dataset):
            self._fetch = Rows(dataset.tensors)
        self._requests = _Requests(
            self.sampler, to_processes=num_workers > 0, collated=collate_fn is not None
        )
        self._loader: DataLoader[Any] | None = None
        if num_workers:
            if device is not None and device.type == "cuda":
                self._copies = CopiesAhead(device)
            self._loader = DataLoader(
                Seeded(self._fetch, order.seed),
                sampler=self._requests,
                batch_size=None,
                collate_fn=_identity if self._copies is None else Pinnable,
                num_workers=num_workers,
                pin_memory=self._copies is not None,
                generator=loader_generator(order.seed),
            )

    @property
    def position(self) -> int:  # type: ignore[override]
        return self.sampler.position

    def _stream(self) -> Generator[MicroBatch, None, None]:
        # This method is no generator, so that the position is read now and not at the
        # first next().
        return self._until_changed(self._begun())

    def _begun(self) -> Iterator[Any]:
        """Return the batches from ``position`` on, from processes that have the
        dataset as it is now.
        """
        self._check_length()
        self._seen_in = (
            self.epoch,
            None if self._loader is None else state_of(self._fetch),
        )
        fetched = (self._fetch(*request) for request in iter(self._requests))
        batches = fetched if self._loader is None else iter(self._loader)
        return batches if self._copies is None else self._copies.ahead(batches)

    def _until_changed(
        self, batches: Iterator[Any]
    ) -> Generator[MicroBatch, None, None]:
        while True:
            yield from self._requests.answered(batches, self._has_changed)
            del batches  # ends the processes
            batches = self._begun()

    def _has_changed(self) -> bool:
        """Return whether an epoch has begun for which loader processes lack a change
        of the dataset. Check its length.
        """
        epoch, state = self._seen_in
        if epoch == self.epoch:
            return False
        self._check_length()
        self._seen_in = self.epoch, state
        return state is not None and state_of(self._fetch)[0] != state[0]

    def _check_length(self) -> None:
        if len(self._dataset) != self._size:
            raise ValueError(
                f"The dataset has {len(self._dataset)} examples in epoch {self.epoch}, "
                f"and had {self._size} when the run was built. Build a new run with "
                "it: Run(..., starting_step=...). Or give data without a length, and "
                "dataset_length=."
            )

    def commit(self) -> None:
        self.sampler.position = self.sampler.next_position(self.sampler.position)

    def set_split(self, split: BatchSplit) -> None:
        self.sampler.split = split
        self._requests.restart()

    @property
    def compared(self) -> int:  # type: ignore[override]
        return 0 if self._sampled is None else self._sampled.digest(self.epoch) >> 32

    def differ(self, difference: Callable[[str], str]) -> None:
        assert self._sampled is not None
        how = difference(
            f"{self._sampled.indices(self.epoch)[:8].tolist()} ... (digest "
            f"{self.compared})"
        )
        self._sampled.refuse(
            f"yields in epoch {self.epoch} {how}, and workers share out one order"
        )

    def _order_fields(self) -> dict[str, Any]:
        sampler = None if self._sampled is None else self._sampled.name
        return {**asdict(self.sampler.order), "length": self.length, "sampler": sampler}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return (
            state
            if self._sampled is None
            else {**state, "order": [self.epoch, self._sampled.digest(self.epoch)]}
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._sampled is not None:
            self._sampled.expect(*state_dict["order"])

    def _resume(self, position: int) -> None:
        self.sampler.position = position


def _identity(batch: Any) -> Any:
    return batch


_Request = tuple[int, Any]
"""The position of a micro-batch in the stream, and the indices of its examples:
int64, or a list for another process.
"""


class _Requests(Sampler[_Request]):
    """Requests the sampler's micro-batches from a loader, and keeps a list of the
    pending requests.

    A loader with processes prefetches. When the split changes, pending micro-batches
    that also come next under the new split are kept, as where only the number of passes
    changes. Others are discarded on arrival and requested again. So the loader's
    processes survive a change of split.

    Args:
        sampler: Its position and split hold for the next request.
        to_processes: Give the indices as lists. A tensor would be sent to a process in
            shared memory.
        collated: Whether a function of the user makes the batches, which may leave out
            examples.
    """

    def __init__(
        self, sampler: ExampleStream, *, to_processes: bool, collated: bool
    ) -> None:
        self._sampler = sampler
        self._to_processes = to_processes
        self._collated = collated
        self._parts: Iterator[MicroBatch] = iter(())
        self._pending: deque[MicroBatch | None] = deque()  # None: discard on arrival

    def __iter__(self) -> Iterator[_Request]:
        # This method is no generator, so that the position is read now and not at the
        # first next().
        self._pending.clear()
        self._parts = self._sampler.parts(self._sampler.position)
        return self._requests()

    def _requests(self) -> Iterator[_Request]:
        while True:
            part = next(self._parts)
            self._pending.append(part)
            indices = self._sampler.indices(part)
            yield part.position, indices.tolist() if self._to_processes else indices

    def restart(self) -> None:
        """Continue from the sampler's position and split after they have changed."""
        self._parts = self._sampler.parts(self._sampler.position)
        kept = True
        for i, pending in enumerate(self._pending):
            if kept:
                wanted = next(self._parts)
                kept = pending is not None and pending.same_examples(wanted)
                if not kept:
                    self._parts = itertools.chain([wanted], self._parts)
            self._pending[i] = wanted if kept else None

    def answered(
        self, batches: Iterator[Any], ends: Callable[[], bool]
    ) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches that the loader returns, in the order of the
        requests, until a step after which ``ends()``.
        """
        for batch in batches:
            part = self._pending.popleft()
            if part is not None:
                if self._collated:
                    _check_size(batch, part.examples)
                yield MicroBatch(
                    batch, part.examples, part.weight, part.pass_index, part.is_last
                )
                if part.is_last and ends():
                    return


def _check_size(batch: Any, size: int) -> None:
    """Check that a user's ``collate_fn`` has left out no example of a micro-batch, as
    far as the batch shows.

    A batch with ``size`` along the first or second dimension of anything, or with
    tensors of several lengths, is right: examples may lie along the second dimension,
    or in one long row.

    Raises:
        ValueError: All tensors of the batch have the same and too small length.
    """
    lengths = set[int]()
    found = False

    def look(part: Any) -> None:
        nonlocal found
        shape = getattr(part, "shape", None)
        if shape is not None:
            lengths.update(shape[:1])
            found = found or size in tuple(shape[:2])
        elif isinstance(part, Mapping):
            for value in part.values():
                look(value)
        elif isinstance(part, list | tuple):
            found = found or len(part) == size
            for value in part:
                look(value)

    look(batch)
    if not found and len(lengths) == 1 and max(lengths) < size:
        raise ValueError(
            f"collate_fn returned a batch of {max(lengths)} examples for a micro-batch "
            f"of {size}, and the gradients would have wrong weights. It must return as "
            "many examples as it gets: put another example in place of an unreadable "
            "one, or leave those out of the dataset (torch.utils.data.Subset)."
        )


def loader_generator(seed: int, *parts: int) -> torch.Generator:
    """Return a generator for a ``DataLoader``, which otherwise draws its base seed from
    the *global* one at each iter().

    A resumed run makes one iterator more than a run that was never stopped. If it drew
    from the global generator, it would differ from there on.

    Args:
        seed: Seed of the run.
        parts: Further numbers of the seed, such as the rank.
    """
    return torch.Generator().manual_seed(stable_seed("loader", seed, *parts))
