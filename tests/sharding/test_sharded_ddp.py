"""ShardedDataParallel with OSS takes the steps of DDP with the plain optimizer; what it
refuses, and how it fails.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ray_adascale import OSS, AdaScale, ShardedDataParallel, ShardedDDP

from ..placement import here
from ..uneven import assert_agree, batches, compared, loss_of, weights
from .against_ddp import (
    OPTIMIZERS,
    SMALL,
    Pool,
    build,
    clip,
    default_dtype,
    default_tolerance,
)

STEPS = 20


@compared
def _run_both(
    sharded: bool,
    name: str,
    *,
    low: torch.dtype | None = None,
    accumulate: int = 1,
    sync_all: bool = False,
    clip_at: float | None = None,
    clear: str = "optimizer",
    frozen: bool = False,
    reduce_fp16: bool = False,
) -> Tensor:
    dtype = default_dtype()
    model = build(dtype, low)
    optimizer: Any = OPTIMIZERS[name](model)
    start = weights(model)
    if frozen:
        model.first.requires_grad_(False)
    if sharded:
        optimizer = OSS.wrap(optimizer, bucket_numel=SMALL)
        ddp: Any = ShardedDataParallel(model, optimizer, reduce_fp16=reduce_fp16)
    else:
        ddp = DistributedDataParallel(model)
    data = iter(
        batches(
            STEPS * accumulate, dist.get_rank(), dtype if low is None else torch.float32
        )
    )
    for step in range(STEPS):
        if frozen and step % 6 == 4:  # each half of the model in turn
            model.first.requires_grad_(step != 10)
            model.last.requires_grad_(step != 4)
            if not sharded:
                ddp = DistributedDataParallel(model)  # it has to be told
        for i in range(accumulate):
            with (
                ddp.no_sync() if i < accumulate - 1 and not sync_all else nullcontext()
            ):
                (loss_of(ddp, next(data)) / accumulate).backward()
        if clip_at is not None:
            assert clip(model, optimizer, clip_at) > clip_at
        if sharded and dist.get_world_size() > 1:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        if clear == "optimizer" or not sharded:
            optimizer.zero_grad()
        elif clear == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif clear == "module":
            ddp.zero_grad()
    assert not torch.equal(start, weights(model))
    return weights(model)


@pytest.mark.also_simulated("adamw-2", "lars-3", "kinds-2")
@pytest.mark.parametrize(
    ("name", "world_size"),
    # One worker shards nothing, and four have one more border between shards than
    # three: one optimizer of each kind.
    [
        *itertools.product(OPTIMIZERS, (2, 3)),
        *itertools.product(("momentum", "kinds", "lars"), (1, 4)),
    ],
)
def test_equals_ddp_with_the_plain_optimizer(
    pool: Pool, world_size: int, name: str
) -> None:
    assert_agree(pool(world_size).run(_run_both, name), default_tolerance(world_size))


@pytest.mark.also_simulated("no_sync-2", "synced-passes-2", "lars-clip-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"accumulate": 3}),
        ("kinds", {"accumulate": 2, "sync_all": True}),
        ("layers", {"clip_at": 0.01, "accumulate": 2}),
        ("momentum", {"frozen": True}),
        ("adamw", {"frozen": True, "accumulate": 2}),
        ("lars", {"accumulate": 2, "clip_at": 0.01}),
    ],
    ids=["no_sync", "synced-passes", "clip", "flips", "flips-no_sync", "lars-clip"],
)
def test_equals_ddp_however_it_is_trained(
    pool: Pool, world_size: int, name: str, options: dict[str, Any]
) -> None:
    # Several synced passes: DDP adds the new gradient to the reduced one before it
    # reduces again, we after. So does the norm that clips: it is a sum over shards.
    rounding = (
        1e-5
        if world_size == 2 and ("sync_all" in options or "clip_at" in options)
        else 0.0
    )
    assert_agree(
        pool(world_size).run(_run_both, name, **options),
        max(rounding, default_tolerance(world_size)),
    )


@pytest.mark.parametrize("clear", ["none", "zeros", "module"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_uses_the_gradient_up_however_it_is_cleared(
    pool: Pool, world_size: int, clear: str
) -> None:
    assert_agree(pool(world_size).run(_run_both, "momentum", clear=clear))


@pytest.mark.also_simulated("2-*")
@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "momentum"), (2, "lars"), (3, "adamw")]
)
def test_equals_ddp_with_parameters_in_bfloat16(
    pool: Pool, world_size: int, name: str
) -> None:
    # A CPU rounds bfloat16 differently at the end of a tensor than in its middle, and
    # DDP rounds each partial sum: 20 roundings of 2^-9 of weights about 0.3 that hardly
    # add up.
    assert_agree(pool(world_size).run(_run_both, name, low=torch.bfloat16), 1e-2)


@pytest.mark.also_simulated
def test_reduce_fp16_equals_ddp_to_half_precision(pool: Pool) -> None:
    results = pool(2).run(_run_both, "momentum", reduce_fp16=True)
    # 20 gradients rounded to 2^-11 of themselves; not equal, or they did not travel as
    # fp16.
    assert_agree(results, 3e-3)
    assert not torch.equal(results[0][0], results[0][1])


def _large_gradients(dtype: torch.dtype) -> float:
    """50000 each: their sum is beyond float16, their mean is not; nor is one of
    100000 with none.
    """
    model = nn.Linear(1, 2, bias=False).to(dtype)
    optimizer = OSS.wrap(SGD(model.parameters(), lr=1.0))
    ddp = ShardedDataParallel(model, optimizer, reduce_fp16=True)
    factor = 50000.0 if dtype is torch.float16 else (100000.0 * (1 - dist.get_rank()))
    (ddp(torch.ones(1, 1, dtype=dtype)) * factor).sum().backward()
    return float(optimizer.fragments[0].tensor.grad.sum())


def test_halves_are_divided_before_they_are_sent(pool: Pool) -> None:
    assert pool(2).run(_large_gradients, torch.float16) == pytest.approx(
        [50000.0] * 2, rel=1e-3
    )
    assert pool(2).run(_large_gradients, torch.float32) == pytest.approx(
        [50000.0] * 2, rel=1e-3
    )


def _moved_before_it_is_wrapped() -> None:
    for synced in (True, False):
        model = build()
        optimizer = OSS.wrap(OPTIMIZERS["momentum"](model))
        for p in model.parameters():
            p.data = p.data + dist.get_rank()  # no longer in the optimizer's buffers
        ShardedDataParallel(model, optimizer, sync_models_at_startup=synced)
        assert torch.equal(weights(model), weights(build())) == (
            synced or dist.get_rank() == 0
        )


def test_starts_with_the_weights_of_rank_0_wherever_they_lie(pool: Pool) -> None:
    pool(2).run(_moved_before_it_is_wrapped)


# ---- mistakes ------------------------------------------------------------------------


def test_the_alias_is_fairscales() -> None:
    assert ShardedDDP is ShardedDataParallel


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda p: None, "none was given"),
        (lambda p: SGD(p, lr=0.1), "got SGD"),
        (lambda p: AdaScale(SGD(p, lr=0.1)), "got AdaScale"),
    ],
    ids=["none", "plain", "adascale"],
)
def test_needs_a_sharded_optimizer_and_says_so(
    make: Callable[[Iterable[Tensor]], Any], what: str
) -> None:
    model = build()
    with pytest.raises(TypeError, match=what) as info:
        ShardedDataParallel(model, make(model.parameters()))
    assert "OSS(" in str(info.value)
    if what == "none was given":
        with pytest.raises(TypeError, match="OSS"):
            ShardedDDP(model)


@pytest.mark.parametrize("make", [list, tuple])
def test_a_list_of_optimizers_is_refused_with_the_ways_to_make_them_one(
    make: Callable[[list[OSS]], Any],
) -> None:
    model = build()
    optimizers = make(
        [OSS(part.parameters(), lr=0.1) for part in (model.first, model.last)]
    )
    with pytest.raises(
        ValueError,
        match=rf"sharded_optimizer: a {make.__name__}.*parameter groups.*OptimizerChain",
    ):
        ShardedDataParallel(model, optimizers)


def _mistakes() -> None:
    model = build()
    part = OSS(model.first.parameters(), lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"'gain' is trainable and in no sharded optimizer.*add_param_group",
    ):
        ShardedDataParallel(model, part)

    # What was frozen when it was wrapped, unfrozen while another is frozen: as many as
    # before.
    model.requires_grad_(False)
    model.first.requires_grad_(True)
    ddp = ShardedDataParallel(model, part)
    loss_of(ddp, batches(1)[0]).backward()
    model.first.bias.requires_grad_(False)
    model.last.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'last\.bias' is trainable"):
        ddp(batches(1)[0][0])
    part.zero_grad()

    with pytest.raises(ValueError, match="ShardedDataParallel already"):
        ShardedDataParallel(model.first, part)

    other = dist.new_group([0, 1])
    model = build()
    ours = OSS(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="process group"):
        ShardedDataParallel(model, ours, process_group=other)
    with pytest.raises(ValueError, match="process group"):
        ShardedDataParallel(
            model,
            OSS(build().parameters(), lr=0.1, group=other),
            process_group=dist.group.WORLD,
        )
    # the default one, by its name
    ddp = ShardedDataParallel(model, ours, process_group=dist.group.WORLD)

    with pytest.raises(ValueError, match="broadcast_fp16"):
        OSS(model.parameters(), lr=0.1, broadcast_fp16=True)

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh(here().type, (2,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    with pytest.raises(ValueError, match="DTensor"):
        OSS([sharded], lr=0.1)
    with pytest.raises(ValueError, match="precondition"):
        AdaScale(ours, precondition=lambda p, g: g)


def test_mistakes_are_refused(pool: Pool) -> None:
    pool(2).run(_mistakes)
