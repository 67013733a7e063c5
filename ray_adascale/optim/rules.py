"""Scaling rules of the trainer: how the learning rate and the clock move when the batch is S times the base batch.

A rule answers with a pair: the factor on ``lr(⌊τ⌋)`` and the increment of the clock τ for one optimizer step. Every rule
ends the run when τ reaches T, so the increment decides how many optimizer steps a run takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "RULES",
    "AdaScaleRule",
    "LinearRule",
    "RuleInput",
    "ScalingRule",
    "SquareRootRule",
    "UnscaledRule",
    "make_rule",
]


@dataclass(frozen=True, kw_only=True)
class RuleInput:
    """What a rule may look at.

    Attributes:
        gain: r of this step, between 1 and S.
        scale: S.
        effective_steps: τ before this step.
        total_steps: T, or None where the optimizer is used without a schedule's end.
        base_batch_size: B0 in examples, where it is known.
        group: Index of the parameter group whose LR factor is asked for, with ``gain`` that group's; None: of the whole
            optimizer, which moves the clock.
    """

    gain: float
    scale: float
    effective_steps: float
    total_steps: float | None = None
    base_batch_size: float | None = None
    group: int | None = None


ScalingRule = Callable[[RuleInput], tuple[float, float]]


@dataclass(frozen=True)
class AdaScaleRule:
    """(r, r): Johnson et al., ICML 2020."""

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return now.gain, now.gain


def _stretch(total_steps: float | None, steps: int | None, increment: float, name: str) -> float:
    """The clock of a rule that was given its number of optimizer steps: T/N, so that the schedule ends with them."""
    if steps is None:
        return increment
    if steps <= 0 or total_steps is None:
        raise ValueError(f"Invalid {name}(steps={steps}) with {total_steps=}. Give a positive number and the run's T.")
    return total_steps / steps


@dataclass(frozen=True)
class LinearRule:
    """(S, S), with a linear warm-up of the factor from 1 to S: Goyal et al., arXiv 1706.02677.

    Attributes:
        warmup: Share of the run, in effective steps. Goyal's 5 of 90 epochs by default; 0 for none.
        steps: Optimizer steps for the whole run ("LSW+"): the clock then advances by T/N instead of S.
    """

    warmup: float = 5 / 90
    steps: int | None = None

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        increment = _stretch(now.total_steps, self.steps, now.scale, "LinearRule")
        if self.warmup <= 0:
            return now.scale, increment
        if now.total_steps is None:
            raise ValueError("LinearRule(warmup=...) is a share of the run: total_steps is needed.")
        ramp = min(1.0, now.effective_steps / (self.warmup * now.total_steps))
        return 1 + (now.scale - 1) * ramp, increment


@dataclass(frozen=True)
class SquareRootRule:
    """(√S, S): Krizhevsky, arXiv 1404.5997."""

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return math.sqrt(now.scale), now.scale


@dataclass(frozen=True)
class UnscaledRule:
    """(1, S): the base schedule's LR at the larger batch, over as many examples as the base run; a control.

    Attributes:
        steps: Optimizer steps for the whole run: the clock then advances by T/N instead of S.
    """

    steps: int | None = None

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return 1.0, _stretch(now.total_steps, self.steps, now.scale, "UnscaledRule")


RULES: dict[str, Callable[..., ScalingRule]] = {
    "adascale": AdaScaleRule,
    "linear": LinearRule,
    "sqrt": SquareRootRule,
    "unscaled": UnscaledRule,
}


def make_rule(rule: str | ScalingRule) -> ScalingRule:
    """A rule by name, or the callable itself.

    Raises:
        ValueError: ``rule`` is neither.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"Invalid {rule=}. Known rules: {', '.join(RULES)}; or pass a callable.")
        return RULES[rule]()
    if not callable(rule):
        raise ValueError(
            f"Invalid {rule=}. Must be one of {', '.join(RULES)} or a callable (RuleInput) -> (factor, clock)."
        )
    return rule
