"""What a run says when it goes on from a checkpoint: what was changed since, and how many steps were lost."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .schedule import curve_difference

if TYPE_CHECKING:
    from .loop import Run

__all__ = ["ProgressNote", "changes_since", "check_unchanged", "log_start", "lr_at"]

_log = logging.getLogger(__name__)


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


def check_unchanged(
    state: Mapping[str, Any],
    saved: Sequence[Sequence[float]],
    now: Mapping[str, Any],
    *,
    name: str,
    accept: bool,
    loud: bool,
) -> bool:
    """Whether base batch, T or LR curve were changed, and that on purpose.

    Args:
        state, saved, now: See :func:`changes_since`.
        name: The checkpoint's.
        accept: The user accepts changes.
        loud: Warn of those that were accepted; one worker is enough.

    Raises:
        ValueError: They were changed and that was not accepted. Shows both curves where they differ.
    """
    changed = changes_since(state, saved, now)
    if not changed:
        return False
    what = f"The run was changed since its checkpoint {name}: {'; '.join(changed)}."
    if not accept:
        raise ValueError(
            f"{what} Restore the settings, start a new run under another name, or accept them with "
            "AdaScaleConfig(accept_changes=True)."
        )
    if loud:
        warnings.warn(
            f"{what} Accepted: it goes on at effective step {state['effective_steps']:.1f} with the new settings.",
            stacklevel=5,  # who made the Run
        )
    return True


def log_start(run: Run, folder: Path | None, last: int | None) -> None:
    """Say where a run resumes, and what was lost.

    Args:
        run: It stands where the checkpoint is.
        folder: The checkpoint; None if it begins.
        last: Optimizer steps that the start before this one took; None if not known.
    """
    if folder is None:
        if last:
            _log.warning("No checkpoint was completed in the %d optimizer steps before; the run begins anew.", last)
        return
    step = run.place.iterations
    if last is None:
        seconds = run.config.checkpoint_every_s
        lost = f"Lost are the steps since then, at most {seconds:g} s and a checkpoint's writing"
    else:
        lost = f"At most {max(last - step, 0)} optimizer steps were lost"
    _log.log(
        logging.INFO if last is not None and last <= step else logging.WARNING,
        "Resumed from %s: optimizer step %d, effective step %.2f of %d, start %d, %d workers. %s.",
        folder.name,
        step,
        run.effective_steps,
        run.total_steps,
        run.place.attempt,
        run.plan.world_size,
        lost,
    )


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
