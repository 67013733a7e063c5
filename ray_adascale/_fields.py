"""Checks of the fields of a JSON document. Each returns a value as plain Python, or raises an error that names the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ._errors import RecipeError

Check = Callable[[str, Any], Any]
"""Maps a field's name and value to the value as plain Python."""


def json_value(where: str, value: Any) -> Any:
    """Return a copy of ``value`` in JSON's types.

    Args:
        where: The value's name in the error.
        value: Numbers, strings, booleans, None, NumPy scalars, and lists and dicts of them.

    Raises:
        RecipeError: The value has another type, which a recipe can't keep.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (enums, numpy.float64) lose their class, as in the file.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecipeError(f"Invalid {where}={value}. JSON has no such number; use None or a string instead.")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RecipeError(f"Invalid {where}: the key {key!r} is not a string, as JSON requires.")
        return {str.__str__(key): json_value(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(f"{where}[{i}]", item) for i, item in enumerate(value)]
    raise RecipeError(
        f"Invalid {where}={short(value)}: {type(value).__name__} is no JSON value. Search over numbers and "
        "strings: use a string as its name, and look the object up in the workload."
    )


def json_object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"Invalid {where}: {short(value)}. Must be a dict.")
    checked: dict[str, Any] = json_value(where, value)
    return checked


def must_be(what: str, holds: Callable[[Any], bool], plain: Callable[[Any], Any] = lambda value: value) -> Check:
    """Return the check that a value is what the error names.

    Args:
        what: Names the values that are allowed.
        holds: Whether a value is one of them.
        plain: Returns the value as plain Python.
    """

    def check(where: str, value: Any) -> Any:
        if not holds(value):
            raise RecipeError(f"Invalid {where}={short(value)}. Must be {what}.")
        return plain(value)

    return check


def integer(minimum: int) -> Check:
    def holds(value: Any) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= minimum)

    return must_be(f"an integer of at least {minimum}", holds, int)


def one_of(*allowed: str | None) -> Check:
    def holds(value: Any) -> bool:
        return (value is None or isinstance(value, str)) and value in allowed

    return must_be(f"one of {', '.join(map(repr, allowed))}", holds, lambda value: allowed[allowed.index(value)])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def number(where: str, value: Any) -> float:
    return float(_FINITE(where, _NUMBER(where, value)))


def within(what: str, holds: Callable[[float], bool]) -> Check:
    """Return the check of a number in a range."""
    in_range = must_be(what, holds, float)
    return lambda where, value: in_range(where, _FINITE(where, _NUMBER(where, value)))


def optional(check: Check) -> Check:
    """Return the check of a value that may be None."""
    return lambda where, value: None if value is None else check(where, value)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_NUMBER, _FINITE = must_be("a number", _is_number), must_be("finite", _is_finite)
