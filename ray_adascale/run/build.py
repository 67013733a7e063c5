"""Checks the model, optimizer and schedule that the user built, also against the
recipe, and wraps them for a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._errors import SettingError
from .._torch import digest_of, first_difference
from .._warn import warn_on_first_worker
from ..batch import StepPlan
from ..chain import parts_of
from ..checkpoint.optimizer import parameter_names
from ..config import AdaScaleConfig
from ..data.source import BatchSource
from ..optim.adam_metric import adam_preconditioner
from ..optim.adascale import AdaScaleOptimizer
from ..optim.curves import curve_difference
from ..optim.next_state import Averaging
from ..optim.rules import betas_of, chosen_rule, make_rule, metric_of, name_of
from ..optim.schedule import BaseSchedule, LRCurves
from ..optim.wrapper import check_parameters, check_wrappable
from ..recipe import Recipe
from ..sharding.kinds import shard
from ..sharding.kinds.sharding import Sharding
from ..sharding.kinds.zero2 import ShardedDataParallel
from ..sharding.oss import OSS, TIE
from ..sharding.partition import has_state
from ..sharding.shared_memory import shared_with_parameters
from ..workload import RunInputs
from .build_warnings import warn_of_optimizer, warn_of_schedule, warn_of_step_hooks


@dataclass(frozen=True)
class Wrapped:
    """A model and an optimizer, wrapped for a run.

    Attributes:
        model: The model to call.
        optimizer: The optimizer to step.
        parameter_names: Name of each of the optimizer's parameters in the bare model.
            Checkpoints use these names.
        scaler: The loss scaler; None unless precision is "fp16".
        sharding: The kind of sharding.
    """

    model: nn.Module
    optimizer: AdaScaleOptimizer
    parameter_names: dict[Tensor, str]
    scaler: torch.amp.GradScaler | None
    sharding: Sharding


def check_built(
    model: nn.Module,
    optimizer: Optimizer,
    config: AdaScaleConfig,
    recipe: Recipe | None,
) -> AdaScaleConfig:
    """Check that there is one bare model and one bare optimizer. Warn of a rule or a
    recipe that is not for this optimizer.

    Only rank 0 warns, since all workers have the same optimizer.

    Returns:
        The settings with the rule that "auto" stands for.

    Raises:
        ValueError: There is not. The message names what to pass.
    """
    if isinstance(
        model, DistributedDataParallel | ShardedDataParallel | nn.DataParallel
    ):
        raise ValueError(
            "Pass the bare model: it is wrapped for data parallelism here."
        )
    if isinstance(optimizer, OSS):
        raise ValueError(
            "Pass the bare optimizer: it is wrapped here, so OSS would wrap it twice."
        )
    # These before a warning that says that the run goes on.
    check_wrappable(optimizer)
    check_parameters(model, optimizer, alone=True)
    config = replace(config, rule=chosen_rule(config.rule, optimizer))
    rule = make_rule(config.rule)
    betas = betas_of(rule)
    if betas is not None:
        betas.check(optimizer)
    warn_of_optimizer(rule, optimizer, recipe)
    return config


_NOT_COMPARED = {"seed", "shuffle", "drop_last", "rule", "num_loader_workers"}
"""Settings that may differ between workers, with those that end in _s, or are
compared as part of something else.
"""


def facts_of(
    inputs: RunInputs,
    config: AdaScaleConfig,
    source: BatchSource,
    schedule: BaseSchedule,
    recipe: Recipe | None,
) -> dict[str, str]:
    """Return what must be the same on all workers when a run is built, by name."""
    hyperparameters = [
        {
            key: value
            for key, value in group.items()
            if key != "params" and isinstance(value, int | float | str | tuple)
        }
        for group in inputs.optimizer.param_groups
    ]
    curves = schedule.lr_curve
    assert isinstance(curves, LRCurves)
    return {
        **{
            f"AdaScaleConfig.{k}": repr(v)
            for k, v in vars(config).items()
            if k not in _NOT_COMPARED and not k.endswith("_s")
        },
        "The rule": name_of(make_rule(config.rule)),
        "The optimizer": type(inputs.optimizer).__name__,
        "The list of hyperparameters": repr(hyperparameters),
        "The LR curve": f"of digest {digest_of(torch.from_numpy(curves.rows))}",
        "The list of LR factors": repr(curves.groups),
        "The order of the data": repr({**(data := source.state_dict()), "order": None}),
        "The order that the sampler draws, which must follow from (seed, epoch) alone,": repr(
            data.get("order")
        ),
        "The recipe": repr(None if recipe is None else recipe.fingerprint),
        "starting_step": repr(inputs.starting_step),
        "The number of parameters": str(len(list(inputs.model.parameters()))),
        "evaluate": "None" if inputs.evaluate is None else "given",
        **_order_of(inputs.model, inputs.optimizer),
    }


def _order_of(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return what the workers exchange by its number: parameters and buffers of the
    model, and parameters of each group.
    """
    facts: dict[str, str] = {}
    names: dict[Tensor, str] = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        names[p] = repr(name)
        mode = "trainable" if p.requires_grad else "frozen"
        facts[f"The parameter {name!r}"] = (
            f"{tuple(p.shape)}, {p.dtype}, number {number}, {mode}"
        )
    for number, (name, b) in enumerate(model.named_buffers()):
        facts[f"The buffer {name!r}"] = f"{tuple(b.shape)}, {b.dtype}, number {number}"
    for g, group in enumerate(optimizer.param_groups):
        facts[f"The number of parameters in group {g}"] = str(len(group["params"]))
        for number, p in enumerate(group["params"]):
            facts[f"Parameter {number} of group {g}"] = names.get(p, "another model's")
    return facts


def check_equal(
    facts: Mapping[str, str], workers: int, group: dist.ProcessGroup | None
) -> None:
    """Check that all workers build the same run. Collective.

    Raises:
        ValueError: They don't. The message names the first difference.
    """
    difference = first_difference(facts, workers, group)
    if difference is not None:
        name, values = difference
        raise ValueError(
            f"The workers build different runs. {name} is {values}. Build model, "
            "optimizer, schedule, data and settings alike on all workers, each in the "
            "same order: that of a set differs between processes."
        )


def check_recipe(recipe: Recipe, schedule: BaseSchedule) -> None:
    """Check that a schedule is the recipe's.

    Raises:
        ValueError: It is not. The message names the difference.
    """
    unit = schedule.scheduler_unit
    per_epoch = schedule.base_steps_per_epoch
    if unit != recipe.scheduler_unit:
        raise ValueError(
            f"Invalid scheduler_unit={unit!r}. Must be the recipe's, "
            f"{recipe.scheduler_unit!r}."
        )
    if unit == "epoch" and per_epoch != recipe.base_steps_per_epoch:
        raise ValueError(
            f"The dataset has {per_epoch} base steps per epoch, the recipe's had "
            f"{recipe.base_steps_per_epoch}, so the scheduler would step at other "
            "effective steps. Use the same dataset, or search anew."
        )
    difference = curve_difference(recipe.lr_curve, schedule.lr_curve)
    if difference is not None:
        raise ValueError(
            f"The learning-rate curve is not the recipe's: {difference}. Build "
            "optimizer and scheduler from the hyperparameters in the workload's "
            "config, as in the search, or search anew. For another learning rate leave "
            f"the recipe out and give base_batch_size={recipe.base_batch_size} and "
            f"total_steps={recipe.total_steps} instead (on the command line "
            f"--base-batch-size {recipe.base_batch_size} --total-steps "
            f"{recipe.total_steps} in place of --recipe, and the hyperparameters): the "
            "run has no forecast then."
        )


def check_schedule(
    scheduler: LRScheduler | None,
    schedule: BaseSchedule,
    config: AdaScaleConfig,
    recipe: Recipe | None,
    batch: int,
) -> list[str]:
    """Check a schedule against the recipe and the rule. Return doubts about it and its
    batches; rank 0 warns of each.

    Args:
        scheduler: The user's.
        schedule: The base run's.
        config: The settings.
        recipe: The recipe, if there is one.
        batch: B, examples.

    Raises:
        ValueError: The schedule is not the recipe's.
    """
    if recipe is not None:
        check_recipe(recipe, schedule)
    # LEGW warms up by itself
    if (check := getattr(make_rule(config.rule), "check_curve", None)) is not None:
        check(schedule.lr_curve)
    return warn_of_schedule(scheduler, schedule, batch)


def wrap(
    module: nn.Module,
    optimizer: Optimizer,
    config: AdaScaleConfig,
    plan: StepPlan,
    *,
    device: torch.device,
    total_steps: int,
) -> Wrapped:
    """Wrap a bare model, which is on its device, and its optimizer for
    ``config.sharding``. Collective.

    Raises:
        ValueError: Sharding, rule, precision or optimizer can't be combined.
    """
    adam = metric_of(make_rule(config.rule)) == "adam"
    sharding = _choose_sharding(config, plan.workers, module, optimizer, adam=adam)
    if sharding == "fsdp2" and config.precision == "fp16":
        raise SettingError(
            "{} is not supported. Use precision='bf16'.",
            sharding="fsdp2",
            precision="fp16",
        )
    if sharding in ("oss", "zero2"):
        warn_of_step_hooks(optimizer)
    model, sharded = shard(
        sharding,
        module,
        optimizer,
        device,
        workers=plan.workers,
        find_unused=config.find_unused_parameters,
    )
    names = parameter_names(module, sharded)  # those of fully_shard are new parameters
    scaler = None
    if config.precision == "fp16":
        # imported here, because it imports FSDP
        from ..optim.grad_scaler import ShardedGradScaler

        scaler = ShardedGradScaler(device=device.type)
    adascale = adascale_of(
        sharded, config, plan, total_steps=total_steps, grad_scaler=scaler, model=model
    )
    of_step = adascale.current.sharding
    of_step.drive(module)
    return Wrapped(model, adascale, names, scaler, of_step)


def set_batch(
    plan: StepPlan, optimizer: AdaScaleOptimizer, source: BatchSource, rank: int
) -> None:
    """Use this batch from the next step on. At a step boundary, on all workers."""
    optimizer.set_plan(plan)
    source.set_split(plan.split(rank))


def adascale_of(
    optimizer: Optimizer,
    config: AdaScaleConfig,
    plan: StepPlan,
    *,
    total_steps: int,
    grad_scaler: torch.amp.GradScaler | None,
    model: nn.Module | None = None,
) -> AdaScaleOptimizer:
    """Return the AdaScale of a run: one gain for all parameter groups, with averages
    over effective time.
    """
    rule = make_rule(config.rule)
    precondition = None
    if metric_of(rule) == "adam":
        precondition = adam_preconditioner(optimizer)
    window = config.averaging_window * total_steps
    return AdaScaleOptimizer(
        optimizer,
        Averaging(window=window, measure_every=config.measure_every),
        passes=plan.passes,
        scale=plan.scale,
        world_size=plan.workers,
        grad_scaler=grad_scaler,
        single_gain=True,
        total_steps=total_steps,
        base_batch_size=plan.base_batch_size,
        rule=rule,
        precondition=precondition,
        model=model,
    )


def _choose_sharding(
    config: AdaScaleConfig,
    workers: int,
    module: nn.Module,
    optimizer: Optimizer,
    *,
    adam: bool,
) -> str:
    if adam and config.sharding not in ("auto", "none"):
        raise SettingError(
            "Invalid {} with the rule AdamScale: its statistics need Adam's state of "
            "every parameter on every worker. Use sharding='none', or 'auto', which "
            "chooses it.",
            sharding=config.sharding,
        )
    sparse = any(
        isinstance(part, torch.optim.SparseAdam) for part, _ in parts_of(optimizer)
    )
    if sparse and workers > 1 and config.sharding in ("zero2", "fsdp2"):
        raise SettingError(
            "Invalid {} with SparseAdam, which needs sparse gradients: sharded ones "
            "are dense. Use sharding='none', or 'auto', which chooses it, or 'oss'.",
            sharding=config.sharding,
        )
    if adam or workers == 1:
        return "none"
    if config.sharding != "auto":
        return config.sharding
    if sparse or not has_state(optimizer):
        return "none"
    shared = shared_with_parameters(module, optimizer)
    if shared is not None:
        warn_on_first_worker(
            f"{shared[0]!r} and {shared[1]!r} of the model share memory, which sharded "
            "parameters can't, so sharding='auto' is 'none' and each worker has all "
            f"optimizer state. {TIE}"
        )
        return "none"
    return "zero2"
