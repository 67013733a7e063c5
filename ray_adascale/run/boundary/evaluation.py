"""The stage that evaluates the model at intervals in τ, and ends a run whose
evaluations have stopped improving.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..._torch import buffers_kept, in_eval_mode
from ..._warn import warn_on_first_worker
from ...checkpoint.rng import capture_rng, restore_rng
from ...config import EarlyStop
from ..observe.metrics import plain_numbers, values_of
from .stage import ALWAYS, BoundaryFlags, RunAtBoundary, Stage

_log = logging.getLogger(__name__)


class MissingMetric(ValueError):
    """The workload's metric is not measured. This is a mistake in the workload, so
    every trial would repeat it.
    """


class Evaluation(Stage):
    """Evaluates the model at multiples of an interval in τ, and ends the run if
    evaluations have stopped improving.

    Args:
        evaluate: Returns metrics of the bare model. None for a loop that evaluates by
            itself and records the metrics.
        module: The bare model.
        every: Effective steps between evaluations.
        early_stop: When to end the run; None for never.
        metric: The metric that the workload is judged by; None: it is not judged.

    Attributes:
        evaluated_at: τ of the last evaluation; −1 before the first.
        best: The best evaluation's metric for ``early_stop``; None before the first.
        best_at: τ of the best evaluation; −1 before the first.
        untrained: The untrained model's metrics; empty before :meth:`try_out`.
        evaluated_step: Number of the optimizer step after which this start last
            evaluated the model; −1 before the first.
    """

    def __init__(
        self,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None,
        module: nn.Module,
        *,
        every: float,
        early_stop: EarlyStop | None,
        metric: str | None = None,
    ) -> None:
        self._evaluate = evaluate
        self._module = module
        self._every = every
        self._early_stop = early_stop
        self._metric = metric
        self._names: set[str] = set()  # of the metrics of the last evaluation
        self._nan: set[str] = set()  # those that were warned of
        self._is_nan = False  # whether the metric of early_stop is
        self.evaluated_at = -1.0
        self.best: float | None = None
        self.best_at = -1.0
        self.evaluated_step = -1
        # Whether the next step is read at once, on all workers: with it rank 0 sends
        # whether the evaluation was the last one. Else a fused step would be read one
        # step later, or at once where a checkpoint is due.
        self._awaits_stop = False
        self.untrained: dict[str, Any] = {}
        if early_stop is not None:
            self.timer = ALWAYS

    def try_out(self, device: torch.device, *, log: bool = False) -> dict[str, Any]:
        """Evaluate the untrained model, so that a mistake in ``evaluate`` shows before
        the first step.

        Random streams and buffers stay as they are, and the metrics don't count. A
        second call does nothing.

        Args:
            device: The device of this worker.
            log: Log the metrics.

        Returns:
            The metrics.
        """
        if self._evaluate is None or self._names:
            return {}
        streams = capture_rng(device)
        with buffers_kept(self._module) as changed:
            metrics = self._evaluated(self._evaluate)
        if changed:
            warn_on_first_worker(
                f"evaluate changed the buffer {changed[0]!r} of the model (one of "
                f"{len(changed)}), which is saved with the model. The evaluation "
                "before training must change nothing, so the buffer has its numbers "
                "of before. If evaluate fills a cache once, register it with "
                "persistent=False, or fill it when the model is built."
            )
        self.untrained.update(metrics)
        restore_rng(streams, device)
        if self._metric not in (None, "loss", *metrics):
            raise MissingMetric(
                f"Invalid metric={self._metric!r}: evaluate returned "
                f"{_names_of(metrics)}. Name one of them in Workload(metric=...), or "
                "'loss' for the training loss."
            )
        measured = metrics.get(self._metric or "", 0.0)
        if not isinstance(measured, numbers.Real):
            raise MissingMetric(
                f"Invalid metric={self._metric!r}: evaluate returned {measured!r} for "
                "it. Must be a number."
            )
        if log and metrics:
            _log.info("The untrained model: %s.", values_of(metrics))
        if unknown := [
            name
            for name, value in metrics.items()
            if isinstance(value, float) and math.isnan(value)
        ]:
            warn_on_first_worker(
                "evaluate returned NaN for the untrained model: "
                f"{', '.join(map(repr, unknown))}."
            )
        return metrics

    def multiples_by(self, effective_steps: float) -> float:
        """Return the number of multiples of the interval between the last evaluation
        and this τ.
        """
        return (
            effective_steps // self._every - max(self.evaluated_at, 0.0) // self._every
        )

    def due_in_loop(self, effective_steps: float, *, ended: bool) -> bool:
        """Return whether a loop that evaluates by itself has to by this τ.

        Args:
            effective_steps: τ.
            ended: Whether τ has reached T.
        """
        return (ended and self.evaluated_at < effective_steps) or self.multiples_by(
            effective_steps
        ) > 0

    def next_tau(self) -> float:
        if self._evaluate is None:
            return math.inf
        if self._awaits_stop:
            return self.evaluated_at
        return (
            (max(self.evaluated_at, 0.0) // self._every + 1) * self._every * (1 - 1e-12)
        )

    def due_by(self, effective_steps: float) -> bool:
        return self._evaluate is not None and self.multiples_by(effective_steps) > 0

    def flags(self) -> int:
        return BoundaryFlags.STALLED if self.stalled is not None else BoundaryFlags.NONE

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        if flags & BoundaryFlags.STALLED:
            return self._reason()
        self._awaits_stop = False
        if self.due_by(run.effective_steps):
            self._run(run)
            self._awaits_stop = self._early_stop is not None
        return None

    def finish(self, run: RunAtBoundary) -> None:
        """Evaluate at the end of the run, unless the last evaluation was at this τ."""
        if self._evaluate is not None and self.evaluated_at < run.effective_steps:
            self._run(run)

    def after_record(self, metrics: Mapping[str, Any], effective_steps: float) -> None:
        """Process metrics that were recorded at this τ. They count as an evaluation."""
        self.evaluated_at = effective_steps
        stop = self._early_stop
        if stop is None or stop.metric is None or stop.metric not in metrics:
            return
        self._is_nan = math.isnan(metrics[stop.metric])
        if stop.better(metrics[stop.metric], self.best):
            self.best = metrics[stop.metric]
            self.best_at = effective_steps

    @property
    def stalled(self) -> str | None:
        """The reason to end the run early; None to go on. A function of the state in
        a checkpoint.
        """
        stop = self._early_stop
        if (
            stop is None
            or self.best_at < 0
            or self.evaluated_at - self.best_at < stop.patience
        ):
            return None
        return self._reason()

    def state_dict(self) -> dict[str, Any]:
        return {
            "evaluated_at": self.evaluated_at,
            "best": self.best,
            "best_at": self.best_at,
            "metric_is_nan": self._is_nan,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluated_at = state["evaluated_at"]
        self.best = state["best"]
        self.best_at = state["best_at"]
        self._is_nan = state["metric_is_nan"]
        self._awaits_stop = self._early_stop is not None  # it may just have ended

    def _reason(self) -> str:
        stop = self._early_stop
        assert stop is not None
        # best is None on a worker whose evaluations were all NaN. An error here would
        # leave the other workers waiting.
        than = "" if self.best is None else f" than {self.best:.4g}"
        now = "; it is NaN now" if self._is_nan else ""
        return (
            f"no better {stop.metric}{than} for {stop.patience:g} effective steps{now}"
        )

    def _run(self, run: RunAtBoundary) -> None:
        assert self._evaluate is not None
        before = self._names
        metrics = self._evaluated(self._evaluate)
        if missing := before - metrics.keys():
            warn_on_first_worker(
                f"evaluate returned no {', '.join(map(repr, sorted(missing)))} this "
                f"time, at effective step {run.effective_steps:.0f}: reports and the "
                "score have the value of an earlier evaluation."
            )
        self._warn_of_nan(metrics, run.effective_steps)
        self.evaluated_step = run.state.iterations
        run.record(**metrics)
        run.state.metrics.update(run.state.recorded)

    def _warn_of_nan(self, metrics: Mapping[str, Any], effective_steps: float) -> None:
        """Warn of each metric that is NaN, once."""
        found = {
            name
            for name, value in metrics.items()
            if isinstance(value, float) and math.isnan(value)
        }
        if new := sorted(found - self._nan):
            warn_on_first_worker(
                f"evaluate returned NaN for {', '.join(map(repr, new))} at effective "
                f"step {effective_steps:.0f}. It counts as no improvement, and is not "
                "warned of again."
            )
        self._nan |= found

    def _evaluated(
        self, evaluate: Callable[[nn.Module], Mapping[str, float]]
    ) -> dict[str, Any]:
        with in_eval_mode(self._module), torch.no_grad():
            metrics = evaluate(self._module)
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"evaluate returned a {type(metrics).__name__}. It must return a dict "
                "of metrics by name."
            )
        stop = self._early_stop
        if stop is not None and stop.metric not in metrics:
            raise ValueError(
                f"Invalid EarlyStop(metric={stop.metric!r}): evaluate returned "
                f"{_names_of(metrics)}. The metric must be one of them."
            )
        self._names = set(metrics)
        return plain_numbers(metrics)


def _names_of(metrics: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, metrics)) or "nothing"
