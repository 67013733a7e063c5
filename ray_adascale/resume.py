"""What a run says when it goes on from a checkpoint: what was changed since, and how many steps were lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .schedule import curve_difference

__all__ = ["ProgressNote", "changes_since", "lr_at"]


def changes_since(state: Mapping[str, Any], saved: Sequence[Sequence[float]], now: Mapping[str, Any]) -> list[str]:
    """What of base batch, T and LR curve differs from the checkpoint's, in words.

    Args:
        state: The checkpoint's state.
        saved: Its LR curve, ``curve[group][call]``.
        now: This run's ``base_batch_size``, ``total_steps``, ``lr_curve``, ``scheduler_unit``, ``base_steps_per_epoch``.
    """
    changed = [
        f"{name} is {now[name]}, was {before}"
        for name, before in (
            ("base_batch_size", state["plan"]["base_batch_size"]),
            ("total_steps", state["total_steps"]),
        )
        if now[name] != before
    ]
    unit = state.get("scheduler_unit", now["scheduler_unit"])  # checkpoints of ray_adascale 0.1 don't say
    per_epoch = state.get("base_steps_per_epoch", now["base_steps_per_epoch"])
    if unit != now["scheduler_unit"]:
        changed.append(f"scheduler_unit is {now['scheduler_unit']!r}, was {unit!r}")
    difference = curve_difference(saved, now["lr_curve"])
    if difference is not None:
        table = []
        if len(saved) == len(now["lr_curve"]):
            end = min(state["total_steps"], now["total_steps"])
            table = _differing_points(
                lambda group, tau: lr_at(saved[group], tau, unit, per_epoch),
                lambda group, tau: lr_at(
                    now["lr_curve"][group], tau, now["scheduler_unit"], now["base_steps_per_epoch"]
                ),
                len(saved),
                end,
            )
        points = f" At effective step: {', '.join(table)}." if table else ""
        changed.append(f"the learning-rate curve differs: {difference}{points}")
    return changed


def lr_at(
    curve: Sequence[float], effective_steps: float, unit: str | None, base_steps_per_epoch: float | None
) -> float:
    """A group's learning rate at τ, from its values call by call."""
    per_call = base_steps_per_epoch if unit == "epoch" and base_steps_per_epoch else 1
    return curve[min(int(effective_steps / per_call), len(curve) - 1)]


def _differing_points(was: Any, now: Any, groups: int, end: float, shown: int = 5) -> list[str]:
    """ "τ: lr before → lr now" at a few τ, evenly among those where they differ, of the first group that differs."""
    taus = sorted({int(i * end / 200) for i in range(200)})
    for group in range(groups):
        differing = [tau for tau in taus if abs(was(group, tau) - now(group, tau)) > 1e-6 * abs(was(group, tau))]
        if differing:
            picked = sorted({differing[i * (len(differing) - 1) // (shown - 1)] for i in range(shown)})
            name = f" (group {group})" if group else ""
            return [f"{tau}{name}: lr {was(group, tau):.6g} → {now(group, tau):.6g}" for tau in picked]
    return []


class ProgressNote:
    """A file of one number, the optimizer steps taken, rewritten after each; it outlives a process that is killed.

    A few microseconds a step: the number goes to the page cache, in place.

    Attributes:
        last: What the file said when it was opened: the steps that the start before this one took. None if new.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self.last: int | None = int(os.read(self._descriptor, 32))
        except ValueError:
            self.last = None

    def write(self, step: int) -> None:
        with contextlib.suppress(OSError):  # a convenience; a full disk is reported where it matters
            os.pwrite(self._descriptor, b"%020d\n" % step, 0)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._descriptor)
