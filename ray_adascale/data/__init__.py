"""The choice of a source for a dataset. Positions are counted in examples, never in
steps, batches or workers.

The loop reads micro-batches from a ``BatchSource``. ``MapSource`` reads a map-style
dataset in an order that is a function of (seed, epoch) alone. So over the committed
steps no example is repeated or left out within an epoch, on any number of workers.
``IterableSource`` reads data that has an order of its own, and restarts its pass after
a resume. ``make_source`` chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._torch import leaves
from .._warn import warn_at_user
from .fetch import stacked
from .head import examples_of
from .iterables import (
    IterableSource,
    RayDataBatches,
    even_size,
    fixed_batches,
    unshared,
)
from .order import BatchSplit, ExampleOrder
from .sampling import ExampleSampler
from .source import BatchSource, MapSource, loader_generator


def make_source(
    dataset: Any,
    split: BatchSplit,
    order: ExampleOrder,
    *,
    collate_fn: Callable[..., Any] | None = None,
    num_workers: int = 0,
    device: torch.device | None = None,
    length: int | None = None,
    splits_change: bool = False,
    sampler: ExampleSampler | None = None,
) -> BatchSource:
    """Return the source for a dataset.

    ===============================================  ===========================================================
    has ``iter_torch_batches`` (a Ray Data shard)    passes over this worker's shard
    has ``__getitem__`` and ``__len__``              ``MapSource``; so a list is a list of *examples*
    bare ``IterableDataset``                         passes over its examples, batched by a ``DataLoader``
    any other iterable, e.g. a ``DataLoader``        passes over its *batches* of B / (workers × passes) examples
    ===============================================  ===========================================================

    Args:
        dataset: As above. Data other than a map-style dataset must be this worker's own
            share.
        split: The split of a step, with this worker's part.
        order: The order of a map-style dataset's examples. Other data have an order of
            their own.
        collate_fn: Makes a batch of a list of examples; for a Ray Data shard as in
            ``iter_torch_batches``.
        num_workers: Loader processes, for datasets that are batched here.
        device: Where the batches are used. For a GPU those of loader processes are
            pinned.
        length: Examples per epoch over all workers, for data other than map-style
            datasets.
        splits_change: Whether the split will change as the run goes on. Only a
            map-style dataset supports that.
        sampler: Draws the indices of each epoch of a map-style dataset.

    Raises:
        ValueError: An argument is out of range, or this kind of dataset does not
            support it.
    """
    ray_data = hasattr(dataset, "iter_torch_batches")
    bare_iterable = isinstance(dataset, IterableDataset)
    if is_map_style(dataset):
        if length is not None and length != len(dataset):
            raise ValueError(
                f"Invalid {length=}: the dataset has {len(dataset)} examples. Leave "
                "length out."
            )
        batched = (
            examples_of(dataset[0], sys.maxsize)
            if isinstance(dataset, list | tuple) and dataset
            else None
        )
        entry, rows = batched or (None, 0)
        if (
            rows > 1
            and rows in (*split.micro_batch_sizes, split.global_batch_size)
            and len([*leaves(entry)]) > 1
        ):
            warn_at_user(
                f"Each of the {len(dataset)} entries of the {type(dataset).__name__} "
                f"counts as one example, and has tensors of {rows} rows, as many as a "
                "batch. If they are batches, give DataLoader(entries, batch_size=None)."
            )
        return MapSource(
            dataset,
            split,
            order,
            collate_fn=collate_fn,
            num_workers=num_workers,
            device=device,
            sampler=sampler,
        )
    if sampler is not None:
        raise ValueError(
            f"Invalid sampler: a {type(dataset).__name__} has an order of its own. A "
            "sampler needs a dataset with __getitem__ and __len__; with a DataLoader, "
            "give its dataset (loader.dataset)."
        )

    if splits_change:
        raise ValueError(fixed_batches(dataset))
    batch_size = even_size(split)
    if num_workers and not bare_iterable:
        raise ValueError(
            f"Invalid {num_workers=}: a {type(dataset).__name__} loads batches itself. "
            "Leave it out."
        )

    batches: Iterable[Any] = dataset
    if ray_data:
        batches = RayDataBatches(dataset, batch_size, collate_fn)
    elif bare_iterable:
        batches = DataLoader(
            dataset,
            batch_size=batch_size,
            drop_last=True,
            collate_fn=stacked if collate_fn is None else collate_fn,
            num_workers=num_workers,
            pin_memory=num_workers > 0
            and collate_fn is None
            and device is not None
            and device.type == "cuda",
            # Without the rank, examples drawn at random in loader processes would be
            # equal on all workers: no noise at all.
            generator=loader_generator(order.seed, split.rank),
        )
    elif collate_fn is not None:
        raise ValueError(
            f"Invalid collate_fn: a {type(dataset).__name__} yields batches that are "
            "collated already. Give the collate_fn to the data loader, or give the "
            "dataset itself."
        )
    elif (
        isinstance(dataset, DataLoader)
        and split.world_size > 1
        and (their := unshared(dataset)) is not None
    ):
        warn_at_user(
            f"{split.world_size} workers were given a DataLoader with a {their}, which "
            "does not depend on the rank: unless each worker's dataset or seed is its "
            "own, all go through the same examples. Give the dataset itself "
            "(loader.dataset), which also resumes exactly, or a sampler such as "
            "DistributedSampler."
        )
    # Data that is batched here has no smaller batches, so the size is known for any
    # collate_fn.
    known_size = (lambda _: batch_size) if ray_data or bare_iterable else None
    return IterableSource(batches, split, length=length, examples_of=known_size)


def is_map_style(dataset: Any) -> bool:
    """Return whether a dataset has examples by index, so that batches of any size
    can be made of it here.
    """
    iterates = hasattr(dataset, "iter_torch_batches") or isinstance(
        dataset, DataLoader | IterableDataset
    )
    return (
        not iterates and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )
