"""AdaScale under a DistributedDataParallel with a communication hook.

A function whose name starts with an underscore runs on each rank of the pool.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the
# classes, not with their names.

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import AdaScale

from ..classifier import batches, make_model, weights
from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]


def _own(state: list[str], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A user's hook that returns another tensor than the bucket's, and not the mean:
    C must be of what it returns.
    """
    state.append("called")
    flat = bucket.buffer() / dist.get_world_size()
    return (
        dist.all_reduce(flat, async_op=True)
        .get_future()
        .then(lambda future: 0.9 * future.value()[0])
    )


@contextmanager
def compresses() -> Iterator[None]:
    """Let the hook return something else than the mean, without the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The reduced gradient is not the mean")
        yield


@compresses()
def _moments(hook: Any, state: Any, factor: float, rel: float) -> None:
    """Compare σ² and μ² with the formula for two gradient samples, whose mean the
    hook multiplies by a factor.
    """
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    ddp.register_comm_hook(state, hook)
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), scale=5.0, model=ddp
    )
    for step in range(3):
        here = batches(8, 4)[2 * step : 2 * step + 2]
        samples = [
            torch.cat(
                [
                    g.reshape(-1)
                    for g in torch.autograd.grad(
                        F.cross_entropy(model(x), y), [*model.parameters()]
                    )
                ]
            )
            for x, y in here
        ]
        a = sum(float(g.square().sum()) for g in samples) / 2
        c = factor**2 * float((sum(samples) / 2).square().sum())  # type: ignore[operator]
        x, y = here[dist.get_rank()]
        F.cross_entropy(ddp(x), y).backward()
        adascale.step()
        adascale.zero_grad()
        # S = 5, n = 2: σ² = S/(n − 1) · (A − C), μ² = C − σ²/S (DESIGN's formulas for
        # the samples of one step)
        sigma2 = 5.0 * (a - c)
        assert adascale.last_step.sigma2 == pytest.approx(sigma2, rel=rel)
        assert adascale.last_step.mu2 == pytest.approx(
            c - sigma2 / 5.0, rel=rel, abs=rel
        )
    assert state != []  # a user's hook was called


@pytest.mark.parametrize(
    ("hook", "state", "factor", "rel"),
    [(_own, [], 0.9, 1e-9), (fp16_compress_hook, None, 1.0, 5e-3)],
    ids=["own", "fp16"],
)
def test_the_reduced_gradient_is_what_the_hook_returns(
    pool: Pool, hook: Any, state: Any, factor: float, rel: float
) -> None:
    pool(2).run(_moments, hook, state, factor, rel)


@compresses()
def _power_sgd(passes: int, late: bool) -> float:
    """It starts collectives when others come back, in a thread of its own: ours must
    not meet those.
    """
    torch.manual_seed(1)
    model = nn.Linear(60, 50)
    ddp = DistributedDataParallel(model)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if late:
        adascale = AdaScale(optimizer, num_gradients_to_accumulate=passes, model=ddp)
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        ddp.register_comm_hook(state, powerSGD_hook)
        adascale = AdaScale(optimizer, num_gradients_to_accumulate=passes, model=ddp)
    for step in range(8):
        for i in range(passes):
            ddp(torch.randn(4, 60) + step + i).square().mean().div(passes).backward()
        # A is sent after all collectives of the hook.
        assert not adascale.current.observer._sent_early  # type: ignore[union-attr]
        adascale.step()
        adascale.zero_grad()
    return adascale.gain()


@pytest.mark.also_simulated("1-False")
@pytest.mark.parametrize(("passes", "late"), [(1, False), (2, False), (1, True)])
def test_a_hook_that_reduces_in_several_rounds(
    pool: Pool, passes: int, late: bool
) -> None:
    gains = pool(2).run(_power_sgd, passes, late)
    assert gains[0] == gains[1]
    assert math.isfinite(gains[0])


@dataclass
class Link:
    """State of a hook: whether its reductions fail, and those that it has started."""

    down: bool = False
    started: list[torch.futures.Future[list[Tensor]]] = field(default_factory=list)


def _fails_at_times(
    state: Link, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A user's hook whose reduction may fail, which DDP finds as it waits, and can
    go on after.
    """
    fails = state.down

    def mean(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        if fails:
            raise ConnectionError("the link is down")
        return future.value()[0] / dist.get_world_size()

    state.started.append(dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    return state.started[-1].then(mean)


def _a_pass_fails() -> list[list[float]]:
    results = []
    for broken in (False, True):
        model, state = make_model(), Link()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        ddp.register_comm_hook(state, _fails_at_times)
        adascale = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.05), scale=6.0, model=ddp
        )
        gains = []
        for step in range(4):
            x, y = batches(8, 4)[2 * step + dist.get_rank()]
            if broken and step == 2:
                state.down = True
                with pytest.raises(Exception, match="the link is down"):
                    F.cross_entropy(ddp(x), y).backward()
                state.down = False
                # DDP does not, and they write into its buckets
                torch.futures.wait_all(state.started)
                dist.barrier()
                adascale.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            adascale.step()
            adascale.zero_grad()
            gains.append(adascale.last_step.gain)
        results.append([*gains, *weights(model).tolist()])
    return results


def test_a_pass_that_an_exception_ended_leaves_nothing_in_the_next(pool: Pool) -> None:
    for unbroken, broken in pool(2).run(_a_pass_fails):
        assert broken == unbroken
