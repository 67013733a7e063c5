"""Where a run lives: who its workers are, where reports and checkpoints go. Here without Ray; for Ray see train."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoint

__all__ = ["Backend", "LocalBackend"]


class Backend(ABC):
    """What the loop needs of its surroundings.

    Attributes:
        rank: This worker's number.
        world_size: Workers.
        device: Where this worker computes.
        reports_evaluations: Report whenever the run has evaluated, not only at its intervals. Not where a report makes
            the workers wait.
    """

    rank: int
    world_size: int
    device: torch.device
    reports_evaluations: bool = True

    @abstractmethod
    def latest_checkpoint(self) -> Any:
        """A context manager that gives the newest complete checkpoint's folder, or None. Same answer on all workers."""

    @abstractmethod
    def checkpoint_folder(self, step: int) -> Path | None:
        """An empty or missing folder for this worker's share of the checkpoint after ``step``; None: keep none."""

    @abstractmethod
    def report(self, metrics: Mapping[str, Any], folder: Path | None) -> None:
        """Hand over metrics, and the checkpoint written to ``folder``. All workers together."""

    def observe(self, metrics: Mapping[str, Any], total_steps: int) -> None:  # noqa: B027 (most places have no gauges)
        """See the metrics of every optimizer step; must be cheap. Called on rank 0."""

    def keep_trace(self, path: Path) -> None:  # noqa: B027
        """The run has ended: keep the trace. Called on rank 0."""


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
        self.metrics: dict[str, Any] = {}
        """The last report."""

    def _checkpoints(self) -> list[Path]:
        return [] if self.folder is None else sorted(self.folder.glob("checkpoint_*"))

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        found = [checkpoint.latest_valid(self._checkpoints()) if self.rank == 0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(found, src=0)  # a path of our own, not a file's content
        yield found[0]

    def checkpoint_folder(self, step: int) -> Path | None:
        if self.folder is None:
            return None
        path = self.folder / f"checkpoint_{step:010d}"
        if self.rank == 0 and path.exists():
            shutil.rmtree(path)  # an incomplete one, or one that this run could not load, of an earlier start
        if self.world_size > 1:
            dist.barrier()
        return path

    def report(self, metrics: Mapping[str, Any], folder: Path | None) -> None:
        self.metrics = dict(metrics)
        if folder is not None and self.rank == 0:
            for old in self._checkpoints()[: -self.keep]:
                shutil.rmtree(old)

    def keep_trace(self, path: Path) -> None:
        if self.folder is not None:
            shutil.copyfile(path, self.folder / "trace.jsonl")
