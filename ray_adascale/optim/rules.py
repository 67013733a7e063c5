"""Scaling rules of the trainer: how the learning rate and the clock move when the batch
is S times the base batch.

A rule returns a pair: the factor on ``lr(⌊τ⌋)`` and the increment of the clock τ for
one optimizer step. The run ends when τ reaches T, so the increment determines the
number of optimizer steps in a run. A rule may also change the optimizer's betas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import ClassVar, Literal, get_args

from torch.optim import Optimizer

from .._warn import warn_at_user, warn_on_first_worker
from ..chain import parts_of
from .betas import BetaRule, steps_as_sgd


@dataclass(frozen=True, kw_only=True)
class RuleInput:
    """Input of a scaling rule.

    Attributes:
        gain: r of this step, between 1 and S.
        scale: S.
        effective_steps: τ before this step.
        total_steps: T, or None if the optimizer is used without a schedule's end.
        base_batch_size: B0 in examples, or None if it is not known.
        group: Index of the parameter group, with ``gain`` that group's; None: the whole
            optimizer, for the clock.
        normalizes: Whether the group's optimizer divides by the size of its gradients
            before they are averaged, see ``optim/betas.py``. For the whole optimizer:
            that of the first group.
    """

    gain: float
    scale: float
    effective_steps: float
    total_steps: float | None = None
    base_batch_size: float | None = None
    group: int | None = None
    normalizes: bool = False


ScalingRule = Callable[[RuleInput], tuple[float, float]]
"""A callable from the input to (LR factor, clock increment). It may have four
attributes: ``metric``, which :func:`metric_of` reads; ``betas``, which :func:`betas_of`
reads; ``clock_is_gain``, which :func:`follows_gain` reads; and ``check_curve(curve)``,
which gets the base run's learning rates and warns if rule and schedule would do the
same."""

Metric = Literal["euclidean", "adam"]
"""Metric of gradient norms: of the plain gradients, or of gradients divided by √v as
in Adam's step.
"""


def metric_of(rule: ScalingRule) -> Metric:
    """Return the metric of a rule's statistics; Euclidean if the rule has no
    ``metric``.

    Raises:
        ValueError: Unknown metric.
    """
    metric: Metric = getattr(rule, "metric", "euclidean")
    if metric not in get_args(Metric):
        raise ValueError(
            f"Invalid {metric=} of the rule {rule!r}. Must be one of "
            f"{', '.join(get_args(Metric))}."
        )
    return metric


def betas_of(rule: ScalingRule) -> BetaRule | None:
    """Return a rule's :class:`BetaRule`; None if the optimizer's betas stay the same.

    The clock increment that the rule returns for a parameter group is the effective
    steps of that group's step.

    Raises:
        ValueError: The rule has an attribute ``betas`` of another type.
    """
    betas = getattr(rule, "betas", None)
    if betas is not None and not isinstance(betas, BetaRule):
        raise ValueError(
            f"Invalid {betas=} of the rule {rule!r}. Must be a BetaRule, or None."
        )
    return betas


LEAST_MOMENTUM = 0.5
"""Floor of SGD's momentum under the default rule. A momentum that is no larger stays as
it is: runs with m = 1/2 ended no better with m^√r
(benchmarks/studies/pages/momentum.md).
"""


@dataclass(frozen=True)
class AdaScaleRule:
    """LR × r, clock + r: Johnson et al., ICML 2020. Derived for SGD."""

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return now.gain, now.gain


@dataclass(frozen=True)
class AdaScaleMemoryRule:
    """AdaScale with the optimizer's memory on the effective clock: (√r, r) and β^r for
    Adam, AdamW and Adamax, (r, r) and β^r for Lion, (r, r) and m^√r for SGD. The
    momentum of SGD is not lowered below 1/2.

    Adam divides by √v, and v is the mean square of the gradients that it is given. Let
    μ be the mean of one element of the gradient, and σ² its variance in a base batch:

    - A base step moves the element by lr·μ/√(μ² + σ²).
    - A step at scale S with the LR factor f moves it by f·lr·μ/√(μ² + σ²/S).
    - The step is to be worth r base steps, so f = r·√((μ² + σ²/S)/(μ² + σ²)). The ratio
      under the root is 1/r, so f = √r.

    With f = r a step would be worth r^1.5 base steps on a clock that counts r. The
    averages decay by β^r, so that they reach over as many effective steps as in the
    base run. Where noise is large, r = S, and this is the square-root rule of Malladi
    et al., arXiv 2205.10287. r is the gain of the whole gradient, in the Euclidean
    norm.

    Lion takes the sign of an average that reaches over as many effective steps as in
    the base run. It has as much noise, so its factor is r, as is that of SGD and Muon.

    SGD's buffer averages over 1/(1 − m) optimizer steps. With a fixed m these are r
    times as many effective steps as in the base run. With m^r they are as many. But the
    weight of the newest gradient then grows by (1 − m^r)/(1 − m) ≈ r, and its LR is r
    times as large already. SGD with momentum is stable for lr·λ < 2·(1 + m), where λ is
    the largest curvature. With m^√r the reach and the weight each grow by about √r. See
    :class:`BetaRule`.

    Attributes:
        betas: The rule for betas and momentum.
    """

    betas: BetaRule = field(
        default_factory=lambda: BetaRule(momentum=0.5, momentum_floor=LEAST_MOMENTUM)
    )

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        if now.normalizes:
            return math.sqrt(now.gain), now.gain
        return now.gain, now.gain


def _stretch(now: RuleInput, steps: int | None, increment: float, name: str) -> float:
    """The clock of a rule that was given its number of optimizer steps: T/N, so that
    the schedule ends with them.
    """
    if steps is None:
        return increment
    total_steps = now.total_steps
    if steps <= 0 or total_steps is None:
        raise ValueError(
            f"Invalid {name}(steps={steps}) with {total_steps=}. Give a positive "
            "number and the run's T."
        )
    made = now.effective_steps * steps / total_steps
    # to where the next step ends: N times T/N, rounded, may stay below T
    if abs(made - round(made)) < 1e-6:
        return total_steps * (round(made) + 1) / steps - now.effective_steps
    return total_steps / steps


@dataclass(frozen=True)
class LinearRule:
    """LR × S, clock + S, with a linear warm-up of the factor from 1 to S: Goyal et al.,
    arXiv 1706.02677.

    Attributes:
        warmup: Share of the run, in effective steps. Goyal's 5 of 90 epochs by default;
            0 for none.
        steps: Optimizer steps for the whole run ("LSW+"): the clock then advances by
            T/N instead of S.
    """

    clock_is_gain: ClassVar[bool] = False

    warmup: float = 5 / 90
    steps: int | None = None

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        increment = _stretch(now, self.steps, now.scale, "LinearRule")
        if self.warmup <= 0:
            return now.scale, increment
        if now.total_steps is None:
            raise ValueError(
                "LinearRule(warmup=...) is a share of the run: total_steps is needed."
            )
        ramp = min(1.0, now.effective_steps / (self.warmup * now.total_steps))
        return 1 + (now.scale - 1) * ramp, increment


@dataclass(frozen=True)
class SquareRootRule:
    """LR × √S, clock + S: Krizhevsky, arXiv 1404.5997.

    Attributes:
        steps: Optimizer steps for the whole run: the clock then advances by T/N instead
            of S.
    """

    clock_is_gain: ClassVar[bool] = False

    steps: int | None = None

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return math.sqrt(now.scale), _stretch(
            now, self.steps, now.scale, "SquareRootRule"
        )


@dataclass(frozen=True)
class AdamScaleRule:
    """(r^power, r), with statistics in Adam's metric: AdaptDL's ``AdamScale``, for Adam
    and AdamW.

    Adam moves by ḡ/√v, so the gain r is that of gradients divided by √v (``Run`` uses
    :func:`ray_adascale.scaling_rules.adam_preconditioner` for this rule), and its
    square root scales the LR. Schedules did not carry over with it where they did with
    :class:`AdaScaleRule` (docs/results.md).

    Attributes:
        power: Exponent on r.
    """

    metric: ClassVar[Metric] = "adam"

    power: float = 0.5

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return now.gain**self.power, now.gain


def legw_factor(
    scale: float,
    effective_steps: float,
    warmup_epochs: float,
    base_steps_per_epoch: float,
) -> float:
    """Return ``√S · min(1, τ / (S · warm-up epochs · base steps per epoch))``: You et
    al., arXiv 1901.08256.

    Args:
        scale: S.
        effective_steps: τ.
        warmup_epochs: Length of the warm-up at the base batch, in epochs.
        base_steps_per_epoch: Dataset length / B0.
    """
    warmup = scale * warmup_epochs * base_steps_per_epoch
    return math.sqrt(scale) * (
        min(1.0, effective_steps / warmup) if warmup > 0 else 1.0
    )


@dataclass
class LEGWRule:
    """(√S with a linear warm-up that lasts S times as long, S): *linear-epoch gradual
    warm-up*, arXiv 1901.08256.

    It warms up at S = 1 as well, from a factor of exactly 0, so the schedule must not
    have a warm-up of its own (:meth:`check_curve`).

    Attributes:
        base_warmup_epochs: Length of the warm-up at the base batch, in epochs.
        data_size: Examples in the dataset.
    """

    clock_is_gain: ClassVar[bool] = False

    base_warmup_epochs: float
    data_size: int
    _scale: float | None = field(default=None, init=False, repr=False, compare=False)
    _warned_length: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.base_warmup_epochs >= 0 and self.data_size > 0):
            raise ValueError(
                f"Invalid LEGW rule with base_warmup_epochs={self.base_warmup_epochs}, "
                f"data_size={self.data_size}. The first must be ≥ 0, the second the "
                "number of examples in the dataset."
            )

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        per_epoch = self.base_steps_per_epoch(now.base_batch_size)
        self.watch(now.scale)
        warmup = now.scale * self.base_warmup_epochs * per_epoch
        if (
            now.total_steps is not None
            and warmup > now.total_steps
            and not self._warned_length
        ):
            self._warned_length = True
            warn_at_user(
                f"LEGW's warm-up of {warmup:g} effective steps (scale {now.scale:g} × "
                f"{self.base_warmup_epochs:g} epochs × {per_epoch:g} base steps) is "
                f"longer than the whole run of {now.total_steps:g}: the LR never gets "
                "to √S. Lower base_warmup_epochs or the scale.",
            )
        return legw_factor(
            now.scale, now.effective_steps, self.base_warmup_epochs, per_epoch
        ), now.scale

    def base_steps_per_epoch(self, base_batch_size: float | None) -> float:
        """Return dataset length / B0.

        Raises:
            ValueError: B0 is not known.
        """
        if not isinstance(base_batch_size, int | float) or base_batch_size <= 0:
            raise ValueError(
                f"LEGW counts its warm-up in base batches, but {base_batch_size=}. "
                "Give base_batch_size=, the batch size that the schedule was tuned at."
            )
        return self.data_size / base_batch_size

    def check_curve(self, curve: Sequence[Sequence[float]]) -> None:
        """Warn when the schedule has a warm-up of its own: a learning rate whose first
        change is a rise.

        Args:
            curve: The base run's learning rates, ``curve[group][scheduler call]``,
                without any factor.
        """
        for g, rates in enumerate(curve):
            changed = next((rate for rate in rates if rate != rates[0]), rates[0])
            if self.base_warmup_epochs > 0 and changed > rates[0]:
                warn_at_user(
                    f"The schedule begins by raising the LR (group {g}: from "
                    f"{rates[0]:g} to {changed:g}), and LEGW has a warm-up of "
                    f"{self.base_warmup_epochs:g} epochs: both apply. Take the "
                    "schedule's warm-up out, or set base_warmup_epochs=0.",
                )
                return

    def watch(self, scale: float) -> None:
        """Warn if S differs from that of the last step."""
        if self._scale is not None and scale != self._scale:
            warn_at_user(
                f"The scale changed from {self._scale:g} to {scale:g} under LEGW, "
                "whose warm-up is S times as long: the LR may jump. Its authors define "
                "it for a constant batch size only.",
            )
        self._scale = scale


@dataclass(frozen=True)
class UnscaledRule:
    """LR × 1, clock + S: the base schedule's LR at the larger batch, over as many
    examples as the base run; a control.

    Attributes:
        steps: Optimizer steps for the whole run: the clock then advances by T/N instead
            of S.
    """

    clock_is_gain: ClassVar[bool] = False

    steps: int | None = None

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return 1.0, _stretch(now, self.steps, now.scale, "UnscaledRule")


AUTO = "auto"
RULES: dict[str, Callable[..., ScalingRule]] = {
    AUTO: AdaScaleRule,  # until the optimizer is known
    "adamscale": AdamScaleRule,
    "adascale": AdaScaleRule,
    "adascale_memory": AdaScaleMemoryRule,
    "linear": LinearRule,
    "sqrt": SquareRootRule,
    "unscaled": UnscaledRule,
}


def make_rule(rule: str | ScalingRule) -> ScalingRule:
    """Return a rule by its name, or the callable itself. "linear:354" is
    ``LinearRule(steps=354)``.

    Of "auto" only LR factor and clock are known: :func:`chosen_rule` needs the
    optimizer.

    Raises:
        ValueError: ``rule`` is neither a known name nor a callable.
    """
    if isinstance(rule, str):
        name, colon, steps = rule.partition(":")
        if name not in RULES or (
            colon
            and not (steps.isdecimal() and int(steps) and hasattr(RULES[name], "steps"))
        ):
            raise ValueError(
                f"Invalid {rule=}. Known rules: {', '.join(RULES)}, and linear:STEPS, "
                "sqrt:STEPS, unscaled:STEPS; or pass a callable."
            )
        return RULES[name](**({"steps": int(steps)} if steps else {}))
    if isinstance(rule, type):
        raise ValueError(
            f"Invalid rule: the class {rule.__name__}. Pass an instance, "
            f"{rule.__name__}(...)."
        )
    if not callable(rule):
        raise ValueError(
            f"Invalid {rule=}. Must be one of {', '.join(RULES)} or a callable "
            "(RuleInput) -> (factor, clock)."
        )
    return rule


def name_of(rule: ScalingRule) -> str:
    """Return the name of a rule in :data:`RULES`, or how a rule of the user's shows
    itself.
    """
    known = (name for name, make in RULES.items() if name != AUTO and rule == make())
    return next(
        known,
        repr(rule)
        if is_dataclass(rule)
        else getattr(rule, "__name__", type(rule).__name__),
    )


_HAVE_BETAS = frozenset({"Adam", "AdamW", "Adamax", "Lion"})


def auto_rule(kinds: Iterable[str], momentum: float = 0.0) -> str:
    """Return the name of the rule that "auto" stands for: "adascale_memory" with Adam,
    AdamW, Adamax, Lion, or SGD with a momentum above 1/2, alone or in a chain, and else
    "adascale".

    Args:
        kinds: Names of the optimizers' classes.
        momentum: The largest momentum of SGD; 0 without.
    """
    remembers = momentum > LEAST_MOMENTUM or not _HAVE_BETAS.isdisjoint(kinds)
    return "adascale_memory" if remembers else "adascale"


def largest_momentum(optimizer: Optimizer) -> float:
    """Return the largest momentum below 1 of SGD, alone or in a chain; 0 without."""
    momenta = [
        float(group["momentum"])
        for part, _ in parts_of(optimizer)
        if steps_as_sgd(part)
        for group in part.param_groups
    ]
    return max((m for m in momenta if m < 1), default=0.0)


def auto_rule_for(optimizer: Optimizer) -> str:
    """Return the name of the rule that "auto" stands for with an optimizer:
    :func:`auto_rule`'s, or "adascale" if there are betas that can't be changed.
    """
    if _why_betas_stay(optimizer) is not None:
        return auto_rule([])
    parts = [part for part, _ in parts_of(optimizer)]
    kinds = (kind.__name__ for part in parts for kind in type(part).__mro__)
    return auto_rule(kinds, largest_momentum(optimizer))


def _why_betas_stay(optimizer: Optimizer) -> ValueError | None:
    """Return why betas can't be changed; None if they can, or if there are none."""
    parts = [part for part, _ in parts_of(optimizer)]
    if not any("betas" in group for part in parts for group in part.param_groups):
        return None
    try:
        BetaRule().check(optimizer)
    except ValueError as error:
        return error
    return None


def chosen_rule(rule: str | ScalingRule, optimizer: Optimizer) -> str | ScalingRule:
    """Return a rule, or the name of the one that "auto" stands for with an optimizer,
    and warn if there are betas that can't be changed.
    """
    if rule != AUTO:
        return rule
    error = _why_betas_stay(optimizer)
    if error is not None:
        warn_on_first_worker(
            f"rule='auto' is 'adascale' here. {error} With fixed betas the averages "
            "reach over r times as many effective steps as in the base run, and the "
            "metrics of AdamW fell behind (docs/results.md): compare with a base run. "
            "rule='adascale' says that this is meant."
        )
    return auto_rule_for(optimizer)


def follows_gain(rule: ScalingRule) -> bool:
    """Return whether a rule's clock advances by the measured gain: its
    ``clock_is_gain``, or True if it has none.
    """
    return bool(getattr(rule, "clock_is_gain", True))
