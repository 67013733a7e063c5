"""Checkpoints of a run on their way to disk: waited for or in the background, at most one at a time.

The folder's life: :meth:`Saver.save` or :meth:`Saver.begin` writes it, after the workers have agreed on where they are; a
manifest seals it; the backend takes it. All of it is collective, at a step boundary.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import checkpoint
from .._files import room_in_words
from .backend import Backend, StepReport

__all__ = ["Boundary", "Content", "Saver", "check_agreement"]

Content = tuple[dict[str, Any], dict[str, Any], dict[str, tuple[Path, int]]]
"""Tensors, state and files, as :func:`ray_adascale.checkpoint.save` takes them."""


class Boundary(NamedTuple):
    """A step boundary as one worker sees it. All must see the same.

    Attributes:
        step: Optimizer steps so far.
        effective_steps: τ.
        lr: The schedule's, of the first parameter group.
    """

    step: int
    effective_steps: float
    lr: float


class _InFlight(NamedTuple):
    """A checkpoint that is being written: by what, where, and what had become of the run."""

    saving: checkpoint.Save
    folder: Path
    outcome: StepReport


class Saver:
    """Writes one worker's share of each checkpoint.

    Args:
        backend: Gives folders and takes sealed checkpoints.
        process_group: Of the workers, for tensors on the CPU too. Default: all.
    """

    def __init__(self, backend: Backend, process_group: dist.ProcessGroup | None = None) -> None:
        self._backend = backend
        self._group = process_group
        self._in_flight: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint was begun and not yet handed over. The same on all workers."""
        return self._in_flight is not None

    @property
    def busy(self) -> bool:
        """Whether this worker still writes, or the backend uploads what it wrote."""
        return (self._in_flight is not None and self._in_flight.saving.running) or self._backend.uploading

    def save(self, boundary: Boundary, content: Callable[[], Content]) -> Path | None:
        """Write this worker's share and seal the checkpoint; the caller hands the folder on.

        Args:
            boundary: Where this worker is.
            content: What goes into it; called once there is a folder.

        Returns:
            The folder, or None where the backend keeps no checkpoints.

        Raises:
            RuntimeError: Workers disagree about where they are.
            CheckpointError: A worker could not write, this checkpoint or the one before.
        """
        return self._write(checkpoint.save, boundary, content)[0]

    def begin(self, boundary: Boundary, content: Callable[[], Content], outcome: StepReport) -> None:
        """The same in the background: copies what goes into it, and has a thread write it. :meth:`hand_over` ends it."""
        folder, saving = self._write(checkpoint.begin_save, boundary, content)
        if folder is not None:
            assert saving is not None
            # A copy, as the loop goes on with its metrics.
            self._in_flight = _InFlight(saving, folder, replace(outcome, metrics=dict(outcome.metrics)))

    def hand_over(self) -> None:
        """Seal the checkpoint in flight, if there is one, and hand it to the backend.

        Raises:
            CheckpointError: A worker's thread could not write it; says which, and why.
        """
        written, self._in_flight = self._in_flight, None
        if written is None:
            return
        with _discarded_on_error(written.folder):
            written.saving.finish()
        self._backend.report_in_background(written.outcome, written.folder)

    def _write(
        self,
        write: Callable[..., checkpoint.Save | None],
        boundary: Boundary,
        content: Callable[[], Content],
    ) -> tuple[Path | None, checkpoint.Save | None]:
        self.hand_over()  # at most one in flight
        folder: Path | None = None
        error: Exception | None = None
        made: Content = {}, {}, {}
        try:
            folder = self._backend.checkpoint_folder(boundary.step)
            if folder is None:
                return None, None
            made = content()
        except Exception as e:  # raised below, once the others know that they need not wait for this worker
            error = e
        with _discarded_on_error(folder):
            check_agreement(boundary, error, self._backend, self._group)
            assert folder is not None
            tensors, state, files = made
            return folder, write(folder, tensors, state, files=files, process_group=self._group)


def check_agreement(
    boundary: Boundary,
    error: Exception | None,
    backend: Backend,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """All workers together: raises where they are at different boundaries, or where one can't take part.

    Args:
        boundary: Where this worker is.
        error: Why this worker can't take part: a failing disk, or else its state. Raised here; the others get a
            CheckpointError or a RuntimeError that names it.
        backend: Tells who the workers are.
        process_group: Default: all, with tensors on the backend's device.
    """
    if isinstance(error, OSError):  # of making the folder; what writes there later says so itself
        cause, error = (
            error,
            checkpoint.CheckpointError(
                f"No checkpoint was written: rank {backend.rank}: {type(error).__name__}: {error}"
                + room_in_words(error, error.filename or tempfile.gettempdir())
            ),
        )
        error.__cause__ = cause
    if backend.world_size == 1:
        if error is not None:
            raise error
        return
    mine = torch.tensor([*boundary, error is not None], dtype=torch.float64)
    if process_group is None:
        mine = mine.to(backend.device)
    everyone = [torch.empty_like(mine) for _ in range(backend.world_size)]
    dist.all_gather(everyone, mine, group=process_group)
    if any(row[3] != 0 for row in everyone):
        # Rare, and all know of it: those that can't take part say why.
        said: list[Any] = [None] * backend.world_size
        dist.all_gather_object(
            said, None if error is None else (isinstance(error, checkpoint.CheckpointError), str(error)), process_group
        )
        if error is not None:
            raise error
        rank, (on_disk, text) = next((rank, told) for rank, told in enumerate(said) if told is not None)
        if on_disk:
            raise checkpoint.CheckpointError(text)
        raise RuntimeError(
            f"No checkpoint was written: rank {rank} has state that can't be saved; see its error: {text}"
        )
    if any(not torch.equal(other, everyone[0]) for other in everyone):
        table = "; ".join(
            f"rank {rank}: τ={tau!r}, lr={lr!r}, step={step:.0f}"
            for rank, (step, tau, lr, _) in enumerate(row.tolist() for row in everyone)
        )
        raise RuntimeError(f"Workers disagree about where the run is, so no checkpoint was written. {table}")


@contextmanager
def _discarded_on_error(folder: Path | None) -> Iterator[None]:
    """Leaves no half of a checkpoint behind: it is no use, and a full disk needs the room."""
    try:
        yield
    except BaseException:
        if folder is not None and not checkpoint.is_sealed(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
