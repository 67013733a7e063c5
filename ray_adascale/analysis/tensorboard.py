"""TensorBoard event files of a run, from its trace.

Every number is a scalar against optimizer steps, and in a group "..._over_tau" against
⌊τ⌋, where runs at different scales coincide. TensorBoard shows a group in a section:
"metrics" (the loss, and the user's), "adascale", "speed". Ray Tune writes event files
for trials itself.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from .._files import on_this_machine
from ..run.observe.metrics import COUNTERS, METRICS, UNIX_TIME
from .runs import RunTrace, is_number, load_run

_NO_CURVES = (*COUNTERS, "optimizer_steps")
"""Keys without a curve: the position of the run, and optimizer steps, which are an
axis.
"""
_SPEED = dict.fromkeys(("examples_per_s", "world_size"), "speed")
_GROUPS = (
    dict.fromkeys((*METRICS, "steps_left"), "adascale") | _SPEED | {"loss": "metrics"}
)
"""The groups of the run's own numbers. Those of the user are metrics."""


def write_events(
    run: str | os.PathLike[str] | RunTrace, folder: str | os.PathLike[str]
) -> Path:
    """Write every row of a run's trace, with the time of its step. What an earlier call wrote in the folder is
    replaced in TensorBoard.

    Args:
        run: As in :func:`ray_adascale.read_trace`, or read already.
        folder: A folder for all runs. The run gets a folder in it, named by its label.

    Returns:
        The run's folder.

    Raises:
        ValueError: The run has no trace, or tensorboardX is missing.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboardX is needed for event files: pip install 'ray[tune]', or "
            "tensorboardX."
        ) from None
    loaded = run if isinstance(run, RunTrace) else load_run(run)
    target = on_this_machine(folder, "Write them here, and copy them.") / loaded.label
    with SummaryWriter(str(target), purge_step=0) as writer:
        for row in loaded.rows:
            for key, value in row.items():
                if key not in _NO_CURVES and is_number(value) and math.isfinite(value):
                    group = _GROUPS.get(key, "metrics")
                    at = row.get(UNIX_TIME)
                    writer.add_scalar(
                        f"{group}/{key}", value, row["optimizer_steps"], walltime=at
                    )
                    writer.add_scalar(
                        f"{group}_over_tau/{key}",
                        value,
                        int(row["effective_steps"]),
                        walltime=at,
                    )
    return target
