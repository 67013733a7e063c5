"""Checks that a scheduler is fresh and that its curve is known beforehand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .._errors import kind_of


def nested_schedulers(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield the scheduler and the schedulers inside it (SequentialLR,
    ChainedScheduler).
    """
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from nested_schedulers(inner)


def check_scheduler(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Check that a scheduler is fresh, drives this optimizer, and has a curve that is
    known beforehand.

    Raises:
        ValueError: It has not. The message says what to use.
    """
    if not isinstance(scheduler, LRScheduler):
        raise ValueError(
            f"Invalid scheduler: {kind_of(scheduler)}. Must be a "
            "torch.optim.lr_scheduler.LRScheduler or None; combine several with "
            f"SequentialLR or ChainedScheduler.{torchs_own_hint(scheduler)}"
        )
    for part in nested_schedulers(scheduler):
        if isinstance(part, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau is not supported: it follows a metric, so its curve "
                "is not known beforehand and can't be replayed on another number of "
                "workers. Use a scheduler that is a function of the step, such as "
                "MultiStepLR with the milestones of the base run."
            )
        last_epoch = getattr(part, "last_epoch", 0)
        if last_epoch > 0:
            raise ValueError(
                f"The {type(part).__name__} was stepped already "
                f"(last_epoch={last_epoch}). Give a fresh scheduler and never call its "
                "step(). The schedule calls it by τ, also after a resume."
            )
    theirs = scheduler.optimizer.param_groups
    ours = optimizer.param_groups
    if scheduler.optimizer is not optimizer and [id(g) for g in theirs] != [
        id(g) for g in ours
    ]:
        raise ValueError(
            f"The {type(scheduler).__name__} drives another optimizer "
            f"({type(scheduler.optimizer).__name__}) than the "
            f"{type(optimizer).__name__} given here. Build the scheduler on the "
            "optimizer of the run."
        )


_FIRST_FACTORS: dict[type[LRScheduler], Callable[[Any], float]] = {
    schedulers.ConstantLR: lambda constant: constant.factor,
    schedulers.CosineAnnealingLR: lambda _: 1.0,
    schedulers.ExponentialLR: lambda _: 1.0,
    schedulers.LinearLR: lambda linear: linear.start_factor,
    schedulers.MultiplicativeLR: lambda _: 1.0,
    schedulers.MultiStepLR: lambda steps: steps.gamma ** steps.milestones[0],
    schedulers.PolynomialLR: lambda _: 1.0,
    schedulers.StepLR: lambda _: 1.0,
}
"""What a scheduler makes of the optimizer's learning rate at step 0.

The others are right when they are built on loaded rates: LambdaLR,
CosineAnnealingWarmRestarts, CyclicLR and OneCycleLR compute their rates anew, and
SequentialLR sets the rates back first.
"""


def _first_factor(scheduler: LRScheduler) -> float | None:
    """Return what a scheduler makes of the optimizer's learning rate at step 0; None if
    it is unknown.
    """
    if type(scheduler) is schedulers.ChainedScheduler:
        factors = [_first_factor(inner) for inner in scheduler._schedulers]
        known = [factor for factor in factors if factor is not None]
        return math.prod(known) if len(known) == len(factors) else None
    found = _FIRST_FACTORS.get(type(scheduler))
    return None if found is None else found(scheduler)


def check_initial_rates(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Check that the learning rates are those that a fresh scheduler has set.

    Raises:
        ValueError: They are not.
    """
    rates, theirs = (
        [float(rate) for rate in each]
        for each in (
            [group["lr"] for group in optimizer.param_groups],
            scheduler.get_last_lr(),
        )
    )
    if rates != theirs:
        raise ValueError(
            f"The learning rates are {rates}, and the fresh {type(scheduler).__name__} "
            f"began at {theirs}: optimizer.load_state_dict() has loaded those of "
            "another step. Set them back after it: for group, lr in "
            "zip(optimizer.param_groups, scheduler.get_last_lr()): group['lr'] = lr. "
            "The run sets the schedule to starting_step."
        )
    factor = _first_factor(scheduler)
    if factor is None:
        return
    base = [float(group["initial_lr"]) for group in scheduler.optimizer.param_groups]
    expected = [rate * factor for rate in base]
    # inner schedulers may have multiplied in another order
    if not all(map(_close, rates, expected)):
        raise ValueError(
            f"The fresh {type(scheduler).__name__} begins at {rates}. From the learning "
            f"rates of the optimizer, {base}, it would begin at {expected}: it was "
            "built after optimizer.load_state_dict(), which has loaded those of another "
            "step. Build the scheduler before it. After it set the rates back: for "
            "group, lr in zip(optimizer.param_groups, scheduler.get_last_lr()): "
            "group['lr'] = lr."
        )


def _close(a: float, b: float) -> bool:
    """Return whether two numbers differ by a rounding of single precision at most."""
    return math.isclose(a, b, rel_tol=1e-6)


def torchs_own_hint(scheduler: object) -> str:
    """Return advice about a scheduler that is not one of torch's, as a further
    sentence; empty for unknown ones.
    """
    if (
        "metrics"
        in inspect.signature(
            getattr(type(scheduler), "step", object.__init__)
        ).parameters
    ):
        return (
            " It follows a metric, so its curve is not known beforehand and can't be "
            "replayed on another number of workers. Use a scheduler that is a function "
            "of the step."
        )
    if type(scheduler).__module__.partition(".")[0] != "timm":
        return ""
    return (
        " timm's schedulers are stepped with a number that the loop counts, so τ can't "
        "drive them. Use torch's own: a warm-up and a cosine are "
        "SequentialLR(optimizer, [LinearLR(optimizer, start_factor, total_iters=w), "
        "CosineAnnealingLR(optimizer, T_max=T - w)], milestones=[w])."
    )
