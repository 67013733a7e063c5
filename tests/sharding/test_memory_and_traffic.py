"""What a worker holds under ShardedDataParallel, and what it sends in a step.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_adascale import OSS, ShardedDataParallel
from ray_adascale.sharding import collectives

from ..uneven import assert_agree, weights
from .against_ddp import OPTIMIZERS, ROUNDING, Pool, wrapped


def _held(name: str) -> dict[str, int]:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
    optimizer = OSS.wrap(OPTIMIZERS[name](model), bucket_numel=2000)
    ddp = ShardedDataParallel(model, optimizer)
    for _ in range(2):
        ddp(torch.randn(2, 40)).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        buckets = ddp._reduction.buckets
        shards = [bucket.shard for bucket in buckets if bucket.held]
        gradients = {
            f.tensor.grad.untyped_storage().data_ptr() for f in optimizer.fragments
        }
        assert gradients <= {shard.untyped_storage().data_ptr() for shard in shards}
        held = sum(shard.nbytes for shard in shards)
        optimizer.step()
        assert all(f.tensor.grad is None for f in optimizer.fragments)
    return {
        "gradient": held,
        "state": sum(
            v.numel() * v.element_size()
            for s in optimizer.state.values()
            for v in s.values()
        ),
        # AdamW's counts, one a fragment
        "steps": 4 * sum("step" in s for s in optimizer.state.values()),
        "all": 4 * sum(p.numel() for p in model.parameters()),
        "params": len(list(model.parameters())),
        "buckets": len(buckets),
        "largest": max(4 * bucket.bucket.numel for bucket in buckets),
        "scratch": sum(
            buffer.nbytes
            for free in ddp._reduction._memory._free.values()
            for buffer in free
        ),
    }


@pytest.mark.also_simulated("2")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_worker_holds_its_share_of_gradients_and_state(
    pool: Pool, world_size: int
) -> None:
    results = pool(world_size).run(_held, "adamw")
    whole, buckets = results[0]["all"], results[0]["buckets"]
    assert buckets > 2
    for result in results:
        # Beside the share: padding of the parameters to 64 bytes and of the last shard
        # to a multiple of that, and a flag per parameter that has an end in the shard,
        # in every bucket.
        padding = 64 * (result["params"] + buckets)
        flags = 4 * 2 * result["params"]
        assert result["gradient"] <= whole / world_size + padding + flags
        assert result["state"] - result["steps"] <= 2 * (whole / world_size + padding)
        # Memory that is used again: two buckets under way, each with what was sent and
        # what was received, and one that fills.
        assert result["scratch"] <= 5 * (result["largest"] + flags + padding)
    assert sum(r["gradient"] for r in results) >= whole
    assert sum(r["state"] - r["steps"] for r in results) == 2 * whole


def test_whole_parameters_are_balanced_to_the_largest(pool: Pool) -> None:
    results = pool(3).run(_held, "lars")
    assert sum(r["state"] for r in results) == results[0]["all"]
    assert max(r["state"] for r in results) <= results[0]["all"] / 3 + 4 * 1600


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.scale + self.nothing.sum()


def _few_parameters(name: str) -> tuple[Tensor, Tensor, list[int]]:
    ends = []
    for sharded in (False, True):
        model = Few().double()
        ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(20):
            optimizer.zero_grad()
            (
                ddp(torch.randn(4, 2, generator=generator, dtype=torch.float64)) + 1
            ).square().mean().backward()
            optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1], [f.numel for f in optimizer.fragments]


@pytest.mark.parametrize("name", ["momentum", "lars"])
def test_more_ranks_than_elements(pool: Pool, name: str) -> None:
    results = pool(4).run(_few_parameters, name)
    assert_agree(results, ROUNDING)
    assert sum(n for *_, held in results for n in held) == 3


# torch 2.13 gave both another name.
SCATTER = (
    "reduce_scatter_single"
    if hasattr(dist, "reduce_scatter_single")
    else "reduce_scatter_tensor"
)


GATHER = (
    "all_gather_single"
    if hasattr(dist, "all_gather_single")
    else "all_gather_into_tensor"
)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this worker receives in torch.distributed's collectives."""
    counts: dict[str, int] = {}
    names = [
        "all_to_all_single",
        "irecv",
        "broadcast",
        "all_reduce",
        "reduce",
        SCATTER,
        GATHER,
    ]
    real = {name: getattr(dist, name) for name in names}
    world = dist.get_world_size()

    def count(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nbytes = args[0].nbytes
            if name == "all_to_all_single" or name == GATHER:
                nbytes = nbytes // world * (world - 1)
            elif name == SCATTER:
                nbytes *= world - 1
            elif name == "broadcast":
                nbytes = 0 if args[1] == dist.get_rank() else nbytes
            elif name == "reduce":
                nbytes = nbytes * (world - 1) if args[1] == dist.get_rank() else 0
            elif name != "irecv":
                nbytes = 2 * nbytes * (world - 1) // world
            counts[name] = counts.get(name, 0) + nbytes
            return real[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, count(name))
    try:
        yield counts
    finally:
        for name in names:
            setattr(dist, name, real[name])


def _traffic(as_nccl: bool, name: str) -> tuple[dict[str, int], int, Tensor]:
    """Bytes of one step, those of the gradient, and the weights after some steps."""
    backend = collectives._backend
    if as_nccl:
        # gloo has its collectives too, if slower
        collectives._backend = lambda group, device: "nccl"
    try:
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)]).double()
        optimizer = OSS.wrap(OPTIMIZERS[name](model), bucket_numel=2000)
        ddp = ShardedDataParallel(model, optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            with counted() as counts:
                ddp(
                    torch.randn(2, 40, generator=generator, dtype=torch.float64)
                ).square().mean().backward()
                optimizer.step()
        return counts, 8 * sum(p.numel() for p in model.parameters()), weights(model)
    finally:
        collectives._backend = backend


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["momentum", "lars"])
def test_a_step_moves_as_much_as_one_all_reduce(
    pool: Pool, world_size: int, name: str
) -> None:
    gloo = pool(world_size).run(_traffic, False, name)
    nccl = pool(world_size).run(_traffic, True, name)
    for results, kinds in (
        (gloo, {"all_to_all_single", "irecv"}),
        (nccl, {SCATTER, GATHER} if name == "momentum" else {"reduce", "broadcast"}),
    ):
        total = 0
        for counts, whole, _ in results:
            assert set(counts) == kinds
            total += sum(counts.values())
            if name == "momentum":  # balanced: on each worker what an all-reduce moves
                assert sum(counts.values()) == pytest.approx(
                    2 * whole * (world_size - 1) / world_size, rel=0.02
                )
        assert total == pytest.approx(2 * whole * (world_size - 1), rel=0.02)
    for (_, _, ours), (_, _, theirs) in zip(gloo, nccl, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)
