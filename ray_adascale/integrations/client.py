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
from ..optim.step import StepEnd, StepShape
from ..recipe import NoiseProbe, Recipe
from ..run.base_run import BaseResult, freeze, momentum_of
from ..run.metrics import step_metrics
from ..run.tau_schedule import TauSchedule
from ..run.trace import Trace, read_trace

__all__ = ["RecipeRecorder", "StepWatch", "early_step_end", "follow_batch", "with_clients_batch"]

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
    schedule.plan = plan = replace(plan, accumulation=passes, global_batch_size=batch)
    adascale.set_batch(scale=plan.scale, passes=passes)
    return True


def early_step_end(adascale: AdaScale, ends: Callable[[], bool]) -> StepEnd:
    """Return a :data:`StepEnd` for a client that may step before the declared passes are complete, as at the end of an epoch.

    The client divides the loss by the declared number of passes in every step.

    Args:
        adascale: The optimizer.
        ends: Whether the client steps after the pass that begins.
    """

    def step_end(number: int) -> StepShape | None:
        shape = adascale.shape
        return shape.shortened(number, loss_divisor=shape.loss_divisor) if ends() else None

    return step_end


class StepWatch:
    """Watches the optimizer steps that a client takes: for its log, and for the trace that ``ray-adascale report`` reads.

    Args:
        schedule: From :func:`ray_adascale.attach`.
        trace: The trace's file, written by rank 0; on resumption it is cut back to the step that the client goes on from.
            None: none.
    """

    def __init__(self, schedule: TauSchedule, trace: str | Path | None = None) -> None:
        assert isinstance(schedule.optimizer, AdaScale)
        self._schedule, self._adascale = schedule, schedule.optimizer
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._path = None if trace is None or not first else Path(trace)
        self._trace: Trace | None = None
        self._row: dict[str, Any] | None = None
        self._attempt = 0
        self._progress = 0.0  # Σ r
        self._position = 0  # examples before this start
        self._counts = True  # whether the step under way is one
        self._lr = schedule.get_last_lr()
        self._plan = self._plan_of_step()
        self._examples, self._since = 0, time.monotonic()
        self._adascale.register_step_pre_hook(lambda *_: self._before())
        self._adascale.register_step_post_hook(lambda *_: self._after())

    def _plan_of_step(self) -> BatchPlan:
        """Return how the batch of the coming step is made up; the last step of an epoch may have fewer passes."""
        plan = self._schedule.plan
        assert plan is not None
        return replace(plan, global_batch_size=round(self._adascale.scale * plan.base_batch_size))

    def metrics(self) -> dict[str, float]:
        """The last step's gain, scale, τ, noise scale and efficiency. On a GPU it waits for that step."""
        told = self._metrics()
        return {key: told[key] for key in LOGGED}

    def note(self, **metrics: Any) -> None:
        """Add the client's own numbers (``loss``) to the row of the last step."""
        if self._row is not None:
            self._row.update(metrics)

    def close(self) -> None:
        """The run has ended, or ends here for now."""
        self._write()
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
            lr=float(self._lr[0]),
            progress=self._progress,
            examples_per_s=self._examples / seconds if seconds > 0 else math.nan,
            probed=None,
        )

    def _before(self) -> None:
        self._counts = not called_to_make_state(self._adascale)
        self._lr = self._schedule.get_last_lr()  # what the coming step is taken with, before the gain
        self._plan = self._plan_of_step()
        self._write()

    def _after(self) -> None:
        if not self._counts:
            return
        self._examples += self._plan.global_batch_size
        if self._path is None or self._adascale.last_step.skipped:
            return
        step = self._adascale.steps
        self._open(step)
        self._progress += self._adascale.last_step.gain
        row = {"step": step, "attempt": self._attempt, "position": self._position + self._examples}
        self._row = {**row, **self._metrics()}

    def _open(self, step: int) -> None:
        """Open the trace with its first step of this start; a trace that is there is cut back to the steps before it."""
        if self._trace is not None or self._path is None:
            return
        rows = read_trace(self._path) if self._path.exists() else []
        if rows:
            self._attempt = 1 + max(int(row.get("attempt", 0)) for row in rows)
            self._path.unlink()
        self._trace = Trace(self._path, keep=40_000)
        kept = [row for row in rows if row["step"] < step]  # steps that were taken since the checkpoint are taken again
        for row in kept:
            self._trace.append(row)
        if kept:
            self._progress, self._position = kept[-1]["progress"], kept[-1]["position"]
        elif step > 1:  # resumed without a trace: as if all steps had been like this one, and under AdaScale's rule
            self._progress = self._adascale.effective_steps - self._adascale.last_step.gain
            self._position = (step - 1) * self._plan.global_batch_size

    def _write(self) -> None:
        row, self._row = self._row, None
        if self._trace is not None and row is not None:
            self._trace.append(row)
            self._trace.flush()


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
