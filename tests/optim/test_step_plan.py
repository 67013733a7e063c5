"""The plan of a step by hand-worked numbers; its end, its payload and its result as
AdaScale has them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ray_adascale import AdaScale, StepPlan, StepResult

from ..classifier import backward, batches, make_model, ready, weights

# ---- the plan ------------------------------------------------------------------------


def test_a_shortened_plan_has_its_share_of_the_scale() -> None:
    full = StepPlan(passes=4, workers=2, given_scale=3.0)
    assert full.num_samples == 8
    assert full.multiple_of_mean == 1
    assert full.shortened(3) == StepPlan(passes=3, workers=2, given_scale=2.25)
    assert full.shortened(3, loss_divisor=4).multiple_of_mean == 0.75
    assert full.shortened(1, scale=0.7) == StepPlan(
        passes=1, workers=2, given_scale=0.7
    )
    assert full.shortened(4) == full
    undivided = StepPlan(passes=4, given_scale=3.0, loss_divisor=1)
    assert undivided.shortened(2) == StepPlan(passes=2, given_scale=1.5, loss_divisor=1)
    assert undivided.shortened(2).multiple_of_mean == 2
    odd = StepPlan(passes=3, given_scale=0.1)
    assert odd.shortened(3).scale == 0.1  # 0.1 · 3 / 3 is not


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"passes": 0}, "passes=0"),
        ({"passes": 1, "workers": 0}, "workers=0"),
        ({"passes": 1, "given_scale": math.inf}, "scale=inf"),
        ({"passes": 1, "given_scale": 0.0}, "scale=0.0"),
        ({"passes": 1, "loss_divisor": 0}, "loss_divisor=0"),
    ],
)
def test_a_number_out_of_its_range_is_refused(
    wrong: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        StepPlan(**wrong)


@pytest.mark.parametrize("passes", [0, 4])
def test_a_shortened_plan_has_at_most_all_passes(passes: int) -> None:
    with pytest.raises(ValueError, match=rf"passes={passes}.*between 1 and 3"):
        StepPlan(passes=3).shortened(passes)


# ---- the end -------------------------------------------------------------------------


def test_the_end_is_asked_as_each_pass_begins_until_one_is_the_last() -> None:
    model, optimizer = ready(scale=4.0, n=4)
    asked: list[tuple[int, bool]] = []
    full = optimizer.plan
    assert full == StepPlan(passes=4, given_scale=4.0)

    def step_end(number: int) -> StepPlan | None:
        asked.append((number, optimizer.current.inferred.made == number - 1))
        return (
            full.shortened(number, scale=2.5, loss_divisor=4)
            if number == 2 and len(asked) < 4
            else None
        )

    optimizer.step_end = step_end
    data = batches(6, 4)
    backward(model, data[:2], 4)
    assert asked == [(1, True), (2, True)]
    assert optimizer.plan == StepPlan(passes=2, given_scale=2.5, loss_divisor=4)
    mean = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    twin = make_model()
    for x, y in data[:2]:
        (F.cross_entropy(twin(x), y) / 2).backward()
    for found, p in zip(mean, twin.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-12, atol=1e-15)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.plan == full
    backward(model, data[2:], 4)
    # the fourth pass is the declared last
    assert asked[2:] == [(1, True), (2, True), (3, True)]
    assert optimizer.plan == full
    optimizer.step()


@pytest.mark.parametrize("passes", [1, 3])
def test_an_accumulating_step_is_one_that_lacks_its_last_pass(passes: int) -> None:
    model, optimizer = ready(scale=4.0, n=3)
    if passes < 3:
        optimizer.expect_passes(passes)
    found = [optimizer.current.accumulating]
    for x, y in batches(passes, 4):
        (F.cross_entropy(model(x), y) / passes).backward()
        found.append(optimizer.current.accumulating)
    assert found == [False, *[True] * (passes - 1), False]
    optimizer.step()
    assert not optimizer.current.accumulating


# ---- the batch -----------------------------------------------------------------------


def test_scale_and_passes_change_together_and_hooks_are_set_once() -> None:
    model, optimizer = ready(scale=2.0, n=2)
    hooked = [p.register_hook(lambda grad: None).id for p in model.parameters()]
    theta = optimizer.smoothing
    plan = StepPlan(base_batch_size=4, global_batch_size=32, passes=4)
    optimizer.set_plan(plan)
    assert all(
        max(p._backward_hooks) == last
        for p, last in zip(model.parameters(), hooked, strict=True)
    )
    assert optimizer.plan == plan
    assert (optimizer.scale, optimizer.num_samples) == (8.0, 4)
    assert optimizer.smoothing == theta
    optimizer.set_num_gradients_to_accumulate(3)
    assert (optimizer.scale, optimizer.num_samples) == (8.0, 3)
    optimizer.set_scale(5.0)
    assert (optimizer.scale, optimizer.num_samples) == (5.0, 3)
    for wrong in (
        lambda: optimizer.set_scale(math.nan),
        lambda: optimizer.set_plan(StepPlan(workers=2)),
    ):
        with pytest.raises(ValueError, match="Invalid"):
            wrong()
    assert (optimizer.scale, optimizer.num_samples) == (5.0, 3)


# ---- shared numbers ------------------------------------------------------------------


def _summed() -> list[Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, model = dist.get_rank(), make_model()
    ddp = DistributedDataParallel(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05))
    out: list[Any] = []
    for step, (x, y) in enumerate(batches(3, 4)):
        if step < 2:
            optimizer.current.share(
                rank=torch.tensor(rank + 1.0), step=torch.tensor(10.0 * step)
            )
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(optimizer.last_step.shared)
    return out


@pytest.mark.also_simulated
def test_shared_numbers_are_summed_over_workers_and_are_of_one_step(pool: Any) -> None:
    for found in pool(2).run(_summed):
        assert found == [{"rank": 3.0, "step": 0.0}, {"rank": 3.0, "step": 20.0}, {}]


@pytest.mark.parametrize(
    "numbers", [{"loss": torch.zeros(2)}, {"c": torch.tensor(1.0)}], ids=str
)
def test_a_shared_number_has_no_dimension_and_a_name_of_its_own(
    numbers: dict[str, Tensor],
) -> None:
    _, optimizer = ready()
    with pytest.raises(ValueError, match="Must be 0-dim, and not"):
        optimizer.current.share(**numbers)


# ---- the result ----------------------------------------------------------------------


def test_the_result_of_a_step_is_a_value_that_stays() -> None:
    model, optimizer = ready()
    assert optimizer.last_step.gain == 1.0
    assert optimizer.last_step.steps == 0
    assert math.isnan(optimizer.last_step.sigma2)
    results: list[StepResult] = []
    for i in range(3):
        backward(model, batches(6, 4)[2 * i : 2 * i + 2])
        optimizer.step()
        optimizer.zero_grad()
        results.append(optimizer.last_step)
    assert [result.steps for result in results] == [1, 2, 3]
    assert results[-1].effective_steps == pytest.approx(
        sum(result.gain for result in results), rel=1e-15
    )
    assert all(result.lr_factor == result.gain > 1 for result in results)
    assert len({result.sigma2 for result in results}) == 3
    before = weights(model).clone()
    backward(model, [(x * math.nan, y) for x, y in batches(2, 4)])
    optimizer.step()
    skipped = optimizer.last_step
    assert skipped.skipped
    assert (skipped.gain, skipped.effective_steps, skipped.steps) == (
        results[-1].gain,
        results[-1].effective_steps,
        3,
    )
    assert not results[-1].skipped
    assert torch.equal(weights(model), before)
