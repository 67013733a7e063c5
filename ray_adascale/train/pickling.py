"""Whether a function can be sent to Ray's workers, and the variable that prevents it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from ray import cloudpickle
from ray.util import inspect_serializability

from .cluster import pickle_by_value, portable

__all__ = ["pickling_problem"]

_DEPTH = 8
"""Functions and objects within each other that are searched for the variable."""


def pickling_problem(function: Callable[..., Any]) -> str | None:
    """Return why the function can't be sent to the workers, with the variable's name; None if it can be sent."""
    try:
        cloudpickle.dumps(portable(function))
    except Exception as e:
        cause = f"{type(e).__name__}: {e}"
    else:
        return None
    name = getattr(function, "__qualname__", repr(function))
    _, failures = inspect_serializability(pickle_by_value(function), name, depth=_DEPTH, print_file=io.StringIO())
    variables = sorted({(" → ".join(map(str, f.path[1:])), _kind(f.obj)) for f in failures if len(f.path) > 1})
    if not variables:
        return f"The workload {name!r} can't be sent to the workers. {cause}"
    found = ", ".join(f"{path} (a {kind})" for path, kind in variables)
    return (
        f"The workload {name!r} can't be sent to the workers, because of {found}, which it uses. Make it inside the "
        f"function, so that each worker has its own. ({cause})"
    )


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
