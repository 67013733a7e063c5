"""The step trace: a file of JSON lines, one object per optimizer step, that survives being killed.

Appending is the only thing done to the file while training runs, so a crash costs at most the last line. After a crash
the trainer resumes from a checkpoint and cuts the trace back to it: steps taken since are taken again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Trace", "read_trace"]


class Trace:
    """An open trace. Appends to what the file already holds, after dropping a torn last line.

    Args:
        path: The file; it and its folder are made if missing.
        flush_every: Rows that wait in memory before they are written, ≥ 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, flush_every: int = 100) -> None:
        if flush_every < 1:
            raise ValueError(f"Invalid {flush_every=}. Must be at least 1 row.")
        self.path = Path(path)
        self.flush_every = flush_every
        self._pending: list[bytes] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _mend(self.path)
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
            if not isinstance(key, str):
                raise TypeError(f"Invalid key {key!r}: {type(key).__name__}. Keys of a trace row are strings.")
            _check(key, value)
        self._pending.append(json.dumps(dict(row), separators=(",", ":")).encode() + b"\n")
        if len(self._pending) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Writes the waiting rows, so that a reader, or whoever comes after a crash, finds them."""
        if self._file is not None and self._pending:
            self._file.write(b"".join(self._pending))
            self._file.flush()
            self._pending.clear()

    def truncate_after(self, step: int) -> None:
        """Drops rows with ``row["step"] > step``: cuts the trace back to a checkpoint taken at ``step``."""
        if self._file is None:
            raise ValueError(f"The trace {self.path} is closed.")
        self.flush()
        self._file.close()
        self._file = None
        kept = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with kept.open("wb") as file:
                file.writelines(line for line, row in _rows(self.path) if row["step"] <= step)
            os.replace(kept, self.path)
        finally:
            kept.unlink(missing_ok=True)
            self._file = self.path.open("ab")

    def copy_to(self, path: str | os.PathLike[str]) -> None:
        """Writes a complete copy, all rows appended so far included. A reader never sees half of it."""
        self.flush()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            shutil.copyfile(self.path, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def close(self) -> None:
        """Flushes and closes; more than once is fine."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

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


def _check(key: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check(key, item)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"Invalid {key!r} in a trace row: {type(value).__module__}.{type(value).__qualname__}. "
            "Must be a Python number, bool, str, None or a list of these; read tensors with .item()."
        )
