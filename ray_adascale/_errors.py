"""The error for a setting that can't work; a setting's option on the command line;
checks of a count and of a type; and notes on the errors of others.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any


class noted:
    """A context that adds a note to an exception: which call it was, and what to look
    at.

    Args:
        note: Returns the note; empty for none.
    """

    def __init__(self, note: Callable[[], str]) -> None:
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        if isinstance(error, Exception) and (note := self._note()):
            error.add_note(note)


def as_sentences(*texts: str) -> str:
    """Return texts one after the other, with a full stop where one has no end."""
    *before, last = (text.strip() for text in texts if text.strip())
    ended = [text if text[-1] in ".:!?" else f"{text}." for text in before]
    return " ".join([*ended, last])


class SettingError(ValueError):
    """A setting that can't work. The message names the setting as the Python API does.

    Args:
        text: The message. ``{}`` stands for the settings.
        owner: The class that has the settings; empty for arguments of a function.
            :func:`check_fields` fills it in.
        **settings: The values by name. ``...`` is a value that was not given.

    Attributes:
        settings: The values by name.
    """

    def __init__(
        self, text: str, owner: str = "AdaScaleConfig", /, **settings: Any
    ) -> None:
        # unpickling calls the class with these two and restores the rest
        super().__init__(text, owner)
        self._text = text
        self.owner = owner
        self.settings = settings

    def __str__(self) -> str:
        each = ", ".join(
            f"{name}={'...' if value is ... else short(value)}"
            for name, value in self.settings.items()
        )
        return self.with_settings_as(f"{self.owner}({each})" if self.owner else each)

    def with_settings_as(self, text: str) -> str:
        """Return the message with this text for the settings."""
        return self._text.replace("{}", text, 1)


def flag_of(name: str) -> str:
    """Return the option of a setting: ``--grad-clip`` of ``grad_clip``, and
    ``--report-every`` of ``report_every_s``.
    """
    return "--" + {"patience": "early_stop"}.get(name, name).removesuffix("_s").replace(
        "_", "-"
    )


def typed(name: str, value: Any, between: str = "=") -> str:
    """Return a setting with its value as it is typed on the command line. ``...`` is
    a value that was not given.
    """
    if isinstance(value, bool) or value is ...:
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)}{between}{'none' if value is None else value}"


class RecipeError(ValueError):
    """A recipe can't be used or can't be written. The message names the field."""


def check_count(name: str, value: Any, minimum: int | None = 1) -> int:
    """Return an argument as an int. NumPy's integers and whole floats are accepted;
    True and False are not.

    Args:
        name: The argument's name.
        value: The argument.
        minimum: The smallest value allowed; None for any.

    Raises:
        SettingError: The value is no integer, or too small.
    """
    whole = isinstance(value, numbers.Integral) or (
        isinstance(value, float) and value.is_integer()
    )
    if (
        isinstance(value, bool)
        or not whole
        or (minimum is not None and value < minimum)
    ):
        least = "" if minimum is None else f" of at least {minimum}"
        raise SettingError(
            f"Invalid {{}}. Must be an integer{least}.", "", **{name: value}
        )
    return int(value)


def check_type(name: str, value: Any, kind: Any, remedy: str) -> None:
    """Check an argument's type.

    Args:
        name: The argument's name.
        value: The argument.
        kind: Its class, as for ``isinstance``.
        remedy: The message's last sentence: what it must be.

    Raises:
        ValueError: The argument has another type.
    """
    if not isinstance(value, kind):
        raise ValueError(f"Invalid {name} of type {type(value).__name__}. {remedy}")


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the number of parameters, and the names of the first ones: "2
    parameters: 'a', 'b'".
    """
    return (
        f"{len(names)} parameters: "
        f"{', '.join(map(repr, names[:most]))}{', ...' if len(names) > most else ''}"
    )


def kind_of(value: Any) -> str:
    return (
        "None"
        if value is None
        else f"a {type(value).__module__}.{type(value).__qualname__}"
    )


def clip_multiple(grad_clip: str | float | None) -> float | None:
    """Return κ of a ``grad_clip`` such as "2x"; None for a number and for no
    clipping.
    """
    return float(grad_clip[:-1]) if isinstance(grad_clip, str) else None


def workers_in_words(count: object) -> str:
    """Return ``count`` and the noun: "1 worker", "2 workers"."""
    return f"{count} worker{'' if count == 1 else 's'}"
