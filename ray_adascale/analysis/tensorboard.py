"""TensorBoard event files: of a run on Ray workers while it goes on, and of any run from its trace.

Every number is a scalar, against optimizer steps, and with the prefix ``tau/`` against ⌊τ⌋: there, runs at different scales
lie on each other. Ray Tune writes such files for trials by itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..run.step import Listener, Step
from .runs import COUNTERS, RunTrace, is_number, load_run

__all__ = ["LiveEvents", "write_events"]

_NO_CURVES = (*COUNTERS, "optimizer_steps")
"""The keys whose numbers are no curves: where the run was. Optimizer steps are an axis."""

_MOST_WAITING = 256
"""Points that wait for a disk, at most."""

_PATIENCE_S = 5.0
"""How long the end of a run waits for its event files."""


def write_events(run: str | os.PathLike[str] | RunTrace, folder: str | os.PathLike[str]) -> Path:
    """Write every step of a run's trace.

    Args:
        run: See :func:`ray_adascale.analysis.runs.trace_path`.
        folder: A folder for all runs; this one gets a folder of its own in it, named by its label.

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

    It writes about 500 points at first, one a second at most, and then so many for each time that the run gets e times as
    long. A run that resumes tells TensorBoard to forget what had been written after its checkpoint.

    A thread of its own writes, and no caller ever waits for it: what a disk does not take is left out, with one warning.

    Args:
        folder: Gets a folder for the files against steps and one for those against τ: what is to be forgotten is told by
            where it lies on the axis, and a folder has one axis.
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
            self._hand_over()

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Write the last step's metrics, end the files within seconds, and store them."""
        self._close()
        if self._store is not None:
            try:
                self._store(self.folder)
            except OSError as e:
                self._leave_out(f"{type(e).__name__}: {e}")

    def _close(self) -> None:
        self._hand_over()
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_PATIENCE_S)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self._leave_out("the disk does not answer")

    def _hand_over(self) -> None:
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
            warnings.warn(
                f"The run's TensorBoard event files in {self.folder} are incomplete: {why}. Training goes on; "
                "`ray-adascale report --tensorboard` makes them anew from the trace.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _write_all(self) -> None:
        """Write what is handed over until the end is; the thread's."""
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
        except Exception as e:  # of whatever kind: a display never ends a run
            self._over = True
            self._leave_out(f"{type(e).__name__}: {e}")
        finally:
            for file in files.values():
                with contextlib.suppress(OSError):  # what it could not flush is what was warned of
                    file.close()


class _EventFile:
    """One event file, written as one asks. tensorboardX's own writer does so in a thread that dies of a full disk, and then
    blocks whoever adds to it or ends the process.

    Args:
        folder: Made if missing.
        first: Where on the axis it begins; what earlier files of the folder have from there on is forgotten.
    """

    def __init__(self, folder: Path, first: int) -> None:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        starts = len(list(folder.glob("events*")))  # how often the run has started before
        self._file = RecordWriter(
            str(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{starts}")
        )
        self._write(file_version="brain.Event:2")
        if starts:
            self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def add(self, scalars: Mapping[str, float], at: int) -> None:
        """Write these numbers at one place of the axis, to the disk: a worker that is killed takes along what is not there."""
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
    """tensorboardX's class, or None where it is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter
