"""The settings of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ._errors import SettingError, clip_multiple, typed
from ._fields import (
    COUNT,
    KEPT_SETTINGS,
    MAYBE_COUNT,
    by,
    check_fields,
    hinting,
    integer,
    must_be,
    optional,
    positive,
)
from ._files import STORE_TIMEOUT_S
from .batch import BatchSettings

# the options of the command line come from this module, and their help needs no torch
if TYPE_CHECKING:
    from .optim.rules import ScalingRule
    from .recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """End a run, with a checkpoint, once its evaluations stop improving.

    Attributes:
        patience: Effective steps since the best evaluation. Effective steps mean the
            same at every scale. Evaluations come every ``evaluate_every`` effective
            steps.
        metric: A key of the dict that ``evaluate`` returns. Default: the workload's
            metric.
        mode: Whether a small ("min") or a large ("max") metric is better. Default: the
            workload's mode.

    Raises:
        ValueError: A field is out of its range.
    """

    patience: float = field(
        metadata=by(positive("a positive number of effective steps"))
    )
    metric: str | None = None
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "EarlyStop")
        if (self.metric is None) != (self.mode is None):
            raise ValueError(
                f"Invalid EarlyStop(metric={self.metric!r}, mode={self.mode!r}). Give "
                "both, or neither to use the workload's."
            )

    def better(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best one so far, which is None
        before the first.
        """
        if math.isnan(value):
            return False
        return best is None or (value > best if self.mode == "max" else value < best)


_MAYBE_POSITIVE = by(optional(positive()))
_MAYBE_STOP = by(
    optional(
        must_be(
            "an EarlyStop(patience=...), or None",
            lambda value: isinstance(value, EarlyStop),
        )
    )
)


@hinting
@dataclass(frozen=True, kw_only=True)
class AdaScaleConfig:
    """The settings of a run, beside model, optimizer, scheduler and data. They are
    checked when the object is made.

    Attributes:
        base_batch_size: B0, examples per optimizer step at which the schedule was
            tuned. Comes from the recipe if there is one.
        total_steps: T, optimizer steps of the base run = effective steps of every run.
            Comes from the recipe if there is one; otherwise give this or
            ``total_epochs``.
        total_epochs: Length of the base run in epochs, instead of
            ``total_steps``.
        scheduler_unit: What one ``scheduler.step()`` meant in the base run, "step" or
            "epoch". Required with a scheduler, because a wrong guess would give a wrong
            schedule without an error.
        per_worker_batch_size: Examples per backward pass on one worker. Default: the
            base batch size.
        accumulation: Backward passes per optimizer step, on each worker. ``Run``
            divides each loss by this number, so the loop must not. With ``attach`` and
            Lightning's manual optimization the loop must:
            ``(loss / accumulation).backward()``.
        global_batch_size: B, the same on any number of workers. The number of passes
            then follows from the workers:
            ``accumulation`` is the fewest passes, and ``per_worker_batch_size`` the
            most examples of one. B need not divide evenly. It grows if a pass would
            have no example. Default: each worker's batch stays the same, and B grows
            with the workers.
        target_efficiency: Let the run choose its scale: the largest scale with an
            expected efficiency r/S of at least this number, above 0 and at most 1 (1
            keeps S = 1). Default: the scale follows from the settings alone. With this
            setting, ``per_worker_batch_size`` is the most examples of one pass and
            ``accumulation`` the fewest passes. ``max_global_batch_size`` bounds the
            batch. Without it the batch is bounded by the dataset, and no step advances
            the clock by more than ``averaging_window``. Needs a map-style dataset, and
            a rule that follows the gain.
        batch_schedule: The batch from each start on: pairs of start and examples of all
            workers, ``[(0, 32), (0.2, 128)]``, or as text ``"0:32,20%:128"`` (a share
            of T) or ``"0:32,300:128"`` (effective steps). The first start is 0, and no
            batch is below B0. The other starts have one unit: a float below 1 or "20%"
            is a share of T, and an integer is effective steps.
            ``per_worker_batch_size``, ``accumulation`` and ``max_global_batch_size``
            mean the same as with ``target_efficiency``; a batch above the bound is cut
            to it. Needs a map-style dataset.
        max_global_batch_size: Examples of the largest batch with ``target_efficiency``
            or ``batch_schedule``.
        elastic: The number of workers may change. If few workers would make less than a
            base batch, the run adds passes until S ≥ 1. Without this setting such a
            batch raises an error. ``AdaScaleTrainer`` sets it for
            ``num_workers=(min, max)``.
        rule: How the LR follows the scale. "auto": "adascale_memory" for Adam, AdamW,
            Adamax, Lion, and SGD with a momentum above 1/2, else "adascale".
            "adascale": the LR times the gain r. "adascale_memory": its LR times √r for
            Adam and its kind, and betas and momentum on the effective clock. For
            comparisons "linear", "sqrt", "unscaled" ("linear:354", "sqrt:354" and
            "unscaled:354" take 354 steps) and "adamscale" (AdaptDL's for Adam). Or a
            rule such as ``LEGWRule(5, 50_000)``, or a callable (RuleInput) -> (LR
            factor, clock increment).
        sharding: Where gradients and optimizer state live. "none": all on every worker
            (DDP). "oss": each worker holds 1/N of the state. "zero2": and 1/N of the
            gradients (ShardedDataParallel). "fsdp2": and 1/N of the weights between
            uses (torch's fully_shard). "auto": "zero2" on more than one worker for an
            optimizer that has state.
        precision: Autocast dtype of the forward pass; "fp16" scales the loss.
        grad_clip: Largest gradient norm: a number, or a multiple of the expected norm
            such as "3x". Default: "3x" for a run with a recipe whose base run did not
            clip, else no clipping; ∞ for none. A number does not transfer over scales,
            because the gradient of a larger batch is less noisy. A multiple does, and
            clips at S > 1 alone: the expected norm is the root of the average of ‖ḡ‖²
            over effective time, with ``averaging_window`` as its memory.
        averaging_window: Memory of the averages of σ² and μ² as a share of the run.
        measure_every: k: one optimizer step in k measures the noise. Default: each step
            at first, then one in k, so that the averages hold at least 50 measurements;
            each step of a short run. The adapters of Lightning and Accelerate measure
            each step.
        seed: Seed of the order of examples, and of the weights that a workload makes.
        shuffle: Draw the order of an epoch's examples from the seed, instead of the
            dataset's order.
        dataset_length: Examples an epoch over all workers, for datasets without a
            length (iterables, Ray Data).
        drop_last: Drop the last examples of an epoch if they don't fill a step, instead
            of continuing into the next epoch.
        num_loader_workers: ``DataLoader`` worker processes a training worker.
        find_unused_parameters: DDP's flag, for models that don't use every parameter in
            every pass.
        evaluate_every: Effective steps between evaluations. Default: a tenth of the
            run.
        checkpoint_every_s: Seconds between checkpoints. A lost worker costs at most
            this time and the time to write one.
        accept_changes: Resume with the program's base batch size, T, LR curve,
            ``precision``, ``grad_clip``, ``shuffle``, ``drop_last`` and hyperparameters
            if they differ from the checkpoint's, with a warning. By default such a
            resume raises an error. The optimizer's class can't change.
        report_every_s: Seconds between reports to Ray. Each report is a barrier that
            takes Ray Train about 2 s, so a short interval makes the workers wait.
            Gauges, trace and display have no barrier.
        step_timeout_s: Seconds that an optimizer step may take. After this time the
            driver of an ``AdaScaleTrainer`` ends the worker that holds up the others,
            and Ray restarts all from the last checkpoint. Default: ten times the
            slowest of the last 20 steps, and at least 120; inf for never. An evaluation
            or a checkpoint has no limit while the worker sends heartbeats, and a
            start's first step has none.
        store_timeout_s: Seconds without a new byte after which a worker gives up
            writing or uploading a checkpoint. Then it fails, and Ray restarts all
            workers from the last checkpoint. A bucket shows a file once it is whole, so
            allow more than the upload of the largest file takes. Also seconds without
            an answer after which the driver of an ``AdaScaleTrainer`` or a search gives
            up what it reads or writes at the start.
        early_stop: End before T if the evaluations have not improved for a number of
            effective steps: an :class:`EarlyStop`. Default: run to T.

    Raises:
        ValueError: A field is out of its range.
    """

    base_batch_size: int | None = field(default=None, metadata=MAYBE_COUNT)
    total_steps: int | None = field(default=None, metadata=MAYBE_COUNT)
    total_epochs: float | None = field(default=None, metadata=_MAYBE_POSITIVE)
    scheduler_unit: Literal["step", "epoch"] | None = None
    per_worker_batch_size: int | None = field(default=None, metadata=MAYBE_COUNT)
    accumulation: int = field(default=1, metadata=COUNT)
    global_batch_size: int | None = field(default=None, metadata=MAYBE_COUNT)
    target_efficiency: float | None = None
    batch_schedule: str | Sequence[tuple[float | str, int]] | None = None
    max_global_batch_size: int | None = field(default=None, metadata=MAYBE_COUNT)
    elastic: bool = False
    rule: str | ScalingRule = "auto"
    sharding: Literal["auto", "none", "oss", "zero2", "fsdp2"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    grad_clip: str | float | None = field(
        default=None, metadata=by(KEPT_SETTINGS["grad_clip"])
    )
    averaging_window: float = field(default=0.05, metadata=by(positive()))
    measure_every: int | None = field(default=None, metadata=MAYBE_COUNT)
    seed: int = field(default=0, metadata=by(integer(None)))
    shuffle: bool = True
    dataset_length: int | None = field(default=None, metadata=MAYBE_COUNT)
    drop_last: bool = False
    num_loader_workers: int = field(default=0, metadata=by(integer(0)))
    find_unused_parameters: bool = False
    evaluate_every: float | None = field(default=None, metadata=_MAYBE_POSITIVE)
    checkpoint_every_s: float = field(default=300.0, metadata=by(positive()))
    accept_changes: bool = False
    report_every_s: float = field(default=10.0, metadata=by(positive()))
    step_timeout_s: float | None = field(default=None, metadata=_MAYBE_POSITIVE)
    store_timeout_s: float = field(default=STORE_TIMEOUT_S, metadata=by(positive()))
    early_stop: EarlyStop | None = field(default=None, metadata=_MAYBE_STOP)

    def __post_init__(self) -> None:
        from .optim.rules import follows_gain, make_rule

        check_fields(self, "AdaScaleConfig")
        if self.total_epochs == math.inf:
            raise SettingError(
                "Invalid {}. Must be finite: the schedule and the run end there.",
                total_epochs=math.inf,
            )
        if self.total_steps is not None and self.total_epochs is not None:
            raise SettingError(
                "Invalid {}. Give total_steps or total_epochs, not both.",
                total_steps=self.total_steps,
                total_epochs=self.total_epochs,
            )
        rule = make_rule(self.rule)
        # B0 may still come from a recipe, and any number serves for the check.
        self._batch_of(1 if self.base_batch_size is None else self.base_batch_size)
        if self.target_efficiency is not None and not follows_gain(rule):
            raise SettingError(
                "Invalid {}: the clock of that rule advances by the scale, not by "
                "the measured gain, so a larger batch would only look better. Leave "
                "rule out (or use 'adamscale'), or leave target_efficiency out.",
                target_efficiency=self.target_efficiency,
                rule=self.rule,
            )

    @property
    def batch(self) -> BatchSettings:
        """The part of the settings that decides the batch.

        Raises:
            ValueError: ``base_batch_size`` is not set.
        """
        if self.base_batch_size is None:
            raise SettingError(
                "{} is needed: the batch size the schedule was tuned at.",
                base_batch_size=...,
            )
        return self._batch_of(self.base_batch_size)

    def _batch_of(self, base_batch_size: int) -> BatchSettings:
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(BatchSettings)
            if field.init
        }
        return BatchSettings(**own | {"base_batch_size": base_batch_size})

    @property
    def kept(self) -> dict[str, Any]:
        """The settings that a recipe keeps, as JSON values."""
        kept = {name: getattr(self, name) for name in KEPT_SETTINGS}
        if kept["grad_clip"] == math.inf:  # JSON has no ∞, and ∞ clips nothing
            kept["grad_clip"] = None
        return kept

    def at_base_batch(self) -> AdaScaleConfig:
        """Return these settings with one base batch a step, in one process."""
        return replace(
            self,
            per_worker_batch_size=self.base_batch_size,
            accumulation=1,
            global_batch_size=None,
            target_efficiency=None,
            batch_schedule=None,
            max_global_batch_size=None,
            elastic=False,
            sharding="none",
        )

    def with_recipe(self, recipe: Recipe | None) -> AdaScaleConfig:
        """Return these settings with the base batch size, total steps and scheduler
        unit of a recipe.

        A warning names each setting that the recipe keeps
        (:attr:`ray_adascale.Recipe.settings`) and that differs here.

        Raises:
            ValueError: A setting contradicts the recipe.
        """
        if recipe is None:
            return self
        for name in ("base_batch_size", "total_steps", "scheduler_unit"):
            mine = getattr(self, name)
            theirs = getattr(recipe, name)
            if mine is not None and mine != theirs:
                raise SettingError(
                    f"Invalid {{}}: the recipe says {theirs!r}. Leave it out.",
                    **{name: mine},
                )
        if self.total_epochs is not None:
            raise SettingError(
                f"Invalid {{}}: the recipe says total_steps={recipe.total_steps}. "
                "Leave it out.",
                total_epochs=self.total_epochs,
            )
        self._warn_of_other_settings(recipe)
        return replace(
            self,
            base_batch_size=recipe.base_batch_size,
            total_steps=recipe.total_steps,
            scheduler_unit=recipe.scheduler_unit,
        )

    def _warn_of_other_settings(self, recipe: Recipe) -> None:
        from ._warn import warn_at_user

        for name, theirs in (recipe.settings or {}).items():
            mine = getattr(self, name)
            if mine == theirs:
                continue
            # A run at scale may clip where the base run did not:
            # docs/guides/carry-over.md.
            if (
                name == "grad_clip"
                and theirs is None
                and (mine == math.inf or clip_multiple(mine) is not None)
            ):
                continue
            warn_at_user(
                f"The recipe was found with {name}={theirs!r}, and this is with "
                f"{name}={mine!r}. To train as the search did: "
                f"AdaScaleConfig({name}={theirs!r}), or {typed(name, theirs, ' ')} on "
                "the command line."
            )

    def resolve_total_steps(self, base_steps_per_epoch: float | None) -> int:
        """Return T, from ``total_steps`` or ``total_epochs``.

        Raises:
            ValueError: Neither is given, or the dataset's length is needed and unknown.
        """
        if self.total_steps is not None:
            return self.total_steps
        if self.total_epochs is None:
            raise SettingError(
                "{} is needed, one of them: the base run's length.",
                total_steps=...,
                total_epochs=...,
            )
        if base_steps_per_epoch is None:
            raise SettingError(
                "{} needs a dataset of known length, and the length of this one is "
                "unknown. Give dataset_length, its examples in an epoch over all "
                "workers (--dataset-length on the command line), or total_steps "
                "instead. A DataLoader on several workers tells it with a "
                "DistributedSampler; or give loader.dataset in place of the loader.",
                total_epochs=self.total_epochs,
            )
        from .gain import whole_number  # here, because it loads torch

        return max(1, whole_number(self.total_epochs * base_steps_per_epoch))


def read_settings(config: object) -> AdaScaleConfig:
    """Return the settings that a caller has given; None stands for the defaults.

    Raises:
        ValueError: It is no :class:`AdaScaleConfig`.
    """
    if config is None:
        return AdaScaleConfig()
    if not isinstance(config, AdaScaleConfig):
        how = ": AdaScaleConfig(**config)" if isinstance(config, Mapping) else ""
        raise ValueError(
            f"Invalid config of type {type(config).__name__}. Must be an "
            f"AdaScaleConfig{how}."
        )
    return config
