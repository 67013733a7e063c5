"""TensorBoard event files: of a run on Ray workers while it goes on, and of any run from its trace.

Every number is a scalar against optimizer steps, and with the prefix ``tau/`` a scalar against ⌊τ⌋, where runs at different
scales coincide. Ray Tune writes event files for trials itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._warn import warn_at_user
from ..run.metrics import COUNTERS
from ..run.step import Listener, Step
from .runs import RunTrace, is_number, load_run

_NO_CURVES = (*COUNTERS, "optimizer_steps")
"""Keys without a curve: the position of the run, and optimizer steps, which are an axis."""

_MOST_WAITING = 256
"""Largest number of points that wait for a disk."""

_PATIENCE_S = 5.0
"""Time limit for the event files at the end of a run."""


def write_events(run: str | os.PathLike[str] | RunTrace, folder: str | os.PathLike[str]) -> Path:
    """Write every step of a run's trace.

    Args:
        run: See :func:`ray_adascale.analysis.runs.trace_path`.
        folder: A folder for all runs. The run gets a folder in it, named by its label.

    Returns:
        The run's folder.

    Raises:
        ValueError: The run has no trace, or tensorboardX is missing.
    """
    writer_type = _writer_class()
    if writer_type is None:
        raise ValueError("tensorboardX is needed for event files: pip install 'ray[tune]', or tensorboardX.")
    loaded = run if isinstance(run, RunTrace) else load_run(run)
    target = Path(folder).expanduser() / loaded.label
    with writer_type(str(target)) as writer:
        for row in loaded.rows:
            for key, value in _scalars(row):
                writer.add_scalar(key, value, row["optimizer_steps"])
                writer.add_scalar(f"tau/{key}", value, int(row["effective_steps"]))
    return target


class LiveEvents(Listener):
    """The event files of a run that goes on; it does nothing where tensorboardX is missing.

    It writes about 500 points at first, at most one a second, and then 500 further ones each time that the run gets e times as
    long. A resumed run makes TensorBoard discard the points after its checkpoint.

    A thread of its own writes, and no caller waits for it. Points that a disk does not accept are left out, with one warning.

    Args:
        folder: Gets a folder for the files against steps and one for the files against τ. TensorBoard discards points by their
            place on the axis, and a folder has one axis.
    """

    def __init__(self, folder: str | os.PathLike[str], store: Callable[[Path], object] | None = None) -> None:
        self.folder = Path(folder)
        self._store = store
        self._began = time.monotonic()
        self._written = -math.inf
        self._pending: Mapping[str, Any] | None = None
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._over = _writer_class() is None
        self._warned = False

    def after_step(self, step: Step) -> None:
        """Write the step's metrics, if it is time."""
        self._pending = step.metrics
        now = time.monotonic()
        if now - self._written >= max(1.0, (now - self._began) / 500):
            self._written = now
            self._enqueue()

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Write the last step's metrics, end the files within seconds, and store them."""
        self._close()
        if self._store is not None:
            try:
                self._store(self.folder)
            except OSError as e:
                self._leave_out(f"{type(e).__name__}: {e}")

    def _close(self) -> None:
        self._enqueue()
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_PATIENCE_S)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self._leave_out("the disk does not answer")

    def _enqueue(self) -> None:
        metrics, self._pending = self._pending, None
        if metrics is None or self._over:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="ray_adascale-events", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(dict(metrics))
        except queue.Full:
            self._leave_out("the disk does not answer")

    def _leave_out(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warn_at_user(
                f"The run's TensorBoard event files in {self.folder} are incomplete: {why}. Training goes on; "
                "`ray-adascale report --tensorboard` makes them again from the trace.",
                RuntimeWarning,
            )

    def _write_all(self) -> None:
        """Write the queue until its end. Runs in the thread."""
        files: dict[str, _EventFile] = {}
        try:
            while (metrics := self._queue.get()) is not None:
                axes = {
                    "steps": ("", int(metrics["optimizer_steps"])),
                    "tau": ("tau/", int(metrics["effective_steps"])),
                }
                for axis, (prefix, at) in axes.items():
                    if axis not in files:
                        files[axis] = _EventFile(self.folder / axis, at)
                    files[axis].add({f"{prefix}{key}": value for key, value in _scalars(metrics)}, at)
        except Exception as e:  # event files never end a run
            self._over = True
            self._leave_out(f"{type(e).__name__}: {e}")
        finally:
            for file in files.values():
                with contextlib.suppress(OSError):  # the warning covers points that could not be flushed
                    file.close()


class _EventFile:
    """One event file, written in the caller's thread.

    tensorboardX's own writer has a thread, which dies of a full disk. Then its callers and the end of the process block.

    Args:
        folder: Made if missing.
        first: The file's beginning on the axis. TensorBoard discards the points of earlier files from there on.
    """

    def __init__(self, folder: Path, first: int) -> None:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        starts = len(list(folder.glob("events*")))  # number of earlier starts of the run
        self._file = RecordWriter(
            str(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{starts}")
        )
        self._write(file_version="brain.Event:2")
        if starts:
            self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def add(self, scalars: Mapping[str, float], at: int) -> None:
        """Write these numbers at one place of the axis, and flush them, so that they survive a killed worker."""
        from tensorboardX.summary import scalar

        for tag, value in scalars.items():
            self._write(step=at, summary=scalar(tag, value))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **what).SerializeToString())


def _scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if key not in _NO_CURVES and is_number(value) and math.isfinite(value):
            yield key, value


def _writer_class() -> Any:
    """Return tensorboardX's class, or None if it is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter
