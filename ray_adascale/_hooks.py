"""The hooks that users register around an optimizer's step and state dict, for classes whose own methods replace torch's."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from torch.optim import Optimizer
from torch.optim import optimizer as torchs

_Step = TypeVar("_Step", bound=Callable[..., Any])


def global_step_hooks() -> bool:
    """Whether a hook is registered on the steps of all optimizers. torch has no public list of them."""
    return bool(torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks)


def around_own_step(step: _Step) -> _Step:
    """Call the hooks of ``register_step_pre_hook`` and ``register_step_post_hook`` around the ``step()`` of an outer optimizer.

    torch would call the hooks on all optimizers here as well, and the optimizer inside calls them already: once a step.
    """

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:  # the hooks' arguments begin with the optimizer
        self: Optimizer = args[0]
        for before in self._optimizer_step_pre_hooks.values():
            changed = before(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        result = step(*args, **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return result

    call.hooked = True  # type: ignore[attr-defined]  # torch's mark of a step() that calls hooks
    return cast(_Step, call)


def before_save(*optimizers: Optimizer) -> None:
    """Call the hooks of ``register_state_dict_pre_hook``, in this order of the optimizers."""
    for optimizer in optimizers:
        for hook in optimizer._optimizer_state_dict_pre_hooks.values():
            hook(optimizer)


def after_save(state_dict: dict[str, Any], *optimizers: Optimizer) -> dict[str, Any]:
    """Call the hooks of ``register_state_dict_post_hook``; return the state dict, which they may replace."""
    return _replaced(state_dict, optimizers, "_optimizer_state_dict_post_hooks")


def before_load(state_dict: dict[str, Any], *optimizers: Optimizer) -> dict[str, Any]:
    """Call the hooks of ``register_load_state_dict_pre_hook`` with a shallow copy; return it, or what they replace it by."""
    return _replaced(state_dict.copy(), optimizers, "_optimizer_load_state_dict_pre_hooks")


def _replaced(state_dict: dict[str, Any], optimizers: Iterable[Optimizer], registry: str) -> dict[str, Any]:
    for optimizer in optimizers:
        for hook in getattr(optimizer, registry).values():
            answer = hook(optimizer, state_dict)
            state_dict = state_dict if answer is None else answer
    return state_dict


def after_load(*optimizers: Optimizer) -> None:
    """Call the hooks of ``register_load_state_dict_post_hook``."""
    for optimizer in optimizers:
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)


def without_load_hooks(share: Optimizer) -> Optimizer:
    """Return a worker's share of an optimizer without the load hooks of the whole, which get the whole state."""
    share._optimizer_load_state_dict_pre_hooks = OrderedDict()
    share._optimizer_load_state_dict_post_hooks = OrderedDict()
    return share
