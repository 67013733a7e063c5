"""What ``torch.compile`` is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["uncompiled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Have a compiled training step call the function as it is written, as it does torch's own optimizers.

    ``torch.compiler.disable`` does the same, but imports Dynamo when it decorates, which takes a second.
    """
    return cast(_Function, torch._disable_dynamo(function))
