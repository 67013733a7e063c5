"""Reductions to owners and gathers of shards, against plain sums, on every way that they may take."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ray_adascale.sharding import collectives
from ray_adascale.sharding.collectives import Buffers, Reduction, gather_shards

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def summand(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def bounds_of(kind: str, world_size: int, numel: int) -> list[int]:
    """Who gets what: equal shards, unequal ones, some empty, all to one."""
    return {
        "equal": [numel // world_size * r for r in range(world_size + 1)],
        "unequal": [0, *[numel * r * r // world_size**2 for r in range(1, world_size)], numel],
        "empty": [0, *[numel // 2] * (world_size - 1), numel],
        "one": [0] * world_size + [numel],
        "nothing": [0] * (world_size + 1),
    }[kind]


def _reduces(backend: str | None) -> dict[str, list[torch.Tensor]]:
    """This worker's sums; each compared with the plain one, and put together with the others'."""
    rank, world = dist.get_rank(), dist.get_world_size()
    real = collectives._backend
    if backend is not None:
        collectives._backend = lambda group, device: backend
    wholes: dict[str, list[torch.Tensor]] = {}
    try:
        buffers = Buffers()
        for dtype in DTYPES:
            if backend is not None and dtype not in (torch.float32, torch.float64):
                continue
            for kind in ("equal", "unequal", "empty", "one", "nothing"):
                numel = 12 * 41
                bounds = bounds_of(kind, world, numel)
                numel = bounds[-1]
                everyone = [summand(r, numel, dtype) for r in range(world)]
                a, b = bounds[rank], bounds[rank + 1]
                # In the order of ranks, in the precision of the sum kernel, rounded once.
                wide = torch.float32 if dtype.itemsize == 2 else dtype
                expected = everyone[0][a:b].to(wide)
                for other in everyone[1:]:
                    expected = expected + other[a:b].to(wide)
                expected = expected.to(dtype)
                works = [Reduction(everyone[rank].clone(), bounds, None, buffers) for _ in range(2)]  # two under way
                outs = [torch.full((b - a,), 7, dtype=dtype) for _ in works]
                for work, out in zip(works, outs, strict=True):
                    work.wait(out)
                if backend is None:
                    assert torch.equal(outs[0], expected), (dtype, kind)
                else:
                    torch.testing.assert_close(outs[0], expected)
                assert torch.equal(outs[0], outs[1])
                # What one worker has goes to all.
                flat = torch.full((numel,), -1, dtype=dtype)
                shards = [flat[x:y] for x, y in itertools.pairwise(bounds)]
                shards[rank].copy_(outs[0])
                gather_shards([(flat, bounds)], None)
                assert torch.equal(flat[a:b], outs[0])
                wholes.setdefault(f"{dtype}", []).append(flat)
        if backend is None:
            return wholes
        return {}
    finally:
        collectives._backend = real


@pytest.mark.also_simulated("2")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_worker_gets_the_sum_of_its_shard_and_all_get_the_whole(pool: Pool, world_size: int) -> None:
    results = pool(world_size).run(_reduces, None)
    for result in results:
        assert set(result) == {str(dtype) for dtype in DTYPES}
        for name, wholes in result.items():
            for whole, first in zip(wholes, results[0][name], strict=True):
                assert torch.equal(whole, first)
            # Bit for bit the same sum, whoever owned it.
            for whole in wholes[1:-1]:
                n = min(len(whole), len(wholes[0]))
                assert torch.equal(whole[:n], wholes[0][:n])


@pytest.mark.parametrize("backend", ["nccl", "other"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ways_of_other_backends(pool: Pool, world_size: int, backend: str) -> None:
    """As NCCL would be called; gloo has the same collectives."""
    pool(world_size).run(_reduces, backend)


def _other_dtype() -> None:
    """What travels in half precision is summed in full."""
    rank, world = dist.get_rank(), dist.get_world_size()
    bounds = bounds_of("equal", world, 12)
    out = torch.empty(12 // world)
    Reduction(torch.full((12,), 2049.0 if rank else 1.0).half(), bounds, None, Buffers()).wait(out)
    assert torch.equal(out, torch.full((12 // world,), 1 + 2048.0 * (world - 1)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_into_another_dtype(pool: Pool, world_size: int) -> None:
    pool(world_size).run(_other_dtype)


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
            Reduction(torch.arange(5.0) * (rank + 1), [0, 2, 5], group, Buffers()).wait(out)
        finally:
            collectives._backend = real
        assert torch.equal(out, 3 * torch.arange(5.0)[2 * rank : 2 + 3 * rank])
        flat = torch.full((5,), float(rank))
        gather_shards([(flat, [0, 2, 5])], group)
        assert flat.tolist() == [0, 0, 1, 1, 1]


def test_ranks_of_a_sub_group_are_not_global_ones(pool: Pool) -> None:
    pool(3).run(_sub_group)
