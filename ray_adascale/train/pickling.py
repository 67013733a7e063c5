"""Whether a function can be sent to Ray's workers, and the variable that prevents it."""

from __future__ import annotations

import dis
import inspect
import io
import types
from collections.abc import Callable, Iterator
from typing import Any

from ray import cloudpickle
from ray.util import inspect_serializability

from .cluster import portable

_DEPTH = 8
"""Objects within each other that are searched for the variable."""

_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")


def pickling_problem(function: Callable[..., Any]) -> str | None:
    """Return why the function can't be sent to the workers, with the variable's name; None if it can be sent."""
    try:
        cloudpickle.dumps(portable(function))
    except Exception as e:
        cause = f"{type(e).__name__}: {e}"
    else:
        return None
    name = getattr(function, "__qualname__", repr(function))
    culprits = _culprits(function, (name,), set())
    variables = sorted({(" → ".join(path[1:]), _kind(value)) for path, value in culprits if len(path) > 1})
    if not variables:
        return f"The workload {name!r} can't be sent to the workers. {cause}"
    found = ", ".join(f"{path} (a {kind})" for path, kind in variables)
    return (
        f"The workload {name!r} can't be sent to the workers, because of {found}, which it uses. Make it inside the "
        f"function, so that each worker has its own. ({cause})"
    )


def _culprits(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the variables that can't be sent, with their paths: names from the workload on.

    Args:
        value: What can't be sent.
        path: Its own path.
        seen: The functions that were searched, by id.
    """
    function = inspect.unwrap(value) if callable(value) else value
    if inspect.isfunction(function):
        if id(function) not in seen:
            seen.add(id(function))
            for name, used in _used(function).items():
                if not _can_be_sent(used):
                    yield from _culprits(used, (*path, name), seen)
        return
    # Ray searches objects well. In functions it does not find what only the functions written inside them use.
    _, failures = inspect_serializability(value, path[-1], depth=_DEPTH, print_file=io.StringIO())
    for failure in failures:
        inner = (*path[:-1], *map(str, failure.path))
        if inspect.isfunction(failure.obj):
            yield from _culprits(failure.obj, inner, seen)
        else:
            yield inner, failure.obj


def _used(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function uses, also in the functions written inside it: globals, captured ones, defaults."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    used = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            used[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    parameters = inspect.signature(function).parameters.values()
    return {**{each.name: each.default for each in parameters if each.default is not each.empty}, **used}


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
