"""The hooks that users register around an optimizer's step and state dict, for
classes whose own methods replace torch's.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from torch.optim import Optimizer
from torch.optim import optimizer as torchs

_Step = TypeVar("_Step", bound=Callable[..., Any])


def global_step_hooks() -> bool:
    """Whether a hook is registered on the steps of all optimizers. torch has no
    public list of them.
    """
    return bool(
        torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks
    )


def around_own_step(step: _Step) -> _Step:
    """Call the hooks of ``register_step_pre_hook`` and ``register_step_post_hook``
    around the ``step()`` of an outer optimizer.

    torch would call the hooks on all optimizers here as well, and the optimizer inside
    calls them already: once a step.
    """

    @functools.wraps(step)
    # the hooks' arguments begin with the optimizer
    def call(*args: Any, **kwargs: Any) -> Any:
        self: Optimizer = args[0]
        # copies: a hook may remove itself
        for before in [*self._optimizer_step_pre_hooks.values()]:
            changed = before(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        result = step(*args, **kwargs)
        for after in [*self._optimizer_step_post_hooks.values()]:
            after(self, args, kwargs)
        return result

    call.hooked = True  # type: ignore[attr-defined]  # torch's mark of a step() that calls hooks
    return cast(_Step, call)


def before_save(*optimizers: Optimizer) -> None:
    """Call the hooks of ``register_state_dict_pre_hook``, in this order of the
    optimizers.
    """
    _called("_optimizer_state_dict_pre_hooks", optimizers)


def after_save(state_dict: dict[str, Any], *optimizers: Optimizer) -> dict[str, Any]:
    """Call the hooks of ``register_state_dict_post_hook``; return the state dict,
    which they may replace.
    """
    return _called("_optimizer_state_dict_post_hooks", optimizers, state_dict)[0]


def before_load(state_dict: dict[str, Any], *optimizers: Optimizer) -> dict[str, Any]:
    """Call the hooks of ``register_load_state_dict_pre_hook`` with a shallow copy;
    return it, or what they replace it by.
    """
    return _called(
        "_optimizer_load_state_dict_pre_hooks", optimizers, state_dict.copy()
    )[0]


def after_load(*optimizers: Optimizer) -> None:
    """Call the hooks of ``register_load_state_dict_post_hook``."""
    _called("_optimizer_load_state_dict_post_hooks", optimizers)


def _called(
    registry: str, optimizers: Iterable[Optimizer], *states: dict[str, Any]
) -> Sequence[dict[str, Any]]:
    """Call each hook of a registry with its optimizer and the state dict, if there
    is one; return it, or its replacement.
    """
    for optimizer in optimizers:
        for hook in getattr(optimizer, registry).values():
            answer = hook(optimizer, *states)
            states = (answer,) if states and answer is not None else states
    return states


def without_load_hooks(share: Optimizer) -> Optimizer:
    """Return a worker's share of an optimizer without the load hooks of the whole,
    which get the whole state.
    """
    share._optimizer_load_state_dict_pre_hooks = OrderedDict()
    share._optimizer_load_state_dict_post_hooks = OrderedDict()
    return share
