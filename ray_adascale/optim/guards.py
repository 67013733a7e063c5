"""What AdaScale looks at for mistakes of the program around it, in any loop. None of
it changes a step.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._torch import Versions, unwrapped_name, versions, was_unscaled
from .._warn import warn_at_user, warn_on_first_worker
from ..batch import StepPlan
from ..chain import parts_of
from ..measure.identity import Identity
from ..sharding.kinds.sharding import Sharding
from ..sharding.kinds.state import state_of
from .next_state import MOST_SKIPPED
from .step_sums import StepResult, StepSums

# ---- the passes ----------------------------------------------------------------------


class UnchangedGradients:
    """Notices whether gradients change between the passes of a step: a loop clears,
    clips or scales them.

    Attributes:
        of_run: Whether the loop is that of a ``Run``, which clears gradients itself.
    """

    def __init__(self) -> None:
        self.of_run = False
        self._left: Versions | None = None
        self._noted = slice(None)

    def note(self, gradients: Sequence[Tensor | None], *, one: bool) -> None:
        """Note the gradients that a pass has left.

        Args:
            gradients: Of all parameters.
            one: Note the first one alone, which costs less: a loop that clears or clips
                does so with all.
        """
        self._noted = slice(None)
        if one:
            first = 0
            while first < len(gradients) - 1 and gradients[first] is None:
                first += 1
            self._noted = slice(first, first + 1)
        self._left = versions(gradients[self._noted])

    def fault(self, gradients: Callable[[], Sequence[Tensor | None]]) -> str | None:
        """Return the error of changed gradients, as the next pass begins; None if they
        are the same.

        Args:
            gradients: Returns those of now.
        """
        if self._left is None:
            return None
        now = versions(gradients()[self._noted])
        if now == self._left:
            return None
        for then, after in zip(self._left, now, strict=False):
            if then is not None and after is None:
                return CLEARED[self.of_run]
        return _CHANGED[self.of_run]

    def forget(self) -> None:
        """The step has ended, or its gradients were cleared."""
        self._left = None


FOREIGN_PASS = (
    "loss.backward() was called in the loop beside run.backward(), so a micro-batch "
    "has several backward passes. Add the losses, and call run.backward() once: "
    "run.backward(loss + other_loss). For gradients in evaluate, or of inputs, call "
    "torch.autograd.grad(), which leaves those of the step alone."
)

CLEARED = {
    True: "Gradients were cleared between the passes of an optimizer step, so all "
    "micro-batches but the step's last would be lost. Delete "
    "optimizer.zero_grad() or model.zero_grad() from the loop: run.step() clears "
    "the gradients after each step.",
    False: "Gradients were cleared between the passes of an optimizer step, so the "
    "earlier ones would be lost. Call optimizer.zero_grad() once a step, after "
    "optimizer.step(), and before a step that is repeated after an exception. "
    "The number of passes is AdaScaleConfig(accumulation=...), or "
    "num_gradients_to_accumulate.",
}
_CHANGED = {
    True: "Gradients were changed between the passes of an optimizer step, and the "
    "next passes would add to changed gradients. Delete optimizer.zero_grad() "
    "from the loop: run.step() clears the gradients. Clip once a step: "
    "run.clip_grad_norm_(), which does nothing before the last pass, "
    "AdaScaleConfig(grad_clip=...), or by hand `if run.is_last_pass:`.",
    False: "Gradients were changed between the passes of an optimizer step, and the "
    "next passes would add to changed gradients. Clip or scale them after the "
    "step's last backward pass: `if optimizer.is_last_pass:`.",
}


# ---- the numbers of a step -----------------------------------------------------------

_EQUAL = 1e-6
_EQUAL_STEPS = 10
"""Largest σ²/μ² of equal gradient samples (the mean of three equal float32 numbers
is rounded), and steps before a warning.
"""


class EqualSamples:
    """Warns once if the gradient samples of several steps in a row were equal: A =
    C, and so σ² = 0.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned = False

    def read(self, step: StepResult) -> None:
        """Look at the numbers of a step that was taken."""
        if self._warned or math.isnan(step.mu2):
            return
        if step.mu2 <= 0 or abs(step.sigma2) > _EQUAL * step.mu2:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == _EQUAL_STEPS:
            self._warned = True
            warn_on_first_worker(
                f"All gradient samples of a step were equal in {_EQUAL_STEPS} steps in "
                "a row, so the gain is 1, and more workers or passes help nothing. Do "
                "all workers read the same examples, with equal seeds?"
            )


class FirstSkippedStep:
    """Warns of the first skipped step in a loop of the user's. A Run warns by itself,
    and a GradScaler skips steps until its scale fits.
    """

    def __init__(self) -> None:
        self._warned = False

    def read(self, taken: int) -> None:
        """Warn of a skipped step, once.

        Args:
            taken: Optimizer steps taken before it.
        """
        if self._warned:
            return
        self._warned = True
        warn_on_first_worker(
            f"An optimizer step was skipped after {taken} that were taken, because its "
            "gradient is not finite. Weights and effective_steps stay as they were. "
            f"Further ones are not warned of; the {MOST_SKIPPED}th in a row raises an "
            "error. Check the data, lower the learning rate, or clip gradients. A "
            "micro-batch whose entry of sample_weights is 0 needs a finite loss as "
            "well: divide by max(units, 1)."
        )


_UNSAMPLED = 3
"""Steps in a row without a sample before a warning."""


class UnsampledSteps:
    """Warns once if several steps in a row that were to be measured have no sample."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned = False

    def read(
        self,
        step: StepResult,
        sums: StepSums,
        unseen: Sequence[Tensor],
        sharding: Sharding,
    ) -> None:
        """Look at a step that was taken, in a loop whose gradients are observed.

        Args:
            step: The step.
            sums: Its sums.
            unseen: Parameters whose gradients were not measured.
            sharding: Has the model, for the names of its parameters.
        """
        if self._warned or sums.plan.num_samples == 1:
            return
        if not math.isnan(step.sigma2):
            self._in_a_row = 0
            return
        if not (sums.measured or sums.unobserved):
            return  # a step between two measured ones
        self._in_a_row += 1
        if self._in_a_row < _UNSAMPLED:
            return
        self._warned = True
        warn_on_first_worker(
            f"The noise of {_UNSAMPLED} steps in a row could not be measured, and the "
            f"gain stays as it was: {_why_unsampled(unseen, sharding)}"
        )


def _why_unsampled(unseen: Sequence[Tensor], sharding: Sharding) -> str:
    if not unseen:
        return (
            "no backward pass was seen in them. Gradients that the loop computes by "
            "torch.autograd.grad() or torch.func.grad(), or sets by hand (p.grad = "
            "...), are no samples of a micro-batch. Call loss.backward() once for each "
            "micro-batch."
        )
    names: dict[Tensor, str] = {}
    if sharding.model is not None:
        names = {
            p: unwrapped_name(name) for name, p in sharding.model.named_parameters()
        }
    listing = ", ".join(
        names.get(p, f"one of shape {tuple(p.shape)}") for p in unseen[:3]
    )
    return (
        f"gradients of {len(unseen)} parameters were not seen ({listing}). Build "
        "AdaScale after the model is on its device and in its dtype, and call the "
        "model's forward() rather than its parts."
    )


def check_identity(identity: Identity | None, step: StepResult) -> None:
    """Raise if the norms of a measured step were not those of the gradients that
    were reduced.
    """
    if identity is not None and not step.skips:
        identity.check(step.identity)


_WEIGHTS = (
    "Each weight is a micro-batch's share of the units (tokens, examples) of the whole "
    "step, over all workers and passes: optimizer.sample_weights = [units / "
    "units_of_the_step for each pass of this worker]. Sum the units over the workers "
    "(torch.distributed.all_reduce) before the step's last backward pass."
)
_SUM_TOLERANCE = 1e-3
"""Largest difference of the sum of weights from 1: they may be of float32."""


def check_weights(plan: StepPlan, weights: Sequence[float]) -> None:
    """Raise if the weights of a measured step are no shares of it. All workers raise
    alike. Where they add up to 1, A ≥ C, whatever they are.

    Args:
        plan: The step's plan.
        weights: Numbers over all workers: those that have set weights, the sum of the
            weights, and the samples that count.

    Raises:
        ValueError: Not all workers have weights, or these don't add up to 1.
    """
    workers, total, _ = weights
    if workers == 0:
        return
    if workers != plan.workers:
        raise ValueError(
            f"Invalid sample_weights: {workers:g} of {plan.workers} workers have set "
            f"them for this step. Set them on all workers, or on none. {_WEIGHTS}"
        )
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(
            "Invalid sample_weights: those of all workers and passes add up to "
            f"{total:g}. Must be 1. {_WEIGHTS}"
        )


# ---- the loss scale ------------------------------------------------------------------


def check_unscaled_once(
    scaler: GradScaler, wrapper: Optimizer, wrapped: Optimizer
) -> None:
    """Check that a scaler has not removed the loss scale twice, for AdaScale and for the
    optimizer inside: an SGD would train with a gradient 65,536 times too small.

    Raises:
        RuntimeError: It has.
    """
    if was_unscaled(scaler, wrapped) and was_unscaled(scaler, wrapper):
        raise RuntimeError(UNSCALED_TWICE)


UNSCALED_TWICE = (
    "The loss scale was removed from the gradient twice: scaler.unscale_() got the "
    "optimizer inside, and scaler.step() the one that attach() or AdaScale() returned. "
    "Pass that one to both."
)
"""Error message of :func:`check_unscaled_once` and of our own scaler."""


_SAME = 1e-3
"""Largest relative difference between two norms of the same gradient."""
_LEAST_HALVINGS = 8
"""Halvings of a gradient from which on they are taken for those of a scaler."""
_TRIES = 20
"""Steps in which :class:`LossScale` waits for a measured, finite gradient."""


class LossScale:
    """Looks in the first two measured steps of a loop of the user's whether the loss
    scale was removed from the gradient, and whether AdaScale was given the scaler.

    Compares the gradient that the last backward pass has left with that of
    ``step()``. A loop that clips has another one, and is not judged.

    Attributes:
        left: Steps to look at.
    """

    def __init__(self) -> None:
        self.left = 2
        self._tries = _TRIES
        self._removed_before: float | None = None

    def check(self, sums: StepSums, gradients: Sequence[Tensor | None]) -> None:
        """Look at a step before it is taken. Waits for the device.

        Args:
            sums: Its sums, with the norms as measured: with the loss scale.
            gradients: Those that the optimizer steps with.

        Raises:
            RuntimeError: The loss scale is still in the gradient.
        """
        self._tries -= 1
        if self._tries == 0:
            self.left = 0
        if not sums.measured:
            return
        present = [g for g in gradients if g is not None]
        if any(g.is_sparse for g in present):
            self.left = 0  # their norm may be that of several entries of an element
            return
        measured = float(sums.numbers["c"].sum().sqrt()) / sums.plan.multiple_of_mean
        stepped = float(torch.nn.utils.get_total_norm(present))
        if not (0 < measured < math.inf and 0 < stepped < math.inf):
            return  # a skipped step
        self.left = max(self.left - 1, 0)
        removed = measured / stepped
        if "loss_scale" in sums.numbers:
            self._check_known(float(sums.numbers["loss_scale"][0]), removed)
        else:
            self._look_for_scaler(removed)

    def _check_known(self, scale: float, removed: float) -> None:
        """Raise if nothing was removed from a gradient with a loss scale."""
        if scale >= 2**_LEAST_HALVINGS and math.isclose(removed, 1, rel_tol=_SAME):
            raise RuntimeError(
                f"The scaler's loss scale, {scale:g}, was not removed from the gradient: "
                "the loop calls optimizer.step(). Write scaler.step(optimizer) and "
                "scaler.update() in its place. If the loss is not scaled, leave out "
                "grad_scaler=scaler."
            )

    def _look_for_scaler(self, removed: float) -> None:
        """Warn if each of two steps has divided the gradient by a large power of 2."""
        halvings = round(math.log2(removed))
        power = 2.0**halvings
        if halvings < _LEAST_HALVINGS or not math.isclose(
            removed, power, rel_tol=_SAME
        ):
            self.left = 0
        elif self._removed_before is None:
            self._removed_before = power
        else:
            divided = f"{self._removed_before:g}"
            if power != self._removed_before:
                divided += f" and {power:g}"
            warn_on_first_worker(
                f"The gradient was divided by {divided} between the last backward pass "
                "and step(), as by a GradScaler. Its scale changes as training goes "
                "on, and the gain would be wrong then. Pass the scaler: attach(..., "
                "grad_scaler=scaler), or AdaScale(..., grad_scaler=scaler). If the "
                "loop divides by a number of its own, it is right."
            )


# ---- a scheduler of the loop's -------------------------------------------------------

_LOOKS = (10, 100, 1000)
"""Steps after which a loop's schedulers are looked at for :data:`_LOOKED_AT` steps."""
_LOOKED_AT = 10


def warn_of_steps_counted(wrapper: Any) -> None:
    """Warn once if the loop calls ``scheduler.step()`` once in each optimizer step, as
    without AdaScale, while τ advances by more. Waits for nothing.

    Args:
        wrapper: An AdaScale whose loop drives the schedule.
    """
    taken = 0
    tau = 0.0
    found: list[weakref.ref[LRScheduler]] = []
    calls: list[int] = []

    def after(around: Any, *_: object) -> None:
        nonlocal taken, tau, found, calls
        taken += 1
        if taken in _LOOKS:
            if taken == _LOOKS[0]:
                found = [weakref.ref(each) for each in _schedulers_of(around)]
            tau = around.known_effective_steps
            calls = _calls(found)
            return
        if taken - _LOOKED_AT not in _LOOKS:
            return
        advance = around.known_effective_steps - tau
        counted = any(
            now - then == _LOOKED_AT
            for then, now in zip(calls, _calls(found), strict=True)
        )
        wrong = counted and advance >= 1.2 * _LOOKED_AT
        if wrong or taken - _LOOKED_AT == _LOOKS[-1]:
            hook.remove()
        if wrong:
            warn_on_first_worker(
                f"scheduler.step() was called {_LOOKED_AT} times in {_LOOKED_AT} "
                f"optimizer steps, which were worth {advance:.1f} steps of the base "
                "batch. AdaScale's learning rate is that of the schedule at τ, times "
                "the gain, and training ends at τ ≥ T. Call it until its count is τ: "
                "while scheduler.last_epoch < min(int(optimizer.effective_steps), T): "
                "scheduler.step(). TauSchedule(optimizer, scheduler, 'step', "
                "total_steps=T) does so by itself. If the schedule was made for fewer "
                "steps on purpose, it is right."
            )

    hook = wrapper.register_step_post_hook(after)


def _schedulers_of(wrapper: Any) -> list[LRScheduler]:
    """Return the schedulers of an optimizer. torch's schedulers refer to their
    optimizer, and not the other way round.
    """
    optimizers = (wrapper, wrapper.wrapped)
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler)
        and any(
            getattr(each, "optimizer", None) is optimizer for optimizer in optimizers
        )
    ]


def _calls(schedulers: Sequence[weakref.ref[LRScheduler]]) -> list[int]:
    """Return how often each scheduler was stepped; -1 if it does not count, or is
    gone.
    """
    return [getattr(each(), "last_epoch", -1) for each in schedulers]


# ---- steps of the wrapped optimizer --------------------------------------------------


def warn_of_steps_past(wrapper: Any, steps: int = 5) -> None:
    """Warn once if a loop steps the wrapped optimizer, or one that it holds as SAM
    does, and never the wrapper.
    """
    optimizer: Optimizer = wrapper.wrapped
    outer = weakref.ref(wrapper)
    taken = 0
    watched = [part for part, _ in parts_of(optimizer)]
    advice: dict[int, str] = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and not state_of(optimizer).shared:
            watched.append(value)
        advice[id(value)] = (
            f"Attach the one inside: inner, schedule = attach(model, optimizer.{name}, "
            f"...); optimizer.{name} = inner."
        )

    def stepped(each: Optimizer, *_: object) -> None:
        nonlocal taken
        taken += 1
        around = outer()
        if taken == steps and around is not None:
            warn_at_user(
                f"{type(each).__name__}.step() has run {steps} times, and step() of "
                "the AdaScale around it not once: weights move without the gain, τ "
                f"stays at {around.effective_steps:g}, and the schedule at its start. "
                f"{advice.get(id(each), 'Call step() of what attach() or AdaScale() returned.')}"
            )

    def own_step(around: Any, *_: object) -> None:
        while hooks:
            hooks.pop().remove()
        around.has_step_hooks = (
            len(around._optimizer_step_pre_hooks)
            + len(around._optimizer_step_post_hooks)
            > 1
        )

    hooks = [each.register_step_post_hook(stepped) for each in watched]
    wrapper.register_step_pre_hook(own_step)
