"""The gradient samples of one optimizer step: from what is measured in its backward passes to σ² and μ²."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import gain as gain_math
from .._torch import is_dtensor
from ..gain import Average
from ..measure.ddp import bucket_observer, reduces_in_one_round
from ..measure.observers import GradientObserver, HookObserver, take_norm, take_norms
from ..sharding.oss import OSS, GradientReducer
from .deferred import LastStep

__all__ = ["GradientStatistics", "OpenEnded", "PreviousGradient", "Sample"]


@dataclass(frozen=True)
class PreviousGradient:
    """The gradient of one step, kept for the next.

    Attributes:
        tensors: In parameter order, unscaled; None where a parameter had none.
        finite: Whether it was stepped with; bool, 0-dim, on the device of the statistics.
    """

    tensors: Sequence[Tensor | None]
    finite: Tensor

    def products_with(self, before: PreviousGradient, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """``‖g_t − g_{t−1}‖²`` and ``⟨g_t, g_{t−1}⟩`` per group, float64 ``[groups]``; no host synchronisation.

        Args:
            before: g_{t−1}.
            sizes: Parameters in each group.
        """
        device = self.finite.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        differences, inners = [], []
        pairs = iter(zip(self.tensors, before.tensors, strict=True))
        for size in sizes:
            difference = inner = zero
            for g, h in (next(pairs) for _ in range(size)):
                if g is not None:
                    g = g.to(torch.promote_types(g.dtype, torch.float32))
                    h = torch.zeros_like(g) if h is None else h.to(g.dtype)
                elif h is not None:
                    g = torch.zeros_like(h)
                else:
                    continue
                if g.is_complex():
                    g, h = torch.view_as_real(g), torch.view_as_real(h)
                difference = difference + (g - h).double().square().sum().to(device)
                inner = inner + (g.double() * h.double()).sum().to(device)
            differences.append(difference)
            inners.append(inner)
        return torch.stack(differences), torch.stack(inners)

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU that alias nothing; empty where the gradient was not finite."""
        if not self.finite:
            return {}
        kept = {f"previous_gradient.{i}": t for i, t in enumerate(self.tensors) if t is not None}
        return {key: tensor.cpu().clone() for key, tensor in kept.items()}

    @classmethod
    def from_state(
        cls, state: dict[str, Tensor], params: Sequence[Tensor], device: torch.device
    ) -> PreviousGradient | None:
        """What :meth:`state` returned, on the devices of ``params``; None where there is none."""
        names = [f"previous_gradient.{i}" for i in range(len(params))]
        if not any(name in state for name in names):
            return None
        return cls(
            [state[n].to(p.device, copy=True) if n in state else None for n, p in zip(names, params, strict=True)],
            torch.ones((), dtype=torch.bool, device=device),
        )


@dataclass
class Sample:
    """The statistics of one complete optimizer step, summed over workers; before they are averaged in.

    Attributes:
        moments: σ² and μ², ``[2, groups]``, unclipped; None where there is nothing to learn them from.
        usable: Whether they mean anything, where there are any; bool, 0-dim.
        finite: Whether the step's gradient is; bool, 0-dim.
        payload: What travelled along, summed over workers; None for nothing.
        averages: The averages with this sample in them, from when they are first wanted; until then None.
    """

    moments: Tensor | None
    usable: Tensor
    finite: Tensor
    payload: Tensor | None
    averages: Average | None = None

    def outcome(self) -> Tensor:
        """What the host is to know of it: whether it is finite, the payload's numbers, σ² and μ² over all groups; float64, 1-D.

        :meth:`unpack` takes it apart.
        """
        parts = [self.finite.double().reshape(1)]
        if self.payload is not None:
            parts.append(self.payload)
        if self.moments is not None:
            parts.append(self.moments.sum(dim=1).masked_fill(~self.usable, math.nan))
        return torch.cat(parts)

    def on_host(self) -> LastStep:
        """What became of the step; waits for the device."""
        if (
            self.moments is None and self.finite.is_cpu
        ):  # a base run's step: there is little to put together, and no wait
            payload = [] if self.payload is None else self.payload.tolist()
            return LastStep(skipped=not self.finite.item(), sigma2=math.nan, mu2=math.nan, payload=payload)
        return self.unpack(self.outcome().tolist())[0]

    def unpack(self, numbers: list[float]) -> tuple[LastStep, list[float]]:
        """What became of the step, from :meth:`outcome` on the host; and the numbers that follow it there."""
        finite, *numbers = numbers
        payloads = 0 if self.payload is None else len(self.payload)
        payload, numbers = numbers[:payloads], numbers[payloads:]
        sigma2, mu2, rest = math.nan, math.nan, numbers
        if self.moments is not None:
            sigma2, mu2, *rest = numbers
        return LastStep(skipped=not finite, sigma2=sigma2, mu2=mu2, payload=payload), rest


@dataclass(frozen=True)
class _Short:
    """A step with fewer passes than declared.

    Attributes:
        accumulation: As declared, for the steps after it.
        scale: S of those.
        loss_divided_by: What the loss of each pass of this one is divided by; None: their number.
    """

    accumulation: int
    scale: float
    loss_divided_by: int | None


@dataclass(frozen=True)
class OpenEnded:
    """Open-ended accumulation: a step has as many backward passes as there were when one of them reduced gradients.

    Nobody divides the loss by their number, which is not known before; the reduced gradient is divided by it.

    Attributes:
        last_pass: Says whether the backward pass that has just ended completes the step; it is asked once in each pass.
        scale: S of a step of so many passes.
        smoothing: θ of the moving average, from S and n.
    """

    last_pass: Callable[[], bool]
    scale: Callable[[int], float]
    smoothing: Callable[[float, int], float]


class GradientStatistics:
    """Counts the backward passes of a step, sums what an observer measures in them, and makes a :class:`Sample` of it.

    Collective: the last backward pass of a step ends with one small all-reduce.

    Args:
        optimizer: The wrapped one.
        world_size: Workers that share the batch.
        process_group: Theirs.
        is_scaled_loss: The loss is divided by ``accumulation`` before each backward pass.
        grad_scaler: Scales the loss further.
        single_gain: Sum the statistics of all parameter groups.
        precondition: Maps (parameter, gradient) to what norms are taken of.
        model: Where norms may be taken of, beside the optimizer's parameters.

    Attributes:
        scale: S. Call :meth:`attach` after a change of this, of ``accumulation`` or of ``open_ended``, at a step boundary.
        accumulation: Backward passes per optimizer step.
        open_ended: Where it is set, ``accumulation`` is the passes that are expected from what is known so far of the step
            under way, and ``scale`` that of the last complete one.
        weights: w of this worker's gradient sample in each pass; None: all 1/n.
        payload: Returns 1-D numbers that are summed over workers in the same all-reduce; it is called once in each step.
        ends_early: Is asked as each pass begins that is not the declared last whether the step ends with it, all the same, as
            the last of an epoch may; None: passes are as declared.
        before_first_pass: Is called when the first backward pass begins, if ``world_size`` may not be known before, and sets it
            and ``scale``; None where it is known.
        observer: Takes the norms; None where there is nothing to measure.
        previous: g_{t−1} of the differenced estimator.
        passes: Backward passes so far in this step.
        sample: This step's, once its last pass has ended.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        world_size: int,
        process_group: dist.ProcessGroup | None,
        is_scaled_loss: bool,
        grad_scaler: torch.amp.GradScaler | None,
        single_gain: bool,
        precondition: Callable[[Tensor, Tensor], Tensor] | None,
        model: torch.nn.Module | None,
    ) -> None:
        self._optimizer = optimizer
        self.world_size = world_size
        self._process_group = process_group
        self.is_scaled_loss = is_scaled_loss
        self._grad_scaler = grad_scaler
        self._single_gain = single_gain
        self._precondition = precondition
        self._model = model
        self.scale = 1.0
        self.accumulation = 1
        self.open_ended: OpenEnded | None = None
        self.weights: Sequence[float] | None = None
        self.payload: Tensor | None = None
        self.ends_early: Callable[[], bool] | None = None
        self._short: _Short | None = None
        self.before_first_pass: Callable[[], None] | None = None
        self.observer: GradientObserver | None = None
        self.previous: PreviousGradient | None = None
        self._unhooked = False
        self.passes = 0
        self.sample: Sample | None = None
        self.begin_step()

    def __getstate__(self) -> dict[str, Any]:
        # Hooks and process groups belong to this process. Whoever unpickles it calls attach().
        own = {"observer": None, "_process_group": None, "_model": None, "payload": None, "before_first_pass": None}
        own["ends_early"] = None
        return {**self.__dict__, **own}

    @property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step."""
        return self.world_size * self.accumulation

    @property
    def usual_samples(self) -> int:
        """n of the steps that are not shorter than declared."""
        return self.world_size * self.declared_passes

    @property
    def declared_passes(self) -> int:
        """Backward passes of such a step."""
        return self.accumulation if self._short is None else self._short.accumulation

    @property
    def declared_scale(self) -> float:
        """S of such a step."""
        return self.scale if self._short is None else self._short.scale

    @property
    def at_boundary(self) -> bool:
        """Whether there was no backward pass since the last step."""
        return self.passes == 0 and self.sample is None

    @property
    def reducing(self) -> bool:
        """Whether there are other workers to sum over."""
        return self.world_size > 1 and dist.is_available() and dist.is_initialized()

    @property
    def num_gains(self) -> int:
        """One for each parameter group, or one for all."""
        return 1 if self._single_gain else len(self._optimizer.param_groups)

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Where the statistics are."""
        return next(iter(self.params), torch.empty(0)).device

    def step_gradients(self) -> list[Tensor]:
        """The gradients that the optimizer will use on this worker."""
        if isinstance(self._optimizer, OSS):
            return self._optimizer.step_gradients()
        grads = [p.grad for p in self.params if p.grad is not None]
        return [_local(g.detach() if g.requires_grad else g) for g in grads]

    # ---- where norms are taken -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """(Re)install the observer: none where a single sample at S = 1 has nothing to tell."""
        if self.observer is not None:
            self.observer.detach()
            self.observer = None
        if self._unhooked:
            return
        sharded = any(is_dtensor(p) for p in self.params)
        if sharded and self._model is None:
            raise ValueError(
                "The optimizer's parameters are DTensors. Give AdaScale(..., model=model), the model that fully_shard was "
                "applied to: gradient samples are measured on its unsharded parameters."
            )
        if self._measures_samples or self.scale != 1 or self.before_first_pass is not None:
            groups = [group["params"] for group in self._optimizer.param_groups]
            self.observer = self._fsdp2_observer(groups) if sharded else self._observer_of(groups)

    @property
    def _measures_samples(self) -> bool:
        """Whether norms of single gradient samples are wanted: a step has several, or may turn out to have."""
        return self.num_samples > 1 or self.open_ended is not None

    def _observer_of(self, groups: Sequence[Sequence[Tensor]]) -> GradientObserver:
        local, one_pass = self._measures_samples, self.accumulation == 1 and self.open_ended is None
        if self.before_first_pass is not None:
            # Where one worker alone had nothing to measure, the observer asks before it does anything else.
            wanted = None if local or self.scale != 1 else self._ask_for_workers
            return HookObserver(groups, self, precondition=self._precondition, wanted=wanted)
        if self._sharded_gradients:
            self._refuse_precondition("whole gradients on every worker", "or train with DistributedDataParallel")
            oss = cast(OSS, self._optimizer)
            return cast(GradientReducer, oss.reducer).observe(oss, self, accumulating=not one_pass)
        model = self._model
        if isinstance(model, DistributedDataParallel) and local and one_pass and not self._precondition:
            # Of several passes, a bucket holds the sum; a precondition is of one parameter.
            buckets = bucket_observer(model, groups, self)
            if buckets is not None:
                return buckets
        early = reduces_in_one_round(model)
        return HookObserver(groups, self, local=local, precondition=self._precondition, early=early)

    def _ask_for_workers(self) -> bool:
        """The first pass begins: learn how many workers there are, and whether there is anything to measure."""
        ask, self.before_first_pass = self.before_first_pass, None
        if ask is not None:
            ask()
        if not self._measures_samples and self.scale == 1:
            self.observer = None
        return self.observer is not None

    def after_first_step(self) -> None:
        """Measure from here on only what is needed: before the first pass nobody knew. At a step boundary."""
        if self.before_first_pass is None and self.observer is not None and not self._measures_samples:
            self.attach()

    def _fsdp2_observer(self, groups: Sequence[Sequence[Tensor]]) -> GradientObserver:
        self._refuse_precondition(
            "whole parameters and their optimizer state, which fully_shard splits over workers",
            "or train with DistributedDataParallel",
        )
        from ..measure.fsdp2 import FSDP2Observer  # here, since DTensor takes half a second to import

        model = cast(torch.nn.Module, self._model)
        return FSDP2Observer(groups, self, model=model, world_size=self.world_size, local=self._measures_samples)

    def _refuse_precondition(self, needs: str, instead: str) -> None:
        if self._precondition is not None:
            raise ValueError(f"precondition= needs {needs}. Leave it out, {instead}.")

    @property
    def _sharded_gradients(self) -> bool:
        """Whether this worker has only its share of the reduced gradient."""
        inner = self._optimizer
        return isinstance(inner, OSS) and inner.reducer is not None and inner.world_size > 1

    def add_group(self) -> None:
        """Watch the parameter group that the optimizer was given last."""
        if self.observer is not None:
            self.observer.add_group(self._optimizer.param_groups[-1]["params"])
        self.previous = None

    def load_previous(self, state: dict[str, Tensor]) -> None:
        """Take g_{t−1} from a state dict's tensors, if it is among them."""
        self.previous = PreviousGradient.from_state(state, self.params, self.device)

    def unhook(self) -> None:
        """Stop watching for good."""
        if self.observer is not None:
            self.observer.detach()
        self.observer = None
        self._unhooked = True

    # ---- the passes of a step ------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The step was taken, or is left out for good."""
        self.be_whole()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what was collected since the last step."""
        if not self.at_boundary:  # what was said of a step yet to begin stays: gradients may be cleared before it
            self.be_whole()
        self.passes = 0
        self._mean_sq_norm: Tensor | None = None  # A so far, this worker's part
        self._sent: tuple[Tensor, dist.Work | None] | None = None  # the all-reduce that is under way
        self.sample = None
        self._too_many = False
        if self.observer is not None:
            self.observer.last_pass = self.accumulation == 1

    def be_short(self, passes: int, scale: float, loss_divided_by: int | None) -> None:
        """Let the step under way, or the one that comes next, have fewer passes than declared; the steps after it have all.

        Args:
            passes: How many, more than were made.
            scale: S of this step.
            loss_divided_by: What the loss of each pass is divided by; None: their number.
        """
        if self.sample is not None:
            self.begin_step()  # of a step that was never taken
        usual = self._short or _Short(self.accumulation, self.scale, None)
        divided_before, samples_before = self._loss_divided_by, self.num_samples
        self._short = replace(usual, loss_divided_by=loss_divided_by)
        self.accumulation, self.scale = passes, scale
        if self._mean_sq_norm is not None:  # passes were made, as parts of a longer step
            divided = self._loss_divided_by / divided_before
            self._mean_sq_norm = self._mean_sq_norm * (divided**2 * samples_before / self.num_samples)
        if self.observer is not None:
            self.observer.last_pass = self.passes + 1 == passes

    def be_whole(self) -> None:
        """Let the next step have all declared passes."""
        short, self._short = self._short, None
        if short is not None:
            self.accumulation, self.scale = short.accumulation, short.scale

    @property
    def _loss_divided_by(self) -> int:
        if not self.is_scaled_loss:
            return 1
        return (self._short.loss_divided_by if self._short is not None else None) or self.accumulation

    @torch.no_grad()
    def on_begin(self, observer: GradientObserver) -> None:
        """The observer's word that a backward pass begins."""
        if self.before_first_pass is not None:
            self._ask_for_workers()
        if self.sample is not None:
            # Gradients were cleared since, or this pass adds to those of a complete step.
            grads = observer.gradients_left(self.params)
            self._too_many = any(bool(take_norm(_local(grad.detach())) != 0) for grad in grads)
        passes = 1 if self.sample is not None else self.passes + 1
        if self.ends_early is not None and passes < self.accumulation and self.ends_early():
            # The loss was divided by the number of passes that the loop meant to make.
            divided = self._loss_divided_by if self.is_scaled_loss else None
            self.be_short(passes, self.scale * passes / self.accumulation, divided)

    def _drop_sample(self) -> None:
        """Forget a complete step that was never taken: a GradScaler that found an overflow leaves step() out."""
        too_many = self._too_many
        self.previous = None
        self.begin_step()
        self._too_many = too_many

    @torch.no_grad()
    def on_local(self, observer: GradientObserver) -> None:
        """The observer's word that a backward pass has ended on this worker; reduced gradients may yet be on their way."""
        if self.sample is not None:
            self._drop_sample()
        if self.open_ended is not None:
            self._count_on_pass(self.open_ended)
        if self.num_samples > 1:
            n = self.num_samples
            weight = 1 / n if self.weights is None else self.weights[self.passes]
            # The loss, and so the gradient, carried c = n·w_i (and 1/passes, if scaled): w_i‖g_i‖² = w_i/c²·‖c·g_i‖².
            c = n * weight / self._loss_divided_by
            part = observer.local_sq_norms() * (weight / c**2)
            self._mean_sq_norm = part if self._mean_sq_norm is None else self._mean_sq_norm + part
        self.passes += 1
        observer.last_pass = self.passes + 1 == self.accumulation
        if self.passes == self.accumulation and observer.reduced_everywhere:
            # Only A is still in parts. Sent off now, it travels behind the last gradients while we wait for those anyway.
            self._sent = self._send([])

    def _count_on_pass(self, open_ended: OpenEnded) -> None:
        """Expect as many passes as there were with this one, and one more unless it completes the step."""
        last = open_ended.last_pass()
        expected = self.passes + (1 if last else 2)
        if self._mean_sq_norm is not None:
            self._mean_sq_norm = self._mean_sq_norm * (self.accumulation / expected)  # each pass weighs 1/n
        self.accumulation = expected
        if last:
            scale = open_ended.scale(expected)
            if scale != self.scale or self.num_samples > 1:
                self.previous = None  # g_{t−1} counts where both steps are of one sample, from batches of one size
            self.scale = scale

    @torch.no_grad()
    def on_reduced(self, observer: GradientObserver) -> None:
        """The observer's word that reduced gradients are in place, if this was the step's last pass."""
        if self.passes == self.accumulation:
            if self.is_scaled_loss and self._loss_divided_by != self.accumulation:
                grads = self.step_gradients()
                if grads:
                    torch._foreach_mul_(grads, self._loss_divided_by / self.accumulation)
            self.sample = self._gather(observer)
            if self.open_ended is not None and self.accumulation > 1:
                self.divide_gradients()

    def divide_gradients(self) -> None:
        """Divide the gradients by the number of passes that they add up over, where no loss was divided by it."""
        grads = self.step_gradients()
        if grads:
            torch._foreach_div_(grads, self.accumulation)

    def complete(self, caller: str = "step") -> None:
        """Take part in the reduction that is still under way on the others, if one is: no further pass comes in this step.

        It must be called before any other collective of theirs.

        Args:
            caller: The method that an error names.

        Raises:
            RuntimeError: Passes are missing, or there were too many.
        """
        if self._too_many:
            raise RuntimeError(
                f"Gradients of more than {self.accumulation} backward passes were added up before step(), so the gain is not "
                "known. Add the losses and call backward() once, or set_num_gradients_to_accumulate() to the number of passes "
                "(AdaptiveDataParallel: all but the last under no_sync())."
            )
        if self.sample is not None:
            return
        lacks_passes = 0 < self.passes < self.accumulation
        if self.observer is not None and self.reducing:
            # A backward pass reached no parameter here: a sample of zero. The others are in the reduction already.
            sample = self._gather(self.observer)
            if lacks_passes and not bool(sample.usable):
                raise self._too_early(caller)  # no worker has seen all passes, so that was not the reason
            self.sample = sample  # a rule may ask for the gain meanwhile
        elif lacks_passes:
            raise self._too_early(caller)

    def finish(self) -> Sample:
        """The step's sample, once it is :meth:`complete`."""
        self.complete()
        return self._sample_without_passes() if self.sample is None else self.sample

    def _too_early(self, caller: str) -> RuntimeError:
        return RuntimeError(
            f"{caller}() after {self.passes} of {self.accumulation} backward passes. Call it after the last one. Where a step "
            f"has fewer, as the last of an epoch may, say expect_passes({self.passes}) before its last pass; where all have, "
            "set_num_gradients_to_accumulate() first."
        )

    # ---- over all workers ----------------------------------------------------------------------------------------

    def _send(self, more: Sequence[Tensor]) -> tuple[Tensor, dist.Work | None]:
        """Start the one small all-reduce of a step: A, whether all passes were seen, the payload, and ``more``."""
        device = self.device
        local = self._mean_sq_norm
        if local is None:
            local = torch.zeros(len(self._optimizer.param_groups), dtype=torch.float64, device=device)
        parts = [*more, local, torch.full((1,), self.passes == self.accumulation, dtype=torch.float64, device=device)]
        if self.payload is not None:
            parts.append(self.payload.to(local))
        vector = torch.cat(parts)
        work = dist.all_reduce(vector, group=self._process_group, async_op=True) if self.reducing else None
        return vector, work

    def _gather(self, observer: GradientObserver) -> Sample:
        """Wait for the sums over workers, and turn them into σ² and μ²."""
        groups = len(self._optimizer.param_groups)
        if observer.reduced_everywhere:
            # Equal to the last bit on all workers, as their weights are: each takes C from its own copy.
            c = observer.reduced_sq_norms(0, 1)
            vector, work = self._send([]) if self._sent is None else self._sent
            if work is not None:
                work.wait()
        else:
            rank, world_size = (dist.get_rank(self._process_group), self.world_size) if self.reducing else (0, 1)
            both, work = self._send([observer.reduced_sq_norms(rank, world_size)])
            if work is not None:
                work.wait()
            c, vector = both[:groups], both[groups:]
        a, complete = vector[:groups], vector[groups]
        payload = None if self.payload is None else vector[groups + 1 :]
        if not self.is_scaled_loss:
            c = c / self.accumulation**2
        unscale: Tensor | float = 1.0
        if self._grad_scaler is not None and self._grad_scaler.is_enabled():
            # scale(1) is the loss scale as a tensor; get_scale() would wait for the device.
            unscale = 1 / self._grad_scaler.scale(torch.ones((), device=c.device)).double()
            a, c = a * unscale**2, c * unscale**2
        if self._single_gain and groups > 1:
            a, c = a.sum(dim=0, keepdim=True), c.sum(dim=0, keepdim=True)
        finite, usable = torch.isfinite((a + c).sum()), complete > 0
        if not observer.complete:
            # A gradient of a parameter that was frozen when the hooks were set, or (where no pass was seen at all) that no
            # backward pass has made: C counts it and A does not. The step is taken with the averages as they are.
            return Sample(None, usable, finite, payload)
        if self.num_samples > 1:
            moments = gain_math.gradient_moments(a, c, scale=self.scale, count=self.num_samples)
            return Sample(torch.stack(moments), usable, finite, payload)
        if self._short is not None:  # it can't be compared with the steps around it, whose batch is another
            self.previous = None
            return Sample(None, usable, finite, payload)
        if self.scale == 1:
            return Sample(None, usable, finite, payload)
        return self._differenced(unscale, usable, finite, payload)

    def _differenced(self, unscale: Tensor | float, usable: Tensor, finite: Tensor, payload: Tensor | None) -> Sample:
        """The sample of a step that has one gradient sample, from this gradient and the last step's."""
        before = self.previous
        gradient = [None if p.grad is None else _local(p.grad.detach()) * unscale for p in self.params]
        self.previous = PreviousGradient(gradient, finite)
        if before is None:
            return Sample(None, usable, finite, payload)
        products = self.previous.products_with(before, [len(g["params"]) for g in self._optimizer.param_groups])
        if self._single_gain:
            products = products[0].sum(0, keepdim=True), products[1].sum(0, keepdim=True)
        moments = gain_math.differenced_moments(*products, scale=self.scale)
        return Sample(torch.stack(moments), usable & before.finite, finite, payload)

    def _sample_without_passes(self) -> Sample:
        """Look whether gradients are finite, where nothing more was watched: a lone sample at S = 1, or after :meth:`unhook`."""
        device, grads = self.device, self.step_gradients()
        finite = _all_finite(grads, device) if grads else torch.ones((), dtype=torch.bool, device=device)
        if self.reducing and (self._sharded_gradients or any(is_dtensor(p) for p in self.params)):
            # Each worker has seen its shards only; all of them must skip the step, or none.
            flag = finite.float()
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._process_group)
            finite = flag > 0
        return Sample(None, finite, finite, None if self.payload is None else self.payload.to(device, torch.float64))


def _all_finite(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Bool, 0-dim, on ``device``; a norm that is beyond float32 counts as infinite."""
    if all(g.is_cpu for g in grads):
        # Half the time of get_total_norm for a small model, whose step is as short as that; the same for a large one.
        return torch.stack(take_norms(grads)).sum() < math.inf
    # The norm of norms is the norm; torch gives that of an fp16 gradient in fp16, where it may overflow by itself.
    norms = [take_norm(g) if g.is_sparse or g.dtype is torch.float16 else g for g in grads]
    return (torch.nn.utils.get_total_norm(norms) < math.inf).to(device)


def _local(tensor: Tensor) -> Tensor:
    """This worker's shard of a DTensor; any other tensor as it is."""
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor
