"""The order that needs no list of all examples: a permutation, even, and pinned.

Every test here has fixed seeds, so it fails always or never; the bounds are 4.5
standard deviations, of which chance goes beyond one time in 150,000.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ray_adascale.data import order
from ray_adascale.data.order import (
    BatchSplit,
    ExampleOrder,
    ExampleStream,
    epoch_order,
    keyed_order,
)
from ray_adascale.data.source import MapSource

PINNED = [82127524, 639465562, 405909408, 62925529, 35198800, 156374658]


def whole(length: int, epoch: int, seed: int = 0) -> np.ndarray:
    return keyed_order(np.arange(length), length, seed=seed, epoch=epoch)


@pytest.mark.parametrize(
    "length", [1, 2, 3, 4, 5, 9, 10, 99, 100, 101, 1000, 4096, 65_537, 1_000_003]
)
def test_it_is_a_permutation(length: int) -> None:
    for epoch in range(2):
        assert np.array_equal(np.sort(whole(length, epoch)), np.arange(length))


def test_it_depends_on_seed_and_epoch_alone_and_for_ever() -> None:
    assert not np.array_equal(whole(1000, 0), whole(1000, 1))
    assert not np.array_equal(whole(1000, 0), whole(1000, 0, seed=1))
    assert np.array_equal(
        keyed_order(np.array([[3, 7], [900, 3]]), 1000, seed=0, epoch=5),
        whole(1000, 5)[[[3, 7], [900, 3]]],
    )
    # Checkpoints hold a position in it: these numbers may not change.
    assert keyed_order(np.arange(6), 10**9, seed=0, epoch=0).tolist() == PINNED


def test_each_example_is_equally_likely_at_each_place() -> None:
    # 3,000 epochs of 144 examples, 12 × 12 blocks of examples and places: χ² with 11·11
    # degrees of freedom.
    length, epochs, blocks = 144, 3000, 12
    counts = np.zeros((blocks, blocks))
    for epoch in range(epochs):
        np.add.at(
            counts,
            (
                whole(length, epoch) * blocks // length,
                np.arange(length) * blocks // length,
            ),
            1,
        )
    expected = epochs * length / blocks**2
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (blocks - 1) ** 2
    # An epoch has each example once, so counts vary less than if each were drawn: by (1
    # − 1/12)·N/(N − 1).
    assert abs(chi2 - freedom) < 4.5 * np.sqrt(2 * freedom)


# ---- in a source ---------------------------------------------------------------------


class Numbers:
    """A dataset whose examples are their own indices; it holds nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        return i


def source(length: int, **changes: object) -> MapSource:
    return MapSource(Numbers(length), BatchSplit(64), ExampleOrder(seed=5, **changes))  # type: ignore[arg-type]


def steps(made: MapSource, count: int) -> list[int]:
    seen: list[int] = []
    batches = iter(made)
    for _ in range(count):
        seen += next(batches).batch.tolist()
        made.commit()
    return seen


def test_a_large_dataset_is_read_in_it_and_a_small_one_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "KEYED_FROM", 150)
    # 150 examples in steps of 64: the fifth begins in the second epoch and ends in the
    # third.
    stream = np.concatenate([whole(150, epoch, seed=5) for epoch in range(3)]).tolist()
    assert steps(source(150), 5) == stream[:320]
    assert steps(source(149), 2) == epoch_order(149, seed=5, epoch=0)[:128].tolist()
    assert steps(source(150, shuffle=False), 3) == [*range(150), *range(42)]


def test_a_run_over_a_billion_examples_holds_no_list_of_them() -> None:
    tracemalloc.start()
    try:
        for shuffle in (True, False):
            sampler = ExampleStream(
                10**9,
                BatchSplit(256),
                ExampleOrder(shuffle=shuffle),
                position=999_999_900,
            )
            parts = sampler.parts(sampler.position)
            first, second = (sampler.indices(next(parts)).tolist() for _ in range(2))
            assert len({*first, *second}) > 500  # it runs on into the next epoch
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000
