"""Rules that ``adam_betas.py`` compares: published proposals for Adam and AdamW.

A rule of the package sets the LR factor and the clock, and may set the betas. Some proposals for Adam also change its ε or its
decay for a batch κ times as large: :class:`Changing` sets these for one step, and restores them after it. Other proposals
measure the noise in another norm: :class:`SignGain`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ray_adascale import BetaRule, RuleInput
from ray_adascale.gain import plain_effective_decay, plain_gain
from ray_adascale.optim.rules import ScalingRule

Change = Callable[[dict[str, Any], float, float], dict[str, Any]]
"""From a parameter group, the step's LR factor and its clock increment to the group's changed entries."""


@runtime_checkable
class Attached(Protocol):
    """A rule that needs the optimizer of the run."""

    def attach(self, optimizer: Optimizer) -> None:
        """Register hooks on the optimizer or its parameters, before the run."""
        ...


@dataclass(frozen=True)
class Power:
    """(r^power, r).

    Attributes:
        power: Exponent of r.
    """

    power: float

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return now.gain**self.power, now.gain


@dataclass(frozen=True)
class PowerBetas(Power):
    """:class:`Power`, with betas on the clock.

    Attributes:
        betas: Bounds of the exponent.
    """

    betas: BetaRule = field(default_factory=BetaRule)


@dataclass(frozen=True)
class CappedBetas:
    """(min(r, √S), r), with betas on the clock.

    Attributes:
        betas: Bounds of the exponent.
    """

    betas: BetaRule = field(default_factory=BetaRule)

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return min(now.gain, math.sqrt(now.scale)), now.gain


def surge(now: RuleInput) -> tuple[float, float]:
    """(r/√S, r): the learning rate and the steps of Li et al., NeurIPS 2024 (arXiv 2405.14578), for the measured noise.

    Their learning rate of a batch B is proportional to 1/(√(B_noise/B) + √(B/B_noise)). With B_noise = B0·ν and ν = σ²/μ², the
    ratio of the rates at S·B0 and B0 is √S·(ν + 1)/(ν + S) = r/√S. It is below 1 where r < √S.
    """
    return now.gain / math.sqrt(now.scale), now.gain


@dataclass
class PassGain(ABC):
    """(r, r) with a gain from the gradients of the passes of one process, which are samples of equal weights.

    Attributes:
        betas: Bounds of the exponent of the betas.
        window: Share of T that the averages reach back over.
    """

    betas: BetaRule = field(default_factory=BetaRule)
    window: float = 0.05
    _passes: dict[Tensor, int] = field(default_factory=dict, init=False, repr=False)
    _gain: float = field(default=1.0, init=False, repr=False)

    def attach(self, optimizer: Optimizer) -> None:
        """Read the gradient of each pass."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_hook(partial(self._read, parameter))

    def _read(self, parameter: Tensor, gradient: Tensor) -> None:
        number = self._passes.get(parameter, 0)
        with torch.no_grad():
            self._add(parameter, gradient, number)
        self._passes[parameter] = number + 1

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        if self._passes and now.scale > 1:
            self._gain = self._of_step(now.scale, now.total_steps or math.inf)
        self._passes.clear()
        return self._gain, self._gain

    @abstractmethod
    def _add(self, parameter: Tensor, gradient: Tensor, number: int) -> None:
        """Add the gradient of the pass with this number, from 0. It has the weight 1/n already."""

    @abstractmethod
    def _of_step(self, scale: float, total_steps: float) -> float:
        """Return r after the passes of a step."""


@dataclass
class SignGain(PassGain):
    """(r₁, r₁) with a gain in the ℓ1 norm, the dual norm of steps of ±lr in each weight, and betas on the clock.

    The noise scale of such steps is B0·ν₁ with ν₁ = ‖σ‖₁²/‖μ‖₁² (the norm: arXiv 2602.03001). Here r₁ = (ν₁ + 1)/(ν₁/S + 1).
    σ_j² is the variance of weight j's gradient over the samples of a step, for a batch of B0, in a moving average.
    Of a gradient that is noise alone E|ḡ_j| is √(2/π)·σ_j/√S, so ‖μ‖₁² is the average of ‖ḡ‖₁² less (2/π)·‖σ‖₁²/S: exact
    without noise and for noise alone, a mean of the two in between. The estimate is this study's.
    """

    _sums: dict[Tensor, Tensor] = field(default_factory=dict, init=False, repr=False)
    _squares: dict[Tensor, Tensor] = field(default_factory=dict, init=False, repr=False)
    _variance: dict[Tensor, Tensor] = field(default_factory=dict, init=False, repr=False)
    _square: float = field(default=0.0, init=False, repr=False)
    _weight: float = field(default=0.0, init=False, repr=False)

    def _add(self, parameter: Tensor, gradient: Tensor, number: int) -> None:
        if number == 0:
            self._sums[parameter] = torch.zeros_like(gradient)
            self._squares[parameter] = torch.zeros_like(gradient)
        self._sums[parameter] += gradient
        self._squares[parameter].addcmul_(gradient, gradient)

    def _of_step(self, scale: float, total_steps: float) -> float:
        """Return r₁ after the passes of a step."""
        decay = plain_effective_decay(self._gain, self.window * total_steps)
        self._weight = decay * self._weight + 1 - decay
        signal = noise = 0.0
        for parameter, n in self._passes.items():
            mean, squares = self._sums[parameter], self._squares[parameter]
            # A pass's gradient has the weight 1/n already, so Σ g²/n is n times the sum of squares.
            variance = (squares * n - mean**2).clamp_(min=0) * (scale / (n - 1))
            average = self._variance.setdefault(parameter, torch.zeros_like(mean))
            average.lerp_(variance, 1 - decay)
            signal += mean.abs().sum().item()
            noise += (average / self._weight).sqrt_().sum().item()
        self._square += (signal**2 - self._square) * (1 - decay)
        noise2 = noise**2
        signal2 = self._square / self._weight - 2 / math.pi * noise2 / scale
        return plain_gain(noise2, signal2, scale)


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
