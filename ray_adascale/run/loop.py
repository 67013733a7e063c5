"""Run: the object of a worker's training loop. It needs no Ray; one process and torchrun will do."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._files import TRACE
from .._warn import warn_at_user
from ..adaptive_batch import controller_of, paying_over, useful_workers
from ..config import AdaScaleConfig, BatchPlan
from ..data import make_source, to_device
from ..data.order import ExampleOrder
from ..data.source import BatchSource, MicroBatch
from ..optim.rules import make_rule, metric_of
from ..recipe import Recipe
from ..replay import noise_curves
from ..sharding.sharded_ddp import ShardedDataParallel
from ..workload import ConfigAccessLog, Workload, unread_warning, with_unit
from .backend import Backend, LocalBackend, StepReport
from .build import check_built, check_recipe, check_rule, check_schedule, wrap
from .due import Clocks, Due
from .eta import Eta, RemainingSteps, StepClock, forecast_remaining_steps
from .metrics import METRICS, USEFUL_WORKERS, ProgressLine, plain_numbers, step_metrics, too_large_for_the_noise
from .saver import Boundary, Content, Saver
from .schedule import BaseSchedule, EffectiveSchedule
from .trace import StepLog, read_trace
from .train_state import INTERRUPTED, LoopState, TrainState, log_start

__all__ = ["TOTAL_STEPS_REACHED", "Run"]

_log = logging.getLogger(__name__)

TOTAL_STEPS_REACHED = "total_steps reached"
_WATCHED_STEPS = 3
"""Optimizer steps of a start in which gradients are watched between passes; a loop that changes them does so from the first."""
_STALLED = 2.0  # as what is due, where 1 is an interrupt; rank 0 alone says either

_NOISE_WINDOWS, _NOISE_STEPS = 3, 20
"""Windows of the averages, and optimizer steps, before they are believed to say that the batch is too large."""


@dataclass(frozen=True)
class _Unread:
    """An optimizer step of which the host may not know yet what became of it.

    Attributes:
        due: What is due after it; None on several workers, who tell each other with the step's numbers.
        lr: The schedule's.
        tau: τ before it.
        row: What its row in the trace begins with: its number, the start of the run, and the position in the data.
        own: The user's metrics of this step.
        recorded: The user's metrics so far.
    """

    due: Due | None
    lr: float
    tau: float
    row: dict[str, Any]
    own: dict[str, Any]
    recorded: dict[str, Any]


class Run:
    """A training run at any scale, with the schedule of the base batch.

    Iterate over it for micro-batches, and call :meth:`backward` and :meth:`step` for each::

        run = Run(model, optimizer, scheduler, dataset, AdaScaleConfig(base_batch_size=128, ...))
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()

    The loop ends when τ reaches T. It begins where the newest checkpoint of ``backend`` stands.

    With a fused optimizer (see :class:`ray_adascale.AdaScale`) the host reads a step's numbers in the next one, when they
    have long arrived: the loop waits for the device only near the end, an evaluation, a report or a checkpoint, and where it
    is asked for :attr:`effective_steps`, :attr:`gain` or :attr:`progress`. What is due then comes one step later.

    Args:
        model: The bare model. :attr:`model` is the one to call: on the device, and wrapped for data parallelism where
            there are several workers.
        optimizer: One optimizer with the LRs of the base batch. Use :attr:`optimizer` from here on.
        scheduler: A ``torch.optim.lr_scheduler`` on it, or None. Never step it.
        dataset: Map-style, an iterable of batches, or a Ray Data shard; see :func:`ray_adascale.data.make_source`.
        config: Settings. With a recipe, base batch size and total steps are the recipe's.
        collate_fn: As in ``DataLoader``.
        evaluate: ``evaluate(model) -> dict`` of metrics, called every ``config.evaluate_every`` effective steps and at the
            end, on all workers, with the bare model in eval mode and without gradients. The answer of rank 0 counts.
        recipe: The search's outcome. A schedule whose LR curve differs from the recipe's is refused.
        extra_state: What else belongs into checkpoints, by name: objects with ``state_dict()`` and ``load_state_dict()``, such
            as an average of the weights. Their states are nested dicts and lists of tensors and JSON values, equal on all
            workers (rank 0's JSON counts); nothing is pickled.
        after_step: ``after_step(model)`` with the bare model, on every worker after each optimizer step and before a checkpoint
            of it: the place to update an average of the weights. After a skipped step, too.
        backend: Where the run lives. Default: this process or torchrun's workers, no checkpoints.

    Raises:
        ValueError: A setting, or what was built, can't work; the message says which and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        dataset: Any,
        config: AdaScaleConfig,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        recipe: Recipe | None = None,
        extra_state: Mapping[str, Any] | None = None,
        after_step: Callable[[nn.Module], object] | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.backend = LocalBackend() if backend is None else backend
        self.config = config = config.with_recipe(recipe)
        check_built(model, optimizer, config)
        if config.early_stop is not None and config.early_stop.metric is None:
            raise ValueError("EarlyStop needs metric and mode where there is no workload that has them.")
        if config.early_stop is not None and config.early_stop.metric in METRICS and evaluate is None:
            raise ValueError(
                f"Invalid EarlyStop(metric={config.early_stop.metric!r}): a step's own number is mostly noise. Name one that "
                "evaluate returns."
            )
        self.plan = config.plan(self.backend.world_size)
        self.source: BatchSource = make_source(
            dataset,
            self.plan.split(self.backend.rank),
            ExampleOrder(seed=config.seed, shuffle=config.shuffle, drop_last=config.drop_last),
            collate_fn=collate_fn,
            num_workers=config.num_loader_workers,
            pin_memory=config.pin_memory,
            length=config.dataset_length,
            splits_change=config.target_efficiency is not None,
        )
        per_epoch = self.source.base_steps_per_epoch(self.plan.base_batch_size)
        total_steps = config.resolve_total_steps(per_epoch)
        self._follower = controller_of(
            config,
            self.backend.world_size,
            total_steps=total_steps,
            largest=math.inf if per_epoch is None else per_epoch * self.plan.base_batch_size,
        )
        if self._follower is not None:
            self.plan = self._follower.plan
            self.source.set_split(self.plan.split(self.backend.rank))
        self.schedule = EffectiveSchedule(
            optimizer,
            scheduler,
            unit=config.scheduler_unit,
            base_steps_per_epoch=per_epoch,
            total_steps=total_steps,
        )
        self.base_schedule = BaseSchedule(
            base_batch_size=self.plan.base_batch_size,
            total_steps=total_steps,
            scheduler_unit=config.scheduler_unit,
            base_steps_per_epoch=per_epoch,
            lr_curve=self.schedule.curve(total_steps),
        )
        self.advice = check_schedule(scheduler, self.base_schedule)
        """What the schedule and the batch that it was tuned at make one doubt, a sentence each; rank 0 warns of it."""
        if self.backend.rank == 0:
            for advice in self.advice:
                warn_at_user(advice)
        check_rule(config, self.base_schedule.lr_curve)
        if recipe is not None:
            check_recipe(recipe, self.base_schedule)

        self.module = model.to(self.backend.device)
        distributed = self.plan.world_size > 1
        on_cpu = dist.new_group(backend="gloo") if distributed and dist.get_backend() == "nccl" else None
        wrapped = wrap(self.module, optimizer, config, self.plan, device=self.backend.device, total_steps=total_steps)
        self.model, self.optimizer, self.scaler = wrapped.model, wrapped.optimizer, wrapped.scaler
        self._fully_sharded = wrapped.sharding == "fsdp2"
        watch = weakref.WeakMethod(self._before_inner_step)
        optimizer.register_step_pre_hook(lambda *_: (hook := watch()) and hook())

        self.state = LoopState()
        """Step counts and metrics so far, as they go into a checkpoint."""
        self._recipe = recipe
        self._step_clock = StepClock()
        self._evaluate = evaluate
        self._after_step = after_step
        self._evaluate_every = config.evaluate_every or total_steps / 10
        self._probed: tuple[float, float] | None = None
        self._batch: MicroBatch | None = None
        self._unread: _Unread | None = None
        self._due: Due | None = None  # read, and not acted on yet
        self._weights: list[float] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=self.backend.device)
        self._backward_done = False
        self._unscaled = False
        self._looping, self._stepping = False, False
        self._no_sync, self._autocast = ExitStack(), ExitStack()  # open during the passes that want them
        self._config_reads: ConfigAccessLog | None = None
        self._warned_noise = False
        self._beyond_noise_since: float | None = None  # τ
        self._looked_at_workers = -1  # a count of quarter windows of τ
        writes = self.backend.rank == 0
        self._log = StepLog(
            trace=writes and self.backend.keeps_trace,
            rows=config.trace_rows,
            note=self.backend.step_note if writes else None,
        )
        self._loop_seconds = 0.0
        self._saver = Saver(self.backend, on_cpu)
        self._train_state = TrainState(
            module=self.module,
            optimizer=self.optimizer,
            parameter_names=wrapped.parameter_names,
            scaler=self.scaler,
            schedule=self.schedule,
            source=self.source,
            loop=self.state,
            base_schedule=self.base_schedule,
            plan=self.plan,
            recipe=None if recipe is None else recipe.fingerprint,
            rank=self.backend.rank,
            device=self.backend.device,
            extra={} if extra_state is None else extra_state,
        )
        with self.backend.latest_checkpoint() as folder:
            workers = None
            if folder is not None:
                workers = self._train_state.load(folder, accept_changes=config.accept_changes)
                self._log.resume(folder)
                if self._follower is not None:
                    moments = self.optimizer.average_moments()
                    self._follower.resume(self.state.following, self.effective_steps, moments)
                    self._change_to(self._follower.plan)
            if self._follower is not None:
                self.state.following = self._follower.state()
            if workers == self.plan.world_size:
                self._looked_at_workers = self._quarter_windows
            self._steps_left = self._forecast(folder)
            if self._stalled:
                self.state.stopped = self._stall_in_words()
            if self.backend.rank == 0:
                log_start(self._train_state, folder, workers, self._log.last, config.checkpoint_every_s)
                self._log_useful_workers()
        self._line = ProgressLine(config.show_progress)
        if self.stopped is not None and self.backend.rank == 0:
            self._line.end(self.state.metrics, self.total_steps, f"ended before, {self.stopped}")
        self._began = self.state.iterations
        self._versions: list[int] | None = None
        self._clocks = Clocks(config, self.backend)  # they start now
        self._step_ended = time.monotonic()

    def _forecast(self, folder: Path | None) -> RemainingSteps | None:
        """The forecast of the steps left, on rank 0; ``folder`` is the checkpoint whose trace corrects it."""
        if self.backend.rank != 0:
            return None
        rows = read_trace(folder / TRACE) if folder is not None and (folder / TRACE).is_file() else []
        return forecast_remaining_steps(
            self._recipe,
            rows,
            scale=self.scale,
            rule=self.config.rule,
            averaging_window=self.config.averaging_window,
            following=None if self._follower is None else (self.config, self.plan.world_size),
        )

    @classmethod
    def of(
        cls,
        workload: Workload,
        config: AdaScaleConfig,
        *,
        recipe: Recipe | None = None,
        backend: Backend | None = None,
    ) -> Run:
        """The run of a workload that was built; its scheduler unit need not be in ``config``.

        Raises:
            ValueError: As for ``Run``, or ``config`` has another scheduler unit.
        """
        run = cls(
            workload.model,
            workload.optimizer,
            workload.scheduler,
            workload.train_dataset,
            with_unit(config, workload),
            collate_fn=workload.collate_fn,
            evaluate=workload.evaluate,
            recipe=recipe,
            extra_state=workload.extra_state,
            after_step=workload.after_step,
            backend=backend,
        )
        if run.backend.rank == 0 and run.state.attempt == 0:
            run._config_reads = workload.config_reads
        return run

    # ---- what the loop looks at ----------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """T."""
        return self.base_schedule.total_steps

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
        """r of the gradients in place, or of the last step."""
        return self.optimizer.gain()

    @property
    def progress(self) -> float:
        """Σ r over the optimizer steps: τ under AdaScale's own rule; AdaptDL's ``progress`` under every rule."""
        unread = self._unread is not None and not self.optimizer.last_step.skipped
        return self.state.progress + (self.optimizer.last_step.gain if unread else 0.0)

    @property
    def stopped(self) -> str | None:
        """Why the loop ended: "total_steps reached", "interrupted" (to be resumed), or that there was nothing better for as
        long as ``early_stop`` waits; None while it runs.
        """
        return self.state.stopped

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.source.epoch

    @property
    def at_boundary(self) -> bool:
        """Whether this is a step boundary, the only place to checkpoint."""
        return self._batch is None and self.optimizer.at_boundary

    @property
    def evaluate_due(self) -> bool:
        """At a step boundary: whether τ has passed the next multiple of ``evaluate_every`` since the last evaluation.

        For a loop that evaluates by itself; it then hands the metrics to :meth:`record`.
        """
        if not self.at_boundary or (self._furthest() < self.total_steps and not self._evaluations_by(self._furthest())):
            return False
        finished = self.effective_steps >= self.total_steps and self.state.evaluated_at < self.effective_steps
        return finished or self._evaluations_by(self.effective_steps) > 0

    def _evaluations_by(self, effective_steps: float) -> float:
        """Multiples of ``evaluate_every`` up to there, since the last evaluation."""
        every = self._evaluate_every
        return effective_steps // every - max(self.state.evaluated_at, 0.0) // every

    def _furthest(self) -> float:
        """What τ may be, as far as is known without waiting for the device."""
        known = self.optimizer.known_effective_steps
        return known if self.optimizer.last_step_known else known + max(self.scale, 1.0)

    def record(self, **metrics: Any) -> None:
        """Add metrics to this and every later report, until they are recorded anew. Also says that evaluation is done."""
        metrics = plain_numbers(metrics)
        self._read()
        self.state.recorded.update(metrics)
        self._log.add(metrics)
        self.state.evaluated_at = self.effective_steps
        stop = self.config.early_stop
        if stop is not None and stop.metric in metrics and stop.better(metrics[stop.metric], self.state.best):
            self.state.best, self.state.best_at = metrics[stop.metric], self.effective_steps

    def sum(self, **values: float | Tensor) -> dict[str, float]:
        """Each of these numbers summed over all workers, the same on all of them. All workers together, with the same names.

        For counts and sums of a loop's own evaluation: ``total = run.sum(correct=correct, seen=seen)``, then
        ``run.record(accuracy=total["correct"] / total["seen"])``. It waits for the device.

        Args:
            **values: Numbers, or tensors of one element.

        Raises:
            TypeError: Something else.
        """
        for name, value in values.items():
            if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
                what = f"tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"Invalid {name}: a {what}. Must be a number or a tensor of one element.")
        device = self.backend.device
        numbers = [
            torch.as_tensor(values[name]).detach().to(device, torch.float64).reshape(1) for name in sorted(values)
        ]
        if not numbers:
            return {}
        summed = torch.cat(numbers)
        if self.plan.world_size > 1:
            dist.all_reduce(summed)
        found = dict(zip(sorted(values), summed.tolist(), strict=True))
        return {name: found[name] for name in values}

    @property
    def _stalled(self) -> bool:
        """Whether it is time for an early stop; a function of what is in a checkpoint."""
        stop, best_at = self.config.early_stop, self.state.best_at
        return stop is not None and best_at >= 0 and self.state.evaluated_at - best_at >= stop.patience

    def _stall_in_words(self) -> str:
        stop, best = self.config.early_stop, self.state.best
        assert stop is not None
        return f"no better {stop.metric} than {best:.4g} for {stop.patience:g} effective steps"

    def observe_noise(self, sigma2: float, mu2: float) -> None:
        """Take σ² and μ² from a probe, for reports where the step itself shows none (one gradient sample at S = 1)."""
        self._probed = sigma2, mu2

    def summary(self) -> dict[str, Any]:
        """The last report's metrics, why the run stopped, and the seconds spent in the loop since this start."""
        self._read()
        return {**self.state.metrics, "stopped": self.stopped, "loop_seconds": self._loop_seconds}

    # ---- the loop ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches on the device until τ reaches T; then evaluates, reports and saves a last time."""
        self.module.train()
        entered = time.monotonic()
        batches = iter(self.source)
        try:
            # Where τ is not known to the last step, the run can't have ended with it.
            while self.stopped is None and self.optimizer.known_effective_steps < self.total_steps:
                batch = next(batches)
                self._begin_pass(batch)
                self._looping = True
                yield to_device(batch.batch, self.backend.device)
                if self._batch is not None:
                    raise RuntimeError(
                        "A micro-batch went by without run.step(). Call run.backward() and run.step() each time."
                    )
            if self.stopped is None:
                self._finish(TOTAL_STEPS_REACHED)
        finally:
            self._looping = False
            self._loop_seconds = time.monotonic() - entered
            self._autocast.close()
            self._no_sync.close()
            self.source.close()

    def _begin_pass(self, batch: MicroBatch) -> None:
        if batch.pass_index == 0:
            self._weights = []
            self._loss.zero_()
        self._batch = batch
        self._backward_done = False
        self._weights.append(batch.weight)
        # Forward and backward of a pass that is not the step's last leave the gradients where they are.
        if not batch.is_last and isinstance(self.model, DistributedDataParallel | ShardedDataParallel):
            self._no_sync.enter_context(self.model.no_sync())
        elif self._fully_sharded:
            cast(Any, self.model).set_requires_gradient_sync(batch.is_last)
        if self.config.precision != "fp32":
            dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
            self._autocast.enter_context(torch.autocast(self.backend.device.type, dtype=dtype))

    def backward(self, loss: Tensor) -> None:
        """Backward pass of one micro-batch. Weights and scales the loss; reduces gradients after the step's last pass.

        Args:
            loss: Mean over the micro-batch's examples, a scalar.
        """
        batch = self._batch
        if batch is None or self._backward_done:
            raise RuntimeError("run.backward() once for each micro-batch of the loop, before run.step().")
        if loss.dim() != 0:
            raise ValueError(
                f"Invalid loss of shape {tuple(loss.shape)}. Must be a scalar: the mean over the examples."
            )
        self._autocast.close()
        self._loss.add_(loss.detach(), alpha=batch.weight)
        # DDP averages over workers and passes add up, so ḡ = Σ w_i g_i needs each loss times n·w_i/passes.
        factor = self.plan.num_samples * batch.examples / (self.plan.global_batch_size * self.plan.accumulation)
        if factor != 1:
            loss = loss * factor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self.optimizer.sample_weights = self._weights
        if batch.is_last:
            self.optimizer.payload = self._payload()
        loss.backward()
        self._backward_done = True
        if not batch.is_last and self.state.iterations - self._began < _WATCHED_STEPS:
            self._versions = self._gradient_versions()
        self._no_sync.close()

    def _gradient_versions(self) -> list[int]:
        """How often each gradient was written to, as autograd counts it; it costs no look at the numbers.

        The counter has no public name; a test fails where it moves.
        """
        return [p.grad._version for p in self.module.parameters() if p.grad is not None]

    def clip_grad_norm_(self, max_norm: float) -> Tensor | None:
        """Clip the step's gradient to a norm; between :meth:`backward` and :meth:`step`. All workers together.

        Does nothing before the step's last pass. The gain is that of the unclipped gradient.

        Returns:
            The norm before clipping, on the device; None before the last pass.
        """
        if self._batch is None or not self._backward_done:
            raise RuntimeError("run.clip_grad_norm_() comes between run.backward() and run.step().")
        if not self._batch.is_last:
            return None
        if self.scaler is not None and not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True
        return self.optimizer.clip_grad_norm(max_norm)

    def step(self, **metrics: Any) -> bool:
        """After each :meth:`backward`. On a step's last micro-batch: clips, steps with lr·r, advances τ and the schedule.

        Evaluates, reports and checkpoints when they are due.

        Args:
            **metrics: The user's own, for the reports (numbers, or tensors of one element). A ``loss`` here takes the
                place of the mean of those given to :meth:`backward`.

        Returns:
            Whether this was the last micro-batch of an optimizer step.

        Raises:
            FloatingPointError: The gradient was not finite for ``max_nonfinite_steps`` steps in a row.
        """
        batch = self._batch
        if batch is None or not self._backward_done:
            raise RuntimeError("run.step() comes once after each run.backward().")
        own = plain_numbers(metrics) if metrics else {}
        self.state.recorded.update({key: value for key, value in own.items() if key != "loss"})
        if not batch.is_last:
            if self._versions is not None and self._versions != self._gradient_versions():
                raise RuntimeError(
                    "Gradients were changed between the passes of an optimizer step, as by clipping after each: the passes "
                    "after this one add up to what is left. Clip once a step: run.clip_grad_norm_(), which does nothing before "
                    "the last pass, or AdaScaleConfig(grad_clip=...)."
                )
            self._batch = self._versions = None
            return False
        if self.config.grad_clip is not None:
            self.clip_grad_norm_(self.config.grad_clip)
        self._read()  # the step before, which says what LR this one has
        lr, tau = self.schedule.lrs[0], self.effective_steps
        self._stepping = True
        try:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        finally:
            self._stepping = False
        due = self._my_due() if self.plan.world_size == 1 else None
        self.optimizer.zero_grad()
        self._batch, self._unscaled = None, False
        self.source.commit()
        self.state.iterations += 1
        if self._after_step is not None:
            self._after_step(self.module)
        self._clocks.took(self.plan.global_batch_size)
        row = {"step": self.state.iterations, "attempt": self.state.attempt, "position": self.source.position}
        self._unread = _Unread(due, lr, tau, row, own, dict(self.state.recorded))
        if self._must_read():
            self._read()
            due, self._due = self._due, None
            assert due is not None
            if self.effective_steps < self.total_steps:
                self._follow_noise()
                self._do_what_is_due(due)
        self._step_ended = time.monotonic()
        return True

    def _follow_noise(self) -> None:
        """Where the run chooses its scale: the plan of the next step, from the averages; the same on all workers."""
        follower = self._follower
        if follower is None:
            return
        plan = follower.after_step(
            self.effective_steps,
            self.optimizer.average_moments,
            time.monotonic() - self._step_ended,
            self._as_on_rank_0,
        )
        self.state.following = follower.state()
        if plan != self.plan:
            self._change_to(plan)

    def _change_to(self, plan: BatchPlan) -> None:
        """From the next step on the batch is made up so. At a step boundary whose step has been read."""
        self.plan = plan
        self.optimizer.set_batch(scale=plan.scale, passes=plan.accumulation)
        self.source.set_split(plan.split(self.backend.rank))
        self._train_state = replace(self._train_state, plan=plan)

    def _as_on_rank_0(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        if self.plan.world_size == 1:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.backend.device)
        dist.broadcast(shared, src=0)
        return tuple(shared.tolist())

    def _before_inner_step(self) -> None:
        """The user's own optimizer is about to step."""
        if self._looping and not self._stepping:
            raise RuntimeError(
                "optimizer.step() was called in the loop beside run.step(): the weights would move twice, once without the "
                "gain. Remove optimizer.step() and optimizer.zero_grad(): run.step() does both, on a step's last pass."
            )

    def _must_read(self) -> bool:
        """Whether something may be due at this boundary, so that the host must know of the step that was just taken."""
        furthest = self._furthest()
        if self.optimizer.last_step_known or furthest >= self.total_steps:
            return True
        if self._evaluate is not None and self._evaluations_by(furthest) > 0:
            return True
        if self._follower is not None and self._follower.due_by(furthest):
            return True
        due = self._due
        return due is not None and (due.anything or (self._saver.in_flight and not due.busy))

    def _read(self) -> None:
        """Let the host know of the last optimizer step, if it doesn't: advances the schedule, notes metrics and what is due."""
        step, self._unread = self._unread, None
        if step is None:
            return
        last = self.optimizer.last_step
        loss, *shared = last.payload
        due = step.due or Due(*shared)
        self._due = due if self._due is None else due.together_with(self._due)
        if not last.skipped:
            self.state.nonfinite = 0
            self.state.progress += last.gain
            self.schedule.advance_to(self.effective_steps)
        else:
            self._count_nonfinite(loss, step.row["step"])
        metrics = self._metrics(step.own.get("loss", loss), step.lr)
        self._warn_about_noise(metrics)
        self._warn_of_unread()
        self._look_at_workers(metrics)
        self.state.metrics = {**metrics, **step.recorded}
        row = {**step.row, **metrics, **step.own}
        if self._steps_left is not None:
            self._steps_left.saw(step.tau, self.effective_steps, last.gain)
            row["steps_left"] = round(self._steps_left.at(self.effective_steps), 1)
        self._log.step(row)
        if self.backend.rank == 0:
            self._step_clock.took()
            outcome = self._outcome()
            self.backend.observe(outcome)
            self._line.show(self.state.metrics, self.total_steps, outcome.left)

    def _look_at_workers(self, metrics: dict[str, Any]) -> None:
        """Add how many workers pay, where their number or the batch may change; it is computed now and then, on rank 0."""
        config = self.config
        if self.backend.rank != 0 or not (config.elastic or config.target_efficiency is not None):
            return
        before, now = self._looked_at_workers, self._quarter_windows
        if now == before and USEFUL_WORKERS in self.state.metrics:
            metrics[USEFUL_WORKERS] = self.state.metrics[USEFUL_WORKERS]
        elif not math.isnan(metrics["sigma2"] + metrics["mu2"]):
            self._looked_at_workers = now
            most = 2 * self.plan.world_size
            metrics[USEFUL_WORKERS] = useful_workers(config, metrics["sigma2"], metrics["mu2"], most=most)

    def _log_useful_workers(self) -> None:
        """Say beforehand how many workers will pay, and from when on, where a recipe's noise tells."""
        config, recipe = self.config, self._recipe
        if recipe is None or not recipe.noise or not (config.elastic or config.target_efficiency is not None):
            return
        if self.stopped is not None or metric_of(make_rule(config.rule)) != "euclidean":
            return
        found = paying_over(config, noise_curves(recipe)[0].at, self.total_steps, most=2 * self.plan.world_size)
        later = "".join(f", {pays} from τ = {share:.0%}" for share, pays in found[1:])
        _log.info(
            "By the recipe's noise %d worker%s at first%s; there %s %d.",
            found[0][1],
            " pays" if found[0][1] == 1 else "s pay",
            later,
            "is" if self.plan.world_size == 1 else "are",
            self.plan.world_size,
        )

    @property
    def _quarter_windows(self) -> int:
        """Of the averages, that τ has passed."""
        return math.floor(4 * self.effective_steps / (self.config.averaging_window * self.total_steps))

    def _outcome(self) -> StepReport:
        return StepReport(
            metrics=self.state.metrics,
            effective_steps=self.effective_steps,
            schedule=self.base_schedule,
            stopped=self.stopped,
            evaluated=self.state.evaluated_at == self.effective_steps,
            sample=(self.optimizer.last_step.sigma2, self.optimizer.last_step.mu2),
            left=self._left(),
        )

    def _left(self) -> Eta:
        """What is left, from the last step that the host knows; rank 0's counts."""
        tau, steps = self.effective_steps, self.optimizer.steps
        todo = max(self.total_steps - tau, 0.0)
        rough = self._steps_left is None and self.scale > 1
        if self._steps_left is not None:
            left = self._steps_left.at(tau)
        elif rough:
            left = todo * steps / tau if tau > 0 else math.inf
        else:
            left = todo
        return Eta(left, left * self._step_clock.seconds if left else 0.0, rough)

    def _do_what_is_due(self, due: Due) -> None:
        """Evaluate, hand over, save and report; the same on all workers."""
        if due.stop:
            self._finish(self._stall_in_words() if due.stop >= _STALLED else INTERRUPTED)
            return
        evaluated = self._evaluate is not None and self.evaluate_due
        if evaluated:
            self._run_evaluation()
        if self._saver.in_flight and not due.busy:
            self._saver.hand_over()
        if due.poll and self._clocks.preempted(self.state.iterations):
            self._report(save=True)
            return
        # While a worker uploads, a report would wait for it, and so would a checkpoint.
        save = bool(due.checkpoint and not due.busy)
        if save and self.config.async_checkpoint:
            self._save_in_background()
            save = False
        tell = evaluated and self.backend.reports_evaluations
        if tell or (due.report and not due.busy) or save:
            self._report(save=save or (tell and self.backend.saves_evaluations))

    def _my_due(self) -> Due:
        due = self._clocks.due(in_flight=self._saver.in_flight, busy=self._saver.busy)
        return due._replace(stop=_STALLED) if self.backend.rank == 0 and self._stalled else due

    def _payload(self) -> Tensor:
        """Return the payload of the step's all-reduce: this worker's loss and its boundary flags."""
        if self.plan.world_size == 1:
            return self._loss.reshape(1)
        # Filled in place on the device: a copy from the host would wait for it.
        return torch.stack([self._loss, *(torch.full_like(self._loss, flag) for flag in self._my_due())])

    def _count_nonfinite(self, loss: float, step: int) -> None:
        self.state.nonfinite += 1
        if self.state.nonfinite >= self.config.max_nonfinite_steps:
            loss_scale = 1.0 if self.scaler is None else self.scaler.get_scale()
            raise FloatingPointError(
                f"The gradient was not finite in {self.state.nonfinite} optimizer steps in a row, up to step "
                f"{step} at effective step {self.effective_steps:.1f} of {self.total_steps} "
                f"(loss {loss:g}, loss scale {loss_scale:g}). The weights are those before. Lower the learning rate, clip "
                "gradients, or look at the data of this step."
            )

    def _metrics(self, loss: float, lr: float) -> dict[str, Any]:
        return step_metrics(
            self.optimizer,
            self.plan,
            loss=loss,
            lr=lr,
            progress=self.state.progress,
            examples_per_s=self._clocks.examples_per_s,
            probed=self._probed,
        )

    def _warn_about_noise(self, metrics: Mapping[str, Any]) -> None:
        if self._warned_noise or self.backend.rank != 0 or self._follower is not None:
            return
        tau, window = self.effective_steps, self.config.averaging_window * self.total_steps
        warning = too_large_for_the_noise(self.plan, metrics["noise_scale"], metrics["gain"])
        if warning is None:  # nor where it is not known: NaN
            self._beyond_noise_since = None
            return
        since = tau if self._beyond_noise_since is None else self._beyond_noise_since
        self._beyond_noise_since = since
        # The noise of a run's beginning is seldom that of the rest, and averages of a few samples go up and down.
        begun = tau >= _NOISE_WINDOWS * window and self.optimizer.steps >= _NOISE_STEPS
        if begun and tau - since >= window and not self._pays_as_a_whole():
            self._warned_noise = True
            warn_at_user(warning)

    def _pays_as_a_whole(self) -> bool:
        """Whether by the forecast at least half of the run's examples turn into effective steps, though not those of now."""
        if self._steps_left is None:
            return False
        whole = self.optimizer.steps + self._steps_left.at(self.effective_steps)
        return 2 * self.total_steps >= self.scale * whole

    def _warn_of_unread(self) -> None:
        """After the first optimizer step, by when what is read late has been read: in loss_fn, or a closure's first call."""
        reads, self._config_reads = self._config_reads, None
        unread = None if reads is None else reads.unread
        if unread:
            warn_at_user(unread_warning(unread))

    def _run_evaluation(self) -> None:
        evaluate = self._evaluate
        assert evaluate is not None
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                metrics = evaluate(self.module)
        finally:
            self.module.train(training)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"evaluate returned a {type(metrics).__name__}. Must return a dict of metrics by name.")
        stop = self.config.early_stop
        if stop is not None and stop.metric not in metrics:
            raise ValueError(
                f"Invalid EarlyStop(metric={stop.metric!r}): evaluate returned {', '.join(map(repr, metrics)) or 'nothing'}. "
                "Name one of them."
            )
        self.record(**metrics)
        self.state.metrics.update(self.state.recorded)

    def _finish(self, why: str) -> None:
        evaluates = why == TOTAL_STEPS_REACHED and self._evaluate is not None
        if evaluates and self.state.evaluated_at < self.effective_steps:
            self._run_evaluation()
        self.state.stopped = why
        metrics = self.state.metrics or self._metrics(math.nan, self.schedule.lrs[0])
        self.state.metrics = {**metrics, **self.state.recorded}
        self._saver.hand_over()
        self._report(save=self.backend.saves_end)
        if self.backend.rank == 0:
            self._line.end(self.state.metrics, self.total_steps, why)
            _log.info("Ended: %s, at effective step %.2f of %d.", why, self.effective_steps, self.total_steps)
        trace = self._log.finish()
        if trace is not None:
            try:
                self.backend.keep_trace(trace)
            except OSError as e:  # the run is done, and what counts is kept
                warn_at_user(f"The run's trace could not be stored: {e}", RuntimeWarning)

    def _report(self, *, save: bool) -> None:
        folder = self.save_checkpoint() if save else None
        self.backend.report(self._outcome(), folder)
        self._clocks.reported()
        if save:
            self._clocks.saved()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> Path | None:
        """Write this worker's share of a checkpoint, all workers together; the caller hands the folder on.

        Raises:
            RuntimeError: Not at a step boundary, or workers disagree about τ, LR or step.
            CheckpointError: A worker could not write, this checkpoint or the one before.
        """
        self._require_boundary()
        self._read()
        return self._saver.save(self._boundary(), self._content)

    def _save_in_background(self) -> None:
        self._require_boundary()
        self._saver.begin(self._boundary(), self._content, self._outcome())
        self._clocks.saved()

    def _require_boundary(self) -> None:
        if not self.at_boundary:
            raise RuntimeError(
                "A checkpoint between the passes of an optimizer step would lose their gradients. Save at a step boundary: "
                "after run.step() has returned True, before the next backward pass (run.at_boundary)."
            )

    def _boundary(self) -> Boundary:
        return Boundary(self.state.iterations, self.effective_steps, self.schedule.lrs[0])

    def _content(self) -> Content:
        return self._train_state.tensors(), self._train_state.state(), self._log.files()
