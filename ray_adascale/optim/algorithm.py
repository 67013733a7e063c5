"""The AdaScale algorithm: from a step's sample to its gain, its learning rates and the clock τ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._warn import warn_on_first_worker
from ..gain import Average, advanced
from ..sharding.gradients import StepGradients
from .averages import Averages
from .deferred import HostCopy, skippable_step, steps_on_device
from .exchange import Packed
from .inferred_passes import InferredPasses
from .rules import AdaScaleRule, RuleInput, ScalingRule, betas_of
from .step_counts import StepCounts
from .step_result import StepResult
from .step_sums import StepSums, constant

_EQUAL, _EQUAL_STEPS = 1e-6, 10
"""Largest σ²/μ² of equal gradient samples (the mean of three equal float32 numbers is rounded), and steps before a warning."""

_OTHER_METHODS = (
    "AdaScale calls the optimizer's step(). An optimizer that takes its steps by other methods, as SAM does, keeps the loop that "
    "calls these: give the optimizer within it to ray_adascale.attach(), such as sam.base_optimizer."
)


class AdaScaleAlgorithm:
    """Takes optimizer steps with ``lr · r`` and advances the clock τ.

    With a fused optimizer the step stays on the device: :attr:`last` is then the step before, until :meth:`synchronize` reads
    the numbers.

    Args:
        optimizer: The wrapped one.
        gradients: Its gradients.
        passes: The passes of each step.
        averages: Averages the samples.
        rule: Maps a :class:`RuleInput` to (LR factor, clock increment).
        total_steps: T, for the rule.
        base_batch_size: B0, for the rule.

    Attributes:
        last: The last step of which the host has the numbers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: StepGradients,
        passes: InferredPasses,
        averages: Averages,
        *,
        rule: ScalingRule,
        total_steps: float | None,
        base_batch_size: float | None,
    ) -> None:
        self._optimizer, self._gradients, self._inner = optimizer, gradients, gradients.stepped
        self._passes = passes
        self._averages = averages
        self._step_counts = StepCounts(self._inner)
        self.rule = rule
        self._total_steps = total_steps
        self._base_batch_size = base_batch_size
        self.last = StepResult()
        # The step under way, once its last pass has ended.
        self._of: tuple[StepSums, Average, Tensor, Packed] | None = None
        # A step on the device, on its way to the host; LR factor and clock increment where the host knows them.
        self._pending: tuple[StepSums, Average, Packed, HostCopy, tuple[float, float] | None] | None = None
        self._plan, self._declared = passes.plan, passes.plans.declared  # of the last step, and of full ones then
        self._since_sample = 1.0  # τ since the last sample; before the first one effective step
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
    def pending(self) -> bool:
        """Whether the numbers of the last step are not on the host yet."""
        return self._pending is not None

    @property
    def furthest(self) -> float:
        """An upper bound of τ, without waiting for the device. No step of AdaScale's rule advances τ by more than S, or 1."""
        if self._pending is None:
            return self.last.effective_steps
        sums, *_, answer = self._pending
        return advanced(self.last.effective_steps, max(sums.plan.scale, 1.0) if answer is None else answer[1])

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take one optimizer step with the current gradients; a gradient that is not finite changes nothing.

        Raises:
            RuntimeError: Backward passes are missing, or there were too many.
        """
        self.synchronize()
        sums = self._passes.finish()
        self._plan, self._declared = sums.plan, self._passes.plans.declared
        if not self._on_device(sums):
            self._step_on_host(sums, self._on_host(sums, on_host=True))
        elif sums.measured:
            self._step_on_device(sums)
        else:
            self._step_between(sums)
        self._end_step()

    def _on_device(self, sums: StepSums) -> bool:
        """Whether a step needs none of its own numbers on the host."""
        known = not sums.measured or type(self._rule) is AdaScaleRule
        return known and self._gradients.fuses and steps_on_device(type(self._inner), self._optimizer.param_groups)

    def _after(self, sums: StepSums, *, on_host: bool) -> tuple[Average, Tensor, Packed]:
        """Return :meth:`Averages.updated_by` of the step under way, computed once; with ``on_host`` on the CPU, after a wait."""
        if self._of is None or self._of[0] is not sums:
            here = sums.on_host() if on_host else sums
            self._of = sums, *self._averages.updated_by(here, self._since_sample)
        return self._of[1:]

    def _end_step(self) -> None:
        self._of = None
        self._passes.end_step()

    def _step_on_device(self, sums: StepSums) -> None:
        averages, finite, numbers = self._after(sums, on_host=False)
        factors = self._averages.gains_of(numbers).unbind()
        zero, one = (constant(x, finite.device, torch.float32)[0] for x in (0.0, 1.0))
        skip = torch.where(finite, zero, one)
        skippable_step(self._inner, skip, lambda: self._step_inner(factors, sums.plan.scale))
        self._averages.now = averages
        self._pending = sums, averages, numbers, HostCopy(numbers.tensor), None

    def _step_between(self, sums: StepSums) -> None:
        """Take a step that was not measured: its gain is known, and only the device knows whether its gradient is finite."""
        averages, check = self._averages.now, sums.sample(1)[0]
        known = self._averages.evaluate(averages, sums.plan.scale)
        zero, one = (constant(x, check.device, torch.float32)[0] for x in (0.0, 1.0))
        answer = self._take_step(known, sums.plan.scale, torch.where(check < math.inf, zero, one))
        numbers = Packed.of({"check": check, **sums.shared}) if sums.shared else Packed(check.view(1), {"check": 1})
        self._pending = sums, averages, numbers, HostCopy(numbers.tensor), answer

    def _step_on_host(self, sums: StepSums, read: tuple[Average, StepResult]) -> None:
        averages, step = read
        if step.skipped:
            self._count_skipped(step)
            return
        answer = self._take_step(step, sums.plan.scale)
        self._averages.now = averages
        self._advance(step, *answer)

    def _take_step(self, step: StepResult, scale: float, skip: Tensor | None = None) -> tuple[float, float]:
        """Step the wrapped optimizer with known gains. Return the rule's LR factor and clock increment of the whole optimizer.

        Args:
            step: Has the gains.
            scale: S.
            skip: For a fused optimizer: 1 on the device if it has to change nothing.
        """
        betas, groups, gains = betas_of(self._rule), self._optimizer.param_groups, step.group_gains
        # Even with one gain, a rule may have another factor for each group.
        answers = [self._apply_rule(gains[i % len(gains)], scale, i) for i in range(len(groups))]
        answer = self._apply_rule(step.gain, scale, None)
        factors, increments = [f for f, _ in answers], [c for _, c in answers]
        with nullcontext() if betas is None else betas.applied(groups, self._inner, increments, self._step_counts):
            if skip is None:
                self._step_inner(factors, scale)
            else:
                skippable_step(self._inner, skip, lambda: self._step_inner(factors, scale))
        return answer

    def _on_host(self, sums: StepSums, *, on_host: bool) -> tuple[Average, StepResult]:
        """Return the averages after a step, and the step on the host; waits for the device.

        Args:
            sums: The step's.
            on_host: Whether they are computed on the host, or on the device.
        """
        if sums.measured:
            averages, _, numbers = self._after(sums, on_host=on_host)
            read = numbers.named(numbers.tensor.tolist())
            return averages, self._checked(self._averages.read(read, averages, sums))
        return self._averages.now, self._not_measured(sums, *sums.read())

    def _not_measured(self, sums: StepSums, check: float, shared: Mapping[str, float]) -> StepResult:
        """Return a step without a sample, from its numbers on the host as :meth:`StepSums.read` returns them."""
        return replace(
            self._averages.evaluate(self._averages.now, sums.plan.scale),
            sigma2=math.nan,
            mu2=math.nan,
            squared_norm=check if "c" in sums.numbers else math.nan,
            skipped=not math.isfinite(check),
            shared=shared,
        )

    def _apply_rule(self, r: float, scale: float, group: int | None) -> tuple[float, float]:
        return self._rule(
            RuleInput(
                gain=r,
                scale=scale,
                effective_steps=self.last.effective_steps,
                total_steps=self._total_steps,
                base_batch_size=self._base_batch_size,
                group=group,
            )
        )

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
        self._count_skipped(self._on_host(sums, on_host=not self._on_device(sums))[1])
        self._end_step()

    def _count_skipped(self, step: StepResult) -> None:
        self.last = replace(self.last, skipped=True, shared=step.shared)
        self._gradients.discard()

    def _advance(self, step: StepResult, lr_factor: float, increment: float) -> None:
        self._check_samples(step)
        self._since_sample = increment + (self._since_sample if math.isnan(step.sigma2) else 0.0)
        tau = advanced(self.last.effective_steps, increment)
        self.last = replace(step, effective_steps=tau, steps=self.last.steps + 1, lr_factor=lr_factor)

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

    def _checked(self, step: StepResult) -> StepResult:
        """Return the step, after the check of its identity; raises if it does not hold."""
        observer = self._passes.measurement.observer
        if observer is not None and observer.identity is not None and not step.skipped:
            observer.identity.check(step.identity)
        return step

    def synchronize(self) -> None:
        """Wait for the numbers of a step that was taken on the device, and learn of one that a GradScaler left out."""
        pending, self._pending = self._pending, None
        if pending is not None:
            sums, averages, numbers, copy, answer = pending
            read = numbers.named(copy.read())
            if answer is None:
                step = self._checked(self._averages.read(read, averages, sums))
            else:
                step = self._not_measured(sums, read["check"][0], {name: read[name][0] for name in sums.shared})
            if step.skipped:
                self.last = replace(self.last, skipped=True, shared=step.shared)
            else:
                self._advance(step, *(answer or (step.gain, step.gain)))
        if self._passes.skipped_by_scaler:
            self._passes.skipped_by_scaler = False
            self.last = replace(self.last, skipped=True, shared={})

    def readout(self, *, committed: bool = False) -> StepResult:
        """Return what follows from the averages, with the current gradients unless ``committed``; waits for the device."""
        self.synchronize()
        sums = None if committed else self._passes.measurement.sums
        if sums is None or not sums.measured:
            same = self._declared is self._passes.plans.declared
            plan = sums.plan if sums is not None else self._plan if same else self._passes.plan  # a step may be shorter
            return self._averages.evaluate(self._averages.now, plan.scale)
        averages, *_ = self._after(sums, on_host=not self._on_device(sums))
        return self._averages.evaluate(averages, sums.plan.scale)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return averages, clock and the part of the examples: copies on the CPU. The keys are the same in all runs."""
        self.synchronize()
        return {
            **self._averages.state(),
            "effective_steps": torch.tensor(self.last.effective_steps, dtype=torch.float64),
            "previous_gain": torch.tensor(self.last.gain, dtype=torch.float64),
            "steps": torch.tensor(self.last.steps),
            "ended": torch.tensor(self._passes.plans.ended),
            "unsampled": torch.tensor(self._passes.plans.unsampled),
            "since_sample": torch.tensor(self._since_sample, dtype=torch.float64),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a :meth:`state`.

        Raises:
            ValueError: It is of another number of gains.
        """
        self._averages.check(state)
        self.synchronize()
        self._averages.load(state)
        self.last = replace(
            self.last,
            gain=float(state["previous_gain"]),
            effective_steps=float(state["effective_steps"]),
            steps=int(state["steps"]),
        )
        self._since_sample = float(state.get("since_sample", state["previous_gain"]))
        self._passes.resume(int(state.get("ended", state["steps"])), int(state.get("unsampled", 0)))

    def restart(self) -> None:
        """Reset averages and clock."""
        self.synchronize()
        self._averages.restart()
        self.last = replace(self.last, gain=1.0, effective_steps=0.0, steps=0)
        self._since_sample = 1.0
        self._passes.resume(0)


def _scaled(lr: float | Tensor, factor: float | Tensor, scale: float) -> Any:
    """Return ``lr · factor``; a tensor LR becomes a new tensor."""
    if not isinstance(factor, Tensor):
        return lr * factor
    if scale == 1:
        return lr  # bit-identical
    # The kernels read float32. A 0-dim tensor may be on the host where the other is not.
    out = torch.empty((), device=factor.device)
    return torch.mul(factor, lr.reshape(()) if isinstance(lr, Tensor) else lr, out=out)


def portable(state: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a :meth:`AdaScaleAlgorithm.state` for a state dict: as numbers, and the averages and the clock as tensors.

    ``torch.distributed.checkpoint.state_dict`` copies "state" and "param_groups" only, and takes tensors for the model's. So a
    parameter group gets the numbers. ``dcp.load`` loads the keys that a fresh optimizer's state has, and raises if one is missing
    in the checkpoint.
    """
    return {k: v.tolist() for k, v in state.items()}, state


def from_numbers(numbers: dict[str, Any], *, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state from the numbers of :func:`portable`, with the dtypes of another state; empty without numbers."""
    return {k: torch.tensor(v, dtype=like[k].dtype) for k, v in numbers.items() if k in like}


def of_other_base_batch(state: dict[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Return the :meth:`AdaScaleAlgorithm.state` of the same run with another base batch size.

    σ² and S are inversely proportional to B0, so σ²/S stays, and μ².

    Args:
        state: It is left unchanged.
        ratio: Old B0 / new B0.
    """
    total = state["total"] * torch.tensor([[ratio], [1.0]], dtype=torch.float64)
    changed = {"total": total}
    # r = (σ² + μ²) / (σ²/S + μ²), of which only the numerator changes
    old, new = ((t / state["weight"]).nan_to_num(0).clamp(min=0).sum() for t in (state["total"], total))
    if old > 0:
        changed |= {k: state[k] * new / old for k in ("previous_gain", "since_sample") if k in state}
    return state | changed
