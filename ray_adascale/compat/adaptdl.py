"""AdaptiveDataParallel: AdaptDL's model wrapper over our statistics, for loops that were written for AdaptDL.

AdaptDL's data loader and job machinery (``AdaptiveDataLoader``, ``remaining_epochs_until``, ``init_process_group``,
checkpoints on a signal) have no counterpart here: the loop brings its own loader and process group, accumulates gradients
under ``no_sync()``, and saves :meth:`AdaptiveDataParallel.training_state`. For elastic runs use ``ray_adascale.prepare``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import scaling_rules
from .._torch import uncompiled
from ..chain import SEVERAL_OPTIMIZERS
from ..gain import plain_gain
from ..optim.adam_metric import adam_preconditioner
from ..optim.adascale import AdaScale
from ..optim.rules import RuleInput, metric_of
from ..optim.step_shape import StepShape
from ..scaling_rules import VARIANCE_FLOOR, ScalingRuleBase, pick_factor


def _smoothing(shape: StepShape) -> float:
    """Return AdaptDL's θ, 0.999 per base batch. A differenced sample, of two gradients, counts as twice the batch."""
    return 0.999 ** (2 * shape.scale if shape.num_samples == 1 else shape.scale)


class _Accumulation:
    """The end of a step as AdaptDL has it: the first backward pass that reduces gradients. A :data:`StepEnd`.

    Args:
        adp: The model's wrapper, held weakly: it owns this object.
        workers: Workers that share the batch.

    Attributes:
        accum_scale: S of one pass of all workers.
    """

    def __init__(self, adp: Any, workers: int) -> None:
        self._adp = weakref.ref(adp)
        self._workers = workers
        self.accum_scale = float(workers)

    def __call__(self, number: int) -> StepShape | None:
        adp = self._adp()
        if isinstance(adp, AdaptiveDataParallel):
            reduces = adp.pass_reduces
        else:
            reduces = adp is None or bool(adp.require_backward_grad_sync)
        return StepShape(number, self._workers, self.accum_scale * number) if reduces else None


class _StepRule:
    """A scaling rule of AdaptDL for one step of the statistics.

    Args:
        gns: The statistics.
        scale_lr: Maps S to LR factors.
    """

    def __init__(self, gns: GradientNoiseScale, scale_lr: Callable[[float], Any]) -> None:
        self._gns = gns
        self._scale_lr = scale_lr
        self._factors: Any = None

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        if self._factors is None:  # AdaptDL calls its rule once a step, and this is called once for each group
            self._factors = self._scale_lr(now.scale)
        return pick_factor(self._factors, now.group), self._gns.gain(now.scale) if now.group is None else 0.0


class GradientNoiseScale:
    """The gradient statistics of one model, under AdaptDL's names; ``adp.gns``.

    Averages are AdaptDL's: raw samples with θ = 0.999^S (0.999^2S for one gradient sample a step), debiased, clipped on
    reading. Values at the start are σ² = 0, μ² = 1, a gain of 1.

    Args:
        adp: The model's wrapper; a backward pass completes a step if its ``require_backward_grad_sync`` is true.
        optimizer: The plain optimizer, not yet patched.
        mp_scaler: The ``GradScaler`` that scales the loss.
        num_replicas: Workers. Default: the size of ``process_group``, else 1.
        accum_scale: S of one pass of all workers. Default: ``num_replicas``.
        process_group: Workers that reduce gradients together.
        variance_floor: Lower bound on each group's σ². 0 makes gains independent of the gradients' size.
        precondition: See :class:`ray_adascale.AdaScale`.

    Attributes:
        statistics: The :class:`ray_adascale.AdaScale` that takes the steps.
    """

    def __init__(
        self,
        adp: Any,
        optimizer: Optimizer,
        mp_scaler: torch.amp.GradScaler | None = None,
        num_replicas: int | None = None,
        accum_scale: float | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        variance_floor: float = VARIANCE_FLOOR,
        precondition: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        if num_replicas is None:
            num_replicas = dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
        self._orig_optimizer_zero_grad = optimizer.zero_grad
        self._accumulation = _Accumulation(adp, num_replicas)
        if accum_scale is not None:
            self.set_accum_scale(accum_scale)
        self.variance_floor = float(variance_floor)
        self.statistics = AdaScale(
            optimizer,
            num_replicas,
            smoothing=_smoothing,
            is_scaled_loss=False,
            process_group=process_group,
            grad_scaler=mp_scaler,
            variance_floor=variance_floor,
            clip="averages",
            precondition=precondition,
        )
        self.statistics.set_open_ended_accumulation(self._accumulation, scale=self.accum_scale)

    # ---- one step ------------------------------------------------------------------------------------------------

    @uncompiled  # Dynamo fails at arrays that were tensors before
    def run_step(self, scale_lr: Callable[[float], Any], *args: Any, **kwargs: Any) -> Any:
        """One optimizer step with each group's LR times ``scale_lr(S)``; progress advances by the gain.

        A non-finite gradient changes nothing at all.
        """
        before, self.statistics.rule = self.statistics.rule, _StepRule(self, scale_lr)
        try:
            return self.statistics.step(*args, **kwargs)
        finally:
            self.statistics.rule = before

    @property
    def should_zero_grad(self) -> bool:
        """Whether the last backward pass completed a step, so that no gradients are being accumulated."""
        return not self.statistics.accumulating

    def reset_accumulation(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients, and forget the passes of an unfinished step."""
        self._orig_optimizer_zero_grad(*args, **kwargs)
        self.statistics.discard_samples()

    @property
    def accum_scale(self) -> float:
        """S of one pass of all workers."""
        return self._accumulation.accum_scale

    def set_accum_scale(self, accum_scale: float) -> None:
        """Change :attr:`accum_scale` after a change of the micro-batch; from the next backward pass on.

        Raises:
            ValueError: It is not positive.
        """
        if not 0 < accum_scale < float("inf"):
            raise ValueError(f"Invalid {accum_scale=}. Must be positive: workers × micro-batch / base batch size.")
        self._accumulation.accum_scale = float(accum_scale)

    @property
    def accum_count(self) -> int:
        """Backward passes since gradients were cleared or stepped with."""
        return self.statistics.passes

    @property
    def scale(self) -> float:
        """S of the step under way once its last pass has ended, else of the step before."""
        return self.statistics.scale

    # ---- the statistics, with the current gradients -------------------------------------------------------------

    def _raw(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        var, sqr = (np.asarray(x) for x in self.statistics.group_moments())
        seen = ~np.isnan(var)
        var, sqr = np.where(seen, var, 0.0), np.where(seen, sqr, 1.0)
        var.flags.writeable = sqr.flags.writeable = False
        return var, sqr

    @property
    def raw_var_avg(self) -> NDArray[np.float64]:
        """Averaged σ² of each parameter group, unclipped; 0 before the first sample. Read-only."""
        return self._raw()[0]

    @property
    def raw_sqr_avg(self) -> NDArray[np.float64]:
        """Averaged μ² of each parameter group, unclipped; 1 before the first sample. Read-only."""
        return self._raw()[1]

    def var_avg(self) -> float:
        """Σ over groups of averaged σ², each at least :attr:`variance_floor`."""
        return float(np.maximum(self.raw_var_avg, self.variance_floor).sum())

    def sqr_avg(self) -> float:
        """Σ over groups of averaged μ², each at least 0."""
        return float(np.maximum(self.raw_sqr_avg, 0.0).sum())

    def gain(self, scale: float) -> float:
        """``r = (σ² + μ²) / (σ²/S + μ²)`` at any S, of the whole optimizer; 1 where both are zero."""
        return plain_gain(self.var_avg(), self.sqr_avg(), scale)

    def get_progress(self) -> float:
        """Σ r over the optimizer steps, whatever the rule."""
        return self.statistics.effective_steps

    def set_progress(self, progress: float) -> None:
        """Set Σ r to a value."""
        self.statistics.effective_steps = progress

    def state_dict(self) -> dict[str, Tensor]:
        """Return averages and progress, as copies on the CPU. At a step boundary only."""
        return self.statistics.statistics_state()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a :meth:`state_dict`. σ² is per base batch, so workers and passes may differ from those of the state."""
        self.statistics.discard_samples()
        self.statistics.load_statistics_state(state)


class AdaptiveDataParallel(DistributedDataParallel):
    """DistributedDataParallel that measures gradient noise, and an optimizer that follows a scaling rule.

    AdaptDL's signature. The optimizer is patched: ``optimizer.step()`` is ``scaling_rule.step()``. Accumulate gradients with
    ``no_sync()``: until a pass outside of it, ``step()`` and ``zero_grad()`` do nothing, so they may stand in every iteration;
    the loss isn't divided, the gradient is. The scale of a step is ``passes × workers × batch_size / base_batch_size``.

    Args:
        model: The bare model.
        optimizer: Its optimizer, with the LRs of the base batch.
        lr_scheduler: The optimizer's scheduler, which the loop steps; :meth:`training_state` saves it.
        mp_scaler: The ``torch.amp.GradScaler`` that scales the loss, if one does.
        scaling_rule: One of :mod:`ray_adascale.scaling_rules`. Default: ``AdaScale()``; ``AdamScale()`` for Adam and AdamW, as in
            AdaptDL; with ``AdaScale()`` schedules carry over better (docs/results/adam.md).
        name: Name of this instance, which is checked when a :meth:`training_state` is loaded.
        base_batch_size: B0, examples per optimizer step at which the schedule was tuned. Without it the scale is the number of
            workers times passes: each worker's micro-batch is one base batch.
        batch_size: Examples of one worker in one backward pass. Default: ``base_batch_size``. If it changes, call
            ``gns.set_accum_scale``.
        variance_floor: Lower bound on σ² under the AdaScale rules. AdaptDL's by default; 0 makes gains independent of the
            gradients' size.
        **kwargs: Of ``DistributedDataParallel``.

    Attributes:
        gns: The statistics, :class:`GradientNoiseScale`.

    Raises:
        ValueError: There is no process group, a batch size is out of range, or the optimizer can't be used.
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
                "AdaptiveDataParallel needs a process group, also for one process. Call torch.distributed.init_process_group() "
                "first; alone: init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)."
            )
        if isinstance(optimizer, list | tuple):
            raise ValueError(f"Invalid optimizer: a {type(optimizer).__name__}. Must be one. {SEVERAL_OPTIMIZERS}")
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, AdaScale):
            raise ValueError(
                f"Invalid optimizer of type {type(optimizer).__name__}. Must be a plain torch.optim.Optimizer: the scaling rule "
                "takes AdaScale's place."
            )
        default = scaling_rules.AdamScale if isinstance(optimizer, Adam | AdamW) else scaling_rules.AdaScale
        rule = default() if scaling_rule is None else scaling_rule
        if not isinstance(rule, ScalingRuleBase):
            raise ValueError(f"Invalid {scaling_rule=}. Must be an instance of a ScalingRuleBase, e.g. LinearScale().")
        if hasattr(optimizer.step, "_patched_by_scaling_rule"):
            raise ValueError("The optimizer is patched by a scaling rule already. Make a new one for a second model.")
        if batch_size is not None and base_batch_size is None:
            raise ValueError(f"{batch_size=} needs base_batch_size, the batch size that the schedule was tuned at.")
        for what, size in (("base_batch_size", base_batch_size), ("batch_size", batch_size)):
            if size is not None and not size > 0:
                raise ValueError(f"Invalid {what}={size}. Must be a positive number of examples.")
        precondition = adam_preconditioner(optimizer) if metric_of(rule) == "adam" else None

        super().__init__(model, **kwargs)
        group = kwargs.get("process_group")
        workers = dist.get_world_size(group)
        self.base_batch_size = base_batch_size
        self.scaling_rule = rule
        self.name = name
        self._optimizer, self._lr_scheduler, self._mp_scaler = optimizer, lr_scheduler, mp_scaler
        self.pass_reduces = True
        """Whether the backward pass of the last forward pass reduces gradients, and so completes a step."""
        self.gns = GradientNoiseScale(
            self,
            optimizer,
            mp_scaler,
            workers,
            None if base_batch_size is None else workers * (batch_size or base_batch_size) / base_batch_size,
            process_group=group,
            variance_floor=variance_floor,
            precondition=precondition,
        )
        rule.initialize(self, optimizer, patch_optimizer=True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass. DDP decides here, not in the backward pass, whether this pass reduces gradients."""
        if torch.is_grad_enabled():
            self.pass_reduces = self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; do nothing while they are being accumulated."""
        self.scaling_rule.zero_grad(set_to_none=set_to_none)

    @property
    def gain(self) -> float:
        """r at the present scale, with the current gradients or of the last step."""
        return self.gns.gain(self.gns.scale)

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write σ², μ², gain and LR factor, under AdaptDL's tags.

        Args:
            writer: A ``SummaryWriter``.
            global_step: Where on the axis.
            tag_prefix: Folder of the tags.
        """
        prefix = tag_prefix + "/" if tag_prefix and not tag_prefix.endswith("/") else tag_prefix
        for tag, value in (
            ("Gradient_Norm_Sqr", self.gns.sqr_avg()),
            ("Gradient_Variance", self.gns.var_avg()),
            ("Gain", self.gain),
            ("Learning_Rate_Factor", self.gns.statistics.last_step.lr_factor),
        ):
            writer.add_scalar(prefix + tag, value, global_step)

    def training_state(self) -> dict[str, Any]:
        """Return the state to resume from: model, optimizer, scheduler, scaler, statistics. At a step boundary.

        AdaptDL saves it by itself on a signal; here ``torch.save`` it. It loads with ``torch.load(weights_only=True)`` if the
        scheduler's own state does. It is the same on all workers.

        Raises:
            RuntimeError: Called between a backward pass and the step that it leads to.
        """
        return {
            "name": self.name,
            "statistics": self.gns.state_dict(),
            "model": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "lr_scheduler": None if self._lr_scheduler is None else self._lr_scheduler.state_dict(),
            "mp_scaler": None if self._mp_scaler is None else self._mp_scaler.state_dict(),
        }

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Load a :meth:`training_state`, also of another number of workers.

        Raises:
            ValueError: The state has another instance's name.
        """
        if state["name"] != self.name:
            raise ValueError(f"The training state is of name={state['name']!r}, this model's is {self.name!r}.")
        self.gns.load_state_dict(state["statistics"])
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for own, key in ((self._lr_scheduler, "lr_scheduler"), (self._mp_scaler, "mp_scaler")):
            if own is not None and state[key] is not None:
                own.load_state_dict(state[key])
