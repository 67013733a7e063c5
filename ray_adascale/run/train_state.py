"""What of a run goes into a checkpoint, how it comes back on any number of workers, and what is said of the way back.

τ and the averages are the optimizer's own, the schedule is a function of τ, the data's position a number of examples. What
is left is a few numbers that the loop itself keeps: its :class:`LoopState`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import checkpoint
from .._version import __version__
from .._warn import warn_at_user
from ..batch_policy import BatchPlan
from ..checkpoint.optimizer import hyperparameters, load_hyperparameters, load_optimizer, optimizer_tensors
from ..checkpoint.rng import capture_rng, empty_rng, restore_rng
from ..data.source import BatchSource
from ..optim.adascale import AdaScale
from .schedule import BaseSchedule, EffectiveSchedule, curve_difference

__all__ = [
    "INTERRUPTED",
    "LoopState",
    "TrainState",
    "changes_since",
    "load_rng",
    "log_start",
    "put_together",
    "saved_schedule",
    "taken_apart",
]

_log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
"""Why a run stopped before T, to be resumed: it was asked to. Its checkpoint is one of a run that goes on."""

_EXTRA = "extra/"
_TENSOR = "__tensor__"


@dataclass
class LoopState:
    """What a loop keeps, beside what optimizer, schedule and data know. Under these names in a checkpoint's state.

    Attributes:
        iterations: Optimizer steps, those included that were skipped for a gradient that was not finite.
        progress: Σ r over them.
        nonfinite: Steps skipped in a row, up to now.
        attempt: Starts of the run before this one.
        evaluated_at: τ of the last evaluation; −1 before the first.
        recorded: The user's metrics, each as it was last given.
        metrics: The last step's, with the user's.
        stopped: Why the loop ended, or None.
        best: The best evaluation's metric, where an early stop looks at one.
        best_at: τ then; −1 before the first.
        following: Of a run that chooses its scale: what :class:`ray_adascale.adaptive_batch.BatchSizeController` keeps.
    """

    iterations: int = 0
    progress: float = 0.0
    nonfinite: int = 0
    attempt: int = 0
    evaluated_at: float = -1.0
    recorded: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None
    best: float | None = None
    best_at: float = -1.0
    following: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The parts of a run that a checkpoint is made of, and is loaded into.

    Attributes:
        module: The bare model.
        optimizer: The one that steps.
        parameter_names: Names of the optimizer's parameters.
        scaler: The loss scaler, or None.
        schedule: The live schedule.
        source: The data.
        loop: What the loop keeps.
        base_schedule: The base run's schedule.
        plan: How a step's batch is made up now.
        recipe: The recipe's fingerprint, or None.
        rank: This worker's number.
        device: Where it computes.
        extra: The user's own, by name: objects with ``state_dict`` and ``load_state_dict``.
    """

    module: nn.Module
    optimizer: AdaScale
    parameter_names: Mapping[Tensor, str]
    scaler: torch.amp.GradScaler | None
    schedule: EffectiveSchedule
    source: BatchSource
    loop: LoopState
    base_schedule: BaseSchedule
    plan: BatchPlan
    recipe: str | None
    rank: int
    device: torch.device
    extra: Mapping[str, Any]

    def tensors(self) -> dict[str, Any]:
        """This worker's part of the checkpoint's tensors; the live ones."""
        # Parameters are equal everywhere. Buffers (BatchNorm's averages) are each worker's own after a step, and DDP goes
        # on with rank 0's.
        own = {name for name, _ in self.module.named_buffers()} if self.rank > 0 else ()
        weights = self.module.state_dict()
        out: dict[str, Any] = {
            f"{checkpoint.WEIGHTS_PREFIX}{key}": value for key, value in weights.items() if key not in own
        }
        out.update(optimizer_tensors(self.optimizer, self.parameter_names))
        out.update({f"adascale/{key}": value for key, value in self.optimizer.statistics_state().items()})
        out.update({f"rng/{self.rank}/{key}": value for key, value in capture_rng(self.device).items()})
        for name, stateful in self.extra.items():
            taken_apart(stateful.state_dict(), f"{_EXTRA}{name}", out)
        out["schedule/lr_curve"] = torch.tensor(self.base_schedule.lr_curve, dtype=torch.float64)
        return out

    def state(self) -> dict[str, Any]:
        """The rest, as JSON values; the same on every worker."""
        base = self.base_schedule
        return {
            **vars(self.loop),
            "stopped": None if self.loop.stopped == INTERRUPTED else self.loop.stopped,
            "effective_steps": self.optimizer.effective_steps,
            "total_steps": base.total_steps,
            "scheduler_unit": base.scheduler_unit,
            "base_steps_per_epoch": base.base_steps_per_epoch,
            "plan": dict(vars(self.plan)),
            "schedule": self.schedule.state_dict(),
            "data": self.source.state_dict(),
            "param_groups": hyperparameters(self.optimizer),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "recipe": self.recipe,
            "extra": {
                name: taken_apart(stateful.state_dict(), f"{_EXTRA}{name}", {}) for name, stateful in self.extra.items()
            },
            "versions": {"ray_adascale": __version__, "torch": torch.__version__},
        }

    def load(self, folder: Path, *, accept_changes: bool) -> int:
        """Bring a fresh run to where the checkpoint is. Not collective.

        Args:
            folder: The checkpoint's.
            accept_changes: The user accepts that base batch, T or LR curve are not the checkpoint's.

        Returns:
            Workers when it was written.

        Raises:
            ValueError: They are not, or the data isn't, and that was not accepted.
            CheckpointError: It can't be read, or does not fit the model.
        """
        saved = checkpoint.load_state(folder)
        index = checkpoint.tensor_index(folder)
        changed = self._changed_on_purpose(folder, saved, index, accept_changes)
        weights = self.module.state_dict()
        into: dict[str, Any] = {f"{checkpoint.WEIGHTS_PREFIX}{key}": value for key, value in weights.items()}
        statistics = {
            key.removeprefix("adascale/"): torch.empty(info.shape, dtype=info.dtype)
            for key, info in index.items()
            if key.startswith("adascale/")
        }
        into.update({f"adascale/{key}": value for key, value in statistics.items()})
        checkpoint.load(folder, into)
        load_optimizer(folder, self.optimizer, self.parameter_names)
        if changed:  # the new settings hold, from this τ on
            self.schedule.load_state_dict({"calls": self.schedule.due(saved["effective_steps"])})
            # σ² is of a base batch, so of another now.
            statistics["total"][0] *= saved["plan"]["base_batch_size"] / self.plan.base_batch_size
        else:
            self.schedule.load_state_dict(saved["schedule"])
            load_hyperparameters(self.optimizer, saved["param_groups"])
        self.optimizer.load_statistics_state(statistics)
        self.source.load_state_dict(saved["data"])
        if self.scaler is not None and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        for each in fields(LoopState):
            setattr(self.loop, each.name, saved[each.name])
        self._load_extra(folder, saved["extra"])
        self.loop.attempt += 1
        if self.optimizer.effective_steps < self.base_schedule.total_steps:
            self.loop.stopped = None  # a run that had ended, and then was given a larger T
        workers: int = saved["plan"]["world_size"]
        if workers == self.plan.world_size:
            load_rng(folder, self.rank, self.device)
        return workers

    def _load_extra(self, folder: Path, saved: Mapping[str, Any]) -> None:
        index = checkpoint.tensor_index(folder)
        for name, state in saved.items():
            if name not in self.extra:
                if self.rank == 0:
                    warn_at_user(f"The checkpoint's extra_state {name!r} is left out: this run has none.")
                continue
            prefix = f"{_EXTRA}{name}/"
            into = {
                key: torch.empty(info.shape, dtype=info.dtype) for key, info in index.items() if key.startswith(prefix)
            }
            checkpoint.load(folder, into)
            self.extra[name].load_state_dict(put_together(state, into))
        missing = sorted(self.extra.keys() - saved.keys())
        if missing and self.rank == 0:
            warn_at_user(
                f"The checkpoint {folder.name} has no extra_state {', '.join(map(repr, missing))}: it begins as it was built."
            )

    def _changed_on_purpose(
        self, folder: Path, saved: Mapping[str, Any], index: Mapping[str, checkpoint.TensorInfo], accept: bool
    ) -> bool:
        """Whether base batch, T or LR curve were changed since the checkpoint; raises where that was not accepted."""
        curve = torch.empty(index["schedule/lr_curve"].shape, dtype=torch.float64)
        checkpoint.load(folder, {"schedule/lr_curve": curve})
        changed = changes_since(saved_schedule(saved, curve.tolist()), self.base_schedule)
        if not changed:
            return False
        what = f"The run was changed since its checkpoint {folder.name}: {'; '.join(changed)}."
        if not accept:
            raise ValueError(
                f"{what} Restore the settings, start a new run under another name, or accept them with "
                "AdaScaleConfig(accept_changes=True), which is --accept-changes on the command line."
            )
        if self.rank == 0:
            warn_at_user(
                f"{what} Accepted: it goes on at effective step {saved['effective_steps']:.1f} with the new settings."
            )
        return True


def taken_apart(state: Any, key: str, tensors: dict[str, Any]) -> Any:
    """A nested state as JSON values, with a mark where a tensor was.

    Args:
        state: Dicts with strings for keys, lists, tuples (which come back as lists), tensors, and JSON values.
        key: Of the state.
        tensors: Gets the tensors, by key.

    Raises:
        TypeError: Something else is in it; names where.
    """
    if isinstance(state, Tensor):
        if type(state) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"Invalid {key}: a {type(state).__name__}. Must be a plain tensor, the whole one on each worker."
            )
        tensors[key] = state.detach()
        return {_TENSOR: key}
    if isinstance(state, Mapping):
        wrong = next((name for name in state if not isinstance(name, str) or name == _TENSOR), None)
        if wrong is not None:
            raise TypeError(f"Invalid key {wrong!r} in {key}. Must be a string other than {_TENSOR!r}.")
        return {name: taken_apart(value, f"{key}/{name}", tensors) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [taken_apart(value, f"{key}/{i}", tensors) for i, value in enumerate(state)]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise TypeError(
        f"Invalid {key}: a {type(state).__name__}. The state_dict of extra_state holds tensors and JSON values; nothing in a "
        "checkpoint is pickled."
    )


def put_together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`taken_apart` took apart."""
    if isinstance(state, Mapping):
        if set(state) == {_TENSOR}:
            return tensors[state[_TENSOR]]
        return {name: put_together(value, tensors) for name, value in state.items()}
    if isinstance(state, list):
        return [put_together(value, tensors) for value in state]
    return state


def load_rng(folder: Path, rank: int, device: torch.device) -> None:
    """Put a worker's generators where the checkpoint has them."""
    index = checkpoint.tensor_index(folder)
    prefix = f"rng/{rank}/"
    rng = {key: value for key, value in empty_rng(device).items() if f"{prefix}{key}" in index}
    checkpoint.load(folder, {f"{prefix}{key}": value for key, value in rng.items()})
    restore_rng(rng, device)


def saved_schedule(state: Mapping[str, Any], lr_curve: list[list[float]]) -> BaseSchedule:
    """Return the base run's schedule from a checkpoint's state and LR curve."""
    return BaseSchedule(
        base_batch_size=state["plan"]["base_batch_size"],
        total_steps=state["total_steps"],
        scheduler_unit=state["scheduler_unit"],
        base_steps_per_epoch=state["base_steps_per_epoch"],
        lr_curve=lr_curve,
    )


def changes_since(was: BaseSchedule, now: BaseSchedule) -> list[str]:
    """What of base batch, T and LR curve is another now, in words."""
    changed = [
        f"{name} is {getattr(now, name)}, was {getattr(was, name)}"
        for name in ("base_batch_size", "total_steps")
        if getattr(now, name) != getattr(was, name)
    ]
    if was.scheduler_unit != now.scheduler_unit:
        changed.append(f"scheduler_unit is {now.scheduler_unit!r}, was {was.scheduler_unit!r}")
    difference = curve_difference(was.lr_curve, now.lr_curve)
    if difference is not None:
        table = _differing_points(was, now) if len(was.lr_curve) == len(now.lr_curve) else []
        points = f" At effective step: {', '.join(table)}." if table else ""
        changed.append(f"the learning-rate curve differs: {difference}{points}")
    return changed


def _differing_points(was: BaseSchedule, now: BaseSchedule, shown: int = 5) -> list[str]:
    """ "τ: lr before → lr now" at a few τ, evenly among those where they differ, of the first group that differs."""
    end = min(was.total_steps, now.total_steps)
    taus = sorted({int(i * end / 200) for i in range(200)})
    for group in range(len(was.lr_curve)):
        rates = {tau: (was.lr_at(group, tau), now.lr_at(group, tau)) for tau in taus}
        differing = [tau for tau, (before, after) in rates.items() if abs(before - after) > 1e-6 * abs(before)]
        if differing:
            picked = sorted({differing[i * (len(differing) - 1) // (shown - 1)] for i in range(shown)})
            name = f" (group {group})" if group else ""
            return [f"{tau}{name}: lr {rates[tau][0]:.6g} → {rates[tau][1]:.6g}" for tau in picked]
    return []


def log_start(
    train_state: TrainState,
    folder: Path | None,
    workers_before: int | None,
    last: int | None,
    checkpoint_every_s: float,
) -> None:
    """Say that a run begins, or where it resumes, and what was lost.

    Args:
        train_state: Stands where the checkpoint is.
        folder: The checkpoint; None if the run begins.
        workers_before: Workers when that was written.
        last: Optimizer steps that the start before this one took; None if not known.
        checkpoint_every_s: Seconds between checkpoints, which say what may be lost where that is not known.
    """
    plan = train_state.plan
    workers = f"{plan.world_size} worker{'' if plan.world_size == 1 else 's'}"
    if folder is None:
        _log.info(
            "Started on %s: batch %d at base batch %d, so S = %g; T = %d effective steps.",
            workers,
            plan.global_batch_size,
            plan.base_batch_size,
            plan.scale,
            train_state.base_schedule.total_steps,
        )
        if last:
            _log.warning("No checkpoint was completed in the %d optimizer steps before; the run begins anew.", last)
        return
    step = train_state.loop.iterations
    if train_state.loop.stopped is not None:
        _log.warning(
            "The run in %s has ended before: %s, at optimizer step %d. Nothing is left to do.",
            folder.name,
            train_state.loop.stopped,
            step,
        )
        return
    if last is None:
        lost = f"Lost are the steps since then, at most {checkpoint_every_s:g} s and a checkpoint's writing"
    else:
        lost = f"At most {max(last - step, 0)} optimizer steps were lost"
    if workers_before not in (None, plan.world_size):
        workers += f" (before: {workers_before}; S is {plan.scale:g} now)"
    _log.log(
        logging.INFO if last is not None and last <= step else logging.WARNING,
        "Resumed from %s: optimizer step %d, effective step %.2f of %d, start %d, %s. %s.",
        folder.name,
        step,
        train_state.optimizer.effective_steps,
        train_state.base_schedule.total_steps,
        train_state.loop.attempt,
        workers,
        lost,
    )
