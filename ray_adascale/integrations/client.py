"""What the adapters share: the client's batch in the settings, what is told of each step, and the recipe of a base run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from .._torch import called_to_make_state
from .._warn import warn_at_user
from ..config import AdaScaleConfig, BatchPlan
from ..measure.probe import probe_noise
from ..optim.adascale import AdaScale
from ..recipe import NoiseProbe, Recipe
from ..run.base_run import BaseResult, freeze, momentum_of
from ..run.metrics import step_metrics
from ..run.step import Step
from ..run.tau_schedule import TauSchedule
from ..run.trace import TraceFile, read_trace

__all__ = ["RecipeRecorder", "StepLog", "follow_batch", "with_clients_batch"]

LOGGED = ("gain", "scale", "effective_steps", "noise_scale", "efficiency")
"""What goes into a client's own log of a step."""


def with_clients_batch(
    config: AdaScaleConfig,
    *,
    accumulation: tuple[int, str],
    per_worker_batch_size: tuple[int | None, str],
    dataset: Any,
) -> AdaScaleConfig:
    """The settings with what the client knows of its batch.

    Args:
        config: As given by the user.
        accumulation: Passes of a step, and where the client has them from.
        per_worker_batch_size: Examples of a pass on one worker, None where the client can't say; and where from.
        dataset: For the length of an epoch, where it has one and the settings don't.

    Raises:
        ValueError: The settings say otherwise.
    """
    (passes, their_passes), (batch, their_batch) = accumulation, per_worker_batch_size
    if config.accumulation not in (1, passes):
        raise ValueError(
            f"Invalid AdaScaleConfig(accumulation={config.accumulation}): {their_passes} says {passes}. Leave it out."
        )
    mine = config.per_worker_batch_size
    if mine is None and batch is None:
        raise ValueError(
            "AdaScaleConfig(per_worker_batch_size=...) is needed: the dataloader has no batch size of its own to take."
        )
    if mine is not None and batch is not None and mine != batch:
        raise ValueError(
            f"Invalid AdaScaleConfig(per_worker_batch_size={mine}): {their_batch} says {batch}. Leave it out."
        )
    length = config.dataset_length
    if length is None and isinstance(dataset, Sized):
        length = len(dataset)
    return replace(config, accumulation=passes, per_worker_batch_size=batch or mine, dataset_length=length)


def follow_batch(schedule: TauSchedule, *, passes: int, per_worker_batch_size: int) -> bool:
    """Set S and n to the batch that the client makes from here on. At a step boundary, on all workers.

    Args:
        schedule: From :func:`ray_adascale.attach`.
        passes: Backward passes of a step on one worker.
        per_worker_batch_size: Examples of a pass on one worker.

    Returns:
        Whether the batch is another one than before.

    Raises:
        ValueError: The batch is smaller than the base batch.
    """
    adascale, plan = schedule.optimizer, schedule.plan
    assert isinstance(adascale, AdaScale)
    assert plan is not None
    batch = per_worker_batch_size * plan.world_size * passes
    if (batch, passes) == (plan.global_batch_size, plan.accumulation):
        return False
    if batch < plan.base_batch_size:
        raise ValueError(
            f"The batch is now {batch} examples ({per_worker_batch_size} per worker × {plan.world_size} workers × {passes} "
            f"passes), fewer than the base batch size of {plan.base_batch_size}, so the scale would be below 1. Raise the "
            "passes of a step, or take more workers."
        )
    if passes != plan.accumulation:
        adascale.set_num_gradients_to_accumulate(passes)
    schedule.plan = plan = replace(plan, accumulation=passes, global_batch_size=batch)
    adascale.set_scale(plan.scale)
    return True


class StepLog:
    """Follows the optimizer steps that a client takes: metrics for the client's log, and the trace for ``ray-adascale report``.

    Args:
        schedule: From :func:`ray_adascale.attach`.
        trace: The trace's file, written by rank 0. On resumption the rows after the client's checkpoint are dropped. None
            for no trace.
    """

    def __init__(self, schedule: TauSchedule, trace: str | Path | None = None) -> None:
        assert isinstance(schedule.optimizer, AdaScale)
        self._schedule, self._adascale = schedule, schedule.optimizer
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._path = None if trace is None or not first else Path(trace)
        self._trace: TraceFile | None = None  # made with the first step, which shows where the client resumes
        self._attempt = 0
        self._progress = 0.0  # Σ r
        self._position = 0  # examples before this start
        self._examples, self._since = 0, time.monotonic()
        self._counts = True  # False for a call of step() that only makes a state
        self._lr, self._tau = schedule.get_last_lr()[0], schedule.effective_steps
        self._plan = self._plan_of_step()
        self._adascale.register_step_pre_hook(lambda *_: self._before())
        self._adascale.register_step_post_hook(lambda *_: self._after())

    def _plan_of_step(self) -> BatchPlan:
        """Return the batch of the coming step. The last step of an epoch may have fewer passes than the others."""
        plan = self._schedule.plan
        assert plan is not None
        return replace(plan, global_batch_size=round(self._adascale.scale * plan.base_batch_size))

    def metrics(self) -> dict[str, float]:
        """Return the last step's gain, scale, τ, noise scale and efficiency. On a GPU it waits for that step."""
        metrics = self._metrics()
        return {key: metrics[key] for key in LOGGED}

    def record(self, **metrics: Any) -> None:
        """Add the client's own numbers (``loss``) to the trace's row of the last step."""
        if self._trace is not None:
            self._trace.recorded(metrics)

    def close(self) -> None:
        """Write the last row. The client has ended, or will resume."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        self._examples, self._since = 0, time.monotonic()

    def _metrics(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._since
        return step_metrics(
            self._adascale,
            self._plan,
            loss=math.nan,
            lr=float(self._lr),
            progress=self._progress,
            examples_per_s=self._examples / seconds if seconds > 0 else math.nan,
            probed=None,
        )

    def _before(self) -> None:
        self._counts = not called_to_make_state(self._adascale)
        self._lr = self._schedule.get_last_lr()[0]  # the coming step's, before the gain
        self._plan = self._plan_of_step()
        if self._trace is not None:
            self._trace.write_row()
        if self._path is not None:
            self._tau = self._adascale.effective_steps

    def _after(self) -> None:
        if not self._counts:
            return
        self._examples += self._plan.global_batch_size
        if self._path is None:
            return
        last = self._adascale.last_step
        if last.skipped:
            return
        number = self._adascale.steps
        if self._trace is None:
            self._trace = self._resume(self._path, number)
        self._progress += last.gain
        metrics = self._metrics()
        place = {"step": number, "attempt": self._attempt, "position": self._position + self._examples}
        self._trace.after_step(
            Step(
                number=number,
                plan=self._plan,
                total_steps=self._schedule.base_schedule.total_steps,
                tau_before=self._tau,
                tau=last.effective_steps,
                gain=last.gain,
                skipped=False,
                sigma2=last.sigma2,
                mu2=last.mu2,
                metrics=metrics,
                row={**place, **metrics},
            )
        )

    def _resume(self, path: Path, number: int) -> TraceFile:
        """Return the trace with the rows before this step, the first of this start; later rows are taken again."""
        rows = read_trace(path) if path.exists() else []
        path.unlink(missing_ok=True)
        trace = TraceFile(path, keep=40_000, flush=True)
        kept = [row for row in rows if row["step"] < number]
        trace.resume(kept)
        if rows:
            self._attempt = 1 + max(int(row.get("attempt", 0)) for row in rows)
        if kept:
            self._progress, self._position = kept[-1]["progress"], kept[-1]["position"]
        elif number > 1:  # without a trace of the steps before: as if all were like this one, under AdaScale's rule
            last = self._adascale.last_step
            self._progress = last.effective_steps - last.gain
            self._position = (number - 1) * self._plan.global_batch_size
        return trace


class RecipeRecorder:
    """Records the recipe of a base run that a client makes: one worker at the base batch, and noise probed as it goes.

    A probe spends one more forward and backward pass over the batch, in halves, and leaves everything as it was: the run is
    the same to the bit as without.

    Args:
        loss_fn: ``loss_fn(model, batch)``, the mean loss over the batch's examples, of the bare model.
        probe_every: Optimizer steps between two probes.
    """

    def __init__(self, loss_fn: Callable[[nn.Module, Any], Tensor], probe_every: int = 20) -> None:
        if isinstance(probe_every, bool) or not isinstance(probe_every, int) or probe_every < 1:
            raise ValueError(f"Invalid {probe_every=}. Must be an integer of at least 1.")
        self._loss_fn, self._probe_every = loss_fn, probe_every
        self._schedule: TauSchedule | None = None
        self._config: AdaScaleConfig | None = None
        self._momentum: float | None = None
        self.forget()

    def forget(self) -> None:
        """The adapter's, before a run that begins anew: drop the probes of the run before."""
        self._noise: list[NoiseProbe] = []
        self._started = time.monotonic()

    def begin(self, schedule: TauSchedule, config: AdaScaleConfig) -> None:
        """The adapter's: the run that is recorded.

        Raises:
            ValueError: It is no base run.
        """
        self.check_base_run(schedule)
        self._schedule, self._config = schedule, config
        self._momentum = momentum_of(schedule.optimizer)

    def check_base_run(self, schedule: TauSchedule) -> None:
        """The adapter's, where the batch changes in a run.

        Raises:
            ValueError: It is no base run.
        """
        plan = schedule.plan
        assert plan is not None
        if plan.scale != 1 or plan.num_samples != 1:
            raise ValueError(
                f"A recipe is recorded of a base run, with one worker and one pass at the base batch; this one has scale "
                f"{plan.scale:g}, {plan.world_size} workers and {plan.accumulation} passes."
            )

    def before_step(self, model: nn.Module, batch: Any) -> None:
        """The adapter's, with each batch before it is trained on: probes it where that is due."""
        assert self._schedule is not None
        tau = self._schedule.effective_steps
        if tau % self._probe_every or (self._noise and self._noise[-1].effective_steps >= tau):
            return
        trained = [p for group in self._schedule.optimizer.param_groups for p in group["params"] if p.requires_grad]
        probed = probe_noise(model, self._loss_fn, batch, parameters=trained)
        if probed is None:
            warn_at_user("The batch can't be cut in two, so its noise is not probed: the recipe will make no forecast.")
        elif all(map(math.isfinite, probed)):
            self._noise.append(NoiseProbe(effective_steps=tau, sigma2=probed[0], mu2=probed[1]))

    def recipe(
        self,
        hyperparameters: Mapping[str, Any],
        *,
        metric: str,
        mode: Literal["min", "max"],
        score: float,
        workload: Callable[..., Any] | type,
    ) -> Recipe:
        """The recipe, once the run has reached T.

        Args:
            hyperparameters: What optimizer and schedule were built from, JSON values.
            metric: What the run is judged by.
            mode: Whether that is to be small or large.
            score: Its value at the end.
            workload: The function or class that builds the model, for its name.

        Raises:
            ValueError: The run has not ended.
        """
        if self._schedule is None or self._config is None or not self._schedule.finished:
            tau = 0.0 if self._schedule is None else self._schedule.effective_steps
            raise ValueError(f"The base run has not reached its total steps: it is at effective step {tau:g}.")
        return freeze(
            BaseResult(
                metric=metric,
                mode=mode,
                score=float(score),
                schedule=self._schedule.base_schedule,
                noise=self._noise,
                momentum=self._momentum,
            ),
            workload=workload,
            hyperparameters=hyperparameters,
            config=self._config,
            search={"search_alg": None, "wall_s": time.monotonic() - self._started},
        )
