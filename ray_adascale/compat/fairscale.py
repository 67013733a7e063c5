"""FairScale's interface: AdaScale with its arguments and methods, and AdaScaleWrapper,
which has the constructor of an ordinary optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from .._errors import check_count
from .._torch import uncompiled
from .._warn import warn_on_first_worker
from ..batch import StepPlan
from ..chain import parts_of
from ..gain import count_decay
from ..optim.adascale import AdaScaleOptimizer
from ..optim.guards import warn_of_steps_counted
from ..optim.next_state import Averaging, Smoothing
from ..optim.rules import ScalingRule, auto_rule
from ..sharding.oss import OSS


@dataclass(frozen=True)
class CountDecay:
    """FairScale's θ = max(1 − n/1000, 0), with n = workers × ``passes``. A shortened
    step has the θ of a full one.

    Attributes:
        passes: Backward passes of a full step.
    """

    passes: int

    def __call__(self, plan: StepPlan) -> float:
        return count_decay(plan.workers * self.passes)


class AdaScale(AdaScaleOptimizer):
    """Wraps an SGD-like optimizer; ``step()`` uses ``lr · r`` with the gain r of the
    current gradients.

    For a loop of your own, with FairScale's arguments and methods.
    :class:`ray_adascale.AdaScaleOptimizer` has the other methods, and describes a step.
    Build it after ``init_process_group``.

    Args:
        optimizer: The optimizer to wrap. ``AdaScale(OSS(...))`` is the nesting with
            sharded state.
        world_size: Workers that share the batch. Default: the size of
            ``process_group``, else 1.
        scale: S, global batch size / base batch size. Default: ``world_size ·
            num_gradients_to_accumulate``.
        smoothing: θ, the weight of the past in the averages; or a function of the
            step's :class:`StepPlan`. Default:
            ``max(1 − n/1000, 0)`` with n = world_size · num_gradients_to_accumulate.
            Excludes ``averaging_window``.
        num_gradients_to_accumulate: Backward passes per optimizer step.
        is_scaled_loss: The loss is divided by ``num_gradients_to_accumulate`` before
            each backward pass.
        debias_ewma: Debiased moving average (FairScale's default), or, if False, the
            paper's: a plain mean at first.
        process_group: Workers that reduce gradients together. Default: OSS's, or the
            default group, if there is one.
        grad_scaler: The ``torch.amp.GradScaler`` that scales the loss, so that
            statistics are of unscaled gradients.
        variance_floor: Lower bound on each σ². 1e-6 gives FairScale's numbers; 0 makes
            the gain independent of gradients' size.
        clip: Where σ², μ² ≥ 0 is enforced: on each sample ("samples", as FairScale), or
            on reading the unbiased "averages".
        averaging_window: Average over effective time, with this share of
            ``total_steps`` as the width, instead of over steps.
        total_steps: T, effective steps in the run.
        measure_every: k: one step in k is measured, after the first ones. Default: as
            many as ``averaging_window`` needs, and all without it.
        single_gain: One gain for all parameter groups, from their summed statistics
            (the paper's form). Default: one a group.
        base_batch_size: B0 in examples; with ``batch_size`` it gives the scale.
        batch_size: B in examples, over all workers and passes.
        rule: Maps a :class:`RuleInput` to (LR factor, clock increment). Default:
            AdaScale's (r, r), as FairScale. With Adam, AdamW, Adamax and Lion a warning
            names the default of a Run, ``AdaScaleMemoryRule()``.
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of,
            for another metric than the Euclidean.
        model: The model. Needed for ``fully_shard``, and for a communication hook of
            DDP.

    Raises:
        ValueError: An argument is out of its range, the optimizer is wrapped already,
            or its sharding is not supported.
    """

    _loop_steps_it = True
    """Whether the user's loop steps this object, and drives the schedule by its τ."""

    @uncompiled
    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: Smoothing | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        variance_floor: float = 0.0,
        clip: Literal["samples", "averages"] = "samples",
        averaging_window: float | None = None,
        total_steps: float | None = None,
        measure_every: int | None = None,
        single_gain: bool = False,
        base_batch_size: float | None = None,
        batch_size: float | None = None,
        rule: ScalingRule | None = None,
        precondition: Callable[[Tensor, Tensor], Tensor] | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        check_averaging(clip, smoothing, averaging_window, total_steps, variance_floor)
        passes = check_count("num_gradients_to_accumulate", num_gradients_to_accumulate)
        if base_batch_size is not None or batch_size is not None:
            if scale is not None or not base_batch_size or not batch_size:
                raise ValueError(
                    f"Give scale, or both of {base_batch_size=} and {batch_size=}."
                )
            scale = batch_size / base_batch_size
        window = None
        if averaging_window is not None:
            window = averaging_window * (total_steps or 1)
        averaging = Averaging(
            smoothing=CountDecay(passes) if smoothing is None else smoothing,
            window=window,
            debias=debias_ewma,
            clip_samples=clip == "samples",
            variance_floor=variance_floor,
            measure_every=measure_every,
        )
        super().__init__(
            optimizer,
            averaging,
            passes=passes,
            scale=scale,
            world_size=world_size,
            process_group=process_group,
            to_mean=is_scaled_loss,
            grad_scaler=grad_scaler,
            single_gain=single_gain,
            total_steps=total_steps,
            base_batch_size=base_batch_size,
            rule=rule,
            precondition=precondition,
            model=model,
        )
        if rule is None:
            _warn_of_betas(optimizer)
        if self._loop_steps_it:
            warn_of_steps_counted(self)

    @property
    def smoothing(self) -> float:
        """θ of the moving average over steps."""
        return self._algorithm.averaging.theta(self.plan)

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Change S between steps. The averages stay: σ² is per base batch.
        ``update_estimate`` is for FairScale's sake only.
        """
        self._require_boundary("set_scale")
        self.set_plan(self._current.declared.at_scale(scale))

    @uncompiled
    def set_num_gradients_to_accumulate(
        self, num_gradients_to_accumulate: int, update_smoothing: bool = True
    ) -> None:
        """Change the backward passes per step, and θ to max(1 − n/1000, 0)."""
        passes = check_count("num_gradients_to_accumulate", num_gradients_to_accumulate)
        self._require_boundary("set_num_gradients_to_accumulate")
        self.set_plan(replace(self._current.declared, passes=passes))
        if update_smoothing:
            self._algorithm.averaging = replace(
                self._algorithm.averaging, smoothing=CountDecay(passes)
            )

    @uncompiled
    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the accumulated gradients by the number of passes, where the loss
        was not (``is_scaled_loss=False``).
        """
        if self._current.declared.loss_divisor is None:
            raise RuntimeError(
                "is_scaled_loss=True says that the loss was divided already."
            )
        with self._current.changing():
            self._current.divide_to_mean(self.plan)


class AdaScaleWrapper(AdaScale):
    """``AdaScale(optim_cls(params, ...))`` for code that makes an optimizer from a
    class and parameters.

    FairScale's names and positions. The other arguments of :class:`AdaScale`
    (``process_group``, ``averaging_window``, ...) are not accepted, since every further
    keyword is the wrapped optimizer's: for those, make the optimizer and wrap it.

    Args:
        params: Parameters or groups, as for any optimizer.
        world_size: Workers that share the batch; see :class:`AdaScale`, also for the
            next four arguments.
        scale: S.
        smoothing: θ.
        num_gradients_to_accumulate: Backward passes per optimizer step.
        debias_ewma: Debiased moving average, or, if False, the paper's.
        optim_cls: Class of the optimizer to wrap.
        **additional_optim_args: Its hyperparameters.

    Raises:
        ValueError: An argument is out of its range, or ``optim_cls`` is no optimizer
            class.
    """

    def __init__(
        self,
        params: Iterable[Any],
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        **additional_optim_args: Any,
    ) -> None:
        if not (isinstance(optim_cls, type) and issubclass(optim_cls, Optimizer)):
            raise ValueError(
                f"Invalid {optim_cls=}. Must be an Optimizer class; AdaScale(...) "
                "wraps an instance."
            )
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            # By name: here is_scaled_loss stands before it, so FairScale's positional
            # call would set the wrong one.
            debias_ewma=debias_ewma,
        )


def _warn_of_betas(optimizer: Optimizer) -> None:
    """Warn if FairScale's rule is not that of a Run for the optimizer."""
    inner = optimizer.optim if isinstance(optimizer, OSS) else optimizer
    parts = [type(part) for part, _ in parts_of(inner)]
    kinds = [kind.__name__ for part in parts for kind in part.__mro__]
    if auto_rule(kinds) == auto_rule([]):
        return
    names = " and ".join(part.__name__ for part in parts)
    warn_on_first_worker(
        f"AdaScale({names}) has FairScale's rule: it multiplies the "
        "learning rate by r and leaves the betas as they are. With it metrics fell "
        "behind the base run's (docs/results.md). Write AdaScale(..., "
        "rule=AdaScaleMemoryRule()). With rule=AdaScaleRule() FairScale's rule stays, "
        "without this warning."
    )


def check_averaging(
    clip: str,
    smoothing: Smoothing | None,
    window: float | None,
    total_steps: float | None,
    variance_floor: float,
) -> None:
    """Check the arguments of :class:`ray_adascale.AdaScale` that concern the averages.

    Raises:
        ValueError: An argument is out of its range, or contradicts another.
    """
    if clip not in ("samples", "averages"):
        raise ValueError(f"Invalid {clip=}. Must be 'samples' or 'averages'.")
    if window is not None and (smoothing is not None or total_steps is None):
        raise ValueError(
            f"averaging_window={window} needs total_steps, and excludes smoothing (got "
            f"{smoothing=})."
        )
    if (
        window is not None
        and total_steps is not None
        and not (0 < window < math.inf and 0 < total_steps < math.inf)
    ):
        raise ValueError(
            f"Invalid averaging_window={window}, {total_steps=}. Both must be positive "
            "and finite."
        )
    if smoothing is not None and not callable(smoothing) and not 0 <= smoothing < 1:
        raise ValueError(f"Invalid {smoothing=}. Must be in [0, 1).")
    if not 0 <= variance_floor < math.inf:
        raise ValueError(
            f"Invalid {variance_floor=}. Must be a number ≥ 0, the lower bound on each "
            "σ²; 0 for none."
        )
