"""Where a run lives: who its workers are, where reports and checkpoints go. Here without Ray; for Ray see train."""

from __future__ import annotations

import logging
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import checkpoint
from .._files import TRACE
from .eta import NOT_KNOWN, Eta
from .schedule import BaseSchedule

__all__ = ["CHECKPOINT", "Backend", "LocalBackend", "StepReport"]

_log = logging.getLogger(__name__)

CHECKPOINT = "Checkpoint of optimizer step %d, effective step %.2f."
"""What is logged once a checkpoint is whole and where it belongs."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What has become of a run, up to a step boundary.

    Attributes:
        metrics: The last step's under their names, with the user's.
        effective_steps: τ.
        schedule: The base run's, with T.
        stopped: Why the run has ended; None while it goes on.
        evaluated: Whether the run has evaluated at this very boundary.
        sample: σ² and μ² of the last step alone, not averaged; NaN where it was skipped or says nothing.
        left: Optimizer steps and seconds to the end.
    """

    metrics: Mapping[str, Any]
    effective_steps: float
    schedule: BaseSchedule
    stopped: str | None = None
    evaluated: bool = False
    sample: tuple[float, float] = (math.nan, math.nan)
    left: Eta = NOT_KNOWN


class Backend(ABC):
    """What the loop needs of its surroundings.

    Attributes:
        rank: This worker's number.
        world_size: Workers.
        device: Where this worker computes.
        reports_evaluations: Report whenever the run has evaluated, not only at its intervals. Not where a report makes
            the workers wait.
        saves_evaluations: Save a checkpoint with each of these reports.
        saves_end: Save a checkpoint with the last report. Not where nobody goes on with a run that is done.
        keeps_trace: Whether :meth:`keep_trace` keeps it. Where not, no step's row is written.
        step_note: Where rank 0 notes every optimizer step, so that the next start can say how many were lost. None
            where that would cost a request over the network.
        preemption_poll_s: Seconds between calls of :meth:`preemption_notice`; inf where there is never one.
    """

    rank: int
    world_size: int
    device: torch.device
    reports_evaluations: bool = True
    saves_evaluations: bool = False
    saves_end: bool = True
    keeps_trace: bool = True
    step_note: Path | None = None
    preemption_poll_s: float = math.inf

    @abstractmethod
    def latest_checkpoint(self) -> Any:
        """A context manager that gives the newest usable checkpoint's folder, or None. Same answer on all workers.

        Warns of newer ones that are incomplete or damaged.

        Raises:
            CheckpointError: There are checkpoints, and all are damaged. Beginning anew must be the user's word.
        """

    @abstractmethod
    def checkpoint_folder(self, step: int) -> Path | None:
        """An empty or missing folder for this worker's share of the checkpoint after ``step``; None: keep none.

        Raises:
            OSError: There can't be one on this worker. The others are told.
        """

    @abstractmethod
    def report(self, outcome: StepReport, folder: Path | None) -> None:
        """Hand over what has become of the run, and the checkpoint written to ``folder``. All workers together."""

    def report_in_background(self, outcome: StepReport, folder: Path) -> None:
        """The same, for a checkpoint, without waiting for its upload. ``uploading`` is True until that is over."""
        self.report(outcome, folder)

    @property
    def uploading(self) -> bool:
        """Whether this worker's last ``report_in_background`` still goes on."""
        return False

    def preemption_notice(self) -> str | None:
        """What is about to be taken away, in words; None if nothing. All workers together, same answer on all."""
        return None

    @property
    def stop_requested(self) -> bool:
        """Whether the run is to end at the next step boundary, with a checkpoint, to be resumed. Asked on rank 0."""
        return False

    def observe(self, outcome: StepReport) -> None:  # noqa: B027 (most places have no gauges)
        """See what has become of the run after every optimizer step; must be cheap. Called on rank 0."""

    def keep_trace(self, path: Path) -> None:  # noqa: B027
        """The run has ended: keep the trace. Called on rank 0; an OSError costs the trace alone."""


class LocalBackend(Backend):
    """One process, or workers started by torchrun on one file system.

    Args:
        folder: Where checkpoints go; resumes from the newest complete one there. None keeps nothing.
        device: Default: the current CUDA device if there is one, else the CPU.
        keep: Checkpoints to keep.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, device: str | torch.device | None = None, keep: int = 2
    ) -> None:
        if keep < 1:
            raise ValueError(f"Invalid {keep=}. Must be at least 1.")
        initialized = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if initialized else 0
        self.world_size = dist.get_world_size() if initialized else 1
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.folder = None if folder is None else Path(folder)
        self.keep = keep
        self.keeps_trace = folder is not None
        self.step_note = None if self.folder is None else self.folder / "progress"
        self.metrics: dict[str, Any] = {}
        """The last report."""

    def _checkpoints(self) -> list[Path]:
        return [] if self.folder is None else sorted(self.folder.glob("checkpoint_*"))

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        found: list[Any] = [None, None]
        if self.rank == 0:
            folders = self._checkpoints()
            found[0] = checkpoint.latest_valid(folders)
            sealed = [folder for folder in folders if checkpoint.is_sealed(folder)]
            if found[0] is None and sealed:
                found[1] = (
                    f"None of the {len(sealed)} checkpoints in {self.folder} can be used; the warnings say why. Put a good "
                    "copy back, or delete them to begin anew."
                )
        if self.world_size > 1:
            dist.broadcast_object_list(found, src=0)
        if found[1] is not None:
            raise checkpoint.CheckpointError(found[1])
        yield found[0]

    def checkpoint_folder(self, step: int) -> Path | None:
        if self.folder is None:
            return None
        path = self.folder / f"checkpoint_{step:010d}"
        try:
            if self.rank == 0 and path.exists():
                shutil.rmtree(path)  # an incomplete one, or one that this run could not load, of an earlier start
        finally:  # also where that fails: the others wait here, and are told of it next
            if self.world_size > 1:
                dist.barrier()
        return path

    def report(self, outcome: StepReport, folder: Path | None) -> None:
        self.metrics = dict(outcome.metrics)
        if folder is not None and self.rank == 0:
            _log.info(CHECKPOINT, outcome.metrics.get("optimizer_steps", 0), outcome.effective_steps)
            # What an earlier start left incomplete, or damaged beyond this step, must not take the place of a good one.
            kept = [path for path in self._checkpoints() if path <= folder and checkpoint.is_sealed(path)][-self.keep :]
            for old in self._checkpoints():
                if old not in kept:
                    checkpoint.delete(old)

    def keep_trace(self, path: Path) -> None:
        if self.folder is not None:
            shutil.copyfile(path, self.folder / TRACE)
