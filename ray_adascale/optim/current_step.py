"""The optimizer step under way: its plan, its backward passes, the norms measured in
them, and their sums over the workers.

Two kinds of loops drive a :class:`CurrentStep`. ``Run`` tells of its passes:
:meth:`~CurrentStep.begin_pass`, the backward pass, :meth:`~CurrentStep.end_pass`. A loop of the
user's tells nothing: autograd shows where passes begin and end, and they are counted
and checked here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .._torch import (
    Versions,
    count_of_writes,
    versions,
    without_gradients,
)
from ..batch import StepPlan
from ..measure.autograd import on_pass
from ..measure.identity import Identity, due
from ..measure.norms import take_norm
from ..measure.observers import GradientObserver
from ..sharding.kinds import sharding_of
from ..sharding.kinds.sharding import Preconditioner, Sharding, Wanted
from ..sharding.known_groups import KnownGroups
from .guards import CLEARED, FOREIGN_PASS, UnchangedGradients
from .next_state import Averaging
from .step_sums import (
    OWN,
    Numbers,
    Packed,
    StepEnd,
    StepSums,
    checked_weights,
    constant,
    mean_sq_norm,
    numbers_of_weights,
)
from .workers import Workers


@dataclass(eq=False)
class Progress:
    """The passes of a step up to now. Replaced whole as a step ends or is cleared.

    Attributes:
        under_way: Whether there was a pass since the last step.
        passing: Whether a pass has begun and not ended. Between passes: an exception
            has ended it.
        local_ended: Whether the pass has ended on this worker; reduced gradients may be
            on their way.
        last_plan: The step's plan, once its last pass has begun.
        measured: Whether the pass is measured.
        norms: ‖g_i‖² of each pass on this worker, as measured.
        final: The gradients that the step was summed with.
        numbers: Numbers to be summed over the workers.
        sent: Whether the all-reduce has begun.
        travelling: The numbers on their way.
        sums: The sums of the step, once its last pass has ended.
    """

    under_way: bool = False
    passing: bool = False
    local_ended: bool = False
    last_plan: StepPlan | None = None
    measured: bool = False
    norms: list[Tensor] = field(default_factory=list)
    final: Versions | None = None
    numbers: dict[str, Tensor] = field(default_factory=dict)
    sent: bool = False
    travelling: tuple[Packed, dist.Work | None] | None = None
    sums: StepSums | None = None


class CurrentStep:
    """The step under way.

    Args:
        sharding: The kind of sharding of the gradients.
        averaging: Decides which steps are measured.
        workers: Workers that share the batch.
        grad_scaler: Scales the loss.
        to_mean: Divide the gradient, after the last pass, so that it is the mean over
            the passes. False where the loop does so.
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of.

    Attributes:
        grad_scaler: Scales the loss; None without one.
        declared: Plan of a full step.
        planned: The step's plan, as known so far.
        ended: Steps that have ended, with those that were left out.
        unsampled: Measured steps in a row, up to now, that have yielded no sample. The
            next step is then measured too.
        measured: Whether the step is measured.
        inferred: The passes of a loop that does not tell.
        observer: Measures the norms; None where there is nothing to measure.
        weights: w of this worker's gradient sample in each pass; None: all 1/n.
        by_units: Whether a loop that tells weights its samples by units. Weights by
            examples are right by construction, and none is 0.
        step: Its passes up to now.
        replicated: Numbers of the last complete step that each worker took from its own
            copy of the reduced gradient.
        unseen: Parameters of the last step whose gradients were not measured.
        skipped_by_scaler: Whether a GradScaler left out the last complete step, as the
            clearing of its gradients shows.
    """

    def __init__(
        self,
        sharding: Sharding,
        averaging: Averaging,
        workers: Workers,
        *,
        grad_scaler: torch.amp.GradScaler | None,
        to_mean: bool,
        precondition: Preconditioner | None,
    ) -> None:
        self.sharding = sharding
        self.workers = workers
        self._averaging = averaging
        self.grad_scaler = grad_scaler
        self._to_mean = to_mean
        self._precondition = precondition
        self._unchanged = UnchangedGradients()
        self._known = KnownGroups(sharding.optimizer.param_groups, "AdaScale")
        self.inferred = InferredPasses()
        self.observer: GradientObserver | None = None
        self.weights: Sequence[float] | None = None
        self.by_units = False
        self.replicated: Tensor | None = None
        self._of_run = False
        self._unhooked = False
        self._checked = False
        self.skipped_by_scaler = False
        self._notice: Sequence[RemovableHandle] = ()
        self._shared: dict[str, Tensor] = {}
        self._measured_steps = 0  # of this start
        self._wanted: Wanted | None = None  # of the observer
        # the gradients at the announcement of a step that no observer will see; alike on
        # all workers, so not where they are sharded
        self._announced_with: Versions | None = None
        self.unseen: Sequence[Tensor] = ()
        self.declared = StepPlan(workers=workers.count)
        self.step = Progress()
        self._next(0, 0)
        sharding.state.listen(self)

    def __getstate__(self) -> dict[str, Any]:
        # Hooks, callables and process groups belong to this process.
        gone: dict[str, Any] = {
            "observer": None,
            "step": None,
            "_notice": (),
            "unseen": (),
            "_shared": {},
        }
        return {**self.__dict__, **gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.step = Progress()
        self._unchanged.forget()
        self.inferred.clear()
        self.declare(self.declared)

    # ---- the plan --------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """Plan of the step under way, as known so far; between steps, the plan of a
        full step.
        """
        return self.step.last_plan or self.planned

    @property
    def lacks_samples(self) -> bool:
        """Whether the steps to come can't measure their noise: they have one
        gradient sample at S ≠ 1.
        """
        return self.declared.scale != 1 and self.declared.num_samples == 1

    @property
    def is_last(self) -> bool:
        """Whether the backward pass that has ended last is the last one of its step."""
        return self.plan.passes == 1 or (
            self.step.under_way and self.step.last_plan is not None
        )

    @property
    def accumulating(self) -> bool:
        """Whether there was a backward pass, and the step's last is yet to come."""
        return self.step.under_way and self.step.last_plan is None

    def set_loop(self, *, of_run: bool) -> None:
        """Set whether a ``Run`` or a loop of the user's makes the passes from now on.
        A ``Run`` begins and ends each pass here. The passes of a user's loop are
        inferred. Call it at a step boundary.
        """
        self._of_run = of_run
        self._unchanged.of_run = of_run
        self._notice_foreign()
        self._watch()

    @property
    def is_users_loop(self) -> bool:
        """Whether the passes are inferred, see :meth:`set_loop`."""
        return not self._of_run

    @property
    def shows_gradients(self) -> bool:
        """Whether the gradients of a user's loop can be compared with the measured
        norms: they are not sharded, and the norms are Euclidean.
        """
        return (
            self.is_users_loop
            and self._precondition is None
            and self.sharding.in_place
            and not self.sharding.sharded
        )

    def declare(self, plan: StepPlan) -> None:
        """Set the plan of the steps from the next one on. At a step boundary."""
        self.declared = plan
        self._next(self.ended, self.unsampled)
        self._attach()
        self._watch()

    def resume(self, ended: int, unsampled: int = 0) -> None:
        """Continue after a number of steps that have ended, and measured ones
        without a sample. At a step boundary.
        """
        self.discard_passes()
        self._next(ended, unsampled)
        self._watch()

    def announce(self, plan: StepPlan) -> None:
        """Set the plan of the step under way, or else of the next one."""
        self.planned = plan
        if self.observer is None and not self.sharding.sharded:
            self._announced_with = versions(self.sharding.accumulated())

    def _next(self, ended: int, unsampled: int) -> None:
        self.ended = ended
        self.unsampled = unsampled
        self.planned = self.declared
        self._announced_with = None
        self.measured = unsampled > 0 or self._averaging.measures(ended, self.declared)

    # ---- the observer ----------------------------------------------------------------

    @property
    def params(self) -> list[Tensor]:
        return self.sharding.params

    @property
    def device(self) -> torch.device:
        """Device of the statistics."""
        return self.sharding.device

    @property
    def scales_loss(self) -> bool:
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    def _notice_foreign(self) -> None:
        """Notice passes that nobody tells of also where there is no observer."""
        for handle in self._notice:
            handle.remove()
        self._notice = ()
        ref = weakref.ref(self)

        def notice(param: Tensor) -> None:
            current = ref()
            if current is not None and not current.step.passing:
                raise RuntimeError(FOREIGN_PASS)

        if self._of_run and self.observer is None:
            self._notice = on_pass(self.params, notice)

    def _attach(self) -> None:
        """Install an observer, unless one fits already. A step with a single sample
        at S = 1 needs none.
        """
        if self._unhooked:
            return
        self.sharding.check()
        plan = self.declared
        several = plan.num_samples > 1
        one_pass = plan.passes == 1
        needed = several or plan.scale != 1
        wanted = Wanted(self.workers.count, several, one_pass, self._precondition)
        if needed and self.observer is not None and wanted == self._wanted:
            return
        self._detach()
        if needed:
            self._wanted = wanted
            self.observer = self.sharding.observe(self, wanted)
            self.observer.measure(False)
        self._notice_foreign()

    def add_group(self) -> None:
        """Watch a parameter group that AdaScale has added to the optimizer."""
        self._known = KnownGroups(self.sharding.optimizer.param_groups, "AdaScale")
        self.renew()

    def renew(self) -> None:
        """Install another observer: a parameter group was added, or an OSS has now a
        ShardedDataParallel, which calls this.
        """
        self._detach()
        self.sharding = sharding_of(self.sharding.optimizer, self.sharding.model)
        self._attach()
        if not self._of_run:
            self._watch()

    def _detach(self) -> None:
        if self.observer is not None:
            self.observer.detach()
        self.observer = None
        self._checked = False

    def unhook(self) -> None:
        """Stop watching for good."""
        self._detach()
        self._unhooked = True

    def refresh(self) -> None:
        """Watch parameters that were cast, moved or resized. Called before the forward pass
        of a step, if the loop tells.
        """
        if self.observer is not None:
            self.observer.refresh()

    def _watch(self) -> None:
        """Let the hooks take norms in a step that is measured, and notice passes
        alone in others.
        """
        if self.observer is None:
            return
        if self.observer.measures != self.measured:
            self.observer.measure(self.measured)
        if (identity := self.observer.identity) is not None:
            checked = self.measured and due(
                self.ended, on_cpu=self.device.type == "cpu"
            )
            if checked or self._checked:
                identity.begin(checked)
            self._checked = checked

    def set_weights(self, weights: Iterable[float | Tensor] | None) -> None:
        """Set w of this worker's gradient sample in each pass; None: all 1/n.

        Raises:
            RuntimeError: The step's last pass has ended, with the weights of before.
            ValueError: A weight is negative or not finite.
        """
        late = (
            weights is not None
            and self.step.last_plan is not None
            and not self.step.passing
        )
        if late and any(p.grad is not None for p in self.params):
            raise RuntimeError(
                "sample_weights was set after the step's last backward pass. Set it "
                "before: count its tokens first."
            )
        self.weights = None if weights is None else checked_weights(weights)

    # ---- the passes ------------------------------------------------------------------

    def discard_passes(self) -> None:
        """Clear the passes since the last step."""
        if self._of_run and self.accumulating:
            raise RuntimeError(CLEARED[True])
        if not self._of_run:
            self.refresh()
        if self.step.under_way or (self.observer is not None and self.step.sent):
            self.skipped_by_scaler |= self.step.sums is not None and self.scales_loss
            self.clear()
        elif self._announced_with is not None and self._has_unseen_gradients():
            self.planned = self.declared
            self._announced_with = None

    def _has_unseen_gradients(self) -> bool:
        """Whether there were passes since the announcement, which no observer sees: a
        gradient has changed, and is not zero. Waits for the device.
        """
        grads = self.sharding.accumulated()
        return self._announced_with != versions(grads) and any(
            bool(take_norm(grad.detach()) != 0) for grad in grads if grad is not None
        )

    def clear(self) -> None:
        """Forget the passes up to now."""
        if self.step.under_way:
            # else it is of a step yet to begin: gradients may be cleared before it
            self.planned = self.declared
        self._forget()

    def _forget(self) -> None:
        self.step = Progress()
        self._unchanged.forget()
        self.inferred.clear()
        if self._checked and self.observer is not None:
            cast(Identity, self.observer.identity).begin(True)

    def share(self, **numbers: Tensor) -> None:
        """Sum numbers over the workers in this step's all-reduce. Called before the
        step's last pass, on all workers alike.

        If the step is not measured, and each worker takes the norm of the reduced
        gradient by itself, the numbers travel from now on, while the gradients are
        computed. Their sums are ``last_step.shared``.

        Args:
            **numbers: 0-dim each.

        Raises:
            ValueError: A number is not 0-dim, or has a name of the statistics' own.
        """
        device = self.device
        observer = self.observer
        self._shared = {}
        for name, number in numbers.items():
            if number.dim() or name in OWN:
                raise ValueError(
                    f"Invalid {name} of shape {tuple(number.shape)}. Must be 0-dim, "
                    f"and not {OWN}."
                )
            self._shared[name] = number.to(device, torch.float64)
        if observer is None or self.measured or observer.sharded:
            return  # the numbers travel with others
        if self._shared and self.workers.reduce:
            with torch.no_grad():
                self.step.numbers.update(self._shared)
                self._start()

    def begin_pass(self, last: StepPlan | None) -> None:
        """Begin a pass, before or at its first gradient.

        Args:
            last: The step's plan, if the pass is its last; else None.
        """
        step = self.step
        step.measured = self.measured
        if self.observer is not None:
            if self._of_run:
                self.observer.ignore(not step.measured)
            if not step.passing:
                fault = self._unchanged.fault(self.sharding.accumulated)
                if fault is not None:
                    self._known.check(self.sharding.optimizer.param_groups)
                    raise RuntimeError(fault)
        step.under_way = step.passing = True
        step.last_plan = last
        step.local_ended = False

    @without_gradients
    def on_begin(self, observer: GradientObserver) -> bool:
        """Begin a pass at its first gradient, unless the loop has; return whether it
        is the step's last.
        """
        if self._of_run:
            if not self.step.passing:
                raise RuntimeError(FOREIGN_PASS)
            return self.step.last_plan is not None
        return self.inferred.begin(self, observer)

    @without_gradients
    def on_local(self, observer: GradientObserver) -> None:
        """End the pass on this worker: take its norm, and send what is known.
        Reduced gradients may still be on their way.
        """
        step = self.step
        if not self._of_run:
            self.inferred.made += 1
        if not step.passing or step.local_ended:
            return
        step.local_ended = True
        if step.measured and (step.last_plan is None or step.last_plan.num_samples > 1):
            step.norms.append(observer.local_sq_norms())
        if step.last_plan is not None and not observer.sharded and not step.sent:
            # Only A is still in parts. Sent now, it travels behind the last gradients,
            # which are awaited anyway.
            self._send({}, step.last_plan, seen=True)

    def on_reduced(self, observer: GradientObserver) -> None:
        if not self._of_run:
            self.end_pass()

    def end_pass(self) -> None:
        """End the pass. Collective, if it is the step's last."""
        step = self.step
        if self.observer is not None:
            if step.measured and not step.local_ended:
                step.norms.append(self._no_norms())
            if step.last_plan is not None:
                self._sum_own(step.last_plan)
            elif self._of_run or self._measured_steps:
                # A loop that does not tell: not in its first step, where DDP may
                # rebuild its buckets.
                self._unchanged.note(self.sharding.accumulated(), one=not step.measured)
            if self._of_run:
                self.observer.ignore(False)
        step.passing = False

    # ---- the end of a step -----------------------------------------------------------

    def ensure_summed(self, caller: str = "step", *, scaled: bool = False) -> None:
        """Take part in the reduction that is still under way on other workers, if there
        is one: no further pass comes.

        It must be called before any other collective of the step.

        Args:
            caller: Method that an error names.
            scaled: Whether the gradients still have the loss scale, if there is one.
                torch's scaler has removed it before a step.

        Raises:
            RuntimeError: Passes are missing, there were too many, or the gradients of
                the step before were not cleared.
        """
        self.inferred.check(self)
        if self.step.sums is not None:
            return
        self.workers.require_group()
        if self.observer is None:
            if not self._of_run:
                self._correct_unseen()
            return
        if self._of_run:
            raise RuntimeError(
                f"{caller}() comes before the backward pass of the step's last "
                "micro-batch. In a loop over the run, run.backward() reduces the "
                "gradients in that pass: leave the call out, or make it after "
                "run.backward(), `if run.is_last_pass:`."
            )
        if self.lacks_samples:
            raise self.no_samples()
        lacks_passes = self.accumulating
        if not self.measured:
            if lacks_passes:
                raise self.inferred.too_early(self, caller)
            self._sum_own(self.plan, scaled=scaled)
        elif self.workers.reduce:
            # A backward pass reached no parameter here: a sample of zero. The others
            # are in the reduction already.
            if not self._sum_as_absent(self.plan):
                # no worker has seen all passes, so that was not the reason
                raise self.inferred.too_early(self, caller)
        elif lacks_passes:
            raise self.inferred.too_early(self, caller)

    def summed(self) -> StepSums:
        """Return the sums of the step, once it is :meth:`ensure_summed`."""
        self._known.check(self.sharding.optimizer.param_groups)
        self.ensure_summed()
        if self.step.sums is None:
            return self._unobserved(self.plan)
        return self._looked_at_again(self.step.sums)

    @without_gradients
    def _sum_own(self, plan: StepPlan, *, scaled: bool = True) -> None:
        """Sum the step's numbers over the workers, once its last pass has ended.
        Collective.
        """
        self._store_sums(self._gather(plan, seen=True, scaled=scaled))

    @without_gradients
    def _correct_unseen(self) -> None:
        """Make the gradients of a short step the mean over its passes, where no observer
        sees them and the loss was divided by another number.
        """
        plan = self.plan
        if self._to_mean and plan.multiple_of_mean != 1:
            self.divide_to_mean(plan)
            self.step.under_way = True
            self.step.last_plan = replace(plan, loss_divisor=None)

    @without_gradients
    def _sum_as_absent(self, plan: StepPlan) -> bool:
        """End a step whose last pass this worker has not seen: the others may wait for
        its part. Collective.

        Returns:
            Whether the step has ended. If not, no worker has seen all passes, and
            further ones may come.
        """
        self.step.measured = True
        sums = self._gather(plan, seen=False, scaled=True)
        if self.step.under_way and not bool(sums.numbers["complete"] > 0):
            self.step.numbers = {}
            self.step.sent = False
            self.step.travelling = None
            return False
        self._store_sums(sums)
        return True

    def _store_sums(self, sums: StepSums) -> None:
        self.step.sums = sums
        if self._to_mean:
            self.divide_to_mean(sums.plan)
        self._accept_gradients()

    def _accept_gradients(self) -> None:
        """Take the step's gradients as they are now: a change of our own has kept
        them finite.
        """
        self.step.final = versions(self.sharding.gradients())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Return a context in which this package changes the gradients of a complete
        step, and keeps them finite.
        """
        if self.step.sums is not None:
            self._looked_at_again(self.step.sums)
        yield
        if self.step.sums is not None:
            self._accept_gradients()

    @without_gradients
    def _looked_at_again(self, sums: StepSums) -> StepSums:
        """Return the sums, with another look whether gradients are finite if the loop
        has changed them since.

        Collective, if gradients are sharded and were changed.
        """
        if self.step.final is None or self.step.final == versions(
            self.sharding.gradients()
        ):
            return sums
        self.step.sums = sums = replace(
            sums,
            numbers={
                **sums.numbers,
                "late": self.sharding.finite(
                    self.workers.group, several=self.workers.reduce
                ),
            },
            packed=None,
        )
        self._accept_gradients()
        return sums

    def divide_to_mean(self, plan: StepPlan) -> None:
        """Divide the gradients that the passes add up to, so that they are ḡ."""
        if plan.multiple_of_mean != 1 and (grads := self.sharding.numbers()):
            torch._foreach_div_(grads, plan.multiple_of_mean)

    def end_step(self) -> None:
        """End the step: it was taken, or is left out for good."""
        sampled = self.observer is None
        if self.step.sums is not None:
            sampled = sampled or self.step.sums.sampled
        unsampled = 0
        if self.measured and not sampled:
            unsampled = self.unsampled + 1
        self._measured_steps += self.measured
        self._forget()
        self._shared = {}
        self._next(self.ended + 1, unsampled)
        if self.observer is not None:
            self._watch()
            if not self._of_run:
                self.inferred.end_step(self)

    # ---- the sums over the workers ---------------------------------------------------

    def _send(
        self, numbers: Mapping[str, Tensor], plan: StepPlan, *, seen: bool
    ) -> None:
        """Start the step's all-reduce: ``numbers``, what is shared; if it is
        measured A, and whether all passes were seen.
        """
        out = self.step.numbers
        device = self.device
        out.update(numbers)
        if self.step.measured:
            out["a"] = (
                mean_sq_norm(plan, self.step.norms, self.weights)
                if self.step.norms
                else self._no_norms()
            )
            out["complete"] = constant(float(seen), device)
            if self._compares_weights:
                out["weights"] = numbers_of_weights(plan, self.weights, device)
            if self._checked:
                # DDP and our own reduction take the mean over workers, and passes add
                # up.
                samples = cast(
                    Identity, cast(GradientObserver, self.observer).identity
                ).of_samples(device)
                out["samples"] = samples / self.workers.count
        out.update(self._shared)
        self._start()

    @property
    def _compares_weights(self) -> bool:
        """Whether the weights of a measured step travel; alike on all workers."""
        if self._of_run:
            return self.by_units
        return self.workers.reduce or self.weights is not None

    def _start(self) -> None:
        step = self.step
        if step.numbers and not step.sent and self.workers.reduce:
            packed = Packed.of(step.numbers)
            step.travelling = (
                packed,
                dist.all_reduce(packed.tensor, group=self.workers.group, async_op=True),
            )
        step.sent = True

    def _wait(self) -> tuple[Numbers, Packed | None]:
        self._start()
        if self.step.travelling is None:
            return self.step.numbers, None
        packed, work = self.step.travelling
        if work is not None:
            work.wait()
        return packed.apart(), packed

    def _no_norms(self) -> Tensor:
        return torch.zeros(
            len(self.sharding.groups), dtype=torch.float64, device=self.device
        )

    def _gather(self, plan: StepPlan, *, seen: bool, scaled: bool) -> StepSums:
        """Return the step's numbers: those that each worker has by itself, and the
        sums of the others. Collective.
        """
        observer = self.observer
        assert observer is not None
        own: dict[str, Tensor] = {}
        if observer.sharded:
            parts = {"c": observer.reduced_sq_norms()}
            if self._checked:
                parts["reduced"] = observer.reduced_product().to(self.device)
            self._send(parts, plan, seen=seen)
        else:
            # Equal to the last bit on all workers, as their weights are: each takes C
            # from its own copy.
            own["c"] = observer.reduced_sq_norms()
            if not self.step.sent:
                self._send({}, plan, seen=seen)
        numbers, packed = self._wait()
        if self.workers.reduce:
            self.replicated = own.get("c")
        if self._checked and not observer.sharded:
            own["reduced"] = observer.reduced_product().to(self.device).view(1)
        if scaled and self.grad_scaler is not None and self.scales_loss:
            # scale(1) is the loss scale as a tensor; get_scale() would wait for the
            # device.
            own["loss_scale"] = self.grad_scaler.scale(constant(1.0, self.device))
        self.unseen = ()
        if self.step.measured:
            self.unseen = observer.find_unseen()
        return StepSums(
            plan,
            {**own, **numbers},
            None if own else packed,
            all_measured=not self.unseen,
            saw_all_passes=seen,
            weighted="weights" in numbers and self.weights is not None,
            shared_names=tuple(self._shared),
        )

    def _unobserved(self, plan: StepPlan) -> StepSums:
        """Return the sums of a step that no observer has seen: there is none at n =
        1 and S = 1, or its hooks did not run.
        """
        if self.observer is not None:
            self.unseen = self.observer.find_unseen()
        return StepSums(
            plan,
            {
                "check": self.sharding.finite(
                    self.workers.group, several=self.workers.reduce
                ),
                **self._shared,
            },
            shared_names=tuple(self._shared),
        )

    # ---- faults ----------------------------------------------------------------------

    def no_samples(self) -> RuntimeError:
        return RuntimeError(
            f"One gradient sample a step at scale {self.declared.scale:g} tells "
            "nothing of the noise, so the gain is unknown. Make two backward passes of "
            "half the size: AdaScale(..., num_gradients_to_accumulate=2), or "
            "AdaScaleConfig(accumulation=2, per_worker_batch_size=half of it)."
        )


class InferredPasses:
    """The passes of a loop that does not tell: autograd shows where each begins and
    ends. They are counted and checked here.

    Its methods get the step that the passes make. It holds no reference to it, so that
    a dropped optimizer is gone at once.

    Attributes:
        step_end: Decides which pass is a step's last; None: the declared number of
            passes does.
        made: Backward passes since the last step.
    """

    def __init__(self) -> None:
        self.step_end: StepEnd | None = None
        # the first gradient, if the last step may have left it
        self._stepped_with: tuple[int, int] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the passes up to now."""
        self.made = 0
        self._fault = ""  # a key of the faults: what is wrong with the gradients
        self._announced: StepPlan | None = (
            # since an exception ended a pass: the plan of the step that begins anew
            None
        )

    def expect(
        self,
        current: CurrentStep,
        passes: int,
        scale: float | None,
        loss_divided_by: int | None,
    ) -> None:
        """Shorten the step under way, or at a step boundary the next one; the steps
        after it are full ones.

        Args:
            current: The step under way.
            passes: As in :meth:`AdaScaleOptimizer.expect_passes`, also the next two.
            scale: S of the step.
            loss_divided_by: Number that the loss of each pass is divided by.

        Raises:
            ValueError: The step can't have this number of passes.
        """
        declared = current.declared
        made = self.made
        if current.step.sums is not None or current.step.passing:
            made = 0  # the next step is announced
        if (
            isinstance(passes, bool)
            or not isinstance(passes, int)
            or not made < passes <= declared.passes
        ):
            raise ValueError(
                f"Invalid {passes=}. This step may have {made + 1} to "
                f"{declared.passes} backward passes: {made} were made, and "
                f"num_gradients_to_accumulate is {declared.passes}. Call "
                "expect_passes() before the last pass begins."
            )
        if loss_divided_by is not None and (
            loss_divided_by < 1 or declared.loss_divisor is not None
        ):
            raise ValueError(
                f"Invalid {loss_divided_by=}. Must be at least 1, and needs "
                "is_scaled_loss=True."
            )
        plan = declared.shortened(passes, scale, loss_divided_by)
        if current.step.sums is not None:
            current.discard_passes()  # of a step that was never taken
        self._announced = None
        if current.step.passing:
            self._announced = plan
        current.announce(plan)

    def begin(self, current: CurrentStep, observer: GradientObserver) -> bool:
        """Begin a pass at its first gradient; return whether it is the step's last."""
        current.workers.require_group()
        if self.made == 0:
            observer.check_shapes()
        if current.lacks_samples:
            raise current.no_samples()
        self._look_at_the_step_before(current, observer)
        if current.step.passing:
            self._begin_after_an_exception(current, observer)
        number = self.made + 1
        last = None
        if number >= current.planned.passes:
            last = current.planned
        elif self.step_end is not None:
            last = self.step_end(number)
        current.begin_pass(last)
        return last is not None

    def _look_at_the_step_before(
        self, current: CurrentStep, observer: GradientObserver
    ) -> None:
        if current.step.sums is not None:
            # A complete step was never taken, as after an overflow that a GradScaler
            # found. Were its gradients cleared since?
            too_many = _has_gradients(current, observer)
            current.skipped_by_scaler |= current.scales_loss and not too_many
            current.clear()
            if too_many:
                self._fault = "too many"
        elif self._holds_the_gradient_stepped_with(current) and _has_gradients(
            current, observer
        ):
            self._fault = "uncleared"
        self._stepped_with = None

    def _begin_after_an_exception(
        self, current: CurrentStep, observer: GradientObserver
    ) -> None:
        """Begin the step anew, if the gradients of the pass that failed, and of the
        step's earlier ones, were cleared.
        """
        announced = self._announced
        if self._fault == "broken" or _has_gradients(current, observer):
            self._fault = "broken"
            return
        current.clear()
        current.planned = current.declared if announced is None else announced

    def check(self, current: CurrentStep) -> None:
        """Check that the gradients are those of a step.

        Raises:
            RuntimeError: They are not.
        """
        fault = "broken" if current.step.passing else self._fault
        if fault:
            raise RuntimeError(_FAULTS[fault].format(passes=current.plan.passes))

    def end_step(self, current: CurrentStep) -> None:
        """A step was taken. The next pass may find its gradients."""
        self._stepped_with = _first_gradient(current)

    def _holds_the_gradient_stepped_with(self, current: CurrentStep) -> bool:
        return self._stepped_with is not None and self._stepped_with == _first_gradient(
            current
        )

    def too_early(self, current: CurrentStep, caller: str) -> RuntimeError:
        """Return the error of a step that lacks passes."""
        observer = current.observer
        if observer is not None and (moved := observer.find_unseen()):
            return RuntimeError(
                f"{caller}() after {self.made} of {current.plan.passes} backward "
                f"passes that were seen: {len(moved)} parameters were cast or moved "
                "between the passes of a step (model.half(), .double(), .to()), and "
                "the later passes were not. Cast before the first pass of a step."
            )
        if self.step_end is not None:
            return RuntimeError(
                f"{caller}() after backward pass {self.made} of a step, which has "
                "further ones by its settings. Call it after the last pass. With "
                "Lightning's manual optimization the passes are "
                "AdaScaleConfig(accumulation=...), or those of expect_passes(); with "
                "AdaptiveDataParallel the last pass is the one that is not under "
                "no_sync()."
            )
        return RuntimeError(
            f"{caller}() after {self.made} of {current.plan.passes} backward passes. "
            "Call it after the last one. If a step has fewer, as the last of an epoch "
            f"may, call expect_passes({self.made}) before its last pass, and "
            f"expect_passes({self.made}, loss_divided_by={current.plan.passes}) if the "
            "loop still divides the loss by the number of a full step; if all steps "
            "have, call set_num_gradients_to_accumulate() first."
        )


def _has_gradients(current: CurrentStep, observer: GradientObserver) -> bool:
    """Whether gradients other than zero are left. Waits for the device."""
    grads = observer.gradients_left(current.params)
    return any(
        bool(take_norm(current.sharding.local(grad.detach())) != 0) for grad in grads
    )


def _first_gradient(current: CurrentStep) -> tuple[int, int] | None:
    """Return the address and the number of writes of the first gradient; None
    without one. Clearing changes them.
    """
    grad = next((p.grad for p in current.params if p.grad is not None), None)
    if grad is None:
        return None
    address = 0
    if grad.layout is torch.strided:
        address = current.sharding.local(grad).data_ptr()
    return address, count_of_writes(grad)


_FAULTS = {
    "broken": "A backward pass of this step has ended in an exception, and has left "
    "incomplete gradients. Where the loop catches it, call "
    "optimizer.zero_grad(), and make all backward passes of the step again.",
    "too many": "Gradients of more than {passes} backward passes were added up "
    "before step(), so the gain is not known. Does one micro-batch have "
    "several losses, as those of a GAN for real and for generated "
    "examples? Add the losses, and call backward() once: AdaScale would "
    "take each pass for a micro-batch of its own, whatever their number is "
    "set to. Or does the loop add up the gradients of several "
    "micro-batches? Set their number: set_num_gradients_to_accumulate(), "
    "in attach AdaScaleConfig(accumulation=...); with AdaptiveDataParallel "
    "all but the last are under no_sync().",
    "uncleared": "The gradients of the last step were not cleared before the next "
    "backward pass, which has added to them. Call optimizer.zero_grad() "
    "after each step().",
}
