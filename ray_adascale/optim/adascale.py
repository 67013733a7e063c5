"""AdaScale: an optimizer wrapper that multiplies the learning rate by the gain of
the batch. ``algorithm`` has the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .. import _hooks
from .._torch import called_to_make_state, uncompiled, uncompiled_in_graphs
from .._warn import warn_at_user
from ..batch import StepPlan
from ..sharding.kinds import sharding_of
from .algorithm import AdaScaleAlgorithm
from .current_step import CurrentStep
from .guards import check_unscaled_once
from .next_state import AdaScaleState, Averaging
from .rules import AdaScaleRule, ScalingRule
from .saved_state import (
    check_tensors,
    reserve_entry,
    with_tensors,
    without_tensors,
)
from .step_sums import StepEnd, StepResult
from .workers import Workers
from .wrapper import OptimizerWrapper, check_parameters


class AdaScaleOptimizer(OptimizerWrapper):
    """Wraps an SGD-like optimizer; ``step()`` uses ``lr · r`` with the gain r of the
    current gradients.

    Use it like the optimizer itself: any ``torch.optim.lr_scheduler`` may be built on
    the wrapper or on the wrapped optimizer. :attr:`effective_steps` is the number of
    optimizer steps so far on the clock of the base batch. Drive the schedule with it,
    and stop when it reaches the number of steps that the schedule was made for.
    Collective: the last backward pass of a step ends with one small all-reduce over
    ``process_group``. Build it after ``init_process_group``.

    In a step the host waits once for the device, to read r. A fused optimizer (``SGD``,
    ``Adam`` or ``AdamW`` with ``fused=True``, also in OSS; parameters on one device;
    AdaScale's own rule) gets the LR as a float32 tensor and skips a step that is not
    finite on the device; :meth:`step` then waits only for r of the step *before*.
    Reading the last step (:attr:`last_step`, :meth:`gain`, :meth:`state_dict`, ...)
    waits for it; :attr:`last_step_known` and :attr:`known_effective_steps` don't.

    ``Run`` and ``attach`` build it. In a loop of your own build
    :class:`ray_adascale.AdaScale`, which has FairScale's arguments.

    Args:
        optimizer: The optimizer to wrap.
        averaging: How σ² and μ² are averaged, and which steps measure them.
        passes: Backward passes per optimizer step.
        scale: S. Default: workers · ``passes``.
        world_size: Workers that share the batch. Default: the size of
            ``process_group``, else 1.
        process_group: Workers that reduce gradients together. Default: OSS's, or the
            default group, if there is one.
        to_mean: Divide the gradient, after the last pass, so that it is the mean over
            the passes. False where the loop does so.
        grad_scaler: Scales the loss.
        single_gain: One gain for all parameter groups; else one a group.
        total_steps: T; None if it is not known.
        base_batch_size: B0 in examples; None if it is not known.
        rule: Maps a :class:`RuleInput` to (LR factor, clock increment). Default:
            AdaScale's (r, r).
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of.
        model: The model.

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
        averaging: Averaging,
        *,
        passes: int = 1,
        scale: float | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        to_mean: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
        single_gain: bool = False,
        total_steps: float | None = None,
        base_batch_size: float | None = None,
        rule: ScalingRule | None = None,
        precondition: Callable[[Tensor, Tensor], Tensor] | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(optimizer)
        reserve_entry(optimizer.param_groups)
        if model is not None:
            check_parameters(model, optimizer, alone=False)
            self._models = list(model.parameters())
        sharding = sharding_of(optimizer, model)
        group = sharding.state.group if process_group is None else process_group
        workers = Workers(world_size, group)
        self._single_gain = single_gain
        self._current = CurrentStep(
            sharding,
            averaging,
            workers,
            grad_scaler=grad_scaler,
            to_mean=to_mean,
            precondition=precondition,
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
        divisor = None if to_mean else 1
        plan = StepPlan(workers=workers.count, passes=passes, loss_divisor=divisor)
        if scale is None:
            scale = workers.count * passes
        self._current.declare(plan.at_scale(scale))

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
        if self._current.grad_scaler is not None:
            check_unscaled_once(self._current.grad_scaler, self, self._optimizer)
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
        self._current.discard_passes()
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
        reserve_entry(self._optimizer.param_groups)
        if statistics:
            self.load_statistics_state(statistics)
        else:
            warn_at_user(
                "The state dict has no AdaScale statistics; the averages and τ start "
                "afresh."
            )
            self._algorithm.restart()
        self._current.discard_passes()
        _hooks.after_load(self)

    def __getstate__(self) -> dict[str, Any]:
        self._algorithm.synchronize()
        return super().__getstate__()

    # ---- the gain --------------------------------------------------------------------

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
        self._current.ensure_summed("clip_grad_norm")
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
        self._current.ensure_summed("clip_grad_value")
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
