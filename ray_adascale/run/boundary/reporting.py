"""The stage that reports the metrics of a run: at intervals, after evaluations, and
with checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...batch import StepPlan
from ...optim.step_sums import StepResult
from ..observe.metrics import step_metrics
from .backend import Backend
from .checkpointing import Checkpointing
from .evaluation import Evaluation
from .stage import BoundaryFlags, IntervalTimer, RunAtBoundary, Stage


class Reporting(Stage):
    """Reports metrics at an interval, with checkpoints, and after evaluations if the
    backend's policy includes them.

    Args:
        backend: Receives the reports.
        every_s: Seconds between reports.
        evaluation: Evaluates the model.
        checkpointing: Saves the checkpoints.
    """

    def __init__(
        self,
        backend: Backend,
        every_s: float,
        evaluation: Evaluation,
        checkpointing: Checkpointing,
    ) -> None:
        self._backend = backend
        self._evaluation = evaluation
        self._checkpointing = checkpointing
        self.timer = IntervalTimer(every_s)
        self._examples = 0
        self.reported_step = -1
        """Number of the optimizer step that was reported last; −1 before the first
        report of this start.
        """
        self.probed: tuple[float, float] | None = None
        """σ² and μ² of the last probe, for steps that have one gradient sample at S
        = 1.
        """

    def flags(self) -> int:
        return BoundaryFlags.REPORT if self.timer.due else BoundaryFlags.NONE

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        if run.reported:
            return None
        policy = self._backend.report_policy
        evaluated = self._evaluation.evaluated_step == run.state.iterations
        save = self._checkpointing.saves_with_report(flags) or (
            evaluated and policy.evaluations and policy.save_evaluations
        )
        # With a report at an interval the run would wait for a worker that is still
        # uploading.
        due = (
            flags & (BoundaryFlags.REPORT | BoundaryFlags.BUSY) == BoundaryFlags.REPORT
        )
        if save or due or (evaluated and policy.evaluations):
            run.report(save=save)
        return None

    def report(self, run: RunAtBoundary, *, save: bool) -> Path | None:
        """Report the state of the run, with a checkpoint if ``save``. Collective.

        Returns:
            The folder in which the checkpoint was written; None without one. The
            backend may have moved it.
        """
        folder = self._checkpointing.save(run) if save else None
        self._backend.report(run.step_report(), folder)
        self.reported_step = run.state.iterations
        self.timer.restart()
        self._examples = 0
        if save:
            self._checkpointing.restart_interval()
        return folder

    def count(self, examples: int) -> None:
        """Count the examples of an optimizer step."""
        self._examples += examples

    def metrics(
        self,
        step: StepResult,
        plan: StepPlan,
        *,
        loss: float,
        lr: float,
        progress: float,
    ) -> dict[str, Any]:
        """Return :func:`.step_metrics`, with the examples per second since the last
        report.
        """
        per_s = self._examples / max(self.timer.elapsed, 1e-9)
        return step_metrics(
            step,
            plan,
            loss=loss,
            lr=lr,
            progress=progress,
            examples_per_s=per_s,
            probed=self.probed,
        )
