"""Run: the training loop of one worker, in one process or among torchrun's or Ray's
workers. It needs no Ray.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._torch import sum_over_workers, uncompiled, uncompiled_in_graphs
from ..batch import StepPlan
from ..checkpoint.rng import separate_streams
from ..config import AdaScaleConfig
from ..data.order import MicroBatch
from ..data.sampling import ExampleSampler
from ..gain import advanced, whole_number
from ..optim.rules import name_of
from ..optim.step_sums import StepResult, constant
from ..recipe import Recipe
from ..workload import RunInputs, Workload, with_unit
from .after_step import AfterStep
from .assemble import assemble, fixed_momentum, norm_batch
from .boundary.backend import Backend, LocalBackend
from .boundary.checkpointing import warns_if_alone
from .boundary.stage import BoundaryFlags, Stages, StepReport
from .boundary.train_state import INTERRUPTED
from .build import set_batch
from .observe.advice import UnreadHyperparameters
from .observe.metrics import SKIPPED, plain_numbers
from .observe.pulse import Phase, Pulse
from .observe.step import Step
from .observe.verdict import RunFigures, Verdict
from .skipped import SkippedSteps

_log = logging.getLogger(__name__)
TOTAL_STEPS_REACHED = "total_steps reached"


class Run:
    """A training run at any scale, with the schedule of the base batch.

    Iterate over it for micro-batches, and call :meth:`backward` and :meth:`step` for
    each::

        run = Run(model, optimizer, scheduler, dataset, AdaScaleConfig(base_batch_size=128, ...))
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()

    The loop ends when τ reaches T. A new start resumes from the newest checkpoint of
    ``backend``.

    With a fused optimizer (see :class:`ray_adascale.AdaScale`) the host reads the
    numbers of a step during the next step. The loop then waits for the device only near
    the end, an evaluation, a report or a checkpoint, and where :attr:`effective_steps`,
    :attr:`gain` or :attr:`progress` is read. Reports and checkpoints come one step
    later.

    Args:
        model: The bare model. In the loop call ``run.model``, not this object:
            ``run.model`` is on the device, and wrapped for data parallelism where there
            are several workers.
        optimizer: One optimizer with the LRs of the base batch. Use :attr:`optimizer`
            from here on.
        scheduler: A ``torch.optim.lr_scheduler`` on it, or None. Never step it.
        dataset: Map-style, an iterable of batches, or a Ray Data shard; see
            :func:`ray_adascale.data.make_source`.
        config: Settings. With a recipe, base batch size and total steps are the
            recipe's.
        sampler: Draws the examples of each epoch; see :class:`ray_adascale.Workload`.
        collate_fn: As in ``DataLoader``.
        evaluate: ``evaluate(model) -> dict`` of metrics, called before the first step,
            every ``config.evaluate_every`` effective steps and at the end, on all
            workers, with the bare model in eval mode, without gradients. Rank 0's
            metrics count.
        recipe: The result of a search. A schedule with another LR curve than the
            recipe's is refused.
        extra_state: Further objects with ``state_dict()`` and ``load_state_dict()`` for
            the checkpoints, by name, such as an average of the weights. Their states
            are nested dicts and lists of tensors and JSON values, equal on all workers
            (rank 0's JSON counts) unless it is a :class:`ray_adascale.PerWorker`;
            nothing is pickled.
        after_step: ``after_step(model)`` with the bare model, on every worker after
            each optimizer step, skipped ones too, and before its checkpoint: the place
            to update an average of the weights
            (:class:`ray_adascale.EffectiveAverage`). With a parameter ``gain`` it also
            gets the advance of τ, 0 in a skipped step, for which the host waits for the
            device.
        weight_of: ``weight_of(batch)`` is the number of units in a micro-batch over
            which the loss is a mean, such as its tokens without padding. It gets the
            batch as the dataset yields it, before it is moved to the device. The
            gradient is then the mean over the units of all micro-batches of the step,
            as of one pass over the whole batch. Default: the examples count.
        starting_step: τ at which the run begins, if another program has trained the
            weights (and the optimizer's state) up to there with a batch of B0: k of its
            T steps. Give a fresh scheduler. A checkpoint of this run has precedence. A
            map-style dataset continues after k·B0 examples; other data begin anew.
        backend: The surroundings of the run. Default: this process or torchrun's
            workers, no checkpoints.

    Raises:
        ValueError: A setting, the model, the optimizer or the scheduler can't work. The
            message names it and a remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        dataset: Any,
        config: AdaScaleConfig,
        *,
        sampler: ExampleSampler | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        recipe: Recipe | None = None,
        extra_state: Mapping[str, Any] | None = None,
        after_step: Callable[..., object] | None = None,
        weight_of: Callable[[Any], Any] | None = None,
        starting_step: int = 0,
        backend: Backend | None = None,
    ) -> None:
        inputs = RunInputs(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            train_dataset=dataset,
            sampler=sampler,
            collate_fn=collate_fn,
            evaluate=evaluate,
            extra_state=extra_state,
            after_step=after_step,
            weight_of=weight_of,
            starting_step=starting_step,
        )
        self._assemble(inputs, config, recipe, backend)

    @uncompiled
    def _assemble(
        self,
        inputs: RunInputs,
        config: AdaScaleConfig,
        recipe: Recipe | None,
        backend: Backend | None,
    ) -> None:
        parts = assemble(
            inputs,
            config,
            recipe=recipe,
            backend=LocalBackend() if backend is None else backend,
        )
        self.backend = parts.given.backend
        self.config = parts.given.config
        self.plan = parts.plan
        own = parts.train_state
        self.source = own.source
        self.schedule = own.schedule
        self.base_schedule = own.base_schedule
        self.total_steps = self.base_schedule.total_steps
        """T."""
        self.module = own.module
        self.model = parts.training.wrapped.model
        self.optimizer = own.optimizer
        self._rule = name_of(self.optimizer.rule)
        self.advice = parts.training.advice
        """Doubts about the schedule and the base batch, a sentence each. Rank 0 has
        warned of them.
        """
        self.state = own.loop
        """Step counts and metrics so far, as they go into a checkpoint."""
        self.parts = parts
        """The objects that make up this run."""
        self._driver = parts.driver
        self._guards = parts.driver.guards
        self._after_step: AfterStep | None = None
        if inputs.after_step is not None:
            self._after_step = AfterStep(inputs.after_step, self.module)
        self._skipped = SkippedSteps(
            self.module,
            parts.driver.scaler,
            by_recipe=recipe is not None,
            by_units=parts.unit_weights is not None,
        )
        self._taken: Step | None = None  # until it is read
        self._ended: Step | None = None  # the last step of this start
        self._stages = Stages(parts.boundary.stages, parts.given.backend.rank)
        self._loop_seconds = 0.0
        self._pulse = Pulse(parts.given.config.step_timeout_s)

    @classmethod
    def of(
        cls,
        workload: Workload,
        config: AdaScaleConfig,
        *,
        recipe: Recipe | None = None,
        backend: Backend | None = None,
    ) -> Run:
        """Return the run of a built workload. ``config`` may leave out the scheduler
        unit, which is the workload's.

        Raises:
            ValueError: As for ``Run``; or ``config`` has another scheduler unit than
                the workload.
        """
        run = cls.__new__(cls)
        run._assemble(workload, with_unit(config, workload), recipe, backend)
        if (
            run.backend.rank == 0
            and run.state.iterations == 0
            and workload.config_reads is not None
        ):
            run.parts.listeners.append(UnreadHyperparameters(workload.config_reads))
        return run

    # ---- state of the run ------------------------------------------------------------

    @property
    def effective_steps(self) -> float:
        """τ."""
        return self.optimizer.effective_steps

    @property
    def scale(self) -> float:
        """S of the next step."""
        return self.plan.scale

    @property
    def gain(self) -> float:
        """r of the gradients of the coming step, if its backward passes have run,
        else of the last step.
        """
        return self.optimizer.gain()

    @property
    @uncompiled
    def progress(self) -> float:
        """Σ r over the optimizer steps: τ under AdaScale's own rule; AdaptDL's
        ``progress`` under every rule.
        """
        self._read_step()
        return self.state.progress

    @property
    def stopped(self) -> str | None:
        """The reason for the end of the loop; None while it runs.

        It is "total_steps reached", "interrupted" (to be resumed), or a sentence on the
        metric of ``early_stop``.
        """
        return self.state.stopped

    @property
    def epoch(self) -> int:
        """Epochs completed. See :attr:`base_epoch` for what a base run does by its
        epoch.
        """
        return self.source.epoch

    @property
    def base_epoch(self) -> int:
        """The epoch of the base run that τ has reached, from 0: the place of ``epoch``
        in a loop that changes something by it. At scale the data pass S/r times as
        often, so that ``epoch`` is ahead.

        Raises:
            ValueError: The data have no length.
        """
        steps = self.base_schedule.base_steps_per_epoch
        if steps is None:
            raise ValueError(
                "base_epoch needs the length of an epoch, and the data have none. Give "
                "AdaScaleConfig(dataset_length=...)."
            )
        return whole_number(self.effective_steps / steps)

    def every(self, effective_steps: float) -> bool:
        """Return whether the optimizer step that has just ended took τ to or over a
        multiple of a number of effective steps: the place of ``step % n == 0`` in a
        loop. The same on all workers; False between the passes of a step, and beyond T.

        Args:
            effective_steps: n, base steps from one time to the next.

        Raises:
            ValueError: n is not positive.
        """
        if not 0 < effective_steps < math.inf:
            raise ValueError(
                f"Invalid {effective_steps=}. Must be positive: base steps from one "
                "time to the next."
            )
        if not self.at_boundary or self._ended is None:
            return False

        def times(tau: float) -> int:
            return whole_number(min(tau, self.total_steps) / effective_steps)

        before = times(self._ended.tau_before)
        # the bound is known without waiting for a GPU
        if times(self.optimizer.furthest_effective_steps) == before:
            return False
        return times(self.effective_steps) > before

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler; None unless the precision is "fp16"."""
        return self._driver.scaler

    @property
    def is_last_pass(self) -> bool:
        """Whether the pass in progress is the last one of its optimizer step: the
        place for a loop's own clipping.
        """
        return self._driver.is_last

    @property
    def at_boundary(self) -> bool:
        """Whether this is a step boundary, the only place to checkpoint."""
        return self._driver.between and self.optimizer.at_boundary

    @property
    def evaluate_due(self) -> bool:
        """Whether this is a step boundary at which τ has passed a multiple of
        ``evaluate_every`` since the last evaluation, or T.

        For a loop that evaluates by itself and passes the metrics to :meth:`record`.
        """

        def due(tau: float) -> bool:
            return self.parts.boundary.evaluation.due_in_loop(
                tau, ended=self.base_schedule.ended_at(tau)
            )

        return (
            self.at_boundary
            and due(self.optimizer.furthest_effective_steps)
            and due(self.effective_steps)
        )

    @property
    def reported(self) -> bool:
        """Whether this step boundary was reported."""
        return self.parts.boundary.reporting.reported_step == self.state.iterations

    @uncompiled
    def record(self, **metrics: Any) -> None:
        """Add metrics to this report and later ones, until they are recorded again.
        They count as an evaluation.
        """
        metrics = plain_numbers(metrics)
        self._read_step()
        self.state.recorded.update(metrics)
        for listener in self.parts.listeners:
            listener.after_record(metrics)
        self.parts.boundary.evaluation.after_record(metrics, self.effective_steps)

    @uncompiled
    def sum(self, **values: float | Tensor) -> dict[str, float]:
        """Return the sum of each number over all workers. Collective, with the same
        names on all workers; waits for the device.

        For counts and sums of a loop's own evaluation: ``total =
        run.sum(correct=correct, seen=seen)``, then
        ``run.record(accuracy=total["correct"] / total["seen"])``.

        Raises:
            TypeError: A value is neither a number nor a tensor of one element.
        """
        return sum_over_workers(values, self.backend.device, self.plan.workers)

    def observe_noise(self, sigma2: float, mu2: float) -> None:
        """Set σ² and μ² from a probe, to be reported for steps that have one
        gradient sample at S = 1.
        """
        self.parts.boundary.reporting.probed = sigma2, mu2

    @uncompiled
    def summary(self) -> dict[str, Any]:
        """Return the last report's metrics, the number of skipped steps, the reason for
        the end, the seconds of this loop, and at the end of a run with a recipe its
        ``verdict`` in words.

        A step is skipped if its gradient is not finite. Metrics of ``evaluate`` are
        this worker's: reports have rank 0's.
        """
        self._read_step()
        verdict = self.verdict
        return {
            **self.state.metrics,
            "skipped_steps": self.state.iterations - self.optimizer.steps,
            "stopped": self.stopped,
            "loop_seconds": self._loop_seconds,
            **({} if verdict is None else {"verdict": str(verdict)}),
        }

    @property
    def verdict(self) -> Verdict | None:
        """The comparison with the base runs of the recipe; None without a recipe, and
        before the end.
        """
        base = self.parts.given.base
        state = self.state
        if base is None or self.stopped in (None, INTERRUPTED):
            return None
        steps = max(state.iterations, 1)
        value = state.recorded.get(base.metric)
        figures = RunFigures(
            value=value if isinstance(value, int | float) else None,
            progress=self.effective_steps / self.total_steps,
            steps=self.optimizer.steps,
            examples=self.source.position,
            efficiency=state.progress / state.scales if state.scales else 1.0,
            clipped=state.clipped / steps,
            skipped=(state.iterations - self.optimizer.steps) / steps,
            norm_batch=norm_batch(self.module, self.plan),
            fixed_momentum=fixed_momentum(
                self.parts.given.inputs.optimizer, self.optimizer.rule
            ),
        )
        return Verdict(base=base, run=figures)

    # ---- the loop --------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield micro-batches on the device until τ reaches T. Then evaluate, report
        and save for the last time.
        """
        entered = time.monotonic()
        separate_streams(self.backend.rank, self.plan.workers, self.backend.device)
        batches = self._micro_batches()
        try:
            with self._driver.guard(), self.backend.watch(self._pulse):
                if self.state.iterations == 0:
                    self._pulse.enter(Phase.BOUNDARY)
                    self.parts.boundary.evaluation.try_out(
                        self.backend.device, log=self.backend.rank == 0
                    )
                # The known τ decides: a step after which τ may have reached T is read
                # at once.
                while self.stopped is None and not self.base_schedule.ended_at(
                    self.optimizer.known_effective_steps
                ):
                    self._pulse.enter(Phase.DATA)
                    batch = self._next_of(batches)
                    self._pulse.enter(Phase.PASS)
                    self._driver.begin(batch)
                    yield self.source.on_device(batch.batch, self.backend.device)
                    self._driver.check_ended()
                self._pulse.enter(Phase.BOUNDARY)
                if self.stopped is None:
                    self._finish(TOTAL_STEPS_REACHED)
        finally:
            self._loop_seconds = time.monotonic() - entered
            self.source.close()
            for listener in self.parts.listeners:
                listener.after_loop()

    def _micro_batches(self) -> Iterator[MicroBatch]:
        batches = iter(self.source)
        if self.parts.unit_weights is None:
            return batches
        return self.parts.unit_weights.weighted(batches)

    def _next_of(self, batches: Iterator[MicroBatch]) -> MicroBatch:
        batch = next(batches, None)
        if batch is None:
            raise RuntimeError(
                "Another loop over the run, in this one, has taken its data: make it "
                "one loop."
            )
        return batch

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise TypeError(
            "A run has no length: its gain decides. For a bar: "
            "tqdm(total=run.total_steps), run.progress."
        )

    @uncompiled_in_graphs
    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch, with the loss weighted and scaled.
        The last pass reduces gradients.

        Args:
            loss: Mean over the micro-batch's examples, a scalar. Don't divide it by the
                number of passes: ``run`` does, and a loss that is divided twice can't
                be detected.
        """
        self._driver.begin_backward(loss)
        if self._driver.is_last:
            self._share_numbers()
            self._pulse.enter(Phase.REDUCTION)
        self._driver.backward(loss, self.plan)

    def _share_numbers(self) -> None:
        """Let this worker's loss, its boundary flags and what is compared travel in
        the step's all-reduce.
        """
        loss = self._driver.loss
        if self.plan.workers == 1:
            self.optimizer.current.share(loss=loss)
            return
        # on the device: a copy from the host would wait
        flags = constant(float(self._stages.flags()), loss.device)[0]
        compared = self.parts.replicas.numbers(loss, self.state.iterations + 1)
        self.optimizer.current.share(flags=flags, **compared)

    @uncompiled
    def clip_grad_norm_(self, max_norm: float) -> Tensor | None:
        """Clip the step's gradient to a norm, between :meth:`backward` and
        :meth:`step`. Collective.

        The gain is that of the unclipped gradient.

        Returns:
            The norm before clipping, on the device; None before the step's last pass,
            where it does nothing.
        """
        self._driver.check_backward(
            "run.clip_grad_norm_() comes between run.backward() and run.step()."
        )
        if not self._driver.is_last:
            return None
        return self.optimizer.clip_grad_norm(max_norm)

    @uncompiled
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip each element of the gradient to ±``clip_value`` in a step's last
        pass, as :meth:`clip_grad_norm_` does.
        """
        self._driver.check_backward(
            "run.clip_grad_value_() comes between run.backward() and run.step()."
        )
        if self._driver.is_last:
            self.optimizer.clip_grad_value(clip_value)

    @uncompiled_in_graphs
    def step(self, **metrics: Any) -> bool:
        """End a micro-batch; after the step's last one, take the optimizer step. Call
        it after each :meth:`backward`.

        The step: clip, step with lr·r, advance τ and the schedule, and then evaluate,
        report and save a checkpoint if due.

        Args:
            **metrics: The user's metrics for the reports: numbers, or tensors of one
                element. A ``loss`` replaces the mean of the losses given to
                :meth:`backward`.

        Returns:
            Whether this pass was the last one of an optimizer step.

        Raises:
            FloatingPointError: The gradient was not finite for 50 steps in a row.
        """
        self._driver.check_backward("run.step() comes once after each run.backward().")
        user_metrics = plain_numbers(metrics, of_step=True) if metrics else {}
        for name, number in user_metrics.items():
            if name != "loss":
                self.state.recorded[name] = number
        if not self._driver.is_last:
            self._driver.end_pass()
            return False

        # the step before, whose τ gives the learning rate of this one
        self._read_step()
        self._guards.step()
        before = self.optimizer.last_step
        lr = self.schedule.lrs[0]
        self.parts.training.clipping.clip(
            self.optimizer, self.plan, self.optimizer.average_moments
        )
        self._driver.step()
        self._ended = self._taken = self._commit_step(before, lr, user_metrics)

        must_read = self._must_read_step()
        if must_read:  # else this step is read when the next one is about to be taken
            self._read_step()
        self._pulse.end_step(self.state.iterations)
        if must_read:
            reason = self._stages.act(self, self.optimizer.known_effective_steps)
            if reason is not None:
                self._finish(reason)
        self._guards.ended()
        self._pulse.enter(Phase.BETWEEN)
        return True

    def _commit_step(
        self, before: StepResult, lr: float, user_metrics: dict[str, Any]
    ) -> Step:
        """Count the step and its examples, and call the user's function. Return what
        the host knows of the step.

        Args:
            before: The numbers of the step before. Those of this step may still be on
                the device.
            lr: The step's learning rate, before the gain.
            user_metrics: The user's metrics of the step.
        """
        flags = BoundaryFlags.NONE
        if self.plan.workers == 1:
            flags = self._stages.flags()
        self._driver.end_step()
        self.source.commit()
        self.state.iterations += 1
        self.state.scales += self.plan.scale
        if self._after_step is not None:
            self._after_step(self.optimizer, before)
        self.parts.boundary.reporting.count(self.plan.global_batch_size)
        return Step(
            number=self.state.iterations,
            plan=self.plan,
            total_steps=self.total_steps,
            tau_before=before.effective_steps,
            lr=lr,
            position=self.source.position,
            flags=flags,
            user_metrics=user_metrics,
            recorded=dict(self.state.recorded),
        )

    def _must_read_step(self) -> bool:
        """Return whether the host must read the step now, because a stage may have
        to act at this boundary.
        """
        if self.optimizer.last_step_known:
            return True
        furthest = self.optimizer.furthest_effective_steps
        return self.base_schedule.ended_at(furthest) or self._stages.due(furthest)

    def _read_step(self) -> None:
        """Read the last optimizer step, if it is unread: advance the schedule,
        compute metrics, call the listeners.
        """
        step = self._taken
        if step is None:
            return
        self._taken = None
        step.result = result = self.optimizer.last_step
        self._guards.read(step)

        # What all workers want to do at this boundary.
        if self.plan.workers > 1:
            step.flags = BoundaryFlags.from_sum(result.shared["flags"])
        self._stages.sent |= step.flags

        # The clock, and the learning rates of ⌊τ⌋.
        if result.skips:
            self._skipped.warn(step.number, result)
        else:
            self.state.progress = advanced(self.state.progress, result.gain)
            self.schedule.advance_to(result.effective_steps)

        # The metrics, as they are reported, and as the listeners see them.
        loss = step.user_metrics.get("loss", result.shared["loss"])
        metrics = self.parts.boundary.reporting.metrics(
            result, self.plan, loss=loss, lr=step.lr, progress=self.state.progress
        )
        clipped = self.parts.training.clipping.read(result)
        if clipped:
            self.state.clipped += 1
        self.state.metrics = {**metrics, **step.recorded}
        if not self.parts.listeners:
            return
        step.metrics = self.state.metrics
        step.row.update(
            step=step.number,
            attempt=self.state.attempt,
            position=step.position,
            rule=self._rule,
        )
        step.row.update(metrics)
        step.row.update(clipped)
        step.row.update(step.user_metrics)
        if result.skips:
            step.row[SKIPPED] = True
        for listener in self.parts.listeners:
            listener.after_step(step)

    def set_plan(self, plan: StepPlan) -> None:
        """Use this batch from the next step on. Call on all workers at a step
        boundary, once the last step was read.
        """
        self.plan = plan
        set_batch(plan, self.optimizer, self.source, self.backend.rank)

    def _finish(self, why: str) -> None:
        """End the run: evaluate if τ has reached T, report with a checkpoint, call
        the listeners.
        """
        if why == TOTAL_STEPS_REACHED:
            self.parts.boundary.evaluation.finish(self)
        self.state.stopped = why
        if not self.state.metrics:  # there was no step
            last = self.optimizer.last_step
            lr = self.schedule.lrs[0]
            progress = self.state.progress
            metrics = self.parts.boundary.reporting.metrics(
                last, self.plan, loss=math.nan, lr=lr, progress=progress
            )
            self.state.metrics = metrics
        self.state.metrics = {**self.state.metrics, **self.state.recorded}
        self.parts.boundary.checkpointing.saver.finish()
        self.report(save=self.backend.report_policy.save_end)
        for listener in self.parts.listeners:
            listener.ended(why, self.state.metrics)
        if self.backend.rank == 0:
            _log.info(
                "Ended: %s, at effective step %.2f of %d.",
                why,
                self.effective_steps,
                self.total_steps,
            )
            verdict = self.verdict
            if verdict is not None:
                _log.log(verdict.level, "%s", verdict)

    # ---- reports and checkpoints -----------------------------------------------------

    def step_report(self) -> StepReport:
        """Return the report of this step boundary."""
        tau = self.effective_steps
        state = self.state
        return StepReport(
            metrics=state.metrics,
            effective_steps=tau,
            schedule=self.base_schedule,
            stopped=state.stopped,
            evaluated=self.parts.boundary.evaluation.evaluated_at == tau,
            user_keys=tuple(state.recorded),
        )

    def report(self, *, save: bool) -> Path | None:
        """Report the state of the run to the backend, with a checkpoint if ``save``.
        Collective, at a step boundary.

        Returns:
            The folder of the checkpoint; None without one.

        Raises:
            RuntimeError: The model has a trainable parameter that no group has.
        """
        self._driver.users_model.check()
        return self.parts.boundary.reporting.report(self, save=save)

    @uncompiled
    def save_checkpoint(self) -> Path | None:
        """Save a checkpoint, report it, and wait until it is stored. Collective, at a
        step boundary.

        Call it on every worker, without ``if rank == 0``: a worker that calls it alone
        waits for the others until the process group's timeout, and logs a warning after
        half a minute. The next start of the run resumes from the latest one.

        Returns:
            The checkpoint's folder. None under Ray Train, which has its own copy, and
            where no checkpoints are kept.

        Raises:
            RuntimeError: This is no step boundary, or workers disagree about τ, LR or
                step.
            CheckpointError: A worker could not write this checkpoint or the previous
                one, or it could not be stored.
        """
        if not self.at_boundary:
            raise RuntimeError(
                "A checkpoint between the passes of an optimizer step would lose their "
                "gradients. Save at a step boundary: after run.step() has returned "
                "True, before the next backward pass (run.at_boundary)."
            )
        self._read_step()
        with warns_if_alone(self.backend.rank, self.plan.workers):
            folder = self.report(save=True)
        return folder if folder is not None and folder.is_dir() else None
