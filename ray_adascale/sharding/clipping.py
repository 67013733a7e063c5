"""Clipping of a gradient of which each worker has a part: the norm of the whole, in one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class NormOverWorkers:
    """The p-norm of gradients that the workers of a group hold together.

    Attributes:
        group: The workers; the default group if None.
        norm_type: p.
        device: Device of the norm.
        wide: Whether the norm is float64 on all workers, else float32. It may not depend on the gradients of one worker.
    """

    group: dist.ProcessGroup | None
    norm_type: float
    device: torch.device
    wide: bool

    def __call__(self, grads: Sequence[Tensor], flag: bool) -> tuple[Tensor, Tensor]:
        """Return the norm, and a tensor above zero if any worker's ``flag`` is true. Collective.

        Args:
            grads: This worker's part.
            flag: Sent with the norm.
        """
        total = torch.nn.utils.get_total_norm(grads, self.norm_type)
        total = total.to(self.device, torch.float64 if self.wide else torch.float32)
        largest = self.norm_type == float("inf")
        both = torch.stack([total if largest else total**self.norm_type, torch.full_like(total, float(flag))])
        dist.all_reduce(both, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        total, raised = both.unbind()
        if not largest:
            total = total ** (1 / self.norm_type)
        return total, raised
