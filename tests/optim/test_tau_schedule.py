"""TauSchedule: the base run's LR at ⌊τ⌋, however often it is stepped, for torch's
schedulers and timm's shape of them.
"""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim import lr_scheduler as L

from ray_adascale import AdaScale, TauSchedule
from ray_adascale.optim import tau_schedule

from ..classifier import batches, make_model

T = 40


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule of another test is under way."""
    monkeypatch.setattr(tau_schedule, "_SCHEDULES", [])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: L.CosineAnnealingLR(o, T_max=T),
    "onecycle": lambda o: L.OneCycleLR(o, max_lr=0.2, total_steps=T),
    "lambda": lambda o: L.LambdaLR(o, lambda k: 1 / (1 + k)),
    "sequence": lambda o: L.SequentialLR(
        o,
        [L.LinearLR(o, 0.1, total_iters=5), L.CosineAnnealingLR(o, T_max=T - 5)],
        milestones=[5],
    ),
}


class Timms:
    """A schedule as timm has them: told the number of updates, or the epoch, and no
    method that counts.
    """

    def __init__(self, optimizer: Any, t_in_epochs: bool = False) -> None:
        self.optimizer, self.t_in_epochs = optimizer, t_in_epochs
        self.base = [group["lr"] for group in optimizer.param_groups]
        self._set(0)

    def _set(self, t: int) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = lr * (1 + math.cos(math.pi * t / T)) / 2

    def step(self, epoch: int) -> None:
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int) -> None:
        if not self.t_in_epochs:
            self._set(num_updates)


def made(
    make: Callable[[Any], Any] | None, **kwargs: Any
) -> tuple[Any, AdaScale, TauSchedule]:
    model = make_model()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = AdaScale(
        inner, scale=4.0, num_gradients_to_accumulate=2, single_gain=True
    )
    scheduler = None if make is None else make(inner)
    settings: dict[str, Any] = {
        "unit": "step",
        "total_steps": T,
        "base_batch_size": 2,
    } | kwargs
    return model, optimizer, TauSchedule(optimizer, scheduler, **settings)


def base_curve(make: Callable[[Any], Any]) -> list[tuple[float, float]]:
    """(LR, momentum) that a plain loop has at each of its T steps."""
    inner = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = make(inner)
    curve = []
    for k in range(T):
        curve.append(
            (
                float(inner.param_groups[0]["lr"]),
                float(inner.param_groups[0]["momentum"]),
            )
        )
        inner.step()
        if k < T - 1:
            scheduler.step() if isinstance(
                scheduler, L.LRScheduler
            ) else scheduler.step_update(k + 1)
    return curve


def take(model: Any, optimizer: AdaScale, data: list[Any]) -> None:
    for x, y in data:
        (F.cross_entropy(model(x), y) / len(data)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("name", [*SCHEDULERS, "timm"])
def test_the_lr_is_the_base_curves_at_the_floor_of_tau(name: str, calls: int) -> None:
    make = SCHEDULERS.get(name, Timms)
    curve = base_curve(make)
    model, optimizer, schedule = made(make)
    data, steps = iter(batches(200, 4)), 0
    while not schedule.finished:
        assert optimizer.effective_steps < T
        group, at = optimizer.param_groups[0], curve[int(optimizer.effective_steps)]
        assert (group["lr"], group["momentum"]) == pytest.approx(
            at, rel=1e-12, abs=1e-15
        )
        assert schedule.get_last_lr() == [group["lr"]]
        take(model, optimizer, [next(data), next(data)])
        for _ in range(calls):
            schedule.step()
        steps += 1
    assert optimizer.effective_steps >= T
    assert steps < T  # the clock went faster than the steps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):  # and stays at its end, whatever comes after it
            take(model, optimizer, [next(data), next(data)])
            schedule.step()
            assert schedule.get_last_lr()[0] == pytest.approx(curve[-1][0], rel=1e-12)
    (past,) = caught  # of the first of the three
    assert re.search(
        r"begins at effective step 4\d, and .* ended at 40\..*"
        r"while not schedule\.finished.*if schedule\.finished: break",
        str(past.message),
    )


def test_past_t_the_schedule_of_a_loop_that_was_left_is_no_second_network() -> None:
    """A notebook keeps the optimizer of an interrupted loop."""
    other, others, left = made(SCHEDULERS["cosine"])
    model, optimizer, schedule = made(SCHEDULERS["cosine"])
    data = batches(400, 4)

    def steps(count: int, other_every: int | None = None) -> None:
        for k in range(count):
            take(model, optimizer, data[2 * k : 2 * k + 2])
            if other_every is not None and k % other_every == 0:
                take(other, others, data[2 * k : 2 * k + 2])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(1, other_every=1)
        while not schedule.finished:
            steps(1)
        steps(30, other_every=5)  # as a GAN's, one of the two networks goes on
        assert not left.finished
    with pytest.warns(UserWarning, match="begins at effective step"):
        steps(21)


def test_torch_and_clients_take_it_for_one_of_torchs() -> None:
    _, optimizer, schedule = made(SCHEDULERS["cosine"])
    assert isinstance(schedule, L.LRScheduler)
    assert schedule.optimizer is optimizer
    assert schedule.base_lrs == [0.1]
    # by which Accelerate knows OneCycleLR, and stops stepping it
    assert not hasattr(schedule, "total_steps")


def test_epochs_of_the_base_run_are_counted_by_tau() -> None:
    model, optimizer, schedule = made(
        lambda o: L.StepLR(o, 2, gamma=0.5), unit="epoch", base_steps_per_epoch=2.5
    )
    for data in zip(*[iter(batches(24, 4))] * 2, strict=True):
        take(model, optimizer, list(data))
        epoch = int(int(optimizer.effective_steps) / 2.5)
        assert schedule.last_epoch == min(epoch, 15)
        assert schedule.get_last_lr() == [0.1 * 0.5 ** (min(epoch, 15) // 2)]


def test_a_fused_optimizers_lr_follows_without_being_asked() -> None:
    model = make_model(torch.float32)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizer = AdaScale(
        inner, scale=4.0, num_gradients_to_accumulate=2, single_gain=True
    )
    schedule = TauSchedule(
        optimizer, L.CosineAnnealingLR(inner, T_max=T), "step", total_steps=T
    )
    used: list[float] = []
    inner.register_step_pre_hook(
        lambda o, *_: used.append(float(o.param_groups[0]["lr"]))
    )
    expected = []
    for data in zip(*[iter(batches(12, 4, torch.float32))] * 2, strict=True):
        take(model, optimizer, list(data))
        # r of this step; the LR before it was that of ⌊τ⌋ before it
        expected.append(optimizer.last_step.lr_factor)
        schedule.step()
    tau, curve = 0.0, base_curve(SCHEDULERS["cosine"])
    for lr, r in zip(used, expected, strict=True):
        assert lr == pytest.approx(curve[int(tau)][0] * r, rel=1e-6)
        tau += r


def fused_at_full_gain(
    total_steps: int,
) -> tuple[AdaScale, TauSchedule, list[float], Callable[[], None]]:
    """A fused optimizer whose LR is 0.1/(1 + k) at base step k, the LRs that it steps
    with, and a step of it.

    The two gradient samples of a step are 1 and -1: nothing but noise, so each step has
    r = S = 4.
    """
    weight = torch.nn.Parameter(torch.ones(1))
    inner = SGD([weight], lr=0.1, fused=True)
    optimizer = AdaScale(
        inner, scale=4.0, num_gradients_to_accumulate=2, single_gain=True
    )
    schedule = TauSchedule(
        optimizer, SCHEDULERS["lambda"](inner), "step", total_steps=total_steps
    )
    used: list[float] = []
    inner.register_step_pre_hook(
        lambda o, *_: used.append(float(o.param_groups[0]["lr"]))
    )

    def step() -> None:
        for sign in (1.0, -1.0):
            (sign * weight.sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, schedule, used, step


@pytest.mark.parametrize("stepped", [False, True])
def test_a_fused_optimizers_lr_follows_where_nobody_asks_for_the_step_before(
    stepped: bool,
) -> None:
    optimizer, schedule, used, step = fused_at_full_gain(40)
    for _ in range(4):
        step()
        if stepped:
            schedule.step()
        # the host has not heard of this step, and nothing here makes it wait
        assert not optimizer.last_step_known
    # The base steps are 0, 4, 8 and 12, each LR times r = 4. The kernel takes it as
    # float32.
    assert used == pytest.approx([0.4, 0.4 / 5, 0.4 / 9, 0.4 / 13], rel=1e-6)


def test_a_fused_run_ends_with_the_step_that_reaches_the_end_and_waits_only_near_it() -> (
    None
):
    optimizer, schedule, _, step = fused_at_full_gain(20)
    waited = []
    while not schedule.finished:
        step()
        assert not schedule.finished or optimizer.last_step_known
        waited.append(optimizer.last_step_known)
    # r = 4, so τ = 20 after five steps. What the host knows lacks the last step, which
    # adds 4 at most: it need not look before it knows of 16, which is after the fifth.
    assert waited == [False, False, False, False, True]
    assert optimizer.effective_steps == 20


def test_whoever_steps_the_inner_scheduler_is_told() -> None:
    model, optimizer, schedule = made(SCHEDULERS["cosine"])
    data = batches(4, 4)
    take(model, optimizer, data[:2])
    schedule.scheduler.step()
    with pytest.raises(
        RuntimeError, match=r"CosineAnnealingLR.step\(\) was called beside.*TauSchedule"
    ):
        take(model, optimizer, data[2:])


@pytest.mark.parametrize(
    ("make", "settings", "match"),
    [
        (lambda o: L.ReduceLROnPlateau(o), {}, "ReduceLROnPlateau is not supported"),
        (SCHEDULERS["cosine"], {"unit": None}, "Missing unit"),
        (lambda o: Timms(o, t_in_epochs=True), {}, "its unit is 'epoch'"),
        (Timms, {"unit": "epoch", "base_steps_per_epoch": 3.0}, "its unit is 'step'"),
    ],
)
def test_what_cannot_be_driven_is_refused(
    make: Any, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        made(make, **settings)


def test_an_optimizer_without_a_clock_is_refused() -> None:
    inner = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="Invalid optimizer of type SGD"):
        TauSchedule(inner, None)  # type: ignore[arg-type]


def test_without_a_scheduler_it_tells_the_end_alone() -> None:
    model, optimizer, schedule = made(None, unit=None, total_steps=3)
    data = iter(batches(20, 4))
    while not schedule.finished:
        take(model, optimizer, [next(data), next(data)])
    assert optimizer.effective_steps >= 3
    assert schedule.get_last_lr() == [0.1]


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("stale", [False, True])
def test_a_fused_optimizer_goes_on_at_the_lr_of_tau_in_either_order_of_saving_and_loading(
    optimizer_first: bool, stale: bool
) -> None:
    optimizer, schedule, used, step = fused_at_full_gain(40)
    for _ in range(3):
        step()
    # At τ = 12, of which the host has read τ = 8.
    states = [optimizer.state_dict(), schedule.state_dict()]
    assert states[0]["param_groups"][0]["lr"] == 0.1 / 13
    if stale:  # as saved before the schedule was asked for its state
        states[0]["param_groups"][0]["lr"] = 0.1 / 9
    loaded, other, used, step = fused_at_full_gain(40)
    parts = list(zip((loaded, other), states, strict=True))
    for part, state in parts if optimizer_first else reversed(parts):
        part.load_state_dict(state)
    assert other.get_last_lr() == [0.1 / 13]
    step()
    step()
    assert used == pytest.approx([0.4 / 13, 0.4 / 17], rel=1e-6)


def test_unknown_names_are_the_users_schedulers() -> None:
    _, _, schedule = made(Timms)
    assert schedule.t_in_epochs is False
    assert hasattr(schedule, "base")
    assert not hasattr(schedule, "_last_lr")
    with pytest.raises(AttributeError, match="verbose"):
        schedule.verbose  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"'TauSchedule' object has no attribute 't_in_epochs'"
    ):
        made(None)[2].t_in_epochs  # noqa: B018
    assert copy.copy(schedule).t_in_epochs is False


_EPOCHS = """
import sys, torch
from ray_adascale import AdaScaleConfig, attach
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = AdaScaleConfig(base_batch_size=2, per_worker_batch_size=4, accumulation=2, total_steps=40)
optimizer, schedule = attach(model, optimizer, None, config)
passes = 0
while passes < 20 if sys.argv[1] != "finished" else not schedule.finished:
    for _ in range(2):
        (model(torch.randn(4, 2)).square().mean() / 2).backward()
    optimizer.step(), schedule.step(), optimizer.zero_grad()
    passes += 2
del optimizer, schedule
if sys.argv[1] == "raises":
    raise KeyError("for another reason")
"""


@pytest.mark.parametrize(
    ("how", "told"), [("epochs", 1), ("finished", 0), ("raises", 0)]
)
def test_a_loop_that_ends_before_t_is_told_as_the_process_ends(
    how: str, told: int
) -> None:
    """In processes of their own, whose end it is about."""
    ended = subprocess.run(
        [sys.executable, "-c", _EPOCHS, how], capture_output=True, text=True
    )
    assert (
        ended.stderr.count("The training loop has ended at effective step") == told
    ), ended.stderr
    assert "of 40, so the learning rate has not reached" in ended.stderr or not told


def test_the_state_of_a_plain_scheduler_is_named_as_one() -> None:
    _, _, schedule = made(SCHEDULERS["cosine"])
    plain = SCHEDULERS["cosine"](SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the checkpoint of a run without AdaScale"):
        schedule.load_state_dict(plain.state_dict())


def test_a_loop_of_two_networks_goes_on_until_both_have_ended() -> None:
    first = made(None, unit=None, total_steps=3)
    second = made(None, unit=None, total_steps=12)
    data = iter(batches(80, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while not (first[2].finished and second[2].finished):
            for model, optimizer, _ in (first, second):
                take(model, optimizer, [next(data), next(data)])
    with pytest.warns(UserWarning, match="schedule has ended at 3"):
        take(first[0], first[1], [next(data), next(data)])


def test_a_part_of_an_epoch_is_refused_and_whole_numbers_are_ignored() -> None:
    _, _, schedule = made(SCHEDULERS["cosine"])
    schedule.step(0.0)  # epoch + 0 / iters
    schedule.step(7)
    assert schedule.last_epoch == 0
    with pytest.raises(ValueError, match=r"step\(0\.25\): parts of an epoch"):
        schedule.step(0.25)
    with pytest.raises(ValueError, match=r"step\(0\.25\): parts of an epoch"):
        schedule.step(epoch=0.25)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_clock_that_is_loaded_without_the_schedule_is_enough(name: str) -> None:
    make = SCHEDULERS[name]
    curve = base_curve(make)
    model, optimizer, schedule = made(make)
    data = iter(batches(200, 4))
    while schedule.last_epoch < 8:
        take(model, optimizer, [next(data), next(data)])
    state = optimizer.state_dict()
    model, optimizer, schedule = made(make)
    optimizer.load_state_dict(state)
    while not schedule.finished:
        group, at = optimizer.param_groups[0], curve[int(optimizer.effective_steps)]
        assert (group["lr"], group["momentum"]) == pytest.approx(at, rel=1e-12)
        assert schedule.last_epoch == int(optimizer.effective_steps)
        take(model, optimizer, [next(data), next(data)])


def test_a_schedule_that_is_loaded_without_the_clock_is_refused() -> None:
    model, optimizer, schedule = made(SCHEDULERS["cosine"])
    data = iter(batches(200, 4))
    while schedule.last_epoch < 5:
        take(model, optimizer, [next(data), next(data)])
    states = optimizer.state_dict(), schedule.state_dict()
    model, optimizer, schedule = made(SCHEDULERS["cosine"])
    schedule.load_state_dict(states[1])
    with pytest.raises(RuntimeError, match=r"effective step is 0\.00, at which 0 are"):
        take(model, optimizer, [next(data), next(data)])
    model, optimizer, schedule = made(SCHEDULERS["cosine"])
    schedule.load_state_dict(states[1])
    optimizer.load_state_dict(states[0])
    take(model, optimizer, [next(data), next(data)])
    while not schedule.finished:
        take(model, optimizer, [next(data), next(data)])
    optimizer.load_state_dict(states[0])  # of an earlier step, in the same schedule
    with pytest.raises(RuntimeError, match="that were just built"):
        take(model, optimizer, [next(data), next(data)])
