"""A file for each kind of sharding, with all that it does in a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..._torch import is_dtensor
from ..oss import OSS, TIE
from ..shared_memory import shared_with_parameters
from .ddp import DataParallel, data_parallel
from .sharding import Sharding
from .zero2 import ShardedDataParallel, Zero2


def sharding_of(optimizer: Optimizer, model: nn.Module | None = None) -> Sharding:
    """Return the kind of sharding of an optimizer's gradients. This is the only place
    that asks for it.

    Args:
        optimizer: The user's, or an OSS.
        model: The model as the loop calls it, if it is known.
    """
    if isinstance(optimizer, OSS) and optimizer.reducer() is not None:
        return Zero2(optimizer, model)
    if any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        # here, since DTensor takes half a second to import
        from .fsdp2 import FullyShard

        return FullyShard(optimizer, model)
    if isinstance(model, DistributedDataParallel):
        return DataParallel(optimizer, model)
    return Sharding(optimizer, model)


def shard(
    name: str,
    module: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    workers: int,
    find_unused: bool,
) -> tuple[nn.Module, Optimizer]:
    """Wrap a bare model and its optimizer for a kind of sharding. Collective.

    Args:
        name: "none", "oss", "zero2" or "fsdp2".
        module: The bare model, on its device.
        optimizer: The user's.
        device: The device.
        workers: Number of workers.
        find_unused: Whether DistributedDataParallel looks for parameters that a pass
            does not use.

    Returns:
        The model to call, and the optimizer with this worker's state.

    Raises:
        ValueError: A parameter shares memory, and would get other memory.
    """
    moves = name == "fsdp2" or (name in ("oss", "zero2") and workers > 1)
    shared = shared_with_parameters(module, optimizer) if moves else None
    if shared is not None:
        raise ValueError(
            f"{shared[0]!r} and {shared[1]!r} of the model share memory. "
            f"sharding={name!r} gives each parameter memory of its own, so they would "
            f"come apart. {TIE} Or use sharding='none', or 'auto', which chooses it."
        )
    if name == "fsdp2":
        # here, since DTensor takes most of a second to import
        from .fsdp2 import shard_model

        shard_model(module, optimizer, device)
        return module, optimizer
    if name == "zero2":
        oss = OSS.wrap(optimizer)
        return ShardedDataParallel(module, oss), oss
    if name == "oss":
        optimizer = OSS.wrap(optimizer)
    if workers == 1:
        return module, optimizer
    return data_parallel(
        module, device, find_unused=find_unused, workers=workers
    ), optimizer
