"""What of a run goes into a checkpoint, and how it comes back, on any number of workers.

τ and the averages are the optimizer's own, the schedule is a function of τ, the data's position a number of examples. What
is left is a few numbers that the loop itself keeps: its :class:`Place`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import checkpoint
from .._version import __version__
from ..checkpoint.optimizer import hyperparameters, load_hyperparameters, load_optimizer, optimizer_tensors
from ..checkpoint.rng import capture_rng, empty_rng, restore_rng
from .resume import check_unchanged

if TYPE_CHECKING:
    from .loop import Run

__all__ = ["Place", "load", "load_rng", "state", "tensors"]


@dataclass
class Place:
    """Where a loop stands, beside what optimizer, schedule and data know. Under these names in a checkpoint's state.

    Attributes:
        iterations: Optimizer steps, those included that were skipped for a gradient that was not finite.
        progress: Σ r over them.
        nonfinite: Steps skipped in a row, up to now.
        attempt: Starts of the run before this one.
        evaluated_at: τ of the last evaluation; −1 before the first.
        recorded: The user's metrics, each as it was last given.
        metrics: The last step's, with the user's.
        stopped: Why the loop ended, or None.
    """

    iterations: int = 0
    progress: float = 0.0
    nonfinite: int = 0
    attempt: int = 0
    evaluated_at: float = -1.0
    recorded: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None


def tensors(run: Run) -> dict[str, Any]:
    """This worker's part of the checkpoint's tensors; the live ones."""
    rank = run.backend.rank
    # Parameters are equal everywhere. Buffers (BatchNorm's averages) are each worker's own after a step, and DDP goes on
    # with rank 0's.
    own = {name for name, _ in run.module.named_buffers()} if rank > 0 else ()
    weights = run.module.state_dict()
    out: dict[str, Any] = {f"model/{key}": value for key, value in weights.items() if key not in own}
    out.update(optimizer_tensors(run.optimizer, run.parameter_names))
    out.update({f"adascale/{key}": value for key, value in run.optimizer.statistics_state().items()})
    out.update({f"rng/{rank}/{key}": value for key, value in capture_rng(run.backend.device).items()})
    out["schedule/lr_curve"] = torch.tensor(run.lr_curve, dtype=torch.float64)
    return out


def state(run: Run) -> dict[str, Any]:
    """The rest, as JSON values; the same on every worker."""
    return {
        **vars(run.place),
        "effective_steps": run.effective_steps,
        "total_steps": run.total_steps,
        "scheduler_unit": run.config.scheduler_unit,
        "base_steps_per_epoch": run.base_steps_per_epoch,
        "plan": dict(vars(run.plan)),
        "schedule": run.schedule.state_dict(),
        "data": run.source.state_dict(),
        "param_groups": hyperparameters(run.optimizer),
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "recipe": None if run.recipe is None else run.recipe.fingerprint,
        "versions": {"ray_adascale": __version__, "torch": torch.__version__},
    }


def load(run: Run, folder: Path) -> None:
    """Bring a fresh run to where the checkpoint is. Not collective.

    Raises:
        ValueError: Base batch, T, LR curve or data are not the checkpoint's, and that was not accepted.
        CheckpointError: It can't be read, or does not fit the model.
    """
    saved = checkpoint.load_state(folder)
    index = checkpoint.tensor_index(folder)
    changed = _check_unchanged(run, folder, saved)
    into: dict[str, Any] = {f"model/{key}": value for key, value in run.module.state_dict().items()}
    statistics = {
        key.removeprefix("adascale/"): torch.empty(info.shape, dtype=info.dtype)
        for key, info in index.items()
        if key.startswith("adascale/")
    }
    into.update({f"adascale/{key}": value for key, value in statistics.items()})
    checkpoint.load(folder, into)
    load_optimizer(folder, run.optimizer, run.parameter_names)
    if changed:  # and accepted: the new settings hold, from this τ on
        run.schedule.load_state_dict({"calls": run.schedule.due(saved["effective_steps"])})
        # σ² is of a base batch, so of another now.
        statistics["total"][0] *= saved["plan"]["base_batch_size"] / run.plan.base_batch_size
    else:
        run.schedule.load_state_dict(saved["schedule"])
        load_hyperparameters(run.optimizer, saved["param_groups"])
    run.optimizer.load_statistics_state(statistics)
    run.source.load_state_dict(saved["data"])
    if run.scaler is not None and saved["scaler"]:
        run.scaler.load_state_dict(saved["scaler"])
    for each in fields(Place):
        setattr(run.place, each.name, saved[each.name])
    run.place.attempt += 1
    if run.effective_steps < run.total_steps:  # a run that had ended, and then was given a larger T
        run.place.stopped = None
    if saved["plan"]["world_size"] == run.plan.world_size:
        load_rng(folder, run.backend.rank, run.backend.device)


def load_rng(folder: Path, rank: int, device: torch.device) -> None:
    """Put a worker's generators where the checkpoint has them."""
    index = checkpoint.tensor_index(folder)
    prefix = f"rng/{rank}/"
    rng = {key: value for key, value in empty_rng(device).items() if f"{prefix}{key}" in index}
    checkpoint.load(folder, {f"{prefix}{key}": value for key, value in rng.items()})
    restore_rng(rng, device)


def _check_unchanged(run: Run, folder: Path, saved: dict[str, Any]) -> bool:
    curve = torch.empty(checkpoint.tensor_index(folder)["schedule/lr_curve"].shape, dtype=torch.float64)
    checkpoint.load(folder, {"schedule/lr_curve": curve})
    now = {
        "base_batch_size": run.plan.base_batch_size,
        "total_steps": run.total_steps,
        "lr_curve": run.lr_curve,
        "scheduler_unit": run.config.scheduler_unit,
        "base_steps_per_epoch": run.base_steps_per_epoch,
    }
    return check_unchanged(
        saved, curve.tolist(), now, name=folder.name, accept=run.config.accept_changes, loud=run.backend.rank == 0
    )
