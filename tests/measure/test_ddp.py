"""Norms from DDP's buckets against norms from hooks on parameters and against the reference, whatever hook reduces them.

Buckets are of about 100 bytes, so that even these models have several. A function whose name starts with an underscore runs
on each rank of the pool.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the classes, not with their names.

import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale
from ray_adascale.measure.ddp import DDPBucketObserver, measure_buckets
from ray_adascale.measure.observers import HookObserver

from ..classifier import batches, in_shares, make_model, sample_gradient, weights
from ..model.reference_run import ReferenceAdaScale
from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases: in every bucket, each group lies in pieces."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02}]


def _against_the_reference(oss: bool, view: bool, static: bool, shares: bool) -> list[float]:
    with in_shares() if shares else nullcontext():
        return _steps_against_the_reference(oss, view, static)


def _steps_against_the_reference(oss: bool, view: bool, static: bool) -> list[float]:
    rank, world, scale = dist.get_rank(), dist.get_world_size(), 6.0
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, gradient_as_bucket_view=view, static_graph=static)
    measure_buckets(ddp)
    inner: Any = torch.optim.SGD(by_kind(model), lr=0.05)
    adascale = AdaScale(OSS.wrap(inner) if oss else inner, scale=scale, model=ddp)
    assert isinstance(adascale._statistics.observer, DDPBucketObserver)
    reference = ReferenceAdaScale(scale=scale, n=world)
    gains = []
    for step in range(6):
        here = batches(world * 6, 4)[step * world : (step + 1) * world]
        expected = reference.step([sample_gradient(model, batch, adascale.param_groups) for batch in here])
        before = [p.detach().clone() for p in model.parameters()]
        x, y = here[rank]
        F.cross_entropy(ddp(x), y).backward()
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-10)
        adascale.step()
        adascale.zero_grad()
        assert [adascale.gain(g) for g in range(2)] == pytest.approx(expected.gains, rel=1e-10)
        moved = [before[i] - p.detach() for i, p in enumerate(model.parameters())]
        for g, lr in enumerate((0.05, 0.02)):
            way = torch.cat([d.reshape(-1) for d in moved if (d.dim() > 1) == (g == 0)])
            np.testing.assert_allclose(way.numpy(), lr * expected.gains[g] * expected.mean_gradient[g], rtol=1e-9)
        gains.append(adascale.gain())
    assert len(ddp_buckets(adascale)) > 1
    assert any(1.05 < gain < 0.95 * scale for gain in gains)
    return [*gains, adascale.effective_steps, *weights(model).tolist()]


def ddp_buckets(adascale: AdaScale) -> set[tuple[int, ...]]:
    """The parameters of each bucket that was seen."""
    assert isinstance(adascale._statistics.observer, DDPBucketObserver)
    return set(adascale._statistics.observer._segments)


@pytest.mark.also_simulated("two", "oss-static")
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, (False, False, False, False)),
        (3, (False, True, False, False)),
        (2, (True, False, True, False)),
        (3, (False, False, False, True)),
    ],
    ids=["two", "three-view", "oss-static", "three-shares"],
)
def test_gains_and_weights_equal_the_reference(pool: Pool, world: int, options: tuple[bool, ...]) -> None:
    results = pool(world).run(_against_the_reference, *options)
    assert all(result == results[0] for result in results)


def _own(state: list[str], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A user's hook that returns another tensor than the bucket's, and not the mean: C must be of what it returns."""
    state.append("called")
    flat = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda future: 0.9 * future.value()[0])


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "default": lambda: (None, None),
    "allreduce": lambda: (allreduce_hook, None),
    "fp16": lambda: (fp16_compress_hook, None),
    "own": lambda: (_own, []),
}


class Skipping(nn.Module):
    """The last layer may be left out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
        self.last = nn.Linear(3, 3).to(dtype)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.layers(x)
        return x if skip else x + 0.3 * self.last(x)


def _against_hooks(hook_name: str, dtype: torch.dtype = torch.float32, unused: bool = False, passes: int = 1) -> None:
    ends = []
    for buckets in (False, True):
        model = Skipping(dtype)
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, find_unused_parameters=unused)
        hook, state = HOOKS[hook_name]()
        if buckets:
            measure_buckets(ddp, hook, state)
        elif hook is not None:
            ddp.register_comm_hook(state, hook)
        inner = torch.optim.SGD(by_kind(model), lr=0.0)
        adascale = AdaScale(inner, scale=5.0, num_gradients_to_accumulate=passes, model=ddp)
        assert type(adascale._statistics.observer) is (DDPBucketObserver if buckets and passes == 1 else HookObserver)
        trace = []
        for step in range(5):
            for i, (x, y) in enumerate(batches(passes, 4)):
                x = (torch.roll(x, step, 1) + 0.5 * torch.roll(x, 2 + dist.get_rank() + i, 1)).to(dtype)  # alike
                skip = unused and (step + dist.get_rank()) % 2 == 1  # each layer is used by some worker
                (F.cross_entropy(ddp(x, skip).float(), y) / passes).backward()
            adascale.step()
            adascale.zero_grad()
            sigma2, mu2 = adascale.group_moments()
            trace.append([adascale.gain(), adascale.gain(0), adascale.gain(1), *sigma2, *mu2])
        assert state != []  # a user's hook was called
        ends.append(np.array(trace))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-6)
    assert ((ends[0][:, :3] > 1.01) & (ends[0][:, :3] < 4.9)).any()  # not one of clipped ends


@pytest.mark.also_simulated("default", "unused", "bf16", "own")
@pytest.mark.parametrize(
    "options",
    [
        {"hook_name": "default"},
        {"hook_name": "default", "unused": True},
        {"hook_name": "allreduce", "dtype": torch.bfloat16},
        {"hook_name": "fp16"},
        {"hook_name": "own"},
        {"hook_name": "own", "passes": 2},
    ],
    ids=["default", "unused", "bf16", "fp16", "own", "accumulate"],
)
def test_gains_are_those_of_hooks_on_parameters(pool: Pool, options: dict[str, Any]) -> None:
    pool(2).run(_against_hooks, **options)


def _two_optimizers() -> None:
    ends = []
    for buckets in (False, True):
        model = make_model(torch.float32)
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        if buckets:
            measure_buckets(ddp)
        both = [AdaScale(torch.optim.SGD(model[i].parameters(), lr=0.05), scale=4.0, model=ddp) for i in (0, 2)]
        trace = []
        for x, y in batches(5, 4, torch.float32):
            F.cross_entropy(ddp(torch.roll(x, dist.get_rank(), 1)), y).backward()
            for adascale in both:
                adascale.step()
                adascale.zero_grad()
            trace.append([adascale.gain() for adascale in both])
        ends.append(np.array(trace))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5)
    assert (ends[0] > 1.01).any(axis=0).all()


@pytest.mark.also_simulated
def test_two_optimizers_of_one_model_each_get_their_gain(pool: Pool) -> None:
    pool(2).run(_two_optimizers)


def _power_sgd(passes: int, measured: bool) -> float:
    """It starts collectives when others come back, in a thread of its own: ours must not meet those."""
    torch.manual_seed(1)
    model = nn.Linear(60, 50)
    ddp = DistributedDataParallel(model)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    if measured:
        measure_buckets(ddp, powerSGD_hook, state)
    else:
        ddp.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    adascale = AdaScale(optimizer, num_gradients_to_accumulate=passes, model=ddp)
    for step in range(8):
        for i in range(passes):
            ddp(torch.randn(4, 60) + step + i).square().mean().div(passes).backward()
        adascale.step()
        adascale.zero_grad()
    return adascale.gain()


@pytest.mark.also_simulated("1-True")
@pytest.mark.parametrize(("passes", "measured"), [(1, True), (2, True), (1, False)])
def test_a_hook_that_reduces_in_several_rounds(pool: Pool, passes: int, measured: bool) -> None:
    gains = pool(2).run(_power_sgd, passes, measured)
    assert gains[0] == gains[1]
    assert math.isfinite(gains[0])


def _comes_and_goes() -> None:
    model = make_model(torch.float32)
    ddp = DistributedDataParallel(model)
    measure_buckets(ddp)
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), model=ddp)
    for passes, factor in ((1, 1.0), (2, 1.0), (1, 1.0), (1, math.inf), (1, 1.0)):
        # The registered hook outlives the observer that it measured for.
        adascale.set_num_gradients_to_accumulate(passes)
        assert type(adascale._statistics.observer) is (DDPBucketObserver if passes == 1 else HookObserver)
        before = weights(model), adascale.average_moments()
        for x, y in batches(passes, 4, torch.float32):
            loss = F.cross_entropy(ddp(torch.roll(x, dist.get_rank(), 1)), y) / passes
            (loss * (factor if dist.get_rank() == 1 else 1.0)).backward()
        adascale.step()
        adascale.zero_grad()
        skipped = factor == math.inf
        assert adascale.last_step.skipped == skipped
        assert torch.equal(before[0], weights(model)) == skipped
        assert (before[1] == adascale.average_moments()) == skipped
    gone = weakref.ref(adascale)
    del adascale
    gc.collect()
    assert gone() is None
    F.cross_entropy(ddp(x), y).backward()  # nobody listens


@pytest.mark.also_simulated
def test_the_observer_comes_and_goes_and_an_overflow_is_left_out(pool: Pool) -> None:
    pool(2).run(_comes_and_goes)


def _refused() -> None:
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        measure_buckets(make_model())  # type: ignore[arg-type]
    ddp = DistributedDataParallel(make_model())
    ddp.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(ValueError, match="communication hook already"):
        measure_buckets(ddp)
    assert type(AdaScale(torch.optim.SGD(ddp.parameters(), lr=0.1), model=ddp)._statistics.observer) is HookObserver

    ddp = DistributedDataParallel(make_model())
    measure_buckets(ddp)
    with pytest.raises(ValueError, match="communication hook already"):
        measure_buckets(ddp)
    stranger = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match="1 of the optimizer's 5 parameters are not in the model"):
        AdaScale(torch.optim.SGD([*ddp.parameters(), stranger], lr=0.1), model=ddp)
    adascale = AdaScale(torch.optim.SGD(ddp.parameters(), lr=0.1), model=ddp)
    with pytest.raises(ValueError, match=r"shape \(7,\) is in the optimizer and not in model="):
        adascale.add_param_group({"params": [stranger]})


def test_what_cannot_be_measured_is_refused(pool: Pool) -> None:
    pool(2).run(_refused)


@dataclass
class Link:
    """State of a hook: whether its reductions fail, and those that it has started."""

    down: bool = False
    started: list[torch.futures.Future[list[Tensor]]] = field(default_factory=list)


def _fails_at_times(state: Link, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A user's hook whose reduction may fail, which DDP finds as it waits, and can go on after."""
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
        measure_buckets(ddp, _fails_at_times, state)
        adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=6.0, model=ddp)
        assert isinstance(adascale._statistics.observer, DDPBucketObserver)
        gains = []
        for step in range(4):
            x, y = batches(8, 4)[2 * step + dist.get_rank()]
            if broken and step == 2:
                state.down = True
                with pytest.raises(Exception, match="the link is down"):
                    F.cross_entropy(ddp(x), y).backward()
                state.down = False
                torch.futures.wait_all(state.started)  # DDP does not, and they write into its buckets
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
