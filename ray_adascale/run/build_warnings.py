"""What may be wrong in the optimizer, the schedule and the recipe that a run is built
of: a function for each warning.
"""

from __future__ import annotations

import math

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._hooks import global_step_hooks
from .._warn import warn_on_first_worker
from ..chain import largest_part, parts_of
from ..optim.curves import other_length
from ..optim.rules import (
    AdamScaleRule,
    AdaScaleMemoryRule,
    AdaScaleRule,
    ScalingRule,
)
from ..optim.schedule import BaseSchedule
from ..recipe import Recipe

SGD = frozenset({"SGD"})
ADAM = frozenset({"Adam", "AdamW"})
MUON = frozenset({"Muon"})
# of any package, so optimizers are recognised by the name of the class
LION = frozenset({"Lion"})


def class_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class. If the class is derived from a
    measured one, return the name of that one.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    return next((name for name in names if name in SGD | ADAM | MUON | LION), names[0])


def warn_of_optimizer(
    rule: ScalingRule, optimizer: Optimizer, recipe: Recipe | None
) -> None:
    """Warn if the rule has no derivation for the optimizer, or if the recipe was made
    with another class of optimizers.

    Args:
        rule: The rule.
        optimizer: The user's own optimizer, or a chain.
        recipe: The recipe, if there is one.
    """
    for sentence in (
        _rule_advice(rule, optimizer),
        recipe and _recipe_advice(recipe, optimizer),
    ):
        if sentence:
            warn_on_first_worker(sentence)


def _rule_advice(rule: ScalingRule, optimizer: Optimizer) -> str | None:
    if isinstance(rule, AdamScaleRule):
        return (
            "rule='adamscale' is experimental: schedules did not carry over with it, "
            "but did with the default and the same AdamW (docs/guides/choosing.md). "
            "Leave rule out, or compare with a base run before you trust it."
        )
    if not isinstance(rule, AdaScaleRule | AdaScaleMemoryRule):
        return None
    parts = [part for part, _ in parts_of(optimizer)]
    kinds = {class_name(part) for part in parts}
    name = " and ".join(dict.fromkeys(type(part).__name__ for part in parts))
    if not (kinds <= SGD | ADAM | MUON or kinds <= LION):
        return (
            "AdaScale is derived for SGD and Adam. It was measured with these, AdamW, "
            f"Muon and Lion (docs/results.md), but not with {name}. The run goes on. "
            "Compare with a base run before you trust it."
        )
    if isinstance(rule, AdaScaleMemoryRule) or not kinds & (ADAM | LION):
        return None
    return (
        f"With rule='adascale' the averages of {name} reach over r times more "
        "effective steps than in the base run, and metrics "
        'fell behind the base run\'s (docs/results.md). Leave rule out: "auto" changes '
        "the betas with the gain, and multiplies the LR by its root."
    )


def _recipe_advice(recipe: Recipe, optimizer: Optimizer) -> str | None:
    before = recipe.optimizer_class
    now = class_name(largest_part(optimizer))
    if before in ("", now):
        return None
    return (
        f"The recipe was made with {before}, and this run has {now}: the schedule was "
        f"tuned for another optimizer. Use {before}, or search anew with {now}."
    )


def forecast_advice(kind: str) -> str | None:
    """Return a note if the forecast failed with a class of optimizers, or was not
    measured with it; otherwise None.

    Args:
        kind: :func:`class_name` the optimizer of the base run; empty: unknown.
    """
    if not kind or kind in SGD | ADAM | MUON:
        return None
    if kind in LION:
        return (
            "With Lion runs took up to 2.3 times the forecast steps at S = 64 "
            "(benchmarks/studies/pages/lion.md)."
        )
    return (
        "Forecasts were compared with runs of SGD, Adam, AdamW and Muon, but not of "
        f"{kind}."
    )


def warn_of_schedule(
    scheduler: LRScheduler | None, schedule: BaseSchedule, batch: int
) -> list[str]:
    """Warn if a usable schedule has another length than the run or has no usable
    learning rates, or a batch is larger than the dataset. Return the warnings.

    Args:
        scheduler: The user's.
        schedule: The base run's.
        batch: B, examples.
    """
    found = [other_length(scheduler, schedule)]
    lowest = float(np.min([np.min(curve) for curve in schedule.lr_curve]))
    endless = (
        "Check the numbers that the schedule is made of. Lightning's "
        "trainer.estimated_stepping_batches is infinite with max_epochs=-1: write T = "
        f"{schedule.total_steps} in its place."
    )
    if math.isnan(lowest):
        found.append(
            "The learning rate is NaN in steps of the schedule, and such a step makes "
            f"the weights NaN. {endless}"
        )
    elif lowest < 0:
        found.append(
            f"The learning rate falls to {lowest:.3g}, and below 0 a step goes uphill. "
            "End the schedule at 0."
        )
    elif not any(np.any(curve) for curve in schedule.lr_curve):
        found.append(
            "The learning rate is zero in all steps of the schedule, so no weight is "
            f"trained. {endless}"
        )
    base = schedule.base_batch_size
    if schedule.base_steps_per_epoch is None:
        length = math.inf
    else:
        length = schedule.base_steps_per_epoch * base
    if max(base, batch) > length:
        what = "batch"
        size = batch
        remedy = "the workers, per_worker_batch_size or accumulation"
        if base > length:
            what = "base batch"
            size = base
            remedy = "base_batch_size"
        found.append(
            f"The {what} of {size} is larger than the dataset of {length:.0f} "
            "examples, so a step uses some of them twice, and its noise is too small "
            f"for a batch of that size. Lower {remedy}."
        )
    advice = [sentence for sentence in found if sentence is not None]
    for sentence in advice:
        warn_on_first_worker(sentence)
    return advice


def warn_of_state_dict_hooks(optimizer: Optimizer) -> None:
    """Warn if the optimizer has hooks around its state dict, or more in it: the
    run's checkpoints save tensors of parameters.
    """
    parts = [part for part, _ in parts_of(optimizer)]
    if any(
        getattr(part, f"_optimizer_{name}_hooks")
        for part in (optimizer, *parts)
        for name in (
            "state_dict_pre",
            "state_dict_post",
            "load_state_dict_pre",
            "load_state_dict_post",
        )
    ) or any(part.state_dict().keys() - {"state", "param_groups"} for part in parts):
        warn_on_first_worker(
            f"{type(optimizer).__name__} has hooks around its state dict, or entries "
            "of its own in it. The run's checkpoints don't hold what they add. Give it "
            "as extra_state=, an object with state_dict() and load_state_dict()."
        )


def warn_of_modes(optimizer: Optimizer) -> None:
    """Warn if the optimizer has a ``train()`` and ``eval()``, as schedule-free ones
    have.
    """
    if names := [
        type(part).__name__
        for part, _ in parts_of(optimizer)
        if callable(getattr(part, "eval", None))
    ]:
        warn_on_first_worker(
            f"{names[0]} has an eval() of its own, which changes the weights. In "
            "evaluate= call optimizer.eval() first and optimizer.train() last, on "
            "every worker. Checkpoints and load_weights() have the weights of train(). "
            "To save those of eval(), call optimizer.eval() after the loop, and save "
            "run.module.state_dict()."
        )


def warn_of_step_hooks(optimizer: Optimizer) -> None:
    """Warn if the optimizer that is to be sharded has hooks around its step."""
    parts = [optimizer, *(part for part, _ in parts_of(optimizer))]
    if global_step_hooks() or any(
        p._optimizer_step_pre_hooks or p._optimizer_step_post_hooks for p in parts
    ):
        warn_on_first_worker(
            f"{type(optimizer).__name__} has hooks around its step. With sharded state "
            "they see this worker's shard of the parameters and gradients, before the "
            "workers gather the shards. Use after_step= for an average of the weights, "
            "grad_clip= for clipping, or AdaScaleConfig(sharding='none')."
        )
