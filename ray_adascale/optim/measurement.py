"""The gradient samples of one optimizer step: the norms measured in its backward passes, summed over workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._torch import Versions, versions, without_gradients
from .._warn import warn_on_first_worker
from ..batch import StepPlan
from ..measure.autograd import on_pass
from ..measure.identity import Identity, due
from ..measure.norms import finite_check, take_norm
from ..measure.observers import GradientObserver, PassListener
from ..sharding.gradients import Preconditioner, StepGradients, Wanted
from .exchange import Exchange, Numbers
from .gradient_guard import check_between
from .step_plans import StepPlans
from .step_sums import OWN, StepSums, constant, mean_sq_norm
from .workers import Workers


@dataclass(eq=False)
class StepUnderWay:
    """The passes of a step up to now.

    Attributes:
        exchange: The step's numbers that are summed over the workers.
        under_way: Whether there was a pass since the last step.
        passing: Whether a pass has begun and not ended. Between passes: an exception has ended it.
        local_ended: Whether the pass has ended on this worker; reduced gradients may be on their way.
        last: The step's plan, once its last pass has begun.
        measured: Whether the pass is measured.
        norms: ‖g_i‖² of each pass on this worker, as measured.
        left: The gradients after the last pass, if another follows.
        final: The gradients that the step was summed with.
        sums: The sums of the step, once its last pass has ended.
    """

    exchange: Exchange
    under_way: bool = False
    passing: bool = False
    local_ended: bool = False
    last: StepPlan | None = None
    measured: bool = False
    norms: list[Tensor] = field(default_factory=list)
    left: Versions | None = None
    final: Versions | None = None
    sums: StepSums | None = None


class Measurement:
    """Keeps the norms that an observer measures in the passes it is told of, and sums them over workers.

    The order of calls: for each pass :meth:`begin`, the backward pass, :meth:`end`. It counts no passes. Collective: the last
    pass of a step ends with one small all-reduce. In a step that is not measured the hooks on parameters only notice passes,
    and of its gradient only the norm is taken, once it is reduced.

    Args:
        optimizer: The wrapped one.
        gradients: Its gradients.
        plans: Has the plans of the steps.
        workers: Workers that share the batch.
        grad_scaler: Scales the loss.
        to_mean: Divide the gradient, after the last pass, so that it is the mean over the passes. False where the loop does so.
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of.
        model: The model, whose names a warning has.

    Attributes:
        observer: Measures the norms; None where there is nothing to measure.
        weights: w of this worker's gradient sample in each pass; None: all 1/n.
        step: The step under way.
        foreign: Whether gradients were accumulated in a pass that nobody has told of, as by ``loss.backward()`` beside the
            loop's own backward pass. ``autograd.grad`` accumulates none.
        replicated: Numbers of the last complete step that each worker took from its own copy of the reduced gradient: C per
            parameter group as measured, or the norm of one gradient; None without copies.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: StepGradients,
        plans: StepPlans,
        workers: Workers,
        *,
        grad_scaler: torch.amp.GradScaler | None,
        to_mean: bool,
        precondition: Preconditioner | None,
        model: torch.nn.Module | None,
    ) -> None:
        self._optimizer, self._gradients, self._plans = optimizer, gradients, plans
        self.workers, self._grad_scaler, self._to_mean = workers, grad_scaler, to_mean
        self._precondition, self._model = precondition, model
        self.observer: GradientObserver | None = None
        self._notice: Sequence[RemovableHandle] = ()
        self.weights: Sequence[float] | None = None
        self.replicated: Tensor | None = None
        self._shared: dict[str, Tensor] = {}
        self._unhooked = self.foreign = self._checked = self._told = False
        self._measured_steps = 0  # of this start
        self._wanted: Wanted | None = None  # of the observer
        self._unseen: Sequence[Tensor] = ()  # parameters of the last step whose gradients were not measured
        self._begins_passes = weakref.ref(cast(PassListener, self))
        self.clear()
        gradients.listen(self)

    def __getstate__(self) -> dict[str, Any]:
        # Hooks, callables and process groups belong to this process.
        gone = ("observer", "_model", "step", "_begins_passes")
        return {**self.__dict__, **dict.fromkeys(gone), "_notice": (), "_unseen": (), "_shared": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begins_passes = weakref.ref(cast(PassListener, self))
        self.clear()

    # ---- the observer --------------------------------------------------------------------------------------------

    def begun_by(self, listener: PassListener | None) -> None:
        """Let a listener begin passes, as the first gradient of each shows; None: the caller of :meth:`begin` does."""
        self._told = listener is None
        self._begins_passes = weakref.ref(cast(PassListener, self) if listener is None else listener)
        if self.observer is not None:
            self.observer.listener = self._begins_passes
        self._notice_foreign()

    def _notice_foreign(self) -> None:
        """Notice passes that nobody tells of also where there is no observer."""
        for handle in self._notice:
            handle.remove()
        self._notice, ref = (), weakref.ref(self)

        def notice(param: Tensor) -> None:
            if (measurement := ref()) is not None:
                measurement.foreign |= not measurement.step.passing

        if self._told and self.observer is None:
            self._notice = on_pass(self.params, notice)

    def attach(self) -> None:
        """Install an observer, unless one fits already. A step with a single sample at S = 1 needs none."""
        if self._unhooked:
            return
        self._gradients.check()
        plan = self._plans.declared
        several, one_pass = plan.num_samples > 1, plan.passes == 1
        needed = several or plan.scale != 1
        wanted = Wanted(self.workers.count, several, one_pass, self._precondition)
        if needed and self.observer is not None and wanted == self._wanted:
            return
        self.detach()
        if needed:
            self._wanted = wanted
            self.observer = self._gradients.observe(cast(PassListener, self._begins_passes()), wanted)
            self.observer.measure(False)
        self._notice_foreign()

    def renew(self) -> None:
        """Install another observer: a parameter group was added, or an OSS has now a ShardedDataParallel, which calls this."""
        self.detach()
        self.attach()
        listener = self._begins_passes()
        if listener is not None and listener is not cast(PassListener, self):
            self.measure(self._plans.measured)

    def detach(self) -> None:
        """Remove the observer."""
        if self.observer is not None:
            self.observer.detach()
        self.observer, self._checked = None, False

    def unhook(self) -> None:
        """Stop watching for good."""
        self.detach()
        self._unhooked = True

    def refresh(self) -> None:
        """Watch parameters that were cast or moved. Called before the forward pass of a step, if the loop tells."""
        if self.observer is not None:
            self.observer.refresh()

    @property
    def sampled(self) -> bool:
        """Whether the step yields a sample of the noise."""
        return self.step.sums is not None and self.step.sums.sampled

    def warn_of_unseen(self, steps: int) -> None:
        """Warn of the parameters that keep steps from being measured, if there are such."""
        if not self._unseen:
            return
        names: dict[Tensor, str] = {} if self._model is None else {p: n for n, p in self._model.named_parameters()}
        listing = ", ".join(names.get(p, f"one of shape {tuple(p.shape)}") for p in self._unseen[:3])
        warn_on_first_worker(
            f"The noise of {steps} steps in a row could not be measured, and the gain stays as it was: gradients of "
            f"{len(self._unseen)} parameters were not seen ({listing}). Build AdaScale after the model is on its device and in "
            "its dtype, and call the model's forward() rather than its parts."
        )

    def measure(self, measured: bool) -> None:
        """Let the hooks take norms from now on, or notice passes alone."""
        if self.observer is None:
            return
        if self.observer.measures != measured:
            self.observer.measure(measured)
        if (identity := self.observer.identity) is not None:
            checked = measured and due(self._plans.ended, on_cpu=self.device.type == "cpu")
            if checked or self._checked:
                identity.begin(checked)
            self._checked = checked

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Device of the statistics."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                device: torch.device = p.device
                return device
        return torch.device("cpu")

    def step_gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer will use on this worker."""
        return self._gradients.of_step()

    @property
    def scales_loss(self) -> bool:
        return self._grad_scaler is not None and self._grad_scaler.is_enabled()

    def set_weights(self, weights: Sequence[float] | None) -> None:
        """Set w of this worker's gradient sample in each pass; None: all 1/n.

        Raises:
            RuntimeError: The step's last pass has ended, with the weights of before.
        """
        late = weights is not None and self.step.last is not None and not self.step.passing
        if late and any(p.grad is not None for p in self.params):
            raise RuntimeError(
                "sample_weights was set after the step's last backward pass. Set it before: count its tokens first."
            )
        self.weights = weights

    # ---- what the caller shares ------------------------------------------------------------------------------------

    def share(self, **numbers: Tensor) -> None:
        """Sum numbers over the workers in this step's all-reduce. Called before the step's last pass, on all workers alike.

        If the step is not measured, and each worker takes the norm of the reduced gradient by itself, the numbers travel from now
        on, while the gradients are computed. Their sums are ``last_step.shared``.

        Args:
            **numbers: 0-dim each.

        Raises:
            ValueError: A number is not 0-dim, or has a name of the statistics' own.
        """
        device, observer = self.device, self.observer
        self._shared = {}
        for name, number in numbers.items():
            if number.dim() or name in OWN:
                raise ValueError(f"Invalid {name} of shape {tuple(number.shape)}. Must be 0-dim, and not {OWN}.")
            self._shared[name] = number.to(device, torch.float64)
        alone = observer is not None and not self._plans.measured and type(observer).holds_whole_gradient
        if self._shared and alone and self.workers.reduce:
            with torch.no_grad():
                self.step.exchange.add(self._shared)
                self.step.exchange.send()

    # ---- a step --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the passes since the last step."""
        self.step = StepUnderWay(Exchange(self.workers))
        if self._checked and self.observer is not None:
            cast(Identity, self.observer.identity).begin(True)

    def end_step(self) -> None:
        """Forget the step: it was taken, or is left out for good."""
        self._measured_steps += self._plans.measured
        self.clear()
        self._shared = {}

    def begin(self, last: StepPlan | None) -> None:
        """Begin a pass, before or at its first gradient.

        Args:
            last: The step's plan, if the pass is its last; else None.
        """
        self.step.measured = self._plans.measured
        if self.observer is not None:
            if self._told:
                self.observer.ignore(not self.step.measured)
            if self.step.left is not None and not self.step.passing:
                check_between(self.step.left, versions(self.gradients), told=self._told)
        self.step.under_way = self.step.passing = True
        self.step.last, self.step.local_ended = last, False

    def on_begin(self, observer: GradientObserver) -> bool:
        self.foreign |= not self.step.passing
        return self.step.passing and self.step.last is not None

    @without_gradients
    def on_local(self, observer: GradientObserver) -> None:
        """End the pass on this worker: take its norm, and send what is known. Reduced gradients may still be on their way."""
        if not self.step.passing or self.step.local_ended:
            return
        self.step.local_ended = True
        if self.step.measured and (self.step.last is None or self.step.last.num_samples > 1):
            self.step.norms.append(observer.local_sq_norms())
        if self.step.last is not None and observer.holds_whole_gradient and not self.step.exchange.sent:
            # Only A is still in parts. Sent now, it travels behind the last gradients, which are awaited anyway.
            self._send({}, self.step.last, seen=True)

    def on_reduced(self, observer: GradientObserver) -> None:
        """Called at the end of a pass. :meth:`end` follows, if it was told of."""

    def end(self) -> None:
        """End the pass. Collective, if it is the step's last."""
        if self.observer is not None:
            if self.step.measured and not self.step.local_ended:
                self.step.norms.append(self._no_norms())
            if self.step.last is not None:
                self.finish(self.step.last)
            elif self.step.measured and (self._told or self._measured_steps):
                # Not in its first step, where DDP may rebuild its buckets.
                self.step.left = versions(self.gradients)
            if self._told:
                self.observer.ignore(False)
        self.step.passing = False

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of the parameters."""
        return [p.grad for group in self._optimizer.param_groups for p in group["params"]]

    @without_gradients
    def finish(self, plan: StepPlan, *, scaled: bool = True) -> StepSums:
        """Sum the step's numbers over the workers, once its last pass has ended. Collective.

        Args:
            plan: The step's.
            scaled: Whether the gradients still have the loss scale, if there is one.
        """
        return self._complete(self._gather(plan, seen=True, scaled=scaled))

    @without_gradients
    def join(self, plan: StepPlan) -> bool:
        """End a step whose last pass this worker has not seen: the others may wait for its part. Collective.

        Args:
            plan: The step's.

        Returns:
            Whether the step has ended. If not, no worker has seen all passes, and further ones may come.
        """
        self.step.measured = True
        sums = self._gather(plan, seen=False, scaled=True)
        if self.step.under_way and not bool(sums.numbers["complete"] > 0):
            self.step.exchange = Exchange(self.workers)
            return False
        self._complete(sums)
        return True

    def _complete(self, sums: StepSums) -> StepSums:
        self.step.sums = sums
        if self._to_mean:
            self.divide_to_mean(sums.plan)
        self.accept_gradients()
        return sums

    def accept_gradients(self) -> None:
        """Take the step's gradients as they are now: a change of our own has kept them finite."""
        self.step.final = self._versions()

    def _versions(self) -> Versions:
        return versions(self._gradients.kept)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Return a context in which this package changes the gradients of a complete step, and keeps them finite."""
        if self.step.sums is not None:
            self.checked(self.step.sums)
        yield
        if self.step.sums is not None:
            self.accept_gradients()

    @without_gradients
    def checked(self, sums: StepSums) -> StepSums:
        """Return the sums, with another look whether gradients are finite if the loop has changed them since.

        Collective, if gradients are sharded and were changed.
        """
        if self.step.final is None or self.step.final == self._versions():
            return sums
        sums = replace(sums, numbers={**sums.numbers, "late": self._finite()}, packed=None)
        self.step.sums = sums
        self.accept_gradients()
        return sums

    def divide_to_mean(self, plan: StepPlan) -> None:
        """Divide the gradients that the passes add up to, so that they are ḡ."""
        if plan.multiple_of_mean != 1 and (grads := self.step_gradients()):
            torch._foreach_div_(grads, plan.multiple_of_mean)

    def _send(self, numbers: Numbers, plan: StepPlan, *, seen: bool) -> None:
        """Start the step's all-reduce: ``numbers``, what is shared; if it is measured A, and whether all passes were seen."""
        device, exchange = self.device, self.step.exchange
        exchange.add(numbers)
        if self.step.measured:
            local = mean_sq_norm(plan, self.step.norms, self.weights) if self.step.norms else self._no_norms()
            exchange.add({"a": local, "complete": constant(float(seen), device)})
            if self._checked:
                # DDP and our own reduction take the mean over workers, and passes add up.
                samples = cast(Identity, cast(GradientObserver, self.observer).identity).of_samples(device)
                exchange.add({"samples": samples / self.workers.count})
        exchange.add(self._shared)
        exchange.send()

    def _no_norms(self) -> Tensor:
        return torch.zeros(len(self._optimizer.param_groups), dtype=torch.float64, device=self.device)

    def _gather(self, plan: StepPlan, *, seen: bool, scaled: bool) -> StepSums:
        observer = cast(GradientObserver, self.observer)
        if observer.holds_whole_gradient:
            # Equal to the last bit on all workers, as their weights are: each takes C from its own copy.
            own = {"c": observer.reduced_sq_norms(0, 1)}
            if not self.step.exchange.sent:
                self._send({}, plan, seen=seen)
        else:
            own = {}
            rank, world_size = (
                (dist.get_rank(self.workers.group), self.workers.count) if self.workers.reduce else (0, 1)
            )
            found = {"c": observer.reduced_sq_norms(rank, world_size)}
            if self._checked and not type(observer).holds_whole_gradient:
                found["reduced"] = observer.reduced_product().to(self.device)
            self._send(found, plan, seen=seen)
        numbers, packed = self.step.exchange.wait()
        if self.workers.reduce:
            self.replicated = own.get("c")
            if not own and type(observer).holds_whole_gradient:
                # Workers took shares of C. The smallest gradient, which all of them have, stands for it.
                whole = [p.grad for p in self.params if p.grad is not None]
                self.replicated = take_norm(min(whole, key=Tensor.numel)).double().view(1) if whole else None
        if self._checked and type(observer).holds_whole_gradient:
            own["reduced"] = observer.reduced_product().to(self.device).view(1)
        if scaled and self._grad_scaler is not None and self.scales_loss:
            # scale(1) is the loss scale as a tensor; get_scale() would wait for the device.
            own["loss_scale"] = self._grad_scaler.scale(constant(1.0, self.device))
        self._unseen = observer.find_unseen() if self.step.measured else ()
        return StepSums(plan, {**own, **numbers}, None if own else packed, not self._unseen, seen, tuple(self._shared))

    def unseen(self, plan: StepPlan) -> StepSums:
        """Return the sums of a step that no observer has seen: there is none at n = 1 and S = 1, or its hooks did not run."""
        if self.observer is not None:
            self._unseen = self.observer.find_unseen()
        return StepSums(plan, {"check": self._finite(), **self._shared}, shared_names=tuple(self._shared))

    def _finite(self) -> Tensor:
        """Return a number that is finite if the step's gradients are. Collective, if they are sharded."""
        device, grads = self.device, self.step_gradients()
        check = finite_check(grads, device) if grads else torch.ones(1, dtype=torch.float64, device=device)
        if self.workers.reduce and self._gradients.sharded:
            # Each worker has seen its shards only; all of them must skip the step, or none.
            flag = check.isfinite().float()
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.workers.group)
            check = 1 / flag.double()
        return check
