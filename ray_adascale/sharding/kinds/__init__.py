"""A file for each kind of sharding, with all that it does in a step."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..._torch import is_dtensor
from ..oss import OSS
from .ddp import DataParallel
from .kind import Kind
from .zero2 import Zero2


def kind_of(optimizer: Optimizer, model: nn.Module | None = None) -> Kind:
    """Return the kind of sharding of an optimizer's gradients. This is the only place that asks for it.

    Args:
        optimizer: The user's, or an OSS.
        model: The model as the loop calls it, if it is known.
    """
    if isinstance(optimizer, OSS) and optimizer.reducer() is not None:
        return Zero2(optimizer, model)
    if any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        from .fsdp2 import FullyShard  # here, since DTensor takes half a second to import

        return FullyShard(optimizer, model)
    if isinstance(model, DistributedDataParallel):
        return DataParallel(optimizer, model)
    return Kind(optimizer, model)
