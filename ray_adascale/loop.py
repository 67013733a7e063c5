"""Run: the object of a worker's training loop. It needs no Ray; one process and torchrun will do."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import checkpoint
from . import gain as gain_math
from ._version import __version__
from .backend import Backend, LocalBackend
from .config import AdaScaleConfig, BatchPlan
from .data import BatchSource, MicroBatch, make_source
from .optim.adascale import AdaScale
from .optim.grad_scaler import ShardedGradScaler
from .optim.oss import OSS, has_state
from .optim.rules import AdamScaleRule, AdaScaleRule, make_rule
from .optim.state import (
    hyperparameters,
    load_hyperparameters,
    load_optimizer,
    optimizer_tensors,
    parameter_names,
)
from .parallel.fsdp2 import shard_model
from .parallel.sharded import ShardedDataParallel
from .recipe import Recipe
from .resume import ProgressNote, changes_since
from .rng import capture_rng, empty_rng, restore_rng
from .scaling_rules import AdamScale, adam_preconditioner
from .schedule import EffectiveSchedule, curve_difference
from .trace import Trace, read_trace

__all__ = ["METRICS", "Run"]

_log = logging.getLogger(__name__)

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

_TRACE = "trace.jsonl"


class Run:
    """A training run at any scale, with the schedule of the base batch.

    Iterate over it for micro-batches, and call :meth:`backward` and :meth:`step` for each::

        run = Run(model, optimizer, scheduler, dataset, AdaScaleConfig(base_batch_size=128, ...))
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()

    The loop ends when τ reaches T. It begins where the newest checkpoint of ``backend`` stands.

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
        backend: Backend | None = None,
    ) -> None:
        self.backend = LocalBackend() if backend is None else backend
        self.config = config = config.with_recipe(recipe)
        _check_built(model, optimizer, config)
        self.plan = config.plan(self.backend.world_size)
        self.source: BatchSource = make_source(
            dataset,
            global_batch_size=self.plan.global_batch_size,
            rank=self.backend.rank,
            world_size=self.plan.world_size,
            accumulation=self.plan.accumulation,
            seed=config.seed,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
            collate_fn=collate_fn,
            num_workers=config.num_loader_workers,
            pin_memory=config.pin_memory,
            length=config.dataset_length,
        )
        per_epoch = self.source.base_steps_per_epoch(self.plan.base_batch_size)
        self.base_steps_per_epoch = per_epoch
        self.total_steps = config.resolve_total_steps(per_epoch)
        self.schedule = EffectiveSchedule(
            optimizer,
            scheduler,
            unit=config.scheduler_unit,
            base_steps_per_epoch=per_epoch,
            total_steps=self.total_steps,
        )
        self.lr_curve = self.schedule.curve(self.total_steps)
        if recipe is not None:
            _check_recipe(recipe, config.scheduler_unit, per_epoch, self.lr_curve)
        self.recipe = recipe

        self.module = model.to(self.backend.device)
        self._names = parameter_names(self.module, optimizer)
        workers = self.plan.world_size
        self._control = dist.new_group(backend="gloo") if workers > 1 and dist.get_backend() == "nccl" else None
        rule = make_rule(config.rule)
        adam = isinstance(rule, AdamScaleRule | AdamScale)
        if adam and config.sharding not in ("auto", "none"):
            raise ValueError(
                f"Invalid AdaScaleConfig(sharding={config.sharding!r}) with the rule AdamScale: its statistics need Adam's "
                "state of every parameter on every worker. Use sharding='none', or 'auto', which chooses it."
            )
        sharding = "none" if adam or workers == 1 else config.sharding
        if sharding == "auto":
            sharding = "zero2" if has_state(optimizer) else "none"
        self.model: nn.Module = self.module
        if sharding == "fsdp2":
            if config.precision == "fp16":
                raise ValueError("AdaScaleConfig(sharding='fsdp2', precision='fp16') is not supported. Use 'bf16'.")
            shard_model(self.module, optimizer, self.backend.device)
            self._names = parameter_names(self.module, optimizer)
        if sharding in ("oss", "zero2"):
            optimizer = OSS.wrap(optimizer)
        if sharding == "zero2":
            self.model = ShardedDataParallel(self.module, optimizer)
        elif workers > 1 and sharding != "fsdp2":
            self.model = DistributedDataParallel(
                self.module,
                device_ids=[self.backend.device] if self.backend.device.type == "cuda" else None,
                find_unused_parameters=config.find_unused_parameters,
                gradient_as_bucket_view=True,
            )
            if workers > 2 and not config.find_unused_parameters:
                _settle_buckets(self.model)
        self._scaler: torch.amp.GradScaler | None = None
        if config.precision == "fp16":
            self._scaler = ShardedGradScaler(device=self.backend.device.type)
        self.optimizer = AdaScale(
            optimizer,
            model=self.module if sharding == "fsdp2" else None,
            world_size=workers,
            num_gradients_to_accumulate=self.plan.accumulation,
            grad_scaler=self._scaler,
            clip="averages",
            averaging_window=config.averaging_window,
            total_steps=self.total_steps,
            single_gain=True,
            base_batch_size=self.plan.base_batch_size,
            batch_size=self.plan.global_batch_size,
            rule=rule,
            precondition=adam_preconditioner(optimizer) if adam else None,
        )
        self.optimizer.rider = self._rider

        self._evaluate = evaluate
        self._evaluate_every = config.evaluate_every or self.total_steps / 10
        self._evaluated_at = -1.0
        self._extra: dict[str, Any] = {}
        self._probed: tuple[float, float] | None = None
        self._progress = 0.0
        self._iterations = 0
        self._nonfinite = 0
        self._attempt = 0
        self._batch: MicroBatch | None = None
        self._weights: list[float] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=self.backend.device)
        self._backward_done = False
        self._unscaled = False
        self._pass = ExitStack()
        self._warned_noise = False
        self._trace: Trace | None = None
        if self.backend.rank == 0:
            scratch = tempfile.mkdtemp(prefix="ray_adascale-")
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            self._trace = Trace(Path(scratch) / _TRACE)
        self._row: dict[str, Any] | None = None  # of the last step, while metrics may still be recorded for it
        self._last: dict[str, Any] = {}
        self._loop_seconds = 0.0
        self.stopped: str | None = None
        """Why the loop ended: "total_steps reached", or None while it runs."""
        self._saving: tuple[checkpoint.Save, Path, dict[str, Any]] | None = None  # in flight, and the metrics then
        self._notice: str | None = None
        self._polled = time.monotonic()
        note = self.backend.progress_file if self.backend.rank == 0 else None
        self._note = None if note is None else ProgressNote(note)
        with self.backend.latest_checkpoint() as folder:
            if folder is not None:
                self._load(folder)
            self._log_start(folder)
        self._restart_clocks()

    # ---- what the loop looks at ----------------------------------------------------------------------------------

    @property
    def effective_steps(self) -> float:
        """τ."""
        return self.optimizer.effective_steps

    @property
    def scale(self) -> float:
        """S."""
        return self.plan.scale

    @property
    def gain(self) -> float:
        """r of the gradients in place, or of the last step."""
        return self.optimizer.gain()

    @property
    def progress(self) -> float:
        """Σ r over the optimizer steps: τ under AdaScale's own rule; AdaptDL's ``progress`` under every rule."""
        return self._progress

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
        every = self._evaluate_every
        finished = self.effective_steps >= self.total_steps and self._evaluated_at < self.effective_steps
        return self.at_boundary and (finished or self.effective_steps // every > max(self._evaluated_at, 0.0) // every)

    def record(self, **metrics: Any) -> None:
        """Add metrics to this and every later report, until they are recorded anew. Also says that evaluation is done."""
        metrics = _plain_numbers(metrics)
        self._extra.update(metrics)
        if self._row is not None:
            self._row.update(metrics)
        self._evaluated_at = self.effective_steps

    def observe_noise(self, sigma2: float, mu2: float) -> None:
        """Take σ² and μ² from a probe, for reports where the step itself shows none (one gradient sample at S = 1)."""
        self._probed = sigma2, mu2

    def summary(self) -> dict[str, Any]:
        """The last report's metrics, why the run stopped, and the seconds spent in the loop since this start."""
        return {**self._last, "stopped": self.stopped, "loop_seconds": self._loop_seconds}

    # ---- the loop ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches on the device until τ reaches T; then evaluates, reports and saves a last time."""
        self.module.train()
        entered = time.monotonic()
        batches = iter(self.source)
        try:
            while self.effective_steps < self.total_steps:
                batch = next(batches)
                self._begin_pass(batch)
                yield _to_device(batch.batch, self.backend.device)
                if self._batch is not None:
                    raise RuntimeError(
                        "A micro-batch went by without run.step(). Call run.backward() and run.step() each time."
                    )
            if self.stopped is None:
                self._finish()
        finally:
            self._loop_seconds = time.monotonic() - entered
            self._pass.close()
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
            self._pass.enter_context(self.model.no_sync())
        elif isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(batch.is_last)
        self._autocast = ExitStack()
        if self.config.precision != "fp32":
            dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
            self._autocast.enter_context(torch.autocast(self.backend.device.type, dtype=dtype))
        self._pass.push(self._autocast)

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
        self._loss += batch.weight * loss.detach()
        # DDP averages over workers and passes add up, so ḡ = Σ w_i g_i needs each loss times n·w_i/passes.
        factor = self.plan.num_samples * batch.examples / (self.plan.global_batch_size * self.plan.accumulation)
        if factor != 1:
            loss = loss * factor
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self.optimizer.sample_weights = self._weights
        loss.backward()
        self._backward_done = True
        self._pass.close()

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
        if self._scaler is not None and not self._unscaled:
            self._scaler.unscale_(self.optimizer)
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
        own = _plain_numbers(metrics)
        self._extra.update({key: value for key, value in own.items() if key != "loss"})
        if not batch.is_last:
            self._batch = None
            return False
        if self.config.grad_clip is not None:
            self.clip_grad_norm_(self.config.grad_clip)
        lr = self.schedule.lrs[0]
        steps_before = self.optimizer.steps
        if self._scaler is not None:
            self.optimizer.rider_sum = None if self.plan.num_samples == 1 else self.optimizer.rider_sum
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        taken = self.optimizer.steps > steps_before
        shared = self.optimizer.rider_sum if self.optimizer.rider_sum is not None else self._rider()
        loss, report_due, checkpoint_due, poll_due, busy = shared.tolist()
        self.optimizer.zero_grad()
        self._batch, self._unscaled = None, False
        self.source.commit()
        self._iterations += 1
        self._examples += self.plan.global_batch_size
        if taken:
            self._nonfinite = 0
            self._progress += self.optimizer.gain()
            self.schedule.advance_to(self.effective_steps)
        else:
            self._count_nonfinite(loss)
        metrics_now = self._metrics(own.get("loss", loss), lr)
        self._last = {**metrics_now, **self._extra}
        self._write_row()
        place = {"step": self._iterations, "attempt": self._attempt, "position": self.source.position}
        self._row = {**place, **metrics_now, **own}
        if self._note is not None:
            self._note.write(self._iterations)
        if self.backend.rank == 0:
            self.backend.observe(self._last, self.total_steps)
        if self.effective_steps < self.total_steps:
            evaluated = self._evaluate is not None and self.evaluate_due
            if evaluated:
                self._run_evaluation()
            if self._saving is not None and not busy:
                self._hand_over()
            # While a worker uploads, a report would wait for it, and so would a checkpoint.
            report, save = bool(report_due and not busy), bool(checkpoint_due and not busy)
            if poll_due and self._preempted():
                self._report(save=True)
            else:
                if save and self.config.async_checkpoint:
                    self._save_in_background()
                    save = False
                if (evaluated and self.backend.reports_evaluations) or report or save:
                    self._report(save=save)
        return True

    def _rider(self) -> Tensor:
        """What one step shares beside its statistics: the loss, what is due by rank 0's clock, and who is still writing."""
        now = time.monotonic()
        first = self.backend.rank == 0
        flags = [
            float(first and now - self._reported >= self.config.report_every_s),
            float(first and self._saving is None and now - self._saved >= self.config.checkpoint_every_s),
            float(first and now - self._polled >= self.backend.preemption_poll_s),
            float((self._saving is not None and self._saving[0].running) or self.backend.uploading),
        ]
        return torch.cat([self._loss.reshape(1), torch.tensor(flags, dtype=torch.float64, device=self._loss.device)])

    def _count_nonfinite(self, loss: float) -> None:
        self._nonfinite += 1
        if self._nonfinite >= self.config.max_nonfinite_steps:
            loss_scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            raise FloatingPointError(
                f"The gradient was not finite in {self._nonfinite} optimizer steps in a row, up to step {self._iterations} at "
                f"effective step {self.effective_steps:.1f} of {self.total_steps} (loss {loss:g}, loss scale {loss_scale:g}). "
                "The weights are those before. Lower the learning rate, clip gradients, or look at the data of this step."
            )

    def _metrics(self, loss: float, lr: float) -> dict[str, Any]:
        sigma2, mu2 = self.optimizer.average_moments()
        if math.isnan(sigma2) and self._probed is not None:
            sigma2, mu2 = self._probed
        noise_scale = math.nan
        if not math.isnan(sigma2):
            variance, square = torch.tensor([sigma2, mu2], dtype=torch.float64)
            noise_scale = float(gain_math.noise_scale(variance, square, self.plan.base_batch_size))
        gain, scale = self.optimizer.gain(), self.plan.scale
        self._warn_about_noise(sigma2, noise_scale)
        return {
            "gain": gain,
            "scale": scale,
            "effective_steps": self.effective_steps,
            "progress": self._progress,
            "lr": lr,
            "loss": loss,
            "sigma2": sigma2,
            "mu2": mu2,
            "noise_scale": noise_scale,
            "efficiency": gain / scale,
            "examples_per_s": self._examples / max(time.monotonic() - self._started, 1e-9),
            "optimizer_steps": self.optimizer.steps,
            "world_size": self.plan.world_size,
        }

    def _write_row(self) -> None:
        """Trace the last step. Called when nothing more can be recorded for it."""
        if self._trace is not None and self._row is not None:
            self._trace.append(self._row)
        self._row = None

    def _warn_about_noise(self, sigma2: float, noise_scale: float) -> None:
        settled = self.effective_steps >= self.config.averaging_window * self.total_steps
        if self._warned_noise or not settled or math.isnan(sigma2) or self.backend.rank != 0:
            return
        if self.plan.scale > 1 and self.plan.global_batch_size > noise_scale:
            self._warned_noise = True
            warnings.warn(
                f"The batch of {self.plan.global_batch_size} exceeds the gradient noise scale of {noise_scale:.0f} examples "
                f"(gain {self.optimizer.gain():.2f} at scale {self.plan.scale:g}): more workers now buy less than half.",
                stacklevel=3,
            )

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
        self.record(**metrics)
        self._last.update(self._extra)

    def _finish(self) -> None:
        if self._evaluate is not None and self._evaluated_at < self.effective_steps:
            self._run_evaluation()
        self.stopped = "total_steps reached"
        self._last = {**(self._last or self._metrics(math.nan, self.schedule.lrs[0])), **self._extra}
        self._report(save=True)
        self._write_row()
        if self._trace is not None:
            self._trace.flush()
            self.backend.keep_trace(self._trace.path)
            self._trace.close()

    def _restart_clocks(self) -> None:
        self._started = self._reported = self._saved = time.monotonic()
        self._examples = 0

    def _report(self, *, save: bool) -> None:
        folder = self.save_checkpoint() if save else None
        self.backend.report(self._last, folder)
        self._started = self._reported = time.monotonic()
        self._examples = 0
        if save:
            self._saved = self._reported

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> Path | None:
        """Write this worker's share of a checkpoint, all workers together; the caller hands the folder on.

        Raises:
            RuntimeError: Not at a step boundary, or workers disagree about τ, LR or step.
            CheckpointError: A worker could not write, this checkpoint or the one before.
        """
        return self._checkpoint(checkpoint.save)[0]

    def _save_in_background(self) -> None:
        """Copy what goes into a checkpoint, and have a thread write it. ``_hand_over`` does the rest, steps later."""
        folder, saving = self._checkpoint(checkpoint.begin_save)
        self._saved = time.monotonic()
        if folder is not None:
            assert saving is not None
            self._saving = saving, folder, dict(self._last)

    def _checkpoint(self, save: Callable[..., checkpoint.Save | None]) -> tuple[Path | None, checkpoint.Save | None]:
        if not self.at_boundary:
            raise RuntimeError(
                "A checkpoint between the passes of an optimizer step would lose their gradients. Save at a step boundary: "
                "after run.step() has returned True, before the next backward pass (run.at_boundary)."
            )
        self._hand_over()  # at most one in flight
        folder = self.backend.checkpoint_folder(self._iterations)
        if folder is None:
            return None, None
        error: Exception | None = None
        tensors: dict[str, Any] = {}
        try:
            tensors = self._tensors()
        except Exception as e:  # raised below, once the others know that they need not wait for this worker
            error = e
        self._check_agreement(error)
        files = {}
        self._write_row()
        if self._trace is not None:
            self._trace.flush()
            files[_TRACE] = self._trace.path, self._trace.path.stat().st_size
        with _discarded_on_error(folder):
            return folder, save(folder, tensors, self._state(), files=files, process_group=self._control)

    def _hand_over(self) -> None:
        """Seal the checkpoint in flight, if there is one, and hand it to the backend. All workers together.

        Raises:
            CheckpointError: A worker's thread could not write it; says which, and why.
        """
        if self._saving is None:
            return
        saving, folder, metrics = self._saving
        self._saving = None
        with _discarded_on_error(folder):
            saving.finish()
        self.backend.report_in_background(metrics, folder)

    def _preempted(self) -> bool:
        """Whether there is a new notice. All workers together."""
        self._polled = time.monotonic()
        notice, before = self.backend.preemption_notice(), self._notice
        self._notice = notice
        new = notice is not None and notice != before
        if new and self.backend.rank == 0:
            _log.warning("Preemption notice: %s. Writing a checkpoint at step %d.", notice, self._iterations)
        return new

    def _tensors(self) -> dict[str, Any]:
        """This worker's part of the checkpoint."""
        rank = self.backend.rank
        # Parameters are equal everywhere. Buffers (BatchNorm's averages) are each worker's own after a step, and DDP goes on
        # with rank 0's.
        own = {name for name, _ in self.module.named_buffers()} if rank > 0 else ()
        weights = self.module.state_dict()
        tensors: dict[str, Any] = {f"model/{key}": value for key, value in weights.items() if key not in own}
        tensors.update(optimizer_tensors(self.optimizer, self._names))
        tensors.update({f"adascale/{key}": value for key, value in self.optimizer.statistics_state().items()})
        tensors.update({f"rng/{rank}/{key}": value for key, value in capture_rng(self.backend.device).items()})
        tensors["schedule/lr_curve"] = torch.tensor(self.lr_curve, dtype=torch.float64)
        return tensors

    def _state(self) -> dict[str, Any]:
        plan: BatchPlan = self.plan
        return {
            "effective_steps": self.effective_steps,
            "total_steps": self.total_steps,
            "scheduler_unit": self.config.scheduler_unit,
            "base_steps_per_epoch": self.base_steps_per_epoch,
            "progress": self._progress,
            "iterations": self._iterations,
            "nonfinite": self._nonfinite,
            "attempt": self._attempt,
            "evaluated_at": self._evaluated_at,
            "plan": {
                "base_batch_size": plan.base_batch_size,
                "global_batch_size": plan.global_batch_size,
                "world_size": plan.world_size,
                "accumulation": plan.accumulation,
            },
            "schedule": self.schedule.state_dict(),
            "data": self.source.state_dict(),
            "param_groups": hyperparameters(self.optimizer),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "recipe": None if self.recipe is None else self.recipe.fingerprint,
            "recorded": self._extra,
            "metrics": self._last,
            "stopped": self.stopped,
            "versions": {"ray_adascale": __version__, "torch": torch.__version__},
        }

    def _check_agreement(self, error: Exception | None) -> None:
        """All workers together: raises where they are at different places, or where one can't take part."""
        if error is not None and self.plan.world_size == 1:
            raise error
        if self.plan.world_size == 1:
            return
        place = [self.effective_steps, self.schedule.lrs[0], float(self._iterations), float(error is not None)]
        mine = torch.tensor(place, dtype=torch.float64)
        if self._control is None:
            mine = mine.to(self.backend.device)
        everyone = [torch.empty_like(mine) for _ in range(self.plan.world_size)]
        dist.all_gather(everyone, mine, group=self._control)
        if error is not None:
            raise error
        failed = [rank for rank, row in enumerate(everyone) if row[3] != 0]
        if failed:
            raise RuntimeError(
                f"No checkpoint was written: rank {failed[0]} has state that can't be saved; see its error."
            )
        if any(not torch.equal(other, everyone[0]) for other in everyone):
            table = "; ".join(
                f"rank {rank}: τ={tau!r}, lr={lr!r}, step={step:.0f}"
                for rank, (tau, lr, step, _) in enumerate(row.tolist() for row in everyone)
            )
            raise RuntimeError(f"Workers disagree about where the run is, so no checkpoint was written. {table}")

    def _load(self, folder: Path) -> None:
        state = checkpoint.load_state(folder)
        index = checkpoint.tensor_index(folder)
        changed = self._check_unchanged(folder, state, index)
        into: dict[str, Any] = {f"model/{key}": value for key, value in self.module.state_dict().items()}
        statistics = {
            key.removeprefix("adascale/"): torch.empty(info.shape, dtype=info.dtype)
            for key, info in index.items()
            if key.startswith("adascale/")
        }
        into.update({f"adascale/{key}": value for key, value in statistics.items()})
        checkpoint.load(folder, into)
        load_optimizer(folder, self.optimizer, self._names)
        if changed:  # and accepted: the new settings hold, from this τ on
            self.schedule.load_state_dict({"calls": self.schedule.due(state["effective_steps"])})
            # σ² is of a base batch, so of another now.
            statistics["total"][0] *= state["plan"]["base_batch_size"] / self.plan.base_batch_size
        else:
            self.schedule.load_state_dict(state["schedule"])
            load_hyperparameters(self.optimizer, state["param_groups"])
        self.optimizer.load_statistics_state(statistics)
        self.source.load_state_dict(state["data"])
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self._progress, self._iterations = state["progress"], state["iterations"]
        self._nonfinite, self._attempt = state["nonfinite"], state["attempt"] + 1
        self._evaluated_at, self._extra = state["evaluated_at"], state["recorded"]
        self._last, self.stopped = state["metrics"], state["stopped"]
        if state["plan"]["world_size"] == self.plan.world_size:
            self._load_rng(folder)
        if self._trace is not None:
            saved = Path(folder) / _TRACE
            if saved.exists():
                for row in read_trace(saved):
                    self._trace.append(row)

    def _load_rng(self, folder: Path) -> None:
        index = checkpoint.tensor_index(folder)
        prefix = f"rng/{self.backend.rank}/"
        rng = {k: v for k, v in empty_rng(self.backend.device).items() if f"{prefix}{k}" in index}
        checkpoint.load(folder, {f"{prefix}{k}": v for k, v in rng.items()})
        restore_rng(rng, self.backend.device)

    def _check_unchanged(self, folder: Path, state: Mapping[str, Any], index: Mapping[str, Any]) -> bool:
        """Whether base batch, T or LR curve were changed, and that on purpose."""
        saved = torch.empty(index["schedule/lr_curve"].shape, dtype=torch.float64)
        checkpoint.load(folder, {"schedule/lr_curve": saved})
        now = {
            "base_batch_size": self.plan.base_batch_size,
            "total_steps": self.total_steps,
            "lr_curve": self.lr_curve,
            "scheduler_unit": self.config.scheduler_unit,
            "base_steps_per_epoch": self.base_steps_per_epoch,
        }
        changed = changes_since(state, saved.tolist(), now)
        if not changed:
            return False
        what = f"The run was changed since its checkpoint {Path(folder).name}: {'; '.join(changed)}."
        if not self.config.accept_changes:
            raise ValueError(
                f"{what} Restore the settings, start a new run under another name, or accept them with "
                "AdaScaleConfig(accept_changes=True)."
            )
        if self.backend.rank == 0:
            warnings.warn(
                f"{what} Accepted: it goes on at effective step {state['effective_steps']:.1f} with the new settings.",
                stacklevel=4,
            )
        return True

    def _log_start(self, folder: Path | None) -> None:
        """Say where the run resumes, and what was lost."""
        if self.backend.rank != 0:
            return
        last = None if self._note is None else self._note.last
        if folder is None:
            if last:
                _log.warning("No checkpoint was completed in the %d optimizer steps before; the run begins anew.", last)
            return
        if last is None:
            lost = f"Lost are the steps since then, at most {self.config.checkpoint_every_s:g} s and a checkpoint's writing"
        else:
            lost = f"At most {max(last - self._iterations, 0)} optimizer steps were lost"
        _log.log(
            logging.INFO if last is not None and last <= self._iterations else logging.WARNING,
            "Resumed from %s: optimizer step %d, effective step %.2f of %d, start %d, %d workers. %s.",
            Path(folder).name,
            self._iterations,
            self.effective_steps,
            self.total_steps,
            self._attempt,
            self.plan.world_size,
            lost,
        )


@contextmanager
def _discarded_on_error(folder: Path) -> Iterator[None]:
    """Leaves no half of a checkpoint behind: it is no use, and a full disk needs the room."""
    try:
        yield
    except BaseException:
        if not checkpoint.is_sealed(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


class _EveryParameter(nn.Module):
    """A forward pass that uses every parameter, and has zero for its gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module  # DDP wants its buffers

    def forward(self) -> Tensor:
        used = [p for p in self.module.parameters() if p.requires_grad]
        return torch.stack([(p.flatten()[:1] * 0).sum().float() for p in used]).sum()


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Have DDP regroup its buckets now, in an order that depends on the parameters alone.

    It does so once, after its first backward pass, by the order in which gradients came. So the first step after a start
    sums over workers in another order than that step did in a run that was never stopped; from three workers on that
    shows in the last bit. A backward pass through a stand-in is the only way to have it behind us: the user's own needs
    their loss. Gradients come in reverse order of the parameters then, which is what most models do.
    """
    module = model.module
    model.module = _EveryParameter(module)
    try:
        model().backward()
    finally:
        model.module = module
    model.zero_grad()


def _check_built(model: nn.Module, optimizer: Optimizer, config: AdaScaleConfig) -> None:
    if isinstance(optimizer, list | tuple | dict):
        raise ValueError(
            f"Invalid optimizer: a {type(optimizer).__name__} of {len(optimizer)}. Only one is supported: there is one gain "
            "and one clock. Make one optimizer with several parameter groups."
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"Invalid optimizer of type {type(optimizer).__name__}. Must be a torch.optim.Optimizer.")
    if isinstance(model, DistributedDataParallel | ShardedDataParallel):
        raise ValueError("Pass the bare model: it is wrapped for data parallelism here.")
    if isinstance(optimizer, AdaScale | OSS):
        raise ValueError(f"Pass the bare optimizer: it is wrapped here, and {type(optimizer).__name__} would be twice.")
    if not isinstance(optimizer, SGD) and isinstance(make_rule(config.rule), AdaScaleRule):
        warnings.warn(
            f"AdaScale is derived for SGD with momentum; {type(optimizer).__name__} divides by the gradient's own size, so "
            "the right factor on its LR is not known (its own invariance suggests about √S: rule='sqrt', or the experimental "
            "'adamscale'). The run goes on; "
            "compare with a base run before you trust it.",
            stacklevel=3,
        )


def _check_recipe(
    recipe: Recipe, unit: str | None, base_steps_per_epoch: float | None, curve: list[list[float]]
) -> None:
    if unit != recipe.scheduler_unit:
        raise ValueError(f"Invalid scheduler_unit={unit!r}: the recipe was found with {recipe.scheduler_unit!r}.")
    if unit == "epoch" and base_steps_per_epoch != recipe.base_steps_per_epoch:
        raise ValueError(
            f"The dataset has {base_steps_per_epoch} base steps an epoch, the recipe's had {recipe.base_steps_per_epoch}: the "
            "schedule would move at other steps. Use the same dataset, or search anew."
        )
    difference = curve_difference(recipe.lr_curve, curve)
    if difference is not None:
        raise ValueError(
            f"The learning-rate curve is not the recipe's: {difference}. Build optimizer and scheduler from the "
            "hyperparameters that the function is given, as in the search; or search anew."
        )


def _plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as Python numbers; one-element tensors and NumPy scalars are read out."""
    out = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
    for key, value in out.items():
        if key in METRICS and key != "loss":
            raise ValueError(f"Invalid metric {key!r}: the run reports it itself. Choose another name.")
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"Invalid metric {key!r} of type {type(value).__name__}. Must be a number or a string.")
    return out


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: _to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch
