"""What is watched in a loop that another library or the user owns: what
:func:`ray_adascale.attach` can't see in its arguments.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..._warn import warn_at_user, warn_on_first_worker
from ...config import AdaScaleConfig
from ...optim.adascale import AdaScaleOptimizer
from ...optim.saved_state import without_tensors
from ...optim.tau_schedule import TauSchedule
from .users_model import UsersModel

_OF_A_RUN = (
    "shuffle",
    "num_loader_workers",
    "find_unused_parameters",
    "evaluate_every",
    "early_stop",
    "checkpoint_every_s",
    "accept_changes",
    "report_every_s",
    "step_timeout_s",
    "store_timeout_s",
)
"""Settings that only a Run uses. With attach the user's loop does this work."""
_STEPS = 10
"""Optimizer steps in which the sizes of the model's inputs are noted."""
_MOST_CALLS = 1000
"""Calls of the model without a step, after which nobody looks any more."""
_LOOK_EVERY = 50
"""Steps from one look at the model's parameters to the next."""


def warn_of_unused(config: AdaScaleConfig) -> None:
    """Warn of settings that only a Run uses."""
    defaults = {each.name: each.default for each in fields(AdaScaleConfig)}
    unused = [
        f"{name}={getattr(config, name)!r}"
        for name in _OF_A_RUN
        if getattr(config, name) != defaults[name]
    ]
    if unused:
        warn_on_first_worker(
            f"AdaScaleConfig({', '.join(unused)}) has no effect here: the loop loads, "
            "evaluates, saves and ends by itself. Write it into the loop, and leave it "
            "out of the settings."
        )


def refuse_plain_state(adascale: AdaScaleOptimizer) -> None:
    """Raise if the loop loads the state of an optimizer without AdaScale: the schedule
    would begin anew on trained weights.
    """

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        expected = adascale.statistics_state()
        if not without_tensors(state_dict, like=expected)[1]:
            raise ValueError(
                "This is the checkpoint of a run without AdaScale, or the state of the "
                "optimizer inside: it has no effective steps, so the schedule would "
                "begin anew on trained weights. Save the optimizer that attach() "
                "returned. Finish a run without AdaScale as it began, or load its "
                "weights alone and begin a new run. To go on at its step k, load it in "
                "a loop of your own, before ray_adascale.attach(..., starting_step=k)."
            )

    adascale.register_load_state_dict_pre_hook(before)


def warn_of_unclipped(wrapped: Optimizer, limit: float, steps: int = 20) -> None:
    """Warn if one of the first steps has a larger gradient than the settings say. Each
    of these steps waits for the device.

    Args:
        wrapped: The optimizer in AdaScale. Its step begins after the loop's clipping,
            also with a closure.
        limit: ``grad_clip``, the largest norm of the gradient.
        steps: Steps that are looked at.
    """
    left = steps

    def before(optimizer: Optimizer, *_: object) -> None:
        nonlocal left
        if left == 0:
            return
        left -= 1
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and not p.grad.is_sparse
        ]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        if norm > 1.01 * limit:  # also after rounding to 8 bits
            left = 0
            warn_on_first_worker(
                f"grad_clip={limit:g}, in the settings or the recipe, says that the "
                f"loop clips at this norm, and a step has a gradient of norm {norm:.4g}"
                ". The setting itself clips nothing. Write "
                f"torch.nn.utils.clip_grad_norm_(model.parameters(), {limit:g}) before "
                "optimizer.step() (max_grad_norm of the Trainer, gradient_clip_val of "
                "Lightning), or leave grad_clip out."
            )

    wrapped.register_step_pre_hook(before)


def refuse_uncounted_passes(adascale: AdaScaleOptimizer, steps: int = 10) -> None:
    """Raise in one of the first steps if it has several backward passes, on one worker
    with one declared.

    At S = 1 AdaScale measures nothing and counts no passes. Elsewhere it does so
    itself.
    """
    watched = next(
        p for group in adascale.param_groups for p in group["params"] if p.requires_grad
    )
    made = 0
    left = steps

    def begun(_: torch.Tensor) -> None:
        nonlocal made
        made = made + 1 if watched.grad is not None and bool(watched.grad.any()) else 1

    def before(*_: Any) -> None:
        nonlocal made, left
        passes = made
        made = 0
        left -= passes > 0
        if left <= 0:
            hook.remove()
        if passes > adascale.plan.passes:
            raise RuntimeError(
                f"This step has {passes} backward passes and the settings have one, so "
                "it would count for the examples of one. Set "
                f"AdaScaleConfig(accumulation={passes}); with Accelerate "
                f"Accelerator(gradient_accumulation_steps={passes}), and `with "
                "accelerator.accumulate(model):` around each pass. If the passes are "
                "of several losses of the same examples, add the losses: (loss + "
                "other_loss).backward()."
            )

    hook = watched.register_hook(begun)
    adascale.register_step_pre_hook(before)


def warn_of_other_batch(model: nn.Module, schedule: TauSchedule) -> None:
    """Warn once if the model gets micro-batches of another size than the settings say,
    so that S would be wrong. The first ten steps look.

    Args:
        model: The model that the loop calls, without DistributedDataParallel.
        schedule: Has the plan of a step, which a client may change.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return  # has no hooks
    sizes = _InputSizes()
    sizes.handle = model.register_forward_pre_hook(sizes, with_kwargs=True)
    followed = weakref.ref(schedule)
    steps = 0

    def before(*_: object) -> None:
        nonlocal steps
        steps += 1
        plan = getattr(followed(), "plan", None)
        if plan is None:
            stop()
            return
        expected = plan.largest_pass
        right = expected == 1 or any(expected in each for each in sizes.of_step)
        # a call may be a part of a pass
        unknown = sizes.unknown or len(sizes.of_step) != plan.passes
        if right or unknown:
            stop()
            return
        sizes.first += [each[0] for each in sizes.of_step]
        sizes.of_step.clear()
        if steps < _STEPS:
            return
        stop()
        size, times = Counter(sizes.first).most_common(1)[0]
        # 1: a row of packed sequences. Sizes that change: nodes of graphs
        if size > 1 and times >= 0.8 * len(sizes.first):
            warn_on_first_worker(
                f"The model gets {size} examples in a pass, and the settings say "
                f"{expected}, so S and the gain would be those of another batch. Set "
                f"AdaScaleConfig(per_worker_batch_size={size}), or the loader's "
                f"batch_size={expected}. If the settings count something else than "
                "rows of the input, such as tokens, they are right."
            )

    def stop() -> None:
        sizes.remove()
        hook.remove()

    hook = schedule.optimizer.register_step_pre_hook(before)


@dataclass
class _InputSizes:
    """Notes how many examples the inputs of a model may have, in its training passes.
    Models name and arrange their inputs as they like.

    Attributes:
        of_step: For each call since the last step the sizes of the first two dimensions
            of each tensor, and their products.
        first: The first size of each call in the steps before.
        unknown: Whether an input was arranged in an unknown way.
        handle: Removes this object from the model, which can be saved and copied with
            it.
    """

    of_step: list[list[int]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    unknown: bool = False
    handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: Any, named: Any) -> None:
        if torch.compiler.is_compiling() or not (
            module.training and torch.is_grad_enabled()
        ):
            return
        tensors = _tensors([*args, *named.values()])
        if not tensors:
            self.unknown = True
            return
        shapes = [each.shape[:2] for each in tensors]
        self.of_step.append(
            [size for shape in shapes for size in (*shape, shape.numel())]
        )
        if len(self.of_step) > _MOST_CALLS:
            self.remove()  # the loop steps another optimizer

    def remove(self) -> None:
        """Remove this object from its model."""
        if self.handle is not None:
            self.handle.remove()


def _tensors(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of a model's inputs, also those in dicts; none if there is a
    list or a nested tensor, whose length may be the number of examples.
    """
    found: list[torch.Tensor] = []
    for each in inputs:
        if isinstance(each, Mapping):
            inside = _tensors([*each.values()])
            if each and not inside:
                return []
            found += inside
        elif isinstance(each, list | tuple) or (
            isinstance(each, torch.Tensor) and each.is_nested
        ):
            return []
        elif isinstance(each, torch.Tensor) and each.dim():
            found.append(each)
    return found


def warn_of_no_gradient(wrapped: Optimizer) -> None:
    """Warn if the first step of the wrapped optimizer finds no gradient.

    The hook holds no reference to AdaScale: the optimizer is the user's, and may be
    attached again.
    """
    first = iter([True])

    def before(optimizer: Optimizer, *_: object) -> None:
        if not next(first, False):
            return
        groups = optimizer.param_groups
        if all(p.grad is None for group in groups for p in group["params"]):
            warn_at_user(
                "The first step() finds no gradient. Compute the loss from the model "
                "that attach() was given."
            )

    # of the inner optimizer: after a closure, in which Lightning makes the pass
    wrapped.register_step_pre_hook(before)


def refuse_changed_model(model: nn.Module, adascale: AdaScaleOptimizer) -> None:
    """Raise if the program has replaced a part of the model that the optimizer goes on
    to train, or has added one that no group has. Every fiftieth step looks.
    """
    guard = UsersModel(
        model,
        (p for group in adascale.param_groups for p in group["params"]),
        keeps_parameters=True,
    )

    steps = itertools.count(1)

    def before(optimizer: Optimizer, *_: object) -> None:
        if next(steps) % _LOOK_EVERY == 0:
            guard.add(p for group in optimizer.param_groups for p in group["params"])
            guard.check()

    adascale.wrapped.register_step_pre_hook(before)
