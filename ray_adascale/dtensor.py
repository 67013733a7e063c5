"""DTensors, told from other tensors without importing them: that takes most of a second, and few runs have any."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor"]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a ``torch.distributed.tensor.DTensor``; whoever has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
