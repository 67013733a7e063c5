"""Sharding a model with FSDP2 (``torch.distributed.fsdp.fully_shard``), together with its optimizer.

Importing this module takes most of a second, for DTensor, so it is imported where a model is to be sharded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from .._warn import warn_on_first_worker
from ..measure.autograd import is_hooked
from .collectives import send_from_first

# Smallest number of elements of a block that is gathered by itself: smaller ones are not worth a message of their own.
_BLOCK_NUMEL = 1 << 20


def shard_model(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Apply ``fully_shard`` to a plain model over all workers, and give its optimizer the shards. Collective.

    Every large element of a ``ModuleList`` or ``Sequential`` is gathered by itself, the rest with the root. All workers start
    with rank 0's values. A model to which ``fully_shard`` was applied already is left unchanged.

    Raises:
        ValueError: The optimizer has state already.
    """
    if isinstance(model, FSDPModule):
        return
    if any(optimizer.state.values()):
        raise ValueError("The optimizer has state already. Shard the model before its first step, or fully_shard it.")
    optimizer.state.clear()  # schedule-free optimizers make empty entries, which would keep the whole parameters
    names = {param: name for name, param in model.named_parameters()}
    if hooked := [name for param, name in names.items() if is_hooked(param)]:
        warn_on_first_worker(
            f"fully_shard makes new parameters, and the hooks on {hooked[0]} (one of {len(hooked)}) are lost with the old one. "
            'sharding="zero2" keeps hooks on parameters.'
        )
    for tensor in [*model.parameters(), *model.buffers()]:  # one by one: together they would need the memory twice
        send_from_first([tensor])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for container in reversed(list(model.modules())):  # the innermost first
        for block in container.children() if isinstance(container, nn.ModuleList | nn.Sequential) else ():
            large = sum(p.numel() for p in block.parameters()) >= _BLOCK_NUMEL
            if large and not isinstance(block, FSDPModule | nn.ModuleList):
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[param]] for param in group["params"]]
