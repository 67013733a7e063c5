"""The trace: one JSON line for each optimizer step, in a file that survives a kill of the process.

Rows are appended while the run trains, so a crash loses the rows of the last second and damages at most the last line. After a
crash the run resumes from a checkpoint, and its trace from the checkpoint's copy: steps after the checkpoint are taken again.

Of several starts of a run only the newest writes: it replaces the file. An earlier start, as on a machine that is cut off, then
finds a file that is not its own.

Each checkpoint has a copy, so a trace must not grow without bound. Beyond 40,000 steps every k-th step stays, with the first
and the last row. The stride k is a power of two that depends on the newest step alone, so a trace does not depend on when it was
thinned.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..._files import TRACE, scratch_folder, write_atomically
from ..._warn import warn_at_user
from .metrics import CLIPPED, METRICS, OWN_KEYS, SHORT_STEP, SKIPPED
from .step import Listener, Step

_encode = json.JSONEncoder(separators=(",", ":")).encode
_MOST_PENDING, _WITHIN_S = 100, 1.0
"""Rows, and seconds, after which collected rows are written."""
_MOST_ROWS = 40_000
"""Largest number of rows that :meth:`Trace.shorten` leaves between the first and the last."""

COLUMNS = {
    "step": "number of the optimizer step, from 1; skipped steps count",
    "attempt": "earlier starts of the run: 0 in the first, 1 after the first restart or resume",
    "position": "examples that the run has used so far, over all workers",
    **METRICS,
    "steps_left": "optimizer steps to T by the forecast; only with a recipe that has noise",
    "rule": "the scaling rule",
    "optimizer": "class of the optimizer, in the first row alone",
    "untrained": "metrics of the untrained model, in the first row alone",
    CLIPPED: "true if the gradient was clipped at a multiple of the expected norm; else missing",
    SKIPPED: "true if the gradient was not finite, so that weights and τ stayed; else missing",
    SHORT_STEP: "true for a step with fewer passes than declared, in the adapters alone; else missing",
}
"""The keys of a row and their meaning. Metrics of ``evaluate`` and ``run.record`` stand in the row of the step before them."""


class NotOwnError(OSError):
    """Another start of the run has replaced the file."""


class Trace:
    """A trace to write. Rows that can't be written stay in memory, and are written by the next flush that succeeds.

    The file is open for writing only while rows are written to it.

    Args:
        path: The file. It and its folder are made if missing.
        rows: The first rows. The file then replaces another of its name. Default: the rows of the existing file, without a torn
            last line.
    """

    def __init__(self, path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]] | None = None) -> None:
        self.path = Path(path)
        self._steps = array("q")  # the step of each row
        self._pending: list[bytes] = []
        self._own: int | None = None  # a descriptor of this start's file; None before it is made
        self._released: weakref.finalize[..., Trace] | None = None  # closes it
        self._size = 0  # bytes of it that are whole rows
        if rows is not None:
            for row in rows:
                self._pending.append(_line(row))
                self._steps.append(row["step"])
        elif self.path.exists():
            _mend(self.path)
            self._hold()
            self._steps.extend(row["step"] for _, row in _rows(self.path))
        with contextlib.suppress(OSError):  # again at the next flush, which raises
            self.flush()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the row of one step. Rows are written a hundred at a time, or after a second.

        Args:
            row: ``step`` (int, the optimizer step) and further keys, with Python numbers (NaN allowed), bools, strings,
                None, and lists and dicts of these.

        Raises:
            TypeError: A value has another type.
        """
        self._pending.append(_line(row))
        self._steps.append(row["step"])
        if len(self._pending) >= self._most_pending or time.monotonic() - self._written >= _WITHIN_S:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows to the file.

        Raises:
            NotOwnError: Another start has replaced the file. Nothing is written.
            OSError: The rows could not be written. They stay in memory.
        """
        self._written, self._most_pending = time.monotonic(), len(self._pending) + _MOST_PENDING
        if self._own is None:
            self._replace(self._pending)
        else:
            lines = b"".join(self._pending)
            with self._opened() as file:
                file.truncate(self._size)  # after a write that failed halfway
                file.seek(self._size)
                file.write(lines)
            self._size += len(lines)
        self._pending.clear()
        self._most_pending = _MOST_PENDING

    def content(self) -> bytes:
        """Return all rows, those that can't be written included."""
        written = b"" if self._own is None else os.pread(self._own, self._size, 0)
        return written + b"".join(self._pending)

    @property
    def written(self) -> int | None:
        """Size of the file in bytes; None if rows are missing from it."""
        return None if self._own is None or self._pending else self._size

    def _opened(self) -> BinaryIO:
        """Open the file, and check that it is the one that this start has made."""
        assert self._own is not None
        file = self.path.open("r+b")
        if not os.path.samestat(os.fstat(file.fileno()), os.fstat(self._own)):
            file.close()
            raise NotOwnError(f"{self.path} belongs to a later start of the run")
        return file

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Make a new file of this name."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, lines, sync=False)  # the copy in a checkpoint is synced
        self._hold()

    def _hold(self) -> None:
        """Hold the file of this name: as long as a descriptor is open, no other file gets its number."""
        self._own = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._own).st_size
        if self._released is not None:
            self._released()
        self._released = weakref.finalize(self, os.close, self._own)

    def shorten(self) -> None:
        """Write the collected rows, and leave out all but every k-th step, the first and the last row.

        The user's metrics of a row that is left out, such as those of an evaluation, go to the next row that stays.
        """
        self.flush()
        if not self._steps:
            return
        stride = _stride(self._steps[-1])
        last = len(self._steps) - 1
        stays = [step % stride == 0 or i in (0, last) for i, step in enumerate(self._steps)]
        if all(stays):
            return
        with self._opened() as file:
            self._replace(_thinned(file, stays))
        self._steps = array("q", itertools.compress(self._steps, stays))


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all rows of a trace, in the order of the file. An incomplete last line, which a crash may leave, is skipped.

    Raises:
        ValueError: A line before the last one is no row: the file is damaged, or no trace.
    """
    return [row for _, row in _rows(Path(path))]


def faults_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what a trace lacks, a phrase each; empty if it has a row for each step.

    Of a trace that :meth:`Trace.shorten` has thinned, the rows that it keeps of each k steps are looked for.
    """
    steps = [row["step"] for row in rows]
    if not steps:
        return []
    stride = _stride(steps[-1])
    kept = sorted({0, *(step for step in steps if step % stride == 0)})
    found = [
        f"steps {before + 1:,} to {now - 1:,} are missing" if now - before > 2 else f"step {now - 1:,} is missing"
        for before, now in itertools.pairwise(kept)
        if now - before > stride
    ]
    return found + [
        f"step {now:,} comes after step {before:,}" for before, now in itertools.pairwise(steps) if now <= before
    ]


def _stride(last: int) -> int:
    """Return the k of the rows that stay in a trace with this last step."""
    stride = 1
    while last > _MOST_ROWS * stride:
        stride *= 2
    return stride


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line, with its line break, and its row."""
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                break
            row = _parse(line)
            if row is None:
                torn = number  # accepted if no line follows
                continue
            yield line.rstrip(b"\r\n") + b"\n", row
        else:
            return
    raise ValueError(f"Line {torn} of {path} is not a trace row. Only the last line of a trace may be torn.")


def _line(row: Mapping[str, Any]) -> bytes:
    return _encode(dict(row)).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    # No proper prefix of a JSON object is JSON, so a torn row is never read as a shorter row.
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _thinned(lines: Iterable[bytes], stays: Iterable[bool]) -> Iterator[bytes]:
    """Yield the lines that stay, with the user's metrics of the lines left out before each."""
    left: dict[str, Any] = {}
    for line, stay in zip(lines, stays, strict=True):
        if not stay:
            row = json.loads(line)
            left.update((key, value) for key, value in row.items() if key not in OWN_KEYS and key != "loss")
        elif left:
            row = json.loads(line)
            yield _line(row | left | row)
            left = {}
        else:
            yield line


def _mend(path: Path) -> None:
    """Prepare a file after a crash for appending: drop a torn last line, or add its missing line break."""
    with path.open("rb+") as file:
        start = end = 0
        line = b""
        for line in file:
            start, end = end, end + len(line)
        if line and _parse(line) is None:
            file.truncate(start)
        elif line and not line.endswith(b"\n"):
            file.seek(end)
            file.write(b"\n")


class TraceFile(Listener):
    """Writes the trace of a run, a row for each optimizer step.

    A failing trace never ends a run. If rows can't be written, as on a full disk, a warning says so, and they are written later.

    Args:
        path: The file.
        rows: The rows of earlier starts, which replace an existing file. Default: those of the file.
        store: Function that stores the file of an ended run. Default: the file stays where it is.

    Attributes:
        first: Entries of the row of the run's first step, which is never left out.
    """

    def __init__(
        self,
        path: Path,
        rows: Iterable[Mapping[str, Any]] | None = None,
        *,
        store: Callable[[Path], object] | None = None,
    ) -> None:
        self._path = path
        self._store = store
        self.first: dict[str, Any] = {}
        self._row: dict[str, Any] | None = None  # the last step's, while metrics may be recorded for it
        self._trace: Trace | None = None  # None once another start has the file
        self._failing = False
        self._scratch: Path | None = None  # the folder of a copy for checkpoints, while the file can't be written
        with self._warning_on_error():
            self._trace = Trace(path, rows)
        self._write(Trace.flush)

    @classmethod
    def scratch(cls, rows: Iterable[Mapping[str, Any]] = (), *, store: Callable[[Path], object]) -> TraceFile | None:
        """Return a trace in a temporary folder, which is removed with the object; None if there can't be a folder."""
        try:
            folder = scratch_folder("trace")
        except OSError as e:
            warn_at_user(f"The run will have no trace, since it can't be written: {e}", RuntimeWarning)
            return None
        trace = cls(folder / TRACE, rows, store=store)
        weakref.finalize(trace, shutil.rmtree, folder, ignore_errors=True)
        return trace

    def after_step(self, step: Step) -> None:
        """Write the previous step's row, and keep this step's row for metrics that are recorded for it."""
        self._write_row()
        self._row = step.row
        if step.number == 1:
            self._row.update(self.first)

    def after_record(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row of the last step."""
        if self._row is not None:
            self._row.update(metrics)

    def after_loop(self) -> None:
        """Write the last row. No more metrics can be recorded for it."""
        self._write_row()
        self._write(Trace.flush)

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Write the last row, shorten the trace, and store it."""
        self.files()
        if self._store is None or not self._path.exists():
            return
        try:
            self._store(self._path)
        except OSError as e:  # the run has ended and has stored its checkpoint
            warn_at_user(f"The run's trace could not be stored: {e}", RuntimeWarning)

    def files(self) -> dict[str, tuple[Path, int]]:
        """Return a file with the rows up to the last step, as the ``files`` of :func:`ray_adascale.checkpoint.save`."""
        self._write_row()
        self._write(Trace.shorten)
        if self._trace is None:
            return {}
        if (size := self._trace.written) is not None:
            return {TRACE: (self._path, size)}
        with contextlib.suppress(OSError):  # this disk is full, too
            content = self._trace.content()
            if self._scratch is None:
                self._scratch = scratch_folder("trace")
                weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
            path = self._scratch / TRACE
            write_atomically(path, [content], sync=False)
            return {TRACE: (path, len(content))}
        return {TRACE: (self._path, self._path.stat().st_size)} if self._path.exists() else {}

    def failed(self) -> None:
        """Store the trace of a run that fails."""
        if self._store is not None:
            self.ended("failed", {})

    def _write_row(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._write(lambda trace: trace.append(row))

    def _write(self, write: Callable[[Trace], None]) -> None:
        with self._warning_on_error():
            if self._trace is not None:
                write(self._trace)
                if self._trace.written is not None:
                    self._failing = False

    @contextlib.contextmanager
    def _warning_on_error(self) -> Iterator[None]:
        try:
            yield
        except NotOwnError as e:
            self._trace = None
            warn_at_user(f"This start of the run writes no trace any more: {e}.", RuntimeWarning)
        except OSError as e:
            if not self._failing:
                warn_at_user(
                    f"The run's trace can't be written now: {e}. Training goes on; the rows are kept, and written later.",
                    RuntimeWarning,
                )
            self._failing = True
