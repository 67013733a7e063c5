"""AdaptiveDataParallel: AdaptDL's model wrapper over our statistics, for loops that
were written for AdaptDL.

AdaptDL's data loader and job machinery (``AdaptiveDataLoader``,
``remaining_epochs_until``, ``init_process_group``, checkpoints on a signal) have no
counterpart here: the loop brings its own loader and process group, accumulates
gradients under ``no_sync()``, and saves :meth:`AdaptiveDataParallel.training_state`.
For elastic runs use ``ray_adascale.prepare``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import scaling_rules
from .._torch import uncompiled
from ..batch import StepPlan
from ..gain import plain_gain
from ..optim.adam_metric import adam_preconditioner
from ..optim.rules import AdaScaleRule, RuleInput
from ..optim.wrapper import check_wrappable
from ..scaling_rules import VARIANCE_FLOOR, ScalingRuleBase
from .fairscale import AdaScale

_ANY_PASSES = 1 << 30
"""Passes of a step, declared; the pass that is not under ``no_sync()`` ends it
before.
"""


class _Statistics(AdaScale):
    """AdaScale behind the optimizer that an AdaptDL loop steps. The loop has no τ."""

    _loop_steps_it = False


class NoiseScale:
    """Gradient statistics of one model under the names of AdaptDL's
    ``GradientNoiseScale``; ``adp.gns``.

    Averages are AdaptDL's: raw samples with θ = 0.999^S, debiased, clipped on reading.
    Before the first sample σ² = 0 and μ² = 1, a gain of 1. A step of one gradient
    sample at S = 1 has no sample; AdaptDL compares it with the step before.

    Args:
        adp: The model's wrapper.
        optimizer: The plain optimizer, not yet patched.
        accum_scale: S of one pass of all workers.
        variance_floor: Lower bound on each group's σ².
        **kwargs: Of :class:`ray_adascale.AdaScale`.

    Attributes:
        statistics: The :class:`ray_adascale.AdaScale` that takes the steps.
        scale: S of the step under way once its last pass has ended, else of the step
            before.
    """

    def __init__(
        self,
        adp: AdaptiveDataParallel,
        optimizer: Optimizer,
        accum_scale: float,
        variance_floor: float,
        **kwargs: Any,
    ) -> None:
        self._zero_grad = optimizer.zero_grad
        self._adp = weakref.ref(adp)  # it owns this object
        self.scale = self.accum_scale = accum_scale
        self.forward_passes = 0  # of the step under way
        self.variance_floor = float(variance_floor)
        self.statistics = _Statistics(
            optimizer,
            scale=accum_scale,
            smoothing=lambda plan: 0.999**plan.scale,
            num_gradients_to_accumulate=_ANY_PASSES,
            variance_floor=variance_floor,
            clip="averages",
            rule=AdaScaleRule(),  # a step has that of the scaling rule
            **kwargs,
        )
        self.statistics.step_end = self._plan_if_last

    def _plan_if_last(self, number: int) -> StepPlan | None:
        """Return the plan of the step if this pass reduces gradients, since such a
        pass is a step's last; else None.
        """
        adp = self._adp()
        if adp is not None and not adp.pass_reduces:
            return None
        workers = self.statistics.plan.workers
        self.scale = self.accum_scale * number
        if (
            workers * number == 1
            and self.scale != 1
            and adp is not None
            and adp.scaling_rule.needs_noise
        ):
            raise RuntimeError(
                f"One gradient sample a step at scale {self.scale:g} tells nothing of "
                f"the noise, which {type(adp.scaling_rule).__name__} needs. Make two "
                "passes of half the size, the first one under model.no_sync(), with "
                "AdaptiveDataParallel(..., batch_size=half of it). Or use a rule that "
                "needs no noise: LinearScale(), SqrtScale() or LEGWScale(...). A rule "
                "of your own that needs none has needs_noise = False."
            )
        return StepPlan(
            workers=workers, passes=number, loss_divisor=1, given_scale=self.scale
        )

    @uncompiled  # Dynamo fails at arrays that were tensors before
    def run_step(
        self, scale_lr: Callable[[float], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Take one optimizer step with each group's LR times ``scale_lr(S)``; progress
        advances by the gain.

        A gradient that is not finite changes nothing at all.
        """
        factors: list[Any] = []

        def rule(now: RuleInput) -> tuple[float, float]:
            # AdaptDL calls its rule once a step, and this is called once for each group
            if not factors:
                factors.append(
                    np.atleast_1d(
                        np.asarray(scale_lr(now.scale), dtype=np.float64)
                    ).ravel()
                )
            found = factors[0]
            if now.group is None:
                # One sample a step measures no gain. Then the clock is that of the
                # trainer's rules without noise: S a step.
                measured = np.isfinite(self.statistics.group_moments()).all()
                return float(found.mean()), self.gain(
                    now.scale
                ) if measured else now.scale
            if len(found) != 1 and now.group >= len(found):
                raise ValueError(
                    f"scale_lr gave {len(found)} factors for at least {now.group + 1} "
                    "parameter groups."
                )
            return float(found[now.group % len(found)]), 0.0

        if self.statistics.at_boundary and self.forward_passes:
            # The passes of this worker reached no parameter, so nothing has counted
            # them. Those of other workers did.
            self.scale = self.accum_scale * self.forward_passes
            self.statistics.expect_passes(
                self.forward_passes, scale=self.scale, loss_divided_by=1
            )
            self.statistics.current.ensure_summed(scaled=True)
        self.forward_passes = 0
        before = self.statistics.rule
        self.statistics.rule = rule
        try:
            return self.statistics.step(*args, **kwargs)
        finally:
            self.statistics.rule = before

    @property
    def should_zero_grad(self) -> bool:
        """Whether no gradients are being accumulated: the last backward pass that
        reached a parameter completed a step.
        """
        return not self.statistics.current.accumulating

    def reset_accumulation(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients, and forget the passes of an unfinished step."""
        self.clear_gradients(*args, **kwargs)
        self.forward_passes = 0

    def clear_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients. The forward pass of the step may have run already: it
        counts.
        """
        self._zero_grad(*args, **kwargs)
        self.statistics.current.discard_passes()

    def set_accum_scale(self, accum_scale: float) -> None:
        """Change :attr:`accum_scale` after a change of the micro-batch; from the next
        backward pass on.

        Raises:
            ValueError: It is not positive.
        """
        if not 0 < accum_scale < float("inf"):
            raise ValueError(
                f"Invalid {accum_scale=}. Must be positive: workers × micro-batch / "
                "base batch size."
            )
        self.accum_scale = float(accum_scale)

    def _raw(self) -> NDArray[np.float64]:
        moments = np.array(self.statistics.group_moments())
        return np.where(np.isnan(moments), [[0.0], [1.0]], moments)

    @property
    def raw_var_avg(self) -> NDArray[np.float64]:
        """Averaged σ² of each parameter group, unclipped; 0 before the first sample."""
        return self._raw()[0]

    @property
    def raw_sqr_avg(self) -> NDArray[np.float64]:
        """Averaged μ² of each parameter group, unclipped; 1 before the first sample."""
        return self._raw()[1]

    def var_avg(self) -> float:
        """Σ over groups of averaged σ², each at least :attr:`variance_floor`."""
        return float(np.maximum(self.raw_var_avg, self.variance_floor).sum())

    def sqr_avg(self) -> float:
        """Σ over groups of averaged μ², each at least 0."""
        return float(np.maximum(self.raw_sqr_avg, 0.0).sum())

    def gain(self, scale: float) -> float:
        """``r = (σ² + μ²) / (σ²/S + μ²)`` at any S, of the whole optimizer; 1 where
        both are zero.
        """
        return plain_gain(self.var_avg(), self.sqr_avg(), scale)

    def get_progress(self) -> float:
        """Σ r over the optimizer steps, whatever the rule."""
        return self.statistics.effective_steps


class AdaptiveDataParallel(DistributedDataParallel):
    """DistributedDataParallel that measures gradient noise, and an optimizer that
    follows a scaling rule.

    AdaptDL's signature. The optimizer is patched: ``optimizer.step()`` is
    ``scaling_rule.step()``. Accumulate gradients with ``no_sync()``: until a pass
    outside of it, ``step()`` and ``zero_grad()`` do nothing, so they may stand in every
    iteration; the loss isn't divided, the gradient is. The scale of a step is ``passes
    × workers × batch_size / base_batch_size``.

    Args:
        model: The bare model.
        optimizer: Its optimizer, with the LRs of the base batch.
        lr_scheduler: The optimizer's scheduler, which the loop steps;
            :meth:`training_state` saves it.
        mp_scaler: The ``torch.amp.GradScaler`` that scales the loss, if one does.
        scaling_rule: One of :mod:`ray_adascale.scaling_rules`. Default: ``AdaScale()``;
            ``AdamScale()`` for Adam and AdamW, as in AdaptDL; with ``AdaScale()``
            schedules carry over better (docs/results.md).
        name: Name of this instance, which is checked when a :meth:`training_state` is
            loaded.
        base_batch_size: B0, examples per optimizer step at which the schedule was
            tuned. Without it the scale is the number of workers times passes: each
            worker's micro-batch is one base batch.
        batch_size: Examples of one worker in one backward pass. Default:
            ``base_batch_size``. If it changes, call ``gns.set_accum_scale``.
        variance_floor: Lower bound on σ² under the AdaScale rules. AdaptDL's by
            default; 0 makes gains independent of the gradients' size.
        **kwargs: Of ``DistributedDataParallel``.

    Attributes:
        gns: The statistics, :class:`ray_adascale.compat.adaptdl.NoiseScale`.

    Raises:
        ValueError: There is no process group, a batch size is out of range, or the
            optimizer can't be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None = None,
        mp_scaler: torch.amp.GradScaler | None = None,
        scaling_rule: ScalingRuleBase | None = None,
        name: str = "adaptdl-dataparallel",
        *,
        base_batch_size: float | None = None,
        batch_size: float | None = None,
        variance_floor: float = VARIANCE_FLOOR,
        **kwargs: Any,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "AdaptiveDataParallel needs a process group, also for one process. "
                "Call torch.distributed.init_process_group() first; alone: "
                "init_process_group('gloo', store=torch.distributed.HashStore(), "
                "rank=0, world_size=1)."
            )
        check_wrappable(optimizer)
        default = (
            scaling_rules.AdamScale
            if isinstance(optimizer, Adam | AdamW)
            else scaling_rules.AdaScale
        )
        rule = default() if scaling_rule is None else scaling_rule
        if not isinstance(rule, ScalingRuleBase):
            raise ValueError(
                f"Invalid {scaling_rule=}. Must be an instance of a ScalingRuleBase, "
                "e.g. LinearScale()."
            )
        if batch_size is not None and base_batch_size is None:
            raise ValueError(
                f"{batch_size=} needs base_batch_size, the batch size that the "
                "schedule was tuned at."
            )
        for what, size in (
            ("base_batch_size", base_batch_size),
            ("batch_size", batch_size),
        ):
            if size is not None and not size > 0:
                raise ValueError(
                    f"Invalid {what}={size}. Must be a positive number of examples."
                )
        precondition = adam_preconditioner(optimizer) if rule.metric == "adam" else None

        super().__init__(model, **kwargs)
        group = kwargs.get("process_group")
        workers = dist.get_world_size(group)
        self.base_batch_size = base_batch_size
        self.scaling_rule = rule
        self.name = name
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._mp_scaler = mp_scaler
        self.pass_reduces = True
        """Whether the backward pass of the last forward pass reduces gradients, and
        so completes a step.
        """
        self.gns = NoiseScale(
            self,
            optimizer,
            workers
            if base_batch_size is None
            else workers * (batch_size or base_batch_size) / base_batch_size,
            variance_floor,
            process_group=group,
            grad_scaler=mp_scaler,
            precondition=precondition,
        )
        rule.initialize(self, optimizer, patch_optimizer=True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass. DDP decides here, not in the backward pass,
        whether this pass reduces gradients.
        """
        if torch.is_grad_enabled():
            self.gns.forward_passes = (
                1 if self.pass_reduces else self.gns.forward_passes + 1
            )
            self.pass_reduces = self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; do nothing while they are being accumulated."""
        self.scaling_rule.zero_grad(set_to_none=set_to_none)

    @property
    def gain(self) -> float:
        """r at the present scale, with the current gradients or of the last step."""
        return self.gns.gain(self.gns.scale)

    def to_tensorboard(
        self, writer: Any, global_step: int, tag_prefix: str = ""
    ) -> None:
        """Write σ², μ², gain and LR factor, under AdaptDL's tags.

        Args:
            writer: A ``SummaryWriter``.
            global_step: Where on the axis.
            tag_prefix: Folder of the tags.
        """
        prefix = (
            tag_prefix + "/"
            if tag_prefix and not tag_prefix.endswith("/")
            else tag_prefix
        )
        for tag, value in (
            ("Gradient_Norm_Sqr", self.gns.sqr_avg()),
            ("Gradient_Variance", self.gns.var_avg()),
            ("Gain", self.gain),
            ("Learning_Rate_Factor", self.gns.statistics.last_step.lr_factor),
        ):
            writer.add_scalar(prefix + tag, value, global_step)

    def training_state(self) -> dict[str, Any]:
        """Return the state to resume from: model, optimizer, scheduler, scaler,
        statistics. At a step boundary.

        AdaptDL saves it by itself on a signal; here ``torch.save`` it. It loads with
        ``torch.load(weights_only=True)`` if the scheduler's own state does. It is the
        same on all workers.

        Raises:
            RuntimeError: Called between a backward pass and the step that it leads to.
        """
        return {
            "name": self.name,
            "statistics": self.gns.statistics.statistics_state(),
            "model": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "lr_scheduler": None
            if self._lr_scheduler is None
            else self._lr_scheduler.state_dict(),
            "mp_scaler": None
            if self._mp_scaler is None
            else self._mp_scaler.state_dict(),
        }

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Load a :meth:`training_state`, also of another number of workers.

        Raises:
            ValueError: The state has another instance's name.
        """
        if state["name"] != self.name:
            raise ValueError(
                f"The training state is of name={state['name']!r}, this model's is "
                f"{self.name!r}."
            )
        self.gns.statistics.current.discard_passes()
        self.gns.statistics.load_statistics_state(state["statistics"])
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for own, key in (
            (self._lr_scheduler, "lr_scheduler"),
            (self._mp_scaler, "mp_scaler"),
        ):
            if own is not None and state[key] is not None:
                own.load_state_dict(state[key])
