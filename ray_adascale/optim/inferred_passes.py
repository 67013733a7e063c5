"""Backward passes of a loop that AdaScale does not own: counted as autograd shows them, and checked."""

from __future__ import annotations

from typing import Any, cast

import torch

from .._torch import count_of_writes, local_part, without_gradients
from ..batch import StepPlan
from ..measure.norms import take_norm
from ..measure.observers import GradientObserver, PassListener
from .gradient_guard import CLEARED
from .measurement import Measurement
from .step_plans import StepPlans
from .step_sums import StepSums

_UNSAMPLED = 3
"""Measured steps in a row without a sample before a warning."""


class InferredPasses:
    """Tells a :class:`Measurement` of the passes that begin and end, unless a loop of our own tells (:meth:`told`).

    Args:
        measurement: Is told.
        plans: Has the plans of the steps.

    Attributes:
        passes: Backward passes so far in this step.
        skipped_by_scaler: Whether a GradScaler left out the last complete step, as the clearing of its gradients shows.
    """

    _anew: StepPlan | None = None
    """Announced since an exception ended a pass: of the step that begins anew."""

    def __init__(self, measurement: Measurement, plans: StepPlans) -> None:
        self.measurement, self.plans = measurement, plans
        self.skipped_by_scaler = self._told = False
        self._stepped_with: tuple[int, int] | None = None
        self._clear_passes()
        measurement.begun_by(cast(PassListener, self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.measurement.begun_by(cast(PassListener, self))
        self._clear_passes()
        self.declare(self.plans.declared)

    def told(self, told: bool) -> None:
        """Leave it to the loop to tell of its passes, or infer them again. At a step boundary."""
        self._told, self.measurement.foreign = told, False
        self.measurement.begun_by(None if told else cast(PassListener, self))
        self._watch()

    # ---- the plan of steps ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """Plan of the step under way, as known so far; between steps, the plan of a full step."""
        return self.measurement.step.last or self.plans.current

    @property
    def at_boundary(self) -> bool:
        """Whether there was no backward pass since the last step."""
        return not self.measurement.step.under_way

    @property
    def is_last(self) -> bool:
        """Whether the backward pass that has ended last is the last one of its step."""
        return self.plan.passes == 1 or (self.measurement.step.under_way and self.measurement.step.last is not None)

    @property
    def accumulating(self) -> bool:
        """Whether there was a backward pass, and the step's last is yet to come."""
        return self.measurement.step.under_way and self.measurement.step.last is None

    @property
    def made(self) -> int:
        """Backward passes of the step under way; none of a step that was never taken, or that an exception has broken off."""
        return self.passes if self.measurement.step.sums is None and not self.measurement.step.passing else 0

    def declare(self, plan: StepPlan) -> None:
        """Set the plan of the steps from the next one on. At a step boundary."""
        self.plans.declare(plan)
        self.measurement.attach()
        self._watch()

    def expect(self, passes: int, scale: float | None, loss_divided_by: int | None) -> None:
        """Shorten the step under way, or at a step boundary the next one; the steps after it are full ones.

        Args:
            passes: As in :meth:`AdaScale.expect_passes`, also the next two.
            scale: S of the step.
            loss_divided_by: Number that the loss of each pass is divided by.

        Raises:
            ValueError: The step can't have this number of passes.
        """
        declared, made = self.plans.declared, self.made
        if isinstance(passes, bool) or not isinstance(passes, int) or not made < passes <= declared.passes:
            raise ValueError(
                f"Invalid {passes=}. This step may have {made + 1} to {declared.passes} backward passes: {made} were made, and "
                f"num_gradients_to_accumulate is {declared.passes}. Call expect_passes() before the last pass begins."
            )
        if loss_divided_by is not None and (loss_divided_by < 1 or declared.loss_divisor is not None):
            raise ValueError(f"Invalid {loss_divided_by=}. Must be at least 1, and needs is_scaled_loss=True.")
        plan = declared.shortened(passes, scale, loss_divided_by)
        if self.measurement.step.sums is not None:
            self.begin_step()  # of a step that was never taken
        self._anew = plan if self.measurement.step.passing else None
        self.plans.expect(plan)

    def resume(self, ended: int, unsampled: int = 0) -> None:
        """Continue after a number of steps. At a step boundary. The arguments are those of :meth:`StepPlans.resume`."""
        self.begin_step()
        self.plans.resume(ended, unsampled)
        self._watch()

    def _watch(self) -> None:
        """Let the hooks take norms in a step that is measured."""
        self.measurement.measure(self.plans.measured)

    # ---- the passes of a step ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear the passes since the last step."""
        measurement = self.measurement
        if self._told and self.accumulating:
            raise RuntimeError(CLEARED[True])
        if not self._told:
            measurement.refresh()
        if measurement.step.under_way or (measurement.observer is not None and measurement.step.exchange.sent):
            self.skipped_by_scaler |= measurement.step.sums is not None and measurement.scales_loss
            self._clear_passes()

    def _clear_passes(self) -> None:
        self._anew = None
        if self.measurement.step.under_way:
            self.plans.expect(None)  # else it is of a step yet to begin: gradients may be cleared before it
        self.passes = 0
        self._too_many = self._uncleared = self._broken = False
        self.measurement.clear()

    def end_step(self) -> None:
        """End the step: it was taken, or is left out for good."""
        sampled = self.measurement.observer is None or self.measurement.sampled
        self.passes = 0
        self._too_many = self._uncleared = self._broken = False
        self.measurement.end_step()
        self.plans.end(sampled=sampled)
        if self.plans.unsampled == _UNSAMPLED:
            self.measurement.warn_of_unseen(_UNSAMPLED)
        if self.measurement.observer is not None:
            self._watch()
            if not self._told:
                self._stepped_with = self._first_gradient()

    def _first_gradient(self) -> tuple[int, int] | None:
        """Return the address and the number of writes of the first gradient; None without one. Clearing changes them."""
        grad = next((p.grad for p in self.measurement.params if p.grad is not None), None)
        if grad is None:
            return None
        address = local_part(grad).data_ptr() if grad.layout is torch.strided else 0
        return address, count_of_writes(grad)

    @without_gradients
    def on_begin(self, observer: GradientObserver) -> bool:
        self.measurement.workers.require_group()
        if self.plans.lacks_samples:
            raise self._no_samples()
        if self.measurement.step.sums is not None:
            # A complete step was never taken, as after an overflow that a GradScaler found. Were its gradients cleared since?
            too_many = self._has_gradients(observer)
            self.skipped_by_scaler |= self.measurement.scales_loss and not too_many
            self._clear_passes()
            self._too_many = too_many
        elif self._stepped_with is not None and self._stepped_with == self._first_gradient():
            self._uncleared = self._has_gradients(observer)
        self._stepped_with = None
        if self.measurement.step.passing:
            # An exception has ended the pass before. Were its gradients cleared since, and those of the step's earlier passes?
            self._broken |= self._has_gradients(observer)
            if not self._broken:
                anew = self._anew
                self._clear_passes()
                self.plans.expect(anew)
        last = self.plans.if_last(self.passes + 1)
        self.measurement.begin(last)
        return last is not None

    def _has_gradients(self, observer: GradientObserver) -> bool:
        """Whether gradients other than zero are left. Waits for the device."""
        grads = observer.gradients_left(self.measurement.params)
        return any(bool(take_norm(local_part(grad.detach())) != 0) for grad in grads)

    def on_local(self, observer: GradientObserver) -> None:
        self.passes += 1
        self.measurement.on_local(observer)

    def on_reduced(self, observer: GradientObserver) -> None:
        self.measurement.end()

    # ---- the end of a step ---------------------------------------------------------------------------------------

    def complete(self, caller: str = "step", *, scaled: bool = False) -> None:
        """Take part in the reduction that is still under way on other workers, if there is one: no further pass comes.

        It must be called before any other collective of the step.

        Args:
            caller: Method that an error names.
            scaled: Whether the gradients still have the loss scale, if there is one. torch's scaler has removed it before a step.

        Raises:
            RuntimeError: Passes are missing, there were too many, or the gradients of the step before were not cleared.
        """
        measurement, workers = self.measurement, self.measurement.workers
        if self._broken or measurement.step.passing:
            raise RuntimeError(
                "A backward pass of this step has ended in an exception, and has left incomplete gradients. Where the loop "
                "catches it, call optimizer.zero_grad(), and make all backward passes of the step again."
            )
        if self._too_many:
            raise RuntimeError(
                f"Gradients of more than {self.plan.passes} backward passes were added up before step(), so the gain is not "
                "known. Add the losses and call backward() once, or set_num_gradients_to_accumulate() to the number of passes "
                "(AdaptiveDataParallel: all but the last under no_sync())."
            )
        if self._uncleared:
            raise RuntimeError(
                "The gradients of the last step were not cleared before the next backward pass, which has added to them. Call "
                "optimizer.zero_grad() after each step()."
            )
        if measurement.step.sums is not None:
            return
        workers.require_group()
        if measurement.observer is None:
            return
        if self.plans.lacks_samples:
            raise self._no_samples()
        lacks_passes = self.accumulating
        if not self.plans.measured:
            if lacks_passes:
                raise self._too_early(caller)
            measurement.finish(self.plan, scaled=scaled)
        elif workers.reduce:
            # A backward pass reached no parameter here: a sample of zero. The others are in the reduction already.
            if not measurement.join(self.plan):
                raise self._too_early(caller)  # no worker has seen all passes, so that was not the reason
        elif lacks_passes:
            raise self._too_early(caller)

    def finish(self) -> StepSums:
        """Return the sums of the step, once it is :meth:`complete`."""
        self.complete()
        sums = self.measurement.step.sums
        return self.measurement.unseen(self.plan) if sums is None else self.measurement.checked(sums)

    def _no_samples(self) -> RuntimeError:
        return RuntimeError(
            f"One gradient sample a step at scale {self.plans.declared.scale:g} tells nothing of the noise, so the gain is "
            "unknown. Make two backward passes of half the size: AdaScale(..., num_gradients_to_accumulate=2), or "
            "AdaScaleConfig(accumulation=2, per_worker_batch_size=half of it)."
        )

    def _too_early(self, caller: str) -> RuntimeError:
        if self.plans.step_end is not None:
            return RuntimeError(
                f"{caller}() after backward pass {self.passes} of a step, which has further ones by its settings. Call it after "
                "the last pass. With Lightning's manual optimization the passes are AdaScaleConfig(accumulation=...), or those "
                "of expect_passes(); with AdaptiveDataParallel the last pass is the one that is not under no_sync()."
            )
        return RuntimeError(
            f"{caller}() after {self.passes} of {self.plan.passes} backward passes. Call it after the last one. If a step has "
            f"fewer, as the last of an epoch may, call expect_passes({self.passes}) before its last pass; if all have, "
            "set_num_gradients_to_accumulate() first."
        )
