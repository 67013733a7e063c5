"""Reductions to owners into another dtype, and in a sub-group. ``test_sharded_ddp``
compares whole sums with DDP's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ray_adascale.sharding import collectives
from ray_adascale.sharding.collectives import (
    Buffers,
    Reduction,
    gather_shards,
    send_from_first,
)

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]


def _other_dtype() -> None:
    """What travels in half precision is summed in full."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty(12 // world)
    bounds = [12 // world * r for r in range(world + 1)]
    Reduction(
        torch.full((12,), 2049.0 if rank else 1.0).half(), bounds, None, Buffers()
    ).wait(out)
    assert torch.equal(out, torch.full((12 // world,), 1 + 2048.0 * (world - 1)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_into_another_dtype(pool: Pool, world_size: int) -> None:
    pool(world_size).run(_other_dtype)


def _sent() -> list[list[float]]:
    rank = float(dist.get_rank())
    tensors = [
        torch.full((2,), rank),
        torch.full((), rank + 10, dtype=torch.float64),
        torch.empty(0),
        torch.tensor([rank > 0]),
        torch.full((1, 2), rank + 20, dtype=torch.float64).t(),
        torch.full((3,), rank + 30),
    ]
    send_from_first(tensors)
    return [tensor.reshape(-1).tolist() for tensor in tensors]


def test_all_tensors_are_sent_from_the_first_worker(pool: Pool) -> None:
    sent = [[0.0] * 2, [10.0], [], [False], [20.0] * 2, [30.0] * 3]
    assert pool(2).run(_sent) == [sent, sent]


def _sub_group() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    rank = dist.get_rank(group)
    for fake in (None, "other"):
        real = collectives._backend
        if fake is not None:
            collectives._backend = lambda group, device: "other"
        try:
            out = torch.empty(2 + rank)
            Reduction(torch.arange(5.0) * (rank + 1), [0, 2, 5], group, Buffers()).wait(
                out
            )
        finally:
            collectives._backend = real
        assert torch.equal(out, 3 * torch.arange(5.0)[2 * rank : 2 + 3 * rank])
        flat = torch.full((5,), float(rank))
        gather_shards([(flat, [0, 2, 5])], group)
        assert flat.tolist() == [0, 0, 1, 1, 1]


def test_ranks_of_a_sub_group_are_not_global_ones(pool: Pool) -> None:
    pool(3).run(_sub_group)
