"""Warnings that point at the user's own line."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import torch
import torch.distributed as dist

# torch's decorators, hooks and schedulers call this package, so their frames lie between the user's line and ours.
_NOT_THE_USERS = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))


def warn_at_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the innermost line outside this package and torch, or the outermost line if there is none."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if not os.path.abspath(frame.f_code.co_filename).startswith(_NOT_THE_USERS):
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def warn_on_first_worker(message: str) -> None:
    """Warn at the user's line, on rank 0 alone. For what all workers see alike."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warn_at_user(message)
