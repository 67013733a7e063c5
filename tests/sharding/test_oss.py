"""OSS against DDP with the plain optimizer, to the last bit: the same kernels work on
the same whole parameters.

A function whose name starts with an underscore runs on each rank of the pool. Where it
trains without DDP, all ranks see the same batches, so that their gradients are equal
and what comes out does not depend on the number of ranks.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from ray_adascale import OSS, AdaScale

from ..pool import ProcessPool
from ..uneven import (
    OPTIMIZERS,
    assert_agree,
    assert_same,
    batches,
    build,
    compared,
    groups,
    loss_of,
    train,
    weights,
)

Pool = Callable[[int], ProcessPool]


STEPS = 20


@compared
def _run_both(
    sharded: bool,
    name: str,
    *,
    low: torch.dtype = torch.float32,
    frozen: str = "",
    accumulate: int = 1,
    clip: float | None = None,
) -> Tensor:
    model = build(low)
    if frozen:
        model.first.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model)
    if sharded:
        optimizer = OSS.wrap(optimizer)
    ddp = DistributedDataParallel(model)
    data = iter(batches(STEPS * accumulate, seed=dist.get_rank()))
    start = weights(model)
    for step in range(STEPS):
        if frozen == "thawed" and step == STEPS // 2:
            model.first.requires_grad_(True)
            ddp = DistributedDataParallel(model)  # it has to be told
        optimizer.zero_grad()
        for i in range(accumulate):
            with nullcontext() if i == accumulate - 1 else ddp.no_sync():
                (loss_of(ddp, next(data)) / accumulate).backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
    assert not torch.equal(start, weights(model))
    return weights(model)


@pytest.mark.also_simulated("momentum-2", "tensor-lr-2", "named-3", "odd-3")
@pytest.mark.parametrize(
    ("name", "world_size"),
    # One worker shards nothing: one optimizer of torch's and one unlike them.
    [*itertools.product(OPTIMIZERS, (2, 3)), ("momentum", 1), ("odd", 1)],
)
def test_equals_ddp_with_the_plain_optimizer(
    pool: Pool, world_size: int, name: str
) -> None:
    assert_agree(pool(world_size).run(_run_both, name))


@pytest.mark.also_simulated("bf16-adamw-2", "accumulate-2", "thawed-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"low": torch.bfloat16}),
        ("adamw", {"low": torch.bfloat16}),
        ("adamw", {"frozen": "frozen"}),
        ("momentum", {"frozen": "thawed"}),
        ("adamw", {"frozen": "thawed", "low": torch.bfloat16}),
        ("momentum", {"accumulate": 3}),
        ("momentum", {"clip": 0.01}),
    ],
    ids=[
        "bf16-sgd",
        "bf16-adamw",
        "frozen",
        "thawed",
        "thawed-bf16",
        "accumulate",
        "clip",
    ],
)
def test_equals_ddp_however_it_is_trained(
    pool: Pool, world_size: int, name: str, options: dict[str, Any]
) -> None:
    # A CPU rounds bfloat16 differently at the end of a tensor than in its middle, so
    # the cuts show: 20 roundings of 2^-9 of weights about 0.3 that hardly add up.
    tolerance = 4e-3 if "low" in options else 0.0
    assert_agree(pool(world_size).run(_run_both, name, **options), tolerance)


def _constructor() -> tuple[Tensor, Tensor]:
    model, twin = build(), build()
    train(twin, SGD(groups(twin), lr=0.1, momentum=0.9), batches(5))
    # Buckets of ten elements: several, and of a parameter alone.
    ours = OSS(
        groups(model),
        SGD,
        None,
        broadcast_buffer_size=10,
        broadcast_fp16=False,
        force_broadcast_object=False,
        lr=0.1,
        momentum=0.9,
    )
    assert len(ours.buckets) > 4 or ours.world_size == 1
    train(model, ours, batches(5))
    # FairScale's default class.
    assert isinstance(OSS(build().parameters(), lr=0.1).optim, SGD)
    assert "SGD" in repr(ours)
    return weights(twin), weights(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_builds_the_optimizer_as_fairscale_does(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_constructor))


def _frozen_and_changed(thaw: bool) -> tuple[float, float]:
    """Each rank adds its number to a frozen weight, as a loop of its own might; the
    weight before and after two steps.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = OSS(model.parameters(), lr=0.0)
    with torch.no_grad():
        model[0].weight.fill_(float(dist.get_rank()))
    model[0].requires_grad_(thaw)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return float(dist.get_rank()), float(model[0].weight.detach().mean())


def test_a_frozen_parameter_is_not_exchanged_and_an_unfrozen_one_is(pool: Pool) -> None:
    assert all(
        before == after for before, after in pool(2).run(_frozen_and_changed, False)
    )
    outcomes = pool(2).run(_frozen_and_changed, True)
    assert outcomes[0][1] == outcomes[1][1]


@compared
def _frozen_with_a_gradient(sharded: bool) -> Tensor:
    """torch's optimizers go by the gradient alone, so a parameter frozen before
    zero_grad() still moves once.
    """
    model = build()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
    if sharded:
        optimizer = OSS.wrap(optimizer)
    loss_of(model, batches(1)[0]).backward()
    model.requires_grad_(False)
    optimizer.step()
    return weights(model)


def test_a_parameter_frozen_with_a_gradient_left_stays_equal_on_all_ranks(
    pool: Pool,
) -> None:
    assert_agree(pool(3).run(_frozen_with_a_gradient))


def _sub_group() -> Any:
    group = dist.new_group([1, 2])  # global and group ranks differ
    rank = dist.get_rank()
    try:
        if rank == 0:
            with pytest.raises(ValueError, match="not in the process group"):
                OSS.wrap(SGD(build().parameters(), lr=0.1), group)
            return None
        ends = []
        for sharded in (False, True):
            model = build()
            optimizer: Any = AdamW(groups(model), lr=0.01)
            if sharded:
                optimizer = OSS.wrap(optimizer, group)
                assert (optimizer.rank, optimizer.world_size) == (rank - 1, 2)
            train(
                DistributedDataParallel(model, process_group=group),
                optimizer,
                batches(STEPS, seed=rank),
            )
            ends.append(weights(model))
            if not sharded:
                plain = optimizer
        for recipient in (0, 1, -1):
            optimizer.consolidate_state_dict(recipient)
            if recipient in (optimizer.rank, -1):
                assert_same(optimizer.state_dict(), plain.state_dict())
        return ends[0], ends[1]
    finally:
        dist.barrier()
        if rank:
            dist.destroy_process_group(group)


@pytest.mark.also_simulated
def test_sub_process_group(pool: Pool) -> None:
    outside, *results = pool(3).run(_sub_group)
    assert outside is None
    assert_agree(results)


def _add_param_group(name: str) -> tuple[Tensor, Tensor]:
    ends = []
    plain: Any = None
    for sharded in (False, True):
        model = build()
        built = OPTIMIZERS[name](model.first)
        optimizer: Any = OSS.wrap(built) if sharded else built
        train(model, optimizer, batches(10))
        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
        assert len(optimizer.param_groups) == 2
        train(model, optimizer, batches(10, seed=1))
        optimizer.add_param_group({"params": [model.gain]})
        train(model, optimizer, batches(10, seed=2))
        if sharded:
            assert set(optimizer.state) <= {f.tensor for f in optimizer.fragments}
            optimizer.consolidate_state_dict()
            if optimizer.rank == 0:
                assert_same(optimizer.state_dict(), plain.state_dict())
            optimizer.add_param_group({"params": [model.middle.weight]})
            if optimizer.world_size > 1:
                with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                    optimizer.state_dict()
        plain = optimizer
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.also_simulated("adamw-3")
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_groups_added_later_are_sharded_too(
    pool: Pool, world_size: int, name: str
) -> None:
    assert_agree(pool(world_size).run(_add_param_group, name))


def _scheduled(where: str, adascale: bool) -> tuple[Tensor, Tensor]:
    ends, lrs = [], []
    for sharded in (False, True):
        model = build()
        source = SGD(groups(model), lr=0.05, momentum=0.9)

        def schedule(optimizer: Optimizer) -> LRScheduler:  # it moves momentum as well
            return OneCycleLR(optimizer, max_lr=[0.02, 0.05, 0.1], total_steps=30)

        scheduler = schedule(source) if where == "before" else None
        optimizer: Any = OSS.wrap(source) if sharded else source
        if where in ("source", "oss"):
            scheduler = schedule(source if where == "source" else optimizer)
        if adascale:
            optimizer = AdaScale(optimizer, scale=4.0, smoothing=0.5)
        scheduler = scheduler or schedule(optimizer)
        seen = []
        ddp = DistributedDataParallel(model)
        # After twenty steps AdaScale warns of a schedule that counts them.
        for batch in batches(19, seed=dist.get_rank()):
            train(ddp, optimizer, [batch], scheduler)
            seen.append([group["lr"] for group in optimizer.param_groups])
        lrs.append(seen)
        ends.append(weights(model))
    assert lrs[0] == lrs[1]
    assert lrs[0][0] != lrs[0][-1]
    return ends[0], ends[1]


@pytest.mark.parametrize(
    ("where", "adascale"),
    [
        ("before", False),
        ("source", False),
        ("oss", False),
        ("before", True),
        ("oss", True),
        ("outside", True),
    ],
)
def test_a_scheduler_drives_it_wherever_it_was_built_and_without_a_warning(
    pool: Pool, where: str, adascale: bool
) -> None:
    # Processes of the pool make errors of warnings, such as "lr_scheduler.step() before
    # optimizer.step()".
    assert_agree(pool(2).run(_scheduled, where, adascale))


@pytest.mark.parametrize("before", [False, True])
def test_a_scheduler_that_is_really_stepped_too_early_still_warns(before: bool) -> None:
    source = SGD(build().parameters(), lr=0.1)
    scheduler = StepLR(source, 1) if before else None
    ours = OSS.wrap(source)
    scheduler = scheduler or StepLR(ours, 1)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


def test_refuses_to_shard_twice() -> None:
    optimizer = SGD(build().parameters(), lr=0.1)
    ours = OSS.wrap(optimizer)
    # a second split of the optimizer would find this worker's state only
    for again in (ours, optimizer):
        with pytest.raises(ValueError, match="sharded already"):
            OSS.wrap(again)
    with pytest.raises(ValueError, match=r"AdaScale\(OSS"):
        OSS.wrap(AdaScale(SGD(build().parameters(), lr=0.1)))


@pytest.mark.parametrize("given", [[], None, nn.Linear(2, 2)], ids=type)
def test_refuses_what_is_not_one_optimizer(given: Any) -> None:
    with pytest.raises(ValueError, match=r"Give it a torch\.optim\.Optimizer"):
        OSS.wrap(given)


def test_refuses_an_optimizer_that_mixes_parameters() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        OSS(build().parameters(), torch.optim.LBFGS, lr=0.1)


def test_refuses_to_be_copied() -> None:
    ours = OSS(build().parameters(), lr=0.1)
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            copier(ours)


def test_refuses_a_state_dict_of_other_groups() -> None:
    ours = OSS.wrap(SGD(groups(build()), lr=0.1))
    for other in (
        SGD(build().parameters(), lr=0.3),
        SGD(list(reversed(groups(build()))), lr=0.3),
    ):
        with pytest.raises(ValueError, match=r"\[2, 1, 4\] parameters"):
            ours.load_state_dict(other.state_dict())
    assert [group["lr"] for group in ours.param_groups] == [0.02, 0.1, 0.1]


@pytest.mark.parametrize("recipient", [-2, 1])
def test_refuses_a_recipient_that_does_not_exist(recipient: int) -> None:
    with pytest.raises(ValueError, match="recipient_rank"):
        OSS(build().parameters(), lr=0.1).consolidate_state_dict(recipient)


class Failing(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise ArithmeticError("only here")
        return super().step(closure)


def _one_fails() -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = build()
    ours = OSS.wrap(Failing(model.parameters(), lr=0.1), group)
    loss_of(model, batches(1)[0]).backward()
    try:
        ours.step()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_a_rank_that_fails_in_its_step_fails_the_others_within_the_groups_timeout(
    pool: Pool,
) -> None:
    processes = pool(4)
    start = time.monotonic()
    try:
        results = processes.run(_one_fails)
    finally:
        processes.kill()  # their sub-group is broken
    assert results.pop(1) == "ArithmeticError"
    assert not {"nothing", "ArithmeticError"} & set(results)
    assert time.monotonic() - start < 20
