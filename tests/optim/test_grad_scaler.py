"""ShardedGradScaler against torch's GradScaler with DDP and the plain optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ray_adascale import OSS, AdaScale, ShardedDataParallel, ShardedGradScaler

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]

OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 4}


def build(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(
        4, 6, generator=torch.Generator().manual_seed(100 * step + rank)
    ).to(dtype)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def _train(
    kind: str,
    *,
    adascale: bool = False,
    clip: bool = False,
    optimizer: Callable[[nn.Module], Optimizer] = momentum,
    overflows: tuple[int, ...] = (2, 3, 9),
) -> tuple[Tensor, list[float], list[bool]]:
    """Weights, loss scales, and which steps were skipped; one rank, the last,
    overflows at times.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = build()
    inner: Any = optimizer(model)
    wrapped: Any = model
    if kind in ("sharded", "oss"):
        inner = OSS.wrap(inner, bucket_numel=40)
    if kind == "sharded":
        wrapped = ShardedDataParallel(model, inner)
    elif world > 1:
        wrapped = DistributedDataParallel(model)
    scaler: Any = (
        torch.amp.GradScaler("cpu", **OPTIONS)
        if kind == "plain"
        else ShardedGradScaler(**OPTIONS)
    )
    outer = (
        AdaScale(inner, scale=4.0, smoothing=0.5, grad_scaler=scaler)
        if adascale
        else inner
    )
    scales, skipped = [], []
    for step in range(14):
        outer.zero_grad()
        loss = (wrapped(batch(step)) - 1).square().mean()
        if step in overflows and rank == world - 1:
            loss = loss * float("inf")
        if adascale:
            outer.current.share(number=torch.tensor(step * 10.0 + rank))
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(outer)
            if kind == "sharded":
                outer.clip_grad_norm(0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = weights(model)
        scaler.step(outer)
        scaler.update()
        skipped.append(torch.equal(before, weights(model)))
        # torch's scaler tells nobody that it has left a step out
        if adascale and kind != "plain":
            assert outer.last_step.skipped == skipped[-1]
            assert outer.last_step.shared == {
                "number": world * step * 10.0 + sum(range(world))
            }
        scales.append(scaler.get_scale())
    end = weights(model)
    if adascale:
        end = torch.cat(
            [
                end,
                torch.tensor(
                    [outer.gain(), outer.effective_steps, *outer.average_moments()]
                ),
            ]
        )
    return end, scales, skipped


def _both(kind: str, adascale: bool, clip: bool) -> list[Any]:
    optimizers = (
        [momentum] if adascale else [momentum, lambda m: AdamW(m.parameters(), lr=0.01)]
    )
    return [
        (
            _train("plain", adascale=adascale, clip=clip, optimizer=o),
            _train(kind, adascale=adascale, clip=clip, optimizer=o),
        )
        for o in optimizers
    ]


@pytest.mark.also_simulated("True-False-2-*")
@pytest.mark.parametrize("kind", ["sharded", "oss"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("adascale", "clip"), [(False, False), (True, False), (True, True), (False, True)]
)
def test_equals_torchs_scaler_under_ddp(
    pool: Pool, world_size: int, kind: str, adascale: bool, clip: bool
) -> None:
    results = pool(world_size).run(_both, kind, adascale, clip)
    for result in results:
        for (plain, plain_scales, plain_skipped), (ours, scales, skipped) in result:
            torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)
            assert scales == plain_scales == results[0][0][1][1]
            assert skipped == plain_skipped == [step in (2, 3, 9) for step in range(14)]
            # halved on all, and doubled after four good steps
            assert scales[1:4] == [1024, 512, 256]
            assert scales[7] == 512
    # The same on all workers, to the last bit.
    for result in results:
        for (_, (ours, *_)), (_, (first, *_)) in zip(result, results[0], strict=True):
            assert torch.equal(ours, first)


def _only_its_gradient_is_infinite() -> None:
    """The reduced overflow lies in one worker's shard only; the others' are finite."""
    model = build()
    optimizer = OSS.wrap(momentum(model))
    ddp = ShardedDataParallel(model, optimizer)
    scaler = ShardedGradScaler(**OPTIONS)
    before = weights(model)
    scaler.scale(ddp(batch(0)).square().mean()).backward()
    mine = [f.tensor.grad for f in optimizer.fragments]
    if optimizer.rank == 1:
        mine[0].view(-1)[0] = float("inf")
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 512
    assert torch.equal(before, weights(model))
    optimizer.zero_grad()

    # unscale_ divides the shards, once; a second time is an error, as torch's.
    scaler.scale(ddp(batch(0)).square().mean()).backward()
    scaled = [f.tensor.grad.clone() for f in optimizer.fragments]
    scaler.unscale_(optimizer)
    for f, gradient in zip(optimizer.fragments, scaled, strict=True):
        torch.testing.assert_close(f.tensor.grad, gradient / 512)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, weights(model))


@pytest.mark.also_simulated
def test_an_overflow_in_one_shard_counts_for_all(pool: Pool) -> None:
    pool(2).run(_only_its_gradient_is_infinite)


def _more_ranks_than_elements() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = OSS.wrap(momentum(model))
    ddp = ShardedDataParallel(model, optimizer)
    scaler = ShardedGradScaler(**OPTIONS)
    for step in range(3):
        factor = float("inf") if step == 1 and dist.get_rank() == 0 else 1.0
        scaler.scale((ddp(torch.ones(2, 1)) * factor).sum()).backward()
        before = weights(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weights(model)) == (step == 1)
        optimizer.zero_grad()
    assert scaler.get_scale() == 512


@pytest.mark.also_simulated
def test_ranks_that_own_nothing_keep_in_step(pool: Pool) -> None:
    pool(3).run(_more_ranks_than_elements)


def _sub_group() -> float:
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        return 0.0
    model = build()
    optimizer = OSS.wrap(momentum(model), group)
    ddp = ShardedDataParallel(model, optimizer)
    scaler = ShardedGradScaler(process_group=group, **OPTIONS)
    scaler.scale(ddp(batch(0)).mean() * (float("inf") if rank == 2 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_a_process_group_of_some_ranks(pool: Pool) -> None:
    assert pool(3).run(_sub_group) == [0.0, 512.0, 512.0]


def _idle_rank(accumulate: int, clip: bool) -> tuple[Tensor, Tensor]:
    """Rank 1 makes no backward pass in every third step: as if its gradient were
    zero.
    """
    rank = dist.get_rank()
    ends = []
    for sharded in (False, True):
        model = build()
        inner: Any = momentum(model)
        ddp: Any = None
        if sharded:
            inner = OSS.wrap(inner, bucket_numel=40)
            ddp = ShardedDataParallel(model, inner)
        else:
            ddp = DistributedDataParallel(model)
        scaler: Any = (
            ShardedGradScaler(**OPTIONS)
            if sharded
            else torch.amp.GradScaler("cpu", **OPTIONS)
        )
        optimizer = AdaScale(
            inner, scale=4.0, num_gradients_to_accumulate=accumulate, grad_scaler=scaler
        )
        for step in range(6):
            optimizer.zero_grad()
            for i in range(accumulate):
                with ddp.no_sync() if i < accumulate - 1 else nullcontext():
                    loss = scaler.scale(
                        (ddp(batch(10 * step + i)) - 1).square().mean() / accumulate
                    )
                    idle = rank == 1 and step % 3 == 1 and i == accumulate - 1
                    if not idle:
                        loss.backward()
                    elif not sharded:
                        (loss * 0).backward()
            if clip:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm(0.1)
            scaler.step(optimizer)
            scaler.update()
        known = torch.tensor(
            [optimizer.gain(), optimizer.effective_steps, *optimizer.average_moments()]
        )
        ends.append(torch.cat([weights(model), known]))
    return ends[0], ends[1]


@pytest.mark.also_simulated("1-*")
@pytest.mark.parametrize(("accumulate", "clip"), [(1, False), (1, True), (2, False)])
def test_a_rank_whose_backward_pass_reaches_nothing_keeps_in_step(
    pool: Pool, accumulate: int, clip: bool
) -> None:
    """Its share of AdaScale's sums must be on its way before the scaler's own, or
    one meets the other.
    """
    for plain, ours in pool(2).run(_idle_rank, accumulate, clip):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)  # float64


def _half() -> tuple[Tensor, Tensor, list[float]]:
    """Autocast to float16: activations of 70000 overflow, until the loss scale is
    small enough they would in backward.
    """
    ends = []
    scales = []
    for sharded in (False, True):
        model = build(torch.float32)
        optimizer: Any = momentum(model)
        if sharded:
            optimizer = OSS.wrap(optimizer, bucket_numel=40)
            ddp: Any = ShardedDataParallel(model, optimizer)
            scaler: Any = ShardedGradScaler(init_scale=2.0**20, growth_interval=6)
        else:
            ddp = DistributedDataParallel(model)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=6)
        for step in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (ddp(batch(step, torch.float32)) - 1).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if sharded:
                scales.append(scaler.get_scale())
        ends.append(weights(model))
    return ends[0], ends[1], scales


def test_float16_autocast_on_the_cpu(pool: Pool) -> None:
    for plain, ours, scales in pool(2).run(_half):
        assert torch.equal(plain, ours)
        assert scales[0] == 2.0**19  # the first overflowed
        assert any(b > a for a, b in itertools.pairwise(scales))


def test_state_survives_a_round_trip() -> None:
    scaler = ShardedGradScaler(**OPTIONS, device="cpu")
    model = build()
    optimizer = OSS.wrap(momentum(model))
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(
            model(batch(step)).mean() * (float("inf") if step == 0 else 1)
        ).backward()
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (512.0, 2)
    for other in (ShardedGradScaler(), torch.amp.GradScaler("cpu")):
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert other.get_scale() == 512


def _disabled() -> tuple[Tensor, Tensor]:
    ends = []
    for scaled in (False, True):
        model = build()
        optimizer = OSS.wrap(momentum(model))
        ddp = ShardedDataParallel(model, optimizer)
        scaler = ShardedGradScaler(enabled=False)
        for step in range(4):
            loss = ddp(batch(step)).square().mean()
            if scaled:
                assert scaler.scale(loss) is loss
            loss.backward()
            if scaled:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert scaler.state_dict() == {}
                assert scaler.get_scale() == 1
            else:
                optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1]


def test_disabled_it_does_nothing(pool: Pool) -> None:
    for plain, scaled in pool(2).run(_disabled):
        assert torch.equal(plain, scaled)


def test_fairscales_positions() -> None:
    scaler = ShardedGradScaler(8.0, 3.0, 0.25, 7, True, None)
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (8, 3)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 7)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clears", ["optimizer", "model"])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_step_that_a_scaler_leaves_out_is_known_as_skipped(
    kind: Any, clears: str, fused: bool
) -> None:
    model = build(torch.float32)
    scaler = kind(device="cpu", init_scale=64.0)
    optimizer = AdaScale(
        SGD(model.parameters(), lr=0.01, fused=fused),
        scale=4.0,
        num_gradients_to_accumulate=2,
        grad_scaler=scaler,
    )
    skipped = []
    for t in range(6):
        if clears == "optimizer":
            optimizer.zero_grad()
            skipped.append(optimizer.last_step.skipped)
        for i in range(2):
            loss = model(batch(2 * t + i, torch.float32)).square().mean() / 2
            scaler.scale(loss * math.inf if t in (0, 3) else loss).backward()
        if clears == "model":
            skipped.append(optimizer.last_step.skipped)
        scaler.step(optimizer)
        scaler.update()
        if clears == "model":
            model.zero_grad()
    assert skipped == [False, True, False, False, True, False]  # of the step before
    assert not optimizer.last_step.skipped
    assert optimizer.steps == 4


def _unscaled_inside() -> str:
    model = build()
    inside = OSS(model.parameters(), SGD, lr=0.05)
    adascale = AdaScale(inside)
    ddp = ShardedDataParallel(model, inside)
    scaler = ShardedGradScaler(device="cpu", **OPTIONS)
    scaler.scale(ddp(batch(0)).pow(2).mean()).backward()
    scaler.unscale_(inside)
    with pytest.raises(RuntimeError) as caught:
        scaler.step(adascale)
    return str(caught.value)


def test_a_sharded_gradient_that_is_unscaled_twice_ends_the_loop(pool: Pool) -> None:
    for found in pool(2).run(_unscaled_inside):
        assert "twice" in found


def test_gradients_that_are_cleared_without_a_scaler_are_no_skipped_step() -> None:
    model = build()
    optimizer = AdaScale(
        SGD(model.parameters(), lr=0.01), scale=4.0, num_gradients_to_accumulate=2
    )
    for i in range(2):
        (model(batch(i)).square().mean() / 2).backward()
    optimizer.zero_grad()
    assert not optimizer.last_step.skipped
