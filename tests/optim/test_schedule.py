"""A base run is the reference throughout: a plain loop that calls scheduler.step()
as its author did.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as L

from ray_adascale.optim.curves import curve_difference, other_length
from ray_adascale.optim.schedule import (
    BaseSchedule,
    EffectiveSchedule,
    LRCurves,
    SchedulerUnit,
)

T = 120
MOVED = ("lr", "momentum", "betas")


def sgd(lr: Any = 0.1) -> SGD:
    weight, bias = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(2))
    # a second group with an LR of its own; clone() because groups must not share one
    # tensor
    other = lr.clone() * 0.5 if isinstance(lr, torch.Tensor) else 0.5 * lr
    return SGD(
        [{"params": [weight]}, {"params": [bias], "lr": other}], lr=lr, momentum=0.9
    )


def adam() -> Adam:
    return Adam([torch.nn.Parameter(torch.ones(3))], lr=1e-3)


class Halver:
    """A callable object with state of its own, which a dry run must not touch."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, call: int) -> float:
        self.asked += 1
        return 0.5 ** (call // 10)


class Trainer:
    """Cannot be copied, as a trainer with threads and files cannot."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def lr_at(self, call: int) -> float:
        return 1 / (1 + call)


class ChainedMomentum(L.LRScheduler):
    """The user's own: momentum computed from the current momentum."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["momentum"] *= 0.99
        return [group["lr"] * 0.97 for group in self.optimizer.param_groups]


def sequential(optimizer: Optimizer) -> L.LRScheduler:
    warmup = L.LinearLR(optimizer, start_factor=0.01, total_iters=7)
    return L.SequentialLR(
        optimizer,
        [
            warmup,
            L.CosineAnnealingLR(optimizer, T_max=60),
            L.ExponentialLR(optimizer, 0.98),
        ],
        milestones=[7, 67],
    )


SCHEDULERS: dict[
    str, tuple[Callable[[], Optimizer], Callable[[Optimizer], L.LRScheduler]]
] = {
    "step": (sgd, lambda o: L.StepLR(o, 13, gamma=0.3)),
    "multistep": (sgd, lambda o: L.MultiStepLR(o, [3, 50, 51, 90], gamma=0.1)),
    "exponential": (sgd, lambda o: L.ExponentialLR(o, 0.97)),
    "cosine": (sgd, lambda o: L.CosineAnnealingLR(o, T_max=T)),
    "polynomial": (sgd, lambda o: L.PolynomialLR(o, total_iters=T, power=2.0)),
    "linear": (sgd, lambda o: L.LinearLR(o, start_factor=0.1, total_iters=20)),
    "constant": (sgd, lambda o: L.ConstantLR(o, factor=0.2, total_iters=30)),
    "lambda": (
        sgd,
        lambda o: L.LambdaLR(o, [lambda c: 0.95**c, lambda c: 1 / (1 + c)]),
    ),
    "callable": (sgd, lambda o: L.LambdaLR(o, Halver())),
    "bound_method": (sgd, lambda o: L.LambdaLR(o, Trainer().lr_at)),
    "multiplicative": (
        sgd,
        lambda o: L.MultiplicativeLR(o, lambda c: 0.9 if c % 2 else 1.05),
    ),
    "sequential": (sgd, sequential),
    "chained": (
        sgd,
        lambda o: L.ChainedScheduler(
            [L.LinearLR(o, 0.1, total_iters=9), L.ExponentialLR(o, 0.98)]
        ),
    ),
    "onecycle_sgd": (sgd, lambda o: L.OneCycleLR(o, max_lr=[1.0, 0.5], total_steps=T)),
    "onecycle_adam": (
        adam,
        lambda o: L.OneCycleLR(o, max_lr=1.0, total_steps=T, three_phase=True),
    ),
    "cyclic": (
        sgd,
        lambda o: L.CyclicLR(
            o, base_lr=0.01, max_lr=0.3, step_size_up=11, mode="triangular2"
        ),
    ),
    "cyclic_adam": (
        adam,
        lambda o: L.CyclicLR(
            o,
            base_lr=0.01,
            max_lr=0.3,
            step_size_up=11,
            scale_fn=lambda x: 0.9**x,
            scale_mode="cycle",
        ),
    ),
    "warm_restarts": (
        sgd,
        lambda o: L.CosineAnnealingWarmRestarts(o, T_0=10, T_mult=2),
    ),
    "tensor_lr": (lambda: sgd(torch.tensor(0.1)), lambda o: L.ExponentialLR(o, 0.97)),
    "tensor_sequential": (lambda: sgd(torch.tensor(0.1)), sequential),
    "custom": (sgd, ChainedMomentum),
}


def snapshot(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What a schedule can move, by value."""
    return [
        {
            k: float(v) if isinstance(v, torch.Tensor) else v
            for k, v in group.items()
            if k in MOVED
        }
        for group in optimizer.param_groups
    ]


def build(name: str) -> tuple[Optimizer, L.LRScheduler]:
    make_optimizer, make_scheduler = SCHEDULERS[name]
    optimizer = make_optimizer()
    return optimizer, make_scheduler(optimizer)


def base_run(
    name: str, steps: int, steps_per_epoch: tuple[int, int] | None = None
) -> list[list[dict[str, Any]]]:
    """What base step t sees, for t < steps; an epoch being num/den steps, in exact
    integers.
    """
    optimizer, scheduler = build(name)
    seen, epochs = [], 0
    for t in range(steps):
        seen.append(snapshot(optimizer))
        for p in (p for g in optimizer.param_groups for p in g["params"]):
            p.grad = torch.zeros_like(p)
        optimizer.step()
        if steps_per_epoch is None:
            scheduler.step()
        else:
            num, den = steps_per_epoch
            # this step consumed the last example of an epoch
            while (epochs + 1) * num <= (t + 1) * den:
                scheduler.step()
                epochs += 1
    return seen


def clock(seed: int, total: float) -> list[float]:
    """τ before each step of a run with gains between 1 and 8, and at its end (beyond
    T).
    """
    rng = random.Random(seed)
    taus = [0.0]
    while taus[-1] < total:
        taus.append(taus[-1] + rng.choice([1.0, 8.0, rng.uniform(1, 8)]))
    return taus


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_step_sees_the_learning_rate_and_momentum_of_its_base_step(
    name: str,
) -> None:
    base = base_run(name, T)
    for seed in range(3):
        optimizer, scheduler = build(name)
        schedule = EffectiveSchedule(optimizer, scheduler, unit="step", total_steps=T)
        taus = clock(seed, T)
        for tau in taus:
            schedule.advance_to(tau)
            assert snapshot(optimizer) == base[min(math.floor(tau), T - 1)]
            assert schedule.lrs == [group["lr"] for group in snapshot(optimizer)]
        assert taus[-1] >= T
        assert schedule.calls == T - 1


@pytest.mark.parametrize(
    ("length", "batch"), [(1797, 8), (1000, 3), (49, 10), (50000, 128), (1281167, 7)]
)
def test_epoch_counts_are_exact_where_the_quotient_is_not(
    length: int, batch: int
) -> None:
    schedule = EffectiveSchedule(
        (o := sgd()), L.StepLR(o, 10), unit="epoch", base_steps_per_epoch=length / batch
    )  # steps per epoch are rounded, and so is the division by them
    for epoch in range(1, 300):
        # the first step with all examples of the epoch behind it
        border = -(-epoch * length // batch)
        assert schedule.due(border) == border * batch // length
        assert schedule.due(border - 1) == (border - 1) * batch // length


def test_the_plain_clock_needs_no_total_and_never_goes_back() -> None:
    optimizer, scheduler = build("exponential")
    schedule = EffectiveSchedule(optimizer, scheduler, unit="step")
    schedule.advance_to(9.99)
    before = snapshot(optimizer)
    schedule.advance_to(3.0)
    assert (schedule.calls, snapshot(optimizer)) == (9, before)
    assert schedule.due(10 * T) == 10 * T


def test_calls_end_with_the_base_runs_last_step() -> None:
    # OneCycleLR raises beyond its total_steps, and the last optimizer step may
    # overshoot T by nearly S.
    optimizer, scheduler = build("onecycle_sgd")
    schedule = EffectiveSchedule(optimizer, scheduler, unit="step", total_steps=T)
    schedule.advance_to(T + 63.0)
    assert schedule.calls == T - 1
    unlimited = EffectiveSchedule(*build("onecycle_sgd"), unit="step")
    with pytest.raises(ValueError, match="Tried to step"):
        unlimited.advance_to(T + 63.0)


@pytest.mark.parametrize(
    ("total", "last"), [(100, 99), (100.5, 100), (30 * (1000 / 3), 9999), (0.5, 0)]
)
def test_a_fractional_total_ends_with_the_step_that_reaches_it(
    total: float, last: int
) -> None:
    schedule = EffectiveSchedule(
        (o := sgd()), L.ExponentialLR(o, 0.999), unit="step", total_steps=total
    )
    assert schedule.due(1e9) == last
    assert len(schedule.curve(total)[0]) == last + 1


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_curve_is_the_base_runs_and_leaves_everything_untouched(name: str) -> None:
    base = base_run(name, T)
    optimizer, scheduler = build(name)
    for p in (p for g in optimizer.param_groups for p in g["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    schedule = EffectiveSchedule(optimizer, scheduler, unit="step", total_steps=T)
    groups = [id(g) for g in optimizer.param_groups]
    lr_objects = [id(g["lr"]) for g in optimizer.param_groups]

    def live() -> str:
        # repr, since schedulers' attributes include tensors (no ==) and lambdas
        # (compared by address, as they should)
        nested = [vars(s) for s in getattr(scheduler, "_schedulers", [])]
        state = [
            (id(p), id(s), {k: (id(v), str(v)) for k, v in s.items()})
            for p, s in optimizer.state.items()
        ]
        halvers = [
            f.asked
            for f in getattr(scheduler, "lr_lambdas", [])
            if isinstance(f, Halver)
        ]
        return repr((vars(scheduler), nested, optimizer.param_groups, state, halvers))

    before = live()
    curve = schedule.curve(T)
    assert live() == before
    assert groups == [id(g) for g in optimizer.param_groups]
    assert lr_objects == [id(g["lr"]) for g in optimizer.param_groups]
    assert schedule._rates(T).T.tolist() == [
        [seen[g]["lr"] for seen in base] for g in range(len(groups))
    ]
    for group, rates in zip(curve, schedule._rates(T).T, strict=True):
        assert group == pytest.approx(rates, abs=1e-11)

    schedule.advance_to(17.3)  # later on it still begins at call 0
    assert [*schedule.curve(T)] == [*curve]
    assert snapshot(optimizer) == base[17]


def test_the_curve_copies_neither_parameters_nor_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, scheduler = build("sequential")
    scheduler.model = torch.nn.ParameterList(optimizer.param_groups[0]["params"])  # type: ignore[attr-defined]

    def refuse(*_: Any) -> None:
        raise AssertionError("copied a parameter")

    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", refuse)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["uncopyable"] = (
        threading.Lock()
    )
    EffectiveSchedule(optimizer, scheduler, unit="step").curve(T)


def test_a_curve_per_epoch_has_one_point_per_call() -> None:
    optimizer, scheduler = build("step")
    schedule = EffectiveSchedule(
        optimizer, scheduler, unit="epoch", base_steps_per_epoch=1797 / 8
    )
    assert [len(group) for group in schedule.curve(30 * 1797 / 8)] == [
        30,
        30,
    ]  # the 30th call comes after the last step


def test_without_a_scheduler_the_learning_rates_are_constant() -> None:
    schedule = EffectiveSchedule(sgd(), None)
    schedule.advance_to(50.0)
    assert (schedule.calls, schedule.due(50.0), schedule.lrs) == (0, 0, [0.1, 0.05])
    assert [*schedule.curve(T)] == [[0.1], [0.05]]
    schedule.load_state_dict(schedule.state_dict())
    with pytest.raises(ValueError, match="this run has no scheduler"):
        schedule.load_state_dict({"calls": 3})


@pytest.mark.parametrize(
    "optimizer_first",
    [True, False, None],
    ids=["optimizer_first", "schedule_first", "alone"],
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_loading_fast_forwards_bit_identically(
    name: str, optimizer_first: bool | None
) -> None:
    optimizer, scheduler = build(name)
    schedule = EffectiveSchedule(optimizer, scheduler, unit="step", total_steps=T)
    schedule.advance_to(41.7)
    # changed by the user: nothing of the schedule's
    optimizer.param_groups[0]["weight_decay"] = 0.125
    state, optimizer_state = (
        json.loads(json.dumps(schedule.state_dict())),
        copy.deepcopy(optimizer.state_dict()),
    )
    assert state == {"calls": 41}

    resumed_optimizer, resumed_scheduler = build(name)
    resumed = EffectiveSchedule(
        resumed_optimizer, resumed_scheduler, unit="step", total_steps=T
    )
    if optimizer_first is True:
        resumed_optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(state)
    if optimizer_first is False:
        resumed_optimizer.load_state_dict(optimizer_state)
    if optimizer_first is not None:
        assert resumed_optimizer.param_groups[0]["weight_decay"] == 0.125
    for tau in itertools.chain([41.7], (t for t in clock(5, T) if t > 41.7)):
        schedule.advance_to(tau)
        resumed.advance_to(tau)
        assert snapshot(resumed_optimizer) == snapshot(optimizer)
        assert resumed.calls == schedule.calls
    assert scheduler.get_last_lr() == resumed_scheduler.get_last_lr()


def test_loading_keeps_a_tensor_learning_rate_in_place() -> None:
    optimizer, scheduler = build("tensor_lr")  # a captured graph points to the tensor
    lr = optimizer.param_groups[0]["lr"]
    schedule = EffectiveSchedule(optimizer, scheduler, unit="step", total_steps=T)
    curve = schedule.curve(T)
    schedule.load_state_dict({"calls": 5})
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == curve[0][5]
    assert [*schedule.curve(T)] == [*curve]


@pytest.mark.parametrize("state", [{}, {"calls": -1}, {"calls": 2.0}, {"calls": True}])
def test_a_state_that_is_none_is_refused(state: dict[str, Any]) -> None:
    schedule = EffectiveSchedule(*build("step"), unit="step")
    with pytest.raises(ValueError, match="Invalid schedule state"):
        schedule.load_state_dict(state)


def test_only_a_fresh_schedule_loads() -> None:
    schedule = EffectiveSchedule(*build("step"), unit="step")
    schedule.advance_to(2.0)
    with pytest.raises(ValueError, match="has made 2 calls"):
        schedule.load_state_dict({"calls": 5})


def test_torchs_ordering_warnings_are_swallowed_and_no_others() -> None:
    # pytest makes any warning an error, so the tests above show the first half for
    # "before optimizer.step()".
    optimizer, scheduler = build("step")
    optimizer.step = lambda *_: None  # type: ignore[assignment]  # "has been overridden"
    EffectiveSchedule(optimizer, scheduler, unit="step").advance_to(5.0)

    def noisy(call: int) -> float:
        if call:
            warnings.warn("my own", UserWarning, stacklevel=1)
        return 1.0

    schedule = EffectiveSchedule((o := sgd()), L.LambdaLR(o, noisy), unit="step")
    with pytest.warns(UserWarning, match="my own"):
        schedule.advance_to(1.0)


def test_a_wrapper_that_shares_the_groups_is_accepted() -> None:
    class Wrapper(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.param_groups, self.state, self.defaults = (
                inner.param_groups,
                inner.state,
                inner.defaults,
            )

    optimizer, scheduler = build("exponential")
    schedule = EffectiveSchedule(Wrapper(optimizer), scheduler, unit="step")
    schedule.advance_to(1.0)
    assert schedule.lrs == [0.1 * 0.97, 0.05 * 0.97]


def refuse(match: str, optimizer: Any, scheduler: Any, **kwargs: Any) -> None:
    with pytest.raises(ValueError, match=match):
        EffectiveSchedule(optimizer, scheduler, **kwargs)


def test_refusals_say_what_to_do() -> None:
    optimizer, scheduler = build("step")
    refuse("a wrong guess", optimizer, scheduler)
    refuse("Invalid unit='batch'", optimizer, scheduler, unit="batch")
    refuse("needs base_steps_per_epoch", optimizer, scheduler, unit="epoch")
    refuse(
        "Invalid base_steps_per_epoch=0",
        optimizer,
        scheduler,
        unit="epoch",
        base_steps_per_epoch=0,
    )
    refuse(
        "Invalid total_steps=nan",
        optimizer,
        scheduler,
        unit="step",
        total_steps=math.nan,
    )
    refuse("follows a metric", optimizer, L.ReduceLROnPlateau(optimizer), unit="step")

    class GreedyLR:  # transformers' has no class of torch's above it
        def step(self, metrics: float, epoch: int | None = None) -> None: ...

    refuse("GreedyLR.*follows a metric", optimizer, GreedyLR(), unit="step")
    refuse("Must be a torch.optim.lr_scheduler", optimizer, lambda: None, unit="step")
    refuse("drives another optimizer", sgd(), scheduler, unit="step")
    optimizer.step()
    scheduler.step()
    refuse("StepLR was stepped already", optimizer, scheduler, unit="step")

    # ChainedScheduler keeps no count of its own: its parts tell
    o = sgd()
    chained = L.ChainedScheduler([L.ExponentialLR(o, 0.9)], optimizer=o)
    o.step()
    chained.step()
    refuse("ExponentialLR was stepped already", o, chained, unit="step")

    class Uncopyable(Halver):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    o = sgd()
    refuse("Cannot copy the LambdaLR", o, L.LambdaLR(o, Uncopyable()), unit="step")

    schedule = EffectiveSchedule((o := sgd()), L.StepLR(o, 3), unit="step")
    for tau in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="Invalid effective_steps"):
            schedule.advance_to(tau)
    with pytest.raises(ValueError, match="Invalid total_steps=0"):
        schedule.curve(0)


def test_curve_difference_names_the_first_difference() -> None:
    curve = [[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]]
    assert curve_difference(curve, copy.deepcopy(curve)) is None
    changed = [[0.1, 0.2, 0.3], [1.0, 2.5, 3.5]]
    message = curve_difference(curve, changed)
    assert message is not None
    for part in (
        "parameter group 1",
        "call 1,",
        "2.0 is expected",
        "actual value is 2.5",
        "2 of 6 points",
    ):
        assert part in message
    assert "lengths" not in message
    assert "2 (expected) and 1 (actual) parameter groups" in str(
        curve_difference(curve, curve[:1])
    )
    assert "3 (expected) and 2 (actual)" in str(
        curve_difference(curve, [c[:2] for c in curve])
    )
    assert "lengths differ as well" in str(
        curve_difference(curve, [c[:2] for c in changed])
    )


def test_curve_difference_forgives_rounding_alone() -> None:
    assert curve_difference([[0.1]], [[0.1 * (1 + 1e-9)]]) is None
    assert curve_difference([[0.1]], [[0.1 * (1 + 1e-5)]]) is not None
    assert curve_difference([[0.1]], [[0.1 * (1 + 1e-5)]], rtol=1e-4) is None
    assert curve_difference([[0.1, 0.0]], [[0.1, 6e-18]]) is None  # the end of a cosine
    assert curve_difference([[0.1, 0.0]], [[0.1, 1e-6]]) is not None
    assert curve_difference([[math.nan]], [[math.nan]]) is None
    assert curve_difference([[math.nan]], [[1.0]]) is not None


def test_the_effective_step_of_the_highest_rate() -> None:
    warm_up = BaseSchedule(
        base_batch_size=4,
        total_steps=40,
        scheduler_unit="epoch",
        base_steps_per_epoch=10.0,
        lr_curve=[[1.0, 3.0, 3.0, 0.0]],
    )
    assert warm_up.highest_at == 10
    assert replace(warm_up, scheduler_unit="step").highest_at == 1
    assert replace(warm_up, scheduler_unit=None, lr_curve=[[3.0]]).highest_at == 0


def test_groups_with_proportional_curves_share_one() -> None:
    shape = [0.1, 0.3, 0.2]
    curves = [
        shape,
        [3.0 * lr for lr in shape],
        [0.0] * 3,
        shape,
        [0.1, 0.3, 0.2 + 1e-11],
        [0.0] * 3,
        [math.nan] * 3,
    ]
    found = LRCurves.of(np.array(curves).T)
    assert [row for row, _ in found.groups] == [0, 0, 1, 0, 2, 1, 3]
    assert found[0] == found[3] == shape  # to the last bit
    assert found[1] == pytest.approx(curves[1], rel=1e-12)
    assert found[2] == found[5] == curves[2]
    assert found[4] == curves[4]
    assert len(found) == 7
    assert [*LRCurves.of(np.array(curves[:-1]).T)] == [*found][:-1]


# ---- a schedule of another length than T ---------------------------------------------


def _said(
    make: Callable[[Optimizer], Any],
    total: int,
    unit: SchedulerUnit = "step",
    per_epoch: float = 10.0,
) -> str | None:
    optimizer = sgd()
    scheduler = make(optimizer)
    schedule = EffectiveSchedule(
        optimizer,
        scheduler,
        unit=unit,
        base_steps_per_epoch=per_epoch,
        total_steps=total,
    )
    base = BaseSchedule(
        base_batch_size=4,
        total_steps=total,
        scheduler_unit=unit,
        base_steps_per_epoch=per_epoch,
        lr_curve=schedule.curve(total),
    )
    return other_length(scheduler, base)


def _warmed_up(optimizer: Optimizer, warmup: int, t_max: int) -> L.SequentialLR:
    parts = [
        L.LinearLR(optimizer, 0.1, total_iters=warmup),
        L.CosineAnnealingLR(optimizer, t_max),
    ]
    return L.SequentialLR(optimizer, parts, milestones=[warmup])


def _linear(step: int, *, num_training_steps: int) -> float:
    """A schedule as transformers' get_scheduler makes it."""
    return max(0.0, 1 - step / num_training_steps)


def _to_zero(optimizer: Optimizer, end: int, power: float = 1.0) -> L.LambdaLR:
    return L.LambdaLR(optimizer, lambda call: (1 - min(call / end, 1.0)) ** power)


@pytest.mark.parametrize(
    ("make", "total", "unit", "words"),
    [
        (
            lambda o: L.CosineAnnealingLR(o, 600),
            3000,
            "step",
            "CosineAnnealingLR has T_max at 600 steps.*3000 steps.*rises again",
        ),
        (
            lambda o: L.CosineAnnealingLR(o, 4000),
            3000,
            "step",
            "4000 steps.*3000 steps.*ends before it",
        ),
        (
            lambda o: L.CosineAnnealingLR(o, 3000),
            3000,
            "epoch",
            r"3000 epochs.*300 epochs \(3000 steps\)",
        ),
        (
            lambda o: L.OneCycleLR(o, 1.0, total_steps=400),
            300,
            "step",
            "OneCycleLR has total_steps at 400.*300",
        ),
        (
            lambda o: L.PolynomialLR(o, 100),
            300,
            "step",
            "PolynomialLR has total_iters at 100.*300.*stays",
        ),
        (
            lambda o: _warmed_up(o, 10, 300),
            300,
            "step",
            "CosineAnnealingLR has T_max at 310 steps.*300",
        ),
        (
            lambda o: L.ChainedScheduler(
                [L.LinearLR(o, 0.1, total_iters=5), L.CosineAnnealingLR(o, 100)]
            ),
            300,
            "step",
            "T_max at 100 steps.*300",
        ),
        (
            lambda o: L.MultiStepLR(o, [3, 160, 40]),
            100,
            "epoch",
            r"milestones at 160 epochs.*10 epochs.*ends before it",
        ),
        (
            lambda o: L.StepLR(o, 30),
            100,
            "epoch",
            r"StepLR has step_size at 30 epochs.*10 epochs.*ends before it",
        ),
        (
            lambda o: L.LinearLR(o, 0.1, total_iters=500),
            100,
            "step",
            r"LinearLR has total_iters at 500 steps.*100 steps",
        ),
        (
            lambda o: L.ConstantLR(o, 0.1, total_iters=500),
            100,
            "step",
            r"ConstantLR has total_iters at 500 steps",
        ),
        (
            lambda o: L.LambdaLR(o, partial(_linear, num_training_steps=1200)),
            300,
            "step",
            r"num_training_steps at 1200 steps.*300 steps.*multiplied by the number of "
            r"processes \(accelerator\.num_processes\), leave that out",
        ),
        (
            lambda o: L.LambdaLR(o, partial(_linear, num_training_steps=200)),
            300,
            "step",
            r"num_training_steps at 200 steps.*300 steps.*stays constant",
        ),
        (
            lambda o: _to_zero(o, 600),
            3000,
            "step",
            r"zero from 600 steps on.*3000 steps.*config\['total_steps'\]",
        ),
        (
            lambda o: _to_zero(o, 30),
            400,
            "epoch",
            r"zero from 30 epochs on.*40 epochs \(400 steps\)",
        ),
    ],
)
def test_a_schedule_made_for_another_length_is_told_with_both_numbers(
    make: Callable[[Optimizer], Any], total: int, unit: SchedulerUnit, words: str
) -> None:
    said = _said(make, total, unit)
    assert said is not None
    assert re.search(words, said), said


@pytest.mark.parametrize(
    ("make", "total", "unit"),
    [
        (lambda o: L.CosineAnnealingLR(o, 3000), 3000, "step"),
        # zero at the last step, instead of after it
        (lambda o: L.CosineAnnealingLR(o, 2999), 3000, "step"),
        (lambda o: L.CosineAnnealingLR(o, 300), 3000, "epoch"),
        (lambda o: L.CosineAnnealingLR(o, 30), 305, "epoch"),  # 30.5 epochs
        (lambda o: _warmed_up(o, 10, 290), 300, "step"),
        (lambda o: L.OneCycleLR(o, 1.0, total_steps=300), 300, "step"),
        (lambda o: _to_zero(o, 300, power=4), 300, "step"),
        (lambda o: _to_zero(o, 299), 300, "step"),
        (lambda o: L.StepLR(o, 100, 0.1), 400, "step"),
        (lambda o: L.MultiStepLR(o, [100, 200]), 400, "step"),
        (lambda o: L.MultiStepLR(o, []), 400, "step"),
        (lambda o: L.CosineAnnealingWarmRestarts(o, 30), 300, "step"),
        (lambda o: L.LambdaLR(o, lambda call: 1.0), 300, "step"),
        (
            lambda o: L.LambdaLR(o, partial(_linear, num_training_steps=302)),
            300,
            "step",
        ),
        (lambda o: L.LinearLR(o, 0.1, total_iters=5), 300, "step"),
        (lambda o: L.StepLR(o, 30), 200, "epoch"),  # a trial of 20 epochs
        # whose value has a warning of its own
        (lambda o: L.LambdaLR(o, lambda call: math.nan), 300, "step"),
    ],
)
def test_a_schedule_of_the_right_length_or_none_is_taken_as_it_is(
    make: Callable[[Optimizer], Any], total: int, unit: SchedulerUnit
) -> None:
    assert _said(make, total, unit) is None


def test_a_group_that_never_moves_does_not_count_as_one_at_zero() -> None:
    def make(optimizer: Optimizer) -> L.LRScheduler:
        optimizer.param_groups[1]["lr"] = 0.0
        return L.StepLR(optimizer, 100, 0.5)

    assert _said(make, 300) is None


def test_a_scheduler_that_ends_before_the_run_is_named_with_the_length_to_make_it_for() -> (
    None
):
    optimizer = sgd()
    scheduler = L.OneCycleLR(optimizer, max_lr=0.1, total_steps=32)
    schedule = EffectiveSchedule(optimizer, scheduler, unit="step")
    for fails in (lambda: schedule.curve(40), lambda: schedule.advance_to(39.0)):
        with pytest.raises(ValueError, match="Tried to step 33 times") as caught:
            fails()
        (note,) = caught.value.__notes__
        assert note.startswith(
            "In call 33 of OneCycleLR.step(), of 39 that are due. Make the scheduler "
            "for the length"
        )


@pytest.mark.parametrize("kind", ["counts its calls", "draws", "reads what changes"])
def test_a_function_that_depends_on_more_than_its_argument_is_refused(
    kind: str,
) -> None:
    calls = itertools.count()
    factor = {
        "counts its calls": lambda _: 0.99 ** next(calls),
        "draws": lambda _: float(torch.rand(())),
        "reads what changes": lambda call: 1.0 if call < 5 else 0.5 ** next(calls),
    }[kind]
    optimizer = sgd()
    schedule = EffectiveSchedule(optimizer, L.LambdaLR(optimizer, factor), unit="step")
    with pytest.raises(ValueError, match="must depend on its argument alone"):
        schedule.curve(40)
