"""Adam's metric: gradients divided by √v, so that noise and signal are measured in
the units of Adam's own step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer


def adam_preconditioner(optimizer: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function for ``AdaScale(..., precondition=...)`` that divides gradients
    as Adam does, for norms in its metric.

    It computes ``g / (√(v / (1 − β₂^t)) + ε)`` with v and t of the last step, and ``g``
    before the first step (Kingma & Ba, arXiv 1412.6980, algorithm 1, without the
    present step's gradient in v: it is not known yet).

    The state of every parameter must be here: not with OSS or other sharded state.

    Args:
        optimizer: ``Adam`` or ``AdamW``, the one that steps.

    Returns:
        Maps (parameter, gradient) to a float32 (or float64) tensor; no host
        synchronization.

    Raises:
        ValueError: The optimizer is of another class.
    """
    if not isinstance(optimizer, Adam | AdamW):
        raise ValueError(
            "Adam-preconditioned statistics need torch.optim.Adam or AdamW, not "
            f"{type(optimizer).__name__}. Choose another rule; with OSS, leave "
            "optimizer state unsharded (sharding='none')."
        )
    # of the group, since load_state_dict makes new group dicts
    index: dict[Tensor, int] = {}

    def precondition(param: Tensor, grad: Tensor) -> Tensor:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        state = optimizer.state.get(param)
        if not state:
            return grad.to(dtype)
        if param not in index:
            index.update(
                (p, i)
                for i, group in enumerate(optimizer.param_groups)
                for p in group["params"]
            )
        group = optimizer.param_groups[index[param]]
        # v̂ = v / (1 − β₂^t); v = max over steps with AMSGrad
        if group.get("amsgrad"):
            second = state["max_exp_avg_sq"]
        else:
            second = state["exp_avg_sq"]
        # `step` is a float32 tensor, maybe on the device, and 1 − 0.999 has three
        # digits less than 0.999.
        correction = 1 - group["betas"][1] ** torch.as_tensor(state["step"]).double()
        root = (second.to(dtype) / correction).sqrt_()
        return grad.to(dtype) / root.add_(group["eps"])

    return precondition
