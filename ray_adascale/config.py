"""The settings of a run, and how large a batch they make on so many workers."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from .data.order import BatchSplit
from .optim.rules import ScalingRule, follows_gain, make_rule

if TYPE_CHECKING:
    from .recipe import Recipe

__all__ = ["AdaScaleConfig", "BatchPlan", "EarlyStop", "StepSeconds", "nearest_plan"]

_RATIO = 2**0.25
"""Between the sizes of a pass of a run that chooses its scale: few sizes, and none far from what is wanted."""
_NEAR = 2**0.125
"""Between its batches, at least."""


class StepSeconds(Protocol):
    """What knows how long a step takes, such as a :class:`ray_adascale.Throughput`."""

    def step_seconds(self, workers: int, accumulation: int, per_worker_batch_size: int) -> float:
        """Seconds of a step of so many passes, each over so many examples on each of so many workers."""


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

    def split(self, rank: int) -> BatchSplit:
        """The same as the data room has it, with a worker's part."""
        return BatchSplit(self.global_batch_size, rank=rank, world_size=self.world_size, accumulation=self.accumulation)


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
        target_efficiency: Let the run choose its scale as it goes: the largest at which a step is expected to buy this share
            of what its examples cost, r/S = E; above 0, and at most 1 (which keeps S = 1). Or "goodput": the scale with the most
            progress a second, from the times of the run's first steps. Default: the scale follows from the settings alone.
            Then ``per_worker_batch_size`` is the most examples of one pass, ``accumulation`` the fewest passes, and the two
            fields after this are the largest batch; without them no step is worth more than ``averaging_window``, nor larger
            than the dataset. Needs a map-style dataset, and a rule that follows the gain.
        max_global_batch_size: Examples of the largest batch that ``target_efficiency`` may choose.
        max_accumulation: Most backward passes per optimizer step that it may choose.
        throughput: For "goodput", how long a step takes, instead of measuring it: a :class:`ray_adascale.Throughput`.
        elastic: The number of workers may change. Where few workers would make less than a base batch, more passes are
            accumulated until S ≥ 1, instead of refusing. ``AdaScaleTrainer`` sets it for ``num_workers=(min, max)``.
        rule: How the LR follows the scale: "adascale", for SGD, Adam and AdamW alike; or to compare "linear", "sqrt",
            "unscaled", and "adamscale" (AdaptDL's for Adam, which does worse: docs/results/adam.md); or a rule such as
            ``LEGWRule(5, 50_000)``; or a callable (RuleInput) -> (LR factor, clock increment).
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
    target_efficiency: float | Literal["goodput"] | None = None
    max_global_batch_size: int | None = None
    max_accumulation: int | None = None
    throughput: StepSeconds | None = None
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
            "max_global_batch_size",
            "max_accumulation",
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
        self._check_target_efficiency()

    def _check_target_efficiency(self) -> None:
        """Whether the fields for a scale that follows the noise go together.

        Raises:
            ValueError: They don't.
        """
        chosen = self.target_efficiency
        if chosen is None:
            for name in ("max_global_batch_size", "max_accumulation"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"Invalid AdaScaleConfig({name}={getattr(self, name)}): it bounds what target_efficiency chooses. Give "
                        "target_efficiency as well, or per_worker_batch_size, accumulation or global_batch_size instead."
                    )
        elif chosen != "goodput" and (
            isinstance(chosen, bool | str) or not isinstance(chosen, int | float) or not 0 < chosen <= 1
        ):
            raise ValueError(
                f"Invalid AdaScaleConfig(target_efficiency={chosen!r}). Must be a number above 0 and at most 1 (0.6: a "
                "step is to buy "
                "60 % of what its examples cost), 'goodput', or None."
            )
        elif self.global_batch_size is not None:
            raise ValueError(
                f"AdaScaleConfig takes target_efficiency={chosen!r} or global_batch_size={self.global_batch_size}, not "
                "both: with the "
                "first the batch changes as the run goes on. Its bound is max_global_batch_size."
            )
        elif not follows_gain(make_rule(self.rule)):
            raise ValueError(
                f"Invalid AdaScaleConfig(target_efficiency={chosen!r}, rule={self.rule!r}): that rule's clock goes by "
                "the scale, not by "
                "the measured gain, so a larger batch would only look better. Use rule='adascale' (or 'adamscale'), or leave "
                "target_efficiency out."
            )
        if self.throughput is not None and chosen != "goodput":
            raise ValueError("AdaScaleConfig(throughput=...) is for target_efficiency='goodput'. Leave it out.")
        if self.max_accumulation is not None and self.max_accumulation < self.accumulation:
            raise ValueError(
                f"Invalid AdaScaleConfig(max_accumulation={self.max_accumulation}): fewer than "
                f"accumulation={self.accumulation}, the fewest passes."
            )

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
        """The batch that ``world_size`` workers make up; with ``target_efficiency``, at the run's begin.

        Raises:
            ValueError: ``base_batch_size`` is not set, or is larger than the global batch.
        """
        if self.base_batch_size is None:
            raise ValueError("AdaScaleConfig(base_batch_size=...) is needed: the batch size the schedule was tuned at.")
        if self.target_efficiency is not None:
            return nearest_plan(self.plans(world_size), self.first_batch)
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

    @property
    def first_batch(self) -> float:
        """Examples of a step, before anything is known of the noise: as many as are efficient enough however little it is."""
        assert self.base_batch_size is not None
        assert self.target_efficiency is not None
        return self.base_batch_size / (1.0 if self.target_efficiency == "goodput" else self.target_efficiency)

    def plans(self, world_size: int, largest: float = math.inf) -> list[BatchPlan]:
        """The batches among which ``target_efficiency`` chooses on so many workers, smallest first; each about a fifth larger.

        Each is made in as few passes as ``per_worker_batch_size`` allows. The sizes of a pass lie on a grid of their own, so
        that few of them occur; a larger batch takes larger passes first, and then more of them. Where the scale may grow
        there are at least two gradient samples in each step, since one would tell nothing of the noise.

        Args:
            world_size: Workers.
            largest: Examples of the largest batch, beside what the fields say; never fewer than the smallest batch there is.

        Raises:
            ValueError: ``base_batch_size`` is not set, or the bounds leave no batch.
        """
        if self.base_batch_size is None:
            raise ValueError("AdaScaleConfig(base_batch_size=...) is needed: the batch size the schedule was tuned at.")
        base = self.base_batch_size
        per_worker = base if self.per_worker_batch_size is None else self.per_worker_batch_size
        fewest, least = self.accumulation, self.min_examples_per_worker
        if world_size == 1 and self.target_efficiency != 1:
            fewest = max(fewest, 2)
        most = math.inf if self.max_accumulation is None else self.max_accumulation
        bound = math.inf if self.max_global_batch_size is None else self.max_global_batch_size
        passes = max(fewest, math.ceil(base / (per_worker * world_size)))
        smallest = BatchPlan(base, max(base, least * world_size * passes), world_size, passes)
        if smallest.global_batch_size > bound or passes > most:
            raise ValueError(
                f"The bounds of AdaScaleConfig(target_efficiency={self.target_efficiency!r}) leave no batch on "
                f"{world_size} workers: the "
                f"smallest is {smallest.global_batch_size} examples in {passes} passes a worker "
                f"(base_batch_size={base}, per_worker_batch_size={per_worker}, min_examples_per_worker={least}, "
                f"accumulation={self.accumulation}), the largest {bound:g} in {most:g} (max_global_batch_size, "
                "max_accumulation). Raise these, or per_worker_batch_size."
            )
        if self.target_efficiency == 1:
            return [smallest]
        largest = min(largest, bound, base * 1e6)  # no run gets there
        plans, sizes = [smallest], _grid_below(per_worker, least)
        while passes <= most and plans[-1].global_batch_size * _NEAR < largest:
            for size in sizes:
                batch = size * world_size * passes
                if plans[-1].global_batch_size * _NEAR < batch <= largest:
                    plans.append(BatchPlan(base, batch, world_size, passes))
            if passes * world_size * per_worker >= largest:
                break
            passes = max(passes, math.floor(plans[-1].global_batch_size * _NEAR / (world_size * per_worker))) + 1
        return plans

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


def _grid_below(largest: int, smallest: int) -> list[int]:
    """Whole numbers from ``largest`` down to ``smallest``, each by about :data:`_RATIO` less; the smaller ones first."""
    sizes, size = [largest], largest
    while size > smallest:
        size = max(min(round(largest / _RATIO ** len(sizes)), size - 1), smallest)
        sizes.append(size)
    return sizes[::-1]


def nearest_plan(plans: list[BatchPlan], batch: float) -> BatchPlan:
    """The plan whose batch is the nearest by ratio; of two as near, the smaller.

    Args:
        plans: Smallest batch first.
        batch: Examples; may be infinite.
    """
    wanted = min(batch, plans[-1].global_batch_size)
    return min(plans, key=lambda plan: abs(math.log(plan.global_batch_size / wanted)))
