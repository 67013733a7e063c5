"""Clip a gradient whose parts are on several workers: the norm of the whole takes one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def norm_over_workers(
    grads: Sequence[Tensor],
    flag: bool,
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the p-norm of a gradient whose parts are on several workers, and a tensor above zero if any worker's flag is true.

    Collective.

    Args:
        grads: This worker's part.
        flag: Sent with the norm.
        norm_type: p.
        group: The workers; the default group if None.
        device: Device of the norm.
        dtype: Dtype of the norm, the same on all workers. It may not depend on the gradients of one worker.
    """
    total = torch.nn.utils.get_total_norm(grads, norm_type).to(device, dtype)
    largest = norm_type == float("inf")
    both = torch.stack([total if largest else total**norm_type, torch.full_like(total, float(flag))])
    dist.all_reduce(both, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    total, raised = both.unbind()
    if not largest:
        total = total ** (1 / norm_type)
    return total, raised
