"""Builds the parts of a run and loads its checkpoint into them.
:class:`ray_adascale.Run` uses the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from .._errors import SettingError
from .._warn import warn_at_user
from ..batch import BatchFollower, StepPlan
from ..chain import largest_part
from ..checkpoint.model import frozen_names
from ..checkpoint.per_worker import has_state, without_own
from ..config import AdaScaleConfig, read_settings
from ..data import is_map_style, make_source
from ..data.iterables import known_length
from ..data.order import ExampleOrder
from ..data.source import BatchSource, MapSource
from ..optim.rules import (
    LEAST_MOMENTUM,
    AdaScaleRule,
    ScalingRule,
    auto_rule_for,
    largest_momentum,
    name_of,
)
from ..optim.schedule import BaseSchedule, EffectiveSchedule
from ..recipe import Recipe
from ..workload import RunInputs, Workload
from .boundary.backend import Backend
from .boundary.batch import ChooseBatch
from .boundary.changes import groups_of
from .boundary.checkpointing import Checkpointing
from .boundary.evaluation import Evaluation
from .boundary.notices import Interrupt, Preemption
from .boundary.replicas import Replicas
from .boundary.reporting import Reporting
from .boundary.stage import LoopState, Stage
from .boundary.train_state import HasState, TrainState, log_start
from .build import (
    Wrapped,
    check_built,
    check_equal,
    check_schedule,
    facts_of,
    set_batch,
    wrap,
)
from .build_warnings import class_name, warn_of_modes, warn_of_state_dict_hooks
from .clipping import Clipping
from .guards.each_step import EqualLosses, OnlyRunsBackward, ScheduledRates, TrainMode
from .guards.first_steps import (
    BATCH_NORM,
    ExtraStateHint,
    FirstMicroBatch,
    ZeroGradient,
)
from .guards.guard import Guard, Guards
from .observe.advice import NoiseWarning
from .observe.eta import EtaTracker, forecast_run
from .observe.metrics import BASE, FIXED_MOMENTUM, METRICS, NORM_BATCH
from .observe.step import Listener
from .observe.trace import Trace
from .observe.verdict import BaseFigures
from .pass_driver import PassDriver
from .unit_weights import UnitWeights


@dataclass(frozen=True)
class Given:
    """What a run is built from: the arguments of ``Run``.

    Attributes:
        inputs: Model, optimizer, scheduler, dataset and the user's functions.
        config: The settings, with the recipe's base batch size and T.
        recipe: The recipe; None without one.
        backend: The surroundings of the run.
    """

    inputs: RunInputs
    config: AdaScaleConfig
    recipe: Recipe | None
    backend: Backend

    @property
    def base(self) -> BaseFigures | None:
        """The base runs of the recipe, for the verdict; None without a recipe."""
        return None if self.recipe is None else BaseFigures.of(self.recipe)


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        source: Yields the micro-batches, at first of the follower's plan.
        follower: Chooses the batches.
        total_steps: T.
    """

    source: BatchSource
    follower: BatchFollower
    total_steps: int


@dataclass(frozen=True)
class Training:
    """What moves the weights of a run.

    Attributes:
        module: The bare model, on the device.
        wrapped: The model and the optimizer, wrapped for the kind of sharding.
        schedule: Drives the optimizer's learning rates by τ.
        base_schedule: The schedule of the base run.
        clipping: Clips gradients.
        advice: Doubts about the schedule and the base batch, a sentence each.
        cpu_group: The workers' process group for tensors on the CPU; None if the
            default group has them too.
    """

    module: nn.Module
    wrapped: Wrapped
    schedule: EffectiveSchedule
    base_schedule: BaseSchedule
    clipping: Clipping
    advice: list[str]
    cpu_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class AtBoundary:
    """What acts at the step boundaries of a run.

    Attributes:
        stages: The stages, in order.
        evaluation: The stage that evaluates.
        checkpointing: The stage that saves checkpoints.
        reporting: The stage that reports.
    """

    stages: tuple[Stage, ...]
    evaluation: Evaluation
    checkpointing: Checkpointing
    reporting: Reporting


@dataclass(frozen=True)
class RunParts:
    """The parts of a run, built and restored from the newest checkpoint.

    Attributes:
        given: What the run was built from.
        training: What moves the weights.
        plan: The batch of the first step of this start; ``Run.plan`` is up to date.
        train_state: The objects that a checkpoint is made from: model, optimizer, data,
            schedule, the loop's own state.
        driver: Runs the passes of each step, and the step.
        replicas: Compares the copies that the workers have of weights and gradients.
        unit_weights: Weights the micro-batches of a step by the user's units; None:
            their examples count.
        boundary: What acts at step boundaries.
        listeners: The listeners, in order. Workers other than rank 0 have none.
    """

    given: Given
    training: Training
    plan: StepPlan
    train_state: TrainState
    driver: PassDriver
    replicas: Replicas
    unit_weights: UnitWeights | None
    boundary: AtBoundary
    listeners: list[Listener]


def assemble(
    inputs: RunInputs,
    config: AdaScaleConfig,
    *,
    recipe: Recipe | None,
    backend: Backend,
) -> RunParts:
    """Build the parts of a run and load the newest checkpoint into them. Collective.
    The arguments are those of ``Run``.

    Raises:
        ValueError: A setting, the model, the optimizer or the scheduler can't work. The
            message names it and a remedy.
    """
    config = read_settings(config).with_recipe(recipe)
    config = check_built(inputs.model, inputs.optimizer, config, recipe)
    warn_of_state_dict_hooks(inputs.optimizer)
    warn_of_modes(inputs.optimizer)
    _check_early_stop(config, inputs.evaluate)
    _check_extra_state(inputs.extra_state or {})
    given = Given(inputs, config, recipe, backend)
    data = _data_of(given)
    training = _training_of(given, data)
    return _loop_of(given, data, training)


def _training_of(given: Given, data: RunData) -> Training:
    """Return model, optimizer and schedules, after a check that all workers have
    built the same. Collective.
    """
    inputs = given.inputs
    config = given.config
    recipe = given.recipe
    plan = data.follower.plan
    schedule, base_schedule = _schedules_of(given, data)
    advice = check_schedule(
        inputs.scheduler, base_schedule, config, recipe, plan.global_batch_size
    )
    module = inputs.model.to(given.backend.device)
    cpu_group = _cpu_group(plan.workers)
    facts = facts_of(inputs, config, data.source, base_schedule, recipe)
    check_equal(facts, plan.workers, cpu_group)
    wrapped = wrap(
        module,
        inputs.optimizer,
        config,
        plan,
        device=given.backend.device,
        total_steps=data.total_steps,
    )
    clipping = Clipping(config, recipe, total_steps=data.total_steps)
    return Training(
        module, wrapped, schedule, base_schedule, clipping, advice, cpu_group
    )


def _loop_of(given: Given, data: RunData, training: Training) -> RunParts:
    """Return the parts of the loop: what acts at step boundaries, what observes and
    what guards. The newest checkpoint is loaded on the way. Collective.
    """
    inputs = given.inputs
    config = given.config
    backend = given.backend
    wrapped = training.wrapped
    cpu_group = training.cpu_group
    batch = ChooseBatch(data.follower, wrapped.optimizer)
    evaluation = Evaluation(
        inputs.evaluate,
        training.module,
        every=config.evaluate_every or data.total_steps / 10,
        early_stop=config.early_stop,
        metric=inputs.metric if isinstance(inputs, Workload) else None,
    )
    train_state = _train_state_of(given, data, training, batch, evaluation)
    plan, trace, listeners = _resume(given, data, train_state, batch, evaluation)
    if trace is not None:  # the metrics are known as the loop begins
        trace.first = {
            "optimizer": class_name(largest_part(inputs.optimizer)),
            "untrained": evaluation.untrained,
            "total_steps": data.total_steps,
        }
        if given.base is not None:
            trace.first |= {
                BASE: asdict(given.base),
                NORM_BATCH: norm_batch(training.module, plan),
                FIXED_MOMENTUM: fixed_momentum(
                    inputs.optimizer, wrapped.optimizer.rule
                ),
            }
    replicas = Replicas(
        training.module,
        wrapped.optimizer,
        without_own(train_state.extra),
        data.source,
        copies=wrapped.sharding.copies,
        rank=backend.rank,
        workers=plan.workers,
        device=backend.device,
        process_group=cpu_group,
    )
    driver = PassDriver(
        training.module,
        wrapped.optimizer,
        wrapped.scaler,
        guarded=inputs.optimizer,
        precision=config.precision,
        device=backend.device,
        sharding=wrapped.sharding,
        guards=_guards_of(training, train_state.extra, replicas, plan, backend.device),
    )
    unit_weights = None
    if inputs.weight_of is not None:
        unit_weights = UnitWeights(inputs.weight_of, plan.workers, cpu_group)
    backend.store_timeout_s = config.store_timeout_s
    backend.attempt = train_state.loop.attempt
    # Built last, because their intervals begin now.
    checkpointing = Checkpointing(
        backend,
        train_state,
        replicas,
        trace,
        every_s=config.checkpoint_every_s,
        process_group=cpu_group,
    )
    reporting = Reporting(backend, config.report_every_s, evaluation, checkpointing)
    stages = (
        batch,
        Interrupt(backend),
        evaluation,
        Preemption(backend),
        checkpointing,
        reporting,
    )
    return RunParts(
        given,
        training,
        plan,
        train_state,
        driver,
        replicas,
        unit_weights,
        AtBoundary(stages, evaluation, checkpointing, reporting),
        listeners,
    )


def norm_batch(module: nn.Module, plan: StepPlan) -> int | None:
    """Return the examples of a micro-batch, if the model has batch norm over it; None
    if it has none.
    """
    has_norm = any(isinstance(part, BATCH_NORM) for part in module.modules())
    return plan.largest_pass if has_norm else None


def fixed_momentum(optimizer: Optimizer, rule: ScalingRule) -> float | None:
    """Return the largest momentum of SGD if the rule is AdaScale's, which leaves it, and
    the default would shorten it; else None.

    Args:
        optimizer: The user's own optimizer, or a chain.
        rule: The rule.
    """
    if not isinstance(rule, AdaScaleRule) or auto_rule_for(optimizer) == name_of(rule):
        return None
    momentum = largest_momentum(optimizer)
    return momentum if momentum > LEAST_MOMENTUM else None


def _guards_of(
    training: Training,
    extra: Mapping[str, Any],
    replicas: Replicas,
    plan: StepPlan,
    device: torch.device,
) -> Guards:
    """Return what looks at a run for mistakes of the program around it, in the order
    in which each moment calls it.
    """
    guards: list[Guard] = [
        ExtraStateHint(extra),
        FirstMicroBatch(training.module, plan, device),
        OnlyRunsBackward(training.wrapped.optimizer),
        TrainMode(training.module),
        ScheduledRates(training.schedule),
        ZeroGradient(),
    ]
    if plan.workers > 1:
        guards += [replicas, EqualLosses(plan.workers)]
    return Guards(guards)


def _cpu_group(workers: int) -> dist.ProcessGroup | None:
    """Return the workers' process group for tensors on the CPU; None if the default
    group has them too.
    """
    # By the configuration: init_process_group() without a backend leaves the name
    # "undefined", and has NCCL alone on a GPU.
    only_nccl = workers > 1 and "gloo" not in dist.get_backend_config()
    return dist.new_group(backend="gloo") if only_nccl else None


def _train_state_of(
    given: Given,
    data: RunData,
    training: Training,
    batch: ChooseBatch,
    evaluation: Evaluation,
) -> TrainState:
    """Return what a checkpoint of the run holds.

    Raises:
        ValueError: The user's own state can't be saved.
    """
    inputs = given.inputs
    recipe = given.recipe
    backend = given.backend
    wrapped = training.wrapped
    parts: list[HasState] = [batch, evaluation]
    if training.clipping.expected is not None:
        parts.append(training.clipping.expected)
    train_state = TrainState(
        module=training.module,
        optimizer=wrapped.optimizer,
        parameter_names=wrapped.parameter_names,
        scaler=wrapped.scaler,
        schedule=training.schedule,
        source=data.source,
        loop=LoopState(),
        parts=parts,
        base_schedule=training.base_schedule,
        world_size=backend.world_size,
        recipe=None if recipe is None else recipe.fingerprint,
        settings=given.config.kept,
        rank=backend.rank,
        device=backend.device,
        frozen=frozen_names(training.module),
        groups=groups_of(inputs.optimizer, wrapped.parameter_names),
        extra=inputs.extra_state or {},
    )
    if backend.keeps_checkpoints:
        train_state.users_state({})  # raises now and not at the first checkpoint
    return train_state


def _resume(
    given: Given,
    data: RunData,
    train_state: TrainState,
    batch: ChooseBatch,
    evaluation: Evaluation,
) -> tuple[StepPlan, Trace | None, list[Listener]]:
    """Load the newest checkpoint, or begin at the starting step. Return the next
    batch, and rank 0's trace and listeners. Collective.
    """
    config = given.config
    backend = given.backend
    loop = train_state.loop
    plan = data.follower.plan
    start = _start_of(given.inputs.starting_step, train_state, evaluation)
    with backend.latest_checkpoint() as folder:
        before = None
        if folder is not None:
            before = train_state.load(folder, accept_changes=config.accept_changes)
        elif start is not None:
            start()
            optimizer = train_state.optimizer
            batch.follower.next_plan(
                optimizer.effective_steps, optimizer.average_moments
            )
        if batch.follower.plan != plan:
            plan = batch.follower.plan
            set_batch(plan, train_state.optimizer, train_state.source, backend.rank)
        tau = train_state.optimizer.effective_steps
        if loop.stopped is not None and not train_state.base_schedule.ended_at(tau):
            # The run had ended. It goes on if T is larger now, or the patience.
            loop.stopped = evaluation.stalled
        if backend.rank > 0:
            return plan, None, []
        log_start(train_state, plan, folder, before, config.checkpoint_every_s)
        trace = None
        if loop.stopped is None and (place := backend.trace_folder()) is not None:
            total_steps = train_state.base_schedule.total_steps
            trace = Trace(place, total_steps, loop.attempt, store=backend.store_trace)
            # a start that ended without a checkpoint has left its file
            loop.attempt = trace.number
        listeners = _listeners(given, train_state.base_schedule, plan, trace)
        return plan, trace, listeners


def _start_of(
    step: int, train_state: TrainState, evaluation: Evaluation
) -> Callable[[], None] | None:
    """Return the function that begins a run at τ = ``step``, after as many steps of
    base batches; None for 0.
    """
    schedule = train_state.base_schedule
    source = train_state.source
    if schedule.ended_at(step):
        raise ValueError(
            f"Invalid starting_step={step}: the run has {schedule.total_steps} "
            "effective steps."
        )

    def start() -> None:
        train_state.optimizer.effective_steps = step
        train_state.schedule.advance_to(step)
        evaluation.evaluated_at = step
        if isinstance(source, MapSource):
            source.load_state_dict(
                {**source.state_dict(), "position": step * schedule.base_batch_size}
            )

    return start if step else None


def _data_of(given: Given) -> RunData:
    """Return the data of the run, with the first batch."""
    inputs = given.inputs
    config = given.config
    backend = given.backend
    dataset = inputs.train_dataset
    workers = backend.world_size
    plan = config.batch.plan(workers)
    if config.batch.halves(plan):
        _tell_of_two_passes(plan, dataset)
    source = make_source(
        dataset,
        plan.split(backend.rank),
        ExampleOrder(
            seed=config.seed, shuffle=config.shuffle, drop_last=config.drop_last
        ),
        collate_fn=inputs.collate_fn,
        num_workers=config.num_loader_workers,
        device=backend.device,
        length=_length(config, dataset, workers),
        sampler=inputs.sampler,
        splits_change=config.batch.changes,
    )
    per_epoch = source.base_steps_per_epoch(plan.base_batch_size)
    total_steps = config.resolve_total_steps(per_epoch)
    follower = BatchFollower(
        config.batch,
        workers,
        total_steps=total_steps,
        window=config.averaging_window * total_steps,
        base_steps_per_epoch=per_epoch,
    )
    _check_epoch(follower, config, dataset)
    if follower.plan != plan:
        source.set_split(follower.plan.split(backend.rank))
    return RunData(source, follower, total_steps)


def _tell_of_two_passes(plan: StepPlan, dataset: Any) -> None:
    """Warn that a step has two passes in place of one; raise if the data come in
    batches of another size.
    """
    half = plan.global_batch_size // 2
    why = (
        f"One gradient sample a step at scale {plan.scale:g} tells nothing of the "
        "noise."
    )
    if not (
        is_map_style(dataset)
        or isinstance(dataset, IterableDataset)
        or hasattr(dataset, "iter_torch_batches")
    ):
        raise ValueError(
            f"{why} Make two passes of half the size: AdaScaleConfig(accumulation=2, "
            f"per_worker_batch_size={half}), with batches of {half} examples. A "
            "map-style dataset is split by the run itself."
        )
    warn_at_user(
        f"{why} So a step has two passes of half the size, as with accumulation=2."
    )


def _schedules_of(
    given: Given, data: RunData
) -> tuple[EffectiveSchedule, BaseSchedule]:
    """Return the schedule that drives the optimizer, and the base run's."""
    inputs = given.inputs
    config = given.config
    total_steps = data.total_steps
    base_batch_size = config.batch.base_batch_size
    per_epoch = data.source.base_steps_per_epoch(base_batch_size)
    schedule = EffectiveSchedule(
        inputs.optimizer,
        inputs.scheduler,
        unit=config.scheduler_unit,
        base_steps_per_epoch=per_epoch,
        total_steps=total_steps,
    )
    base_schedule = BaseSchedule(
        base_batch_size=base_batch_size,
        total_steps=total_steps,
        scheduler_unit=config.scheduler_unit,
        base_steps_per_epoch=per_epoch,
        lr_curve=schedule.curve(total_steps),
    )
    return schedule, base_schedule


def _length(config: AdaScaleConfig, dataset: Any, world_size: int) -> int | None:
    """Return the length of data that is not map-style. A DataLoader's own counts
    where T or the schedule needs one.
    """
    needed = config.total_epochs is not None or config.scheduler_unit == "epoch"
    if config.dataset_length is not None or not needed:
        # a checkpoint has the length, so it may not change where it was None
        return config.dataset_length
    return known_length(dataset, world_size)


def _check_early_stop(config: AdaScaleConfig, evaluate: object) -> None:
    stop = config.early_stop
    if stop is None:
        return
    if stop.metric is None:
        raise ValueError(
            "EarlyStop needs metric and mode, because this run has no workload to take "
            "them from."
        )
    if stop.metric in METRICS and evaluate is None:
        raise ValueError(
            f"Invalid EarlyStop(metric={stop.metric!r}): the {stop.metric} of one step "
            "is mostly noise. Must be a metric that evaluate returns."
        )


def _check_extra_state(extra: Mapping[str, Any]) -> None:
    for name, stateful in extra.items():
        if not has_state(stateful):
            raise ValueError(
                f"Invalid extra_state={{{name!r}: ...}} of type "
                f"{type(stateful).__name__}. Must have state_dict() and "
                "load_state_dict(). A torch.Generator or numpy.random.Generator is "
                "each worker's own: PerWorker(generator)."
            )


def _listeners(
    given: Given, schedule: BaseSchedule, plan: StepPlan, trace: Trace | None
) -> list[Listener]:
    """Return the listeners of rank 0."""
    config = given.config
    forecast = forecast_run(given.recipe, config, plan.scale, plan.workers)
    tracker = EtaTracker(forecast)
    listeners: list[Listener] = []
    if not config.batch.changes:
        listeners.append(
            NoiseWarning(
                config.averaging_window * schedule.total_steps,
                forecast,
                schedule.highest_at,
            )
        )
    listeners.append(tracker)
    if trace is not None:
        listeners.append(trace)
    return [*listeners, *given.backend.listeners(tracker)]


def _check_epoch(follower: BatchFollower, config: AdaScaleConfig, dataset: Any) -> None:
    """Check that with ``drop_last`` no given batch is larger than an epoch. Batches
    that are not given are within it.
    """
    most = max(plan.global_batch_size for plan in follower.plans)
    if config.drop_last and config.batch_schedule is not None and most > len(dataset):
        raise SettingError(
            f"Invalid {{}} with drop_last=True: its largest batch has {most} examples, "
            f"and an epoch has {len(dataset)}, so every batch would be dropped. Use "
            "drop_last=False, which runs on into the next epoch, or a smaller batch.",
            batch_schedule=str(config.batch_schedule),
        )
