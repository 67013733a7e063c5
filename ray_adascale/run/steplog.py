"""What rank 0 writes down of each optimizer step: a row of the trace, and the number of the step for the next start."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .backend import Backend
from .resume import ProgressNote
from .trace import Trace

__all__ = ["TRACE", "StepLog"]

TRACE = "trace.jsonl"
"""The trace's name in a checkpoint and in a run's folder."""


class StepLog:
    """The trace of a run while it grows, in a scratch folder. On other ranks than 0 it does nothing.

    Args:
        backend: Says which rank this is and where to note the steps; keeps the trace in the end.
        keep: Rows to keep, see :class:`ray_adascale.run.trace.Trace`.

    Attributes:
        last: Optimizer steps that the start before this one took; None if not known.
    """

    def __init__(self, backend: Backend, *, keep: int | None) -> None:
        self._backend = backend
        self._trace: Trace | None = None
        self._note: ProgressNote | None = None
        self._row: dict[str, Any] | None = None  # of the last step, while metrics may still be recorded for it
        if backend.rank == 0 and backend.keeps_trace:
            scratch = tempfile.mkdtemp(prefix="ray_adascale-")
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            self._trace = Trace(Path(scratch) / TRACE, keep=keep)
        if backend.rank == 0 and backend.progress_file is not None:
            self._note = ProgressNote(backend.progress_file)
        self.last = None if self._note is None else self._note.last

    def resume(self, folder: Path) -> None:
        """Go on with the trace in a checkpoint."""
        if self._trace is not None and (folder / TRACE).exists():
            self._trace.take_up(folder / TRACE)

    def step(self, row: dict[str, Any]) -> None:
        """A step's row. Metrics can be added to it until the next one comes."""
        if self._trace is not None:
            self._write_row()
            self._row = row
        if self._note is not None:
            self._note.write(row["step"])

    def add(self, metrics: Mapping[str, Any]) -> None:
        """More metrics of the last step, if its row is not written yet."""
        if self._row is not None:
            self._row.update(metrics)

    def files(self) -> dict[str, tuple[Path, int]]:
        """The trace up to the last step, as :func:`ray_adascale.checkpoint.save` takes files."""
        if self._trace is None:
            return {}
        self._write_row()
        self._trace.shorten()
        return {TRACE: (self._trace.path, self._trace.path.stat().st_size)}

    def finish(self) -> None:
        """The run has ended: the backend keeps the trace."""
        if self._trace is not None:
            self._write_row()
            self._trace.shorten(always=True)
            self._backend.keep_trace(self._trace.path)
            self._trace.close()

    def _write_row(self) -> None:
        if self._trace is not None and self._row is not None:
            self._trace.append(self._row)
        self._row = None
