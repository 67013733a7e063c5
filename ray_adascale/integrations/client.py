"""Shared parts of the adapters: the client's batch in the settings, metrics and
trace of its steps, the recipe of a base run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset

from .._errors import check_count
from .._files import on_this_machine
from .._torch import called_to_make_state
from .._warn import warn_at_user
from ..batch import StepPlan
from ..chain import largest_part
from ..config import AdaScaleConfig, read_settings
from ..gain import advanced
from ..measure.probe import BatchSamples
from ..optim.adascale import AdaScaleOptimizer
from ..optim.rules import name_of
from ..optim.step_sums import StepEnd
from ..optim.tau_schedule import TauSchedule
from ..recipe import NoiseProbe, Recipe
from ..run.base.base_noise import ProbeSeries, noise_steps
from ..run.base.base_run import BaseResult, Momentum, freeze, momentum_of
from ..run.build_warnings import class_name
from ..run.observe.metrics import SHORT_STEP, step_metrics
from ..run.observe.step import Step
from ..run.observe.trace import Trace, files_of, joined

LOGGED = ("gain", "scale", "effective_steps", "noise_scale", "efficiency")
"""The metrics of a step for the client's log."""


_COPY = "Give a folder here, and copy it."


@dataclass(frozen=True)
class Epoch:
    """An epoch of a client's loader.

    Attributes:
        examples: Over all workers; None if unknown.
        drop_last: Whether the loader leaves out a last batch that is not full.
        is_rounded: Whether the last batch counts as full, since the loader's own batch
            sampler has a length in batches alone.
    """

    examples: int | None
    drop_last: bool = False
    is_rounded: bool = False

    def base_length(self, base_batch_size: int) -> int | None:
        """Return the examples of an epoch of the base run, a multiple of its batch: its
        last step has a whole batch, or takes what is left.
        """
        if self.examples is None:
            return None
        steps = self.examples / base_batch_size
        whole = math.floor(steps) if self.drop_last else math.ceil(steps)
        return max(whole, 1) * base_batch_size


def epoch_of(loader: Any, *, workers: int = 1) -> Epoch:
    """Return the epoch of a ``DataLoader``.

    Args:
        loader: The dataloader; one without a sampler has no known epoch.
        workers: Workers that each have such a loader of their own. 1 if it is for all.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    # Accelerate's share for one worker of the batches for all.
    batches = getattr(batches, "batch_sampler", batches)
    sampler: Any = getattr(batches, "sampler", None)
    drop_last = bool(getattr(batches, "drop_last", False))
    dataset = getattr(loader, "dataset", None)
    examples = None
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "dataset"):
        examples = len(sampler.dataset)  # before it is shared out
    elif isinstance(dataset, IterableDataset):
        examples = _length_of(dataset)
    # Each worker's sampler may be of its share of the data or of all of it.
    elif workers > 1:
        examples = None
    elif type(batches) is BatchSampler and isinstance(sampler, Sized):
        examples = len(sampler)
    elif hasattr(batches, "__len__") and getattr(batches, "batch_size", None):
        return Epoch(len(batches) * batches.batch_size, drop_last, is_rounded=True)
    return Epoch(examples, drop_last)


def _length_of(stream: Any) -> int | None:
    """Return the examples of a stream for all workers; None if they are unknown."""
    if type(stream).__name__ == "IterableDatasetShard":  # Accelerate's, of one worker
        stream = stream.dataset
    return len(stream) if isinstance(stream, Sized) else None


def with_clients_batch(
    config: AdaScaleConfig,
    *,
    accumulation: tuple[int, str],
    per_worker_batch_size: tuple[int | None, str],
    epoch: Epoch,
    recipe: Recipe | None = None,
) -> AdaScaleConfig:
    """Return the settings with the client's batch.

    Args:
        config: The user's settings.
        accumulation: Passes of a step, and the client's setting that they come from.
        per_worker_batch_size: Examples of a pass on one worker, None if the client has
            no such number; and the client's setting that it comes from.
        epoch: What the client's loader reads in an epoch, unless the settings have a
            length. A step of the base run ends with it, as in the client's loop.
        recipe: The result of a search. The steps of its base run may go on from one
            epoch into the next.

    Raises:
        ValueError: The settings contradict the client.
    """
    config = read_settings(config)
    clients = {
        "accumulation": accumulation,
        "per_worker_batch_size": per_worker_batch_size,
    }
    for name, (theirs, setting) in clients.items():
        mine = getattr(config, name)
        default = getattr(AdaScaleConfig, name)
        if theirs is not None and mine not in (default, theirs):
            raise ValueError(
                f"Invalid AdaScaleConfig({name}={mine}). Must be {theirs}, as "
                f"{setting}, or left out."
            )
    batch = per_worker_batch_size[0] or config.per_worker_batch_size
    if batch is None:
        raise ValueError(
            "Missing AdaScaleConfig(per_worker_batch_size=...): the dataloader has no "
            "batch size."
        )
    length = config.dataset_length
    if length is None:
        length = base_length_of(config, epoch, recipe)
    return replace(
        config,
        accumulation=accumulation[0],
        per_worker_batch_size=batch,
        dataset_length=length,
    )


def base_length_of(
    config: AdaScaleConfig, epoch: Epoch, recipe: Recipe | None
) -> int | None:
    """Return the examples of an epoch of the base run; None if they are unknown."""
    base = config.base_batch_size
    if recipe is not None:
        base = recipe.base_batch_size
    if base is None or epoch.examples is None:
        return epoch.examples
    if recipe is not None and recipe.base_steps_per_epoch == epoch.examples / base:
        return epoch.examples
    epoch = replace(epoch, drop_last=epoch.drop_last or config.drop_last)
    return epoch.base_length(base)


def parts_of(schedule: TauSchedule | None) -> tuple[AdaScaleOptimizer, StepPlan]:
    """Return the optimizer and the batch of a schedule from
    :func:`ray_adascale.attach`.
    """
    assert schedule is not None
    assert isinstance(schedule.optimizer, AdaScaleOptimizer)
    assert schedule.plan is not None
    return schedule.optimizer, schedule.plan


def follow_batch(
    schedule: TauSchedule, *, passes: int, per_worker_batch_size: int
) -> bool:
    """Set S and n to those of the client's next batches. At a step boundary, on all
    workers.

    Args:
        schedule: From :func:`ray_adascale.attach`.
        passes: Backward passes of a step on one worker.
        per_worker_batch_size: Examples of a pass on one worker.

    Returns:
        Whether the batch has changed.

    Raises:
        ValueError: The batch is smaller than the base batch.
    """
    adascale, plan = parts_of(schedule)
    batch = per_worker_batch_size * plan.workers * passes
    if (batch, passes) == (plan.global_batch_size, plan.passes):
        return False
    if batch < plan.base_batch_size:
        raise ValueError(
            f"The batch is now {batch} examples ({per_worker_batch_size} per worker × "
            f"{plan.workers} workers × {passes} passes), fewer than the base batch "
            f"size of {plan.base_batch_size}, so the scale would be below 1. Use more "
            "passes or more workers."
        )
    schedule.plan = plan = replace(plan, passes=passes, global_batch_size=batch)
    adascale.set_plan(plan)
    return True


def require_samples(schedule: TauSchedule, write: str) -> None:
    """Check that the gain of the steps to come can be measured.

    Args:
        schedule: From :func:`ray_adascale.attach`.
        write: The client's settings for two passes, with ``{half}`` for the examples of
            each.

    Raises:
        ValueError: A step has one gradient sample at S ≠ 1.
    """
    adascale, plan = parts_of(schedule)
    if adascale.current.lacks_samples:
        half = plan.global_batch_size // 2
        raise ValueError(
            f"One gradient sample a step at scale {plan.scale:g} tells nothing of the "
            "noise, so the gain is unknown. Make two backward passes of half the "
            f"size: {write.format(half=half)}."
        )


def early_step_end(adascale: AdaScaleOptimizer, ends: Callable[[], bool]) -> StepEnd:
    """Return a :data:`StepEnd` for a client that may step before the declared passes
    are complete, as at the end of an epoch.

    The client divides the loss by the declared number of passes in every step, so its
    mean over a shorter step is too small, and is corrected. Where the loop has set
    :attr:`AdaScaleOptimizer.sample_weights`, its losses are shares of the whole step's
    mean already, and are left as they are.

    Args:
        adascale: The optimizer.
        ends: Whether the client steps after the pass that begins.
    """

    def step_end(number: int) -> StepPlan | None:
        if not ends():
            return None
        plan = adascale.plan
        if adascale.sample_weights is not None:
            return plan.shortened(number)
        return plan.shortened(number, loss_divisor=plan.passes)

    return step_end


class StepLog:
    """Logs the optimizer steps of a client: metrics for the client's log, and the trace
    for ``ray-adascale report``.

    Args:
        schedule: From :func:`ray_adascale.attach`.
        trace: Folder of the run, in which rank 0 writes the trace. None for no trace.
    """

    def __init__(self, schedule: TauSchedule, trace: str | Path | None = None) -> None:
        self._schedule, (self._adascale, self._plan) = schedule, parts_of(schedule)
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._folder = (
            None if trace is None or not first else on_this_machine(trace, _COPY)
        )
        # Opened at the first step, because its number shows where the client resumed.
        self._trace: Trace | None = None
        self._progress = 0.0  # Σ r
        self._position = 0  # examples of earlier starts
        self._examples, self._since = 0, time.monotonic()
        # False for a call of step() that only creates the optimizer's state
        self._counts = True
        self._lr = schedule.get_last_lr()[0]
        self._tau = schedule.effective_steps
        self._update()
        self._adascale.register_step_pre_hook(lambda *_: self._before())
        self._adascale.register_step_post_hook(lambda *_: self._after())
        # Lightning runs the last pass inside step(), as its closure, so the step's
        # shape is known only as the update begins.
        self._adascale.wrapped.register_step_pre_hook(lambda *_: self._update())

    @property
    def lr(self) -> float:
        """The last step's learning rate of the first parameter group, before the gain;
        before a step, that of the next one.
        """
        return float(self._lr)

    def metrics(self) -> dict[str, float]:
        """Return the last step's gain, scale, τ, noise scale and efficiency. On a
        GPU this waits for the step.
        """
        metrics = self._metrics()
        return {key: metrics[key] for key in LOGGED}

    def record(self, **metrics: Any) -> None:
        """Add the client's metrics (``loss``) to the last step's row in the trace."""
        if self._trace is not None:
            self._trace.after_record(metrics)

    def close(self) -> None:
        """Write the last row of the trace."""
        if self._trace is not None:
            self._trace.after_loop()
            self._trace = None
        self._examples, self._since = 0, time.monotonic()

    def _metrics(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._since
        return step_metrics(
            self._adascale.last_step,
            self._plan,
            loss=math.nan,
            lr=self.lr,
            progress=self._progress,
            examples_per_s=self._examples / seconds if seconds > 0 else math.nan,
            probed=None,
        )

    def _before(self) -> None:
        self._counts = not called_to_make_state(self._adascale)
        if not self._counts:
            return
        # of the coming step, before the gain
        self._lr = self._schedule.get_last_lr()[0]
        self._update()
        if self._trace is not None:
            self._trace.flush()
        if self._folder is not None:
            self._tau = self._adascale.effective_steps

    def _update(self) -> None:
        """Set the batch of the coming step. The last step of an epoch may have fewer
        passes than others.
        """
        if self._counts:
            plan = parts_of(self._schedule)[1]
            self._plan = replace(
                plan,
                global_batch_size=round(self._adascale.scale * plan.base_batch_size),
            )

    def _after(self) -> None:
        if not self._counts:
            return
        self._examples += self._plan.global_batch_size
        if self._folder is None:
            return
        last = self._adascale.last_step
        if last.skipped:
            return
        number = self._adascale.steps
        if self._trace is None:
            self._trace = self._resume(self._folder, number)
        self._progress = advanced(self._progress, last.gain)
        metrics = self._metrics()
        place: dict[str, Any] = {
            "step": number,
            "attempt": self._trace.number,
            "position": self._position + self._examples,
        }
        if self._plan != self._schedule.plan:  # fewer passes than declared
            place[SHORT_STEP] = True
        self._trace.after_step(
            Step(
                number=number,
                plan=self._plan,
                total_steps=self._schedule.base_schedule.total_steps,
                tau_before=self._tau,
                result=last,
                metrics=metrics,
                row={**place, **metrics, "rule": name_of(self._adascale.rule)},
            )
        )

    def _resume(self, folder: Path, number: int) -> Trace:
        """Open the trace of this start. ``number`` is that of the start's first
        step.
        """
        trace = Trace(folder, self._schedule.base_schedule.total_steps)
        trace.first = {"optimizer": class_name(largest_part(self._adascale.wrapped))}
        before = [row for row in joined(files_of(folder)) if row["step"] < number]
        if before:
            self._progress = before[-1]["progress"]
            self._position = before[-1]["position"]
        # No rows of earlier steps: assume the batch of this step and AdaScale's rule
        # for all of them.
        elif number > 1:
            last = self._adascale.last_step
            self._progress = last.effective_steps - last.gain
            self._position = (number - 1) * self._plan.global_batch_size
        return trace


class RecipeRecorder:
    """Records the recipe of a client's base run: one worker at the base batch, with
    probes of the noise.

    A probe compares the gradients of four consecutive batches at the weights of the
    first, in an extra pass for each. It changes no state, so the run is bit-identical
    to one without probes.

    Args:
        loss_fn: ``loss_fn(model, batch)`` is the mean loss over the batch's examples.
            It is called with the bare model.
        probe_every: Optimizer steps between two probes. Default: as for
            ``record_recipe``.
    """

    def __init__(
        self,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        probe_every: int | None = None,
    ) -> None:
        self._loss_fn = loss_fn
        self._probe_every = (
            None if probe_every is None else check_count("probe_every", probe_every)
        )
        self._series: ProbeSeries | None = None  # from the first batch on
        self._schedule: TauSchedule | None = None
        self._config: AdaScaleConfig | None = None
        self._momentum = Momentum()
        self.reset()

    def reset(self) -> None:
        """Drop the probes. An adapter calls this before a new run."""
        self._noise: list[NoiseProbe] = []
        self._series = None
        self._started = time.monotonic()

    def begin(self, schedule: TauSchedule, config: AdaScaleConfig) -> None:
        """Begin to record a run. Called by an adapter.

        Raises:
            ValueError: The run is no base run.
        """
        self.check_base_run(schedule)
        self._schedule = schedule
        self._config = config
        self._momentum = momentum_of(parts_of(schedule)[0].wrapped)

    def check_base_run(self, schedule: TauSchedule) -> None:
        """Check that a run is a base run. An adapter calls this after a change of the
        batch.

        Raises:
            ValueError: The run is no base run.
        """
        plan = parts_of(schedule)[1]
        if plan.scale != 1 or plan.num_samples != 1:
            raise ValueError(
                "A recipe can be recorded of a base run only, with one worker and one "
                f"pass at the base batch; this one has scale {plan.scale:g}, "
                f"{plan.workers} workers and {plan.passes} passes."
            )

    def before_step(self, model: nn.Module, batch: Any) -> None:
        """Probe the noise, if a probe is due or begun. An adapter calls this before
        training on the batch.
        """
        assert self._schedule is not None
        if self._series is None:
            total = self._schedule.base_schedule.total_steps
            self._series = ProbeSeries(
                BatchSamples(model, self._loss_fn),
                noise_steps(total, self._probe_every),
                self._noise,
            )
        self._series.add(batch)
        if self._series.due(self._schedule.effective_steps):
            trained = [
                p
                for group in self._schedule.optimizer.param_groups
                for p in group["params"]
                if p.requires_grad
            ]
            self._series.samples.begin_with(batch, trained)

    def recipe(
        self,
        hyperparameters: Mapping[str, Any],
        *,
        metric: str,
        mode: Literal["min", "max"],
        score: float,
        workload: Callable[..., Any] | type,
    ) -> Recipe:
        """Return the recipe of a run that has reached T.

        Args:
            hyperparameters: The hyperparameters of optimizer and schedule, JSON values.
            metric: Name of the metric that the run is judged by.
            mode: Whether a small or a large metric is better.
            score: Value of the metric at the end.
            workload: The function or class that builds the model. The recipe has its
                name.

        Raises:
            ValueError: The run has not reached T.
        """
        if (
            self._schedule is None
            or self._config is None
            or not self._schedule.finished
        ):
            tau = 0.0 if self._schedule is None else self._schedule.effective_steps
            raise ValueError(
                "The base run has not reached its total steps: it is at effective step "
                f"{tau:g}."
            )
        if self._noise and self._noise[0].effective_steps > 0:
            warn_at_user(
                f"The noise before effective step {self._noise[0].effective_steps:g} "
                "was not recorded, because this process resumed the run there. A "
                "forecast from this recipe uses the noise of that step for the steps "
                "before. Record a whole run for a better one."
            )
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
