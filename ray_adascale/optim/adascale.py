"""AdaScale: an optimizer wrapper that multiplies the learning rate by the gain of the batch that is stepped with.

The constructor and methods are those of FairScale's ``AdaScale``; what they compute is in :mod:`ray_adascale.gain`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import gain as gain_math
from ..dtensor import is_dtensor
from ..gain import Average
from ..parallel.ddp import bucket_observer, reduces_in_one_round
from ..parallel.observers import GradientObserver, HookObserver, take_norm
from .device_step import HostCopy, skippable_step, steps_on_device
from .differenced import KeptGradient
from .knowledge import Known, LastStep, numbers_of
from .oss import OSS, GradientReducer
from .rules import AdaScaleRule, RuleInput, ScalingRule

__all__ = ["AdaScale"]

# GradScaler looks for these on the optimizer it steps. Found on the wrapper by forwarding, they would hand it scaled
# gradients; without them it unscales first and leaves out step() when a gradient is not finite.
_NEVER_FORWARDED = frozenset({"_step_supports_amp_scaling", "grad_scale", "found_inf"})


def _local(tensor: Tensor) -> Tensor:
    """This worker's shard of a DTensor; any other tensor as it is."""
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor


@dataclass
class _Sample:
    """The statistics of one complete optimizer step, summed over workers; before they are averaged in."""

    moments: Tensor | None  # σ² and μ², [2, groups], unclipped; None where there is nothing to learn them from
    known: Tensor  # bool, 0-dim: whether they mean anything
    finite: Tensor  # bool, 0-dim
    averages: Average | None = None  # with this sample, once somebody asked

    def outcome(self) -> Tensor:
        """Whether it is finite, and σ² and μ² over all groups (NaN where unknown); float64 ``[3]``."""
        finite = self.finite.double().reshape(1)
        if self.moments is None:
            return torch.cat([finite, torch.full((2,), math.nan, dtype=torch.float64, device=finite.device)])
        return torch.cat([finite, self.moments.sum(dim=1).masked_fill(~self.known, math.nan)])


class AdaScale(Optimizer):
    """Wraps an SGD-like optimizer; ``step()`` uses ``lr · r`` with the gain r of the gradients that it steps with.

    Use it like the optimizer itself: any ``torch.optim.lr_scheduler`` may be built on the wrapper or on what it wraps.
    The number of optimizer steps so far on the base batch's clock is :attr:`effective_steps`; drive the schedule with
    it, and stop when it reaches the number of steps that the schedule was made for.

    Collective: the last backward pass of a step ends with one small all-reduce over ``process_group``.

    A step costs the host one wait for the device, in which it reads r. None with a fused optimizer (``SGD``, ``Adam`` or
    ``AdamW`` with ``fused=True``, also in OSS; parameters on one device; AdaScale's own rule): the LR then reaches it as a
    float32 tensor, a step that is not finite is skipped on the device, and :meth:`step` waits only until r of the step
    *before* has arrived. Whatever tells of the last step (:attr:`effective_steps`, :meth:`gain`, :attr:`steps`,
    :attr:`last_step_skipped`, :meth:`state_dict`, ...) waits for it; :attr:`known_effective_steps` doesn't.

    Args:
        optimizer: The optimizer to wrap. ``AdaScale(OSS(...))`` is the nesting with sharded state.
        world_size: Workers that share the batch. Default: the size of ``process_group``, else 1.
        scale: S, global batch size / base batch size. Default: ``world_size · num_gradients_to_accumulate``.
        smoothing: θ, the weight of the past in the averages. Default: ``max(1 − n/1000, 0)`` with
            n = world_size · num_gradients_to_accumulate. Not together with ``averaging_window``.
        num_gradients_to_accumulate: Backward passes per optimizer step.
        is_scaled_loss: The loss is divided by ``num_gradients_to_accumulate`` before each backward pass.
        debias_ewma: Debiased moving average (FairScale's default), or, if False, the paper's: a plain mean at first.
        process_group: Workers that reduce gradients together. Default: OSS's, or the default group, if there is one.
        grad_scaler: The ``torch.amp.GradScaler`` that scales the loss, so that statistics are of unscaled gradients.
        variance_floor: Lower bound on each σ². 1e-6 reproduces FairScale to the digit; 0 (default) makes the gain
            independent of the gradients' magnitude.
        clip: Where σ², μ² ≥ 0 is enforced: on each sample before averaging ("samples", as FairScale), or on reading
            the averages ("averages", which keeps them unbiased).
        averaging_window: Average over effective time instead of over steps: θ_t = exp(−r_{t−1} / (window · T)). A
            fraction of the run, e.g. 0.05; needs ``total_steps``.
        total_steps: T, effective steps in the run.
        single_gain: One gain for all parameter groups, from their summed statistics, so that every group follows the
            same schedule (the paper's form). Default: one gain per group for its LR, as both predecessors do.
        base_batch_size: B0 in examples; with ``batch_size`` it gives the scale.
        batch_size: B in examples, over all workers and passes.
        rule: Maps a :class:`RuleInput` to (LR factor, clock increment). Default: AdaScale's (r, r).
        precondition: Maps (parameter, gradient) to what norms are taken of, for statistics in another metric than the
            Euclidean one. Costs a copy of one gradient at a time.
        model: The model. Needed for one that is sharded with ``fully_shard``, and for a ``DistributedDataParallel`` whose
            buckets are to be measured (:func:`ray_adascale.parallel.ddp.measure_buckets`).

    Raises:
        ValueError: An argument is out of its range, or the optimizer is wrapped already, or its parameters are sharded in
            a way that is not supported.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
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
        single_gain: bool = False,
        base_batch_size: float | None = None,
        batch_size: float | None = None,
        rule: ScalingRule | None = None,
        precondition: Callable[[Tensor, Tensor], Tensor] | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"Invalid optimizer of type {type(optimizer).__name__}. Must be a torch.optim.Optimizer.")
        if isinstance(optimizer, AdaScale):
            raise ValueError("The optimizer is wrapped in AdaScale already; its gain would be applied twice.")
        if clip not in ("samples", "averages"):
            raise ValueError(f"Invalid {clip=}. Must be 'samples' or 'averages'.")
        if averaging_window is not None and (smoothing is not None or total_steps is None):
            raise ValueError(f"{averaging_window=} needs total_steps, and excludes smoothing (got {smoothing=}).")
        if averaging_window is not None and not (averaging_window > 0 and cast(float, total_steps) > 0):
            raise ValueError(f"Invalid {averaging_window=}, {total_steps=}. Both must be positive.")
        self._optimizer = optimizer
        if isinstance(optimizer, OSS):
            optimizer.when_reducer_attached(self._attach)
        super().__setstate__({})  # gives the hook registries and step profiling of Optimizer, without owning groups

        if process_group is None and isinstance(optimizer, OSS):
            process_group = optimizer.group
        self._process_group = process_group
        if world_size is None:
            world_size = dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
        if world_size < 1:
            raise ValueError(f"Invalid {world_size=}. Must be at least 1.")
        self._world_size = world_size
        self._is_scaled_loss = is_scaled_loss
        self._debias = debias_ewma
        self._grad_scaler = grad_scaler
        self._variance_floor = variance_floor
        self._clip_samples = clip == "samples"
        self._window = averaging_window
        self._total_steps = total_steps
        self._single_gain = single_gain
        self._precondition = precondition
        self._model = model
        self._rule: ScalingRule = AdaScaleRule() if rule is None else rule

        self.sample_weights: Sequence[float] | None = None
        """w of this worker's gradient sample in each pass, where micro-batches are unequal; None: all 1/n."""
        self.rider: Callable[[], Tensor] | None = None
        """1-D numbers to sum over workers in the same all-reduce; called once a step. Result: :attr:`rider_sum`."""
        self.rider_sum: Tensor | None = None

        self._smoothing = 0.0
        self._accumulate = 0
        self._observer: GradientObserver | None = None
        self._previous: KeptGradient | None = None  # g_{t−1} of the differenced estimator
        self._pending: HostCopy | None = None  # the last step's outcome, of which the host does not know yet
        self._last = LastStep()
        self._warned_single_sample = False
        self._effective_steps = 0.0
        self._steps = 0
        self._previous_gain = 1.0
        self._averages = self._empty_averages()
        self._known: Known | None = None  # asked for more than once a step
        self._sample: _Sample | None = None
        self._begin_step()
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate, update_smoothing=smoothing is None)
        if smoothing is not None:
            if not 0 <= smoothing < 1:
                raise ValueError(f"Invalid {smoothing=}. Must be in [0, 1).")
            self._smoothing = smoothing
        if base_batch_size is not None or batch_size is not None:
            if scale is not None or not base_batch_size or not batch_size:
                raise ValueError(f"Give scale, or both of {base_batch_size=} and {batch_size=}.")
            scale = batch_size / base_batch_size
        self._base_batch_size = base_batch_size
        self.set_scale(float(self.num_samples if scale is None else scale))

    # ---- what a torch.optim.Optimizer has ------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self._optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self._optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._optimizer.defaults = value

    def __getattr__(self, name: str) -> Any:
        # Only called for names that the wrapper lacks. `_optimizer` itself is missing while unpickling.
        if name in _NEVER_FORWARDED or name == "_optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"AdaScale(scale={self._scale:g}, n={self.num_samples}, {self._optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what was collected of an unfinished or skipped step."""
        self._begin_step()
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient that the next step will use to a norm, however it is sharded; collective. Leaves the gain.

        Returns:
            The norm before clipping, on the device.
        """
        if isinstance(self._optimizer, OSS):
            return self._optimizer.clip_grad_norm(max_norm, norm_type)
        norm = torch.nn.utils.clip_grad_norm_(self._params(), max_norm, norm_type)
        return cast(Any, norm).full_tensor() if is_dtensor(norm) else norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer and watches its gradients from the next step on."""
        self._require_boundary("add_param_group")
        self._settle()
        self._optimizer.add_param_group(param_group)
        if self._observer is not None:
            self._observer.add_group(self.param_groups[-1]["params"])
        self._previous = None
        if not self._single_gain:
            old, self._averages = self._averages, self._empty_averages()
            for name in ("total", "weight", "count"):
                getattr(self._averages, name)[..., :-1] = getattr(old, name)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step with ``lr · r``; τ advances by r. A non-finite gradient changes nothing at all.

        Args:
            closure: Evaluates the model once and returns the loss; the gain is that of the gradients it leaves.

        Raises:
            RuntimeError: Called before all ``num_gradients_to_accumulate`` backward passes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lacks_passes = 0 < self._passes < self._accumulate
        if lacks_passes and not (self._reducing and self._observer is not None):
            raise self._too_early()
        self._settle()
        sample = self._sample
        if sample is None and self._observer is not None and self._reducing:
            # A backward pass reached no parameter here: a sample of zero. The others are in the reduction already.
            sample = self._gather(self._observer)
            if lacks_passes and not bool(sample.known):
                raise self._too_early()  # everywhere, so it was not that
            self._sample = sample  # a rule may ask for the gain meanwhile
        if sample is None:
            sample = self._sample_without_passes()
        averages = self._with(sample)
        inner = self._optimizer.optim if isinstance(self._optimizer, OSS) else self._optimizer
        if type(self._rule) is AdaScaleRule and steps_on_device(type(inner), self.param_groups):
            numbers = numbers_of(averages, self._scale, self._variance_floor)
            gains = numbers[: averages.total.shape[1]].unbind()
            skippable_step(inner, ~sample.finite, lambda: self._step_with(gains))
            self._averages = averages
            self._pending = HostCopy(torch.cat([sample.outcome(), numbers]))
        else:
            self._step_on_host(sample, averages)
        self._begin_step()
        return loss

    def _too_early(self) -> RuntimeError:
        return RuntimeError(
            f"step() after {self._passes} of {self._accumulate} backward passes. Call it after the last one, or "
            "set_num_gradients_to_accumulate() first."
        )

    def _step_on_host(self, sample: _Sample, averages: Average) -> None:
        known = self._known
        if sample.moments is None and known is not None and known.of(averages, self._scale):
            finite, sigma2, mu2 = bool(sample.finite), math.nan, math.nan
        else:
            numbers = numbers_of(averages, self._scale, self._variance_floor)
            outcome, sigma2, mu2, *rest = torch.cat([sample.outcome(), numbers]).tolist()
            finite, known = outcome > 0, Known.from_numbers(averages, self._scale, rest)
        if not finite:
            self._previous = None
            self._last = replace(self._last, skipped=True)
            if isinstance(self._optimizer, OSS):
                self._optimizer.discard_gradients()
            return
        self._known = known
        before = self._effective_steps
        factors = [self._apply_rule(r, i)[0] for i, r in enumerate(known.gains)]
        factor, increment = self._apply_rule(known.gain, None)
        self._step_with(factors)
        self._averages = averages
        self._advance(known.gain, before + increment, LastStep(False, factor, sigma2, mu2))

    def _settle(self) -> None:
        """Wait for the outcome of a step that was taken on the device, and act on it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        finite, sigma2, mu2, *numbers = pending.read()
        known = self._known = Known.from_numbers(self._averages, self._scale, numbers)
        if finite:
            last = LastStep(False, known.gain, sigma2, mu2)
            self._advance(known.gain, self._effective_steps + known.gain, last)
        else:
            self._last = replace(self._last, skipped=True)

    def _advance(self, gain: float, effective_steps: float, last: LastStep) -> None:
        self._previous_gain, self._effective_steps, self._last = gain, effective_steps, last
        self._steps += 1

    def _apply_rule(self, r: float, group: int | None) -> tuple[float, float]:
        return self._rule(
            RuleInput(
                gain=r,
                scale=self._scale,
                effective_steps=self._effective_steps,
                total_steps=self._total_steps,
                base_batch_size=self._base_batch_size,
                group=group,
            )
        )

    def _step_with(self, factors: Sequence[float] | Sequence[Tensor]) -> None:
        groups = self.param_groups
        lrs = [group["lr"] for group in groups]
        try:
            for i, group in enumerate(groups):
                group["lr"] = self._scaled(lrs[i], factors[i % len(factors)])
            self._optimizer.step()
        finally:
            for group, lr in zip(groups, lrs, strict=True):
                group["lr"] = lr

    def _scaled(self, lr: float | Tensor, factor: float | Tensor) -> float | Tensor:
        """``lr · factor``; a tensor LR becomes a new tensor."""
        if not isinstance(factor, Tensor):
            return lr * factor
        if self._scale == 1:
            return lr  # to the bit
        # The kernels read float32, a 0-dim tensor may be on the host where the other is not.
        return ((lr.reshape(()) if isinstance(lr, Tensor) else lr) * factor).float()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, with an entry ``"adascale"`` of tensors (copies, on the CPU).

        Loads with ``torch.load(weights_only=True)`` and goes through ``torch.distributed.checkpoint``.

        Raises:
            RuntimeError: Called between the passes of an optimizer step, or before the step that they lead to.
        """
        self._require_boundary("state_dict")
        return {**self._optimizer.state_dict(), "adascale": self.statistics_state()}

    def statistics_state(self) -> dict[str, Tensor]:
        """AdaScale's own state without the wrapped optimizer's: tensors on the CPU that alias nothing."""
        self._require_boundary("statistics_state")
        self._settle()
        state = {
            "total": self._averages.total.detach().cpu().clone(),
            "weight": self._averages.weight.detach().cpu().clone(),
            "count": self._averages.count.detach().cpu().clone(),
            "effective_steps": torch.tensor(self._effective_steps, dtype=torch.float64),
            "previous_gain": torch.tensor(self._previous_gain, dtype=torch.float64),
            "steps": torch.tensor(self._steps),
            "num_samples": torch.tensor(self.num_samples),
        }
        return state if self._previous is None else {**state, **self._previous.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a :meth:`state_dict`, which is left as it is. σ² is per base batch, so S and n may differ from then.

        Raises:
            ValueError: The statistics are of another number of parameter groups.
        """
        self._require_boundary("load_state_dict")
        self._settle()
        inner = {key: value for key, value in state_dict.items() if key != "adascale"}
        statistics = state_dict.get("adascale")
        if statistics is not None:
            self._check_statistics(statistics)
        self._optimizer.load_state_dict(inner)
        if statistics is None:
            warnings.warn("The state dict has no AdaScale statistics; the averages and τ start afresh.", stacklevel=2)
            self._averages = self._empty_averages()
            self._effective_steps, self._steps, self._previous_gain, self._previous = 0.0, 0, 1.0, None
        else:
            self.load_statistics_state(statistics)
        self._begin_step()

    def _check_statistics(self, state: dict[str, Tensor]) -> None:
        expected, found = tuple(self._averages.total.shape), tuple(state["total"].shape)
        if expected != found:
            raise ValueError(
                f"The AdaScale statistics in the state dict are of {found[1]} gains, this optimizer has {expected[1]}. "
                "Parameter groups (or single_gain) differ."
            )

    def load_statistics_state(self, state: dict[str, Tensor]) -> None:
        """Loads what :meth:`statistics_state` returned."""
        self._check_statistics(state)
        self._settle()
        device = self._averages.total.device
        averages = Average(*(state[name].to(device, copy=True) for name in ("total", "weight", "count")))
        was, now = int(state["num_samples"]), self.num_samples
        same_estimator = (was == 1) == (now == 1)
        self._averages = averages if same_estimator else self._empty_averages()
        self._effective_steps = float(state["effective_steps"])
        self._previous_gain = float(state["previous_gain"])
        self._steps = int(state["steps"])
        self._previous = KeptGradient.from_state(state, self._params(), device) if now == 1 else None

    def __getstate__(self) -> dict[str, Any]:
        # Hooks and process groups belong to this process; __setstate__ makes new hooks on the new parameters.
        self._settle()
        bound = ("_observer", "_process_group", "_model", "rider", "step")
        kept = {k: v for k, v in self.__dict__.items() if k not in bound}
        return {k: v for k, v in kept.items() if not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})
        self._observer, self._process_group, self._model, self.rider = None, None, None, None
        self._begin_step()
        self._attach()

    # ---- what FairScale's AdaScale has ---------------------------------------------------------------------------

    def gain(self, pg_idx: int | None = None) -> float:
        """r of the gradients in place (between backward and step), or of the last step. 1 before the first sample.

        Asking changes nothing and needs no other worker.

        Args:
            pg_idx: A parameter group's index; None for the whole optimizer (the groups' statistics summed).
        """
        known = self._know()
        if pg_idx is None:
            return known.gain
        if not 0 <= pg_idx < len(self.param_groups):
            raise ValueError(f"Invalid {pg_idx=}. The optimizer has {len(self.param_groups)} parameter groups.")
        return known.gains[pg_idx % len(known.gains)]

    @property
    def scale(self) -> float:
        """S, global batch size / base batch size."""
        return self._scale

    @property
    def smoothing(self) -> float:
        """θ of the moving average over steps."""
        return self._smoothing

    @property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step: workers × accumulation passes."""
        return self._world_size * self._accumulate

    @property
    def effective_steps(self) -> float:
        """τ, Σ r over the optimizer steps taken."""
        self._settle()
        return self._effective_steps

    @property
    def known_effective_steps(self) -> float:
        """τ as far as the host knows without waiting: it may lack the last step's r, which is at most S (or 1, if larger)."""
        return self._effective_steps

    @property
    def steps(self) -> int:
        """Optimizer steps taken, without those that were skipped."""
        self._settle()
        return self._steps

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last ``step()`` met a non-finite gradient and so did nothing."""
        self._settle()
        return self._last.skipped

    @property
    def lr_factor(self) -> float:
        """What the rule multiplied the LR by in the last step (of the whole optimizer, not of one group)."""
        self._settle()
        return self._last.lr_factor

    @property
    def last_sigma2(self) -> float:
        """σ² of the last step alone, unaveraged; NaN where it was skipped or says nothing."""
        self._settle()
        return self._last.sigma2

    @property
    def last_mu2(self) -> float:
        """μ² of the last step alone, unaveraged; NaN where it was skipped or says nothing."""
        self._settle()
        return self._last.mu2

    def group_moments(self) -> tuple[list[float], list[float]]:
        """Averaged (σ², μ²) of each gain's group, unclipped, with the gradients in place; NaN before the first sample."""
        known = self._know()
        return known.sigma2, known.mu2

    def average_moments(self) -> tuple[float, float]:
        """Averaged (σ², μ²), summed over groups; NaN before the first sample."""
        return self._know(committed=True).total_moments()

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Change S between steps. The averages stay as they are: σ² is per base batch and does not depend on S.

        Args:
            scale: The new S.
            update_estimate: Accepted for FairScale's sake; there is nothing to rescale.
        """
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"Invalid {scale=}. Must be a positive number: global batch size / base batch size.")
        self._settle()
        self._scale = float(scale)
        self._previous = None  # gradients of batches of different size have different noise
        self._attach()
        if self.num_samples == 1 and scale > 1 and not self._warned_single_sample:
            self._warned_single_sample = True
            warnings.warn(
                f"One gradient sample a step at scale {scale:g}: its variance is estimated from consecutive steps, which "
                "overstates the gain. Use two or more accumulation passes.",
                stacklevel=2,
            )

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Change the backward passes per step. Between n = 1 and n > 1 the estimator changes: the averages restart."""
        if num_gradients_to_accumulate < 1:
            raise ValueError(f"Invalid {num_gradients_to_accumulate=}. Must be at least 1.")
        self._require_boundary("set_num_gradients_to_accumulate")
        self._settle()
        was = self.num_samples if self._accumulate else None
        self._accumulate = num_gradients_to_accumulate
        if update_smoothing:
            self._smoothing = gain_math.count_decay(self.num_samples)
        if was is not None and (was == 1) != (self.num_samples == 1):
            self._averages = self._empty_averages()
        self._previous = None
        self._attach()

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the accumulated gradients by the number of passes, where the loss was not (``is_scaled_loss=False``)."""
        if self._is_scaled_loss:
            raise RuntimeError("is_scaled_loss=True says that the loss was divided already.")
        grads = self._step_gradients()
        if grads:
            torch._foreach_div_(grads, self._accumulate)

    def unhook(self) -> None:
        """Stop watching gradients; ``step()`` goes on with the averages as they are."""
        if self._observer is not None:
            self._observer.detach()
        self._observer = None
        self._unhooked = True

    # ---- one optimizer step's statistics -------------------------------------------------------------------------

    _unhooked = False
    _scale = 1.0

    @property
    def at_boundary(self) -> bool:
        """Whether this is a step boundary: no backward pass since the last step."""
        return self._passes == 0 and self._sample is None

    def _require_boundary(self, what: str) -> None:
        if not self.at_boundary:
            raise RuntimeError(
                f"{what}() between a backward pass and step(): gradients of an unfinished step would be lost. Call it at "
                "a step boundary, after step() (or zero_grad()) and before the next backward pass."
            )

    @property
    def _reducing(self) -> bool:
        return self._world_size > 1 and dist.is_available() and dist.is_initialized()

    @property
    def _sharded_gradients(self) -> bool:
        """Whether this worker has only its share of the reduced gradient."""
        inner = self._optimizer
        return isinstance(inner, OSS) and inner.reducer is not None and inner.world_size > 1

    def _step_gradients(self) -> list[Tensor]:
        """The gradients that the wrapped optimizer will use on this worker."""
        if isinstance(self._optimizer, OSS):
            return self._optimizer.step_gradients()
        return [_local(p.grad.detach()) for p in self._params() if p.grad is not None]

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _empty_averages(self) -> Average:
        groups = 1 if self._single_gain else len(self.param_groups)
        params = self._params()
        device = params[0].device if params else torch.device("cpu")
        # One weight and one count a group, since a group may be added later.
        return Average(
            torch.zeros((2, groups), dtype=torch.float64, device=device),
            torch.zeros(groups, dtype=torch.float64, device=device),
            torch.zeros(groups, dtype=torch.int64, device=device),
        )

    def _begin_step(self) -> None:
        self._passes = 0
        self._mean_sq_norm: Tensor | None = None  # A so far, this worker's part
        self._sent: tuple[Tensor, dist.Work | None] | None = None  # the all-reduce that is under way
        if self._observer is not None:
            self._observer.last_pass = self._accumulate == 1
        self._sample = None

    def _attach(self) -> None:
        """(Re)install the observer: none where a single sample at S = 1 has nothing to tell."""
        if self._observer is not None:
            self._observer.detach()
            self._observer = None
        sharded = any(is_dtensor(p) for p in self._params())
        if sharded and self._model is None and not self._unhooked:
            raise ValueError(
                "The optimizer's parameters are DTensors. Give AdaScale(..., model=model), the model that fully_shard was "
                "applied to: gradient samples are measured on its unsharded parameters."
            )
        if not self._unhooked and not (self.num_samples == 1 and self._scale == 1):
            groups = [group["params"] for group in self.param_groups]
            local = self.num_samples > 1
            if sharded:
                self._observer = self._fsdp2_observer(groups, local)
                return
            if self._sharded_gradients:
                if self._precondition is not None:
                    raise ValueError(
                        "precondition= needs whole gradients on every worker. Leave it out, or train with "
                        "DistributedDataParallel."
                    )
                oss = cast(OSS, self._optimizer)
                self._observer = cast(GradientReducer, oss.reducer).observe(
                    oss, self, accumulating=self._accumulate > 1
                )
                return
            if isinstance(self._model, DistributedDataParallel) and local and self._accumulate == 1:
                # Of several passes, a bucket holds the sum; a precondition is of one parameter.
                self._observer = None if self._precondition else bucket_observer(self._model, groups, self)
            if self._observer is None:
                early = reduces_in_one_round(self._model)
                self._observer = HookObserver(groups, self, local=local, precondition=self._precondition, early=early)

    def _fsdp2_observer(self, groups: Sequence[Sequence[Tensor]], local: bool) -> GradientObserver:
        if self._precondition is not None:
            raise ValueError(
                "precondition= needs whole parameters and their optimizer state, which fully_shard splits over workers. "
                "Leave it out, or train with DistributedDataParallel."
            )
        from ..parallel.fsdp2 import FSDP2Observer  # here, since DTensor takes half a second to import

        model = cast(torch.nn.Module, self._model)
        return FSDP2Observer(groups, self, model=model, world_size=self._world_size, local=local)

    @torch.no_grad()
    def on_local(self, observer: GradientObserver) -> None:
        """The observer's word that a backward pass has ended on this worker; reduced gradients may yet be on their way."""
        if self._sample is not None:
            # The last step was complete and never taken: a GradScaler that found an overflow leaves step() out.
            self._previous = None
            self._begin_step()
        if self.num_samples > 1:
            n = self.num_samples
            weight = 1 / n if self.sample_weights is None else self.sample_weights[self._passes]
            # The loss, and so the gradient, carried c = n·w_i (and 1/passes, if scaled): w_i‖g_i‖² = w_i/c²·‖c·g_i‖².
            c = n * weight / (self._accumulate if self._is_scaled_loss else 1)
            part = observer.local_sq_norms() * (weight / c**2)
            self._mean_sq_norm = part if self._mean_sq_norm is None else self._mean_sq_norm + part
        self._passes += 1
        observer.last_pass = self._passes + 1 == self._accumulate
        if self._passes == self._accumulate and observer.reduced_everywhere:
            # Only A is still in parts. Sent off now, it travels behind the last gradients while we wait for those anyway.
            self._sent = self._send([])

    @torch.no_grad()
    def on_reduced(self, observer: GradientObserver) -> None:
        """The observer's word that reduced gradients are in place, if this was the step's last pass."""
        if self._passes == self._accumulate:
            self._sample = self._gather(observer)

    def _send(self, more: Sequence[Tensor]) -> tuple[Tensor, dist.Work | None]:
        """Start the one small all-reduce of a step: A, whether all passes were seen, the rider, and whatever else is in parts."""
        device = self._averages.total.device
        local = self._mean_sq_norm
        if local is None:
            local = torch.zeros(len(self.param_groups), dtype=torch.float64, device=device)
        parts = [*more, local, torch.full((1,), self._passes == self._accumulate, dtype=torch.float64, device=device)]
        if self.rider is not None:
            parts.append(self.rider().to(local))
        vector = torch.cat(parts)
        work = dist.all_reduce(vector, group=self._process_group, async_op=True) if self._reducing else None
        return vector, work

    def _gather(self, observer: GradientObserver) -> _Sample:
        """Wait for the sums over workers, and turn them into σ² and μ²."""
        groups = len(self.param_groups)
        if observer.reduced_everywhere:
            # Equal to the last bit on all workers, as their weights are: each takes C from its own copy.
            c = observer.reduced_sq_norms(0, 1)
            vector, work = self._send([]) if self._sent is None else self._sent
            if work is not None:
                work.wait()
        else:
            rank, world_size = (dist.get_rank(self._process_group), self._world_size) if self._reducing else (0, 1)
            both, work = self._send([observer.reduced_sq_norms(rank, world_size)])
            if work is not None:
                work.wait()
            c, vector = both[:groups], both[groups:]
        a, complete, self.rider_sum = vector[:groups], vector[groups], vector[groups + 1 :]
        if not self._is_scaled_loss:
            c = c / self._accumulate**2
        unscale: Tensor | float = 1.0
        if self._grad_scaler is not None and self._grad_scaler.is_enabled():
            # scale(1) is the loss scale as a tensor; get_scale() would wait for the device.
            unscale = 1 / self._grad_scaler.scale(torch.ones((), device=c.device)).double()
            a, c = a * unscale**2, c * unscale**2
        if self._single_gain and groups > 1:
            a, c = a.sum(dim=0, keepdim=True), c.sum(dim=0, keepdim=True)
        finite, known = torch.isfinite((a + c).sum()), complete > 0
        if not observer.complete:
            # A gradient of a parameter that was frozen when the hooks were set, or (none of the passes is known) that no
            # backward pass has made: C counts it and A does not. The step is taken with the averages as they are.
            return _Sample(None, known, finite)
        if self.num_samples > 1:
            moments = gain_math.gradient_moments(a, c, scale=self._scale, count=self.num_samples)
            return _Sample(torch.stack(moments), known, finite)
        if self._scale == 1:
            return _Sample(None, known, finite)
        before, params = self._previous, self._params()
        gradient = [None if p.grad is None else _local(p.grad.detach()) * unscale for p in params]
        self._previous = KeptGradient(gradient, finite)
        if before is None:
            return _Sample(None, known, finite)
        products = self._previous.products_with(before, [len(group["params"]) for group in self.param_groups])
        if self._single_gain:
            products = products[0].sum(0, keepdim=True), products[1].sum(0, keepdim=True)
        moments = gain_math.differenced_moments(*products, scale=self._scale)
        return _Sample(torch.stack(moments), known & before.finite, finite)

    def _sample_without_passes(self) -> _Sample:
        """Nothing was watched (a lone sample at S = 1, or unhooked): only look whether the gradients are finite."""
        device = self._averages.total.device
        yes = torch.ones((), dtype=torch.bool, device=device)
        # The norm of norms is the norm; torch gives that of an fp16 gradient in fp16, where it may overflow by itself.
        grads = [take_norm(g) if g.is_sparse or g.dtype is torch.float16 else g for g in self._step_gradients()]
        finite = (torch.nn.utils.get_total_norm(grads) < math.inf).to(device) if grads else yes
        if self._reducing and (self._sharded_gradients or any(is_dtensor(p) for p in self._params())):
            # Each worker has seen its shards only; all of them must skip the step, or none.
            flag = finite.float()
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._process_group)
            finite = flag > 0
        self.rider_sum = None if self.rider is None else self.rider()
        return _Sample(None, ~yes, finite)

    # ---- averages and gain ---------------------------------------------------------------------------------------

    def _with(self, sample: _Sample) -> Average:
        """The averages with this sample in them; computed once, committed by ``step()``."""
        if sample.averages is None:
            sample.averages = self._averages
            if sample.moments is not None:
                moments = sample.moments
                if self._clip_samples:
                    moments = torch.stack([moments[0].clamp(min=self._variance_floor), moments[1].clamp(min=0.0)])
                use = sample.finite & sample.known
                sample.averages = self._averages.update(moments, self._decay(), debias=self._debias, use=use)
        return sample.averages

    def _decay(self) -> float | Tensor:
        if self._window is None:
            return self._smoothing
        previous_gain = torch.full((), self._previous_gain, dtype=torch.float64)
        total_steps = cast(float, self._total_steps)
        return gain_math.effective_decay(previous_gain, window=self._window, total_steps=total_steps)

    def _know(self, *, committed: bool = False) -> Known:
        """What the averages say, with the gradients in place unless ``committed``: one wait for the device."""
        self._settle()
        averages = self._averages if committed or self._sample is None else self._with(self._sample)
        if self._known is None or not self._known.of(averages, self._scale):
            numbers = numbers_of(averages, self._scale, self._variance_floor)
            self._known = Known.from_numbers(averages, self._scale, numbers.tolist())
        return self._known
