"""Comparison of a program with a checkpoint of it: schedule, optimizer, parameter groups and hyperparameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..._errors import listed
from ...chain import parts_of
from ...checkpoint.optimizer import entries_of
from ...optim.curves import curve_difference
from ...optim.schedule import BaseSchedule, LRCurves

_OF_THE_CURVE = frozenset({"lr", "initial_lr", "min_lr", "max_lr"})
_MOVED_BY_SCHEDULERS = _OF_THE_CURVE | {"momentum", "betas", "base_momentum", "max_momentum"}

Groups = Sequence[Mapping[str, Any]]


def groups_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[dict[str, Any]]:
    """Return the parameter groups as a program has built them, as JSON values.

    Args:
        optimizer: The user's own, before its first step.
        names: Names of its parameters.

    Returns:
        For each group its optimizer's class, the names of its parameters, and its hyperparameters.
    """
    classes = {g: type(part).__name__ for part, numbers in parts_of(optimizer) for g in numbers}
    return [
        {
            "optimizer": classes[g],
            "parameters": [names[p] for p in group["params"]],
            "hyperparameters": json.loads(json.dumps(entries_of(group))),  # with lists in place of tuples
        }
        for g, group in enumerate(optimizer.param_groups)
    ]


def to_save(groups: Groups, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return :func:`groups_of` for a checkpoint that has the present hyperparameters too: those that have moved since."""
    return [
        {
            "optimizer": group["optimizer"],
            "parameters": group["parameters"],
            "at_first": {key: value for key, value in group["hyperparameters"].items() if now.get(key, value) != value},
        }
        for group, now in zip(groups, values, strict=True)
    ]


@dataclass(frozen=True)
class Changes:
    """What was changed in a program since its checkpoint.

    Attributes:
        schedule: Changes of the schedule, a phrase each.
        groups: Changes of the parameter groups and their hyperparameters, a phrase each.
        kept: For each present group the hyperparameters to load: those that the program has not changed. They may have moved
            since the start, by a scheduler, in the loop or in the optimizer's step.
    """

    schedule: list[str]
    groups: list[str]
    kept: list[dict[str, Any]]


def compare(saved: Mapping[str, Any], curves: Mapping[str, Tensor], schedule: BaseSchedule, groups: Groups) -> Changes:
    """Compare a program with a checkpoint. Groups are matched by the names of their parameters, whatever their order.

    Args:
        saved: The checkpoint's state.
        curves: The checkpoint's LR curves.
        schedule: The program's schedule.
        groups: The program's :func:`groups_of`.

    Raises:
        ValueError: Groups of an older checkpoint, which has no names, differ in number.
    """
    at_first: Groups | None = saved.get("groups")  # older checkpoints don't have it
    values: list[dict[str, Any]] = saved["param_groups"]
    was = saved_schedule(saved, curves)
    texts: list[str] = []
    changed: list[set[str]] = [set() for _ in groups]
    order: list[int] | None = list(range(len(groups)))
    if at_first is not None:
        order = _matched(at_first, groups)
    elif len(values) != len(groups):
        raise ValueError(f"The checkpoint has {len(values)} parameter groups, the optimizer {len(groups)}.")
    if order is None:
        assert at_first is not None
        texts = [_regrouped(at_first, groups)]
    elif at_first is not None:
        was = _reordered(was, order)
        built = [{**values[i], **at_first[i]["at_first"]} for i in order]
        texts = list(_compare_hyperparameters(built, groups, changed))
    of_schedule = changes_since(was, schedule)
    moved = _MOVED_BY_SCHEDULERS if of_schedule else frozenset()
    kept: list[dict[str, Any]] = [{} for _ in groups]
    if order is not None:
        kept = [
            {key: value for key, value in values[i].items() if key not in own and key not in moved}
            for i, own in zip(order, changed, strict=True)
        ]
    return Changes(of_schedule, texts, kept)


def check_class(saved: Mapping[str, Any], groups: Groups, folder: Path) -> None:
    """Check that each parameter's optimizer is of the class that it had.

    Raises:
        ValueError: One is not.
    """
    before = {name: group["optimizer"] for group in saved.get("groups", ()) for name in group["parameters"]}
    for group in groups:
        now = group["optimizer"]
        for name in group["parameters"]:
            if before.get(name, now) != now:
                raise ValueError(
                    f"The optimizer of {name!r} is {now}, and in the checkpoint {folder.name} it is {before[name]}, whose state "
                    f"means nothing to {now}. Build {before[name]} as before. To change the optimizer, start a new run under "
                    f"another name from these weights: model.load_state_dict(ray_adascale.load_weights({str(folder)!r})) and "
                    f"starting_step={saved['effective_steps']:.0f}."
                )


def _matched(was: Groups, now: Groups) -> list[int] | None:
    """Return for each present group the number of the saved one with its parameters; None if they are grouped otherwise."""
    holder = {name: i for i, group in enumerate(was) for name in group["parameters"]}
    shared = [{holder[name] for name in group["parameters"] if name in holder} for group in now]
    others = iter([i for i in range(len(was)) if not any(i in numbers for numbers in shared)])
    found = [next(others, -1) if not numbers else min(numbers) for numbers in shared]
    one_to_one = sorted(found) == list(range(len(was))) and all(len(numbers) <= 1 for numbers in shared)
    return found if one_to_one else None


def _regrouped(was: Groups, now: Groups) -> str:
    before = {name: group["parameters"] for group in was for name in group["parameters"]}
    moved = [name for group in now for name in group["parameters"] if {*before.get(name, ())} != {*group["parameters"]}]
    return (
        f"the parameter groups hold other parameters ({len(now)} groups, were {len(was)}; regrouped: {listed(moved)})"
    )


def _reordered(schedule: BaseSchedule, order: Sequence[int]) -> BaseSchedule:
    curves = schedule.lr_curve
    assert isinstance(curves, LRCurves)
    return replace(schedule, lr_curve=LRCurves(curves.rows, [curves.groups[i] for i in order]))


def _compare_hyperparameters(
    was: Sequence[Mapping[str, Any]], now: Groups, changed: Sequence[set[str]]
) -> Iterator[str]:
    """Yield the differences, a phrase each, and add their keys to those of each group. LRs are compared as curves.

    Args:
        was: The hyperparameters of each group when the run began.
        now: The program's groups.
        changed: Receives the keys.
    """
    where: dict[str, list[int]] = {}
    for g, (old, group) in enumerate(zip(was, now, strict=True)):
        for key, value in group["hyperparameters"].items():
            if key in old and old[key] != value and key not in _OF_THE_CURVE:
                changed[g].add(key)
                where.setdefault(f"{key} is {value!r}, was {old[key]!r}", []).append(g)
    for text, numbers in where.items():
        of = [name for g in numbers for name in now[g]["parameters"]]
        yield text if len(numbers) == len(now) else f"{text}, for {listed(of)}"


def saved_schedule(state: Mapping[str, Any], curves: Mapping[str, Tensor]) -> BaseSchedule:
    """Return the base run's schedule from a checkpoint's state and LR curves."""
    rows = curves["lr_curve"]
    groups = curves["lr_groups"].tolist() if "lr_groups" in curves else [(i, 1.0) for i in range(len(rows))]
    return BaseSchedule(
        base_batch_size=state["plan"]["base_batch_size"],
        total_steps=state["total_steps"],
        scheduler_unit=state["scheduler_unit"],
        base_steps_per_epoch=state["base_steps_per_epoch"],
        lr_curve=LRCurves(
            rows.numpy(), [(int(row), factor) for row, factor in groups]
        ),  # older ones have a row for each
    )


def changes_since(was: BaseSchedule, now: BaseSchedule) -> list[str]:
    """Return the differences in base batch, T, unit and LR curve, a phrase each."""
    changed = [
        f"{name} is {getattr(now, name)}, was {getattr(was, name)}"
        for name in ("base_batch_size", "total_steps")
        if getattr(now, name) != getattr(was, name)
    ]
    if was.scheduler_unit != now.scheduler_unit:
        changed.append(f"scheduler_unit is {now.scheduler_unit!r}, was {was.scheduler_unit!r}")
    difference = curve_difference(was.lr_curve, now.lr_curve)
    if difference is not None:
        changed.append(f"the learning-rate curve differs: {difference}")
    return changed
