"""Comparisons of learning-rate curves: with another curve, and with the length of
the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.optim import lr_scheduler as L

from .schedule import BaseSchedule


def curve_difference(
    expected: Sequence[Sequence[float]],
    actual: Sequence[Sequence[float]],
    *,
    rtol: float = 1e-6,
) -> str | None:
    """Return the difference of two LR curves, to follow a colon: the first differing
    point, both values, and a count.

    None if they agree.

    Args:
        expected: ``curve[group][call]``, e.g. the recipe's.
        actual: ``curve[group][call]``, e.g. this run's.
        rtol: Relative tolerance of each learning rate. Values below ``rtol / 1000`` of
            a group's peak count as 0: the end of a cosine is a rounding error, which
            differs between machines.
    """
    if len(expected) != len(actual):
        return f"{len(expected)} (expected) and {len(actual)} (actual) parameter groups"
    lengths = [(len(e), len(a)) for e, a in zip(expected, actual, strict=True)]
    first: tuple[int, int] | None = None
    differing = 0
    for group, (e, a) in enumerate(
        zip(map(np.asarray, expected), map(np.asarray, actual), strict=True)
    ):
        both = min(len(e), len(a))
        floor = rtol * 1e-3 * np.abs(np.nan_to_num(e)).max(initial=0.0)
        wrong = ~np.isclose(e[:both], a[:both], rtol=rtol, atol=floor, equal_nan=True)
        if first is None and wrong.any():
            first = group, int(np.argmax(wrong))
        differing += int(wrong.sum())
    if first is not None:
        group, call = first
        compared = sum(min(pair) for pair in lengths)
        if all(e == a for e, a in lengths):
            longer = ""
        else:
            longer = ", and their lengths differ as well"
        return (
            f"the curves differ first in parameter group {group} at scheduler call "
            f"{call}, where {expected[group][call]!r} is expected and the actual value "
            f"is {actual[group][call]!r}; {differing} of {compared} points "
            f"differ{longer}"
        )
    for group, (e_length, a_length) in enumerate(lengths):
        if e_length != a_length:
            return (
                f"the curves of parameter group {group} differ in length only: "
                f"{e_length} (expected) and {a_length} (actual) scheduler calls "
                "(compare total_steps and the scheduler's unit)"
            )
    return None


# The attribute with the length of a torch scheduler, in calls.
_LENGTHS: dict[type[L.LRScheduler], str] = {
    L.CosineAnnealingLR: "T_max",
    L.OneCycleLR: "total_steps",
    L.PolynomialLR: "total_iters",
    L.MultiStepLR: "milestones",
    L.StepLR: "step_size",
    L.LinearLR: "total_iters",
    L.ConstantLR: "total_iters",
}
TRAINING_STEPS = "num_training_steps"
"""The argument of transformers' schedules."""
_SLACK = 0.02
"""Share of T. A smaller difference depends on whether a curve ends at its last step
or after it.
"""
# The last change of these schedules may come after the end of the run, by at most this
# share of T. A short trial of a long schedule is no mistake.
_LATE = {L.MultiStepLR: _SLACK, L.StepLR: 1.0, L.LinearLR: 1.0, L.ConstantLR: 1.0}


def other_length(scheduler: L.LRScheduler | None, schedule: BaseSchedule) -> str | None:
    """Return a doubt, with both numbers, if the scheduler seems to be made for another
    length than T; else None.

    There is one if a torch scheduler has another length, or changes after T; or if the
    learning rate is zero relative to its peak for more than a fiftieth of T before the
    end.

    Args:
        scheduler: The scheduler of the curve.
        schedule: The schedule with the curve.
    """
    total = schedule.total_steps
    per_call = schedule.steps_per_call
    if scheduler is None or per_call is None:
        return None
    calls = total / per_call
    unit = "steps" if schedule.scheduler_unit == "step" else "epochs"
    if unit == "steps":
        length = f"{total} steps"
    else:
        length = f"{calls:.4g} epochs ({total} steps)"
    hint = ": a workload gets it as config['total_steps']" if unit == "steps" else ""
    fix = f"Make the schedule for {calls:.4g} {unit}{hint}."
    for kind, name, ends in _own_ends(scheduler):
        late = ends - calls
        if (late if kind in _LATE else abs(late)) > max(
            1.0, _LATE.get(kind, _SLACK) * calls
        ):
            what = "rises again" if kind is L.CosineAnnealingLR else "stays constant"
            if ends < calls:
                then = f"so the learning rate {what} after it"
            else:
                then = "so the run ends before it"
            if name == TRAINING_STEPS and late > 0:
                fix += (
                    " If its lengths were multiplied by the number of processes "
                    "(accelerator.num_processes), leave that out: Accelerate calls a "
                    "scheduler once a process, and AdaScale once a base step."
                )
            return (
                f"{kind.__name__} has {name} at {ends:g} {unit}, and the run has "
                f"{length}, {then}. {fix}"
            )
    at_zero = min(
        (_calls_at_zero(curve) for curve in schedule.lr_curve if any(curve)), default=0
    )
    if at_zero >= 2 and at_zero > _SLACK * calls:
        begins = len(schedule.lr_curve[0]) - at_zero
        return (
            f"The learning rate is zero from {begins} {unit} on, and the run has "
            f"{length}. {fix}"
        )
    return None


def _own_ends(
    scheduler: L.LRScheduler, begins: int = 0
) -> Iterator[tuple[type[L.LRScheduler], str, float]]:
    """Yield the class, the attribute of the length, and the last call of each part
    that is in use at the end.
    """
    if isinstance(scheduler, L.SequentialLR):
        # torch has no public name for it
        milestones = getattr(scheduler, "_milestones", None)
        if milestones:
            yield from _own_ends(scheduler._schedulers[-1], begins + milestones[-1])
    elif isinstance(scheduler, L.ChainedScheduler):
        for part in scheduler._schedulers:
            yield from _own_ends(part, begins)
    elif isinstance(scheduler, L.LambdaLR):
        for function in scheduler.lr_lambdas:
            # of transformers.get_scheduler: a partial with the lengths
            length = getattr(function, "keywords", {}).get(TRAINING_STEPS)
            if isinstance(length, int | float):
                yield type(scheduler), TRAINING_STEPS, begins + length
    elif type(scheduler) in _LENGTHS:
        length = getattr(scheduler, name := _LENGTHS[type(scheduler)])
        yield (
            type(scheduler),
            name,
            begins + (max(length, default=0) if isinstance(length, dict) else length),
        )


def _calls_at_zero(curve: Sequence[float]) -> int:
    """Return the number of equal values at the end of a curve, if they are at most a
    millionth of its peak; else 0.
    """
    rates = np.asarray(curve)
    peak = np.abs(rates).max()
    last = rates[-1]
    if np.isnan(peak) or abs(last) > 1e-6 * peak:
        return 0
    different = np.flatnonzero(np.abs(rates - last) > 1e-9 * peak)
    return len(curve) - 1 - int(different[-1]) if len(different) else len(curve)
