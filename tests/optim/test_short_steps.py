"""Steps with fewer backward passes than declared, as the last of an epoch, against the
reference at their own S and n.

All is float64, so a tolerance of 1e-12 (relative) is that of sums in another order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, ShardedDataParallel

from ..classifier import batches, make_model, ready, sample_gradient, weights
from ..model.reference_run import ReferenceAdaScale

WINDOW: dict[str, Any] = {
    "clip": "averages",
    "averaging_window": 0.05,
    "total_steps": 100,
    "single_gain": True,
}
THEIRS: dict[str, Any] = {
    "clip": "averages",
    "averaging": "effective",
    "window": 0.05,
    "total_steps": 100,
    "single_gain": True,
}
PASSES = [3, 3, 2, 3, 1, 3, 3, 2, 3, 3]  # of a step that declares 3


def both(
    world_size: int = 1, rank: int = 0, declares: str = "before", sharded: bool = False
) -> tuple[list[float], list[float], float, float]:
    """Gains and clocks of a loop with short steps, and of the reference that is told
    S and n of each; weights and theirs.
    """
    model = make_model()
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    net: Any = model
    if sharded:
        inner = OSS.wrap(inner)
        net = ShardedDataParallel(model, inner)
    elif world_size > 1:
        net = DistributedDataParallel(model)
    optimizer = AdaScale(
        inner, scale=1.5 * world_size, num_gradients_to_accumulate=3, **WINDOW
    )
    reference = ReferenceAdaScale(scale=1.5 * world_size, n=3 * world_size, **THEIRS)
    data = iter(batches(sum(PASSES) * world_size, 4))
    state = {"last": False}
    if declares == "asked":
        full = optimizer.plan
        optimizer.step_end = lambda number: (
            full.shortened(number, loss_divisor=3) if state["last"] else None
        )
    expected, gains = [], []
    for passes in PASSES:
        chunk = [[next(data) for _ in range(world_size)] for _ in range(passes)]
        samples = [
            sample_gradient(model, batch, optimizer.param_groups)
            for row in chunk
            for batch in row
        ]
        reference.scale, reference.n = passes / 2 * world_size, passes * world_size
        # nothing to learn from one: its gain is that of the averages at its scale
        if reference.n == 1:
            r = reference._gains(1)[1]
            reference.effective_steps += r
            reference.since_sample += r
            mean = samples[0]
        else:
            result = reference.step(samples)
            r, mean = result.gain, result.mean_gradient
        expected.append(r)
        if declares == "before" and passes < 3:
            optimizer.expect_passes(passes)
            optimizer.zero_grad()
        divided = passes if declares == "before" else 3
        before = weights(model).clone()
        for i, row in enumerate(chunk):
            state["last"] = i == passes - 1
            if declares == "late" and passes < 3 and i == passes - 1:
                optimizer.expect_passes(passes, loss_divided_by=3)
            if world_size > 1:
                net.require_backward_grad_sync = i == passes - 1
            x, y = row[rank]
            (F.cross_entropy(net(x), y) / divided).backward()
        optimizer.step()
        optimizer.zero_grad()
        gains.append(optimizer.last_step.gain)
        assert optimizer.gain() == gains[-1]  # of the short step, as τ has advanced
        np.testing.assert_allclose(
            (before - weights(model)).numpy(),
            0.05 * r * np.concatenate(mean),
            rtol=1e-9,
            atol=1e-15,
        )
    assert world_size > 1 or min(gains) < 1 < max(
        gains
    )  # a lone pass of half a base batch counts less than a base step
    return gains, expected, optimizer.effective_steps, reference.effective_steps


@pytest.mark.parametrize("declares", ["before", "late", "asked"])
def test_a_short_step_counts_for_the_passes_that_it_has(declares: str) -> None:
    gains, expected, tau, reference = both(declares=declares)
    assert gains == pytest.approx(expected, rel=1e-12)
    assert tau == pytest.approx(reference, rel=1e-12)


def two_workers(declares: str, sharded: bool) -> Any:
    import torch.distributed as dist

    return both(2, dist.get_rank(), declares, sharded)


@pytest.mark.also_simulated("late-*")
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "sharded"])
@pytest.mark.parametrize("declares", ["before", "late", "asked"])
def test_a_short_step_of_two_workers_does_so_too(
    pool: Any, declares: str, sharded: bool
) -> None:
    for gains, expected, tau, reference in pool(2).run(two_workers, declares, sharded):
        assert gains == pytest.approx(expected, rel=1e-12)
        assert tau == pytest.approx(reference, rel=1e-12)


def test_steps_of_one_pass_leave_the_averages_as_they_are_however_many_there_are() -> (
    None
):
    """Two of them could be compared with each other, as steps of one sample are; but
    they are taken amid steps of two.
    """
    model, optimizer = ready(scale=4.0, n=2)
    data = iter(batches(7, 4))
    learnt = (math.nan, math.nan)
    for passes in (2, 1, 1, 2, 1):
        if passes == 1:
            optimizer.expect_passes(1)
        for _ in range(passes):
            x, y = next(data)
            (F.cross_entropy(model(x), y) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        if passes == 1:
            assert optimizer.average_moments() == learnt
            assert math.isnan(optimizer.last_step.sigma2)
            assert math.isnan(optimizer.last_step.mu2)
        else:
            assert optimizer.average_moments() != learnt
            learnt = optimizer.average_moments()


@pytest.mark.parametrize(("passes", "after"), [(0, 0), (4, 0), (1, 1), (2, 2)])
def test_a_number_of_passes_that_cannot_be_is_refused(passes: int, after: int) -> None:
    model, optimizer = ready(scale=4.0, n=3)
    for x, y in batches(after, 4):
        (F.cross_entropy(model(x), y) / 3).backward()
    with pytest.raises(ValueError, match=rf"passes={passes}.*{after + 1} to 3"):
        optimizer.expect_passes(passes)


def test_a_step_that_comes_too_early_names_what_to_say() -> None:
    model, optimizer = ready(scale=4.0, n=3)
    for x, y in batches(2, 4):
        (F.cross_entropy(model(x), y) / 3).backward()
    with pytest.raises(
        RuntimeError, match=r"2 of 3 backward passes.*expect_passes\(2\)"
    ):
        optimizer.step()


@pytest.mark.parametrize("clip", [False, True])
def test_without_hooks_a_short_step_has_the_mean_of_its_passes_too(clip: bool) -> None:
    """The loss was divided by the passes of a full step. Clipping comes after the
    correction, which is made once.
    """
    model = make_model()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2
    )
    optimizer.unhook()
    (batch,) = batches(1, 4)
    (right,) = sample_gradient(model, batch, optimizer.param_groups)
    before = weights(model).clone()
    optimizer.expect_passes(1, loss_divided_by=2)
    (F.cross_entropy(model(batch[0]), batch[1]) / 2).backward()
    if clip:
        norm = optimizer.clip_grad_norm(0.5 * float(np.linalg.norm(right)))
        assert float(norm) == pytest.approx(float(np.linalg.norm(right)))
        right = right / 2
    optimizer.step()
    np.testing.assert_allclose(
        (before - weights(model)).numpy(), 0.05 * right, rtol=1e-5
    )
    assert optimizer.plan.passes == 2
    assert optimizer.at_boundary


@pytest.mark.parametrize("first", ["clear", "announce"])
def test_without_hooks_a_short_step_that_a_scaler_left_out_is_over(first: str) -> None:
    """Its gradients were computed and cleared. Those of the step before it are no sign
    of a pass.
    """
    model = make_model()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2
    )
    optimizer.unhook()
    (batch,) = batches(1, 4)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    if first == "clear":
        optimizer.zero_grad()
    optimizer.expect_passes(1, loss_divided_by=2)
    optimizer.zero_grad()
    optimizer.zero_grad()
    assert optimizer.plan.passes == 1
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.zero_grad()
    assert optimizer.plan.passes == 2
