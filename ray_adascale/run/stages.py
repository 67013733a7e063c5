"""The stages of a step boundary. All workers run them together, in this order:

1. :class:`AdaptiveBatch` chooses the batch of the next step.
2. :class:`Interrupt` ends this start of the run if the backend requests it.
3. :class:`Evaluation` evaluates the model, and ends the run if evaluations have stopped improving.
4. :class:`Preemption` saves a checkpoint if a worker is about to be preempted.
5. :class:`Checkpointing` begins a checkpoint in the background, or reports the previous one once it is written.
6. :class:`Reporting` reports metrics, with a checkpoint if one is due that the run waits for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..adaptive_batch import BatchSizeController
from ..batch_policy import BatchPlan
from ..config import EarlyStop
from ..optim.adascale import AdaScale
from .backend import Backend
from .saver import Boundary, Content, Saver
from .step import BoundaryFlags, IntervalTimer, RunAtBoundary, Stage
from .trace import TraceFile
from .train_state import INTERRUPTED, TrainState

__all__ = ["AdaptiveBatch", "Checkpointing", "Evaluation", "Interrupt", "Preemption", "Reporting"]

_log = logging.getLogger(__name__)

_NOTHING = BoundaryFlags(0)


class AdaptiveBatch(Stage):
    """Chooses the batch of the next step from the gradient noise.

    Args:
        controller: Decides, from the optimizer's averages.
        optimizer: The optimizer of the run.
        device: The device of this worker.
    """

    def __init__(self, controller: BatchSizeController, optimizer: AdaScale, device: torch.device) -> None:
        self.controller = controller
        self._optimizer = optimizer
        self._device = device

    def due_by(self, effective_steps: float) -> bool:
        return self.controller.due_by(effective_steps)

    def act(self, run: RunAtBoundary, flags: BoundaryFlags) -> str | None:
        plan = self.controller.after_step(
            run.effective_steps,
            self._optimizer.average_moments,
            time.monotonic() - run.boundary_at,
            self._from_rank_0,
        )
        if plan != run.plan:
            run.set_plan(plan)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"following": self.controller.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of a checkpoint's state, after the optimizer has loaded its own."""
        optimizer = self._optimizer
        self.controller.resume(state.get("following", {}), optimizer.effective_steps, optimizer.average_moments())

    def _from_rank_0(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        if self.controller.plan.world_size == 1:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.broadcast(shared, src=0)
        return tuple(shared.tolist())


class Interrupt(Stage):
    """Ends this start of the run if the backend requests it. A later start resumes the run."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def flags(self) -> BoundaryFlags:
        return BoundaryFlags.STOP if self._backend.stop_requested else _NOTHING

    def act(self, run: RunAtBoundary, flags: BoundaryFlags) -> str | None:
        # A stalled run ends for good: it must not be resumed.
        ends = BoundaryFlags.STOP in flags and BoundaryFlags.STALLED not in flags
        return INTERRUPTED if ends else None


class Evaluation(Stage):
    """Evaluates the model at multiples of an interval in τ, and ends the run if evaluations have stopped improving.

    Args:
        evaluate: Returns metrics of the bare model. None for a loop that evaluates by itself and records the metrics.
        module: The bare model.
        every: Effective steps between evaluations.
        early_stop: When to end the run; None for never.

    Attributes:
        evaluated_at: τ of the last evaluation; −1 before the first.
        best: The best evaluation's metric for ``early_stop``; None before the first.
        best_at: τ of the best evaluation; −1 before the first.
        number: Number of the optimizer step after which this start last evaluated the model; −1 before the first.
    """

    def __init__(
        self,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None,
        module: nn.Module,
        *,
        every: float,
        early_stop: EarlyStop | None,
    ) -> None:
        self._evaluate = evaluate
        self._module = module
        self._every = every
        self._early_stop = early_stop
        self.evaluated_at = -1.0
        self.best: float | None = None
        self.best_at = -1.0
        self.number = -1

    def multiples_by(self, effective_steps: float) -> float:
        """Return the number of multiples of the interval between the last evaluation and this τ."""
        return effective_steps // self._every - max(self.evaluated_at, 0.0) // self._every

    def due_by(self, effective_steps: float) -> bool:
        return self._evaluate is not None and self.multiples_by(effective_steps) > 0

    def flags(self) -> BoundaryFlags:
        return BoundaryFlags.STALLED if self.stalled is not None else _NOTHING

    def act(self, run: RunAtBoundary, flags: BoundaryFlags) -> str | None:
        if BoundaryFlags.STALLED in flags:
            return self._reason()
        if self.due_by(run.effective_steps):
            self._run(run)
        return None

    def finish(self, run: RunAtBoundary) -> None:
        """Evaluate at the end of the run, unless the last evaluation was at this τ."""
        if self._evaluate is not None and self.evaluated_at < run.effective_steps:
            self._run(run)

    def recorded(self, metrics: Mapping[str, Any], effective_steps: float) -> None:
        """Process metrics that were recorded at this τ. They count as an evaluation."""
        self.evaluated_at = effective_steps
        stop = self._early_stop
        if stop is None or stop.metric is None or stop.metric not in metrics:
            return
        if stop.better(metrics[stop.metric], self.best):
            self.best, self.best_at = metrics[stop.metric], effective_steps

    @property
    def stalled(self) -> str | None:
        """The reason to end the run early; None to go on. A function of the state in a checkpoint."""
        stop = self._early_stop
        if stop is None or self.best_at < 0 or self.evaluated_at - self.best_at < stop.patience:
            return None
        return self._reason()

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated_at": self.evaluated_at, "best": self.best, "best_at": self.best_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluated_at, self.best, self.best_at = state["evaluated_at"], state["best"], state["best_at"]

    def _reason(self) -> str:
        stop = self._early_stop
        assert stop is not None
        return f"no better {stop.metric} than {self.best:.4g} for {stop.patience:g} effective steps"

    def _run(self, run: RunAtBoundary) -> None:
        assert self._evaluate is not None
        training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad():
                metrics = self._evaluate(self._module)
        finally:
            self._module.train(training)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"evaluate returned a {type(metrics).__name__}. It must return a dict of metrics by name.")
        stop = self._early_stop
        if stop is not None and stop.metric not in metrics:
            raise ValueError(
                f"Invalid EarlyStop(metric={stop.metric!r}): evaluate returned {', '.join(map(repr, metrics)) or 'nothing'}. "
                "The metric must be one of them."
            )
        self.number = run.state.iterations
        run.record(**metrics)
        run.state.metrics.update(run.state.recorded)


class Preemption(Stage):
    """Saves a checkpoint, with a report, if there is a new preemption notice."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._notice: str | None = None
        self._timer = IntervalTimer(backend.preemption_poll_s)

    def flags(self) -> BoundaryFlags:
        return BoundaryFlags.POLL if self._timer.due else _NOTHING

    def act(self, run: RunAtBoundary, flags: BoundaryFlags) -> str | None:
        if BoundaryFlags.POLL not in flags:
            return None
        self._timer.restart()
        notice, before = self._backend.preemption_notice(), self._notice
        self._notice = notice
        if notice is not None and notice != before:
            step = run.state.iterations
            if self._backend.rank == 0:
                _log.warning("Preemption notice: %s. Writing a checkpoint at step %d.", notice, step)
            run.report(save=True)
        return None


class Checkpointing(Stage):
    """Saves checkpoints at an interval: in the background, at most one at a time, or with a report that the run waits for.

    Args:
        backend: Stores the checkpoints.
        train_state: The state to save.
        trace: The trace, saved with the state; None without one.
        every_s: Seconds between checkpoints.
        in_background: Whether checkpoints are written in the background.
        process_group: The workers, for tensors on the CPU too. Default: the default group.
    """

    def __init__(
        self,
        backend: Backend,
        train_state: TrainState,
        trace: TraceFile | None,
        *,
        every_s: float,
        in_background: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.saver = Saver(backend, process_group)
        self._train_state = train_state
        self._trace = trace
        self._in_background = in_background
        self._timer = IntervalTimer(every_s)

    def flags(self) -> BoundaryFlags:
        if self.saver.busy:
            return BoundaryFlags.BUSY
        return BoundaryFlags.CHECKPOINT if self.saver.in_flight or self._timer.due else _NOTHING

    def act(self, run: RunAtBoundary, flags: BoundaryFlags) -> str | None:
        if BoundaryFlags.BUSY in flags:
            return None
        if self.saver.in_flight:
            self.saver.finish()
        elif self._in_background and BoundaryFlags.CHECKPOINT in flags and not run.reported:
            self.begin(run)
        return None

    def begin(self, run: RunAtBoundary) -> None:
        """Begin a checkpoint in the background. Collective."""
        self.saver.begin(self._boundary(run), lambda: self._content(run.plan), run.step_report())
        self._timer.restart()

    def saves_with_report(self, flags: BoundaryFlags) -> bool:
        """Return whether a checkpoint that the run waits for is due."""
        due = BoundaryFlags.CHECKPOINT in flags and BoundaryFlags.BUSY not in flags
        return due and not self._in_background

    def save(self, run: RunAtBoundary) -> Path | None:
        """Write this worker's share of a checkpoint and seal the checkpoint. Collective.

        Returns:
            The checkpoint's folder, not reported yet; None if the backend keeps no checkpoints.
        """
        return self.saver.save(self._boundary(run), lambda: self._content(run.plan))

    def saved(self) -> None:
        """Begin a new interval after a checkpoint was reported."""
        self._timer.restart()

    def _boundary(self, run: RunAtBoundary) -> Boundary:
        return Boundary(run.state.iterations, run.effective_steps, run.schedule.lrs[0])

    def _content(self, plan: BatchPlan) -> Content:
        files = {} if self._trace is None else self._trace.files()
        return self._train_state.tensors(), self._train_state.state(plan), files


class Reporting(Stage):
    """Reports metrics at an interval, with checkpoints, and after evaluations if the backend's policy includes them.

    Args:
        backend: Receives the reports.
        every_s: Seconds between reports.
        evaluation: Evaluates the model.
        checkpointing: Saves the checkpoints.
    """

    def __init__(self, backend: Backend, every_s: float, evaluation: Evaluation, checkpointing: Checkpointing) -> None:
        self._backend = backend
        self._evaluation = evaluation
        self._checkpointing = checkpointing
        self._timer = IntervalTimer(every_s)
        self._examples = 0
        self.number = -1
        """Number of the optimizer step that was reported last; −1 before the first report of this start."""

    def flags(self) -> BoundaryFlags:
        return BoundaryFlags.REPORT if self._timer.due else _NOTHING

    def act(self, run: RunAtBoundary, flags: BoundaryFlags) -> str | None:
        if run.reported:
            return None
        policy, evaluated = self._backend.report_policy, self._evaluation.number == run.state.iterations
        save = self._checkpointing.saves_with_report(flags) or (
            evaluated and policy.evaluations and policy.save_evaluations
        )
        # With a report at an interval the run would wait for a worker that is still uploading.
        due = BoundaryFlags.REPORT in flags and BoundaryFlags.BUSY not in flags
        if save or due or (evaluated and policy.evaluations):
            self.report(run, save=save)
        return None

    def report(self, run: RunAtBoundary, *, save: bool) -> None:
        """Report the state of the run, with a checkpoint if ``save``. Collective."""
        folder = run.save_checkpoint() if save else None
        self._backend.report(run.step_report(), folder)
        self.number = run.state.iterations
        self._timer.restart()
        self._examples = 0
        if save:
            self._checkpointing.saved()

    def count(self, examples: int) -> None:
        """Count the examples of an optimizer step."""
        self._examples += examples

    @property
    def examples_per_s(self) -> float:
        """Examples per second over all workers, since the last report."""
        return self._examples / max(self._timer.elapsed, 1e-9)
