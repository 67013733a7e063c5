"""What AdaScale looks at for mistakes of the program around it."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LinearLR

from ray_adascale import AdaScale, AdaScaleConfig, TauSchedule, attach

# ---- the loss scale ------------------------------------------------------------------


def scaled_loop(
    *,
    given: bool = True,
    unscale: str = "",
    step: str = "scaler",
    clip: float | None = None,
    steps: int = 3,
    init_scale: float = 65536.0,
    fused: bool = False,
) -> AdaScale:
    """A loop of two passes a step that scales its loss.

    Args:
        given: AdaScale has the scaler.
        unscale: The optimizer whose gradients the loop unscales by itself: "adascale",
            "inside" or none.
        step: Who steps: "scaler" or "optimizer".
    """
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    inside = SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=init_scale)
    adascale = AdaScale(
        inside,
        scale=2.0,
        num_gradients_to_accumulate=2,
        grad_scaler=scaler if given else None,
    )
    for _ in range(steps):
        for _ in range(2):
            loss = (model(torch.randn(4, 3)) - 1).square().mean()
            scaler.scale(loss / 2).backward()
        if unscale:
            scaler.unscale_(adascale if unscale == "adascale" else inside)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step == "scaler":
            scaler.step(adascale)
        else:
            adascale.step()
        scaler.update()
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


def test_a_gradient_that_is_unscaled_twice_ends_the_loop() -> None:
    """``scaler.unscale_`` of the optimizer inside, and ``scaler.step`` of AdaScale:
    SGD would train with a gradient 65,536 times too small.
    """
    with pytest.raises(RuntimeError, match=r"65536, twice: .*Pass that one to both"):
        scaled_loop(unscale="inside")


def test_a_step_past_the_scaler_ends_the_loop() -> None:
    with pytest.raises(RuntimeError, match=r"not removed .*scaler\.step\(optimizer\)"):
        scaled_loop(step="optimizer")


def test_a_scaler_that_adascale_does_not_know_of_ends_the_loop_at_the_second_step() -> (
    None
):
    assert scaled_loop(given=False, steps=1).steps == 1
    with pytest.raises(RuntimeError, match=r"divided by 65536 .*grad_scaler=scaler"):
        scaled_loop(given=False, steps=2)


def test_a_gradient_that_a_loop_makes_smaller_by_another_number_is_its_own() -> None:
    scaled_loop(given=False, clip=1e-7, unscale="adascale")
    scaled_loop(given=False, init_scale=16.0)


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


def test_what_attach_returns_and_tau_schedule_step_by_tau(
    recwarn: pytest.WarningsRecorder,
) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.001)
    attached, schedule = attach(
        model,
        optimizer,
        LambdaLR(optimizer, lambda step: 0.999**step),
        AdaScaleConfig(
            base_batch_size=1,
            per_worker_batch_size=1,
            accumulation=4,
            total_steps=1000,
            scheduler_unit="step",
        ),
    )
    optimizer = SGD(model.parameters(), lr=0.001)
    bare = AdaScale(optimizer, scale=4.0, num_gradients_to_accumulate=4)
    driven = TauSchedule(
        bare, LambdaLR(optimizer, lambda step: 0.999**step), "step", total_steps=1000
    )
    for each, of in ((attached, schedule), (bare, driven)):
        for _ in range(30):
            for _ in range(4):
                (model(torch.randn(1, 3)) - 1).square().mean().div(4).backward()
            each.step()
            each.zero_grad()
            of.step()
        assert math.isclose(of.last_epoch, each.effective_steps, abs_tol=1)
    assert not [each for each in recwarn if "optimizer steps" in str(each.message)]
