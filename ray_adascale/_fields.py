"""Checks of the fields of settings and recipes, declared with the fields, as in
``field(default=1, metadata=COUNT)``.

Each check returns a value as plain Python, or raises an error that names the field and
what it must be. It loads no torch.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeVar

from ._errors import RecipeError, SettingError, check_count, short
from ._files import has_credentials, without_credentials

Check = Callable[[str, Any], Any]
"""Maps a field's name and value to the value as plain Python."""


def by(check: Check) -> dict[str, Check]:
    """Return the metadata of a field with this check."""
    return {"check": check}


_Class = TypeVar("_Class", bound=type)


def hinting(cls: _Class) -> _Class:
    """Return the dataclass with a ``TypeError`` for an unknown field that names the
    nearest field, or all of them.
    """
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = sorted(each.name for each in fields(cls))

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        for name in settings.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f" (is {near[0]!r} meant?)"
                if near
                else f". Its fields are {', '.join(known)}"
            )
            raise TypeError(f"{cls.__name__} has no field {name!r}{hint}.")
        init(self, *args, **settings)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def check_fields(owner: Any, called: str = "") -> None:
    """Check the fields of a dataclass by their own checks, or by types: ``bool`` and
    ``Literal["min", "max"] | None``.

    Args:
        owner: The object. Its fields become plain Python.
        called: Its class in the error; empty for names alone.

    Raises:
        SettingError: A value is not what its check requires.
    """
    for each in fields(owner):
        literal = re.fullmatch(r"Literal\[(.*?)\]( \| None)?", str(each.type))
        by_type = literal and one_of(
            *re.findall(r"\w+", literal[1]), *([None] if literal[2] else [])
        )
        if each.type == "bool":
            by_type = flag
        if check := each.metadata.get("check", by_type):
            try:
                object.__setattr__(
                    owner, each.name, check(each.name, getattr(owner, each.name))
                )
            except SettingError as error:
                error.owner = called
                raise


def refuse_credentials(where: str, value: Any) -> None:
    """Check that hyperparameters have no URI with credentials: they are stored with the
    recipe, and printed.

    Args:
        where: The value's name in the error.
        value: The hyperparameters, or a value among them.

    Raises:
        RecipeError: There is such a URI.
    """
    if isinstance(value, str) and has_credentials(value):
        raise RecipeError(
            f"Invalid {where}={without_credentials(value)!r}: credentials in a URI "
            "would be stored and printed with the hyperparameters. Read them from the "
            "environment in the workload."
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_credentials(f"{where}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            refuse_credentials(f"{where}[{i}]", item)


def json_value(where: str, value: Any) -> Any:
    """Return a copy of ``value`` in JSON's types.

    Args:
        where: The value's name in the error.
        value: Numbers, strings, booleans, None, NumPy scalars, and lists and dicts of
            them.

    Raises:
        RecipeError: The value has another type, which a recipe can't keep, or has
            credentials.
    """
    import numpy as np  # here, since the help of the command line loads this module

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (enums, numpy.float64) lose their class, as in the file.
    if isinstance(value, str):
        refuse_credentials(where, value)
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecipeError(
                f"Invalid {where}={value}. JSON has no such number; use None or a "
                "string instead."
            )
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RecipeError(
                    f"Invalid {where}: the key {key!r} is not a string, as JSON "
                    "requires."
                )
        return {
            str.__str__(key): json_value(f"{where}.{key}", item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [json_value(f"{where}[{i}]", item) for i, item in enumerate(value)]
    raise RecipeError(
        f"Invalid {where}={short(value)}: {type(value).__name__} is no JSON value. "
        "Search over numbers and strings: use a string as its name, and look the "
        "object up in the workload."
    )


def json_object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"Invalid {where}: {short(value)}. Must be a dict.")
    checked: dict[str, Any] = json_value(where, value)
    return checked


def must_be(
    what: str,
    holds: Callable[[Any], bool],
    plain: Callable[[Any], Any] = lambda value: value,
) -> Check:
    """Return the check that a value is what the error names.

    Args:
        what: Names the values that are allowed.
        holds: Whether a value is one of them.
        plain: Returns the value as plain Python.
    """

    def check(where: str, value: Any) -> Any:
        if not holds(value):
            raise SettingError(f"Invalid {{}}. Must be {what}.", "", **{where: value})
        return plain(value)

    return check


def integer(minimum: int | None = 1) -> Check:
    return lambda where, value: check_count(where, value, minimum)


def one_of(*allowed: str | None) -> Check:
    def holds(value: Any) -> bool:
        return (value is None or isinstance(value, str)) and value in allowed

    return must_be(
        f"one of {', '.join(map(repr, allowed))}",
        holds,
        lambda value: allowed[allowed.index(value)],
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    with suppress(OverflowError):
        return _is_number(value) and math.isfinite(value)
    return False


def within(what: str, holds: Callable[[float], bool]) -> Check:
    """Return the check of a finite number in a range."""
    return must_be(what, lambda value: _is_finite(value) and holds(value), float)


def optional(check: Check) -> Check:
    """Return the check of a value that may be None."""
    return lambda where, value: None if value is None else check(where, value)


def _is_flag(value: Any) -> bool:
    # NumPy, which is slow to load, has a class of its own
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


flag = must_be("True or False", _is_flag, bool)
"""A text such as "no" would be true."""
number = must_be("a finite number", _is_finite, float)
COUNT = by(integer())
MAYBE_COUNT = by(optional(integer()))
MAYBE_FUNCTION = by(optional(must_be("a function", callable)))


def positive(what: str = "a positive number") -> Check:
    return must_be(what, lambda value: _is_number(value) and value > 0)


def clip(where: str, value: Any) -> str | float | None:
    """Return a valid ``grad_clip``: None, a positive number, or a text such as "2x".
    A number as text becomes the number.
    """
    if value in (None, "none"):  # as typed on the command line
        return None
    text = isinstance(value, str)
    with suppress(ValueError, TypeError):
        number = float(value.removesuffix("x") if text else value)
        if (
            number > 0
            and not isinstance(value, bool)
            and (math.isfinite(number) or not text or value == "inf")
        ):
            return value if text and value.endswith("x") else number
    what = (
        "Invalid {}. Must be a positive number, or a multiple of the expected norm "
        'such as "2x".'
    )
    raise SettingError(what, "", **{where: value})


KEPT_SETTINGS: dict[str, Check] = {
    "precision": one_of("fp32", "bf16", "fp16"),
    "grad_clip": clip,
    "shuffle": flag,
    "drop_last": flag,
}
"""The settings of a run that a recipe keeps, because they change what the base run
trains; and their checks.
"""
