"""The AdaScale algorithm: from a step's sample to its gain, its learning rates and the clock τ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._warn import warn_on_first_worker
from ..gain import Average, advanced
from ..sharding.gradients import StepGradients
from .averaging import Averaging
from .bias_correction import BiasCorrectionCounters
from .deferred import HostCopy, read, skippable_step, steps_on_device
from .current_step import CurrentStep
from .next_state import (
    MOST_SKIPPED,
    AdaScaleState,
    Estimate,
    RuleOutput,
    apply_rule,
    averaged,
    estimate,
    gains_of,
    next_state,
    result,
    skipped,
)
from .rules import AdaScaleRule, RuleInput, ScalingRule, betas_of
from .saved_state import check_tensors, ended_of, state_of, tensors_of
from .step_result import StepResult
from .step_sums import StepSums, constant

_EQUAL, _EQUAL_STEPS = 1e-6, 10
"""Largest σ²/μ² of equal gradient samples (the mean of three equal float32 numbers is rounded), and steps before a warning."""

_OTHER_METHODS = (
    "AdaScale calls the optimizer's step(). An optimizer that takes its steps by other methods, as SAM does, keeps the loop that "
    "calls these: give the optimizer within it to ray_adascale.attach(), such as sam.base_optimizer."
)


@dataclass(frozen=True)
class _Pending:
    """A step that was taken on the device.

    Attributes:
        estimate: The step's.
        copy: Brings its numbers to the host.
        output: The rule's, if the host knew the gain before the step.
    """

    estimate: Estimate
    copy: HostCopy
    output: RuleOutput | None = None


class AdaScaleAlgorithm:
    """Takes optimizer steps with ``lr · r`` and advances the clock τ, as :mod:`.next_state` computes them.

    With a fused optimizer the step stays on the device: :attr:`state` is then that before the step, until :meth:`synchronize`
    reads the numbers.

    Args:
        optimizer: The wrapped one.
        gradients: Its gradients.
        passes: The passes of each step.
        averaging: How samples are averaged.
        state: Before the first step.
        rule: Maps a :class:`RuleInput` to (LR factor, clock increment).
        total_steps: T, for the rule.
        base_batch_size: B0, for the rule.

    Attributes:
        averaging: May be replaced between steps.
        state: After the last step of which the host has the numbers.
        pending: A step on the device, of which the host has no numbers yet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: StepGradients,
        passes: CurrentStep,
        averaging: Averaging,
        state: AdaScaleState,
        *,
        rule: ScalingRule,
        total_steps: float | None,
        base_batch_size: float | None,
    ) -> None:
        self._optimizer, self._gradients, self._inner = optimizer, gradients, gradients.stepped
        self._passes = passes
        self.averaging, self.state = averaging, state
        self._step_counts = BiasCorrectionCounters(self._inner)
        self.rule = rule
        self._total_steps = total_steps
        self._base_batch_size = base_batch_size
        self._estimated: tuple[StepSums, Estimate] | None = None  # the step under way, once its last pass has ended
        self._known: tuple[Average, float, StepResult] | None = None  # read last: averages, S and their gains
        self.pending: _Pending | None = None
        self._plan, self._declared = passes.plan, passes.declared  # of the last step, and of full ones then
        self._equal_steps = 0  # in a row, of equal gradient samples; −1 once that was warned of

    @property
    def rule(self) -> ScalingRule:
        """The scaling rule; setting one checks that it can be used with the optimizer."""
        return self._rule

    @rule.setter
    def rule(self, rule: ScalingRule) -> None:
        betas = betas_of(rule)
        if betas is not None:
            betas.check(self._inner)
        self._rule = rule

    @property
    def furthest(self) -> float:
        """An upper bound of τ, without waiting for the device. No step of AdaScale's rule advances τ by more than S, or 1."""
        tau, pending = self.state.last.effective_steps, self.pending
        if pending is None:
            return tau
        most = max(pending.estimate.sums.plan.scale, 1.0) if pending.output is None else pending.output.increment
        return advanced(tau, most)

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take one optimizer step with the current gradients; a gradient that is not finite changes nothing.

        Raises:
            RuntimeError: Backward passes are missing, or there were too many.
        """
        self.synchronize()
        sums = self._passes.finish()
        self._plan, self._declared = sums.plan, self._passes.declared
        on_device = self._on_device(sums)
        estimated = self._estimate(sums, on_host=not on_device)
        if on_device:
            self._step_on_device(estimated)
        else:
            self._step_on_host(estimated)
        self._end_step()

    def _on_device(self, sums: StepSums) -> bool:
        """Whether a step needs none of its own numbers on the host."""
        gain_known = not sums.measured or type(self._rule) is AdaScaleRule
        return gain_known and self._gradients.fuses and steps_on_device(type(self._inner), self._optimizer.param_groups)

    def _step_on_host(self, estimated: Estimate) -> None:
        step = self._read(estimated, read(estimated.numbers))
        if step.skipped:
            self._leave_out(step)
            return
        self._advance(estimated, step, self._take_step(step, estimated.sums.plan.scale))

    def _step_on_device(self, estimated: Estimate) -> None:
        """Step before the host has the step's numbers. The device skips a gradient that is not finite."""
        scale, output = estimated.sums.plan.scale, None
        zero, one = (constant(x, estimated.finite.device, torch.float32)[0] for x in (0.0, 1.0))
        skip = torch.where(estimated.finite, zero, one)
        if estimated.gains is None:
            output = self._take_step(self._known_at(scale, estimated.averages), scale, skip)
        else:
            factors = estimated.gains[: estimated.averages.count.numel()].unbind()
            skippable_step(self._inner, skip, lambda: self._step_inner(factors, scale))
        self.pending = _Pending(estimated, HostCopy(estimated.numbers), output)

    def _end_step(self) -> None:
        self._estimated = None
        self._passes.end_step()

    def _take_step(self, step: StepResult, scale: float, skip: Tensor | None = None) -> RuleOutput:
        """Step the wrapped optimizer with known gains, as the rule says. Return the rule's output.

        Args:
            step: Has the gains.
            scale: S.
            skip: For a fused optimizer: 1 on the device if it has to change nothing.
        """
        groups, betas = self._optimizer.param_groups, betas_of(self._rule)
        whole = RuleInput(
            gain=step.gain,
            scale=scale,
            effective_steps=self.state.last.effective_steps,
            total_steps=self._total_steps,
            base_batch_size=self._base_batch_size,
        )
        output = apply_rule(self._rule, whole, step.group_gains, len(groups))
        factors, increments = output.lr_factors, output.group_increments
        with nullcontext() if betas is None else betas.applied(groups, self._inner, increments, self._step_counts):
            if skip is None:
                self._step_inner(factors, scale)
            else:
                skippable_step(self._inner, skip, lambda: self._step_inner(factors, scale))
        return output

    def _step_inner(self, factors: Sequence[float] | Sequence[Tensor], scale: float) -> None:
        """Step the wrapped optimizer with the LR of each group times its factor.

        Raises:
            RuntimeError: The optimizer or one of its hooks has set another LR in a step with S ≠ 1.
        """
        groups = self._optimizer.param_groups
        lrs = [group["lr"] for group in groups]
        scaled = [_scaled(lr, factors[i % len(factors)], scale) for i, lr in enumerate(lrs)]
        for group, lr in zip(groups, scaled, strict=True):
            group["lr"] = lr
        after = scaled
        try:
            self._optimizer.step()
            after = [group["lr"] for group in groups]
        except NotImplementedError as error:
            error.add_note(_OTHER_METHODS)
            raise
        finally:
            for group, lr in zip(groups, lrs, strict=True):
                group["lr"] = lr
        moved = [i for i, (lr, own) in enumerate(zip(after, scaled, strict=True)) if lr is not own and lr != own]
        if not moved:
            return
        if scale != 1:
            i = moved[0]
            raise RuntimeError(
                f"{type(self._inner).__name__}.step(), or a hook on it, has set lr={float(after[i]):g} in parameter group {i} in "
                f"place of lr · r = {float(scaled[i]):g}: this step or the next would have an LR without the gain. Set the "
                "LR by a torch.optim.lr_scheduler, such as LambdaLR."
            )
        for i in moved:  # as the plain optimizer does
            groups[i]["lr"] = after[i]

    def skip(self) -> None:
        """End a step without taking it: weights, averages and τ stay.

        Raises:
            RuntimeError: Backward passes are missing, or there were too many.
        """
        self.synchronize()
        sums = self._passes.finish()
        estimated = self._estimate(sums, on_host=not self._on_device(sums))
        self._leave_out(self._read(estimated, HostCopy(estimated.numbers).read()))
        self._end_step()

    def _leave_out(self, step: StepResult) -> None:
        self._skip(step.shared)
        self._gradients.discard()

    def _skip(self, shared: Mapping[str, float]) -> None:
        self.state = skipped(self.state, shared)
        if self.state.skips > MOST_SKIPPED:
            raise FloatingPointError(
                f"The gradient was not finite in {self.state.skips} optimizer steps in a row, so effective_steps stays at "
                f"{self.state.last.effective_steps:.1f}. Lower the learning rate, clip gradients, or check the data."
            )

    # ---- what becomes of a step ----------------------------------------------------------------------------------

    def _estimate(self, sums: StepSums, *, on_host: bool) -> Estimate:
        """Return the estimate of the step under way, computed once; with ``on_host`` on the CPU, after a wait if it is not."""
        if self._estimated is None or self._estimated[0] is not sums:
            here = sums.on_host() if on_host else sums
            self._estimated = sums, estimate(self.state, here, self.averaging)
        return self._estimated[1]

    def _read(self, of: Estimate, numbers: Mapping[str, list[float]]) -> StepResult:
        """Return a step from its numbers on the host; raises if its identity does not hold."""
        scale = of.sums.plan.scale
        if of.gains is None:
            return result(of, numbers, self._known_at(scale, of.averages))
        step = result(of, numbers, averaged(numbers))
        self._known = of.averages, scale, step
        observer = self._passes.observer
        if observer is not None and observer.identity is not None and not step.skipped:
            observer.identity.check(step.identity)
        return step

    def _known_at(self, scale: float, averages: Average) -> StepResult:
        """Return what averages say at a scale; waits for the device unless it was read last."""
        if self._known is None or self._known[0] is not averages or self._known[1] != scale:
            gains = gains_of(averages, scale, self.averaging, non_negative=self.state.non_negative)
            numbers = HostCopy({"gains": gains, "averages": averages.packed.reshape(-1)}).read()
            self._known = averages, scale, averaged(numbers)
        return self._known[2]

    def _advance(self, of: Estimate, step: StepResult, output: RuleOutput | None) -> None:
        """Advance the clock by a step that was taken, unless the device has skipped it.

        Args:
            of: The step's estimate.
            step: The step.
            output: The rule's; None if the gain is both factor and increment.
        """
        if step.skipped:
            self._skip(step.shared)
            return
        self._check_samples(step)
        factor, increment = (step.gain, step.gain) if output is None else (output.lr_factor, output.increment)
        self.state = next_state(self.state, of.averages, step, factor, increment)

    def _check_samples(self, step: StepResult) -> None:
        """Warn once if the gradient samples of several steps in a row were equal: A = C, and so σ² = 0."""
        if self._equal_steps < 0 or math.isnan(step.mu2):
            return
        equal = abs(step.sigma2) <= _EQUAL * step.mu2 and step.mu2 > 0
        self._equal_steps = self._equal_steps + 1 if equal else 0
        if self._equal_steps == _EQUAL_STEPS:
            self._equal_steps = -1
            warn_on_first_worker(
                f"All gradient samples of a step were equal in {_EQUAL_STEPS} steps in a row, so the gain is 1, and more workers "
                "or passes help nothing. Do all workers read the same examples, with equal seeds?"
            )

    def synchronize(self) -> None:
        """Wait for the numbers of a step that was taken on the device, and learn of one that a GradScaler left out."""
        pending, self.pending = self.pending, None
        if pending is not None:
            step = self._read(pending.estimate, pending.copy.read())
            self._advance(pending.estimate, step, pending.output)
        if self._passes.skipped_by_scaler:
            self._passes.skipped_by_scaler = False
            self._skip({})

    def readout(self) -> StepResult:
        """Return what follows from the averages with the current gradients; waits for the device."""
        self.synchronize()
        sums = self._passes.step.sums
        if sums is not None and sums.measured:
            estimated = self._estimate(sums, on_host=not self._on_device(sums))
            return self._known_at(sums.plan.scale, estimated.averages)
        same = self._declared is self._passes.declared
        plan = sums.plan if sums is not None else self._plan if same else self._passes.plan  # a step may be shorter
        return self._known_at(plan.scale, self.state.averages)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return averages, clock and the numbers of steps: copies on the CPU."""
        self.synchronize()
        return tensors_of(self.state, self._passes.ended, self._passes.unsampled)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a :meth:`state_dict`, which is left unchanged.

        Raises:
            ValueError: It is of another number of gains.
        """
        check_tensors(tensors, self.state)
        self.synchronize()
        self.state = state_of(tensors, self.state, self.averaging)
        self._passes.resume(*ended_of(tensors))

    def restart(self) -> None:
        """Reset averages and clock."""
        self.synchronize()
        averages = self.state.averages
        empty = AdaScaleState.empty(averages.count.numel(), self.averaging, averages.packed.device)
        self.state = replace(empty, last=StepResult(lr_factor=self.state.last.lr_factor))
        self._passes.resume(0)

    def add_gain(self) -> None:
        """Add a gain, of a parameter group that was added to the optimizer."""
        averages = self.averaging.with_gain(self.state.averages, self._passes.declared)
        self.state = replace(self.state, averages=averages)


def _scaled(lr: float | Tensor, factor: float | Tensor, scale: float) -> Any:
    """Return ``lr · factor``; a tensor LR becomes a new tensor."""
    if not isinstance(factor, Tensor):
        return lr * factor
    if scale == 1:
        return lr  # bit-identical
    # The kernels read float32. A 0-dim tensor may be on the host where the other is not.
    out = torch.empty((), device=factor.device)
    return torch.mul(factor, lr.reshape(()) if isinstance(lr, Tensor) else lr, out=out)
