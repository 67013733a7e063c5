"""Datasets that change from epoch to epoch: by ``set_epoch``, or by the loop, with
loader processes too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from ray_adascale.data.fetch import state_of
from ray_adascale.data.order import BatchSplit, ExampleOrder
from ray_adascale.data.source import MapSource

from .stream import take


class Aging(Dataset[tuple[int, int, float, int]]):
    """Its examples say in which epoch they were fetched, how difficult they are, and
    by which process.
    """

    def __init__(self, size: int = 10) -> None:
        self.size, self.epoch, self.augmentation = size, -1, {"strength": 0.0}

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int, float, int]:
        return index, self.epoch, self.augmentation["strength"], os.getpid()


class Held(Dataset[Any]):
    """A wrapper of one's own, with any name for what it holds, and a way back to
    itself.
    """

    def __init__(self, base: Any) -> None:
        self.base, self.whole = base, self

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        return self.base[index]


class Stacked(StackDataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["data"]

    __getitems__ = None  # type: ignore[assignment]


class Batched(Aging):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, int, float, int]]:
        return [self[index] for index in indices]


def source_of(dataset: Any, workers: int, batch: int = 4) -> MapSource:
    return MapSource(dataset, BatchSplit(batch), ExampleOrder(), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
# a micro-batch has examples of two epochs, or of four
@pytest.mark.parametrize("batch", [4, 25])
@pytest.mark.parametrize(
    "dataset",
    [
        Aging(),
        Batched(),
        Subset(Aging(20), range(10)),  # type: ignore[list-item]
        ConcatDataset([Aging(4), Aging(6)]),
        Held(Aging()),
        Stacked(data=Aging()),
    ],
    ids=["getitem", "getitems", "subset", "concat", "own wrapper", "stacked"],
)
def test_set_epoch_comes_before_the_first_example_of_an_epoch(
    dataset: Any, batch: int, workers: int
) -> None:
    source = source_of(dataset, workers, batch)
    for start in (0, 10):  # a resume in mid-epoch
        source.load_state_dict({**source.state_dict(), "position": start})
        epochs = [int(e) for m in take(source, 200 // batch) for e in m.batch[1]]
        assert epochs == [(start + i) // 10 for i in range(len(epochs))]
    source.close()


def test_processes_start_anew_after_an_epoch_in_which_the_loop_changed_the_dataset() -> (
    None
):
    data = Aging(8)
    data.set_epoch = None  # type: ignore[assignment, method-assign] # a dataset without one
    source = source_of(data, workers=1)
    processes, strengths = [], []
    for i, micro_batch in zip(range(10), source, strict=False):
        _, _, strength, process = micro_batch.batch
        strengths += strength.unique().tolist()
        processes += process.unique().tolist()
        source.commit()
        if i in (1, 4):  # at the end of epoch 0, and within epoch 2
            data.augmentation["strength"] += 1
    source.close()
    # As with a DataLoader, whose processes start in each epoch.
    assert strengths == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert len({*processes}) == 3
    assert processes == [processes[0]] * 2 + [processes[2]] * 4 + [processes[6]] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_grows_is_refused_as_an_epoch_begins(workers: int) -> None:
    data = Aging(8)
    source = source_of(data, workers)
    taken = 0
    with pytest.raises(
        ValueError, match=r"24 examples in epoch 1, and had 8 .*starting_step=\.\.\."
    ):
        for _ in source:
            taken += 1
            source.commit()
            data.size = 24
    assert taken == 2
    source.close()
    data.size = 8
    built_before = source_of(data, workers)
    data.size = 24
    with pytest.raises(ValueError, match="24 examples in epoch 0, and had 8"):
        iter(built_before)


class Slots:
    __slots__ = ("strength",)


def variable() -> tuple[Callable[[], int], Callable[[], None]]:
    value = 0

    def change() -> None:
        nonlocal value
        value += 1

    return lambda: value, change


CHANGES = (
    "",
    "number",
    "within",
    "name",
    "tensor",
    "array",
    "large array",
    "list",
    "deep in a list",
    "slot",
    "variable",
)


def change(what: str, data: Any) -> None:
    if what == "number":
        data.epoch += 1
    elif what == "within":
        data.augmentation["strength"] = 0.5
    elif what == "name":
        data.augmentation["other"] = 0.0
    elif what == "tensor":
        data.weights[3] = 1
    elif what == "array":
        data.array[3] = 1
    elif what == "large array":
        data.large[777, 5] = 1
    elif what == "deep in a list":
        data.many[50_000] = "x"
    elif what == "slot":
        data.slots.strength = 0.5
    elif what == "variable":
        data.set_variable()
    elif what == "list":
        data.many.append("x")
    elif what == "object":
        data.weights = data.weights.clone()


@pytest.mark.parametrize("what", [*CHANGES, "object"])
def test_a_change_shows_in_the_state_of_a_dataset(what: str) -> None:
    data: Any = Aging()
    data.weights, data.array, data.many = torch.zeros(5), np.zeros(5), ["a"] * 100_000
    data.large, data.slots, (data.of_variable, data.set_variable) = (
        np.zeros((1000, 10)),
        Slots(),
        variable(),
    )
    data.itself, data.function, data.unreadable = data, lambda: unset, open(os.devnull)  # noqa: SIM115
    whole = Subset(data, range(3))
    before = state_of(whole)
    change(what, data)
    assert (state_of(whole)[0] == before[0]) == (what == "")
    assert len(before[0]) < 10_000
    data.unreadable.close()
    unset = 0


def test_processes_live_over_all_epochs_of_a_dataset_that_is_not_changed() -> None:
    source = source_of(Aging(8), workers=1)
    processes = set()
    for _, micro_batch in zip(range(8), source, strict=False):
        processes |= {*micro_batch.batch[3].tolist()}
        source.commit()
    source.close()
    assert len(processes) == 1
