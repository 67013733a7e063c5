"""TensorBoard event files of a run, from its trace. Ray Tune writes such files for trials by itself."""

from __future__ import annotations

import math
import os
from pathlib import Path

from .report import RunTrace, load_run

__all__ = ["write_events"]

_PLACE = ("step", "attempt", "position", "optimizer_steps", "total_steps")


def write_events(run: str | os.PathLike[str] | RunTrace, folder: str | os.PathLike[str]) -> Path:
    """Write every number of a run's trace as a scalar, against optimizer steps, and with the prefix ``tau/`` against ⌊τ⌋.

    Against τ, runs at different scales lie on each other.

    Args:
        run: See :func:`ray_adascale.report.trace_path`.
        folder: For all runs; the run gets one of its own in it, named by its label.

    Returns:
        The run's folder.

    Raises:
        ValueError: The run has no trace, or tensorboardX is missing.
    """
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError("tensorboardX is needed for event files: pip install 'ray[tune]', or tensorboardX.") from error
    loaded = run if isinstance(run, RunTrace) else load_run(run)
    target = Path(folder).expanduser() / loaded.label
    with SummaryWriter(str(target)) as writer:
        for row in loaded.rows:
            for key, value in row.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if key not in _PLACE and number and math.isfinite(value):
                    writer.add_scalar(key, value, row["optimizer_steps"])
                    writer.add_scalar(f"tau/{key}", value, int(row["effective_steps"]))
    return target
