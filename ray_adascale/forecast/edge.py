"""The edge of stability as a search has seen it: learning rates that diverged, against those of a run at scale."""

from __future__ import annotations

import copy
from typing import Any

from ..batch import BatchSettings
from ..optim.rules import RuleInput, ScalingRule, make_rule, metric_of
from ..optim.schedule import BaseSchedule
from ..recipe import Recipe
from .replay import Forecaster

LR = "lr"
"""The key, in an entry of ``recipe.search["failed"]``, of the highest learning rate of a trial that diverged."""


def diverged_trials(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the entries of ``recipe.search["failed"]`` that diverged, the lowest learning rate first."""
    failed = recipe.search.get("failed")
    entries = failed if isinstance(failed, list) else []  # any JSON value: a recipe may be of another program
    return sorted(
        (trial for trial in entries if isinstance(trial, dict) and LR in trial), key=lambda trial: float(trial[LR])
    )


def edge_doubt(
    recipe: Recipe, batch: BatchSettings, workers: int, *, rule: str | ScalingRule, averaging_window: float
) -> str | None:
    """Return a warning if the forecast of a run reaches a learning rate that diverged in the search; None if it does not.

    Args:
        recipe: The recipe.
        batch: Settings of the batch.
        workers: Number of workers.
        rule: As in :class:`ray_adascale.AdaScaleConfig`.
        averaging_window: As in :class:`ray_adascale.AdaScaleConfig`.
    """
    made, diverged = make_rule(rule), diverged_trials(recipe)
    if not diverged or not recipe.noise or metric_of(made) != "euclidean":
        return None
    lowest = diverged[0]
    lr, tau = highest_factored_lr(recipe, batch, workers, rule=made, averaging_window=averaging_window)
    if lr < lowest[LR]:
        return None
    return (
        f"On {workers} workers the learning rate times its factor reaches {lr:.3g} at effective step {tau:.0f}. In the search, "
        f"{lowest['trial']} diverged at effective step {lowest['effective_steps']:.0f} with {lowest[LR]:.3g}, so this run may "
        "diverge too. Use fewer workers, clip at twice the expected norm (grad_clip='2x'), or search at lower learning rates."
    )


def highest_factored_lr(
    recipe: Recipe, batch: BatchSettings, workers: int, *, rule: ScalingRule, averaging_window: float
) -> tuple[float, float]:
    """Return the highest lr(τ) · factor of a run by its forecast, and τ there; of the first parameter group."""
    run = Forecaster(recipe, rule=rule, averaging_window=averaging_window).following(batch, workers).expected
    schedule = BaseSchedule(
        base_batch_size=recipe.base_batch_size,
        total_steps=recipe.total_steps,
        scheduler_unit=recipe.scheduler_unit,
        base_steps_per_epoch=recipe.base_steps_per_epoch,
        lr_curve=recipe.lr_curve,
    )
    answer, scale = copy.deepcopy(rule), batch.plan(workers).scale  # LEGW's rule keeps the scale of its last call
    found = 0.0, 0.0
    for i, (tau, gain) in enumerate(zip(run.tau, run.gains, strict=True)):
        factor, _ = answer(
            RuleInput(
                gain=gain,
                scale=run.plans[i].scale if run.plans else scale,
                effective_steps=tau,
                total_steps=recipe.total_steps,
                base_batch_size=recipe.base_batch_size,
            )
        )
        found = max(found, (schedule.lr_at(0, tau) * factor, tau))
    return found
