"""Whether a function can be sent to Ray's workers, and the variable that prevents it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from ray import cloudpickle
from ray.util import inspect_serializability

from .cluster import portable


def pickling_problem(function: Callable[..., Any]) -> str | None:
    """Return why the function can't be sent to the workers, with the variable's name if Ray finds it; None if it can be sent."""
    try:
        cloudpickle.dumps(portable(function))
    except Exception as e:
        cause = f"{type(e).__name__}: {e}"
    else:
        return None
    name = getattr(function, "__qualname__", repr(function))
    _, failures = inspect_serializability(function, name, depth=8, print_file=io.StringIO())
    found = sorted(
        f"{' → '.join(map(str, failure.path[1:]))} (a {type(failure.obj).__module__}.{type(failure.obj).__qualname__})"
        for failure in failures
        if len(failure.path) > 1
    )
    if not found:
        return (
            f"The workload {name!r} can't be sent to the workers. {cause}. It uses such an object from outside, perhaps in a "
            "function within it. Make the object inside the function, so that each worker has its own."
        )
    return (
        f"The workload {name!r} can't be sent to the workers, because of {', '.join(found)}, which it uses. Make it inside the "
        f"function, so that each worker has its own. ({cause})"
    )
