"""The record of each optimizer step: the trace, as JSON lines that survive a crash, and the number of the last step.

Rows are appended while training runs, so a crash costs at most the last line. After a crash the run resumes from a checkpoint
with the checkpoint's copy of the trace, and repeats the steps since then.

Every checkpoint holds a copy, so the size of a trace is limited. Beyond ``keep`` rows older rows are thinned out: of the rows
before the newest ``keep / 2`` steps every 2nd stays, then every 4th, 8th, ..., so that they fit into the other half. The strides
are powers of two and depend on the newest step alone, so the final trace does not depend on when it was thinned.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .._files import TRACE, write_atomically
from .._warn import warn_at_user

__all__ = ["StepLog", "Trace", "read_trace"]

_encode = json.JSONEncoder(separators=(",", ":")).encode
_SCALARS = frozenset({bool, int, float, str, type(None)})
_RARE = 100
"""A row stays, however old, if it has a key that fewer than one in so many of the newest rows have: an evaluation's."""


class Trace:
    """An open trace. Appends to what the file already holds, after dropping a torn last line.

    Args:
        path: The file; it and its folder are made if missing.
        flush_every: Rows that wait in memory before they are written, ≥ 1.
        keep: Rows that :meth:`shorten` leaves, ≥ 2, beside those with keys that are rare; None for all.
    """

    def __init__(self, path: str | os.PathLike[str], *, flush_every: int = 100, keep: int | None = None) -> None:
        if flush_every < 1:
            raise ValueError(f"Invalid {flush_every=}. Must be at least 1 row.")
        if keep is not None and keep < 2:
            raise ValueError(f"Invalid {keep=}. Must be at least 2 rows, or None for all.")
        self.path = Path(path)
        self.flush_every = flush_every
        self.keep = keep
        self._pending: list[bytes] = []
        self._steps = array("q")  # of each row, if rows may have to go,
        self._kinds = array("i")  # and which keys it has:
        self._keys: dict[tuple[str, ...], int] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _mend(self.path)
            self._index_rows()
        self._file: BinaryIO | None = self.path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one step.

        Args:
            row: ``step`` (int, the optimizer step) and whatever else: Python numbers (NaN allowed), bools, strings,
                None, and lists of these.

        Raises:
            TypeError: A value of another type. A tensor must be read explicitly (``.item()``), because that waits for
                the device and belongs where the trainer waits anyway.
            ValueError: No integer ``step``, or the trace is closed.
        """
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"Invalid row: {step=}. Every row needs the optimizer step as an int.")
        if self._file is None:
            raise ValueError(f"The trace {self.path} is closed.")
        for key, value in row.items():
            if type(value) not in _SCALARS or type(key) is not str:
                _check(key, value)
        self._pending.append(_encode(dict(row)).encode() + b"\n")
        if self.keep is not None:
            self._index(row)
        if len(self._pending) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Writes the waiting rows, so that a reader, or whoever comes after a crash, finds them."""
        if self._file is not None and self._pending:
            self._file.write(b"".join(self._pending))
            self._file.flush()
            self._pending.clear()

    def take_up(self, path: str | os.PathLike[str]) -> None:
        """Appends the rows of another trace, that of the checkpoint which the run resumes from."""
        for row in read_trace(path):
            self.append(row)

    def shorten(self, *, always: bool = False) -> None:
        """Thins out older rows where there are more than ``keep``, and writes the waiting ones.

        Args:
            always: Also where there are fewer, because this is done last: then the outcome depends on the steps taken
                and not on when the trace was thinned before.
        """
        self.flush()
        if self.keep is None or not self._steps or (len(self._steps) <= self.keep and not always):
            return
        newest, special = max(self._steps), self._special_kinds()
        stays = [
            kind in special or _stays(step, newest, self.keep)
            for step, kind in zip(self._steps, self._kinds, strict=True)
        ]
        if all(stays):
            return

        with self.path.open("rb") as file:
            self._rewrite(itertools.compress(file, stays))
        self._steps = array("q", itertools.compress(self._steps, stays))
        self._kinds = array("i", itertools.compress(self._kinds, stays))

    def _special_kinds(self) -> set[int]:
        """Kinds of rows that have a key which few of the newest rows have."""
        assert self.keep is not None
        newest = self._kinds[-(self.keep // 2) :]
        kinds, having = Counter(newest), Counter[str]()
        for keys, kind in self._keys.items():
            having.update(dict.fromkeys(keys, kinds[kind]))
        return {kind for keys, kind in self._keys.items() if any(having[key] * _RARE < len(newest) for key in keys)}

    def _index(self, row: Mapping[str, Any]) -> None:
        self._steps.append(row["step"])
        self._kinds.append(self._keys.setdefault(tuple(row), len(self._keys)))

    def _index_rows(self) -> None:
        self._steps, self._kinds = array("q"), array("i")
        if self.keep is not None:
            for _, row in _rows(self.path):
                self._index(row)

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Puts these lines in the place of the file's, or, where that fails, leaves it as it is."""
        if self._file is None:
            raise ValueError(f"The trace {self.path} is closed.")
        self._file.close()
        self._file = None
        try:
            write_atomically(self.path, lines, sync=False)  # a checkpoint's copy of it is synced
        finally:
            self._file = self.path.open("ab")

    def close(self) -> None:
        """Flushes and closes; more than once is fine."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def abandon(self) -> None:
        """Close it as it is; what waits to be written is lost."""
        self._pending.clear()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # of what the file itself had not written yet
                file.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rows of a trace, in the file's order. A torn last line, what a crash leaves behind, is left out.

    Raises:
        ValueError: Another line is not a row: the file is damaged, or no trace.
    """
    return [row for _, row in _rows(Path(path))]


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line with its line break, row) for every row."""
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                break
            row = _parse(line)
            if row is None:
                torn = number  # forgiven if nothing follows
                continue
            yield line.rstrip(b"\r\n") + b"\n", row
        else:
            return
    raise ValueError(f"Line {torn} of {path} is not a trace row. Only the last line of a trace may be torn.")


def _parse(line: bytes) -> dict[str, Any] | None:
    # No proper prefix of a JSON object is JSON, so a torn row can't pass for a shorter one.
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _stays(step: int, newest: int, keep: int) -> bool:
    """Whether a step's row is among those kept once the step ``newest`` is reached."""
    half = keep // 2
    older = newest - half
    stride = 1
    while older > half * stride:
        stride *= 2
    return step > older or step % stride == 0


def _mend(path: Path) -> None:
    """Makes a file that a crash left ready for appending: it ends with a line break or is empty."""
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


def _check(key: object, value: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(f"Invalid key {key!r}: {type(key).__name__}. Keys of a trace row are strings.")
    if isinstance(value, list):
        for item in value:
            _check(key, item)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"Invalid {key!r} in a trace row: {type(value).__module__}.{type(value).__qualname__}. "
            "Must be a Python number, bool, str, None or a list of these; read tensors with .item()."
        )


class StepLog:
    """One worker's record of a running run: its trace, in a scratch folder, and the number of the last step.

    Write errors, such as a full disk, do not end the run: the trace is left out, with one warning.

    Args:
        trace: Whether to keep a trace.
        rows: Rows of the trace to keep, see :class:`Trace`.
        note: A file for the number of the last optimizer step; None for no file. The number survives a killed process, which the
            trace in the scratch folder does not, so the next start knows how many steps were lost.

    Attributes:
        last: Number of the last optimizer step of the previous start; None if it is unknown.
    """

    def __init__(self, *, trace: bool, rows: int | None, note: Path | None) -> None:
        self._trace: Trace | None = None  # while it can be written
        self._path: Path | None = None
        self._row: dict[str, Any] | None = None  # of the last step, while metrics may still be recorded for it
        self._note: int | None = None  # a file descriptor
        self.last: int | None = None
        if note is not None:
            with contextlib.suppress(OSError):  # the number of lost steps is then unknown
                note.parent.mkdir(parents=True, exist_ok=True)
                self._note = os.open(note, os.O_RDWR | os.O_CREAT, 0o644)
                weakref.finalize(self, os.close, self._note)
                with contextlib.suppress(ValueError):  # a new file
                    self.last = int(os.read(self._note, 32))
        if trace:
            with self._left_out_on_error():
                scratch = tempfile.mkdtemp(prefix="ray_adascale-")
                weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
                self._trace = Trace(Path(scratch) / TRACE, keep=rows)
                self._path = self._trace.path

    def resume(self, folder: Path) -> None:
        """Go on with the trace in a checkpoint."""
        if self._trace is not None and (folder / TRACE).exists():
            with self._left_out_on_error():
                self._trace.take_up(folder / TRACE)

    def step(self, row: dict[str, Any]) -> None:
        """Take a step's row. Metrics can be added to it until the next one comes."""
        if self._trace is not None:
            self._write_row()
            self._row = row
        if self._note is not None:
            with contextlib.suppress(OSError):  # a full disk is reported with the next checkpoint
                os.pwrite(self._note, b"%020d\n" % row["step"], 0)  # in place, to the page cache: microseconds

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics of the last step, if its row is not written yet."""
        if self._row is not None:
            self._row.update(metrics)

    def files(self) -> dict[str, tuple[Path, int]]:
        """The trace up to the last step, as :func:`ray_adascale.checkpoint.save` takes files."""
        self._write_row()
        with self._left_out_on_error():
            if self._trace is not None:
                self._trace.shorten()
        return {} if self._path is None else {TRACE: (self._path, self._path.stat().st_size)}

    def finish(self) -> Path | None:
        """End the trace of a run that has ended; its file goes with this object. None where no trace is kept."""
        self._write_row()
        with self._left_out_on_error():
            if self._trace is not None:
                self._trace.shorten(always=True)
                self._trace.close()
        return self._path

    def _write_row(self) -> None:
        row, self._row = self._row, None
        if self._trace is not None and row is not None:
            with self._left_out_on_error():
                self._trace.append(row)

    @contextlib.contextmanager
    def _left_out_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if self._trace is not None:
                self._trace.abandon()
            self._trace = None
            warn_at_user(
                f"The run's trace can't be written any more: {e}. Training goes on; the report will lack this start's steps "
                "from here on.",
                RuntimeWarning,
            )
