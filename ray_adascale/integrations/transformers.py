"""Hugging Face's Trainer with AdaScale: a mixin, because only the Trainer has the
passes and tokens of a step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import DefaultFlowCallback, Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from .._torch import generators_kept, in_eval_mode
from .._warn import warn_at_user
from ..config import AdaScaleConfig
from ..forecast.replay import PredictedRun
from ..optim.adascale import AdaScaleOptimizer
from ..optim.tau_schedule import TauSchedule
from ..recipe import Recipe
from ..run.base.attach import attach, base_length
from ..run.observe.eta import forecast_run, steps_left
from .client import (
    Epoch,
    RecipeRecorder,
    StepLog,
    base_length_of,
    epoch_of,
    follow_batch,
    parts_of,
    require_samples,
    with_clients_batch,
)

_Base: Any = Trainer if TYPE_CHECKING else object

_BARS = ("training_bar", "training_tracker")
"""The attributes of the Trainer's callbacks that show the progress: on a terminal,
and in a notebook.
"""


class _Stop(TrainerCallback):
    """Ends training when τ has reached T, and informs the trainer of the events of
    training.
    """

    def __init__(self, trainer: AdaScaleMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        # Resumed at T, if it has finished.
        control.should_training_stop = self._trainer.training_has_begun(
            kwargs["train_dataloader"]
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.step_has_ended()
        self._trainer.show_expected_end()
        if self._trainer.schedule is not None and self._trainer.schedule.finished:
            control.should_training_stop = True
            # The Trainer evaluates and saves at max_steps, which is T. Ask it what it
            # does at the last step.
            last = replace(state, max_steps=state.global_step)
            for each in self._trainer.callback_handler.callbacks:
                if isinstance(each, DefaultFlowCallback):
                    each.on_step_end(args, last, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.training_has_ended()


class AdaScaleMixin(_Base):
    """A mixin for subclasses of ``transformers.Trainer``. :class:`ScaledTrainer` is the
    plain Trainer with it.

    Training ends at τ ≥ T, after at most T optimizer steps. The last step is evaluated
    and saved as that of a plain run. ``max_steps`` is set to T unless the arguments set
    it, and ``num_train_epochs`` has no effect. A scheduler
    that the Trainer creates has a length of T steps. If the loss is normalised over the
    tokens of a step (``num_items_in_batch``), each gradient sample is weighted by its
    tokens. If the model ignores that number, as BERT's classifier does, the passes are
    averaged, with a warning. The last step of an epoch counts for the passes that it
    has. S and n are those of the actual batch, also with ``split_batches`` and after
    ``auto_find_batch_size`` has reduced the batch. Each log has gain, scale and τ. The
    progress bar reaches to the expected end.

    Args:
        *args: Arguments of the Trainer. ``optimizers=(optimizer, scheduler)`` must be
            bare; or use ``args.optim="sgd"``.
        adascale: Settings, see :func:`ray_adascale.attach`. Batch size, passes and
            length of the dataset are the Trainer's.
        recipe: The result of a search, or of a base run that was recorded with this
            class.
        trace: Folder of the run, in which rank 0 writes the trace for
            ``ray-adascale report``.
        recorder: Records the recipe of this run, which must be a base run.
        **kwargs: Arguments of the Trainer.

    Attributes:
        schedule: The :class:`ray_adascale.TauSchedule`; None before training begins.

    Raises:
        ValueError: A setting can't work, ``compute_loss_func`` ignores
            ``num_items_in_batch`` (at the first step), or the run has reached T and
            ``train()`` is called again.
    """

    def __init__(
        self,
        *args: Any,
        adascale: AdaScaleConfig,
        recipe: Recipe | None = None,
        trace: str | Path | None = None,
        recorder: RecipeRecorder | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.args: Any = copy.copy(self.args)  # a copy, because this class changes it
        self.schedule: TauSchedule | None = None
        self._recipe = recipe
        self._trace = trace
        self._recorder = recorder
        self._steps: StepLog | None = None
        self._forecast: PredictedRun | None = None
        self._normalises: bool | None = None
        self._losses: list[Tensor] = []  # of the present step
        self._warned_of_dropped = False
        if self.args.n_gpu > 1:
            raise ValueError(
                f"The Trainer would use DataParallel on {self.args.n_gpu} GPUs in one "
                "process. Start one process per GPU (torchrun, accelerate launch), or "
                "hide the others (CUDA_VISIBLE_DEVICES)."
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "DeepSpeed and FSDP under the Trainer are not supported: each worker "
                "must have the whole model. Train with DistributedDataParallel, or "
                "with ray_adascale.Run and its own sharding."
            )
        config = with_clients_batch(
            adascale,
            accumulation=(
                self.args.gradient_accumulation_steps,
                "TrainingArguments(gradient_accumulation_steps=...)",
            ),
            per_worker_batch_size=(
                self._per_worker_batch_size(),
                "TrainingArguments(per_device_train_batch_size=...)",
            ),
            epoch=Epoch(
                len(self.train_dataset) if has_length(self.train_dataset) else None,
                self.args.dataloader_drop_last,
            ),
            recipe=recipe,
        )
        self._t_by_dataset = (
            config.total_epochs is not None and adascale.dataset_length is None
        )
        precision = config.precision
        if self.args.bf16:
            precision = "bf16"
        elif self.args.fp16:
            precision = "fp16"
        clip = self.args.max_grad_norm or math.inf
        config = replace(
            config, precision=precision, grad_clip=config.grad_clip or clip
        ).with_recipe(recipe)
        self._require_length(config)
        per_epoch, self._total_steps = base_length(config)
        self._config = config
        if self.is_world_process_zero():
            for message in (
                self._epochs_without_effect(per_epoch),
                self._micro_batches_alike(),
                self._shares_of_total_steps(),
            ):
                if message:
                    warn_at_user(message)
        if self.args.max_steps <= 0:
            self.args.max_steps = self._total_steps
        self.add_callback(_Stop(self))

    # ---- arguments that have another meaning here ------------------------------------

    def _require_length(self, config: AdaScaleConfig) -> None:
        """Check that the settings have T.

        Raises:
            ValueError: They have not.
        """
        if config.total_steps is not None or config.total_epochs is not None:
            return
        if self.args.max_steps > 0:
            theirs = f"max_steps={self.args.max_steps}"
            mine = f"total_steps={self.args.max_steps}"
        else:
            theirs = f"num_train_epochs={self.args.num_train_epochs:g}"
            mine = f"total_epochs={self.args.num_train_epochs:g}"
        raise ValueError(
            f"Missing AdaScaleConfig({mine}): the base run's length T. It is not read "
            f"from TrainingArguments({theirs}), which would count the larger steps of "
            f"this run. If the base run had {theirs}, write AdaScaleConfig({mine})."
        )

    def _epochs_without_effect(self, per_epoch: float | None) -> str | None:
        """Return a warning if ``num_train_epochs`` was set, and is not T.

        Args:
            per_epoch: Base steps in an epoch; None if unknown.
        """
        epochs = self.args.num_train_epochs
        if (
            epochs == type(self.args).num_train_epochs  # the default
            or self.args.max_steps > 0
            or per_epoch is None
            or abs(epochs * per_epoch - self._total_steps) < 1
        ):
            return None
        remedy = (
            f"Write AdaScaleConfig(total_epochs={epochs:g}), or leave it out."
            if self._recipe is None
            else "Leave it out: T is the recipe's."
        )
        return (
            f"num_train_epochs={epochs:g} has no effect: the run ends at T = "
            f"{self._total_steps} base steps, which are "
            f"{self._total_steps / per_epoch:.3g} epochs of the base run. {remedy}"
        )

    def _micro_batches_alike(self) -> str | None:
        """Return a warning if the micro-batches of a step are of like lengths, and
        their noise is measured.
        """
        if (
            self.args.train_sampling_strategy != "group_by_length"
            or (self._declared_scale == 1 and self._recorder is None)
            or not has_length(self.train_dataset)
        ):
            return None
        return (
            'train_sampling_strategy="group_by_length" makes the examples of all '
            "micro-batches of a step alike in length. Their gradients differ less than "
            "those of random examples, so the noise is underestimated, the gain is too "
            "small, and the run takes too many steps. Write "
            'train_sampling_strategy="random".'
        )

    def _shares_of_total_steps(self) -> str | None:
        """Return a warning if intervals are given as shares of a run that has fewer
        steps than T.
        """
        kinds = ("logging", "eval", "save")
        active = [
            f"{kind}_steps"
            for kind in kinds
            if getattr(self.args, f"{kind}_strategy") == "steps"
        ]
        shares = {name: getattr(self.args, name) for name in active}
        shares = {name: share for name, share in shares.items() if 0 < share < 1}
        # A smaller max_steps is the run's real length.
        shorter = 0 < self.args.max_steps < self._total_steps
        if not shares or self._declared_scale == 1 or shorter:
            return None
        fewest = self._total_steps / self._declared_scale
        given = ", ".join(f"{name}={share:g}" for name, share in shares.items())
        better = ", ".join(
            f"{name}={math.ceil(share * fewest)}" for name, share in shares.items()
        )
        return (
            f"Shares of the run ({given}) are shares of T = {self._total_steps}, and "
            "count optimizer steps. At scale "
            f"{self._declared_scale:g} the run takes fewer than T optimizer steps, "
            f"and at least {math.ceil(fewest)}. Give optimizer steps: {better}."
        )

    @property
    def _declared_scale(self) -> float:
        """S by the arguments."""
        config = self._config
        assert config.per_worker_batch_size is not None
        assert config.base_batch_size is not None
        batch = config.per_worker_batch_size * config.accumulation
        return batch * self.args.world_size / config.base_batch_size

    # ---- optimizer and schedule ------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the Trainer's optimizer, unless one was given, and wrap it in
        AdaScale.

        A second ``train()`` uses the optimizer of the first one, and so does a restart
        of ``auto_find_batch_size`` after an out-of-memory error. With ``model_init``
        the Trainer has dropped the optimizer with the model, and a new one is created.
        """
        if self.schedule is not None and self.optimizer is not None:  # type: ignore[has-type]
            self._adascale.zero_grad()  # gradients of a pass that ran out of memory
            self._losses.clear()
            return self.optimizer  # type: ignore[has-type]
        optimizer = (
            super().create_optimizer()
            if model is None
            else super().create_optimizer(model)
        )
        scheduler = super().create_scheduler(
            num_training_steps=self._total_steps, optimizer=optimizer
        )
        self._created_lr_scheduler = False  # so that a second train() keeps it
        adascale, schedule = attach(
            self.model,
            optimizer,
            scheduler,
            self._config,
            self._recipe,
            grad_scaler=self.accelerator.scaler,
        )
        self.optimizer = adascale
        self.lr_scheduler = schedule
        self.schedule = schedule
        self._steps = StepLog(schedule, self._trace)
        if self._recorder is not None:
            self._recorder.reset()
        return adascale

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule, which was created with the optimizer, for T steps."""
        return self.lr_scheduler

    def _require_own_parts(self) -> None:
        """Check that no subclass has replaced the optimizer or the schedule.

        Raises:
            ValueError: One has.
        """
        if self.schedule is not None and self.lr_scheduler is self.schedule:
            return
        for method in ("create_optimizer", "create_scheduler"):
            if getattr(type(self), method) is not getattr(AdaScaleMixin, method):
                raise ValueError(
                    f"{type(self).__name__}.{method}() has replaced AdaScale's. "
                    "Override it in a subclass of transformers.Trainer, and put the "
                    "mixin in front of that: class Mine(AdaScaleMixin, MyTrainer)."
                )

    def _per_worker_batch_size(self) -> int:
        """Return the examples of a pass on one worker by the Trainer's arguments."""
        passes = self.args.gradient_accumulation_steps
        workers = self.args.world_size
        batch = self.get_total_train_batch_size(self.args) // (passes * workers)
        return batch // workers if self.accelerator.split_batches else batch

    def train(
        self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as the Trainer does.

        Raises:
            ValueError: The run has reached T.
        """
        schedule = self.schedule
        if (
            schedule is not None
            and self.model_init is None
            and not resume_from_checkpoint
        ):
            tau = schedule.effective_steps
            if schedule.finished:
                raise ValueError(
                    "This trainer has reached the end of its schedule: effective step "
                    f"{tau:.0f} of {self._total_steps}. A second train() would go on "
                    "beyond it. To train these weights by another schedule, build a "
                    "new trainer."
                )
            if self.is_world_process_zero() and tau > 0:
                warn_at_user(
                    f"train() goes on at effective step {tau:.0f} of "
                    f"{self._total_steps}, with the statistics and the optimizer state "
                    "of the previous train(), and data from the beginning of an epoch. "
                    "Build a new trainer to begin anew."
                )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_has_begun(self, loader: Any) -> bool:
        """Set S and n to the Trainer's batch. Warn if the loader makes other batches,
        or if no step is left.

        Args:
            loader: The training dataloader, prepared by Accelerate.

        Returns:
            Whether no step is left.

        Raises:
            ValueError: T was computed by the dataset's length, and the loader reads
                another number of examples in an epoch. Or a checkpoint without τ was
                loaded. Or a step has one gradient sample at S ≠ 1.
        """
        self._require_own_parts()
        assert self.schedule is not None
        if self.state.global_step > 0 and self.schedule.effective_steps == 0:
            raise ValueError(
                f"The checkpoint is at optimizer step {self.state.global_step}, and "
                "has no state of the optimizer, which contains τ. The schedule would "
                "begin anew at τ = 0. To resume a run, save its checkpoints with "
                "TrainingArguments(save_only_model=False). To train by a new schedule, "
                "load the weights into the model, and call train() without "
                "resume_from_checkpoint."
            )
        self._check_epoch(epoch_of(loader))
        batch = self._per_worker_batch_size()
        follow_batch(
            self.schedule,
            passes=self.args.gradient_accumulation_steps,
            per_worker_batch_size=batch,
        )
        require_samples(
            self.schedule,
            "TrainingArguments(gradient_accumulation_steps=2, "
            "per_device_train_batch_size={half})",
        )
        self._forecast = forecast_run(
            self._recipe, self._config, parts_of(self.schedule)[1].scale
        )
        wanted = batch * (
            self.accelerator.num_processes if self.accelerator.split_batches else 1
        )
        # An iterable dataset may yield whole batches.
        sampled = not isinstance(getattr(loader, "dataset", None), IterableDataset)
        made = (
            getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
            if sampled
            else None
        )
        if made not in (None, wanted) and self.is_world_process_zero():
            warn_at_user(
                f"The dataloader makes batches of {made} examples, and the arguments "
                f"say {wanted}. The scale is that of the arguments. Unless each pass "
                f"uses {wanted} of the {made} examples, set "
                f"per_device_train_batch_size={made}."
            )
        if self._recorder is not None:
            self._recorder.begin(self.schedule, self._config)
        if self.schedule.finished and self.is_world_process_zero():
            warn_at_user(
                "The checkpoint is at effective step "
                f"{self.schedule.effective_steps:.0f} of {self._total_steps}, the "
                "schedule's end: nothing is trained."
            )
        return self.schedule.finished

    def _check_epoch(self, epoch: Epoch) -> None:
        """Check that T, if it was given in epochs, counts those of the loader, which
        may have a sampler of the user's.

        Raises:
            ValueError: It does not.
        """
        config = self._config
        length = base_length_of(config, epoch, self._recipe)
        if not self._t_by_dataset or length is None or epoch.is_rounded:
            return
        right = base_length(replace(config, dataset_length=length))[1]
        if right == self._total_steps:
            return
        without = ", without a last batch that is not full (drop_last)"
        raise ValueError(
            f"AdaScaleConfig(total_epochs={config.total_epochs:g}) makes T = "
            f"{self._total_steps}, by the length of train_dataset. But the dataloader "
            f"reads {epoch.examples} examples in an epoch"
            f"{without if epoch.drop_last else ''}, by which T is {right}. "
            f"Write AdaScaleConfig(total_steps={right}) in place of total_epochs."
        )

    @property
    def _adascale(self) -> AdaScaleOptimizer:
        return parts_of(self.schedule)[0]

    # ---- a step ----------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """Return the batches of a step, as the Trainer does. Set the passes of the
        step and their weights.
        """
        if self.schedule is not None and self.schedule.finished:
            # A checkpoint at T was loaded. The Trainer checks only after a step whether
            # to stop.
            return [], None
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, items
        if len(batches) < self.args.gradient_accumulation_steps:
            if not has_length(self.callback_handler.train_dataloader):
                # The Trainer does not step here, since it can't know that this was the
                # end of an epoch.
                if self.is_world_process_zero() and not self._warned_of_dropped:
                    self._warned_of_dropped = True
                    warn_at_user(
                        f"The last {len(batches)} batches of an epoch make no whole "
                        f"step of {self.args.gradient_accumulation_steps} passes, and "
                        "are left out: the data has no length, so the Trainer does not "
                        "step there. It would add their gradients to the next epoch's "
                        "first step."
                    )
                return [], None
            self._adascale.expect_passes(len(batches))
        self._adascale.sample_weights = (
            None if items is None else self._token_weights(batches, items, device)
        )
        return batches, items

    def _token_weights(
        self, batches: list[Any], items: Any, device: Any
    ) -> list[float]:
        """Return the weight w of each pass: its tokens over those of the step on all
        workers, as the Trainer counts them.
        """
        over_workers = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        taken = super().get_batch_samples
        try:  # count as the Trainer does, but on this worker alone
            counts = [taken(iter([batch]), 1, device)[1] for batch in batches]
        finally:
            self.args.average_tokens_across_devices = over_workers
        total = float(items) * (1 if over_workers else self.accelerator.num_processes)
        numbers = torch.stack(
            [torch.as_tensor(count, device=device) for count in counts]
        ).double()
        return (numbers / max(total, 1.0)).tolist()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one pass, as the Trainer does."""
        if self._normalises is None and num_items_in_batch is not None:
            self._normalises = self._uses_number_of_items(
                model, inputs, num_items_in_batch
            )
            if self._normalises is False:
                self._average_passes(model, inputs, num_items_in_batch)
        if self._normalises is False:
            num_items_in_batch = None
        if self._recorder is not None:
            self._recorder.before_step(self.model.train(), self._prepare_inputs(inputs))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._losses.append(loss)
        return loss

    def _uses_number_of_items(
        self, model: nn.Module, inputs: dict[str, Any], items: Any
    ) -> bool | None:
        """Return whether the loss is divided by the number of items, as the Trainer
        assumes of a model with ``**kwargs``.

        Collective. None if the losses of this pass do not show it on any worker.

        Raises:
            ValueError: It is on some workers and not on others.
        """
        if self.accelerator.num_processes * self.args.gradient_accumulation_steps == 1:
            return True  # a mean over the pass is the mean over the step
        numbers = (items, 2 * items)
        one, other = self._losses_for(numbers, model, inputs)
        shows = math.isfinite(one) and one != 0  # not where no token of the pass counts
        own = torch.tensor(
            [int(shows and abs(one - other) > 1e-3 * abs(one)), int(shows)],
            device=self.args.device,
        )
        uses, seen = self.accelerator.gather(own).view(-1, 2).sum(0).tolist()
        if 0 < uses < seen:
            raise ValueError(
                f"The loss of {type(self.model).__name__} is divided by "
                f"num_items_in_batch on {uses} of {seen} workers. Must be on all of "
                "them or on none."
            )
        return None if seen == 0 else uses > 0

    def _losses_for(
        self, numbers: Iterable[Any], model: nn.Module, inputs: dict[str, Any]
    ) -> list[float]:
        """Return the loss of a pass for each number of items, without a trace.

        A loss may draw random numbers in eval mode too, as that of a diffusion model.
        It gets the same for each number, and they are those of the training pass.
        """
        device = self.args.device
        cuda = [device.index] if device.type == "cuda" else []

        def loss_for(number: Any) -> float:
            with generators_kept(cuda):
                return float(
                    self.compute_loss(model, {**given}, num_items_in_batch=number)
                )

        with in_eval_mode(model), torch.no_grad(), self.compute_loss_context_manager():
            given = self._prepare_inputs(inputs)
            return [loss_for(number) for number in numbers]

    def _average_passes(
        self, model: nn.Module, inputs: dict[str, Any], items: Any
    ) -> None:
        """Let the Trainer average the passes of a step, because their loss is a mean
        over each pass already. Collective.

        Raises:
            ValueError: The Trainer's own settings prevent it.
        """
        passes = self.args.gradient_accumulation_steps
        # The Trainer's compute_loss multiplies by the number of workers. One of the
        # user's need not.
        one, mean = self._losses_for((items, None), model, inputs)
        own = torch.tensor(
            one / mean if mean else 0.0, dtype=torch.float64, device=self.args.device
        )
        multiples = self.accelerator.gather(own.view(1)).nan_to_num(0.0, posinf=0.0)
        multiple = round(float(multiples.max()), 3)
        factor = passes * multiple
        name = type(self.model).__name__
        if type(self).compute_loss is not Trainer.compute_loss:
            name = f"{type(self).__name__}.compute_loss(), or the model in it,"
        elif self.compute_loss_func is not None:
            name = "compute_loss_func"
        ignores = (
            f"{name} ignores its argument num_items_in_batch: its loss is a mean over "
            "each pass, but the Trainer expects a sum over the pass, divided by the "
            "number of tokens of the step. "
        )
        of = f"{passes} passes"
        if multiple > 1:
            of = f"{multiple:g} workers × {of}"
        too_large = f"{factor:g} times too large ({of})"
        self._adascale.sample_weights = None
        # A newer attribute of the Trainer, by which a subclass fixes the answer.
        fixed = getattr(self, "loss_is_scaled_for_ga", None) is not None
        if factor > 1 and (self.compute_loss_func is not None or fixed):
            raise ValueError(
                f"{ignores}The gradient would be {too_large}. Divide by "
                "num_items_in_batch in compute_loss_func, or leave compute_loss_func "
                "and loss_is_scaled_for_ga out."
            )
        self.model_accepts_loss_kwargs = False
        if factor > 1 and self.is_world_process_zero():
            warn_at_user(
                f"{ignores}So this trainer averages the passes. transformers' own "
                f"Trainer would make the gradient {too_large}. Set accepts_loss_kwargs "
                "= False on the model to confirm it."
            )

    # ---- logs and trace --------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does. Logs of training steps also have gain, scale, τ,
        noise scale and efficiency.
        """
        if self._steps is not None and "loss" in logs:
            logs.update(self._steps.metrics())
        super().log(logs, *args, **kwargs)

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the last step, before the gain, as the Trainer
        logs it.

        The Trainer asks before it steps the scheduler, but this schedule has followed
        τ by then. The method has no public name; a test fails if it moves.
        """
        if self._steps is None:
            return float(super()._get_learning_rate())
        return self._steps.lr

    def step_has_ended(self) -> None:
        """Add this worker's loss of the step to the trace, if there is one."""
        losses = self._losses
        self._losses = []
        if self._steps is not None and self._trace is not None and losses:
            self._steps.record(loss=float(torch.stack(losses).sum()))

    def show_expected_end(self) -> None:
        """Set the end of progress bars, also the user's, to that of the run: T steps,
        the Trainer's maximum, are seldom taken.

        It follows from the recipe's forecast, or else from the mean gain so far.
        """
        found: list[Any] = [
            getattr(each, name, None)
            for each in self.callback_handler.callbacks
            for name in _BARS
        ]
        bars = [bar for bar in found if bar is not None]
        if not bars or self.schedule is None:
            return
        optimizer, plan = parts_of(self.schedule)
        tau = optimizer.effective_steps
        taken = optimizer.steps
        left = steps_left(
            self._forecast,
            tau=tau,
            total_steps=self._total_steps,
            taken=taken,
            scale=plan.scale,
        )
        if math.isfinite(left):
            for bar in bars:
                bar.total = min(
                    self.state.global_step + math.ceil(left), self.state.max_steps
                )

    def training_has_ended(self) -> None:
        """Close the trace. Warn if training ended before T."""
        if self._steps is not None:
            self._steps.close()
        schedule = self.schedule
        if (
            schedule is not None
            and not schedule.finished
            and self.is_world_process_zero()
        ):
            warn_at_user(
                f"Training ended at effective step {schedule.effective_steps:.0f} of "
                f"{self._total_steps}, before the schedule's end: "
                f"max_steps={self.args.max_steps}, or training was stopped. Leave "
                "max_steps out, or resume."
            )


class ScaledTrainer(AdaScaleMixin, Trainer):
    """``transformers.Trainer`` with :class:`AdaScaleMixin`. It has the arguments of
    both.
    """
