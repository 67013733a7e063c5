"""The replay of a run that changes its number of workers: time and worker hours by the model of a step's seconds, without Ray."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..batch_policy import BatchChoice, BatchController, BatchPlan, BatchPolicy, Position
from ..throughput import Throughput
from ..worker_policy import DECIDE_S, Situation, WorkerController

_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run on one number of workers.

    Attributes:
        workers: The number.
        effective_steps: τ at its beginning.
        hours: Time of the run at its beginning.
        reason: Why it begins, in words.
    """

    workers: int
    effective_steps: float
    hours: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class ReplayedRun:
    """What a replayed run takes.

    Attributes:
        hours: Its time, restarts included.
        worker_hours: Hours of all workers. A restart counts on the larger of its two numbers.
        parts: The numbers of workers, in order.
    """

    hours: float
    worker_hours: float
    parts: tuple[Part, ...]


class WorkerClock(BatchChoice):
    """Counts time and worker hours of a replayed run, and changes its workers as a decision says.

    Args:
        policy: The batch of a number of workers.
        workers: The number at the beginning.
        throughput: Seconds of a step.
        total_steps: T.
        decide: The decision; None for a fixed number.
        reason: Why the run begins on this number, in words.
        restart_s: Seconds of a restart.
        decide_s: Seconds between two decisions.
        stride: Optimizer steps in each stride of the replay.
        window: Effective steps that the averages of σ² and μ² reach back over, for a policy that changes the batch.
        largest: Examples of the largest sensible batch, for such a policy.

    Attributes:
        plan: The plan of the next step.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        workers: int,
        *,
        throughput: Throughput,
        total_steps: float,
        decide: WorkerController | None = None,
        reason: str = "",
        restart_s: float = 0.0,
        decide_s: float = DECIDE_S,
        stride: float = 1.0,
        window: float = math.inf,
        largest: float = math.inf,
    ) -> None:
        self._policy, self._total = policy, total_steps
        self._window, self._largest = window, largest
        self._throughput, self._stride = throughput, stride
        self._decide, self._restart_s, self._decide_s = decide, restart_s, decide_s
        self._batch = self._controller(workers)
        self.plan = policy.plan(workers) if self._batch is None else self._batch.plan
        self._parts = [Part(workers=workers, effective_steps=0.0, hours=0.0, reason=reason)]
        self._seconds = self._worker_seconds = 0.0
        self._steps = self._since = self._decided = self._tau = 0.0
        self._beyond = 0.0, 0  # seconds of the last step after τ = T, and its workers

    def _controller(self, workers: int) -> BatchController | None:
        return self._policy.controller(workers, total_steps=self._total, window=self._window, largest=self._largest)

    def after_step(self, at: Position, moments: Callable[[], tuple[float, float]]) -> BatchPlan:
        plan, tau = self.plan, at.effective_steps
        step_s = plan.seconds(self._throughput)
        taken_s = step_s * self._stride
        self._seconds += taken_s
        self._worker_seconds += taken_s * plan.world_size
        self._steps += self._stride
        self._beyond = taken_s * max(tau - self._total, 0.0) / (tau - self._tau), plan.world_size
        self._tau = tau
        if tau >= self._total:
            return plan
        if self._batch is not None:
            self.plan = self._batch.after_step(at, moments)
        if self._decide is not None and self._seconds - self._decided >= self._decide_s:
            self._decided = self._seconds
            self._decide.times.add(plan.world_size, step_s / plan.accumulation)
            self._follow(self._decide, at, moments() if plan.measures_noise else (math.nan, math.nan))
        return self.plan

    def _follow(self, decide: WorkerController, at: Position, moments: tuple[float, float]) -> None:
        now = self.plan.world_size
        decision = decide.decide(
            Situation(
                workers=now,
                asked=now,
                effective_steps=at.effective_steps,
                total_steps=self._total,
                sigma2=moments[0],
                mu2=moments[1],
                batch=self.plan.global_batch_size,
                steps=int(self._steps),
                stay_s=self._seconds - self._since,
                restart_s=self._restart_s,
                changes=len(self._parts) - 1,
            )
        )
        if decision.workers == now:
            return
        before, self._batch = self._batch, self._controller(decision.workers)
        if before is not None and self._batch is not None:
            self._batch.resume(before.state(), at, moments)
        self.plan = self._policy.plan(decision.workers) if self._batch is None else self._batch.plan
        self._parts.append(
            Part(
                workers=decision.workers,
                effective_steps=at.effective_steps,
                hours=self._seconds / _HOUR,
                reason=decision.reason,
            )
        )
        self._seconds += self._restart_s
        self._worker_seconds += self._restart_s * max(now, decision.workers)
        self._steps, self._since = 0.0, self._seconds

    def ended(self) -> ReplayedRun:
        """Return what the run took, without the part of its last step beyond T."""
        beyond_s, workers = self._beyond
        return ReplayedRun(
            hours=(self._seconds - beyond_s) / _HOUR,
            worker_hours=(self._worker_seconds - beyond_s * workers) / _HOUR,
            parts=tuple(self._parts),
        )
