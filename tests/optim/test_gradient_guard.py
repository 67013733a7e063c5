"""What a loop does to gradients between a step's passes and after the last, and
passes that end in an exception.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ray_adascale import OSS, AdaScale, AdaScaleConfig, Run, ShardedDataParallel

from ..classifier import batches, make_model, weights

OF_A_RUN: dict[str, Any] = {
    "clip": "averages",
    "averaging_window": 0.05,
    "total_steps": 1000,
    "single_gain": True,
}


def wrapped(model: nn.Module, passes: int = 4, **settings: Any) -> AdaScale:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return AdaScale(
        inner, num_gradients_to_accumulate=passes, **{**OF_A_RUN, **settings}
    )


def run_of(
    model: nn.Module, *, passes: int = 4, total: int = 100, **settings: Any
) -> Run:
    data = batches(64, 4)
    dataset = TensorDataset(
        torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    )
    config = AdaScaleConfig(
        base_batch_size=4,
        per_worker_batch_size=4,
        accumulation=passes,
        total_steps=total,
        **settings,
    )
    return Run(
        model, torch.optim.SGD(model.parameters(), lr=0.05), None, dataset, config
    )


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clear(model: nn.Module) -> None:
    model.zero_grad()


# ---- between the passes --------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("change", "error"),
    [(clip, "changed between.*run.is_last_pass"), (clear, "cleared between")],
)
def test_a_run_whose_gradients_are_changed_between_passes_is_refused_in_any_step(
    change: Callable[[nn.Module], None], error: str, every: int
) -> None:
    model, steps = make_model(), 0
    run = run_of(model, measure_every=every)
    with pytest.raises(RuntimeError, match=error):
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            if steps == 7 and not run.is_last_pass:
                change(model)
            steps += run.step()
    assert steps == 7


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("change", "error"),
    [(clip, "changed between.*optimizer.is_last_pass"), (clear, "cleared")],
)
def test_a_loop_whose_gradients_are_changed_between_passes_is_refused_in_any_step(
    change: Callable[[nn.Module], None], error: str, every: int
) -> None:
    model = make_model()
    ada, data = wrapped(model, measure_every=every), iter(batches(80, 4))

    def step(change: Callable[[nn.Module], None] | None) -> None:
        for _ in range(4):
            x, y = next(data)
            (F.cross_entropy(model(x), y) / 4).backward()
            if change is not None and not ada.is_last_pass:
                change(model)
        ada.step()
        ada.zero_grad()

    for _ in range(5):
        step(None)
    with pytest.raises(RuntimeError, match=error):
        step(change)


# ---- gradients of no backward pass ---------------------------------------------------


def set_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compute the gradient without a backward pass, and set it."""
    params = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), params)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


def steps_by_hand(
    every: int, fused: bool, sharding: str = "none", by_hand: Any = range(12)
) -> list[tuple[int, str]]:
    """Take 12 steps, some with gradients that are set by hand; return the warnings."""
    model, workers = make_model(), 1
    if sharding == "oss":
        inner: Any = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.05)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    wrapped_model: nn.Module = model
    if dist.is_initialized():
        workers = dist.get_world_size()
        wrapped_model = DistributedDataParallel(model)
    passes = 2 // workers
    settings = {**OF_A_RUN, "measure_every": every}
    ada = AdaScale(inner, num_gradients_to_accumulate=passes, **settings)
    data, found = iter(batches(40, 4)), []
    for step in range(12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if step in by_hand:
                set_by_hand(model, *next(data))
            else:
                for _ in range(passes):
                    x, y = next(data)
                    (F.cross_entropy(wrapped_model(x), y) / passes).backward()
            ada.step()
            ada.zero_grad()
        found += [(step, str(w.message)) for w in caught]
    assert ada.steps == 12
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_gradients_that_are_set_by_hand_are_told_once(every: int, fused: bool) -> None:
    ((step, text),) = steps_by_hand(every, fused)
    # a step without a sample is followed by one that is measured
    assert step == (3 if fused else 2)
    assert "noise of 3 steps in a row" in text
    assert "no backward pass was seen" in text


def test_single_steps_by_hand_are_allowed() -> None:
    assert steps_by_hand(1, False, by_hand=(0, 1, 5, 7, 8)) == []


@pytest.mark.parametrize("sharding", ["none", "oss"])
def test_workers_are_told_of_gradients_that_are_set_by_hand(
    pool: Any, sharding: str
) -> None:
    first, second = pool(2).run(steps_by_hand, 1, False, sharding)
    assert [step for step, _ in first] == [2]
    assert "no backward pass was seen" in first[0][1]
    assert second == []


@pytest.mark.parametrize("client", ["run", "bare"])
def test_clipping_in_the_last_pass_is_a_plain_loops(client: str) -> None:
    plain, model = make_model(), make_model()
    data = batches(64, 4)
    if client == "bare":
        ada = wrapped(model, scale=1.0)
        for i, (x, y) in enumerate(data[:32]):
            (F.cross_entropy(model(x), y) / 4).backward()
            assert ada.is_last_pass == (i % 4 == 3)
            if ada.is_last_pass:
                clip(model)
                ada.step()
                ada.zero_grad()
        order = data[:32]
    else:
        run, order = run_of(model, total=8), []
        run = run_of(model, total=8, shuffle=False)
        run.optimizer.set_plan(run.plan.at_scale(1.0))
        for x, y in run:
            order.append((x, y))
            run.backward(F.cross_entropy(run.model(x), y))
            if run.is_last_pass:
                clip(model)
            run.step()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05)
    for i, (x, y) in enumerate(order):
        (F.cross_entropy(plain(x), y) / 4).backward()
        if i % 4 == 3:
            clip(plain)
            sgd.step()
            sgd.zero_grad()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-12, atol=0)


# ---- after the last pass -------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("at", [3, 4])  # measured, and not
def test_a_gradient_that_is_made_nan_by_hand_skips_the_step(
    at: int, fused: bool
) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    ada = AdaScale(inner, num_gradients_to_accumulate=2, measure_every=3, **OF_A_RUN)
    data = iter(batches(20, 4))
    for step in range(6):
        before, tau, moments = (
            weights(model).clone(),
            ada.effective_steps,
            ada.average_moments(),
        )
        for _ in range(2):
            x, y = next(data)
            (F.cross_entropy(model(x), y) / 2).backward()
        if step == at:
            model[0].weight.grad[0, 0] = math.nan
        ada.step()
        ada.zero_grad()
        assert ada.last_step.skipped == (step == at)
        if step == at:
            assert torch.equal(weights(model), before)
            assert (ada.effective_steps, ada.average_moments()) == (tau, moments)


def _nan_on_one_shard(sharded: bool) -> tuple[list[bool], list[float]]:
    model = make_model()
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    inner = OSS.wrap(inner)
    net: Any = (
        ShardedDataParallel(model, inner) if sharded else DistributedDataParallel(model)
    )
    ada, skipped = AdaScale(inner, **OF_A_RUN), []
    rank = torch.distributed.get_rank()
    for step, (x, y) in enumerate(batches(8, 4)[rank::2]):
        F.cross_entropy(net(x), y).backward()
        if step == 2:
            for grad in ada.current.sharding.numbers():
                grad.view(-1)[0] = math.nan
        ada.step()
        ada.zero_grad()
        skipped.append(ada.last_step.skipped)
    return skipped, weights(model).tolist()


@pytest.mark.parametrize("sharded", [False, True])
def test_workers_agree_that_a_gradient_was_made_nan_by_hand(
    pool: Any, sharded: bool
) -> None:
    ours, theirs = pool(2).run(_nan_on_one_shard, sharded)
    assert ours == theirs
    assert ours[0] == [False, False, True, False]


# ---- a pass that ends in an exception ------------------------------------------------


class OutOfMemory(RuntimeError):
    pass


class Fails(torch.autograd.Function):
    """The identity, whose backward pass raises while it is told to."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fails.now:
            raise OutOfMemory("no memory")
        return grad


def loss_of(model: nn.Module, x: Tensor, y: Tensor, fails: bool) -> Tensor:
    """The loss; with ``fails`` its backward pass raises once the last layer has its
    gradients.
    """
    Fails.now = fails
    first, second, last = model
    return F.cross_entropy(last(Fails.apply(second(first(x)))), y)


@pytest.mark.parametrize("at", [1, 4])  # passes of the step
def test_a_loop_that_goes_on_after_a_failed_pass_must_clear_the_step(at: int) -> None:
    data = batches(16, 4)

    def train(clears: bool | None) -> Tensor:
        model = make_model()
        ada = wrapped(model)
        for step in range(3):
            chunk, number = data[4 * step : 4 * step + 4], 0
            failed = clears is None
            while number < 4:
                number += 1
                fails = step == 1 and number == at and not failed
                x, y = chunk[number - 1]
                try:
                    (loss_of(model, x, y, fails) / 4).backward()
                except OutOfMemory:
                    failed, number = True, 0 if clears else number - 1
                    if clears:
                        ada.zero_grad()
            ada.step()
            ada.zero_grad()
        return weights(model)

    assert torch.equal(train(True), train(None))
    with pytest.raises(
        RuntimeError, match=r"ended in an exception.*optimizer\.zero_grad\(\)"
    ):
        train(False)


@pytest.mark.parametrize("every", [1, 2])  # the step is measured, or not
def test_a_step_right_after_a_failed_last_pass_is_refused(every: int) -> None:
    model, data = make_model(), iter(batches(4, 4))
    ada = wrapped(model, passes=2, measure_every=every)
    for fails in (False, True):
        (loss_of(model, *next(data), False) / 2).backward()
        with pytest.raises(OutOfMemory) if fails else nullcontext():
            (loss_of(model, *next(data), fails) / 2).backward()
        with (
            pytest.raises(RuntimeError, match="ended in an exception")
            if fails
            else nullcontext()
        ):
            ada.step()
        ada.zero_grad()


@pytest.mark.parametrize("again", [True, False])
def test_a_step_that_failed_is_announced_anew_or_left(again: bool) -> None:
    """The plan of the failed step holds for the step after it only where the loop
    says so after the failure.
    """
    model = make_model()
    ada, data = wrapped(model), batches(4, 4)
    ada.expect_passes(2)
    with pytest.raises(OutOfMemory):
        (loss_of(model, *data[0], True) / 2).backward()
    model.zero_grad()  # AdaScale does not see it
    passes = 2 if again else 4
    if again:
        ada.expect_passes(2)
    for x, y in data[:passes]:
        (loss_of(model, x, y, False) / passes).backward()
    assert ada.num_samples == passes
    ada.step()
    assert ada.steps == 1


@pytest.mark.parametrize("goes_on", ["next", "again", "step"])
def test_a_run_does_not_go_on_after_a_failed_pass(goes_on: str) -> None:
    model = make_model()
    run, number = run_of(model), 0
    with pytest.raises(
        RuntimeError,
        match="has ended in an exception, and has left incomplete gradients",
    ):
        for x, y in run:
            number += 1
            try:
                run.backward(loss_of(model, x, y, number == 6))
            except OutOfMemory:
                if goes_on == "next":
                    continue
                if goes_on == "again":
                    run.backward(loss_of(model, x, y, False))
            run.step()
    assert number == 6


def test_a_loop_that_is_entered_again_takes_the_examples_of_the_failed_step_again() -> (
    None
):
    def train(fails: bool) -> Tensor:
        model = make_model()
        run, number = run_of(model, total=12), 0
        while run.stopped is None:
            try:
                for x, y in run:
                    number += 1
                    run.backward(loss_of(model, x, y, fails and number == 7))
                    run.step()
            except OutOfMemory:
                pass
        return weights(model)

    assert torch.equal(train(True), train(False))
