"""What a run reports of an optimizer step: keys and values, what may stand under a key of the user's; and all of it in words."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from ..config import BatchPlan
from ..gain import plain_noise_scale
from ..optim.adascale import AdaScale
from .eta import LEFT, Eta

__all__ = [
    "METRICS",
    "USEFUL_WORKERS",
    "ProgressLine",
    "format_metrics",
    "plain_numbers",
    "state_of",
    "step_metrics",
    "tau_of",
    "too_large_for_the_noise",
]

METRICS = (
    "gain",
    "scale",
    "effective_steps",
    "progress",
    "lr",
    "loss",
    "sigma2",
    "mu2",
    "noise_scale",
    "efficiency",
    "examples_per_s",
    "optimizer_steps",
    "world_size",
)
"""The keys of every report, beside what the user adds. ``lr`` is the schedule's lr(⌊τ⌋) of the first parameter group, before
the gain, so that it lies on one curve over effective steps at every scale."""


USEFUL_WORKERS = "useful_workers"
"""The key, beside these, of how many workers pay at the present noise: of runs whose number of workers, or batch, may change."""


def step_metrics(
    optimizer: AdaScale,
    plan: BatchPlan,
    *,
    loss: float,
    lr: float,
    progress: float,
    examples_per_s: float,
    probed: tuple[float, float] | None,
) -> dict[str, Any]:
    """The values of the last step under :data:`METRICS`; waits for the device where the host doesn't know the step yet.

    Args:
        optimizer: It has taken the step.
        plan: How the step's batch was made up.
        loss: Of all workers.
        lr: The schedule's.
        progress: Σ r.
        examples_per_s: Over all workers.
        probed: σ² and μ² of a probe, for where the steps show none.
    """
    sigma2, mu2 = optimizer.average_moments()
    if math.isnan(sigma2) and probed is not None:
        sigma2, mu2 = probed
    gain, scale = optimizer.last_step.gain, plan.scale
    return {
        "gain": gain,
        "scale": scale,
        "effective_steps": optimizer.effective_steps,
        "progress": progress,
        "lr": lr,
        "loss": loss,
        "sigma2": sigma2,
        "mu2": mu2,
        "noise_scale": plain_noise_scale(sigma2, mu2, plan.base_batch_size),
        "efficiency": gain / scale,
        "examples_per_s": examples_per_s,
        "optimizer_steps": optimizer.steps,
        "world_size": plan.world_size,
    }


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The user's metrics as Python numbers; one-element tensors and NumPy scalars are read out.

    Raises:
        ValueError: A name that the run reports itself.
        TypeError: A value that is neither number nor string.
    """
    out = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
    for key, value in out.items():
        if (key in METRICS and key != "loss") or key in (*LEFT, USEFUL_WORKERS):
            raise ValueError(f"Invalid metric {key!r}: the run reports it itself. Choose another name.")
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"Invalid metric {key!r} of type {type(value).__name__}. Must be a number or a string.")
    return out


def too_large_for_the_noise(plan: BatchPlan, noise_scale: float, gain: float) -> str | None:
    """A sentence where the batch is beyond the noise scale (examples), so that r/S is below one half; else None."""
    if plan.scale <= 1 or not plan.global_batch_size > noise_scale:
        return None
    return (
        f"The batch of {plan.global_batch_size} exceeds the gradient noise scale of {noise_scale:.0f} examples "
        f"(gain {gain:.2f} at scale {plan.scale:g}): more workers now buy less than half."
    )


# ---- how far a run is ------------------------------------------------------------------------------------------------


def tau_of(metrics: Mapping[str, Any], total_steps: float) -> str:
    """τ of T."""
    return f"τ {metrics['effective_steps']:,.0f}/{total_steps:,.0f}"


def state_of(metrics: Mapping[str, Any]) -> str:
    """Steps, gain and scale, LR, loss, throughput and workers."""
    workers = metrics["world_size"]
    pays = metrics.get(USEFUL_WORKERS, workers)
    told = f"{workers} worker{'s' if workers != 1 else ''}" if pays >= workers else f"{pays} of {workers} workers pay"
    return (
        f"step {metrics['optimizer_steps']:,}  gain {metrics['gain']:.2f} of {metrics['scale']:g}  "
        f"lr {metrics['lr']:.3g}  loss {metrics['loss']:.4g}  {metrics['examples_per_s']:,.0f} examples/s  "
        f"{told}"
    )


def format_metrics(metrics: Mapping[str, Any], total_steps: float, left: Eta) -> str:
    """τ/T, steps, gain and scale, LR, loss, throughput and time left, on one line."""
    share = min(metrics["effective_steps"] / total_steps, 1)
    return f"{tau_of(metrics, total_steps)} {share:4.0%}  {state_of(metrics)}  {left}"


class ProgressLine:
    """Shows on standard error how far a run is: live on a terminal, else a line now and then. It never ends a run.

    Args:
        show: None for a terminal only, True wherever standard error goes, False for nothing.
    """

    def __init__(self, show: bool | None) -> None:
        terminal = False
        with contextlib.suppress(Exception):  # there may be none, or a stand-in
            terminal = sys.stderr.isatty()
        self._live = terminal and show is not False
        self._shows = self._live or bool(show)
        self._interval_s = 0.5 if self._live else 30.0
        self._shown_at = -math.inf
        self._width = 0

    def show(self, metrics: Mapping[str, Any], total_steps: int, left: Eta) -> None:
        """After a step."""
        if not self._shows or time.monotonic() - self._shown_at < self._interval_s:
            return
        self._shown_at = time.monotonic()
        self._write(format_metrics(metrics, total_steps, left))

    def end(self, metrics: Mapping[str, Any], total_steps: int, why: str) -> None:
        """The run has ended, or had before."""
        if self._shows:
            self._write(f"{tau_of(metrics, total_steps)}  {state_of(metrics)}: {why}", last=True)

    def _write(self, text: str, *, last: bool = False) -> None:
        with contextlib.suppress(Exception):
            if not self._live:
                print(text, file=sys.stderr, flush=True)
                return
            if not last:
                text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps can't be written over
            print(f"\r{text:{self._width}}", end="\n" if last else "", file=sys.stderr, flush=True)
            self._width = len(text)
