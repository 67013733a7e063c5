"""The settings of a run, and how large a batch they make on so many workers."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .data.order import StepCut
from .optim.rules import ScalingRule, make_rule

if TYPE_CHECKING:
    from .recipe import Recipe

__all__ = ["AdaScaleConfig", "BatchPlan", "EarlyStop"]


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's batch is made up.

    Attributes:
        base_batch_size: B0, examples.
        global_batch_size: B, examples.
        world_size: Workers.
        accumulation: Backward passes a worker.
    """

    base_batch_size: int
    global_batch_size: int
    world_size: int
    accumulation: int

    @property
    def scale(self) -> float:
        """S = B / B0."""
        return self.global_batch_size / self.base_batch_size

    @property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step."""
        return self.world_size * self.accumulation

    def cut(self, rank: int) -> StepCut:
        """The same as the data room has it, with a worker's part."""
        return StepCut(self.global_batch_size, rank=rank, world_size=self.world_size, accumulation=self.accumulation)


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """End a run, with a checkpoint, where evaluations no longer get better.

    Attributes:
        patience: Effective steps since the best evaluation, so as many at every scale. Evaluations come every
            ``evaluate_every`` of them.
        metric: The key of what ``evaluate`` returns. Default: the workload's metric.
        mode: Whether it is to be small ("min") or large ("max"). Default: the workload's mode.

    Raises:
        ValueError: A field is out of its range.
    """

    patience: float
    metric: str | None = None
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.patience, bool) or not isinstance(self.patience, int | float) or not self.patience > 0:
            raise ValueError(
                f"Invalid EarlyStop(patience={self.patience!r}). Must be a positive number of effective steps."
            )
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"Invalid EarlyStop(mode={self.mode!r}). Must be 'min' or 'max'.")
        if (self.metric is None) != (self.mode is None):
            raise ValueError(
                f"Invalid EarlyStop(metric={self.metric!r}, mode={self.mode!r}). Give both, or neither: then they are the "
                "workload's."
            )

    def better(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far; None: there is none."""
        if math.isnan(value):
            return False
        return best is None or (value > best if self.mode == "max" else value < best)


@dataclass(frozen=True, kw_only=True)
class AdaScaleConfig:
    """What to run, beside model, optimizer, scheduler and data. Checked when it is made.

    Attributes:
        base_batch_size: B0, examples per optimizer step at which the schedule was tuned. Comes from the recipe where
            there is one.
        total_steps: T, optimizer steps of the base run = effective steps of every run. From the recipe where there is
            one; else this or ``total_epochs``.
        total_epochs: Length of the base run in passes over the dataset, instead of ``total_steps``.
        scheduler_unit: What one ``scheduler.step()`` meant in the base run, "step" or "epoch". Required with a
            scheduler, because a wrong guess is silently wrong.
        per_worker_batch_size: Examples per backward pass on one worker. Default: the base batch size.
        accumulation: Backward passes per optimizer step.
        global_batch_size: B, to stay the same on any number of workers: accumulation follows them, ``accumulation`` is the
            fewest passes and ``per_worker_batch_size`` the most examples of one. B need not divide evenly. Default: each
            worker's batch stays the same, and B follows the workers.
        min_examples_per_worker: Examples per backward pass on one worker below which a worker would be idle most of the
            time. Where ``global_batch_size`` would give less, B grows instead.
        elastic: The number of workers may change. Where few workers would make less than a base batch, more passes are
            accumulated until S ≥ 1, instead of refusing. ``AdaScaleTrainer`` sets it for ``num_workers=(min, max)``.
        rule: How the LR follows the scale: "adascale", "adamscale" (experimental, for Adam), or for comparison "linear",
            "sqrt", "unscaled"; or a rule such as ``LEGWRule(5, 50_000)``; or a callable
            (RuleInput) -> (LR factor, clock increment).
        sharding: Where gradients and optimizer state live: "none" (all on every worker, DDP), "oss" (each worker holds 1/N of
            the state), "zero2" (and gets 1/N of the gradients: ShardedDataParallel), "fsdp2" (and holds 1/N of the weights
            between uses: torch's fully_shard), or "auto": "zero2" on more than one worker for an optimizer that has state.
        precision: Autocast dtype of the forward pass; "fp16" scales the loss.
        grad_clip: Largest gradient norm, None for no clipping. A threshold does not transfer over scales: the gradient
            of a larger batch is less noisy, so it is clipped less often.
        averaging_window: Memory of σ² and μ² as a share of the run.
        max_nonfinite_steps: Optimizer steps in a row with a non-finite gradient before the run ends with an error.
        seed: Seed of the order of examples.
        shuffle: False takes the examples in the dataset's order.
        dataset_length: Examples an epoch over all workers, where the dataset can't say (iterables, Ray Data).
        drop_last: Drop the rest of an epoch that does not fill a step, instead of running across the border.
        num_loader_workers: ``DataLoader`` worker processes a training worker.
        pin_memory: ``DataLoader`` pinning.
        find_unused_parameters: DDP's flag, for models that don't use every parameter in every pass.
        evaluate_every: Effective steps between evaluations. Default: a tenth of the run.
        checkpoint_every_s: Seconds between checkpoints: what a lost worker costs at most, beside the time to write one.
        async_checkpoint: Training waits only until a checkpoint's tensors are copied to the CPU; a thread writes them, and
            an error of it is raised at the next step boundary. The last checkpoint of a run is always waited for.
        accept_changes: Go on from a checkpoint of another base batch size, T or LR curve, with a warning, instead of
            refusing.
        report_every_s: Seconds between reports to Ray. Each is a barrier that Ray Train lets pass once in about 2 s, so a
            short interval makes the workers wait; gauges, trace and progress line don't.
        early_stop: When to end before T, see :class:`EarlyStop`; None to go on to T.
        show_progress: A line on standard error that shows how far the run is: True for one every half minute wherever it goes,
            None for a live one where that is a terminal (``AdaScaleTrainer`` shows one on the driver anyway), False for none.
        trace_rows: Steps that the trace keeps: all of the newest half, and of older ones every 2nd, 4th, 8th, ..., so that
            they fit into the other half; beside those with metrics of their own, as evaluations have. None keeps all.

    Raises:
        ValueError: A field is out of its range.
    """

    base_batch_size: int | None = None
    total_steps: int | None = None
    total_epochs: float | None = None
    scheduler_unit: Literal["step", "epoch"] | None = None
    per_worker_batch_size: int | None = None
    accumulation: int = 1
    global_batch_size: int | None = None
    min_examples_per_worker: int = 1
    elastic: bool = False
    rule: str | ScalingRule = "adascale"
    sharding: Literal["auto", "none", "oss", "zero2", "fsdp2"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    grad_clip: float | None = None
    averaging_window: float = 0.05
    max_nonfinite_steps: int = 50
    seed: int = 0
    shuffle: bool = True
    dataset_length: int | None = None
    drop_last: bool = False
    num_loader_workers: int = 0
    pin_memory: bool = False
    find_unused_parameters: bool = False
    evaluate_every: float | None = None
    checkpoint_every_s: float = 300.0
    async_checkpoint: bool = True
    accept_changes: bool = False
    report_every_s: float = 10.0
    early_stop: EarlyStop | None = None
    show_progress: bool | None = None
    trace_rows: int | None = 40_000

    def __post_init__(self) -> None:
        for name in (
            "base_batch_size",
            "total_steps",
            "per_worker_batch_size",
            "accumulation",
            "global_batch_size",
            "min_examples_per_worker",
            "max_nonfinite_steps",
            "dataset_length",
            "trace_rows",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Invalid AdaScaleConfig({name}={value!r}). Must be a positive integer.")
        for name in (
            "total_epochs",
            "grad_clip",
            "averaging_window",
            "evaluate_every",
            "checkpoint_every_s",
            "report_every_s",
        ):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"Invalid AdaScaleConfig({name}={value!r}). Must be a positive number.")
        if self.early_stop is not None and not isinstance(self.early_stop, EarlyStop):
            raise ValueError(
                f"Invalid AdaScaleConfig(early_stop={self.early_stop!r}). Must be an EarlyStop(patience=...), or None."
            )
        if self.total_steps is not None and self.total_epochs is not None:
            raise ValueError("AdaScaleConfig takes total_steps or total_epochs, not both.")
        if isinstance(self.num_loader_workers, bool) or self.num_loader_workers < 0:
            raise ValueError(f"Invalid AdaScaleConfig(num_loader_workers={self.num_loader_workers!r}). Must be ≥ 0.")
        for name, allowed in (
            ("scheduler_unit", (None, "step", "epoch")),
            ("sharding", ("auto", "none", "oss", "zero2", "fsdp2")),
            ("precision", ("fp32", "bf16", "fp16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Invalid AdaScaleConfig({name}={getattr(self, name)!r}). Must be one of {allowed}.")
        if self.per_worker_batch_size is not None and self.per_worker_batch_size < self.min_examples_per_worker:
            raise ValueError(
                f"Invalid AdaScaleConfig(min_examples_per_worker={self.min_examples_per_worker}): more than "
                f"per_worker_batch_size={self.per_worker_batch_size}."
            )
        make_rule(self.rule)

    def with_recipe(self, recipe: Recipe | None) -> AdaScaleConfig:
        """These settings with the base batch size, total steps and scheduler unit of a recipe.

        Warns of each setting that the recipe keeps (:attr:`ray_adascale.Recipe.settings`) and that is another here.

        Raises:
            ValueError: A setting says otherwise than the recipe.
        """
        if recipe is None:
            return self
        for name in ("base_batch_size", "total_steps", "scheduler_unit"):
            mine, theirs = getattr(self, name), getattr(recipe, name)
            if mine is not None and mine != theirs:
                raise ValueError(f"Invalid AdaScaleConfig({name}={mine!r}): the recipe says {theirs!r}. Leave it out.")
        if self.total_epochs is not None:
            raise ValueError(
                f"Leave AdaScaleConfig(total_epochs) out: the recipe says total_steps={recipe.total_steps}."
            )
        self._warn_of_other_settings(recipe)
        return replace(
            self,
            base_batch_size=recipe.base_batch_size,
            total_steps=recipe.total_steps,
            scheduler_unit=recipe.scheduler_unit,
        )

    def _warn_of_other_settings(self, recipe: Recipe) -> None:
        for name, theirs in (recipe.settings or {}).items():
            mine = getattr(self, name)
            if mine == theirs or (name == "grad_clip" and theirs is None and mine == math.inf):
                continue
            text = theirs if isinstance(theirs, str) else json.dumps(theirs)
            warnings.warn(
                f"The recipe was found with {name}={theirs!r}, and this is with {name}={mine!r}. To train as the search "
                f"did: AdaScaleConfig({name}={theirs!r}), or -c {name}={text} on the command line.",
                stacklevel=4,
            )

    def plan(self, world_size: int) -> BatchPlan:
        """The batch that ``world_size`` workers make up.

        Raises:
            ValueError: ``base_batch_size`` is not set, or is larger than the global batch.
        """
        if self.base_batch_size is None:
            raise ValueError("AdaScaleConfig(base_batch_size=...) is needed: the batch size the schedule was tuned at.")
        per_worker = self.base_batch_size if self.per_worker_batch_size is None else self.per_worker_batch_size
        accumulation = self.accumulation
        if self.global_batch_size is not None:
            return self._fixed_plan(self.base_batch_size, per_worker, world_size)
        if self.elastic:
            accumulation = max(accumulation, math.ceil(self.base_batch_size / (per_worker * world_size)))
        batch = per_worker * world_size * accumulation
        if batch < self.base_batch_size:
            raise ValueError(
                f"Invalid AdaScaleConfig(base_batch_size={self.base_batch_size}): larger than the global batch of {batch} "
                f"= {per_worker} per worker × {world_size} workers × {accumulation} passes. Raise per_worker_batch_size, "
                "accumulation or num_workers, so that the scale is at least 1."
            )
        return BatchPlan(self.base_batch_size, batch, world_size, accumulation)

    def _fixed_plan(self, base: int, per_worker: int, world_size: int) -> BatchPlan:
        """``global_batch_size`` in as few passes as ``per_worker`` examples each allow."""
        assert self.global_batch_size is not None
        if self.global_batch_size < base:
            raise ValueError(
                f"Invalid AdaScaleConfig(global_batch_size={self.global_batch_size}): smaller than "
                f"base_batch_size={base}, so the scale would be below 1."
            )
        accumulation = max(self.accumulation, math.ceil(self.global_batch_size / (per_worker * world_size)))
        smallest = self.min_examples_per_worker * world_size * accumulation
        return BatchPlan(base, max(self.global_batch_size, smallest), world_size, accumulation)

    def resolve_total_steps(self, base_steps_per_epoch: float | None) -> int:
        """T, from ``total_steps`` or ``total_epochs``.

        Raises:
            ValueError: Neither is given, or the dataset's length is needed and unknown.
        """
        if self.total_steps is not None:
            return self.total_steps
        if self.total_epochs is None:
            raise ValueError("AdaScaleConfig(total_steps=...) or (total_epochs=...) is needed: the base run's length.")
        if base_steps_per_epoch is None:
            raise ValueError(
                f"AdaScaleConfig(total_epochs={self.total_epochs}) needs a dataset of known length, and this one "
                "can't say it. Give AdaScaleConfig(dataset_length=...), its examples in an epoch over all workers; or "
                "total_steps instead."
            )
        return max(1, math.floor(self.total_epochs * base_steps_per_epoch + 1e-9))
