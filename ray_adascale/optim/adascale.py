"""AdaScale: an optimizer wrapper that multiplies the learning rate by the gain of
the batch. ``algorithm`` has the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .. import _hooks
from .._errors import check_count
from .._torch import called_to_make_state, uncompiled, uncompiled_in_graphs
from .._warn import warn_at_user
from ..batch import StepPlan
from ..gain import count_decay
from ..sharding.kinds import sharding_of
from .algorithm import AdaScaleAlgorithm
from .current_step import CurrentStep
from .next_state import AdaScaleState, Averaging, Smoothing
from .rules import AdaScaleRule, ScalingRule
from .sampling import MeasuredSteps
from .saved_state import check_tensors, with_tensors, without_tensors
from .step_sums import StepEnd, StepResult
from .workers import Workers
from .wrapper import OptimizerWrapper, check_parameters


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


class AdaScale(OptimizerWrapper):
    """Wraps an SGD-like optimizer; ``step()`` uses ``lr · r`` with the gain r of the
    current gradients.

    Use it like the optimizer itself: any ``torch.optim.lr_scheduler`` may be built on
    the wrapper or on the wrapped optimizer. :attr:`effective_steps` is the number of
    optimizer steps so far on the clock of the base batch. Drive the schedule with it,
    and stop when it reaches the number of steps that the schedule was made for.
    Collective: the last backward pass of a step ends with one small all-reduce over
    ``process_group``. Build AdaScale after ``init_process_group``.

    In a step the host waits once for the device, to read r. A fused optimizer (``SGD``,
    ``Adam`` or ``AdamW`` with ``fused=True``, also in OSS; parameters on one device;
    AdaScale's own rule) gets the LR as a float32 tensor and skips a step that is not
    finite on the device; :meth:`step` then waits only for r of the step *before*.
    Reading the last step (:attr:`last_step`, :meth:`gain`, :meth:`state_dict`, ...)
    waits for it; :attr:`last_step_known` and :attr:`known_effective_steps` don't.

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
            AdaScale's (r, r).
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of,
            for another metric than the Euclidean.
        model: The model. Needed for ``fully_shard``, and for a communication hook of
            DDP.

    Raises:
        ValueError: An argument is out of its range, the optimizer is wrapped already,
            or its sharding is not supported.
    """

    _parts = frozenset({"_optimizer", "_current", "_algorithm"})

    refuses_sharding: ClassVar[str] = (
        "OSS can't shard AdaScale: wrap the other way round, AdaScale(OSS(...)), so "
        "that every worker has the same gain."
    )
    """Error message of OSS for an optimizer of this class, which OSS does not
    import.
    """

    saves_within_step: bool = False
    """Whether :meth:`state_dict` also works between the passes of a step: the state
    is that of the last step boundary.
    """

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
        super().__init__(optimizer)
        if model is not None:
            check_parameters(model, optimizer, alone=False)
            self._models = list(model.parameters())
        check_averaging(clip, smoothing, averaging_window, total_steps, variance_floor)
        passes = check_count("num_gradients_to_accumulate", num_gradients_to_accumulate)
        if base_batch_size is not None or batch_size is not None:
            if scale is not None or not base_batch_size or not batch_size:
                raise ValueError(
                    f"Give scale, or both of {base_batch_size=} and {batch_size=}."
                )
            scale = batch_size / base_batch_size
        sharding = sharding_of(optimizer, model)
        workers = Workers(
            world_size, sharding.state.group if process_group is None else process_group
        )
        if averaging_window is None:
            window = None
        else:
            window = averaging_window * (total_steps or 1)
        sampling = MeasuredSteps(window, measure_every)
        self._single_gain = single_gain
        self._current = CurrentStep(
            sharding,
            sampling,
            workers,
            grad_scaler=grad_scaler,
            to_mean=is_scaled_loss,
            precondition=precondition,
        )
        averaging = Averaging(
            smoothing=CountDecay(passes) if smoothing is None else smoothing,
            window=window,
            debias=debias_ewma,
            clip_samples=clip == "samples",
            variance_floor=variance_floor,
        )
        num_gains = 1 if single_gain else len(optimizer.param_groups)
        self._algorithm = AdaScaleAlgorithm(
            optimizer,
            self._current,
            averaging,
            AdaScaleState.empty(num_gains, averaging, sharding.device),
            rule=AdaScaleRule() if rule is None else rule,
            total_steps=total_steps,
            base_batch_size=base_batch_size,
        )
        scale = workers.count * passes if scale is None else scale
        divisor = None if is_scaled_loss else 1
        self._current.declare(
            StepPlan(
                workers=workers.count, passes=passes, loss_divisor=divisor
            ).at_scale(scale)
        )

    def __repr__(self) -> str:
        return (
            f"AdaScale(scale={self._current.plan.scale:g}, n={self.num_samples}, "
            f"{self._optimizer!r})"
        )

    # ---- interface of torch.optim.Optimizer ------------------------------------------

    @_hooks.around_own_step
    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step with ``lr · r``; τ advances by r. A gradient that is
        not finite changes nothing at all.

        If ``torch.distributed.checkpoint.state_dict`` calls it to make an empty state,
        it makes the state and nothing else.

        Args:
            closure: Evaluates the model once and returns the loss, which is then
                returned; the gain is that of its gradients.

        Raises:
            RuntimeError: Called after fewer or more backward passes than
                ``num_gradients_to_accumulate``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        elif called_to_make_state(self._optimizer):
            self._optimizer.step()
            return None
        self._algorithm.step()
        return loss

    def take_step(self) -> None:
        """Take one optimizer step as :meth:`step` does, without torch's work around
        a step, which the wrapped one's has.
        """
        if self.has_step_hooks:
            self.step()
            return
        with torch.no_grad():
            self._algorithm.step()

    @uncompiled
    @torch.no_grad()
    def skip_step(self) -> None:
        """End a step without taking it, as a GradScaler that found an overflow does:
        weights, averages and τ stay.

        Raises:
            RuntimeError: Called after fewer or more backward passes than
                ``num_gradients_to_accumulate``.
        """
        self._algorithm.synchronize()
        self._algorithm.skip()

    @uncompiled_in_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and the passes of an unfinished or skipped step."""
        self._current.begin_step()
        self._optimizer.zero_grad(set_to_none=set_to_none)

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer and watch its gradients from the next
        step on.
        """
        self._require_boundary("add_param_group")
        self._algorithm.synchronize()
        self._optimizer.add_param_group(param_group)
        self._current.add_group()
        if not self._single_gain:
            self._algorithm.add_gain()

    @uncompiled
    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, with AdaScale's: tensors in
        ``"adascale"``, numbers in the first group.

        Loads with ``torch.load(weights_only=True)`` and goes through
        ``torch.distributed.checkpoint``.

        Raises:
            RuntimeError: Called between a backward pass and the step it leads to,
                without :attr:`saves_within_step`.
        """
        self._require_boundary("state_dict")
        _hooks.before_save(self)
        return _hooks.after_save(
            with_tensors(self._optimizer.state_dict(), self.statistics_state()), self
        )

    @uncompiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, which is left unchanged. σ² is per base batch, so
        S and n may differ from the state's.

        Raises:
            ValueError: The statistics are of another number of parameter groups.
        """
        self._require_boundary("load_state_dict")
        self._algorithm.synchronize()
        state_dict = _hooks.before_load(state_dict, self)
        inner, statistics = without_tensors(state_dict, like=self.statistics_state())
        if statistics:
            check_tensors(statistics, self._algorithm.state)
        self._optimizer.load_state_dict(inner)
        if statistics:
            self.load_statistics_state(statistics)
        else:
            warn_at_user(
                "The state dict has no AdaScale statistics; the averages and τ start "
                "afresh."
            )
            self._algorithm.restart()
        self._current.begin_step()
        _hooks.after_load(self)

    def __getstate__(self) -> dict[str, Any]:
        self._algorithm.synchronize()
        return super().__getstate__()

    # ---- FairScale's interface -------------------------------------------------------

    @uncompiled
    def gain(self, pg_idx: int | None = None) -> float:
        """Return r of the current gradients (between backward and step), or of the last
        step. 1 before the first sample.

        It changes nothing and needs no other worker.

        Args:
            pg_idx: A parameter group's index; None for the whole optimizer (the groups'
                statistics summed).
        """
        readout = self._algorithm.readout()
        if pg_idx is None:
            return readout.gain
        if not 0 <= pg_idx < len(self.param_groups):
            raise ValueError(
                f"Invalid {pg_idx=}. The optimizer has {len(self.param_groups)} "
                "parameter groups."
            )
        return readout.group_gains[pg_idx % len(readout.group_gains)]

    @property
    def scale(self) -> float:
        """S, global batch size / base batch size."""
        return self.plan.scale

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

    @uncompiled
    def unhook(self) -> None:
        """Stop watching gradients; ``step()`` goes on with the averages unchanged."""
        self._current.unhook()

    # ---- the batch of a step ---------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """Plan of the step under way, as far as it is known; else the plan of a full
        step.
        """
        return self._current.plan

    @property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step: workers × accumulation passes."""
        return self.plan.num_samples

    @uncompiled
    def set_plan(self, plan: StepPlan) -> None:
        """Set what a step consists of, from the next step on: S, and the backward
        passes. θ stays.

        Raises:
            ValueError: The plan is of another number of workers.
            RuntimeError: Called between a backward pass and the step that it leads to.
        """
        self._require_boundary("set_plan")
        if plan.workers != self._current.workers.count:
            raise ValueError(
                f"Invalid {plan}: AdaScale was built for {self._current.workers.count} "
                "workers."
            )
        self._algorithm.synchronize()
        self._current.declare(
            replace(plan, loss_divisor=self._current.declared.loss_divisor)
        )

    @uncompiled
    def expect_passes(
        self,
        passes: int,
        *,
        scale: float | None = None,
        loss_divided_by: int | None = None,
    ) -> None:
        """Announce that one optimizer step, the one under way or else the next, has
        fewer backward passes than declared.

        S and n are then those of these passes. The averages stay: σ² is per base batch.
        If n is 1, the step adds nothing to them. All workers make the same call.

        Args:
            passes: Number of passes, at most ``num_gradients_to_accumulate``. Call this
                before the last of them begins.
            scale: S of this step. Default: S · passes / num_gradients_to_accumulate. If
                its last micro-batch is smaller than the others: examples over all
                workers and passes / base batch size.
            loss_divided_by: Number that the loss of each pass is divided by. Default:
                ``passes``. Some loops divide by ``num_gradients_to_accumulate`` in
                every step; the gradient is then corrected after the last pass.

        Raises:
            ValueError: The step can't have this number of passes.
        """
        self._algorithm.synchronize()
        self._current.inferred.expect(self._current, passes, scale, loss_divided_by)

    @property
    def step_end(self) -> StepEnd | None:
        """Decides whether a step ends before the declared number of passes; None: only
        :meth:`expect_passes` does.

        Called as each pass begins that is not the declared last; returns
        :meth:`StepPlan.shortened` of :attr:`plan`, or None.
        """
        return self._current.inferred.step_end

    @step_end.setter
    def step_end(self, step_end: StepEnd | None) -> None:
        self._current.inferred.step_end = step_end

    @property
    def sample_weights(self) -> Sequence[float] | None:
        """w of this worker's gradient sample in each pass, where micro-batches are
        unequal; None: all 1/n.

        The weights of all workers and passes of a step add up to 1. A sample of weight
        0 does not count in n.
        """
        return self._current.weights

    @sample_weights.setter
    def sample_weights(self, weights: Iterable[float | Tensor] | None) -> None:
        self._current.set_weights(weights)

    # ---- the steps so far ------------------------------------------------------------

    @property
    def last_step(self) -> StepResult:
        """The last step; waits for the device if the host does not have its numbers
        yet.

        A step that torch's own ``GradScaler`` left out is seen (S > 1 or n > 1) once
        its gradients are cleared.
        """
        self._algorithm.synchronize()
        return self._algorithm.state.last

    @property
    def last_step_known(self) -> bool:
        """Whether the host has the numbers of the last step, so that reading
        :attr:`last_step` waits for nothing.
        """
        return self._algorithm.pending is None

    @property
    def effective_steps(self) -> float:
        """τ, Σ r over the optimizer steps taken; may be set, to move the clock."""
        return self.last_step.effective_steps

    @effective_steps.setter
    def effective_steps(self, effective_steps: float) -> None:
        last = self.last_step
        state = self._algorithm.state
        self._algorithm.state = replace(
            state, last=replace(last, effective_steps=float(effective_steps))
        )

    @property
    def known_effective_steps(self) -> float:
        """τ without waiting for the device: it may lack the last step's r, which is
        at most S (or 1, if larger).
        """
        return self._algorithm.state.last.effective_steps

    @property
    def furthest_effective_steps(self) -> float:
        """An upper bound of τ, without waiting for the device."""
        return self._algorithm.furthest

    @property
    def steps(self) -> int:
        """Optimizer steps taken, without those that were skipped."""
        return self.last_step.steps

    def group_moments(self) -> tuple[list[float], list[float]]:
        """Return averaged (σ², μ²) of each gain's group, unclipped, with the current
        gradients; NaN before the first sample.
        """
        readout = self._algorithm.readout()
        return list(readout.group_sigma2), list(readout.group_mu2)

    def average_moments(self) -> tuple[float, float]:
        """Return the averaged (σ², μ²), summed over groups; NaN before the first
        sample.
        """
        return self.last_step.total_moments()

    def statistics_state(self) -> dict[str, Tensor]:
        """Return AdaScale's own state without the wrapped optimizer's: copies on the
        CPU.
        """
        self._require_boundary("statistics_state")
        return self._algorithm.state_dict()

    def load_statistics_state(self, state: dict[str, Tensor]) -> None:
        """Load a :meth:`statistics_state`."""
        self._algorithm.load_state_dict(state)

    # ---- the passes of a step --------------------------------------------------------

    @property
    def rule(self) -> ScalingRule:
        """The scaling rule; may be set between steps."""
        return self._algorithm.rule

    @rule.setter
    def rule(self, rule: ScalingRule) -> None:
        self._algorithm.rule = rule

    @property
    def at_boundary(self) -> bool:
        """Whether this is a step boundary: no backward pass since the last step."""
        return not self._current.step.under_way

    @property
    def is_last_pass(self) -> bool:
        """Whether the backward pass that has ended last is the last one of its step:
        the place for a loop's own clipping.
        """
        return self._current.is_last

    @property
    def current(self) -> CurrentStep:
        """The step under way: its plan, its passes and its gradient samples."""
        return self._current

    @uncompiled
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterable[Tensor]], Iterable[Tensor]] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Clip the gradient of the next step to a norm, however it is sharded;
        collective. The gain stays.

        Args:
            max_norm: Largest norm.
            norm_type: p of the p-norm.
            filter_params_fn: As ``process_group`` for an OSS only, see
                :meth:`ray_adascale.OSS.clip_grad_norm`.

        Returns:
            The norm before clipping, on the device.

        Raises:
            RuntimeError: Called after fewer or more backward passes than
                ``num_gradients_to_accumulate``.
            ValueError: The wrapped optimizer is no OSS, and there is a filter or a
                process group.
        """
        self._current.complete("clip_grad_norm")
        with self._current.changing():
            return self._current.sharding.clip_norm(
                self._params,
                max_norm,
                norm_type,
                filter_params_fn=filter_params_fn,
                process_group=process_group,
            )

    @uncompiled
    def clip_grad_value(self, clip_value: float) -> None:
        """Clip each element of the gradient of the next step, as
        :meth:`clip_grad_norm` clips its norm. The gain stays.
        """
        self._current.complete("clip_grad_value")
        with self._current.changing():
            self._current.sharding.clip_value(self._params, clip_value)

    def _require_boundary(self, what: str) -> None:
        if not self.at_boundary and not (
            self.saves_within_step and what in ("state_dict", "statistics_state")
        ):
            raise RuntimeError(
                f"{what}() between a backward pass and step(): gradients of an "
                "unfinished step would be lost. Call it at a step boundary, after "
                "step() (or zero_grad()) and before the next backward pass."
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
