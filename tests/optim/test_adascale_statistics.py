"""AdaScale's statistics, steps and clock against the literal reference, on one worker
and on several.

All is float64 here, so a tolerance of 1e-12 (relative) is that of sums in another
order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale

from ..classifier import (
    batches,
    make_model,
    sample_gradient,
    two_groups,
    weights,
)
from ..model.reference_run import ReferenceAdaScale

# ---- several workers -----------------------------------------------------------------


def _ddp_against_reference(
    sharded: bool, passes: int = 2, view: bool = False
) -> tuple[list[float], float, float]:
    rank, world, scale = (
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
        6.0,
    )
    model = make_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer: Any = torch.optim.SGD(two_groups(model), lr=0.05, momentum=0.9)
    adascale = AdaScale(
        OSS.wrap(optimizer) if sharded else optimizer,
        scale=scale,
        num_gradients_to_accumulate=passes,
    )
    reference = ReferenceAdaScale(scale=scale, n=world * passes)
    momentum = [0.0, 0.0]
    data = batches(world * passes * 6, 4)
    gains = []
    for step in range(6):
        here = data[step * world * passes : (step + 1) * world * passes]
        samples = [
            sample_gradient(model, batch, adascale.param_groups) for batch in here
        ]
        expected = reference.step(samples)
        before = weights(model).clone()
        for p in range(passes):
            x, y = here[p * world + rank]
            if p < passes - 1:
                with ddp.no_sync():
                    (F.cross_entropy(ddp(x), y) / passes).backward()
            else:
                (F.cross_entropy(ddp(x), y) / passes).backward()
        adascale.step()
        adascale.zero_grad()
        moved = []
        for g, lr in enumerate((0.05, 0.02)):
            momentum[g] = 0.9 * momentum[g] + expected.mean_gradient[g]
            moved.append(lr * expected.gains[g] * momentum[g])
        np.testing.assert_allclose(
            (before - weights(model)).numpy(),
            np.concatenate(moved),
            rtol=1e-9,
            atol=1e-14,
        )
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-10)
        gains.append(adascale.gain())
    return gains, adascale.effective_steps, float(weights(model).sum())


@pytest.mark.also_simulated("*-2")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_workers_under_ddp_equal_the_reference_and_one_another(
    pool: Any, world: int, sharded: bool
) -> None:
    results = pool(world).run(_ddp_against_reference, sharded)
    assert all(result == results[0] for result in results)


def _unfrozen() -> list[tuple[list[float], list[float]]]:
    """Every step's averages. The first layer's weight is unfrozen before the
    third.
    """
    rank = torch.distributed.get_rank()
    model = make_model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].weight.requires_grad_(False)
    moments = []
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05))
    for step, (x, y) in enumerate(batches(8, 4)[rank::2]):
        model[0].weight.requires_grad_(step >= 2)
        F.cross_entropy(ddp(x), y).backward()
        adascale.step()
        adascale.zero_grad()
        moments.append(adascale.group_moments())
    return moments


def test_a_gradient_that_is_unfrozen_counts_at_once(pool: Any) -> None:
    ours, theirs = pool(2).run(_unfrozen)
    assert ours == theirs
    first, second, third, fourth = ours
    assert len({str(moments) for moments in (first, second, third, fourth)}) == 4
    assert sum(third[0]) > sum(second[0])  # the first layer's noise is in it


@pytest.mark.also_simulated("bucket-view-3")
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("view", [False, True], ids=["copy", "bucket-view"])
def test_gradients_that_are_views_of_buckets(
    pool: Any, passes: int, view: bool
) -> None:
    results = pool(2).run(_ddp_against_reference, False, passes, view)
    assert results[0] == results[1]


def _one_rank_without_gradients() -> float:
    rank = torch.distributed.get_rank()
    model = nn.ModuleList([nn.Linear(4, 1, dtype=torch.float64) for _ in range(2)])
    ddp = DistributedDataParallel(_Branch(model), find_unused_parameters=True)
    # Only the first branch is in the optimizer; rank 1 never uses it.
    adascale = AdaScale(torch.optim.SGD(model[0].parameters(), lr=0.1))
    for _ in range(3):
        ddp(torch.ones(2, 4, dtype=torch.float64), rank).sum().backward()
        adascale.step()
        adascale.zero_grad()
    return adascale.gain()


class _Branch(nn.Module):
    def __init__(self, branches: nn.ModuleList) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x)


def test_a_rank_whose_parameters_get_no_gradient_keeps_in_step(pool: Any) -> None:
    gains = pool(2).run(_one_rank_without_gradients)
    # g = (G, 0): A = G²/2, C = G²/4, so σ² = 2·G²/4 = G²/2, μ² = 0 and r = S.
    assert gains == pytest.approx([2.0, 2.0])


def _sub_group() -> tuple[float, float]:
    group = torch.distributed.new_group([0, 1])
    rank = torch.distributed.get_rank()
    if rank == 2:
        return 1.0, 0.0
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=group)
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), process_group=group
    )
    for step in range(3):
        x, y = batches(6, 4)[2 * step + rank]
        F.cross_entropy(ddp(x), y).backward()
        adascale.step()
        adascale.zero_grad()
    return adascale.scale, adascale.gain()


@pytest.mark.also_simulated
def test_a_process_group_smaller_than_the_world(pool: Any) -> None:
    first, second, _ = pool(3).run(_sub_group)
    assert first == second
    assert first[0] == 2.0
    assert 1 < first[1] <= 2
