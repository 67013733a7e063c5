"""``AdaScale.sample_weights``: unequal micro-batches against the literal formula, samples
that count for nothing, and weights that can't be right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, ShardedDataParallel

from ..model.reference_run import moments

STEPS = 4
UNITS = ((3, 5), (1, 0), (0, 7), (4, 4))
"""Tokens of the micro-batches of a step: of each rank one, or of one worker two."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def micro_batch(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + index)
    return torch.randn(8, 3, generator=generator, dtype=torch.float64)


def loss_of(model: Any, x: Tensor, units: int) -> Tensor:
    """The mean over the units; NaN if there are none."""
    return (model(x) - x.sum(dim=1, keepdim=True)).square()[:units].mean()


def literal(units: tuple[int, ...], step: int, scale: float) -> tuple[float, float]:
    """σ² and μ² of the samples with units, at the first weights."""
    model, samples, weights = net(), [], []
    for index, count in enumerate(units):
        if count == 0:
            continue
        loss = loss_of(model, micro_batch(step, index), count)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        samples.append(torch.cat([g.flatten() for g in grads]).numpy())
        weights.append(count / sum(units))
    if len(samples) == 1:
        return float("nan"), float("nan")
    return tuple(moments(samples, weights, scale))


def weighted(loss: Tensor, count: int, factor: float) -> Tensor:
    """A loss with its factor; of no unit, zero that depends on the parameters."""
    return (loss if count else loss.nan_to_num(0.0)) * factor


@pytest.mark.parametrize("fused", [False, True])
def test_passes_of_one_worker(fused: bool) -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    adascale = AdaScale(sgd, num_gradients_to_accumulate=2)
    averages = []
    for step in range(STEPS):
        units = UNITS[step]
        adascale.sample_weights = [count / sum(units) for count in units]
        for index, count in enumerate(units):
            loss = loss_of(model, micro_batch(step, index), count)
            weighted(loss, count, count / sum(units)).backward()
        adascale.step()
        adascale.zero_grad()
        found = adascale.last_step.sigma2, adascale.last_step.mu2
        np.testing.assert_allclose(found, literal(units, step, 2.0), rtol=1e-6)
        averages.append(adascale.average_moments())
    assert adascale.steps == STEPS
    # a single sample is none
    assert averages[0] == averages[1] == averages[2] != averages[3]


def on_workers(sharding: str, every: int, fused: bool) -> list[tuple[float, float]]:
    model, rank = net(), dist.get_rank()
    wrapped: Any
    if sharding == "zero2":
        sgd: Any = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.0, fused=fused)
        wrapped = ShardedDataParallel(model, sgd)
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
        wrapped = DistributedDataParallel(model)
    adascale = AdaScale(
        sgd, averaging_window=0.05, total_steps=1000, measure_every=every
    )
    found, averages = [], []
    for step in range(STEPS):
        units = UNITS[step]
        w = units[rank] / sum(units)
        adascale.sample_weights = torch.tensor([w])
        loss = loss_of(wrapped, micro_batch(step, rank), units[rank])
        weighted(loss, units[rank], 2 * w).backward()
        adascale.step()
        adascale.zero_grad()
        found.append((adascale.last_step.sigma2, adascale.last_step.mu2))
        averages.append(adascale.average_moments())
        assert not adascale.last_step.skipped
    if every == 1:  # a single sample is none
        assert averages[0] == averages[1] == averages[2] != averages[3]
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("sharding", ["none", "zero2"])
def test_workers_without_units(
    pool: Any, sharding: str, every: int, fused: bool
) -> None:
    first, second = pool(2).run(on_workers, sharding, every, fused)
    np.testing.assert_array_equal(first, second)
    expected = [literal(UNITS[step], step, 2.0) for step in range(STEPS)]
    kept = range(STEPS) if every == 1 else range(0, STEPS, every)
    for step in kept:
        np.testing.assert_allclose(first[step], expected[step], rtol=1e-5)


def refused(weights: Any) -> str:
    """The error of a step whose workers set these weights."""
    model = net()
    wrapped = DistributedDataParallel(model)
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.01))
    rank = dist.get_rank()
    adascale.sample_weights = weights[rank]
    try:
        loss_of(wrapped, micro_batch(0, rank), 8).backward()
        adascale.step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (([1200], [900]), "add up to 2100. Must be 1"),
        (([1.0], [1.0]), "add up to 2. Must be 1"),
        (([0.0], [0.0]), "add up to 0. Must be 1"),
        (([0.5], None), "1 of 2 workers have set them"),
    ],
)
def test_weights_that_are_no_shares_raise_on_all_workers(
    pool: Any, weights: Any, message: str
) -> None:
    first, second = pool(2).run(refused, weights)
    assert message in first
    assert first == second


def test_no_weights_are_right(pool: Any) -> None:
    assert pool(2).run(refused, ([0.5], [0.5])) == ["", ""]
    assert pool(2).run(refused, (None, None)) == ["", ""]


@pytest.mark.parametrize("weights", [0.5, ["a"], [-0.5, 1.5], [float("nan"), 1], ["1"]])
def test_what_is_no_list_of_weights_raises_where_it_is_set(weights: Any) -> None:
    adascale = AdaScale(
        torch.optim.SGD(net().parameters(), lr=0.1), num_gradients_to_accumulate=2
    )
    if weights == ["1"]:
        adascale.sample_weights = weights
        assert adascale.sample_weights == [1.0]
        return
    with pytest.raises(ValueError, match="Invalid sample_weights="):
        adascale.sample_weights = weights
