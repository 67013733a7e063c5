"""Comparison of a program with a checkpoint of it: schedule, optimizer and
hyperparameters of each parameter, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ... import checkpoint
from ..._errors import listed
from ...chain import parts_of
from ...checkpoint.optimizer import entries_of
from ...optim.curves import curve_difference
from ...optim.schedule import BaseSchedule, LRCurves

_OF_THE_CURVE = frozenset({"lr", "initial_lr", "min_lr", "max_lr"})
_MOVED_BY_SCHEDULERS = _OF_THE_CURVE | {
    "momentum",
    "betas",
    "base_momentum",
    "max_momentum",
}

_WITH_STATE = {
    "amsgrad": ("Adam", "AdamW"),
    "centered": ("RMSprop",),
    "momentum": ("RMSprop",),
}
"""Hyperparameters that can't be turned on later in these classes: each step needs
state of the steps before.
"""

Groups = Sequence[Mapping[str, Any]]
Comparison = tuple[list[str], list[str], list[dict[str, Any]]]


def groups_of(
    optimizer: Optimizer, names: Mapping[Tensor, str]
) -> list[dict[str, Any]]:
    """Return the parameter groups as a program has built them, as JSON values.

    Args:
        optimizer: The user's own, before its first step.
        names: Names of its parameters.

    Returns:
        For each group its optimizer's class, the names of its parameters, and its
        hyperparameters but the LR.
    """
    kinds = {
        g: type(part).__name__ for part, numbers in parts_of(optimizer) for g in numbers
    }
    found = []
    for g, group in enumerate(optimizer.param_groups):
        values = {
            key: value
            for key, value in entries_of(group).items()
            if key not in _OF_THE_CURVE
        }
        named = [names[p] for p in group["params"]]
        found.append(
            {"optimizer": kinds[g], "parameters": named, "hyperparameters": values}
        )
    return json.loads(json.dumps(found))  # lists for tuples


def compare(
    saved: checkpoint.Saved, schedule: BaseSchedule, groups: Groups
) -> Comparison:
    """Compare a program with a checkpoint. Parameters are matched by name, whatever the
    order of the groups.

    Args:
        saved: The checkpoint.
        schedule: The program's schedule.
        groups: The program's :func:`groups_of`.

    Returns:
        Changes of the schedule, a phrase each, and those of hyperparameters. And for
        each present group the hyperparameters to load: those that the program has not
        changed. They may have moved since the start, by a scheduler, in the loop or in
        the optimizer's step.

    Raises:
        ValueError: The optimizer of a parameter is of another class than it was, or
            needs state that it had not.
    """
    before = saved.state["groups"]
    values = saved.state["param_groups"]
    holder = {name: i for i, group in enumerate(before) for name in group["parameters"]}
    # Of each present group the saved ones that its parameters were in: one, unless the
    # program groups them otherwise.
    sources = [
        sorted({holder[name] for name in group["parameters"] if name in holder})
        for group in groups
    ]
    pairs = [(g, i) for g, numbers in enumerate(sources) for i in numbers]
    changed: list[set[str]] = [set() for _ in groups]
    phrases: dict[str, list[int]] = {}
    for g, i in pairs:
        now = groups[g]
        was = before[i]
        name = groups[g]["optimizer"]
        if name != was["optimizer"]:
            raise ValueError(
                _other_class(saved, was["optimizer"], name, now["parameters"])
            )
        for key, value in now["hyperparameters"].items():
            if (
                key in was["hyperparameters"]
                and (old := was["hyperparameters"][key]) != value
            ):
                if value and not old and name in _WITH_STATE.get(key, ()):
                    was_built = f"{name}({key}={old!r})"
                    built = f"{name}({key}={value!r})"
                    raise ValueError(
                        _other_class(saved, was_built, built, now["parameters"])
                    )
                changed[g].add(key)
                phrases.setdefault(f"{key} is {value!r}, was {old!r}", []).append(g)
    of_schedule = changes_since(
        _with_groups(
            saved_schedule(saved.state, saved.tensors("schedule/")),
            [i for _, i in pairs],
        ),
        _with_groups(schedule, [g for g, _ in pairs]),
    )
    moved = _MOVED_BY_SCHEDULERS if of_schedule else frozenset()
    kept: list[dict[str, Any]] = [{} for _ in groups]
    for g, i in pairs:
        kept[g].update(
            {
                key: value
                for key, value in values[i].items()
                if key not in changed[g] | moved
            }
        )
    of = {
        text: [name for g in numbers for name in groups[g]["parameters"]]
        for text, numbers in phrases.items()
    }
    texts = [
        text if len(of[text]) == len(holder) else f"{text}, for {listed(of[text])}"
        for text in phrases
    ]
    return of_schedule, texts, kept


def _other_class(
    saved: checkpoint.Saved, was: str, now: str, parameters: Sequence[str]
) -> str:
    return (
        f"The program builds {now}, and the checkpoint {saved.folder.name} has state "
        f"of {was} for {listed(parameters)}. {now} can't step with it. Build {was} as "
        "before. To change the optimizer, start a new run under another name from its "
        "weights: "
        f"model.load_state_dict(ray_adascale.load_weights({str(saved.folder)!r})) and "
        f"starting_step={saved.state['effective_steps']:.0f}."
    )


def _with_groups(schedule: BaseSchedule, numbers: Sequence[int]) -> BaseSchedule:
    curves = schedule.lr_curve
    assert isinstance(curves, LRCurves)
    return replace(
        schedule, lr_curve=LRCurves(curves.rows, [curves.groups[i] for i in numbers])
    )


def saved_schedule(
    state: Mapping[str, Any], curves: Mapping[str, Tensor]
) -> BaseSchedule:
    """Return the base run's schedule from a checkpoint's state and LR curves."""
    groups = [(int(row), factor) for row, factor in curves["lr_groups"].tolist()]
    return BaseSchedule(
        base_batch_size=state["plan"]["base_batch_size"],
        total_steps=state["total_steps"],
        scheduler_unit=state["scheduler_unit"],
        base_steps_per_epoch=state["base_steps_per_epoch"],
        lr_curve=LRCurves(curves["lr_curve"].numpy(), groups),
    )


def changes_since(was: BaseSchedule, now: BaseSchedule) -> list[str]:
    """Return the differences in base batch, T, unit and LR curve, a phrase each."""
    changed = [
        f"{name} is {getattr(now, name)!r}, was {getattr(was, name)!r}"
        for name in ("base_batch_size", "total_steps", "scheduler_unit")
        if getattr(now, name) != getattr(was, name)
    ]
    difference = curve_difference(was.lr_curve, now.lr_curve)
    if difference is not None:
        changed.append(f"the learning-rate curve differs: {difference}")
    return changed
