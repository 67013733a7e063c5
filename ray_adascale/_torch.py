"""What several rooms need of torch's corners: DTensors told apart without their import, functions that Dynamo leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "uncompiled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a ``torch.distributed.tensor.DTensor``.

    Whoever has one has imported its module; importing it here would take most of a second, and few runs have any.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def uncompiled(function: _Function) -> _Function:
    """Have a compiled training step call the function as it is written, as it does torch's own optimizers.

    ``torch.compiler.disable`` does the same, but imports Dynamo when it decorates, which takes a second.
    """
    return cast(_Function, torch._disable_dynamo(function))
