"""Scaling rules with AdaptDL's names: how the learning rate follows the scale.

A rule is used in one of two ways:

* With :class:`ray_adascale.compat.adaptdl.AdaptiveDataParallel`, as in AdaptDL: ``rule.step()``, or the optimizer's own
  ``step()``, which is patched.
* As the trainer's: ``AdaScaleConfig(rule=scaling_rules.LEGWScale(5, 50_000))``. A rule is callable as
  ``(RuleInput) -> (LR factor, clock increment)``. The formulas are in :mod:`ray_adascale.optim.rules`.

A user's own rule overrides :meth:`ScalingRuleBase.scale_lr`. If the schedule should not advance by the gain, it also overrides
:meth:`ScalingRuleBase.clock`, and sets ``clock_is_gain = False``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ClassVar

import numpy as np
from torch.optim import Optimizer

from .gain import plain_gain
from .optim.adam_metric import adam_preconditioner
from .optim.rules import AdamScaleRule, AdaScaleRule, LEGWRule, Metric, RuleInput, legw_factor

__all__ = [
    "VARIANCE_FLOOR",
    "AdaScale",
    "AdamScale",
    "LEGWScale",
    "LinearScale",
    "ScalingRuleBase",
    "SqrtScale",
    "adam_preconditioner",
    "pick_factor",
]

VARIANCE_FLOOR = 1e-6
"""AdaptDL's and FairScale's lower bound on σ². Gradients with a squared norm near or below it get too large a gain."""


def pick_factor(factor: Any, group: int | None) -> float:
    """Return one group's LR factor from the result of ``scale_lr``: a number for all groups, or one a group.

    Args:
        factor: Result of ``scale_lr``.
        group: Index of the parameter group; None for the mean over groups.

    Raises:
        ValueError: There are fewer factors than groups.
    """
    factors = np.atleast_1d(np.asarray(factor, dtype=np.float64)).ravel()
    if group is None:
        return float(factors.mean())
    if len(factors) == 1:
        return float(factors[0])
    if group >= len(factors):
        raise ValueError(f"scale_lr returned {len(factors)} factors for at least {group + 1} parameter groups.")
    return float(factors[group])


class ScalingRuleBase:
    """Base of the scaling rules. A user's own rule overrides :meth:`scale_lr`.

    ::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = scaling_rules.AdaScale()
        model = AdaptiveDataParallel(model, optimizer, scaling_rule=rule)
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            rule.step()                # or optimizer.step(), which is the same

    Attributes:
        adp: The ``AdaptiveDataParallel`` that the rule belongs to. Of ``adp.gns`` a rule may read, also as the trainer's,
            ``raw_var_avg`` and ``raw_sqr_avg``, ``var_avg()`` and ``sqr_avg()``, ``gain(scale)`` and ``get_progress()``; see
            :class:`ray_adascale.compat.adaptdl.GradientNoiseScale`.
    """

    metric: ClassVar[Metric] = "euclidean"
    """Metric of noise and signal; "adam" divides gradients as Adam's step does (:func:`adam_preconditioner`)."""

    clock_is_gain: ClassVar[bool] = True
    """Whether :meth:`clock` returns the gain. A batch that follows the noise is refused otherwise."""

    # On the class, so that a subclass whose constructor forgets super().__init__() works too.
    adp: Any = None
    _optimizer: Optimizer | None = None
    _orig_optimizer_step: Callable[..., Any] | None = None
    _stepping = False
    _adding = False

    def initialize(self, adp: Any, optimizer: Optimizer, patch_optimizer: bool = False) -> None:
        """Make the rule belong to an ``AdaptiveDataParallel`` and its optimizer.

        Args:
            adp: The model's wrapper.
            optimizer: The plain optimizer.
            patch_optimizer: Replace the optimizer's ``step`` and ``zero_grad`` by the rule's, and measure groups that are added
                later (``add_param_group``) too.

        Raises:
            ValueError: The optimizer is patched already: its LR would be scaled twice. Or the rule belongs to another
                ``AdaptiveDataParallel``, and would no longer step that one's optimizer.
        """
        if self.adp is not None and self.adp is not adp:
            raise ValueError(f"This {type(self).__name__} has a model already. Make one rule for each model.")
        if patch_optimizer and hasattr(optimizer.step, "_patched_by_scaling_rule"):
            raise ValueError("The optimizer is patched by a scaling rule already. Make a new one for a second model.")
        self.adp = adp
        self._optimizer = optimizer
        self._orig_optimizer_step = optimizer.step
        if patch_optimizer:
            self._patch_optimizer(optimizer)

    def _patch_optimizer(self, optimizer: Optimizer) -> None:
        original, original_add = optimizer.step, optimizer.add_param_group

        # `wraps` also copies the mark by which a scheduler that was built before recognizes its own wrapper of `step`.
        @functools.wraps(original)
        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # The rule's step calls the optimizer's, which is this function: then the original is due.
            return original(*args, **kwargs) if self._stepping else self.step(*args, **kwargs)

        @functools.wraps(optimizer.zero_grad)
        def zero_grad(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self.zero_grad(*args, **kwargs)

        @functools.wraps(original_add)
        def add_param_group(_optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            if self._adding:  # called by the statistics' own add_param_group
                original_add(param_group)
                return
            self._adding = True
            try:
                self._initialized().gns.statistics.add_param_group(param_group)
            finally:
                self._adding = False

        step._patched_by_scaling_rule = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]

    def _initialized(self) -> Any:
        if self.adp is None:
            raise ValueError(
                f"{type(self).__name__} belongs to no AdaptiveDataParallel yet. Pass it as scaling_rule=, or call "
                "initialize(adp, optimizer)."
            )
        return self.adp

    def scale_lr(self, scale: float) -> Any:
        """Return the factor on the LR at ``scale``: a number, or an array with one number for each parameter group."""
        raise NotImplementedError(f"{type(self).__name__} does not override scale_lr(scale).")

    def clock(self, now: RuleInput) -> float:
        """Return the clock increment of one optimizer step of the trainer. Default: the gain, as in AdaptDL's progress."""
        return now.gain

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        """Return (LR factor, clock increment), as the trainer's rule.

        The trainer has no ``AdaptiveDataParallel``. ``scale_lr`` sees a stand-in with a ``gns`` that has the statistics of this
        step up to a common factor, which cancels in every gain.
        """
        before, self.adp = self.adp, _StandIn(now)
        try:
            factor = self.scale_lr(now.scale)
        finally:
            self.adp = before
        return pick_factor(factor, now.group), self.clock(now)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take an optimizer step with the LR scaled for this step only; do nothing while gradients are being accumulated.

        Args:
            *args: Passed to the optimizer's ``step``.
            **kwargs: Passed to the optimizer's ``step``.

        Raises:
            ValueError: The rule belongs to no ``AdaptiveDataParallel``.
        """
        adp = self._initialized()
        # The second condition is for a `step()` after a `with model.no_sync():` block, where the flag is up again.
        if not adp.require_backward_grad_sync or not adp.gns.should_zero_grad:
            return None
        self._stepping = True
        try:
            return adp.gns.run_step(self.scale_lr, *args, **kwargs)
        finally:
            self._stepping = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients; do nothing while they are being accumulated.

        Args:
            *args: Passed to the optimizer's ``zero_grad``.
            **kwargs: Passed to the optimizer's ``zero_grad``.

        Raises:
            ValueError: The rule belongs to no ``AdaptiveDataParallel``.
        """
        gns = self._initialized().gns
        if gns.should_zero_grad:
            gns.reset_accumulation(*args, **kwargs)


class AdaScale(ScalingRuleBase):
    """Factor r of each group: Johnson et al., ICML 2020 (arXiv 2007.05105). Clock: r."""

    def scale_lr(self, scale: float) -> Any:
        gns = self._initialized().gns
        floor = getattr(gns, "variance_floor", None)
        floor = floor if isinstance(floor, float) else VARIANCE_FLOOR  # the `adp` of a user's test may lack it
        groups = zip(np.ravel(gns.raw_var_avg).tolist(), np.ravel(gns.raw_sqr_avg).tolist(), strict=True)
        return np.array([plain_gain(var, sqr, scale, variance_floor=floor) for var, sqr in groups])

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        own = type(self).scale_lr is AdaScale.scale_lr and type(self).clock is ScalingRuleBase.clock
        return AdaScaleRule()(now) if own else super().__call__(now)


class AdamScale(AdaScale):
    """Factor √r, with statistics in Adam's metric; clock: r. For Adam and AdamW, as AdaptDL has it.

    Adam's step is ḡ/√v, so noise and signal are measured on gradients divided by √v (:func:`adam_preconditioner`), and the LR
    follows the square root of that gain.

    Known: at S = 1 it is plain Adam, bit-identically; with gradients that are all noise the factor is √S, with no noise it
    is 1. √S is what the invariance of Adam's noise under the batch size gives (Malladi et al., arXiv 2205.10287), together
    with changes of β₁, β₂ and ε that this rule does *not* make.

    Measured: schedules don't transfer with it (docs/results/adam.md), while they do with :class:`AdaScale` and the same AdamW.
    The clock r is AdaScale's own, and in this metric it is far too fast on some workloads and too slow on others. √v of a larger
    batch is smaller, since it contains the noise; this scales the step once more.
    """

    metric = "adam"

    def scale_lr(self, scale: float, power: float = 0.5) -> Any:
        return super().scale_lr(scale) ** power

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        own = type(self).scale_lr is AdamScale.scale_lr and type(self).clock is ScalingRuleBase.clock
        return AdamScaleRule()(now) if own else super().__call__(now)


class LinearScale(ScalingRuleBase):
    """Factor S, without a warm-up (AdaptDL's; the trainer's ``LinearRule`` has one). Clock: S. arXiv 1706.02677."""

    clock_is_gain = False

    def scale_lr(self, scale: float) -> Any:
        return scale

    def clock(self, now: RuleInput) -> float:
        return now.scale


class SqrtScale(ScalingRuleBase):
    """Factor √S. Clock: S. Krizhevsky, arXiv 1404.5997."""

    clock_is_gain = False

    def scale_lr(self, scale: float) -> Any:
        return math.sqrt(scale)

    def clock(self, now: RuleInput) -> float:
        return now.scale


class LEGWScale(ScalingRuleBase):
    """Factor ``√S · min(1, τ / (S · warm-up epochs · base steps per epoch))``. Clock: S. You et al., arXiv 1901.08256.

    Base steps per epoch are ``data_size / base_batch_size``. With ``AdaptiveDataParallel``, τ is AdaptDL's progress (Σ r).

    Args:
        base_warmup_epochs: Length of the warm-up at the base batch, in epochs.
        data_size: Examples in the dataset.
    """

    clock_is_gain = False

    def __init__(self, base_warmup_epochs: float, data_size: int) -> None:
        self._rule = LEGWRule(base_warmup_epochs, data_size)
        self._first_lrs: list[float] | None = None
        self._lrs_changed = False

    def scale_lr(self, scale: float) -> Any:
        adp = self._initialized()
        per_epoch = self._rule.base_steps_per_epoch(getattr(adp, "base_batch_size", None))
        return legw_factor(scale, adp.gns.get_progress(), self._rule.base_warmup_epochs, per_epoch)

    def clock(self, now: RuleInput) -> float:
        return now.scale

    def step(self, *args: Any, **kwargs: Any) -> Any:
        gns = self._initialized().gns
        if gns.should_zero_grad and self.adp.require_backward_grad_sync:
            self._rule.watch(gns.scale)
            self._watch_lrs()
        return super().step(*args, **kwargs)

    def check_curve(self, curve: Sequence[Sequence[float]]) -> None:
        """Warn when the schedule has a warm-up of its own; see :meth:`ray_adascale.LEGWRule.check_curve`."""
        self._rule.check_curve(curve)

    def _watch_lrs(self) -> None:
        """Check the curve of a scheduler that the loop steps: its first change is seen as the run goes on."""
        assert self._optimizer is not None
        lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        if self._first_lrs is None:
            self._first_lrs = lrs
            self._lrs_changed = self.adp.gns.get_progress() > 0  # the first change of a resumed run is not known
        elif not self._lrs_changed and lrs != self._first_lrs:
            self._lrs_changed = True
            self._rule.check_curve(list(zip(self._first_lrs, lrs, strict=False)))

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        own = type(self).scale_lr is LEGWScale.scale_lr and type(self).clock is LEGWScale.clock
        return self._rule(now) if own else super().__call__(now)


class _StandIn:
    """``adp`` and ``adp.gns`` in one, for a rule that the trainer calls with a :class:`RuleInput`."""

    require_backward_grad_sync = True
    should_zero_grad = True
    variance_floor = 0.0
    accum_count = 1
    # Only the ratio of σ² and μ² follows from r. This is far above AdaptDL's floor, so that a rule that applies it gets r.
    _SIZE = 1e12

    def __init__(self, now: RuleInput) -> None:
        self._now = now
        self.base_batch_size = now.base_batch_size
        self.scale = self.accum_scale = now.scale
        # r = (σ² + μ²) / (σ²/S + μ²)  ⇔  σ² : μ² = (r − 1) : (1 − r/S)
        var, sqr = (now.gain - 1, 1 - now.gain / now.scale) if now.scale != 1 else (0.0, 1.0)
        self.raw_var_avg = np.array([self._SIZE * var])
        self.raw_sqr_avg = np.array([self._SIZE * sqr])

    @property
    def gns(self) -> _StandIn:
        return self

    def var_avg(self) -> float:
        return float(self.raw_var_avg.sum())

    def sqr_avg(self) -> float:
        return float(self.raw_sqr_avg.sum())

    def gain(self, scale: float) -> float:
        return plain_gain(self.var_avg(), self.sqr_avg(), scale)

    def get_progress(self) -> float:
        return self._now.effective_steps
