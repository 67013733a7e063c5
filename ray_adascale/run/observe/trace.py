"""The trace: one JSON line for each optimizer step, in files that survive a kill of the
process.

Each start of a run writes a file of its own, ``trace/0000.jsonl`` and so on in the
run's folder, and changes no other. So an earlier start that lives on, as on a machine
that is cut off, spoils nothing. :func:`read_trace` joins the files: a start that
resumes takes the steps after its checkpoint again, and from its first row on its rows
count.

Rows are appended while the run trains, and all of them before a checkpoint, so that
none is missing after a crash. What a crash can damage is the last line of a file.

A run of more than 40,000 base steps writes only every k-th row, and the first and the
last of each start. The stride k follows from T alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..._files import SEARCH, TRACE, fetched
from ..._warn import warn_at_user
from .metrics import (
    BASE,
    CLIPPED,
    EVERY,
    FIXED_MOMENTUM,
    METRICS,
    NORM_BATCH,
    OWN_KEYS,
    SHORT_STEP,
    SKIPPED,
    UNIX_TIME,
)
from .step import Listener, Step

_encode = json.JSONEncoder(separators=(",", ":")).encode
_WITHIN_S = 1.0
"""Seconds after which collected rows are written."""
_MOST_ROWS = 40_000
"""Most rows of a run, beside the first and the last of each start."""

COLUMNS = {
    "step": "number of the optimizer step, from 1; skipped steps count",
    "attempt": "number of the start, from 0: a restart or a resume is another start",
    "position": "examples that the run has used so far, over all workers",
    UNIX_TIME: "when the step's numbers were known, in seconds since 1970",
    **METRICS,
    "steps_left": "optimizer steps to T by the forecast; only with a recipe that has "
    "noise",
    "rule": "the scaling rule",
    "optimizer": "class of the optimizer, in the first row alone",
    "untrained": "metrics of the untrained model, in the first row alone",
    "total_steps": "T, in the first row alone",
    BASE: "the recipe's base runs, for the verdict, in the first row alone",
    NORM_BATCH: "examples of a micro-batch of a model with batch norm, with a recipe, "
    "in the first row alone",
    FIXED_MOMENTUM: "momentum of SGD, if it is above 1/2 and fixed; with a recipe, in "
    "the first row alone",
    CLIPPED: "true if the gradient was clipped at a multiple of the expected norm; "
    "else missing",
    SKIPPED: "true if the gradient was not finite, so that weights and τ stayed; else "
    "missing",
    SHORT_STEP: "true for a step with fewer passes than declared, in the adapters "
    "alone; else missing",
    EVERY: "k if T is above 40,000, and a row is written for every k-th step only; "
    "else missing",
}
"""The keys of a row and their meaning. Metrics of ``evaluate`` and ``run.record``
stand in the row of the step before them.
"""


class Trace(Listener):
    """Writes the trace of one start of a run.

    A failing trace never ends a run. If rows can't be written, as on a full disk, a
    warning says so, and they are written later.

    Args:
        run: The run's folder. The file's folder in it is made if missing.
        total_steps: T.
        attempt: Earlier starts of the run that are known. There may be more, which have
            left a file.
        store: Stores the files of an ended or failed run elsewhere. Default: they stay
            where they are.

    Attributes:
        number: Number of the file.
        first: Entries of the row of the run's first step.
    """

    def __init__(
        self,
        run: Path,
        total_steps: int,
        attempt: int = 0,
        *,
        store: Callable[[], object] = lambda: None,
    ) -> None:
        self._run = run
        self._store = store
        self._every = 1  # k
        while total_steps > _MOST_ROWS * self._every:
            self._every *= 2
        self.number = attempt
        # of the monotonic clock, so that a step reads one clock
        self._began_at = time.time() - time.monotonic()
        # bytes of the file that are whole rows; None before it is made
        self._size: int | None = None
        # the last step's, while metrics may be recorded for it
        self._row: dict[str, Any] | None = None
        self.first: dict[str, Any] = {}
        # the user's metrics of rows left out since the last one that stays
        self._left_out: dict[str, Any] = {}
        self._first = True
        self._pending: list[bytes] = []
        self._last = b""  # the end of a thinned trace: the next write replaces it
        self._failing = False
        self._write()  # makes the file, so that another start takes the next number
        store()  # also where it is kept

    def after_step(self, step: Step) -> None:
        """Add the previous step's row, and keep this step's row for metrics that are
        recorded for it.
        """
        self._add()
        now = time.monotonic()
        self._row = step.row
        self._row[UNIX_TIME] = self._began_at + now
        if step.number == 1:
            self._row.update(self.first)
        if now - self._written >= _WITHIN_S:
            self._write()

    def after_record(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row of the last step."""
        if self._row is not None:
            self._row.update(metrics)

    def flush(self) -> None:
        """Write the rows so far. No more metrics can be recorded for the last one."""
        self._add()
        self._write()

    def save(self) -> None:
        """Write the rows so far, whatever the stride, so that they survive a power
        cut. Called before a checkpoint.
        """
        self._add(last=True)
        self._write(sync=True)

    def after_loop(self) -> None:
        """Write the last row."""
        self.save()

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Write and store the last row."""
        self.failed()

    def failed(self) -> None:
        """Write and store the last row."""
        self.save()
        self._store()

    def _add(self, *, last: bool = False) -> None:
        row = self._row
        self._row = None
        if row is None:
            return
        self._last = b""
        if self._every > 1:
            whole = row | self._left_out | row | {EVERY: self._every}
            if not self._first and row["step"] % self._every:
                self._left_out |= {
                    k: value
                    for k, value in row.items()
                    if k not in OWN_KEYS and k != "loss"
                }
                self._last = _line(whole) if last else b""
                return
            row = whole
            self._left_out = {}
        self._first = False
        self._pending.append(_line(row))

    def _write(self, *, sync: bool = False) -> None:
        self._written = time.monotonic()
        lines = b"".join(self._pending)
        try:
            if self._size is None:
                self._make()
            with self._path.open("r+b") as file:
                # of a write that failed halfway, or with a last row
                file.truncate(self._size)
                file.seek(0, os.SEEK_END)
                file.write(lines + self._last)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as e:
            if not self._failing:
                warn_at_user(
                    f"The run's trace can't be written now: {e}. Training goes on; the "
                    "rows are kept, and written later.",
                    RuntimeWarning,
                )
            self._failing = True
            return
        self._failing = False
        assert self._size is not None
        self._size += len(lines)
        self._pending.clear()

    @property
    def _path(self) -> Path:
        return self._run / TRACE / f"{self.number:04d}.jsonl"

    def _make(self) -> None:
        """Make this start's file, under a number above those of all other starts."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.number = max(
            [self.number, *(int(file.stem) + 1 for file in files_of(self._run))]
        )
        while self._size is None:
            try:
                self._path.open("xb").close()
                self._size = 0
            except FileExistsError:
                self.number += 1


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a run, in the order of the steps: of a step that was taken
    again only the last start's.

    Args:
        path: The run's folder, or the file of one start; a path or a URI.

    Raises:
        ValueError: There is no trace, or a line before the last one of a file is no
            row: the file is damaged, or no trace.
    """
    path = fetched(path, checkpoints=False)
    files = [path] if path.is_file() else files_of(path)
    if not files:
        if (path / SEARCH).is_file():
            raise ValueError(
                f"Invalid run {str(path)!r}: a search, whose trials keep no trace of "
                "their steps. Give the folder of a run, as `ray-adascale train` makes; "
                "for the base run, one at the recipe's base batch."
            )
        if path.is_dir():
            what = f"no {TRACE}/*.jsonl in it"
        else:
            what = "no such file or folder"
        raise ValueError(
            f"Invalid run {str(path)!r}: {what}. Give the folder of a run (its name "
            "under the storage path)."
        )
    return joined(files)


def joined(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of a run from the files of its starts, in their order."""
    rows: list[dict[str, Any]] = []
    for file in files:
        of_start = _rows(file)
        while of_start and rows and rows[-1]["step"] >= of_start[0]["step"]:
            rows.pop()
        rows += of_start
    return rows


def faults_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what a trace lacks, a phrase each; empty if it has a row for each step,
    or each k-th one.
    """
    found = []
    before = 0
    for row in rows:
        now = row["step"]
        if now <= before:
            found.append(f"step {now:,} comes after step {before:,}")
        elif now - before > row.get(EVERY, 1):
            if now - before > 2:
                steps = f"steps {before + 1:,} to {now - 1:,} are"
            else:
                steps = f"step {now - 1:,} is"
            found.append(f"{steps} missing")
        before = max(before, now)
    return found


def files_of(run: Path) -> list[Path]:
    """Return the files of a run's starts, in their order."""
    files = [file for file in (run / TRACE).glob("*.jsonl") if file.stem.isdecimal()]
    return sorted(files, key=lambda file: int(file.stem))


def _line(row: dict[str, Any]) -> bytes:
    return _encode(row).encode() + b"\n"


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without a last line that a crash has torn."""
    rows = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        # No proper prefix of a JSON object is JSON, so a torn row is never read as a
        # shorter row.
        row = None
        with contextlib.suppress(ValueError):
            row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines):
            raise ValueError(
                f"Line {number} of {path} is not a trace row. Only the last line of a "
                "trace may be torn."
            )
    return rows
