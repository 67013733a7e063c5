"""The state of a run: saved in a checkpoint, loaded on any number of workers, logged at
a start.

τ and the averages are the optimizer's state. The schedule is a function of τ. The
data's position is a number of examples. The loop itself has a few numbers, its
:class:`LoopState`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import checkpoint
from ..._errors import listed
from ..._torch import unwrapped_name
from ..._version import __version__
from ..._warn import warn_at_user, warn_on_first_worker
from ...batch import StepPlan
from ...checkpoint.files import put_together
from ...checkpoint.model import frozen_names, load_model, model_state, shared_state
from ...checkpoint.optimizer import (
    hyperparameters,
    load_hyperparameters,
    load_optimizer,
    optimizer_tensors,
)
from ...checkpoint.per_worker import PerWorker
from ...checkpoint.rng import capture_rng, empty_rng, restore_rng
from ...data.source import BatchSource
from ...optim.adascale import AdaScaleOptimizer
from ...optim.rules import name_of
from ...optim.saved_state import of_other_base_batch
from ...optim.schedule import BaseSchedule, EffectiveSchedule, LRCurves
from .changes import Groups, compare
from .stage import HasState, LoopState

_log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
"""The reason for the end of a start that a later start resumes. Its checkpoint is
that of a running run.
"""

_EXTRA = "extra/"
_JSON = "__json__"


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The objects that a checkpoint is made from and loaded into.

    Attributes:
        module: The bare model.
        optimizer: The optimizer of the run.
        parameter_names: Names of the optimizer's parameters.
        scaler: The loss scaler, or None.
        schedule: The schedule that drives the optimizer.
        source: The data.
        loop: The loop's own state.
        parts: Further parts of the run that have a state.
        base_schedule: The schedule of the base run.
        world_size: Number of workers.
        recipe: The recipe's fingerprint, or None.
        settings: The settings that change what is trained, as a recipe keeps them.
        rank: This worker's number.
        device: The device of this worker.
        frozen: Names of the parameters that the program had frozen when the run was
            built.
        groups: The parameter groups when the run was built, see
            :func:`.changes.groups_of`.
        extra: The user's objects with ``state_dict`` and ``load_state_dict``, by name.
    """

    module: nn.Module
    optimizer: AdaScaleOptimizer
    parameter_names: Mapping[Tensor, str]
    scaler: torch.amp.GradScaler | None
    schedule: EffectiveSchedule
    source: BatchSource
    loop: LoopState
    parts: Sequence[HasState]
    base_schedule: BaseSchedule
    world_size: int
    recipe: str | None
    settings: Mapping[str, Any]
    rank: int
    device: torch.device
    frozen: set[str]
    groups: Groups
    extra: Mapping[str, Any]

    def content(self, plan: StepPlan) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this worker's share of a checkpoint's tensors, which are the live
        ones, and the state beside them.

        The state consists of JSON values, the same on all workers.

        Args:
            plan: The batch of the next step.
        """
        out = optimizer_tensors(self.optimizer, self.parameter_names)
        out.update(
            {
                f"adascale/{key}": value
                for key, value in self.optimizer.statistics_state().items()
            }
        )
        out.update(
            {
                f"rng/{self.rank}/{key}": value
                for key, value in capture_rng(self.device).items()
            }
        )
        if (place := self.source.own_state()) is not None:
            out[f"data/{self.rank}/place"] = place
        base = self.base_schedule
        assert isinstance(base.lr_curve, LRCurves)
        out["schedule/lr_curve"] = torch.from_numpy(base.lr_curve.rows)
        out["schedule/lr_groups"] = torch.tensor(
            base.lr_curve.groups, dtype=torch.float64
        )
        of_parts = {
            key: value
            for part in self.parts
            for key, value in part.state_dict().items()
        }
        return out, {
            **vars(self.loop),
            **of_parts,
            "stopped": None if self.loop.stopped == INTERRUPTED else self.loop.stopped,
            "effective_steps": self.optimizer.effective_steps,
            "total_steps": base.total_steps,
            "scheduler_unit": base.scheduler_unit,
            "base_steps_per_epoch": base.base_steps_per_epoch,
            "plan": asdict(plan),
            "schedule": self.schedule.state_dict(),
            "data": self.source.state_dict(),
            "param_groups": hyperparameters(self.optimizer),
            "groups": self.groups,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "recipe": self.recipe,
            "settings": dict(self.settings),
            "rule": name_of(self.optimizer.rule),
            **self.users_state(out),
            "frozen": {
                "at_first": sorted(self.frozen),
                "changed": sorted(self.frozen ^ frozen_names(self.module)),
            },
            "versions": _versions(),
        }

    def users_state(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the states of the model and of ``extra``, and add this worker's share
        of their tensors.

        Raises:
            TypeError: A checkpoint can't hold a value in them. The message names it.
        """
        shared = {}
        for name, stateful in self.extra.items():
            own = isinstance(stateful, PerWorker)
            key = self._own(name) if own else f"{_EXTRA}{name}"
            state = shared_state(stateful, key, tensors, rank=self.rank)
            if own:  # its JSON, too, is this worker's
                tensors[f"{key}/{_JSON}"] = torch.tensor(
                    list(json.dumps(state).encode()), dtype=torch.uint8
                )
            else:
                shared[name] = state
        return {
            "model": model_state(self.module, tensors, rank=self.rank),
            "extra": shared,
        }

    def load(self, folder: Path, *, accept_changes: bool) -> StepPlan:
        """Load a checkpoint into a run that was just built. Not collective.

        Args:
            folder: The folder of the checkpoint.
            accept_changes: Use the program's base batch, T, LR curve, settings and
                hyperparameters, if they are not the checkpoint's.

        Returns:
            The batch of the step that would have followed.

        Raises:
            ValueError: They are not the checkpoint's, and the change was not accepted.
                Or the optimizer's class or the data are others.
            CheckpointError: The checkpoint can't be read, or does not fit the model.
        """
        whole = checkpoint.Saved(folder)
        saved = whole.state
        of_schedule, of_groups, kept = compare(whole, self.base_schedule, self.groups)
        now = name_of(self.optimizer.rule)
        before = saved["rule"]
        of_rule = [] if now == before else [f"rule is {now!r}, was {before!r}"]
        of_settings = [
            f"{name} is {value!r}, was {saved['settings'][name]!r}"
            for name, value in self.settings.items()
            if value != saved["settings"][name]
        ]
        changed = of_schedule + of_groups + of_rule + of_settings
        self._check_accepted(whole, changed, accept_changes)
        if self.rank == 0:
            _warn_of_versions(saved["versions"])
        statistics = whole.tensors("adascale/")
        load_model(whole, self.module)
        self._load_requires_grad(saved)
        load_optimizer(whole, self.optimizer, self.parameter_names)
        if of_schedule:  # the new settings apply from this τ on
            self.schedule.load_state_dict(
                {"calls": self.schedule.due(saved["effective_steps"])}
            )
            ratio = (
                saved["plan"]["base_batch_size"] / self.base_schedule.base_batch_size
            )
            statistics = of_other_base_batch(statistics, ratio)
        else:
            self.schedule.load_state_dict(saved["schedule"])
        load_hyperparameters(self.optimizer, kept)
        self.optimizer.load_statistics_state(statistics)
        plan = StepPlan(**saved["plan"])
        workers = plan.workers
        if workers == self.world_size and (
            place := whole.tensors(f"data/{self.rank}/")
        ):
            self.source.load_own_state(place["place"])
        self.source.load_state_dict(saved["data"])
        if self.scaler is not None and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        for each in fields(LoopState):
            setattr(self.loop, each.name, saved[each.name])
        for part in self.parts:
            part.load_state_dict(saved)
        self._load_extra(whole, workers)
        self.loop.attempt += 1
        if workers == self.world_size:
            load_rng(whole, self.rank, self.device)
        return plan

    def _load_requires_grad(self, saved: Mapping[str, Any]) -> None:
        """Freeze and unfreeze what the loop had before the checkpoint, except where
        the program itself was changed since.
        """
        before = set(saved["frozen"]["at_first"])
        changed = set(saved["frozen"]["changed"])
        for name, p in self.module.named_parameters():
            if (key := unwrapped_name(name)) in changed:
                p.requires_grad_(key in before)
        edited = before ^ self.frozen
        if self.rank == 0 and changed - edited:
            _log.info(
                "requires_grad is the checkpoint's, as set in the loop, of %s",
                listed(sorted(changed - edited)),
            )
        if self.rank == 0 and edited - changed:
            warn_at_user(
                "requires_grad is the program's, other than in the checkpoint and in "
                f"the program that began the run, of {listed(sorted(edited - changed))}"
            )

    def _own(self, name: str) -> str:
        return f"extra_of/{self.rank}/{name}"

    def _load_extra(self, whole: checkpoint.Saved, workers: int) -> None:
        saved = whole.state["extra"]
        loaded = set(saved)
        for name, stateful in self.extra.items():
            prefix = f"{self._own(name)}/"
            if (
                isinstance(stateful, PerWorker)
                and workers == self.world_size
                and f"{prefix}{_JSON}" in whole.index
            ):
                tensors = {
                    f"{prefix}{key}": value
                    for key, value in whole.tensors(prefix).items()
                }
                text = bytes(tensors[f"{prefix}{_JSON}"].tolist())
                stateful.load_state_dict(put_together(json.loads(text), tensors))
                loaded.add(name)
        for name, state in saved.items():
            if name not in self.extra:
                warn_on_first_worker(
                    f"The checkpoint's extra_state {name!r} is not loaded: the run has "
                    "none of this name."
                )
                continue
            prefix = f"{_EXTRA}{name}/"
            tensors = {
                f"{prefix}{key}": value for key, value in whole.tensors(prefix).items()
            }
            self.extra[name].load_state_dict(put_together(state, tensors))
        missing = sorted(self.extra.keys() - loaded)
        if missing and self.rank == 0:
            of = ""
            run = "this run"
            if workers != self.world_size:
                of = f" of {_workers(workers)}"
                run = _workers(self.world_size)
            warn_at_user(
                f"The checkpoint {whole.folder.name}{of} has no extra_state "
                f"{', '.join(map(repr, missing))} for {run}: it begins as built."
            )

    def _check_accepted(
        self, whole: checkpoint.Saved, changed: Sequence[str], accept: bool
    ) -> None:
        """Warn of accepted changes.

        Raises:
            ValueError: Something was changed, and ``accept`` is False.
        """
        if not changed:
            return
        what = (
            f"The run was changed since its checkpoint {whole.folder.name}: "
            f"{'; '.join(changed)}."
        )
        if not accept:
            raise ValueError(
                f"{what} Restore the settings, start a new run under another name, or "
                "accept them with AdaScaleConfig(accept_changes=True), which is "
                "--accept-changes on the command line."
            )
        tau = whole.state["effective_steps"]
        warn_on_first_worker(
            f"{what} Accepted: it goes on at effective step {tau:.1f} with the new "
            "settings."
        )


def _versions() -> dict[str, str]:
    """Return the versions that compute a run."""
    return {"ray_adascale": __version__, "torch": torch.__version__}


def _warn_of_versions(before: Mapping[str, str]) -> None:
    """Warn if a checkpoint was written by other versions than this process's. The
    builds of one torch for different devices count as the same.
    """
    then, now = (
        {name: version.partition("+")[0] for name, version in versions.items()}
        for versions in (before, _versions())
    )
    others = [
        f"{name} {version} (before: {then[name]})"
        for name, version in now.items()
        if version != then[name]
    ]
    if others:
        warn_at_user(
            f"This run resumes with {', '.join(others)}. The gain, the clock and the "
            "data go on, but the results need not be bit-identical to those of one "
            "version."
        )


def _workers(number: int) -> str:
    """Return a number of workers in words."""
    return f"{number} worker{'' if number == 1 else 's'}"


def load_rng(saved: checkpoint.Saved, rank: int, device: torch.device) -> None:
    """Load the state of a worker's random number generators."""
    prefix = f"rng/{rank}/"
    rng = {
        key: value
        for key, value in empty_rng(device).items()
        if f"{prefix}{key}" in saved.index
    }
    saved.load({f"{prefix}{key}": value for key, value in rng.items()})
    restore_rng(rng, device)


def log_start(
    train_state: TrainState,
    plan: StepPlan,
    folder: Path | None,
    before: StepPlan | None,
    checkpoint_every_s: float,
) -> None:
    """Log that a run begins, or where it resumes.

    Args:
        train_state: The state of the run, loaded from the checkpoint if there is one.
        plan: The batch of the next step.
        folder: The checkpoint; None if the run begins.
        before: The batch in the checkpoint; None if the run begins.
        checkpoint_every_s: Seconds between checkpoints.
    """
    workers = _workers(plan.workers)
    total = train_state.base_schedule.total_steps
    if folder is None:
        _log.info(
            "Started on %s: batch %d at base batch %d, so S = %g; T = %d effective "
            "steps; rule %s.",
            workers,
            plan.global_batch_size,
            plan.base_batch_size,
            plan.scale,
            total,
            name_of(train_state.optimizer.rule),
        )
        return
    loop = train_state.loop
    if loop.stopped is not None:
        _log.warning(
            "The run in %s has ended before: %s, at optimizer step %d. Nothing is left "
            "to do.",
            folder.name,
            loop.stopped,
            loop.iterations,
        )
        return
    assert before is not None
    if before.workers != plan.workers:
        workers += f" (before: {before.workers}; S is {plan.scale:g} now)"
    elif before.scale != plan.scale:
        workers += f" (S is {plan.scale:g} now, before: {before.scale:g})"
    _log.info(
        "Resumed from %s: optimizer step %d, effective step %.2f of %d, %s. Steps "
        "taken after this checkpoint are taken again: at most those of %g s and of the "
        "writing of a checkpoint.",
        folder.name,
        loop.iterations,
        train_state.optimizer.effective_steps,
        total,
        workers,
        checkpoint_every_s,
    )
