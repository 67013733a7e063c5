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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._torch import Versions, unwrapped_name, versions
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

_SAME = 1e-3
"""Largest relative difference between two norms of the same gradient."""
_LEAST_HALVINGS = 8
"""A gradient that two steps have divided by 2 at least this often was unscaled."""


class LossScale:
    """Checks in the first measured steps of a loop of the user's that the loss scale was
    removed from the gradient, once, and that AdaScale knows of it.

    Compares the gradient that the last backward pass has left with that of
    ``step()``. Clipping makes the latter smaller, but not by just this factor.
    """

    def __init__(self) -> None:
        self._left = 2
        self._halvings: float | None = None

    def check(self, sums: StepSums, gradients: Sequence[Tensor | None]) -> None:
        """Look at a step before it is taken. Waits for the device.

        Args:
            sums: Its sums, with the norms as measured: with the loss scale.
            gradients: Those that the optimizer steps with.

        Raises:
            RuntimeError: The loss scale is still in the gradient, was removed twice, or
                AdaScale does not know of it.
        """
        if self._left == 0 or not sums.measured:
            return
        measured = float(sums.numbers["c"].sum().sqrt()) / sums.plan.multiple_of_mean
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        stepped = float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0
        if not (0 < measured < math.inf and 0 < stepped < math.inf):
            return  # a skipped step
        self._left -= 1
        removed = measured / stepped
        if "loss_scale" not in sums.numbers:
            self._check_unknown(removed)
            return
        scale = float(sums.numbers["loss_scale"][0])
        if scale < 2**_LEAST_HALVINGS:
            return
        if math.isclose(removed, 1, rel_tol=_SAME):
            raise RuntimeError(
                f"The scaler's loss scale, {scale:g}, was not removed from the gradient: "
                "the loop calls optimizer.step(). Write scaler.step(optimizer) and "
                "scaler.update() in its place. If the loss is not scaled, leave out "
                "grad_scaler=scaler."
            )
        if math.isclose(removed, scale**2, rel_tol=_SAME):
            raise RuntimeError(
                f"The gradient was divided by the loss scale, {scale:g}, twice: "
                "scaler.unscale_() got the optimizer inside, and scaler.step() the one "
                "that attach() or AdaScale() returned. Pass that one to both."
            )

    def _check_unknown(self, removed: float) -> None:
        """Raise if two steps have divided the gradient by the same large power of 2."""
        halvings = round(math.log2(removed))
        if halvings < _LEAST_HALVINGS or not math.isclose(
            removed, 2.0**halvings, rel_tol=_SAME
        ):
            self._left = 0
            return
        if self._left == 0:
            raise RuntimeError(
                f"The gradient was divided by {2**halvings} between the last backward "
                "pass and step(): a GradScaler scales the loss. Its scale changes as "
                "training goes on, and the gain would be wrong then. Pass the scaler: "
                "attach(..., grad_scaler=scaler), or AdaScale(..., grad_scaler=scaler)."
            )


# ---- a scheduler of the loop's -------------------------------------------------------

_LOOKS = (10, 100, 1000)
"""Steps after which a loop's scheduler is looked at for :data:`_LOOKED_AT` steps."""
_LOOKED_AT = 10


def warn_of_steps_counted(wrapper: Any) -> None:
    """Warn once if the loop calls ``scheduler.step()`` once in each optimizer step, as
    without AdaScale, while τ advances by more.

    Args:
        wrapper: An AdaScale whose loop drives the schedule.
    """
    taken = 0
    before: tuple[float, dict[int, int]] = (0.0, {})

    def after(around: Any, *_: object) -> None:
        nonlocal taken, before
        taken += 1
        if taken in _LOOKS:
            before = around.known_effective_steps, _calls_of_schedulers(around)
            return
        if taken - _LOOKED_AT not in _LOOKS:
            return
        if taken - _LOOKED_AT == _LOOKS[-1]:
            hook.remove()
        tau, calls = before
        advance = around.known_effective_steps - tau
        now = _calls_of_schedulers(around)
        counted = any(now[each] - calls.get(each, 0) == _LOOKED_AT for each in now)
        if not counted or advance < 1.2 * _LOOKED_AT:
            return
        hook.remove()
        warn_on_first_worker(
            f"scheduler.step() was called {_LOOKED_AT} times in {_LOOKED_AT} optimizer "
            f"steps, which were worth {advance:.1f} steps of the base batch. The "
            "learning rates of AdaScale are those of step τ, and training ends at τ ≥ "
            "T. Call it until its count is τ: while scheduler.last_epoch < "
            "min(int(optimizer.effective_steps), T): scheduler.step(). "
            "TauSchedule(optimizer, scheduler, 'step', total_steps=T) does so by "
            "itself. If the schedule was made for fewer steps on purpose, it is right."
        )

    hook = wrapper.register_step_post_hook(after)


def _calls_of_schedulers(wrapper: Any) -> dict[int, int]:
    """Return how often each scheduler of an optimizer was stepped, by its id. torch's
    schedulers refer to their optimizer, and not the other way round.
    """
    optimizers = (wrapper, wrapper.wrapped)
    return {
        id(each): each.last_epoch
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler)
        and any(
            getattr(each, "optimizer", None) is optimizer for optimizer in optimizers
        )
        and isinstance(getattr(each, "last_epoch", None), int)
    }


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
