"""The gradient samples of one optimizer step: the norms measured in its backward passes, summed over workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .._torch import count_of_writes, is_dtensor, without_gradients
from ..batch import StepPlan
from ..measure.norms import finite_check, take_norm
from ..measure.observers import GradientObserver
from ..sharding.oss import OSS
from .exchange import Exchange, Numbers
from .observing import has_dtensors, has_sharded_gradients, make_observer
from .sampling import Sampling
from .step_result import StepEnd
from .step_sums import OWN, StepSums, constant, mean_sq_norm
from .workers import Workers


class GradientStatistics:
    """Counts the backward passes of a step, keeps the norms that an observer measures, and sums them over workers.

    Collective: the last backward pass of a step ends with one small all-reduce. Some steps are not measured. They have no hooks
    on parameters, and of their gradient only the norm is taken, once it is reduced. Their passes are not counted, unless the
    sharding does so.

    Args:
        optimizer: The wrapped one.
        workers: Workers that share the batch.
        process_group: Workers that reduce gradients together.
        grad_scaler: Scales the loss.
        to_mean: Divide the gradient, after the last pass, so that it is the mean over the passes. False where the loop does so.
        single_gain: Sum the statistics of all parameter groups.
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of.
        model: The model, where norms may be taken of it.
        sampling: Decides which steps are measured.

    Attributes:
        declared: Plan of a full step. Set it with :meth:`declare`.
        step_end: Decides which pass is a step's last; None: the declared number of passes does.
        weights: w of this worker's gradient sample in each pass; None: all 1/n.
        observer: Measures the norms; None where there is nothing to measure.
        ended: Steps that have ended, with those that were left out.
        passes: Backward passes so far in this step.
        sums: The sums of the step, once its last pass has ended.
        left_out: Whether a GradScaler left out the last complete step, as the clearing of its gradients shows.
        replicated: Numbers of the last complete step that each worker took from its own copy of the reduced gradient: C per
            parameter group as measured, or the norm of one gradient; None without copies.
        counts: Whether the backward passes from now on are those of steps; False for what else the loop runs.
        foreign: Whether a pass that did not count has left gradients, as ``loss.backward()`` does and ``autograd.grad`` does not.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        workers: Workers,
        *,
        process_group: dist.ProcessGroup | None,
        grad_scaler: torch.amp.GradScaler | None,
        to_mean: bool,
        single_gain: bool,
        precondition: Callable[[Tensor, Tensor], Tensor] | None,
        model: torch.nn.Module | None,
        sampling: Sampling,
    ) -> None:
        self._optimizer = optimizer
        self.workers = workers
        self._process_group = process_group
        self._grad_scaler = grad_scaler
        self._to_mean = to_mean
        self._single_gain = single_gain
        self._precondition = precondition
        self._model = model
        self._sampling = sampling
        self.declared = StepPlan(workers=workers.count)
        self.step_end: StepEnd | None = None
        self._expected: StepPlan | None = None  # of the step under way or the next, where it differs from `declared`
        self.weights: Sequence[float] | None = None
        self._shared: dict[str, Tensor] = {}
        self.ended = 0
        self.observer: GradientObserver | None = None
        self._unhooked = self._leaves_out = False
        self._exchange = Exchange(workers, process_group)  # of the step under way
        self.passes = 0
        self.sums: StepSums | None = None
        self.left_out = self.foreign = self._ignored = False
        self.counts = True
        self.replicated: Tensor | None = None
        self._stepped_with: tuple[int, int] | None = None
        self.begin_step()
        if isinstance(optimizer, OSS):
            optimizer.add_reducer_listener(self)

    def __getstate__(self) -> dict[str, Any]:
        # Hooks, callables and process groups belong to this process.
        own = {
            "observer": None,
            "_process_group": None,
            "_model": None,
            "_shared": {},
            "_exchange": None,
            "step_end": None,
        }
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.begin_step()
        self.attach()

    @property
    def plan(self) -> StepPlan:
        """Plan of the step under way, as known so far; between steps, the plan of a full step."""
        return self._ended or self._expected or self.declared

    @property
    def at_boundary(self) -> bool:
        """Whether there was no backward pass since the last step."""
        return self.passes == 0 and self.sums is None

    @property
    def accumulating(self) -> bool:
        """Whether there was a backward pass, and the step's last is yet to come."""
        return self.passes > 0 and self._ended is None

    @property
    def num_gains(self) -> int:
        """One for each parameter group, or one for all."""
        return 1 if self._single_gain else len(self._optimizer.param_groups)

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Device of the statistics."""
        return next((p.device for group in self._optimizer.param_groups for p in group["params"]), torch.device("cpu"))

    def step_gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer will use on this worker."""
        if isinstance(self._optimizer, OSS):
            return self._optimizer.step_gradients()
        grads = [p.grad for p in self.params if p.grad is not None]
        return [g if type(g) is Tensor and not g.requires_grad else _local(g.detach()) for g in grads]

    # ---- the plan of steps, and the observer that measures them ---------------------------------------------------

    def declare(self, plan: StepPlan) -> None:
        """Set the plan of the steps from the next one on. At a step boundary."""
        self.declared, self._expected = plan, None
        self._leaves_out = self._sampling.leaves_out(plan)
        self.attach()

    def expect(self, plan: StepPlan) -> None:
        """Set the plan of the step under way, or at a step boundary of the next one; the steps after it are full ones."""
        if self.sums is not None:
            self.begin_step()  # of a step that was never taken
        self._expected = plan

    def attach(self) -> None:
        """(Re)install the observer: none if a step has a single sample at S = 1, which yields nothing."""
        if self.observer is not None:
            self.observer.detach()
            self.observer = None
        if self._unhooked:
            return
        if has_dtensors(self._optimizer) and self._model is None:
            raise ValueError(
                "The optimizer's parameters are DTensors. Give AdaScale(..., model=model), the model that fully_shard was "
                "applied to: gradient samples are measured on its unsharded parameters."
            )
        several = self.declared.num_samples > 1
        if several or self.declared.scale != 1:
            self.observer = make_observer(
                self._optimizer,
                self,
                workers=self.workers.count,
                local=several,
                one_pass=self.declared.passes == 1,
                model=self._model,
                precondition=self._precondition,
            )
            self._watch()

    @property
    def measuring(self) -> bool:
        """Whether the step under way, or else the next, is measured. Steps that may end early are, so that passes are counted."""
        return self.step_end is not None or self._sampling.measures(self.ended, self.declared)

    @property
    def steps_of_sample(self) -> int:
        """Steps for which the sample of the step under way stands, if it is measured."""
        if self.step_end is not None or not self._leaves_out:
            return 1
        return self._sampling.gap(self.ended, self.declared)

    def _watch(self) -> None:
        """Let the observer hook parameters in the steps that are measured, and only there."""
        if self.observer is not None and self.observer.watching != self.measuring:
            self.observer.watch(self.measuring)

    def resume(self, ended: int) -> None:
        """Continue after a number of steps. At a step boundary."""
        self.ended = ended
        self.begin_step()
        self._watch()

    @property
    def exchanges(self) -> bool:
        """Whether the step under way, or else the next, has an all-reduce in any case, in which shared numbers cost nothing."""
        observer = self.observer
        return self.workers.reduce and observer is not None and (observer.watching or not observer.reduced_everywhere)

    def share(self, **numbers: Tensor) -> None:
        """Sum numbers over the workers in this step's all-reduce. Called before the step's last pass, on all workers alike.

        If the step is not measured, and each worker takes the norm of the reduced gradient by itself, the numbers travel from now
        on, while the gradients are computed. Their sums are ``last_step.shared``.

        Args:
            **numbers: 0-dim each.

        Raises:
            ValueError: A number is not 0-dim, or has a name of the statistics' own.
        """
        for name, number in numbers.items():
            if number.dim() or name in OWN:
                raise ValueError(
                    f"Invalid {name} of shape {tuple(number.shape)}. Must be 0-dim, and not {sorted(OWN)}."
                )
        self._shared = {name: number.to(self.device, torch.float64) for name, number in numbers.items()}
        if self._shared and self.observer is not None and self.workers.reduce and not self.exchanges:
            with torch.no_grad():
                self._send({})

    on_reducer_attached = attach
    """Called by OSS when a ShardedDataParallel begins to reduce its gradients."""

    def add_group(self) -> None:
        """Watch the parameter group that was added to the optimizer last."""
        if self.observer is not None:
            self.observer.add_group(self._optimizer.param_groups[-1]["params"])

    def unhook(self) -> None:
        """Stop watching for good."""
        if self.observer is not None:
            self.observer.detach()
        self.observer = None
        self._unhooked = True

    # ---- the passes of a step ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear the passes since the last step."""
        self.left_out |= self.sums is not None and self._scales_loss
        self._clear_passes()

    @property
    def _scales_loss(self) -> bool:
        return self._grad_scaler is not None and self._grad_scaler.is_enabled()

    def _clear_passes(self) -> None:
        if not self.at_boundary:
            self._expected = None  # else it is of a step yet to begin: gradients may be cleared before it
        self.passes = 0
        self._norms: list[Tensor] = []  # ‖g_i‖² of each pass on this worker, as measured
        self._ending: StepPlan | None = None  # the plan, while the pass that runs is the step's last
        self._ended: StepPlan | None = None  # the plan, once the last pass has ended
        self._exchange = Exchange(self.workers, self._process_group)
        self.sums = None
        self._too_many = self._uncleared = False

    def end_step(self) -> None:
        """End the step: it was taken, or is left out for good."""
        self._clear_passes()
        self.ended += 1
        if self.observer is not None:
            if self._leaves_out:
                self._watch()
            self._stepped_with = self._first_gradient()
        self._expected, self._shared = None, {}

    def _first_gradient(self) -> tuple[int, int] | None:
        """Return the address and the number of writes of the first gradient; None without one. Clearing changes them."""
        grad = next((p.grad for p in self.params if p.grad is not None), None)
        if grad is None:
            return None
        address = _local(grad).data_ptr() if grad.layout is torch.strided else 0
        return address, count_of_writes(grad)

    def _writes(self) -> list[tuple[int, int] | None]:
        return [None if p.grad is None else (id(p.grad), count_of_writes(p.grad)) for p in self.params]

    def _plan_if_last(self, number: int) -> StepPlan | None:
        plan = self._expected or self.declared
        if number >= plan.passes:
            return plan
        return None if self.step_end is None else self.step_end(number)

    @without_gradients
    def on_begin(self, observer: GradientObserver) -> bool:
        self._ignored = not self.counts
        if self._ignored:
            self._before = self._writes()
            return False
        self.workers.require_group(self._process_group)
        if self.lacks_samples:
            raise self._no_samples()
        if self.sums is not None:
            # A complete step was never taken, as after an overflow that a GradScaler found. Were its gradients cleared since?
            grads = observer.gradients_left(self.params)
            too_many = any(bool(take_norm(_local(grad.detach())) != 0) for grad in grads)
            self.left_out |= self._scales_loss and not too_many
            self._clear_passes()
            self._too_many = too_many
        elif self._stepped_with is not None and self._stepped_with == self._first_gradient():
            self._uncleared = any(
                bool(take_norm(_local(grad.detach())) != 0) for grad in observer.gradients_left(self.params)
            )
        self._stepped_with = None
        self._ending = self._plan_if_last(self.passes + 1)
        return self._ending is not None

    @without_gradients
    def on_local(self, observer: GradientObserver) -> None:
        if self._ignored:
            return
        plan, self._ending = self._ending, None
        if observer.watching and (plan is None or plan.num_samples > 1):
            self._norms.append(observer.local_sq_norms())
        self.passes += 1
        if plan is None:
            return
        self._ended = plan
        if observer.reduced_everywhere:
            # Only A is still in parts. Sent now, it travels behind the last gradients, which are awaited anyway.
            self._send({})

    @without_gradients
    def on_reduced(self, observer: GradientObserver) -> None:
        if self._ignored:
            self.foreign |= self._before != self._writes()
        elif self._ended is not None and self.sums is None:
            self._finish_passes(self._gather(observer))

    @property
    def lacks_samples(self) -> bool:
        """Whether the steps to come can't measure their noise: they have one gradient sample at S ≠ 1."""
        return self.declared.scale != 1 and self.declared.num_samples == 1

    def _no_samples(self) -> RuntimeError:
        return RuntimeError(
            f"One gradient sample a step at scale {self.declared.scale:g} tells nothing of the noise, so the gain is "
            "unknown. Make two backward passes of half the size: AdaScale(..., num_gradients_to_accumulate=2), or "
            "AdaScaleConfig(accumulation=2, per_worker_batch_size=half of it)."
        )

    def _finish_passes(self, sums: StepSums) -> None:
        self.sums = sums
        if self._to_mean:
            self.divide_to_mean()

    def complete(self, caller: str = "step", *, scaled: bool = False) -> None:
        """Take part in the reduction that is still under way on other workers, if there is one: no further pass comes.

        It must be called before any other collective of the step.

        Args:
            caller: Method that an error names.
            scaled: Whether the gradients still have the loss scale, if there is one. torch's scaler has removed it before a step.

        Raises:
            RuntimeError: Passes are missing, there were too many, or the gradients of the step before were not cleared.
        """
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
        if self.sums is not None:
            return
        self.workers.require_group(self._process_group)
        if self.observer is not None and self.lacks_samples:
            raise self._no_samples()
        lacks_passes = self.accumulating
        if self.observer is not None and not self.observer.watching:
            if lacks_passes:
                raise self._too_early(caller)
            self._finish_passes(self._gather(self.observer, scaled=scaled))
        elif self.observer is not None and self.workers.reduce:
            # A backward pass reached no parameter here: a sample of zero. The others are in the reduction already.
            sums = self._gather(self.observer)
            if lacks_passes and not bool(sums.numbers["complete"] > 0):
                self._exchange = Exchange(self.workers, self._process_group)  # of the passes to come
                raise self._too_early(caller)  # no worker has seen all passes, so that was not the reason
            self._finish_passes(sums)
        elif lacks_passes:
            raise self._too_early(caller)

    def finish(self) -> StepSums:
        """Return the sums of the step, once it is :meth:`complete`."""
        self.complete()
        return self._sums_without_passes() if self.sums is None else self.sums

    def _too_early(self, caller: str) -> RuntimeError:
        if self.step_end is not None:
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

    def divide_to_mean(self) -> None:
        """Divide the gradients that the passes add up to, so that they are ḡ."""
        multiple = self.plan.multiple_of_mean
        if multiple != 1:
            grads = self.step_gradients()
            if grads:
                torch._foreach_div_(grads, multiple)

    # ---- over all workers ----------------------------------------------------------------------------------------

    def _send(self, numbers: Numbers) -> None:
        """Start the step's all-reduce: ``numbers``, what is shared; if it is measured A, and whether all passes were seen."""
        device, exchange = self.device, self._exchange
        exchange.add(numbers)
        if self.observer is None or self.observer.watching:
            if self._norms:
                local = mean_sq_norm(self.plan, self._norms, self.weights)
            else:
                local = torch.zeros(len(self._optimizer.param_groups), dtype=torch.float64, device=device)
            exchange.add({"a": local, "complete": constant(float(self._ended is not None), device)})
        exchange.add(self._shared)
        exchange.send()

    def _gather(self, observer: GradientObserver, *, scaled: bool = True) -> StepSums:
        """Wait for the sums over workers."""
        if observer.reduced_everywhere:
            # Equal to the last bit on all workers, as their weights are: each takes C from its own copy.
            own = {"c": observer.reduced_sq_norms(0, 1)}
            if not self._exchange.sent:
                self._send({})
        else:
            own = {}
            rank, world_size = (
                (dist.get_rank(self._process_group), self.workers.count) if self.workers.reduce else (0, 1)
            )
            self._send({"c": observer.reduced_sq_norms(rank, world_size)})
        numbers, packed = self._exchange.wait()
        if self.workers.reduce:
            self.replicated = own.get("c")
            if not own and type(observer).reduced_everywhere:
                # Workers took shares of C. The smallest gradient, which all of them have, stands for it.
                whole = [p.grad for p in self.params if p.grad is not None]
                self.replicated = take_norm(min(whole, key=Tensor.numel)).double().view(1) if whole else None
        if scaled and self._grad_scaler is not None and self._scales_loss:
            # scale(1) is the loss scale as a tensor; get_scale() would wait for the device.
            own["loss_scale"] = self._grad_scaler.scale(constant(1.0, self.device))
        packed = None if own else packed
        return StepSums(self.plan, {**own, **numbers}, packed, observer.complete, self._ended is not None)

    def _sums_without_passes(self) -> StepSums:
        """Return the sums of a step without measured passes: at n = 1 and S = 1, or after :meth:`unhook`."""
        device, grads = self.device, self.step_gradients()
        if grads and self.observer is not None:
            self.attach()  # the watched parameters may all be frozen now, and others trainable
        check = finite_check(grads, device) if grads else torch.ones(1, dtype=torch.float64, device=device)
        if self.workers.reduce and (has_sharded_gradients(self._optimizer) or has_dtensors(self._optimizer)):
            # Each worker has seen its shards only; all of them must skip the step, or none.
            flag = check.isfinite().float()
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._process_group)
            check = 1 / flag.double()
        return StepSums(self.plan, {"check": check, **self._shared})


def _local(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a DTensor; any other tensor unchanged."""
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor
