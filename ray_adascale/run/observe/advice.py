"""What may be wrong in a run, with what to do: a function or a class for each
warning.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..._hooks import global_step_hooks
from ..._warn import warn_at_user, warn_on_first_worker
from ...chain import largest_part, parts_of
from ...forecast.replay import PredictedRun
from ...optim.curves import other_length
from ...optim.rules import (
    AdamScaleRule,
    AdaScaleMemoryRule,
    AdaScaleRule,
    ScalingRule,
)
from ...optim.schedule import BaseSchedule
from ...recipe import Recipe
from ...workload import ConfigAccessLog, unread_warning
from .step import Listener, Step

SGD = frozenset({"SGD"})
ADAM = frozenset({"Adam", "AdamW"})
MUON = frozenset({"Muon"})
# of any package, so optimizers are recognised by the name of the class
LION = frozenset({"Lion"})

# ---- when a run is built -------------------------------------------------------------


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
    """Warn if a usable schedule has another length than the run, or a batch is larger
    than the dataset. Return the warnings.

    Args:
        scheduler: The user's.
        schedule: The base run's.
        batch: B, examples.
    """
    found = [other_length(scheduler, schedule)]
    lowest = float(np.min([np.min(curve) for curve in schedule.lr_curve]))
    if math.isnan(lowest) or lowest < 0:
        found.append(
            f"The learning rate falls to {lowest:.3g}, and below 0 a step goes uphill. "
            "End the schedule at 0."
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


# ---- in its first steps --------------------------------------------------------------

_WINDOWS = 3
_STEPS = 20
"""Windows of the averages, and optimizer steps, after which the averages are
reliable enough for a warning.
"""


_SUM = 2  # torch's number of reduction="sum"


def sum_advice(loss: Any, examples: int) -> str | None:
    """Return a warning if a loss looks like a sum over its examples. To be called
    before its backward pass.
    """
    if not _is_sum(getattr(loss, "grad_fn", None), examples):
        return None
    return (
        f"The loss looks like a sum over the examples, {examples} here. It must be the "
        "mean (reduction='mean'), else the learning rate grows with the micro-batch."
    )


def _is_sum(node: Any, examples: int, factor: float = 1.0) -> bool:
    """Return whether a loss, or a loss that it adds, ends in a sum over the
    examples, times a factor far above 1/examples.
    """
    name = "" if node is None else node.name()
    if name in (
        "AddBackward0",
        "SubBackward0",
        "NegBackward0",
        "MulBackward0",
        "DivBackward0",
    ):
        by = getattr(node, "_saved_other", None)
        if by is not None and by.numel() == 1:
            factor *= abs(float(by)) ** (1 if name.startswith("Mul") else -1)
        return any(_is_sum(term, examples, factor) for term, _ in node.next_functions)
    sizes = getattr(node, "_saved_self_sym_sizes", ()) if name == "SumBackward0" else ()
    sums = getattr(node, "_saved_reduction", None) == _SUM or tuple(sizes[:1]) == (
        examples,
    )
    return sums and factor * examples > 2


# ---- in any step ---------------------------------------------------------------------


class NoiseWarning(Listener):
    """Warns once if the batch is larger than the noise scale, unless the whole run is
    efficient, so far or by the forecast.

    Args:
        window: Window of the averages, in effective steps.
        forecast: The forecast of the whole run; None without one.
        warmed_up: τ at which the schedule's LR is highest. The noise scale grows while
            the LR rises, so there is no warning within one window of the averages after
            this τ.
    """

    def __init__(
        self, window: float, forecast: PredictedRun | None, warmed_up: float = 0.0
    ) -> None:
        self._window = window
        self._forecast = forecast
        self._warmed_up = warmed_up
        self._gains = self._scales = 0.0  # Σ r and Σ S of this start's steps
        # τ; None while the batch is small enough
        self._too_large_since: float | None = None
        self._warned = False

    def after_step(self, step: Step) -> None:
        """Warn if the batch has been too large for one window of the averages."""
        if self._warned:
            return
        if not step.result.skipped:
            self._gains += step.metrics["gain"]
            self._scales += step.plan.scale
        noise_scale = step.metrics["noise_scale"]
        plan = step.plan
        # which may be NaN
        if plan.scale <= 1 or not plan.global_batch_size > noise_scale:
            self._too_large_since = None
            return
        if self._too_large_since is None:
            since = step.result.effective_steps
        else:
            since = self._too_large_since
        self._too_large_since = since
        # Noise at the beginning of a run seldom lasts, and averages of a few samples
        # vary.
        settled = max(_WINDOWS * self._window, self._warmed_up + self._window)
        reliable = (
            step.result.effective_steps >= settled
            and step.metrics["optimizer_steps"] >= _STEPS
        )
        if (
            reliable
            and step.result.effective_steps - since >= self._window
            and not self._efficient_as_a_whole(step)
        ):
            self._warned = True
            warn_at_user(
                f"The batch of {plan.global_batch_size} exceeds the gradient noise "
                f"scale of {noise_scale:.0f} examples over the last "
                f"{self._window:,.0f} effective steps (gain {step.metrics['gain']:.2f} "
                f"at scale {plan.scale:g}): more workers now buy less than half."
            )

    def _efficient_as_a_whole(self, step: Step) -> bool:
        """Return whether r/S is at least one half on average, over the steps so far
        or over the whole run by the forecast.
        """
        if 2 * self._gains >= self._scales:
            return True
        if self._forecast is None:
            return False
        steps = step.metrics["optimizer_steps"] + self._forecast.steps_left(
            step.result.effective_steps
        )
        return 2 * step.total_steps >= step.plan.scale * steps


class UnreadHyperparameters(Listener):
    """Warns of hyperparameters that the workload has not read.

    The check comes after the first optimizer step, so that keys read lazily (in
    ``loss_fn``) count as read.

    Args:
        reads: The record of the keys that were read.
    """

    def __init__(self, reads: ConfigAccessLog) -> None:
        self._reads: ConfigAccessLog | None = reads

    def after_step(self, step: Step) -> None:
        """Warn if this is the first step and keys are unread."""
        reads = self._reads
        self._reads = None
        if reads is not None and reads.unread:
            warn_at_user(unread_warning(reads.unread))
