"""The AdaScale algorithm: from a step's sample to its gain, its learning rates and
the clock τ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..gain import Average, advanced
from .betas import normalizing
from .bias_correction import BiasCorrectionCounters
from .current_step import CurrentStep
from .deferred import HostCopy, read, skippable_step, steps_on_device
from .guards import (
    EqualSamples,
    FirstSkippedStep,
    LossScale,
    UnsampledSteps,
    check_identity,
    check_weights,
)
from .next_state import (
    MOST_SKIPPED,
    AdaScaleState,
    Averaging,
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
from .step_sums import StepResult, StepSums, constant

_OTHER_METHODS = (
    "AdaScale calls the optimizer's step(). An optimizer that takes its steps by other "
    "methods, as SAM does, keeps the loop that calls these: give the optimizer within "
    "it to ray_adascale.attach(), such as sam.base_optimizer."
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


class _Known(NamedTuple):
    """What was read last: the gains of averages at a scale.

    Attributes:
        averages: The averages.
        scale: S.
        step: Has the gains.
    """

    averages: Average
    scale: float
    step: StepResult


class AdaScaleAlgorithm:
    """Takes optimizer steps with ``lr · r`` and advances the clock τ, as
    :mod:`.next_state` computes them.

    With a fused optimizer the step stays on the device: :attr:`state` is then that
    before the step, until :meth:`synchronize` reads the numbers.

    Args:
        optimizer: The wrapped one.
        current: The step under way.
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
        current: CurrentStep,
        averaging: Averaging,
        state: AdaScaleState,
        *,
        rule: ScalingRule,
        total_steps: float | None,
        base_batch_size: float | None,
    ) -> None:
        self._optimizer = optimizer
        self._inner = current.sharding.stepped
        self._current = current
        self.averaging = averaging
        self.state = state
        self._step_counts = BiasCorrectionCounters(self._inner)
        self.rule = rule
        self._normalizes: list[bool] = []
        self._total_steps = total_steps
        self._base_batch_size = base_batch_size
        # the step under way, once its last pass has ended
        self._estimated: tuple[StepSums, Estimate] | None = None
        # read last: averages, S and their gains
        self._known: _Known | None = None
        self.pending: _Pending | None = None
        self._plan = current.plan  # of the last step
        self._declared = current.declared  # of full steps then
        self._equal_samples = EqualSamples()
        self._unsampled_steps = UnsampledSteps()
        self._first_skipped = FirstSkippedStep()
        self._loss_scale = LossScale()

    @property
    def rule(self) -> ScalingRule:
        """The scaling rule; setting one checks that it can be used with the
        optimizer.
        """
        return self._rule

    @rule.setter
    def rule(self, rule: ScalingRule) -> None:
        betas = betas_of(rule)
        if betas is not None:
            betas.check(self._inner)
        self._rule = rule

    @property
    def furthest(self) -> float:
        """An upper bound of τ, without waiting for the device. No step of AdaScale's
        rule advances τ by more than S, or 1.
        """
        tau = self.state.last.effective_steps
        pending = self.pending
        if pending is None:
            return tau
        if pending.output is None:
            most = max(pending.estimate.sums.plan.scale, 1.0)
        else:
            most = pending.output.increment
        return advanced(tau, most)

    # ---- a step ----------------------------------------------------------------------

    def step(self) -> None:
        """Take one optimizer step with the current gradients; a gradient that is not
        finite changes nothing.

        Raises:
            RuntimeError: Backward passes are missing, or there were too many.
        """
        self.synchronize()  # read the step before, which this one goes on from
        sums = self._current.summed()
        if self._loss_scale.left:
            self._check_loss_scale(sums)
        self._plan = sums.plan
        self._declared = self._current.declared
        if self._on_device(sums):
            self._step_on_device(self._estimate(sums, on_host=False))
        else:
            self._step_on_host(self._estimate(sums, on_host=True))
        self._end_step()

    def _check_loss_scale(self, sums: StepSums) -> None:
        """Look at the gradient of one of the first steps of a loop of the user's."""
        if self._current.shows_gradients:
            self._loss_scale.check(sums, [p.grad for p in self._current.params])
        else:
            self._loss_scale.left = 0

    def _on_device(self, sums: StepSums) -> bool:
        """Whether a step needs none of its own numbers on the host."""
        rule_needs_gain = sums.measured and type(self._rule) is not AdaScaleRule
        if rule_needs_gain or not self._current.sharding.fuses:
            return False
        return steps_on_device(type(self._inner), self._optimizer.param_groups)

    def _step_on_host(self, estimated: Estimate) -> None:
        """Read the step's numbers, and then step, unless the gradient is not finite."""
        step = self._read(estimated, read(estimated.numbers))
        if step.skips:
            self._warn_of_skip()
            self._leave_out(step)
            return
        output = self._output_of_rule(step, estimated.sums.plan.scale)
        self._step_by_rule(output, estimated.sums.plan.scale)
        self._advance(estimated, step, output)

    def _step_on_device(self, estimated: Estimate) -> None:
        """Step before the host has the step's numbers. The device skips a gradient
        that is not finite.
        """
        scale = estimated.sums.plan.scale
        device = estimated.finite.device
        zero = constant(0.0, device, torch.float32)[0]
        one = constant(1.0, device, torch.float32)[0]
        skip = torch.where(estimated.finite, zero, one)
        output = None
        if estimated.gains is None:
            output = self._output_of_rule(
                self._known_at(scale, estimated.averages), scale
            )
            self._step_by_rule(output, scale, skip)
        else:
            # AdaScale's own rule, see _on_device: the factor is the gain itself.
            gains = estimated.gains[: estimated.averages.count.numel()].unbind()
            self._step_inner(gains, scale, skip)
        self.pending = _Pending(estimated, HostCopy(estimated.numbers), output)

    def _end_step(self) -> None:
        self._estimated = None
        self._current.end_step()

    def _output_of_rule(self, step: StepResult, scale: float) -> RuleOutput:
        """Return what the rule makes of known gains."""
        if len(self._normalizes) != len(self._optimizer.param_groups):
            self._normalizes = normalizing(self._inner)
        whole = RuleInput(
            gain=step.gain,
            scale=scale,
            effective_steps=self.state.last.effective_steps,
            total_steps=self._total_steps,
            base_batch_size=self._base_batch_size,
            normalizes=self._normalizes[0],
        )
        return apply_rule(self._rule, whole, step.group_gains, self._normalizes)

    def _step_by_rule(
        self, output: RuleOutput, scale: float, skip: Tensor | None = None
    ) -> None:
        """Step the wrapped optimizer as the rule says, with the betas of longer
        steps if it has such.
        """
        betas = betas_of(self._rule)
        if betas is None or output.is_base_step:
            self._step_inner(output.lr_factors, scale, skip)
            return
        groups = self._optimizer.param_groups
        with betas.applied(
            groups,
            self._inner,
            output.group_increments,
            self._step_counts,
            output.lr_factors,
        ):
            self._step_inner(output.lr_factors, scale, skip)

    def _step_inner(
        self,
        factors: Sequence[float] | Sequence[Tensor],
        scale: float,
        skip: Tensor | None = None,
    ) -> None:
        """Step the wrapped optimizer with the LR of each group times its factor.

        Args:
            factors: One for each group, or one for all.
            scale: S.
            skip: For a fused optimizer: 1 on the device if it has to change nothing.

        Raises:
            RuntimeError: The optimizer or one of its hooks has set another LR in a step
                with S ≠ 1.
        """
        groups = self._optimizer.param_groups
        own = [group["lr"] for group in groups]
        scaled = [
            _scaled(lr, factors[i % len(factors)], scale) for i, lr in enumerate(own)
        ]
        _set_rates(groups, scaled)
        after = scaled
        try:
            if skip is None:
                self._optimizer.step()
            else:
                skippable_step(self._inner, skip, self._optimizer.step)
            after = [group["lr"] for group in groups]
        except NotImplementedError as error:
            error.add_note(_OTHER_METHODS)
            raise
        finally:
            _set_rates(groups, own)
        for i, group in enumerate(groups):
            if after[i] is scaled[i] or after[i] == scaled[i]:
                continue
            if scale != 1:
                raise self._moved_rate(i, after[i], scaled[i])
            group["lr"] = after[i]  # as the plain optimizer does

    def _moved_rate(
        self, i: int, after: float | Tensor, scaled: float | Tensor
    ) -> RuntimeError:
        return RuntimeError(
            f"{type(self._inner).__name__}.step(), or a hook on it, has set "
            f"lr={float(after):g} in parameter group {i} in place of lr · r = "
            f"{float(scaled):g}: this step or the next would have an LR without the "
            "gain. Set the LR by a torch.optim.lr_scheduler, such as LambdaLR."
        )

    def skip(self) -> None:
        """End a step without taking it: weights, averages and τ stay.

        Raises:
            RuntimeError: Backward passes are missing, or there were too many.
        """
        self.synchronize()
        sums = self._current.summed()
        estimated = self._estimate(sums, on_host=not self._on_device(sums))
        self._leave_out(self._read(estimated, HostCopy(estimated.numbers).read()))
        self._end_step()

    def _warn_of_skip(self) -> None:
        if self._current.is_users_loop and not self._current.scales_loss:
            self._first_skipped.read(self.state.last.steps)

    def _leave_out(self, step: StepResult) -> None:
        self._skip(step.shared)
        self._current.sharding.discard()

    def _skip(self, shared: Mapping[str, float]) -> None:
        self.state = skipped(self.state, shared)
        last = self.state.last
        if last.skips < MOST_SKIPPED:
            return
        end = ""
        if self._total_steps is not None:
            end = f" of {self._total_steps:g}"
        raise FloatingPointError(
            f"The gradient was not finite in {last.skips} optimizer steps in a row, so "
            f"effective_steps stays at {last.effective_steps:.1f}{end}. These steps "
            "left the weights as they were. Lower the learning rate (search for a "
            "recipe with a lower one), clip gradients, or check the data."
        )

    # ---- what becomes of a step ------------------------------------------------------

    def _estimate(self, sums: StepSums, *, on_host: bool) -> Estimate:
        """Return the estimate of the step under way, computed once; with ``on_host``
        on the CPU, after a wait if it is not.
        """
        if self._estimated is None or self._estimated[0] is not sums:
            here = sums.on_host() if on_host else sums
            self._estimated = sums, estimate(self.state, here, self.averaging)
        return self._estimated[1]

    def _read(self, of: Estimate, numbers: Mapping[str, list[float]]) -> StepResult:
        """Return a step from its numbers on the host; raises if its weights are wrong,
        or its identity does not hold.
        """
        scale = of.sums.plan.scale
        if of.gains is None:
            return result(of, numbers, self._known_at(scale, of.averages))
        step = result(of, numbers, averaged(numbers))
        self._known = _Known(of.averages, scale, step)
        if "weights" in numbers:
            check_weights(of.sums.plan, numbers["weights"])
        if self._current.observer is not None:
            check_identity(self._current.observer.identity, step)
        return step

    def _known_at(self, scale: float, averages: Average) -> StepResult:
        """Return what averages say at a scale; waits for the device unless it was
        read last.
        """
        known = self._known
        if known is None or known.averages is not averages or known.scale != scale:
            gains = gains_of(
                averages, scale, self.averaging, non_negative=self.state.non_negative
            )
            numbers = HostCopy(
                {"gains": gains, "averages": averages.packed.reshape(-1)}
            ).read()
            known = self._known = _Known(averages, scale, averaged(numbers))
        return known.step

    def _advance(
        self, of: Estimate, step: StepResult, output: RuleOutput | None
    ) -> None:
        """Advance the clock by a step that was taken, unless the device has skipped it.

        Args:
            of: The step's estimate.
            step: The step.
            output: The rule's; None if the gain is both factor and increment.
        """
        if step.skips:
            self._warn_of_skip()
            self._skip(step.shared)
            return
        self._equal_samples.read(step)
        current = self._current
        if current.observer is not None:
            self._unsampled_steps.read(step, of.sums, current.unseen, current.sharding)
        if output is None:
            self.state = next_state(self.state, of.averages, step, step.gain, step.gain)
        else:
            self.state = next_state(
                self.state, of.averages, step, output.lr_factor, output.increment
            )

    def synchronize(self) -> None:
        """Wait for the numbers of a step that was taken on the device, and learn of
        one that a GradScaler left out.
        """
        pending = self.pending
        self.pending = None
        if pending is not None:
            step = self._read(pending.estimate, pending.copy.read())
            self._advance(pending.estimate, step, pending.output)
        if self._current.skipped_by_scaler:
            self._current.skipped_by_scaler = False
            self._skip({})

    def readout(self) -> StepResult:
        """Return what follows from the averages with the current gradients; waits
        for the device.
        """
        self.synchronize()
        sums = self._current.step.sums
        if sums is not None and sums.measured:
            estimated = self._estimate(sums, on_host=not self._on_device(sums))
            return self._known_at(sums.plan.scale, estimated.averages)
        if sums is not None:
            plan = sums.plan
        elif self._declared is self._current.declared:
            plan = self._plan  # of the last step, which may have been a short one
        else:
            plan = self._current.plan
        return self._known_at(plan.scale, self.state.averages)

    # ---- state -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return averages, clock and the numbers of steps: copies on the CPU."""
        self.synchronize()
        return tensors_of(self.state, self._current.ended, self._current.unsampled)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a :meth:`state_dict`, which is left unchanged.

        Raises:
            ValueError: It is of another number of gains.
        """
        check_tensors(tensors, self.state)
        self.synchronize()
        self.state = state_of(tensors, self.state, self.averaging)
        self._current.resume(*ended_of(tensors))

    def restart(self) -> None:
        """Reset averages and clock."""
        self.synchronize()
        averages = self.state.averages
        empty = AdaScaleState.empty(
            averages.count.numel(), self.averaging, averages.packed.device
        )
        self.state = replace(
            empty, last=StepResult(lr_factor=self.state.last.lr_factor)
        )
        self._current.resume(0)

    def add_gain(self) -> None:
        """Add a gain, of a parameter group that was added to the optimizer."""
        averages = self.averaging.with_gain(self.state.averages, self._current.declared)
        self.state = replace(self.state, averages=averages)


def _set_rates(
    groups: Sequence[dict[str, Any]], rates: Sequence[float | Tensor]
) -> None:
    for group, lr in zip(groups, rates, strict=True):
        group["lr"] = lr


def _scaled(lr: float | Tensor, factor: float | Tensor, scale: float) -> Any:
    """Return ``lr · factor``; a tensor LR becomes a new tensor."""
    if not isinstance(factor, Tensor):
        return lr * factor
    if scale == 1:
        return lr  # bit-identical
    # The kernels read float32. A 0-dim tensor may be on the host where the other is
    # not.
    out = torch.empty((), device=factor.device)
    return torch.mul(factor, lr.reshape(()) if isinstance(lr, Tensor) else lr, out=out)
