"""TensorBoard event files: of a run on Ray workers while it goes on, and of any run from its trace.

Every number is a scalar, against optimizer steps, and with the prefix ``tau/`` against ⌊τ⌋: there, runs at different scales
lie on each other. Ray Tune writes such files for trials by itself.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .runs import COUNTERS, RunTrace, is_number, load_run

__all__ = ["LiveEvents", "write_events"]

_NO_CURVES = (*COUNTERS, "optimizer_steps")
"""The keys whose numbers are no curves: where the run was. Optimizer steps are an axis."""


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


class LiveEvents:
    """The event files of a run that goes on; it does nothing where tensorboardX is missing.

    It writes about 500 points at first, one a second at most, and then so many for each time that the run gets e times as
    long. A run that resumes tells TensorBoard to forget what had been written after its checkpoint.

    Args:
        folder: Gets a folder for the files against steps and one for those against τ: what is to be forgotten is told by
            where it lies on the axis, and a folder has one axis.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._type = _writer_class()
        self._writers: dict[str, Any] = {}
        self._began = time.monotonic()
        self._written = -math.inf
        self._pending: Mapping[str, Any] | None = None

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of an optimizer step, and write them if it is time."""
        self._pending = metrics
        now = time.monotonic()
        if now - self._written >= max(1.0, (now - self._began) / 500):
            self._written = now
            self._write()

    def close(self) -> None:
        """Write the last step's metrics and end the files."""
        self._write()
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _write(self) -> None:
        metrics, self._pending = self._pending, None
        if metrics is None or self._type is None:
            return
        axes = {"steps": ("", metrics["optimizer_steps"]), "tau": ("tau/", int(metrics["effective_steps"]))}
        for axis, (prefix, at) in axes.items():
            if axis not in self._writers:
                folder = self.folder / axis
                starts = len(list(folder.glob("events*")))  # how often the run has started before
                self._writers[axis] = self._type(
                    str(folder),
                    purge_step=at if starts else None,
                    filename_suffix=f".{starts}",
                    flush_secs=1,  # a worker that is killed takes along what is not in the file
                )
            for key, value in _scalars(metrics):
                self._writers[axis].add_scalar(f"{prefix}{key}", value, at)


def _scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if key not in _NO_CURVES and is_number(value) and math.isfinite(value):
            yield key, value


def _writer_class() -> Any:
    """tensorboardX's class, or None where it is missing."""
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-untyped]
    except ImportError:
        return None
    return SummaryWriter
