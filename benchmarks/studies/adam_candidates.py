"""Rules that ``adam.py`` compares: published proposals for Adam and AdamW.

A rule of the package sets the LR factor and the clock. Some proposals for Adam also change its betas, its ε or its decay for a
batch κ times as large: :class:`Changing` sets these for one step, and restores them after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from ray_adascale import RuleInput
from ray_adascale.optim.rules import Metric, ScalingRule, metric_of

Change = Callable[[dict[str, Any], float, float], dict[str, Any]]
"""From a parameter group, the step's LR factor and its clock increment to the group's changed entries."""


@dataclass(frozen=True)
class Power:
    """(r^power, r), with r from norms in a metric.

    Attributes:
        power: Exponent of r.
        metric: Metric of the gradients' norms.
    """

    power: float
    metric: Metric = "euclidean"

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return now.gain**self.power, now.gain


@dataclass
class Changing:
    """A rule that also changes other hyperparameters of the optimizer, for one step at a time.

    Attributes:
        rule: Returns LR factor and clock.
        change: Returns the other entries. They are set before the inner optimizer's step and restored after it.
    """

    rule: ScalingRule
    change: Change
    _now: tuple[float, float] = field(default=(1.0, 1.0), init=False, repr=False)
    _kept: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)

    @property
    def metric(self) -> Metric:
        """Metric of the rule."""
        return metric_of(self.rule)

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        self._now = self.rule(now)
        return self._now

    def attach(self, optimizer: Optimizer) -> None:
        """Apply the changes in every step of the optimizer."""
        optimizer.register_step_pre_hook(self._set)
        optimizer.register_step_post_hook(self._restore)

    def _set(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            new = self.change(group, *self._now)
            self._kept.append({key: group[key] for key in new})
            group.update(new)

    def _restore(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, old in zip(optimizer.param_groups, self._kept, strict=True):
            group.update(old)
        self._kept.clear()


def sde_square_root(group: dict[str, Any], factor: float, clock: float) -> dict[str, Any]:
    """1 − β′ = κ(1 − β) for both betas and ε′ = ε/√κ, with κ the clock.

    The square root scaling rule of Malladi et al., NeurIPS 2022 (arXiv 2205.10287). With β₁ = 0.9 it is undefined from κ = 10
    on, because 1 − β₁′ would exceed 1; this function uses β₁′ = 0 there.
    """
    first, second = (max(0.0, 1 - clock * (1 - beta)) for beta in group["betas"])
    return {"betas": (first, second), "eps": group["eps"] / math.sqrt(clock)}


def betas_per_effective_step(group: dict[str, Any], factor: float, clock: float) -> dict[str, Any]:
    """β′ = β^c: in an effective step the averages decay as in the base run."""
    first, second = (beta**clock for beta in group["betas"])
    return {"betas": (first, second)}


def decay_per_effective_step(group: dict[str, Any], factor: float, clock: float) -> dict[str, Any]:
    """λ′ = λ·c/f: decoupled decay, lr·f·λ′ in a step of c effective steps, is lr·λ in each of them."""
    return {"weight_decay": group["weight_decay"] * clock / factor}
