"""The passes of a step: their order, the guard of the user's optimizer, changed
gradients, clipping, weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_adascale import AdaScale
from ray_adascale.batch import StepPlan
from ray_adascale.data.order import MicroBatch
from ray_adascale.run.guards.each_step import OnlyRunsBackward
from ray_adascale.run.guards.guard import Guards
from ray_adascale.run.pass_driver import PassDriver

PLAN = StepPlan(base_batch_size=4, global_batch_size=8, workers=1, passes=2)


def ends_step(driver: PassDriver) -> bool:
    """What ``Run.step`` does at the end of a pass."""
    if driver.is_last:
        return True
    driver.end_pass()
    return False


class Setup:
    """A model of one weight, which begins at 3, with two passes a step."""

    def __init__(
        self, plan: StepPlan = PLAN, *, scaler: Any = None, precision: str = "fp32"
    ) -> None:
        self.model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(self.model.weight, 3.0)
        self.plan = plan
        self.users = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.optimizer = AdaScale(
            self.users,
            num_gradients_to_accumulate=plan.passes,
            base_batch_size=plan.base_batch_size,
            batch_size=plan.global_batch_size,
        )
        self.driver = PassDriver(
            self.model,
            self.optimizer,
            scaler,
            guarded=self.users,
            precision=precision,
            device=torch.device("cpu"),
            sharding=self.optimizer.current.sharding,
            guards=Guards([OnlyRunsBackward(self.optimizer)]),
        )
        self.optimizer.current.set_loop(of_run=True)  # as within guard()

    @property
    def grad(self) -> Tensor:
        assert self.model.weight.grad is not None
        return self.model.weight.grad

    def batch(self, index: int, examples: int = 4, *, last: int = 1) -> MicroBatch:
        """A micro-batch of ones and, after the first, of twos."""
        x = torch.full((examples, 1), 1.0 + min(index, 1), dtype=torch.float64)
        return MicroBatch(
            x, examples, examples / self.plan.global_batch_size, index, index == last
        )

    def backward(self, index: int, examples: int = 4, *, last: int = 1) -> None:
        batch = self.batch(index, examples, last=last)
        self.driver.begin(batch)
        loss = self.model(batch.batch).mean()
        self.driver.begin_backward(loss)
        self.driver.backward(loss, self.plan)

    def take_step(self) -> None:
        self.backward(0)
        assert not ends_step(self.driver)
        self.backward(1)
        assert ends_step(self.driver)
        self.driver.step()
        self.driver.end_step()


def test_calls_in_another_order_are_refused() -> None:
    setup = Setup()
    driver, loss = setup.driver, torch.zeros(())
    with pytest.raises(
        RuntimeError,
        match=r"once for each micro-batch of the run.*Loop over the run, not over a loader",
    ):
        driver.begin_backward(loss)
    with pytest.raises(RuntimeError, match="step comes later"):
        driver.check_backward("step comes later")
    driver.check_ended()  # no pass has begun

    driver.begin(setup.batch(0))
    with pytest.raises(RuntimeError, match=r"went by without run\.step\(\)"):
        driver.check_ended()
    with pytest.raises(
        RuntimeError,
        match=r"step comes later.*write run\.backward\(loss\) in place of loss\.backward",
    ):
        driver.check_backward("step comes later")
    with pytest.raises(ValueError, match=r"loss of shape \(2,\)\. Must be a scalar"):
        driver.begin_backward(torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"loss of type float\. Must be a scalar tensor"
    ):
        driver.begin_backward(0.5)  # type: ignore[arg-type]

    setup.backward(0)
    with pytest.raises(RuntimeError, match="once for each micro-batch"):
        driver.begin_backward(loss)
    with pytest.raises(RuntimeError, match="went by without"):
        driver.check_ended()
    driver.check_backward("not raised")
    assert not ends_step(driver)
    driver.check_ended()
    with pytest.raises(RuntimeError, match="step comes later"):
        driver.check_backward("step comes later")  # of the next micro-batch


@pytest.mark.parametrize(("scale", "passes"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("when", ["before", "after", "instead"])
def test_a_second_loss_with_a_backward_pass_of_its_own_is_refused(
    when: str, scale: int, passes: int
) -> None:
    plan = StepPlan(
        base_batch_size=8 // scale, global_batch_size=8, workers=1, passes=passes
    )
    setup = Setup(plan)
    examples, before = 8 // passes, setup.model.weight.item()

    def own() -> None:
        setup.model(setup.batch(0, examples).batch).square().mean().backward()

    def loop() -> None:
        for index in range(passes):
            if when == "instead":
                setup.driver.begin(setup.batch(index, examples, last=passes - 1))
                own()
                setup.driver.begin_backward(torch.zeros(()))
            if when == "before":
                own()
            setup.backward(index, examples, last=passes - 1)
            if when == "after":
                own()
            if ends_step(setup.driver):
                setup.driver.guards.step()
                setup.driver.step()
                setup.driver.end_step()

    with pytest.raises(RuntimeError, match=r"[aA]dd the losses"):
        loop()
    assert setup.model.weight.item() == before


def test_gradients_of_before_the_loop_are_no_part_of_its_first_step() -> None:
    """As of a loop that was left between the passes of a step, in a notebook."""
    grads = []
    for left in (False, True):
        setup = Setup()
        setup.optimizer.current.set_loop(of_run=False)  # as before guard()
        if left:
            setup.model(setup.batch(0).batch).mean().backward()
        with setup.driver.guard():
            setup.backward(0)
            assert not ends_step(setup.driver)
            setup.backward(1)
            grads.append(setup.grad.clone())
    assert torch.equal(*grads)


def test_the_users_optimizer_is_guarded_after_a_step_that_failed() -> None:
    setup = Setup()
    with setup.driver.guard():
        setup.backward(0)
        with pytest.raises(RuntimeError):
            setup.driver.step()  # AdaScale refuses a step after one of two passes
        with pytest.raises(RuntimeError, match="in the loop beside"):
            setup.users.step()


def test_no_pass_stays_open_after_the_loop() -> None:
    setup = Setup(precision="bf16")
    with setup.driver.guard():
        setup.driver.begin(setup.batch(0))
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    setup.driver.begin(setup.batch(0))
    setup.driver.begin_backward(torch.zeros(()))
    assert not torch.is_autocast_enabled("cpu")  # forward passes alone


def change(setup: Setup) -> None:
    with torch.no_grad():
        setup.grad.mul_(0.5)


def replace_gradient(setup: Setup) -> None:
    setup.model.weight.grad = setup.grad * 0.5


CHANGES = {
    "changed": change,
    "replaced": replace_gradient,
    "zeroed": lambda setup: setup.users.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("when", ["before the pass ends", "after it"])
def test_gradients_that_change_between_passes_are_refused(how: str, when: str) -> None:
    setup = Setup()
    setup.backward(0)
    if when == "after it":
        assert not ends_step(setup.driver)
    CHANGES[how](setup)
    if when == "before the pass ends":
        assert not ends_step(setup.driver)
    with pytest.raises(
        RuntimeError,
        match=r"changed between the passes of an optimizer step.* Delete optimizer\.zero_grad",
    ):
        setup.backward(1)


def test_gradients_may_change_after_the_last_pass() -> None:
    setup = Setup()
    setup.backward(0)
    ends_step(setup.driver)
    setup.backward(1)
    change(setup)
    assert ends_step(setup.driver)


def test_gradients_are_compared_in_later_steps_too() -> None:
    setup = Setup()
    with setup.driver.guard():
        for _ in range(5):
            setup.take_step()
        setup.backward(0)
        assert not ends_step(setup.driver)
        change(setup)
        with pytest.raises(RuntimeError, match="changed between"):
            setup.backward(1)


@pytest.mark.parametrize("how", ["detached", "frozen"])
def test_a_loss_without_a_gradient_says_what_to_look_at(how: str) -> None:
    setup = Setup()
    if how == "frozen":
        setup.model.requires_grad_(False)
    setup.driver.begin(setup.batch(0))
    loss = setup.model(setup.batch(0).batch).mean().detach()
    setup.driver.begin_backward(loss)
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        setup.driver.backward(loss, setup.plan)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "In run.backward(loss): the loss depends on no trainable parameter."
    )
    assert ".detach()" in note
    assert "frozen" in note


def test_a_loss_of_another_model_is_refused_in_the_first_step() -> None:
    setup, other = Setup(), nn.Linear(1, 1).double()
    for index in range(2):
        batch = setup.batch(index)
        setup.driver.begin(batch)
        loss = other(batch.batch).mean()
        setup.driver.begin_backward(loss)
        if index == 0:
            setup.driver.backward(loss, setup.plan)
            assert not ends_step(setup.driver)
    with pytest.raises(
        RuntimeError,
        match=r"no gradient has reached a parameter.*Compute the loss from run\.model",
    ):
        setup.driver.backward(loss, setup.plan)
