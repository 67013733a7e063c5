"""Which observer measures the gradients of an optimizer: by its sharding, its model and the passes of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._errors import listed
from .._torch import is_dtensor
from ..measure.observers import GradientObserver, HookObserver, PassListener
from ..sharding.observers import GradientReducer
from ..sharding.oss import OSS


def has_dtensors(optimizer: Optimizer) -> bool:
    """Whether the optimizer's parameters are sharded with ``fully_shard``."""
    return any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])


def has_sharded_gradients(optimizer: Optimizer) -> bool:
    """Whether this worker has only its share of the reduced gradient."""
    return isinstance(optimizer, OSS) and optimizer.reducer is not None and optimizer.world_size > 1


def make_observer(
    optimizer: Optimizer,
    listener: PassListener,
    *,
    workers: int,
    local: bool,
    one_pass: bool,
    model: torch.nn.Module | None,
    precondition: Callable[[Tensor, Tensor], Tensor] | None,
) -> GradientObserver:
    """Return an observer of the optimizer's gradients, with its hooks in place.

    Args:
        optimizer: The wrapped one.
        listener: Called at the begin and the end of each pass; held weakly.
        workers: Workers that share the batch.
        local: Whether a step needs the norm of each gradient sample.
        one_pass: Whether each step is known to have a single pass.
        model: The model. Of a DistributedDataParallel the communication hook is respected, and unused parameters are refused
            if it does not look for them.
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of.

    Raises:
        ValueError: ``precondition`` needs gradients that are not there.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if isinstance(optimizer, OSS):
        _refuse(precondition, "the optimizer state of all parameters on every worker, which OSS splits")
    if has_dtensors(optimizer):
        _refuse(precondition, "whole parameters and their optimizer state, which fully_shard splits over workers")
        from ..measure.fsdp2 import FSDP2Observer  # here, since DTensor takes half a second to import

        return FSDP2Observer(groups, listener, model=cast(torch.nn.Module, model), world_size=workers, local=local)
    if has_sharded_gradients(optimizer):
        oss = cast(OSS, optimizer)
        return cast(GradientReducer, oss.reducer).observe(listener, accumulating=not one_pass)
    ref = weakref.ref(model) if isinstance(model, DistributedDataParallel) else lambda: None
    return HookObserver(
        groups,
        listener,
        local=local,
        precondition=precondition,
        early=lambda: _reduces_in_one_round(ref()),
        check_unused=lambda unused: _check_unused(ref(), unused),
    )


def _reduces_in_one_round(model: DistributedDataParallel | None) -> bool:
    """Whether all collectives of a backward pass have been started when its last gradient is there, as far as is known.

    A communication hook may start further collectives when the first ones have ended (PowerSGD does), at a time that differs
    between workers. AdaScale's collective must then come after DDP's wait, or workers may differ in the order of collectives.
    """
    # torch has no public name for the hooks that were passed to register_comm_hook.
    return model is None or not model._comm_hooks


def _check_unused(model: DistributedDataParallel | None, unused: Sequence[Tensor]) -> None:
    """Raise if DDP does not reduce the gradients of a pass that did not use these parameters.

    Raises:
        RuntimeError: DDP would wait for their gradients, leave others unreduced, and raise in the next forward pass.
    """
    if model is None or not model.require_backward_grad_sync or model.find_unused_parameters or model.static_graph:
        return
    names = [name for name, p in model.module.named_parameters() if any(p is one for one in unused)]
    raise RuntimeError(
        f"A step's last backward pass gave no gradient to {listed(names)}. DistributedDataParallel then leaves other gradients "
        "unreduced. Use AdaScaleConfig(find_unused_parameters=True), in a loop of your own the argument of "
        "DistributedDataParallel; or sharding='zero2', which needs none; or freeze them before the run."
    )


def _refuse(precondition: object, needs: str) -> None:
    if precondition is not None:
        raise ValueError(f"precondition= needs {needs}. Leave it out, or train with DistributedDataParallel.")
