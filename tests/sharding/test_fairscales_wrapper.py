"""What FairScale's ShardedDataParallel has beside the reduction in the backward pass:
reduce(), sync_buffers(), attributes.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ray_adascale import OSS, AdaScale, ShardedDataParallel

from ..uneven import assert_agree, batches, compared, loss_of, weights
from .against_ddp import (
    OPTIMIZERS,
    SMALL,
    Pool,
    build,
    clip,
    default_dtype,
    default_tolerance,
    wrapped,
)


@compared
def _reduced_on_request(
    sharded: bool, name: str, passes: int, clip_at: float | None, idle: bool
) -> Tensor:
    """All passes under no_sync, then reduce(); DDP reduces in the last one."""
    rank, dtype = dist.get_rank(), default_dtype()
    model = build(dtype)
    ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded)
    data = iter(batches(8 * passes, rank, dtype))
    for step in range(8):
        optimizer.zero_grad()
        for i in range(passes):
            with ddp.no_sync() if sharded or i < passes - 1 else nullcontext():
                loss = loss_of(ddp, next(data))
                if idle and rank == 1 and step % 3 == 1:
                    (0 * loss).backward() if not sharded else None
                else:
                    loss.backward()
        if sharded:
            ddp.reduce()
            assert all(p.grad is None for p in model.parameters())
            assert all(f.tensor.grad is not None for f in optimizer.fragments)
            ddp.reduce()  # nothing is left
        if clip_at is not None:
            clip(model, optimizer, clip_at)
        optimizer.step()
    return weights(model)


@pytest.mark.also_simulated("lars-3-None-False-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "passes", "clip_at", "idle"),
    [
        ("momentum", 1, None, False),
        ("lars", 3, None, False),
        ("layers", 2, 0.01, False),
        ("momentum", 1, None, True),
    ],
)
def test_reduce_sends_what_no_sync_left(
    pool: Pool,
    world_size: int,
    name: str,
    passes: int,
    clip_at: float | None,
    idle: bool,
) -> None:
    # the norm is a sum over shards
    rounding = 1e-5 if clip_at is not None and world_size == 2 else 0.0
    results = pool(world_size).run(_reduced_on_request, name, passes, clip_at, idle)
    assert_agree(results, max(rounding, default_tolerance(world_size)))


def _after_a_reduced_pass(idle: tuple[int, ...]) -> Tensor:
    """A pass that was reduced, one that was not, reduce(): their sum. Rank 1 leaves
    out those passes that it is idle in.
    """
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = OSS.wrap(SGD(model.parameters(), lr=1.0))
    ddp = ShardedDataParallel(model, optimizer)
    start = weights(model)
    mine = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64) * (
        1 + dist.get_rank()
    )  # mean over two: 1.5 times as much
    if dist.get_rank() == 0 or 0 not in idle:
        ddp(mine).sum().backward()
    with ddp.no_sync():
        if dist.get_rank() == 0 or 1 not in idle:
            (10 * ddp(mine)).sum().backward()
        ddp.reduce()  # what it is asked for is done, here as well
    optimizer.step()
    return start - weights(model)


# Of rank 0, 1 + 10; of rank 1, twice that. The mean over two.
@pytest.mark.parametrize(
    ("idle", "times"), [((), 16.5), ((0,), 15.5), ((1,), 6.5), ((0, 1), 5.5)]
)
def test_reduce_adds_to_what_was_reduced_before(
    pool: Pool, idle: tuple[int, ...], times: float
) -> None:
    for moved in pool(2).run(_after_a_reduced_pass, idle):
        torch.testing.assert_close(
            moved, times * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        )


def _left_behind(clipped: bool) -> Tensor:
    """A pass that was reduced, one under no_sync() after it, and no reduce()."""
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = OSS.wrap(SGD(model.parameters(), lr=1.0))
    ddp = ShardedDataParallel(model, optimizer)
    mine = torch.ones(1, 3, dtype=torch.float64)
    for _ in range(2):
        ddp(mine).sum().backward()
        with ddp.no_sync():
            (10 * ddp(mine)).sum().backward()
        start = weights(model)
        with pytest.raises(
            RuntimeError,
            match=r"under no_sync\(\) after those that were reduced.*reduce\(\)",
        ):
            optimizer.clip_grad_norm(1.0) if clipped else optimizer.step()
        assert torch.equal(weights(model), start)
        ddp.zero_grad()
    # Both cleared, or sent: a step as any other.
    ddp(mine).sum().backward()
    with ddp.no_sync():
        (10 * ddp(mine)).sum().backward()
    ddp.reduce()
    optimizer.step()
    with ddp.no_sync():
        ddp(mine).sum().backward()
    optimizer.step()  # which sends what no pass has sent
    return start - weights(model)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_pass_that_would_be_left_out_of_the_step_is_refused(
    pool: Pool, clipped: bool
) -> None:
    for moved in pool(2).run(_left_behind, clipped):
        torch.testing.assert_close(moved, torch.full((3,), 12.0, dtype=torch.float64))


@compared
def _adascale(sharded: bool, passes: int, idle: bool) -> Tensor:
    """AdaScale under DDP, and under ShardedDataParallel with every pass in no_sync
    and reduce() after the last.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(torch.float64)
    inner: Any = OPTIMIZERS["kinds"](model)
    if sharded:
        inner = OSS.wrap(inner, bucket_numel=SMALL)
    ddp: Any = (
        ShardedDataParallel(model, inner) if sharded else DistributedDataParallel(model)
    )
    optimizer = AdaScale(
        inner, scale=5.0, num_gradients_to_accumulate=passes, smoothing=0.6
    )
    data = iter(batches(8 * passes, rank, torch.float64))
    trace = []
    for step in range(8):
        optimizer.zero_grad()
        for i in range(passes):
            with ddp.no_sync() if sharded or i < passes - 1 else nullcontext():
                loss = loss_of(ddp, next(data)) / passes
                if idle and rank == 1 and step % 3 == 1 and i == passes - 1:
                    (0 * loss).backward() if not sharded else None
                else:
                    loss.backward()
        if sharded:
            ddp.reduce()
            ones = torch.ones(1)
            # of the user's own: it must not meet one of AdaScale's
            dist.all_reduce(ones)
            assert ones == world
            ddp.reduce()
        optimizer.step()
        trace += [
            optimizer.gain(),
            optimizer.effective_steps,
            *optimizer.average_moments(),
        ]
    return torch.cat([weights(model), torch.tensor(trace, dtype=torch.float64)])


@pytest.mark.also_simulated("3-False")
@pytest.mark.parametrize(
    ("passes", "idle"), [(1, False), (3, False), (1, True), (2, True)]
)
def test_reduce_under_adascale_leaves_the_gains_of_ddp(
    pool: Pool, passes: int, idle: bool
) -> None:
    for plain, sharded in pool(2).run(_adascale, passes, idle):
        # as in test_sharded_adascale
        torch.testing.assert_close(sharded, plain, rtol=1e-8, atol=1e-10)


def _too_early() -> None:
    model = build()
    inner = OSS.wrap(OPTIMIZERS["momentum"](model))
    ddp = ShardedDataParallel(model, inner)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=3)
    with ddp.no_sync():
        loss_of(ddp, batches(1)[0]).backward()
    with pytest.raises(
        RuntimeError,
        match=r"^reduce\(\) after 1 of 3 backward passes.*set_num_gradients_to_accumulate",
    ):
        ddp.reduce()
    optimizer.zero_grad()


def test_reduce_between_the_passes_of_an_adascale_step_is_refused(pool: Pool) -> None:
    pool(2).run(_too_early)


def _left_of_one_of_two(left: int) -> list[list[float]]:
    """A pass that was reduced for both buckets, one under no_sync() that reaches one
    of them alone, and reduce().
    """
    model = nn.ModuleList([nn.Linear(3, 1, bias=False).double() for _ in range(2)])
    optimizer = OSS.wrap(SGD(model.parameters(), lr=1.0), bucket_numel=3)
    assert len(optimizer.buckets) == 2
    ddp = ShardedDataParallel(model, optimizer)
    start = [weights(part).clone() for part in model]
    mine = torch.full((1, 3), 1.0 + dist.get_rank(), dtype=torch.float64)
    sum(part(mine).sum() for part in model).backward()  # type: ignore[union-attr]
    with ddp.no_sync():
        (10 * model[left](mine)).sum().backward()
    ddp.reduce()
    optimizer.step()
    return [
        (was - weights(part)).tolist() for was, part in zip(start, model, strict=True)
    ]


@pytest.mark.parametrize("left", [0, 1])
def test_reduce_sends_what_is_left_of_any_bucket(pool: Pool, left: int) -> None:
    # The mean over ranks of 1 and 2 is 1.5; with the pass that was left, 11 times as
    # much.
    expected = [[1.5] * 3, [1.5] * 3]
    expected[left] = [16.5] * 3
    for moved in pool(2).run(_left_of_one_of_two, left):
        # Weights below one move by 16.5 and less: rounding of 2e-15.
        assert [pytest.approx(part, rel=1e-12) for part in expected] == moved


def _buffers(blocking: bool | None) -> Tensor:
    model = nn.BatchNorm1d(2)
    assert isinstance(model.running_mean, Tensor)
    ddp = ShardedDataParallel(
        model, OSS(model.parameters(), lr=0.1), sync_models_at_startup=False
    )
    model.running_mean += 10.0 * (1 + dist.get_rank())
    assert (
        ddp.sync_buffers() is None
        if blocking is None
        else ddp.sync_buffers(blocking=blocking) is None
    )
    return model.running_mean


@pytest.mark.parametrize("blocking", [None, False, True])
def test_sync_buffers_sends_those_of_rank_0(pool: Pool, blocking: bool | None) -> None:
    for world_size in (1, 2):
        for mean in pool(world_size).run(_buffers, blocking):
            assert mean.tolist() == [10.0, 10.0]


class _Counted(nn.Module):
    """Buffers of two dtypes, each worker's own; the last one stands alone in a
    module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.last = nn.Module()
        self.last.register_buffer("counts", torch.zeros(3))
        for buffer in self.buffers():
            buffer += 1 + dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def _of_a_subgroup(at: str) -> list[float]:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    model = _Counted()
    optimizer = OSS(model.parameters(), lr=0.1, group=group)
    ddp = ShardedDataParallel(model, optimizer, sync_models_at_startup=at == "startup")
    if at == "sync_buffers":
        ddp.sync_buffers()
    elif at == "forward":
        model.norm.momentum = 0.0  # running statistics stay
        ddp(torch.randn(4, 2))
    return [float(value) for buffer in model.buffers() for value in buffer.view(-1)]


@pytest.mark.parametrize("at", ["startup", "forward", "sync_buffers"])
def test_each_buffer_of_a_subgroup_becomes_that_of_its_first_worker(
    pool: Pool, at: str
) -> None:
    """Ranks 1 and 2: the first one of them is no rank 0, and has 2 more than a fresh
    model.
    """
    none, *results = pool(3).run(_of_a_subgroup, at)
    assert none == []
    batches = 3.0 if at == "forward" else 2.0  # num_batches_tracked
    assert results == [[2.0, 2.0, 3.0, 3.0, batches, 2.0, 2.0, 2.0]] * 2


def test_has_the_attributes_of_ddp_that_frameworks_look_at() -> None:
    model = build()
    ddp = ShardedDataParallel(model, OSS(model.parameters(), lr=0.1))
    assert ddp.device_type == "cpu"
    assert ddp.is_multi_device_module is False
    ddp.reduce()  # alone there is nothing to do
    ddp.sync_buffers()


def test_what_neither_has_is_reported_as_the_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.banana = "sweet"
    ddp = ShardedDataParallel(model, OSS(model.parameters(), lr=0.1))
    assert ddp.banana == "sweet"
    assert all(name.startswith("module.") for name in ddp.state_dict())  # as DDP's
    assert not hasattr(ddp, "orange")
    with pytest.raises(
        AttributeError, match=r"^'ShardedDataParallel' object has no attribute 'orange'"
    ) as info:
        _ = ddp.orange
    assert "Sequential" in str(info.value)  # where else it was looked for
    assert (info.value.name, info.value.obj) == ("orange", ddp)


def _second_order(accumulate: bool, adascale: bool) -> None:
    model = build()
    optimizer: Any = OSS.wrap(OPTIMIZERS["momentum"](model))
    ddp = ShardedDataParallel(model, optimizer)
    if adascale:
        optimizer = AdaScale(optimizer)
    start = weights(model)
    what = r"create_graph=True.*torch\.autograd\.grad.*DistributedDataParallel"
    with warnings.catch_warnings(), ddp.no_sync() if accumulate else nullcontext():
        # torch's own
        warnings.filterwarnings(
            "ignore", message=r"Using backward\(\) with create_graph=True"
        )
        with pytest.raises(RuntimeError, match=what):
            loss_of(ddp, batches(1)[0]).backward(create_graph=True)
    optimizer.zero_grad()
    loss_of(ddp, batches(1)[0]).backward()  # and goes on
    optimizer.step()
    assert not torch.equal(weights(model), start)


@pytest.mark.parametrize("adascale", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_with_a_graph_is_refused(
    pool: Pool, accumulate: bool, adascale: bool
) -> None:
    pool(2).run(_second_order, accumulate, adascale)
