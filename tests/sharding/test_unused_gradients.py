"""Parameters and ranks without a gradient in a step are treated as DDP treats them.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..uneven import assert_agree, batches, loss_of, weights
from .against_ddp import (
    OPTIMIZERS,
    Pool,
    build,
    default_dtype,
    default_tolerance,
    wrapped,
)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 9)
        self.branches = nn.ModuleList([nn.Linear(9, 3) for _ in range(3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](torch.tanh(self.trunk(x)))


def _branches(name: str, plan: str) -> tuple[Tensor, Tensor, bool]:
    rank, dtype = dist.get_rank(), default_dtype()
    ends = []
    rested = True
    for sharded in (False, True):
        torch.manual_seed(1)
        model = Branches().to(dtype)
        ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded, unused=True)
        for step, (x, y) in enumerate(batches(30, rank, dtype)):
            which = {"all": step // 10, "some": (step + rank) % 3, "first": 0}[plan]
            before = [p.detach().clone() for p in model.branches.parameters()]
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x, which), y).backward()
            optimizer.step()
            if plan == "all":
                after = list(model.branches.parameters())
                moved = [
                    not torch.equal(a, b) for a, b in zip(before, after, strict=True)
                ]
                rested = rested and moved == [i // 2 == which for i in range(6)]
        ends.append(weights(model))
    return ends[0], ends[1], rested


@pytest.mark.also_simulated("2-*")
@pytest.mark.parametrize("name", ["nesterov", "adamw", "lars"])
@pytest.mark.parametrize(
    ("world_size", "plan"),
    [(2, "all"), (2, "some"), (3, "some"), (3, "all"), (2, "first")],
)
def test_unused_parameters_are_treated_as_ddp_does(
    pool: Pool, world_size: int, plan: str, name: str
) -> None:
    """What no worker used stays, whatever momentum and weight decay it has; what
    some used moves.
    """
    results = pool(world_size).run(_branches, name, plan)
    assert_agree(results, default_tolerance(world_size))
    assert all(rested for *_, rested in results)


def _nobody() -> None:
    model = build()
    ddp, optimizer = wrapped(model, OPTIMIZERS["nesterov"](model), True)
    loss_of(ddp, batches(1)[0]).backward()
    optimizer.step()
    before = weights(model)
    # no gradient anywhere: momentum and weight decay must not move anything
    optimizer.step()
    assert torch.equal(weights(model), before)


def test_a_step_without_gradients_moves_nothing(pool: Pool) -> None:
    pool(2).run(_nobody)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # in buckets of their own
        self.trunk, self.head = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor, breaks: bool, uses_head: bool) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        if breaks:
            hidden.register_hook(_break)
        return (self.head(hidden) if uses_head else hidden)[:, :3]


def _break(_: Tensor) -> None:
    raise ArithmeticError("in the backward pass")


def _broken_off() -> list[bool]:
    """Whether each layer moves in a step of the trunk alone, after a pass that broke
    when the head's gradients were sent.
    """
    torch.manual_seed(1)
    model = TwoLayers()
    ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), True)
    for (x, y), breaks, uses_head in zip(
        batches(3), (False, True, False), (True, True, False), strict=True
    ):
        before = [layer.weight.detach().clone() for layer in (model.trunk, model.head)]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x, breaks, uses_head), y)
        if breaks:
            with pytest.raises(ArithmeticError):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
    after = [layer.weight for layer in (model.trunk, model.head)]
    return [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]


def test_gradients_that_a_broken_pass_has_sent_do_not_count_in_the_next_step(
    pool: Pool,
) -> None:
    """The head has no gradient then: its momentum and weight decay must not move it."""
    assert pool(2).run(_broken_off) == [[True, False]] * 2
