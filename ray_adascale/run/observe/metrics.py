"""The metrics of an optimizer step: their keys and values, the user's metrics, and
their text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...batch import StepPlan
from ...gain import plain_noise_scale
from ...optim.step_sums import StepResult
from .eta import LEFT, Eta

METRICS = {
    "gain": "r of the step",
    "scale": "S of the step",
    "effective_steps": "τ, the clock of the schedule",
    "progress": "Σ r, which is τ except under rules whose clock is not the gain",
    "lr": "lr(⌊τ⌋) of the first parameter group, before the gain",
    "loss": "mean over the step's examples, of all workers",
    "sigma2": "average of σ², the variance of the gradient of one base batch",
    "mu2": "average of μ², the squared norm of the true gradient",
    "noise_scale": "B_noise = B0·σ²/μ², in examples",
    "efficiency": "r/S",
    "examples_per_s": "examples a second, over all workers",
    "optimizer_steps": "updates of the weights so far: `step` without the skipped steps",
    "world_size": "number of workers",
}
"""The keys of every report and their meaning, beside the user's. Over effective
steps ``lr`` is the same curve at every scale.
"""


SHORT_STEP = "short_step"
"""The key of True in the trace's row of a step with fewer passes than declared, as
at the end of a client's epoch.
"""


SKIPPED = "skipped"
"""The key of True in the trace's row of a step that was skipped, because its
gradient was not finite.
"""


CLIPPED = "clipped"
"""The key of True in the trace's row of a step that was clipped at a multiple of the
expected norm.
"""


UNIX_TIME = "unix_time"
"""The key of the time at which the host had a step's numbers, in the trace's row."""


BASE = "base"
"""The key of the figures of the recipe's base runs in the first row of a trace."""


NORM_BATCH = "norm_batch"
"""The key of the examples of a micro-batch, for batch norm, in the first row of a
trace.
"""


FIXED_MOMENTUM = "fixed_momentum"
"""The key of SGD's momentum in the first row of a trace, if it is fixed and the default
would shorten it.
"""


EVERY = "every"
"""The key of k in the rows of a trace that has a row for every k-th step."""


COUNTERS = (
    "step",
    "attempt",
    "position",
    UNIX_TIME,
    "rule",
    "optimizer",
    "untrained",
    BASE,
    NORM_BATCH,
    FIXED_MOMENTUM,
    "total_steps",
    "steps_left",
    EVERY,
)
"""The keys of a row, beside :data:`METRICS`, that the run writes itself, and that
are no curves: its position and its kind.
"""


OF_TUNE = (
    "done",
    "trial_id",
    "training_iteration",
    "iterations_since_restore",
    "time_this_iter_s",
    "time_total_s",
    "time_since_restore",
    "timestamp",
    "date",
    "config",
    "checkpoint_dir_name",
    "should_checkpoint",
    "experiment_tag",
    "node_ip",
    "hostname",
    "pid",
)
"""The keys that Ray Tune writes into a trial's reports, or acts on: ``done`` ends the
trial.
"""


OWN_KEYS = frozenset(
    {
        *METRICS,
        *OF_TUNE,
        *LEFT,
        *COUNTERS,
        SHORT_STEP,
        SKIPPED,
        CLIPPED,
        "stopped",  # the end of the run, for the driver
        "loop_seconds",  # these three in the run's summary
        "skipped_steps",
        "verdict",
        "objective",  # these three in a trial's reports to Tune
        "epochs",
        "outcome",
    }
    - {"loss"}
)
"""The keys that the package writes into rows, reports and messages. The user's metrics
have other names; only ``loss`` may be replaced."""


def step_metrics(
    step: StepResult,
    plan: StepPlan,
    *,
    loss: float,
    lr: float,
    progress: float,
    examples_per_s: float,
    probed: tuple[float, float] | None,
) -> dict[str, Any]:
    """Return the values of a step under :data:`METRICS`.

    Args:
        step: The step's numbers, with the averages after it.
        plan: The step's batch.
        loss: Mean over the step's examples, of all workers.
        lr: lr(⌊τ⌋) of the schedule, before the gain.
        progress: Σ r.
        examples_per_s: Over all workers.
        probed: σ² and μ² of the last probe, for steps that have one gradient sample;
            None without one.
    """
    sigma2, mu2 = step.total_moments()
    if math.isnan(sigma2) and probed is not None:
        sigma2, mu2 = probed
    gain = step.gain
    scale = plan.scale
    return {
        "gain": gain,
        "scale": scale,
        "effective_steps": step.effective_steps,
        "progress": progress,
        "lr": lr,
        "loss": loss,
        "sigma2": sigma2,
        "mu2": mu2,
        "noise_scale": plain_noise_scale(sigma2, mu2, plan.base_batch_size),
        "efficiency": gain / scale,
        "examples_per_s": examples_per_s,
        "optimizer_steps": step.steps,
        "world_size": plan.workers,
    }


def plain_numbers(
    metrics: Mapping[str, Any], *, of_step: bool = False
) -> dict[str, Any]:
    """Return the user's metrics with one-element tensors and NumPy scalars as Python
    numbers.

    Args:
        metrics: The metrics.
        of_step: Whether they are of one step, so that a ``loss`` among them is a
            training loss.

    Raises:
        ValueError: A name is one of :data:`OWN_KEYS`, or an evaluation's is "loss".
        TypeError: A value is neither a number nor a string.
    """
    out = {}
    for key, value in metrics.items():
        size = math.prod(getattr(value, "shape", ()))
        if size != 1:
            raise TypeError(
                f"Invalid metric {key!r}: a {type(value).__name__} of {size} numbers. "
                "Must be one number."
            )
        out[key] = value = value.item() if hasattr(value, "item") else value
        if key in OWN_KEYS or (key == "loss" and not of_step):
            raise ValueError(
                f"Invalid metric {key!r}: the run or Ray Tune reports it. Choose "
                f"another name, such as 'val_{key}'."
            )
        if not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"Invalid metric {key!r} of type {type(value).__name__}. Must be a "
                "number or a string."
            )
    return out


# ---- progress as text ----------------------------------------------------------------


def tau_of(metrics: Mapping[str, Any], total_steps: float) -> str:
    """Return τ and T as text."""
    return f"τ {metrics['effective_steps']:,.0f}/{total_steps:,.0f}"


def state_of(metrics: Mapping[str, Any]) -> str:
    """Return steps, gain and scale, LR, loss, throughput and workers as text."""
    workers = metrics["world_size"]
    return (
        f"step {metrics['optimizer_steps']:,}  gain {metrics['gain']:.2f} of "
        f"{metrics['scale']:g}  lr {metrics['lr']:.3g}  loss {metrics['loss']:.4g}  "
        f"{metrics['examples_per_s']:,.0f} examples/s  {workers} "
        f"worker{'s' if workers != 1 else ''}"
    )


def values_of(metrics: Mapping[str, Any]) -> str:
    """Return the user's metrics as text."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in metrics.items()
    )


def format_metrics(metrics: Mapping[str, Any], total_steps: float, left: Eta) -> str:
    """Return one line of text: τ/T, steps, gain and scale, LR, loss, throughput,
    workers and time left.
    """
    share = min(metrics["effective_steps"] / total_steps, 1)
    return f"{tau_of(metrics, total_steps)} {share:4.0%}  {state_of(metrics)}  {left}"
