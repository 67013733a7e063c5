"""What AdaScale looks at for mistakes of the program around it."""

from __future__ import annotations

import gc
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LinearLR

from ray_adascale import AdaScale, ShardedGradScaler, TauSchedule
from ray_adascale.optim import guards

# ---- the loss scale ------------------------------------------------------------------


def scaled_loop(
    *,
    given: bool = True,
    unscale: str = "",
    step: str = "scaler",
    clip: float | None = None,
    steps: int = 3,
    init_scale: float = 65536.0,
    growth_interval: int = 2000,
    fused: bool = False,
    divides: bool = True,
) -> AdaScale:
    """A loop of two passes a step that scales its loss.

    Args:
        given: AdaScale has the scaler.
        unscale: The optimizer whose gradients the loop unscales by itself: "adascale",
            "inside" or none.
        step: Who steps: "scaler" or "optimizer".
        divides: The loop divides the losses by the passes, and AdaScale does not.
    """
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    inside = SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    adascale = AdaScale(
        inside,
        scale=2.0,
        num_gradients_to_accumulate=2,
        is_scaled_loss=divides,
        grad_scaler=scaler if given else None,
    )
    for _ in range(steps):
        for _ in range(2):
            loss = (model(torch.randn(4, 3)) - 1).square().mean()
            scaler.scale(loss / 2 if divides else loss).backward()
        if not divides:
            adascale.scale_grad_by_num_grads_to_accum()
        if unscale:
            scaler.unscale_(adascale if unscale == "adascale" else inside)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step == "scaler":
            scaler.step(adascale)
            scaler.update()
        else:
            adascale.step()
        adascale.zero_grad()
    return adascale


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    ("unscale", "clip"), [("", None), ("adascale", None), ("adascale", 0.01)]
)
def test_a_loss_scale_that_is_removed_once_is_right(
    unscale: str, clip: float | None, fused: bool
) -> None:
    adascale = scaled_loop(unscale=unscale, clip=clip, fused=fused)
    assert adascale.steps == 3


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_gradient_that_is_unscaled_twice_ends_the_loop(clip: float | None) -> None:
    """``scaler.unscale_`` of the optimizer inside, and ``scaler.step`` of AdaScale:
    SGD would train with a gradient 65,536 times too small.
    """
    with pytest.raises(RuntimeError, match=r"twice: .*Pass that one to both"):
        scaled_loop(unscale="inside", clip=clip)


def test_the_optimizer_inside_may_be_unscaled_if_adascale_steps_without_the_scaler() -> (
    None
):
    assert scaled_loop(unscale="inside", step="optimizer", steps=1).steps == 1


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
def test_a_gradient_that_is_unscaled_twice_at_the_base_batch_ends_the_loop(
    kind: type[GradScaler],
) -> None:
    """Nothing is measured there."""
    model = nn.Linear(3, 1)
    inside = SGD(model.parameters(), lr=0.1)
    scaler = kind(device="cpu")
    adascale = AdaScale(inside, grad_scaler=scaler)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(inside)
    with pytest.raises(RuntimeError, match="twice"):
        scaler.step(adascale)


def test_a_step_past_the_scaler_ends_the_loop_and_past_a_small_scale_it_does_not() -> (
    None
):
    with pytest.raises(RuntimeError, match=r"not removed .*scaler\.step\(optimizer\)"):
        scaled_loop(step="optimizer")
    assert scaled_loop(step="optimizer", init_scale=1.0).steps == 3


def test_a_step_with_a_small_clipped_scaled_gradient_is_not_judged() -> None:
    assert scaled_loop(step="optimizer", clip=0.01).steps == 3


def test_the_sum_of_the_losses_is_compared_with_its_mean() -> None:
    """With a sum the measured gradient is twice the mean: the scale is still seen."""
    with pytest.raises(RuntimeError, match="not removed"):
        scaled_loop(step="optimizer", divides=False)


def test_a_scaler_that_adascale_was_not_given_is_warned_of_in_the_second_step(
    recwarn: pytest.WarningsRecorder,
) -> None:
    scaled_loop(given=False, steps=1)
    assert not recwarn.list
    scaled_loop(given=False, steps=4)
    (found,) = recwarn.list
    assert re.search("divided by 65536 between.*grad_scaler=scaler", str(found.message))


def test_a_scaler_that_adascale_was_not_given_is_warned_of_as_its_scale_changes(
    recwarn: pytest.WarningsRecorder,
) -> None:
    scaled_loop(given=False, steps=4, growth_interval=1)
    (found,) = recwarn.list
    assert "divided by 65536 and 131072 between" in str(found.message)


def test_a_gradient_that_a_loop_makes_smaller_by_another_number_is_its_own(
    recwarn: pytest.WarningsRecorder,
) -> None:
    scaled_loop(given=False, clip=1e-7, unscale="adascale")
    scaled_loop(given=False, init_scale=16.0)
    assert not recwarn.list


@pytest.mark.parametrize("values", ["finite", "infinite"])
def test_steps_are_looked_at_few_times(
    values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look waits for the device."""
    looks = []
    norm = torch.nn.utils.get_total_norm

    def counted(*args: Any, **named: Any) -> Any:
        looks.append(1)
        return norm(*args, **named) * (1 if values == "finite" else math.inf)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", counted)
    scaled_loop(steps=30)
    assert len(looks) == (2 if values == "finite" else 20)


def test_a_sparse_gradient_is_not_judged() -> None:
    torch.manual_seed(1)
    model = nn.EmbeddingBag(4, 2, sparse=True)
    scaler = GradScaler("cpu")
    adascale = AdaScale(
        SGD(model.parameters(), lr=0.1),
        scale=2.0,
        num_gradients_to_accumulate=2,
        grad_scaler=scaler,
    )
    for step in range(2):
        for i in range(2):
            ids = torch.tensor([[step, i, i]])
            scaler.scale(model(ids).square().sum() / 2).backward()
        adascale.step()
        adascale.zero_grad()
    assert adascale.steps == 2


# ---- a scheduler of the loop's -------------------------------------------------------


def train(
    steps: int,
    drive: Callable[[AdaScale, LambdaLR], None],
    *,
    inside: bool = False,
    scale: float = 4.0,
) -> list[str]:
    """Warnings of a loop with a scheduler.

    Args:
        steps: Optimizer steps.
        drive: Called after each, with AdaScale and the scheduler.
        inside: The scheduler is that of the wrapped optimizer.
        scale: S.
    """
    gc.collect()
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.001)
    adascale = AdaScale(optimizer, scale=scale, num_gradients_to_accumulate=4)
    scheduler = LambdaLR(optimizer if inside else adascale, lambda step: 0.999**step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for _ in range(4):
                (model(torch.randn(1, 3)) - 1).square().mean().div(4).backward()
            adascale.step()
            adascale.zero_grad()
            drive(adascale, scheduler)
    return [str(each.message) for each in caught]


def hooks_after(adascale: AdaScale) -> int:
    """The hooks that look after each step."""
    return len(adascale._optimizer_step_post_hooks)


def once_a_step(_: AdaScale, scheduler: LambdaLR) -> None:
    scheduler.step()


def by_tau(adascale: AdaScale, scheduler: LambdaLR) -> None:
    while scheduler.last_epoch < int(adascale.effective_steps):
        scheduler.step()


@pytest.mark.parametrize("inside", [False, True])
def test_a_scheduler_that_counts_optimizer_steps_is_warned_of_once(
    inside: bool,
) -> None:
    found = train(120, once_a_step, inside=inside)
    assert len(found) == 1
    assert "called 10 times in 10 optimizer steps, which were worth" in found[0]
    assert "int(optimizer.effective_steps)" in found[0]


def test_other_hooks_of_a_step_go_on_after_the_last_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hook that looks removes itself, within a step that has further ones."""
    monkeypatch.setattr(guards, "_LOOKS", (10,))
    seen: list[int] = []

    def drive(adascale: AdaScale, scheduler: LambdaLR) -> None:
        by_tau(adascale, scheduler)
        if not seen:
            adascale.register_step_post_hook(lambda *_: seen.append(2))
            seen.append(1)

    assert train(30, drive) == []
    assert seen == [1, *[2] * 29]
    left = []
    train(19, lambda adascale, _: left.append(hooks_after(adascale)))
    assert left == [1] * 19
    train(20, lambda adascale, _: left.append(hooks_after(adascale)))
    assert left[19:] == [*[1] * 19, 0]
    assert len(train(30, once_a_step)) == 1


@pytest.mark.parametrize("steps", [19, 20])
def test_it_is_warned_of_after_twenty_steps(steps: int) -> None:
    assert len(train(steps, once_a_step)) == (steps == 20)


def test_a_schedule_by_tau_by_epochs_or_at_the_base_batch_is_right() -> None:
    def by_epochs(adascale: AdaScale, scheduler: LambdaLR) -> None:
        while scheduler.last_epoch < adascale.effective_steps // 7:
            scheduler.step()

    assert train(40, by_tau) == []
    assert train(40, by_epochs) == []
    assert train(40, lambda *_: None) == []
    # S = 1: τ counts the steps
    assert train(40, once_a_step, scale=1.0) == []


def test_a_scheduler_of_another_optimizer_does_not_count() -> None:
    other = LambdaLR(SGD(nn.Linear(2, 2).parameters(), lr=0.1), lambda step: 1.0)

    def both(adascale: AdaScale, scheduler: LambdaLR) -> None:
        by_tau(adascale, scheduler)
        other.optimizer.step()
        other.step()

    assert train(40, both) == []


def test_parts_of_a_chained_scheduler_count() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    adascale = AdaScale(
        SGD(model.parameters(), lr=0.001), scale=4.0, num_gradients_to_accumulate=4
    )
    scheduler = ChainedScheduler(
        [LinearLR(adascale, 0.5), LambdaLR(adascale, lambda step: 0.999**step)]
    )

    def loop() -> None:
        for _ in range(20):
            for _ in range(4):
                (model(torch.randn(1, 3)) - 1).square().mean().div(4).backward()
            adascale.step()
            adascale.zero_grad()
            scheduler.step()

    with pytest.warns(UserWarning, match="called 10 times in 10 optimizer steps"):
        loop()


def test_a_tau_schedule_steps_by_tau(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.001)
    adascale = AdaScale(optimizer, scale=4.0, num_gradients_to_accumulate=4)
    schedule = TauSchedule(
        adascale,
        LambdaLR(optimizer, lambda step: 0.999**step),
        "step",
        total_steps=1000,
    )
    for _ in range(30):
        for _ in range(4):
            (model(torch.randn(1, 3)) - 1).square().mean().div(4).backward()
        adascale.step()
        adascale.zero_grad()
        schedule.step()
    assert math.isclose(schedule.last_epoch, adascale.effective_steps, abs_tol=1)
    assert not recwarn.list
