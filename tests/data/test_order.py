"""The order of examples, and how steps cut it: put together, what the workers see is
the stream, word for word.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_adascale.data.order import (
    BatchSplit,
    ExampleOrder,
    ExampleStream,
    epoch_order,
    split_evenly,
)

from .stream import stream


def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch() -> None:
    orders = {
        (s, e): tuple(epoch_order(50, seed=s, epoch=e).tolist())
        for s in range(4)
        for e in range(4)
    }
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 16
    before = torch.get_rng_state()
    assert tuple(epoch_order(50, seed=1, epoch=2).tolist()) == orders[1, 2]
    assert torch.equal(before, torch.get_rng_state())
    assert epoch_order(50, seed=np.int64(1), epoch=2).tolist() == list(orders[1, 2])  # type: ignore[arg-type]


def test_the_order_is_the_committed_one() -> None:
    # Checkpoints hold a position in this order. If torch changes randperm, old
    # checkpoints resume elsewhere: say so.
    assert epoch_order(10, seed=0, epoch=0).tolist() == [9, 8, 2, 0, 6, 1, 4, 7, 3, 5]
    assert epoch_order(10, seed=0, epoch=1).tolist() == [6, 5, 2, 9, 0, 8, 4, 3, 7, 1]


@given(total=st.integers(0, 200), parts=st.integers(1, 50))
@settings(deadline=None)  # other work may share the machine
def test_an_even_split_puts_the_larger_parts_first(total: int, parts: int) -> None:
    sizes = split_evenly(total, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_one_iterator_runs_on_over_epochs_and_ignores_a_moved_position() -> None:
    sampler = ExampleStream(
        7, BatchSplit(4, rank=1, world_size=2, accumulation=2), ExampleOrder(seed=3)
    )
    parts = sampler.parts(sampler.position)
    sampler.position = 100  # what commit() does while a loader has prefetched
    seen = [sampler.indices(part).tolist() for part in itertools.islice(parts, 20)]
    expected = stream(7, 40, seed=3)
    assert seen == [
        [expected[4 * step + 2 * p + 1]] for step in range(10) for p in range(2)
    ]
    assert (
        sampler.indices(next(sampler.parts(100))).tolist()
        == stream(7, 102, seed=3)[101:]
    )


def test_a_batch_above_an_epoch_is_refused_where_its_rest_is_dropped() -> None:
    with pytest.raises(ValueError, match=r"an epoch has 10 examples.*drop_last=False"):
        ExampleStream(10, BatchSplit(11), ExampleOrder(drop_last=True))
