"""The hooks that users register around an optimizer's state dict, for classes whose own methods replace torch's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer


def before_save(*optimizers: Optimizer) -> None:
    """Call the hooks of ``register_state_dict_pre_hook``, in this order of the optimizers."""
    for optimizer in optimizers:
        for hook in optimizer._optimizer_state_dict_pre_hooks.values():
            hook(optimizer)


def after_save(state_dict: dict[str, Any], *optimizers: Optimizer) -> dict[str, Any]:
    """Call the hooks of ``register_state_dict_post_hook``; return the state dict, which they may replace."""
    for optimizer in optimizers:
        for hook in optimizer._optimizer_state_dict_post_hooks.values():
            answer = hook(optimizer, state_dict)
            state_dict = state_dict if answer is None else answer
    return state_dict


def before_load(state_dict: dict[str, Any], *optimizers: Optimizer) -> dict[str, Any]:
    """Call the hooks of ``register_load_state_dict_pre_hook`` with a shallow copy; return it, or what they replace it by."""
    state_dict = state_dict.copy()
    for optimizer in optimizers:
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
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
