"""Checkpoints of a run: the stage that decides when one is saved and whether training
waits, and the saver that writes it.

:meth:`Saver.save` or :meth:`Saver.begin` writes a checkpoint's folder, once the workers
have compared their positions. A manifest seals the folder, and the backend stores it.
All of this is collective, at a step boundary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ... import checkpoint
from ...batch import StepPlan
from ...checkpoint.ranks import Ranks
from ..observe.trace import Trace
from .backend import Backend
from .replicas import Replicas
from .stage import (
    ALWAYS,
    BoundaryFlags,
    IntervalTimer,
    RunAtBoundary,
    Stage,
    StepReport,
)
from .storing import Storing
from .train_state import TrainState

Content = tuple[dict[str, Any], dict[str, Any]]
"""Tensors and state: the arguments of :func:`ray_adascale.checkpoint.save`."""


_log = logging.getLogger(__name__)
_LONG_S = 30.0
_WAITS_FOR_OTHERS = (
    "Rank %d has been in run.save_checkpoint() for %.0f s. Unless the storage is slow, "
    "it waits for the others. Call it on every worker, not on rank 0 alone."
)


@contextmanager
def warns_if_alone(rank: int, workers: int) -> Iterator[None]:
    """Return a context that logs a warning if it lasts, since other workers may not
    have come to the checkpoint.
    """
    alone = threading.Timer(_LONG_S, _log.warning, (_WAITS_FOR_OTHERS, rank, _LONG_S))
    alone.daemon = True
    if workers > 1:
        alone.start()
    try:
        yield
    finally:
        alone.cancel()


class Boundary(NamedTuple):
    """Position of one worker at a step boundary. It must be the same on all workers.

    Attributes:
        step: Optimizer steps so far.
        effective_steps: τ.
        lr: lr(⌊τ⌋) of the first parameter group.
    """

    step: int
    effective_steps: float
    lr: float


class _InFlight:
    """A checkpoint that a thread is writing.

    Args:
        saving: It.
        folder: Its folder.
        report: Its report.
        rank: This worker's number.
        step: Optimizer steps in it.
    """

    def __init__(
        self,
        saving: checkpoint.Save,
        folder: Path,
        report: StepReport,
        rank: int,
        step: int,
    ) -> None:
        self.saving = saving
        self.folder = folder
        self.report = report
        self._seen = Storing(rank, step, str(folder))
        self._began = time.monotonic()
        self._changed = self._began
        self._next_line_s = _LONG_S

    @property
    def now(self) -> Storing:
        """What is known of it now."""
        now = time.monotonic()
        written = self.saving.written_bytes
        if written != self._seen.stored:
            self._seen = replace(self._seen, stored=written)
            self._changed = now
        return replace(
            self._seen, seconds=now - self._began, still_s=now - self._changed
        )

    def log_if_long(self) -> None:
        """Log a warning every half minute while the files are written."""
        now = self.now
        if self.saving.running and now.seconds >= self._next_line_s:
            self._next_line_s += _LONG_S
            _log.warning("%s.", now.description())

    def wait(self, limit_s: float) -> str | None:
        """Wait until the files are written, or until nothing is for a while.

        Args:
            limit_s: Seconds without a new byte.

        Returns:
            Why it is given up; None if the files are written.
        """
        while self.saving.running:
            now = self.now
            if now.still_s >= limit_s:
                return now.given_up(limit_s)
            self.saving.join(min(_LONG_S, limit_s - now.still_s))
            self.log_if_long()
        return None


class Saver:
    """Writes one worker's share of each checkpoint.

    Args:
        backend: Provides the folders, and stores sealed checkpoints.
        process_group: The workers, for tensors on the CPU too. Default: the default
            group.
    """

    def __init__(
        self, backend: Backend, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self._backend = backend
        self._group = process_group
        self._in_flight: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint was begun and not finished. The same on all workers."""
        return self._in_flight is not None

    @property
    def busy(self) -> bool:
        """Whether this worker is still writing a checkpoint, or its backend is still
        uploading one. False once the writing stands still for too long: :meth:`finish`
        raises then.
        """
        written = self._in_flight
        if written is None:
            return self._backend.uploading
        written.log_if_long()
        too_long = written.now.still_s >= self._backend.store_timeout_s
        return (written.saving.running and not too_long) or self._backend.uploading

    def save(self, boundary: Boundary, content: Callable[[], Content]) -> Path | None:
        """Write this worker's share and seal the checkpoint. The caller reports the
        folder.

        Args:
            boundary: Position of this worker.
            content: Returns the content of the checkpoint. Called after the folder was
                made.

        Returns:
            The folder; None if the backend keeps no checkpoints.

        Raises:
            CheckpointError: A worker could not write this checkpoint or the previous
                one, or workers are at different positions.
        """
        return self._write(boundary, content)[0]

    def begin(
        self, boundary: Boundary, content: Callable[[], Content], report: StepReport
    ) -> None:
        """Copy the content of a checkpoint and start a thread that writes it.
        :meth:`finish` seals and reports it.
        """
        folder, saving = self._write(boundary, content, background=True)
        if folder is not None:
            assert saving is not None
            # A copy, because the loop changes its metrics.
            self._in_flight = _InFlight(
                saving,
                folder,
                replace(report, metrics=dict(report.metrics)),
                self._backend.rank,
                boundary.step,
            )

    def finish(self) -> None:
        """Wait for the checkpoint in flight, if there is one, seal it and report it.

        Raises:
            CheckpointError: A worker could not write its share, or not in time. The
                message names the worker and the cause.
        """
        written = self._in_flight
        self._in_flight = None
        if written is None:
            return
        given_up = written.wait(self._backend.store_timeout_s)
        try:
            written.saving.finish(given_up)
        except BaseException:
            _discard(written.folder)
            raise
        self._backend.report_in_background(written.report, written.folder)

    def _write(
        self,
        boundary: Boundary,
        content: Callable[[], Content],
        *,
        background: bool = False,
    ) -> tuple[Path | None, checkpoint.Save | None]:
        self.finish()  # at most one checkpoint is in flight
        if not self._backend.keeps_checkpoints:
            return None, None
        folder: Path | None = None
        made: Content = {}, {}
        error: Exception | None = None

        def begin() -> Boundary:
            nonlocal folder, made, error
            try:
                folder = self._backend.checkpoint_folder(boundary.step)
                made = content()
            except Exception as e:
                error = e
                raise
            return boundary

        try:
            Ranks(self._group).exchange(begin, _same_position)
            assert folder is not None
            return folder, checkpoint.save(
                folder,
                *made,
                process_group=self._group,
                background=background,
                shared=self._backend.shares_folder,
            )
        except BaseException as failure:
            if folder is not None:
                _discard(folder)
            if error is not None and not isinstance(error, OSError):
                # of the user's objects: with the lines that raised it
                raise error from failure
            raise


def _same_position(everyone: list[Boundary]) -> list[None]:
    """Compare the workers' positions, on rank 0.

    Raises:
        CheckpointError: They differ.
    """
    if any(other != everyone[0] for other in everyone):
        table = "; ".join(
            f"rank {rank}: τ={tau!r}, lr={lr!r}, step={step}"
            for rank, (step, tau, lr) in enumerate(everyone)
        )
        raise checkpoint.CheckpointError(
            f"the workers are at different positions. {table}"
        )
    return [None] * len(everyone)


def _discard(folder: Path) -> None:
    """Delete a checkpoint that is not sealed, after an error: it is useless, and a
    full disk needs the space.
    """
    if not checkpoint.is_sealed(folder):
        with suppress(OSError):
            checkpoint.delete(folder)


class Checkpointing(Stage):
    """Saves checkpoints at an interval, at most one at a time: in the background, or
    with a report that the run waits for.

    The backend's report policy decides between the two.

    Args:
        backend: Stores the checkpoints.
        train_state: The state to save.
        replicas: Compares the state of the workers before it is saved.
        trace: The trace, whose rows so far are written before the state; None without
            one.
        every_s: Seconds between checkpoints.
        process_group: The workers, for tensors on the CPU too. Default: the default
            group.
    """

    def __init__(
        self,
        backend: Backend,
        train_state: TrainState,
        replicas: Replicas,
        trace: Trace | None,
        *,
        every_s: float,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.saver = Saver(backend, process_group)
        self._backend = backend
        self._train_state = train_state
        self._replicas = replicas
        self._trace = trace
        self.timer = self._interval = IntervalTimer(every_s)

    def flags(self) -> int:
        if self.saver.busy:
            return BoundaryFlags.BUSY
        if not self.saver.in_flight:
            self.timer = self._interval
        if self.saver.in_flight or self._interval.due:
            return BoundaryFlags.CHECKPOINT
        return BoundaryFlags.NONE

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        if flags & BoundaryFlags.BUSY:
            return None
        if self.saver.in_flight:
            self.saver.finish()
            self.timer = ALWAYS if self._backend.uploading else self._interval
        elif (
            self._backend.report_policy.in_background
            and flags & BoundaryFlags.CHECKPOINT
            and not run.reported
        ):
            self.begin(run)
        return None

    def begin(self, run: RunAtBoundary) -> None:
        """Begin a checkpoint in the background. Collective."""
        self._replicas.compare()
        self.saver.begin(
            self._boundary(run), lambda: self._content(run.plan), run.step_report()
        )
        self._interval.restart()
        self.timer = ALWAYS

    def saves_with_report(self, flags: int) -> bool:
        """Return whether a checkpoint that the run waits for is due."""
        due = (
            flags & (BoundaryFlags.CHECKPOINT | BoundaryFlags.BUSY)
            == BoundaryFlags.CHECKPOINT
        )
        return due and not self._backend.report_policy.in_background

    def save(self, run: RunAtBoundary) -> Path | None:
        """Write this worker's share of a checkpoint and seal the checkpoint.
        Collective.

        Returns:
            The checkpoint's folder, not reported yet; None if the backend keeps no
            checkpoints.
        """
        self._replicas.compare()
        return self.saver.save(self._boundary(run), lambda: self._content(run.plan))

    def restart_interval(self) -> None:
        """Begin a new interval after a checkpoint was reported."""
        self._interval.restart()

    def _boundary(self, run: RunAtBoundary) -> Boundary:
        return Boundary(run.state.iterations, run.effective_steps, run.schedule.lrs[0])

    def _content(self, plan: StepPlan) -> Content:
        if self._trace is not None:
            self._trace.save()
        return self._train_state.content(plan)
