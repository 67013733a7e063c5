"""Warnings that point at the user's own line, and that ``PYTHONWARNINGS=ignore`` does
not hide.

``ray up`` exports that variable, so every driver and worker of such a cluster inherits
it. The classes of these warnings have a filter of their own before those of the
variable. A filter of the user's program, or Python's option ``-W``, hides them as
usual.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType


class AdaScaleWarning(UserWarning):
    """A warning of this package."""


class AdaScaleRuntimeWarning(AdaScaleWarning, RuntimeWarning):
    """A warning of this package about a fault during a run."""


def _hear_in_spite_of_environment() -> None:
    """Insert the filter, if ``PYTHONWARNINGS`` ignores warnings and no option of
    Python's says otherwise.
    """
    options = [
        option for option in os.environ.get("PYTHONWARNINGS", "").split(",") if option
    ]
    actions = [option.strip().partition(":")[0] for option in options]
    ignored = any(action and "ignore".startswith(action) for action in actions)
    if (
        ignored
        and sys.warnoptions[-len(options) :] == options
        and not any("error".startswith(a) for a in actions)
    ):
        warnings.filterwarnings("default", category=AdaScaleWarning)


# as the package is imported, before the filters of the user's program
_hear_in_spite_of_environment()


def warn_at_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the innermost line outside this package and torch, or
    the outermost line if there is none.

    Args:
        message: The text.
        category: UserWarning or RuntimeWarning; the warning is of this package's
            subclass.
    """
    # torch's decorators, hooks and schedulers call this package, so their frames lie
    # between the user's line and ours.
    files = (__file__, getattr(sys.modules.get("torch"), "__file__", None) or __file__)
    not_the_users = (
        *(os.path.dirname(os.path.abspath(file)) + os.sep for file in files),
        contextlib.__file__,
    )
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if not os.path.abspath(frame.f_code.co_filename).startswith(not_the_users):
            break
        frame = frame.f_back
        level = level + 1
    own = (
        AdaScaleRuntimeWarning
        if issubclass(category, RuntimeWarning)
        else AdaScaleWarning
    )
    warnings.warn(message, own, stacklevel=level + 1)


def warn_on_first_worker(message: str) -> None:
    """Warn at the user's line, on rank 0 alone. For what all workers see alike."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warn_at_user(message)
