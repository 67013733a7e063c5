"""AdaScale: an optimizer wrapper that multiplies the learning rate by the gain of the batch that is stepped with.

The constructor and methods are those of FairScale's ``AdaScale``; what they compute is in :mod:`ray_adascale.gain`.
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .. import gain as gain_math
from .._torch import called_to_make_state, is_dtensor, uncompiled
from .._warn import warn_at_user
from ..gain import Average
from ..sharding.oss import OSS
from .averages import Averages, Known
from .deferred import HostCopy, LastStep, skippable_step, steps_on_device
from .gradient_statistics import GradientStatistics, OpenEnded, Sample
from .rules import AdaScaleRule, RuleInput, ScalingRule

__all__ = ["AdaScale"]

# GradScaler looks for these on the optimizer it steps. Found on the wrapper by forwarding, they would hand it scaled
# gradients; without them it unscales first and leaves out step() when a gradient is not finite.
_NEVER_FORWARDED = frozenset({"_step_supports_amp_scaling", "grad_scale", "found_inf"})


class AdaScale(Optimizer):
    """Wraps an SGD-like optimizer; ``step()`` uses ``lr · r`` with the gain r of the gradients that it steps with.

    Use it like the optimizer itself: any ``torch.optim.lr_scheduler`` may be built on the wrapper or on what it wraps.
    The number of optimizer steps so far on the base batch's clock is :attr:`effective_steps`; drive the schedule with
    it, and stop when it reaches the number of steps that the schedule was made for.

    Collective: the last backward pass of a step ends with one small all-reduce over ``process_group``.

    It may be built before ``init_process_group``: unless ``world_size`` or ``process_group`` is given, the workers there are
    at its first backward pass are those that share the batch, and S, n and θ are as if they had been there from the start.

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
        variance_floor: Lower bound on each σ². 1e-6 reproduces FairScale's numbers, to its float32; 0 (default)
            makes the gain independent of the gradients' magnitude.
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
            buckets are to be measured (:func:`ray_adascale.measure.ddp.measure_buckets`).

    Raises:
        ValueError: An argument is out of its range, or the optimizer is wrapped already, or its parameters are sharded in
            a way that is not supported.
    """

    refuses_sharding: ClassVar[str] = (
        "OSS can't shard AdaScale: wrap the other way round, AdaScale(OSS(...)), so that every worker has the same gain."
    )
    """What OSS says where it is asked to shard an optimizer of this class; OSS itself knows nothing of AdaScale."""

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
        if isinstance(optimizer, LBFGS):
            raise ValueError("AdaScale can't wrap LBFGS, which evaluates the model several times within one step.")
        inner = optimizer.optim if isinstance(optimizer, OSS) else optimizer
        closure = inspect.signature(type(inner).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"AdaScale can't wrap {type(inner).__name__}, whose step needs the closure: it evaluates the model within the "
                "step, and the gain is that of the gradients before it. Use it without AdaScale."
            )
        if clip not in ("samples", "averages"):
            raise ValueError(f"Invalid {clip=}. Must be 'samples' or 'averages'.")
        if averaging_window is not None and (smoothing is not None or total_steps is None):
            raise ValueError(f"{averaging_window=} needs total_steps, and excludes smoothing (got {smoothing=}).")
        if averaging_window is not None and not (averaging_window > 0 and cast(float, total_steps) > 0):
            raise ValueError(f"Invalid {averaging_window=}, {total_steps=}. Both must be positive.")
        self._optimizer = optimizer
        super().__setstate__({})  # gives the hook registries and step profiling of Optimizer, without owning groups

        if process_group is None and isinstance(optimizer, OSS):
            process_group = optimizer.group
        initialized = dist.is_available() and dist.is_initialized()
        # Nobody has said who shares the batch, and there is no group to ask: one may come up before the first pass.
        self._workers_open = world_size is None and process_group is None and not initialized
        if world_size is None:
            world_size = dist.get_world_size(process_group) if initialized else 1
        if world_size < 1:
            raise ValueError(f"Invalid {world_size=}. Must be at least 1.")
        if world_size > 1 and initialized:
            workers = dist.get_world_size(process_group)
            if workers != world_size:
                raise ValueError(
                    f"Invalid {world_size=}: the process group has {workers} workers. Leave it out, or give process_group=, the "
                    "workers that share the batch."
                )
        self._total_steps = total_steps
        self._single_gain = single_gain
        self._rule: ScalingRule = AdaScaleRule() if rule is None else rule
        self._sampler = GradientStatistics(
            optimizer,
            world_size=world_size,
            process_group=process_group,
            is_scaled_loss=is_scaled_loss,
            grad_scaler=grad_scaler,
            single_gain=single_gain,
            precondition=precondition,
            model=model,
        )
        if isinstance(optimizer, OSS):
            optimizer.when_reducer_attached(self._sampler.attach)

        self._averages = Averages(
            self._sampler,
            variance_floor=variance_floor,
            clip_samples=clip == "samples",
            debias=debias_ewma,
            window=averaging_window,
            total_steps=total_steps,
        )
        # The last step, while the host does not know what became of it.
        self._pending: tuple[HostCopy, Sample, float] | None = None  # S with them
        self._last = LastStep()
        self._warned_single_sample = False
        self._scale_follows = False
        self._theta_passes: int | None = None
        self._effective_steps = 0.0
        self._steps = 0
        self._previous_gain = 1.0
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate, update_smoothing=smoothing is None)
        if smoothing is not None:
            if not 0 <= smoothing < 1:
                raise ValueError(f"Invalid {smoothing=}. Must be in [0, 1).")
            self._averages.smoothing = smoothing
        if base_batch_size is not None or batch_size is not None:
            if scale is not None or not base_batch_size or not batch_size:
                raise ValueError(f"Give scale, or both of {base_batch_size=} and {batch_size=}.")
            scale = batch_size / base_batch_size
        self._base_batch_size = base_batch_size
        self.set_scale(float(self._sampler.num_samples if scale is None else scale))
        self._scale_follows = scale is None
        self._watch_for_workers()

    # ---- workers that come after this was built -------------------------------------------------------------------

    def _watch_for_workers(self) -> None:
        if self._workers_open:
            meet = weakref.WeakMethod(self._meet_workers)  # or the optimizer would wait for the garbage collector
            self._sampler.before_first_pass = lambda: meet()()  # type: ignore[misc]
            self._sampler.attach()

    def _meet_workers(self) -> None:
        """Take the workers of a process group that has come up since this was built, as if it had been there then.

        Raises:
            RuntimeError: It is too late for that.
        """
        if not self._workers_open or not dist.is_initialized():
            return
        workers = dist.get_world_size()
        if workers > 1:
            self._refuse_latecomers(workers)
            self._sampler.world_size = workers
            if self._scale_follows:
                self._sampler.scale *= workers
            if self._theta_passes is not None:
                self._averages.smoothing = gain_math.count_decay(workers * self._theta_passes)
            self._averages.follow_sampler()
            if self._sampler.observer is None:  # a pass was made before the group came up
                self._sampler.attach()
        self._workers_open = False

    def _meet_before_first_step(self) -> None:
        """The same, where it is not too late; else the next step will say so."""
        if self._workers_open and not self._steps and not isinstance(self._optimizer, OSS):
            self._meet_workers()

    def _refuse_latecomers(self, workers: int) -> None:
        why = None
        if self._steps:
            why = f"{self._steps} optimizer step{'s were' if self._steps > 1 else ' was'} taken (or loaded) as if alone"
        elif isinstance(self._optimizer, OSS):
            why = "its OSS was built before, and so shards nothing"
        if why is not None:
            raise RuntimeError(
                f"A process group of {workers} workers has come up since AdaScale was built, and {why}. Call "
                "init_process_group() first, and then build AdaScale (and load its state); or give AdaScale(..., "
                "world_size=1) where this process trains by itself."
            )

    @property
    def wrapped(self) -> Optimizer:
        """The optimizer that this one wraps: the user's own, or :class:`ray_adascale.OSS`."""
        return self._optimizer

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
        # Only called for names that the wrapper lacks. Its own two parts are missing while unpickling.
        if (
            name in _NEVER_FORWARDED
            or name in ("_optimizer", "_sampler")
            or (name.startswith("__") and name.endswith("__"))
        ):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"AdaScale(scale={self._sampler.scale:g}, n={self.num_samples}, {self._optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what was collected of an unfinished or skipped step."""
        self.discard_samples()
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def discard_samples(self) -> None:
        """Forgets what was collected of an unfinished or skipped step, and leaves gradients as they are."""
        self._sampler.begin_step()

    def complete_samples(self) -> None:
        """Says that no backward pass of this step is to come: takes part in what the others reduce, if none was made here.

        To be called before any other collective of the step, as :meth:`clip_grad_norm` and
        :class:`ray_adascale.ShardedGradScaler` do; :meth:`step` does by itself. Once is enough.

        Raises:
            RuntimeError: Called after fewer or more backward passes than ``num_gradients_to_accumulate``.
        """
        self._sampler.complete()

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterable[Tensor]], Iterable[Tensor]] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Clip the gradient that the next step will use to a norm, however it is sharded; collective. Leaves the gain.

        Args:
            max_norm: Largest norm.
            norm_type: p of the p-norm.
            filter_params_fn: As of :meth:`ray_adascale.OSS.clip_grad_norm`, and for an OSS only.
            process_group: Likewise.

        Returns:
            The norm before clipping, on the device.

        Raises:
            RuntimeError: Called after fewer or more backward passes than ``num_gradients_to_accumulate``.
            ValueError: The wrapped optimizer is no OSS, and there is a filter or a process group.
        """
        self._sampler.complete("clip_grad_norm")
        if isinstance(self._optimizer, OSS):
            return self._optimizer.clip_grad_norm(max_norm, norm_type, filter_params_fn, process_group=process_group)
        if filter_params_fn is not None or process_group is not None:
            raise ValueError("filter_params_fn and process_group are for sharded optimizers: AdaScale(OSS(...)).")
        norm = torch.nn.utils.clip_grad_norm_(self._sampler.params, max_norm, norm_type)
        return cast(Any, norm).full_tensor() if is_dtensor(norm) else norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer and watches its gradients from the next step on."""
        self._require_boundary("add_param_group")
        self._settle()
        self._optimizer.add_param_group(param_group)
        self._sampler.add_group()
        if not self._single_gain:
            self._averages.add_gain()

    @uncompiled  # Dynamo loses what is written around a fused optimizer's step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step with ``lr · r``; τ advances by r. A non-finite gradient changes nothing at all.

        Called by ``torch.distributed.checkpoint.state_dict`` to make an empty state, it makes the state and changes nothing else.

        Args:
            closure: Evaluates the model once and returns the loss; the gain is that of the gradients it leaves.

        Raises:
            RuntimeError: Called after fewer or more backward passes than ``num_gradients_to_accumulate``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        elif called_to_make_state(self._optimizer):
            self._optimizer.step()
            return None
        self._settle()
        if self._workers_open:
            self._meet_workers()
            if not self._steps:
                self._warn_of_single_sample(stepping=True)
        sample = self._sampler.finish()
        averages = self._with(sample)
        inner = self._optimizer.optim if isinstance(self._optimizer, OSS) else self._optimizer
        if type(self._rule) is AdaScaleRule and steps_on_device(type(inner), self.param_groups):
            numbers = self._averages.numbers(averages)
            gains = numbers[: averages.total.shape[1]].unbind()
            skippable_step(inner, ~sample.finite, lambda: self._step_with(gains))
            self._averages.keep(averages)
            self._pending = HostCopy(torch.cat([sample.outcome(), numbers])), sample, self._sampler.scale
        else:
            self._step_on_host(sample, averages)
        self._sampler.end_step()
        if self._workers_open:
            self._sampler.after_first_step()
        return loss

    def _step_on_host(self, sample: Sample, averages: Average) -> None:
        known = self._averages.known(averages)
        if known is None:
            numbers = torch.cat([sample.outcome(), self._averages.numbers(averages)])
            last, rest = sample.unpack(numbers.tolist())
        else:
            last, rest = sample.on_host(), []
        if last.skipped:
            self._leave_out(last)
            return
        if known is None:
            known = self._averages.learn(averages, rest)
        before = self._effective_steps
        factors = [self._apply_rule(r, i)[0] for i, r in enumerate(known.gains)]
        factor, increment = self._apply_rule(known.gain, None)
        self._step_with(factors)
        self._averages.keep(averages)
        self._advance(known.gain, before + increment, replace(last, lr_factor=factor))

    @torch.no_grad()
    def skip_step(self) -> None:
        """End a step without taking it, as a GradScaler that found an overflow does: weights, averages and τ stay.

        Raises:
            RuntimeError: Called after fewer or more backward passes than ``num_gradients_to_accumulate``.
        """
        self._settle()
        self._meet_workers()
        sample = self._sampler.finish()
        self._leave_out(sample.on_host())
        self._sampler.end_step()

    def _leave_out(self, last: LastStep) -> None:
        self._sampler.previous = None
        self._last = replace(self._last, skipped=True, payload=last.payload)
        if isinstance(self._optimizer, OSS):
            self._optimizer.discard_gradients()

    def _settle(self) -> None:
        """Wait for the outcome of a step that was taken on the device, and act on it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        numbers, sample, scale = pending
        last, rest = sample.unpack(numbers.read())
        known = self._averages.learn(self._averages.now, rest, scale)
        if last.skipped:
            self._last = replace(self._last, skipped=True, payload=last.payload)
        else:
            self._advance(known.gain, self._effective_steps + known.gain, replace(last, lr_factor=known.gain))

    def _advance(self, gain: float, effective_steps: float, last: LastStep) -> None:
        self._previous_gain, self._effective_steps, self._last = gain, effective_steps, last
        self._steps += 1

    def _apply_rule(self, r: float, group: int | None) -> tuple[float, float]:
        return self._rule(
            RuleInput(
                gain=r,
                scale=self._sampler.scale,
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
        if self._sampler.scale == 1:
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
        inner, statistics = self._optimizer.state_dict(), self.statistics_state()
        # torch.distributed.checkpoint.state_dict carries over "state" and "param_groups" only, and takes tensors for the
        # model's. So the statistics are in the first group too, as numbers; without g_{t−1}, which starts afresh.
        numbers = {k: v.tolist() for k, v in statistics.items() if not k.startswith("previous_gradient")}
        first, *others = inner["param_groups"]
        return {**inner, "param_groups": [{**first, "adascale": numbers}, *others], "adascale": statistics}

    def statistics_state(self) -> dict[str, Tensor]:
        """AdaScale's own state without the wrapped optimizer's: tensors on the CPU that alias nothing."""
        self._require_boundary("statistics_state")
        self._settle()
        state = {
            **self._averages.state(),
            "effective_steps": torch.tensor(self._effective_steps, dtype=torch.float64),
            "previous_gain": torch.tensor(self._previous_gain, dtype=torch.float64),
            "steps": torch.tensor(self._steps),
        }
        previous = self._sampler.previous
        return state if previous is None else {**state, **previous.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a :meth:`state_dict`, which is left as it is. σ² is per base batch, so S and n may differ from then.

        Raises:
            ValueError: The statistics are of another number of parameter groups.
        """
        self._require_boundary("load_state_dict")
        self._settle()
        self._meet_before_first_step()
        groups = state_dict["param_groups"]
        inner = {key: value for key, value in state_dict.items() if key != "adascale"}
        inner["param_groups"] = [{k: v for k, v in group.items() if k != "adascale"} for group in groups]
        statistics = state_dict.get("adascale")
        if statistics is None and "adascale" in groups[0]:
            dtypes = {k: v.dtype for k, v in self.statistics_state().items()}
            statistics = {k: torch.tensor(v, dtype=dtypes[k]) for k, v in groups[0]["adascale"].items()}
        if statistics is not None:
            self._averages.check(statistics)
        self._optimizer.load_state_dict(inner)
        if statistics is None:
            warnings.warn("The state dict has no AdaScale statistics; the averages and τ start afresh.", stacklevel=2)
            self._averages.restart()
            self._effective_steps, self._steps, self._previous_gain = 0.0, 0, 1.0
            self._sampler.previous = None
        else:
            self.load_statistics_state(statistics)
        self._sampler.begin_step()

    def load_statistics_state(self, state: dict[str, Tensor]) -> None:
        """Loads what :meth:`statistics_state` returned."""
        self._averages.check(state)
        self._settle()
        self._meet_before_first_step()
        self._averages.load(state)
        self._effective_steps = float(state["effective_steps"])
        self._previous_gain = float(state["previous_gain"])
        self._steps = int(state["steps"])
        self._sampler.load_previous(state if self._averages.num_samples == 1 else {})

    def __getstate__(self) -> dict[str, Any]:
        # __setstate__ makes a new step(), and new hooks on the new parameters.
        self._settle()
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})
        self._sampler.begin_step()
        self._sampler.attach()
        self._watch_for_workers()

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
        self._meet_before_first_step()
        return self._sampler.scale

    @property
    def smoothing(self) -> float:
        """θ of the moving average over steps."""
        self._meet_before_first_step()
        return self._averages.theta()

    @property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step: workers × accumulation passes."""
        self._meet_before_first_step()
        return self._sampler.num_samples

    @property
    def effective_steps(self) -> float:
        """τ, Σ r over the optimizer steps taken; may be set, to move the clock."""
        self._settle()
        return self._effective_steps

    @effective_steps.setter
    def effective_steps(self, effective_steps: float) -> None:
        self._settle()
        self._effective_steps = float(effective_steps)

    @property
    def known_effective_steps(self) -> float:
        """τ as far as the host knows without waiting: it may lack the last step's r, which is at most S (or 1, if larger)."""
        return self._effective_steps

    @property
    def last_step_known(self) -> bool:
        """Whether the host knows r of the last step, so that asking for it waits for nothing."""
        return self._pending is None

    @property
    def last_gain(self) -> float:
        """r of the last step that was taken, whatever gradients are in place; 1 before the first."""
        self._settle()
        return self._previous_gain

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
        self._require_boundary("set_scale")
        self._settle()
        self._meet_before_first_step()
        self._sampler.be_whole()
        self._sampler.scale, self._scale_follows = float(scale), False
        self._sampler.previous = None  # gradients of batches of different size have different noise
        self._sampler.attach()
        self._warn_of_single_sample()

    def _warn_of_single_sample(self, *, stepping: bool = False) -> None:
        sampler = self._sampler
        if sampler.num_samples > 1 or sampler.scale <= 1 or self._warned_single_sample:
            return
        if self._workers_open and not self._steps and not stepping:
            return  # there may yet be several
        self._warned_single_sample = True
        alone = ", as there is one process (init_process_group() was not called) with one pass"
        warn_at_user(
            f"One gradient sample a step at scale {sampler.scale:g}{alone if self._workers_open else ''}: its variance is "
            "estimated from consecutive steps, which overstates the gain. Use two or more accumulation passes "
            "(AdaptiveDataParallel: all but the last under no_sync())."
        )

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Change the backward passes per step. Between n = 1 and n > 1 the estimator changes: the averages restart."""
        if num_gradients_to_accumulate < 1:
            raise ValueError(f"Invalid {num_gradients_to_accumulate=}. Must be at least 1.")
        self._require_boundary("set_num_gradients_to_accumulate")
        self._settle()
        self._meet_before_first_step()
        self._sampler.be_whole()
        self._sampler.accumulation, self._sampler.open_ended = num_gradients_to_accumulate, None
        if update_smoothing:
            self._theta_passes = num_gradients_to_accumulate
            self._averages.smoothing = gain_math.count_decay(self._sampler.num_samples)
        self._averages.follow_sampler()
        self._sampler.previous = None
        self._sampler.attach()

    def expect_passes(self, passes: int, *, scale: float | None = None, loss_divided_by: int | None = None) -> None:
        """Say that one optimizer step has fewer backward passes than declared, as the last of an epoch may.

        That is the step under way, or at a step boundary the one that comes next; those after it have all passes again. S and
        n are then those of the passes that are made, and the step counts for as much. The averages stay: σ² is per base batch.
        Where n is 1 by this, the step adds nothing to them. All workers say the same.

        Args:
            passes: How many, at most ``num_gradients_to_accumulate``. To be said before the last of them begins.
            scale: S of this step. Default: S · passes / num_gradients_to_accumulate. Where its last micro-batch is
                smaller than the others: examples over all workers and passes / base batch size.
            loss_divided_by: What the loss of each pass is divided by, where that is not ``passes``: some loops divide by
                ``num_gradients_to_accumulate`` all the same. The gradient is then multiplied by the quotient, after the
                last pass, so that it is a mean.

        Raises:
            ValueError: So many passes can't be those of this step.
            RuntimeError: Accumulation is open-ended, and passes are counted anyway.
        """
        sampler = self._sampler
        self._settle()
        self._meet_before_first_step()
        if sampler.open_ended is not None:
            raise RuntimeError("Open-ended accumulation counts the passes of each step; leave expect_passes() out.")
        declared, made = sampler.declared_passes, sampler.passes if sampler.sample is None else 0
        if isinstance(passes, bool) or not isinstance(passes, int) or not made < passes <= declared:
            raise ValueError(
                f"Invalid {passes=}. This step may have {made + 1} to {declared} backward passes: {made} were made, and "
                f"num_gradients_to_accumulate is {declared}. Say it before the last pass begins."
            )
        if loss_divided_by is not None and (loss_divided_by < 1 or not sampler.is_scaled_loss):
            raise ValueError(f"Invalid {loss_divided_by=}. Must be at least 1, and needs is_scaled_loss=True.")
        if scale is None:
            scale = sampler.declared_scale * passes / declared
        elif not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"Invalid {scale=}. Must be a positive number: examples of this step / base batch size.")
        sampler.be_short(passes, float(scale), loss_divided_by)

    @property
    def ends_early(self) -> Callable[[], bool] | None:
        """Asked as each pass begins, but for the declared last: whether it is the step's last. None: :meth:`expect_passes` says.

        For a loop that others own, which divides the loss by ``num_gradients_to_accumulate`` in every step. S follows as
        :meth:`expect_passes` has it.
        """
        return self._sampler.ends_early

    @ends_early.setter
    def ends_early(self, ends_early: Callable[[], bool] | None) -> None:
        self._sampler.ends_early = ends_early

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the accumulated gradients by the number of passes, where the loss was not (``is_scaled_loss=False``)."""
        if self._sampler.is_scaled_loss:
            raise RuntimeError("is_scaled_loss=True says that the loss was divided already.")
        self._sampler.divide_gradients()

    def unhook(self) -> None:
        """Stop watching gradients; ``step()`` goes on with the averages as they are."""
        self._sampler.unhook()

    # ---- what the trainer and AdaptDL's classes have a share in ---------------------------------------------------

    def set_open_ended_accumulation(self, open_ended: OpenEnded) -> None:
        """From the next step on, count the backward passes until one reduces gradients, instead of declaring their number.

        S, n and θ then follow from their number, and the gradient is divided by it. Where a step has one gradient sample and
        the one before had several, or the other way round, the averages restart.

        Args:
            open_ended: What tells a step's last pass, and S and θ once it is known.

        Raises:
            ValueError: ``is_scaled_loss=True`` says that the loss is divided by a number that nobody knows yet.
        """
        if self._sampler.is_scaled_loss:
            raise ValueError(
                "Open-ended accumulation needs AdaScale(..., is_scaled_loss=False): gradients are divided."
            )
        self._require_boundary("set_open_ended_accumulation")
        self._settle()
        self._sampler.open_ended = open_ended
        self._sampler.accumulation, self._sampler.scale = 1, open_ended.scale(1)
        self._sampler.previous = None
        self._sampler.attach()

    @property
    def sample_weights(self) -> Sequence[float] | None:
        """w of this worker's gradient sample in each pass, where micro-batches are unequal; None: all 1/n."""
        return self._sampler.weights

    @sample_weights.setter
    def sample_weights(self, weights: Sequence[float] | None) -> None:
        self._sampler.weights = weights

    @property
    def payload(self) -> Tensor | None:
        """Returns 1-D numbers whose sum over workers, in the same all-reduce, is :attr:`payload_sum`; a step calls it once."""
        return self._sampler.payload

    @payload.setter
    def payload(self, payload: Tensor | None) -> None:
        self._sampler.payload = payload

    @property
    def payload_sum(self) -> Sequence[float]:
        """The last step's :attr:`payload`, summed over workers; read together with the step's own numbers."""
        self._settle()
        return self._last.payload

    @property
    def last_step(self) -> Any:
        import types

        self._settle()
        last = self._last
        return types.SimpleNamespace(
            gain=self._previous_gain,
            effective_steps=self._effective_steps,
            sigma2=last.sigma2,
            mu2=last.mu2,
            skipped=last.skipped,
            payload=last.payload,
        )

    @property
    def at_boundary(self) -> bool:
        """Whether this is a step boundary: no backward pass since the last step."""
        return self._sampler.at_boundary

    @property
    def passes(self) -> int:
        """Backward passes since gradients were last stepped with or cleared."""
        return self._sampler.passes

    def _require_boundary(self, what: str) -> None:
        if not self.at_boundary:
            raise RuntimeError(
                f"{what}() between a backward pass and step(): gradients of an unfinished step would be lost. Call it at "
                "a step boundary, after step() (or zero_grad()) and before the next backward pass."
            )

    def _with(self, sample: Sample) -> Average:
        """The averages with this sample in them."""
        if sample.averages is None and self._sampler.open_ended is not None:
            self._warn_of_single_sample()
        return self._averages.with_sample(sample, self._previous_gain)

    def _know(self, *, committed: bool = False) -> Known:
        """What the averages say, with the gradients in place unless ``committed``: one wait for the device."""
        self._settle()
        sample = self._sampler.sample
        return self._averages.know(self._averages.now if committed or sample is None else self._with(sample))
