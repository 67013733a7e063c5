"""OSS.step(closure) hands the closure on, and an optimizer that needs it takes the
steps that it takes unsharded.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ray_adascale import OSS, AdaScale, ShardedDataParallel

from ..uneven import assert_agree, batches, compared, loss_of, weights
from .against_ddp import ROUNDING, SMALL, Pool, build, wrapped
from .test_unused_gradients import Branches


class SharpnessAware(Optimizer):
    """SAM with a norm for each parameter: the gradient of a step is taken a little
    uphill, by another call of the closure.

    Its step has no default for the closure. ``in_place``: the first gradient is there
    already, as in the best-known implementation; else the closure makes it.
    ``replaces``: parameters get other memory on the way.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        in_place: bool = False,
        replaces: bool = False,
        none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})
        self.in_place, self.replaces, self.none = in_place, replaces, none

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = None if self.in_place else closure()
        every = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in every]
        for p in every:
            if p.grad is not None:
                p.add_(p.grad, alpha=0.05 / (float(p.grad.norm()) + 1e-3))
        self.zero_grad(set_to_none=self.none)
        second = closure()
        for p, old in zip(every, before, strict=True):
            if self.replaces:
                p.data = old
            else:
                p.copy_(old)
            if p.grad is not None:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.add_(buffer, alpha=-self.param_groups[0]["lr"])
        return second if loss is None else loss


def _sharpness_aware(
    kind: str, options: dict[str, Any], clears: bool
) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    ends, losses = [], []
    for sharded in (False, True):
        model = build(torch.float64)
        optimizer: Any = SharpnessAware(model.parameters(), lr=0.02, **options)
        if sharded:
            optimizer = OSS.wrap(optimizer, bucket_numel=SMALL)
        ddp: Any = DistributedDataParallel(model)
        if sharded and kind == "zero2":
            ddp = ShardedDataParallel(model, optimizer)
        calls = 0
        for batch in batches(8, rank, torch.float64):

            def closure(
                ddp: Any = ddp, batch: Any = batch, optimizer: Any = optimizer
            ) -> Tensor:
                nonlocal calls
                calls += 1
                if clears:
                    optimizer.zero_grad()
                loss = loss_of(ddp, batch)
                loss.backward()
                return loss

            optimizer.zero_grad()
            if options.get("in_place"):
                loss_of(ddp, batch).backward()
            losses.append(float(optimizer.step(closure).detach()))
        assert calls == (8 if options.get("in_place") else 16)
        ends.append(weights(model))
    torch.testing.assert_close(losses[8:], losses[:8], rtol=ROUNDING, atol=ROUNDING)
    return ends[0], ends[1]


@pytest.mark.also_simulated("in-place-2-*")
@pytest.mark.parametrize("kind", ["zero2", "oss"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("options", "clears"),
    [
        ({}, True),
        ({}, False),
        ({"in_place": True, "replaces": True}, False),
        ({"in_place": True, "none": False}, False),
    ],
    ids=["clears", "evaluated-twice", "in-place", "zeros"],
)
def test_an_optimizer_that_evaluates_the_model_again(
    pool: Pool, world_size: int, kind: str, options: dict[str, Any], clears: bool
) -> None:
    """Before each evaluation every worker has what the others' optimizers have done
    to their parameters.
    """
    assert_agree(
        pool(world_size).run(_sharpness_aware, kind, options, clears), ROUNDING
    )


@compared
def _other_branch(sharded: bool) -> Tensor:
    """In the second step the second evaluation leaves out a branch that the first
    one reached.
    """
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = Branches().double()
    ddp, optimizer = wrapped(
        model, SharpnessAware(model.parameters(), lr=0.02), sharded, unused=True
    )
    for batch, branches in zip(
        batches(3, rank, torch.float64), ((0, 0), (0, 1), (1, 0)), strict=True
    ):
        turn = iter(branches)

        def closure(
            ddp: Any = ddp, batch: Any = batch, turn: Iterator[int] = turn
        ) -> Tensor:
            loss = nn.functional.mse_loss(ddp(batch[0], next(turn)), batch[1])
            loss.backward()
            return loss

        optimizer.zero_grad()
        optimizer.step(closure)
    return weights(model)


def test_what_the_last_evaluation_does_not_reach_stays_where_it_is(pool: Pool) -> None:
    """It has momentum, which would move it: a gradient of zero is not the same as
    none.
    """
    assert_agree(pool(2).run(_other_branch), ROUNDING)


class Passed(SGD):
    """Keeps what it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None, kept: Any = None) -> Any:
        kept.append(closure)
        super().step()
        return "its own"


class WithoutClosure(SGD):
    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def test_what_the_optimizer_takes_and_returns_is_its_own() -> None:
    for kind, given, returned in (
        (Passed, {"kept": []}, "its own"),
        (WithoutClosure, {}, None),
    ):
        model = nn.Linear(1, 1, bias=False)
        optimizer = OSS(model.parameters(), kind, lr=0.1)
        model(torch.ones(1, 1)).sum().backward()
        before = model.weight.item()
        assert optimizer.step(**given) == returned
        assert given.get("kept", [None]) == [None]
        assert model.weight.item() == pytest.approx(before - 0.1)


class Holder(SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.base = SGD(self.param_groups, lr)


def _held() -> None:
    with pytest.raises(
        ValueError,
        match=r"Holder holds another optimizer, in 'base'.*Holder\(OSS\(\.\.\.\)\)",
    ):
        OSS(build().parameters(), Holder, lr=0.1)


def test_an_optimizer_that_holds_another_is_refused(pool: Pool) -> None:
    """Of that one's state nothing would be sharded, and under ShardedDataParallel it
    would find no gradient.
    """
    pool(2).run(_held)
    OSS(build().parameters(), Holder, lr=0.1)  # alone, there is nothing to shard


def test_adascale_refuses_an_optimizer_that_needs_the_closure() -> None:
    parameters = list(build().parameters())
    for optimizer in (
        SharpnessAware(parameters, lr=0.1),
        OSS.wrap(SharpnessAware(parameters, lr=0.1)),
    ):
        with pytest.raises(
            ValueError,
            match="AdaScale can't wrap SharpnessAware, whose step needs the closure",
        ):
            AdaScale(optimizer)
