"""Scaling rules with AdaptDL's names, for :class:`ray_adascale.AdaptiveDataParallel`:
how the learning rate follows the scale.

``rule.step()`` takes a step, and so does the optimizer's own ``step()``, which is
patched. A user's own rule overrides :meth:`ScalingRuleBase.scale_lr`. The trainer's
rules are in :mod:`ray_adascale.optim.rules`, with the formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import numpy as np
from torch.optim import Optimizer

from .gain import plain_gain
from .optim.adam_metric import adam_preconditioner
from .optim.rules import LEGWRule, Metric, legw_factor

__all__ = [
    "VARIANCE_FLOOR",
    "AdaScale",
    "AdamScale",
    "LEGWScale",
    "LinearScale",
    "ScalingRuleBase",
    "SqrtScale",
    "adam_preconditioner",
]

VARIANCE_FLOOR = 1e-6
"""AdaptDL's and FairScale's lower bound on σ². Gradients with a squared norm near or
below it get too large a gain.
"""


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
        adp: The ``AdaptiveDataParallel`` that the rule belongs to. A rule may read
            ``adp.gns``, see :class:`ray_adascale.compat.adaptdl.NoiseScale`.
    """

    metric: ClassVar[Metric] = "euclidean"
    """Metric of noise and signal; "adam" divides gradients as Adam's step does."""

    needs_noise: ClassVar[bool] = True
    """Whether the rule reads the noise, so that one gradient sample a step at S ≠ 1
    raises an error.
    """

    # On the class, so that a subclass whose constructor forgets super().__init__()
    # works too.
    adp: Any = None
    _stepping = _adding = False

    def initialize(
        self, adp: Any, optimizer: Optimizer, patch_optimizer: bool = False
    ) -> None:
        """Make the rule belong to an ``AdaptiveDataParallel`` and its optimizer.

        Args:
            adp: The model's wrapper.
            optimizer: The plain optimizer.
            patch_optimizer: Replace the optimizer's ``step`` and ``zero_grad`` by the
                rule's, and measure groups that are added later (``add_param_group``)
                too.

        Raises:
            ValueError: The optimizer is patched already: its LR would be scaled twice.
                Or the rule belongs to another ``AdaptiveDataParallel``, and would no
                longer step that one's optimizer.
        """
        if self.adp is not None and self.adp is not adp:
            raise ValueError(
                f"This {type(self).__name__} has a model already. Make one rule for "
                "each model."
            )
        if patch_optimizer and hasattr(optimizer.step, "_patched_by_scaling_rule"):
            raise ValueError(
                "The optimizer is patched by a scaling rule already. Make a new one "
                "for a second model."
            )
        self.adp = adp
        if patch_optimizer:
            self._patch_optimizer(optimizer)

    def _patch_optimizer(self, optimizer: Optimizer) -> None:
        original = optimizer.step
        original_add = optimizer.add_param_group

        # `wraps` also copies the mark by which a scheduler that was built before
        # recognizes its own wrapper of `step`.
        @functools.wraps(original)
        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # The rule's step calls the optimizer's, which is this function: then the
            # original is due.
            return (
                original(*args, **kwargs)
                if self._stepping
                else self.step(*args, **kwargs)
            )

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
        methods: dict[str, Callable[..., Any]] = {
            "step": step,
            "zero_grad": zero_grad,
            "add_param_group": add_param_group,
        }
        for name, method in methods.items():
            setattr(optimizer, name, MethodType(method, optimizer))

    def _initialized(self) -> Any:
        if self.adp is None:
            raise ValueError(
                f"{type(self).__name__} belongs to no AdaptiveDataParallel yet. Pass "
                "it as scaling_rule=, or call initialize(adp, optimizer). The "
                "trainer's rules are AdaScaleConfig(rule='adascale'), 'linear', "
                "'sqrt', ..."
            )
        return self.adp

    def scale_lr(self, scale: float) -> Any:
        """Return the factor on the LR at ``scale``: a number, or an array with one
        number for each parameter group.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not override scale_lr(scale)."
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take an optimizer step with the LR scaled for this step only; do nothing
        while gradients are being accumulated.

        Args:
            *args: Passed to the optimizer's ``step``.
            **kwargs: Passed to the optimizer's ``step``.

        Raises:
            ValueError: The rule belongs to no ``AdaptiveDataParallel``.
        """
        adp = self._initialized()
        # The others are for a `step()` after a `with model.no_sync():` block, where the
        # first flag is up again.
        if (
            not adp.require_backward_grad_sync
            or not adp.pass_reduces
            or adp.gns.statistics.current.accumulating
        ):
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
            gns.clear_gradients(*args, **kwargs)


class AdaScale(ScalingRuleBase):
    """Factor r of each group: Johnson et al., ICML 2020 (arXiv 2007.05105)."""

    def scale_lr(self, scale: float) -> Any:
        gns = self._initialized().gns
        floor = getattr(gns, "variance_floor", None)
        # the `adp` of a user's test may lack it
        floor = floor if isinstance(floor, float) else VARIANCE_FLOOR
        groups = zip(
            np.ravel(gns.raw_var_avg).tolist(),
            np.ravel(gns.raw_sqr_avg).tolist(),
            strict=True,
        )
        return np.array(
            [plain_gain(var, sqr, scale, variance_floor=floor) for var, sqr in groups]
        )


class AdamScale(AdaScale):
    """Factor √r, with statistics in Adam's metric, for Adam and AdamW, as AdaptDL has
    it.

    Adam's step is ḡ/√v, so noise and signal are measured on gradients divided by √v,
    and the LR follows the square root of that gain. Measured: schedules don't transfer
    with it (docs/results.md), while they do with :class:`AdaScale` and the same AdamW.
    :class:`ray_adascale.AdamScaleRule` says more.
    """

    metric = "adam"

    def scale_lr(self, scale: float, power: float = 0.5) -> Any:
        return super().scale_lr(scale) ** power


class LinearScale(ScalingRuleBase):
    """Factor S, without a warm-up (AdaptDL's; the trainer's ``LinearRule`` has one).
    arXiv 1706.02677.
    """

    needs_noise = False

    def scale_lr(self, scale: float) -> Any:
        return scale


class SqrtScale(ScalingRuleBase):
    """Factor √S. Krizhevsky, arXiv 1404.5997."""

    needs_noise = False

    def scale_lr(self, scale: float) -> Any:
        return math.sqrt(scale)


class LEGWScale(ScalingRuleBase):
    """Factor ``√S · min(1, τ / (S · warm-up epochs · base steps per epoch))``. You et
    al., arXiv 1901.08256.

    Base steps per epoch are ``data_size / base_batch_size``. τ is AdaptDL's progress (Σ
    r).

    Args:
        base_warmup_epochs: Length of the warm-up at the base batch, in epochs.
        data_size: Examples in the dataset.
    """

    needs_noise = False

    def __init__(self, base_warmup_epochs: float, data_size: int) -> None:
        self._rule = LEGWRule(base_warmup_epochs, data_size)

    def scale_lr(self, scale: float) -> Any:
        adp = self._initialized()
        per_epoch = self._rule.base_steps_per_epoch(
            getattr(adp, "base_batch_size", None)
        )
        return legw_factor(
            scale, adp.gns.get_progress(), self._rule.base_warmup_epochs, per_epoch
        )
